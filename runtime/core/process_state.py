"""State of PyTorch that threads of a process share, made safe for workers that are threads."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import checkpoint

logger = logging.getLogger(__name__)

FORWARD_AD_TIMEOUT_S = 60.0
"""Longest wait for another thread to leave forward-mode AD."""


class _Entered(threading.local):
    """Levels of forward-mode AD that a thread is inside."""

    depth = 0


_ENTERED = _Entered()
_LOCK = threading.Lock()
_FORWARD_AD = threading.RLock()


class ProcessState:
    """Restores settings of the process when the last of their holders ends.

    Subclasses restore other settings of the process.
    """

    _lock = threading.Lock()
    _users = 0
    _before: Any
    _warned: ClassVar[set[str]] = set()

    @classmethod
    def acquire(cls, *, of_call: bool = False) -> None:
        """Register a holder that starts.

        Args:
            of_call: For a call that repeats with each step: without what functions alone set.
        """
        with cls._lock:
            cls._before = cls._capture(cls._before if cls._users else None, of_call)
            cls._users += 1

    @classmethod
    def release(cls, *, once: bool = False) -> None:
        """Register the end of a holder, from any thread.

        Args:
            once: Warn of each setting once per process, for calls that repeat.
        """
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                cls._restore(cls._before, once)

    @classmethod
    @contextmanager
    def held(cls) -> Iterator[None]:
        """Hold what contexts set around a call, with one warning for each setting and process."""
        cls.acquire(of_call=True)
        try:
            yield
        finally:
            cls.release(once=True)

    @classmethod
    def _capture(cls, before: Any, of_call: bool) -> Any:
        """Values captured by earlier holders, and those that this one adds."""
        values = before or []
        return values + [read() for read in (_CONTEXTS if of_call else _READERS)[len(values) :]]

    @classmethod
    def _restore(cls, before: Any, once: bool) -> None:
        if [read() for read in _READERS[: len(before)]] == before:
            return
        changed = {}
        for setting, value in zip(_SETTINGS, before, strict=False):
            now = setting.read()  # again, since those that follow may depend on an earlier one
            if now != value and now is not _UNREADABLE and value is not _UNREADABLE:
                setting.write(value)
                changed[setting.name] = f"{setting.name} was {now} and is {value} again"
        new = [text for name, text in changed.items() if not (once and name in cls._warned)]
        cls._warned.update(changed)
        if new:
            logger.warning(
                "settings of the whole process that the workers' threads left changed are as "
                "before: %s. Contexts of several threads overlap; set what holds for all threads "
                "outside of them, before the run",
                "; ".join(new),
            )


class _Setting(NamedTuple):
    """A setting of PyTorch that holds for all threads.

    Attributes:
        name: The context, or else the function, that sets it.
        read: Returns its value.
        write: Sets it to a value of ``read``.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


_UNREADABLE = object()
"""A value that cannot be read, as its old and its new interface contradict each other."""

_OF_C = {
    "sdpa_kernel (priority)": "sdp_priority_order",
    "allow_fp16_bf16_reduction_math_sdp": "math_sdp_allow_fp16_bf16_reduction",
    "cudnn.flags (enabled)": "cudnn_enabled",
    "cudnn.flags (benchmark)": "cudnn_benchmark",
    "cudnn.flags (deterministic)": "cudnn_deterministic",
    "cudnn.flags (depthwise_kernel)": "cudnn_depthwise_kernel",
    "mkldnn.flags (enabled)": "mkldnn_enabled",
    "mkldnn.flags (deterministic)": "mkldnn_deterministic",
    "nnpack.flags": "nnpack_enabled",
    "miopen.flags": "miopen_immediate",
    "set_warn_always": "warnAlways",
    "deterministic.fill_uninitialized_memory": "deterministic_fill_uninitialized_memory",
    "allow_fp16_accumulation": "cublas_allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction (CPU)": "cpu_allow_fp16_reduced_precision_reduction",
    "preferred_linalg_library": "linalg_preferred_backend",
    "preferred_blas_library": "blas_preferred_backend",
    "preferred_rocm_fa_library": "rocm_fa_preferred_backend",
    "quantized.engine": "qengine",
}
"""Names, and the ends of the functions ``_get_`` and ``_set_`` of ``torch._C``."""
_PAIRS_OF_C = (
    *(
        (f"sdpa_kernel ({kind})", f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}")
        for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    ),
    (
        "cudnn.flags (benchmark_limit)",
        "_cuda_get_cudnn_benchmark_limit",
        "_cuda_set_cudnn_benchmark_limit",
    ),
    (
        "check_sparse_tensor_invariants",
        "_check_sparse_tensor_invariants",
        "_set_check_sparse_tensor_invariants",
    ),
    ("jit.fuser (cpu)", "_jit_can_fuse_on_cpu", "_jit_override_can_fuse_on_cpu"),
    ("jit.fuser (gpu)", "_jit_can_fuse_on_gpu", "_jit_override_can_fuse_on_gpu"),
    ("jit.fuser (NNC)", "_jit_texpr_fuser_enabled", "_jit_set_texpr_fuser_enabled"),
    ("jit.fuser (oneDNN)", "_jit_llga_enabled", "_jit_set_llga_enabled"),
    ("the default dtype (set_default_dtype)", "get_default_dtype", "_set_default_dtype"),
)
"""Names and functions of ``torch._C``."""
_OLD_PRECISIONS = {
    "set_float32_matmul_precision": "float32_matmul_precision",
    "cudnn.flags (allow_tf32)": "cudnn_allow_tf32",
    "mkldnn.flags (allow_tf32)": "onednn_allow_tf32",
}
"""Like ``_OF_C``. They also set the following, and cannot be read if those contradict them."""
_PRECISIONS = (
    ("generic", "all"),
    *(("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")),
)
"""Backends and operations that have ``fp32_precision``; a value may be that of an earlier one."""
_OF_MODULES = (
    ("opt_einsum.flags (enabled)", vars(torch.backends.opt_einsum)["m"], "enabled"),
    ("opt_einsum.flags (strategy)", vars(torch.backends.opt_einsum)["m"], "strategy"),
    ("set_checkpoint_debug_enabled", checkpoint, "_checkpoint_debug_enabled"),
    ("set_checkpoint_early_stop", checkpoint, "_enable_checkpoint_early_stop"),
    ("fx.traceback.preserve_node_meta", torch.fx.traceback, "should_preserve_node_meta"),
    ("mha.set_fastpath_enabled", torch.backends.mha, "_is_fastpath_enabled"),
    (
        "set_overwrite_module_params_on_conversion",
        torch.__future__,
        "_overwrite_module_params_on_conversion",
    ),
    ("set_swap_module_params_on_conversion", torch.__future__, "_swap_module_params_on_conversion"),
    ("set_default_validate_args", torch.distributions.Distribution, "_validate_args"),
)
"""Names, modules or classes, and their attributes."""


def _readable(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return _UNREADABLE


def _settings() -> Iterator[_Setting]:
    """All settings of the process in this build of PyTorch."""
    c: Any = torch._C
    pairs = [(name, f"_get_{end}", f"_set_{end}") for name, end in _OF_C.items()]
    for name, getter, setter in (*pairs, *_PAIRS_OF_C):
        if hasattr(c, getter) and hasattr(c, setter):
            yield _Setting(name, getattr(c, getter), getattr(c, setter))
    for name, end in _OLD_PRECISIONS.items():
        read = partial(_readable, getattr(c, f"_get_{end}"))
        yield _Setting(name, read, getattr(c, f"_set_{end}"))
    for where in _PRECISIONS:
        read = partial(c._get_fp32_precision_getter, *where)
        write = partial(c._set_fp32_precision_setter, *where)
        yield _Setting(f"fp32_precision ({', '.join(where)})", read, write)
    for kind in ("fp16", "bf16"):
        name = f"allow_{kind}_reduced_precision_reduction"
        write = getattr(c, f"_set_cublas_{name}")
        yield _Setting(name, getattr(c, f"_get_cublas_{name}"), partial(_apply, write))
    for name, module, attribute in _OF_MODULES:
        if hasattr(module, attribute):
            read, write = partial(getattr, module, attribute), partial(setattr, module, attribute)
            yield _Setting(name, read, write)
    yield _Setting(
        "anomaly detection (set_detect_anomaly)",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )
    yield _Setting(
        "use_deterministic_algorithms",
        lambda: (c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()),
        lambda value: c._set_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield _Setting(
        "set_printoptions",
        lambda: vars(torch._tensor_str.PRINT_OPTS).copy(),
        lambda value: vars(torch._tensor_str.PRINT_OPTS).update(value),
    )
    yield _Setting("torch.compiler.set_stance", _read_stance, _write_stance)


def _apply(write: Callable[..., object], value: Any) -> None:
    write(*value)


def _read_stance() -> Any:
    """The stance of ``torch.compile``; ``None``: PyTorch's own."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(dynamo, "_stance", None)  # none while another thread imports the module
    if stance is None or (stance.stance == "default" and stance == dynamo.DynamoStance()):
        return None
    return stance


def _write_stance(stance: Any) -> None:
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    dynamo._stance = stance or dynamo.DynamoStance()


_OF_CONTEXTS = (
    *(f"{name}.flags" for name in ("cudnn", "mkldnn", "nnpack", "miopen", "opt_einsum")),
    *(f"fp32_precision ({name}, all)" for name in ("generic", "cuda", "mkldnn")),
    "sdpa_kernel",
    "jit.fuser",
    "check_sparse_tensor_invariants",
    "the default dtype",
    "set_checkpoint",
    "fx.traceback",
    "anomaly detection",
    "use_deterministic_algorithms",
    "torch.compiler",
)
"""Beginnings of the names of settings that contexts set, of PyTorch or such as many users have."""
_SETTINGS = tuple(
    sorted(_settings(), key=lambda setting: not setting.name.startswith(_OF_CONTEXTS))
)
_READERS = [setting.read for setting in _SETTINGS]
_CONTEXTS = [setting.read for setting in _SETTINGS if setting.name.startswith(_OF_CONTEXTS)]


class CompileLimits:
    """Multiplies the limits of Dynamo by the number of replicas, so that they hold for each.

    Dynamo keeps what it compiles of a function in one list, with entries for each device, mode and
    shape; beyond ``torch._dynamo.config.recompile_limit`` entries the function runs uncompiled.
    Entries outlive a run, and so does the factor.

    Attributes:
        num_replicas: The most replicas of one model so far.
    """

    num_replicas = 1
    _is_installed = False

    @classmethod
    def extend(cls, num_replicas: int) -> None:
        with _LOCK:
            cls.num_replicas = max(cls.num_replicas, num_replicas)
        if "torch._dynamo" in sys.modules:
            cls.install()

    @classmethod
    def install(cls) -> None:
        """Apply the factor from now on. Imports ``torch._dynamo``; idempotent."""
        from torch._dynamo import config, convert_frame

        frames: Any = convert_frame
        names = ("recompile_limit", "accumulated_recompile_limit")

        def exceeds(cache_size: Any, compile_id: Any) -> Any:
            # Within Dynamo's lock: up to PyTorch 2.11 the values are those of all threads.
            limits = {name: cls.num_replicas * getattr(config, name) for name in names}
            with config.patch(limits):
                return of_one_replica(cache_size, compile_id)

        with _LOCK:
            if not cls._is_installed:
                cls._is_installed = True
                of_one_replica = frames.exceeds_recompile_limit
                frames.exceeds_recompile_limit = exceeds


def import_dynamo() -> None:
    """Import ``torch._dynamo``, which the first optimizer of a process does, before it."""
    if "torch._dynamo" not in sys.modules:
        is_enabled = gc.isenabled()
        gc.disable()  # a third of the time: each collection inspects all that was imported
        try:
            importlib.import_module("torch._dynamo")
        finally:
            if is_enabled:
                gc.enable()
    CompileLimits.install()


def make_thread_safe() -> None:
    """Guard the helpers of PyTorch whose state belongs to the process; idempotent.

    Forward-mode AD (``torch.func.jvp``, ``jacfwd``, ``forward_ad.dual_level``) is used by one
    thread at a time, since its levels are counted for the whole process. The values that
    ``parametrize.cached()`` keeps are those of the thread that is inside it.
    """
    with _LOCK:
        if isinstance(parametrize._cache, _ThreadCache):
            return
        _guard_forward_ad()
        _guard_parametrize()


def _guard_forward_ad() -> None:
    from torch._functorch import eager_transforms  # imports slowly

    modules: list[tuple[Any, str, str]] = [
        (eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting"),
        (forward_ad, "enter_dual_level", "exit_dual_level"),
    ]
    for module, enter, leave in modules:
        setattr(module, enter, _entering(getattr(module, enter)))
        setattr(module, leave, _leaving(getattr(module, leave)))


def _entering(enter: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _FORWARD_AD.acquire(timeout=FORWARD_AD_TIMEOUT_S):
            raise RuntimeError(
                "forward-mode AD (torch.func.jvp, dual_level) is in use in another thread, and its "
                "levels belong to the process: a rank must not wait for another one inside of it"
            )
        try:
            result = enter(*args, **kwargs)
        except BaseException:
            _FORWARD_AD.release()
            raise
        _ENTERED.depth += 1
        return result

    return guarded


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _ENTERED.depth:  # PyTorch calls this after a failed enter, too
            return None
        try:
            return leave(*args, **kwargs)
        finally:
            _ENTERED.depth -= 1
            _FORWARD_AD.release()

    return guarded


class _CachedValues(threading.local):
    """The values of one thread inside ``parametrize.cached()``; ``None`` outside."""

    values: dict[Any, Any] | None = None


class _ThreadCache(dict[Any, Any]):
    """``parametrize._cache``, with separate values for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.local = _CachedValues()
        self.num_inside = 0

    def get(self, key: Any, default: Any = None) -> Any:
        values = self.local.values
        return default if values is None else values.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.local.values is not None:
            self.local.values[key] = value


def _guard_parametrize() -> None:
    cache = _ThreadCache()

    def cached() -> Iterator[None]:
        before = cache.local.values
        cache.local.values = {} if before is None else before
        with _LOCK:
            cache.num_inside += 1
            parametrize._cache_enabled = cache.num_inside
        try:
            yield
        finally:
            cache.local.values = before
            with _LOCK:
                cache.num_inside -= 1
                parametrize._cache_enabled = cache.num_inside

    parametrize._cache = cache
    # The object stays the one that others have imported; what it calls is in its closure.
    cell = next(
        cell
        for name, cell in zip(
            parametrize.cached.__code__.co_freevars,
            parametrize.cached.__closure__ or (),
            strict=True,
        )
        if name == "func"
    )
    cell.cell_contents = cached
