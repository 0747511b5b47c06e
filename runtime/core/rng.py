"""Per-thread random generators on the CPU, in place of PyTorch's default generator.

PyTorch has one default generator for the CPU, and many operations, such as dropout, accept no
other. The order in which threads draw from it depends on timing, so runs would not be
reproducible. Each of these operations ends in one of the kernels of :data:`RANDOM_KERNELS`, which
do take a generator. Once per process, wrappers replace PyTorch's CPU kernels with
``torch.library.get_kernel`` and pass the calling thread's generator if it has one and the caller
passes none. Other operations and other devices are not affected.

``torch.get_rng_state``, ``set_rng_state``, ``manual_seed`` and ``fork_rng`` act on the thread's
generator, too: with them ``torch.utils.checkpoint`` repeats the random numbers of a forward pass.
Where autograd repeats it in a thread without a generator, ``fork_rng`` makes one for its block.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

RANDOM_KERNELS = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli.out",
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "multinomial.out",
    "normal.Tensor_Tensor",
    "normal.Tensor_Tensor_out",
    "normal.Tensor_float",
    "normal.Tensor_float_out",
    "normal.float_Tensor",
    "normal.float_Tensor_out",
    "normal_",
    "poisson",
    "random_",
    "random_.from",
    "random_.to",
    "randperm.generator_out",
    "rrelu_with_noise",
    "rrelu_with_noise.out",
    "rrelu_with_noise_",
    "uniform_",
)
"""All random CPU kernels of ATen."""

_MAX_NUMPY_SEED = 2**32 - 1
_RNG_LOCK = threading.Lock()
_installed: list[torch.library.Library] = []


class _ThreadState(threading.local):
    """A thread's generator, and a function that makes it at its first use."""

    generator: torch.Generator | None = None
    make: Callable[[], torch.Generator] | None = None


_thread = _ThreadState()


def _own_generator() -> torch.Generator | None:
    if _thread.generator is None and _thread.make is not None:
        _thread.generator = _thread.make()
    return _thread.generator


@contextmanager
def thread_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Draw this thread's random numbers on the CPU from ``generator``.

    Args:
        generator: A CPU generator; ``None``: PyTorch's default one.
    """
    if not _installed:
        install_thread_generators()
    before = _thread.generator, _thread.make
    _thread.generator, _thread.make = generator, None
    try:
        yield
    finally:
        _thread.generator, _thread.make = before


def adopt_generator(generator: torch.Generator) -> None:
    """Draw this thread's random numbers from ``generator`` from now on.

    No effect in a thread that has a generator, and in the main thread, whose own is PyTorch's
    default generator.
    """
    is_main = threading.get_ident() == threading.main_thread().ident
    if _own_generator() is None and not is_main:
        _thread.generator = generator


class CallGenerators:
    """Generators of the ranks' threads in one call, seeded from the caller's at their first use.

    A call in which a rank draws advances the caller's generator by one draw, any other leaves it as
    it is. So a seed or a state that the caller sets decides the draws of all ranks.

    Args:
        num_ranks: Number of ranks that the call runs on; a single one draws from the caller's.
    """

    def __init__(self, num_ranks: int) -> None:
        self._own = _own_generator()
        self._is_shared = num_ranks > 1
        self._has_drawn = False

    @property
    def _caller(self) -> torch.Generator:
        return self._own or torch.default_generator

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Draw the random numbers of this thread from the rank's generator."""
        made: list[tuple[torch.Generator, bytes]] = []

        def make() -> torch.Generator:
            key = state_of(self._caller) + rank.to_bytes(8)
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
            generator = torch.Generator().manual_seed(seed)
            made.append((generator, state_of(generator)))
            return generator

        before = _thread.generator, _thread.make
        _thread.generator, _thread.make = (None, make) if self._is_shared else (self._own, None)
        try:
            yield
        finally:
            _thread.generator, _thread.make = before
            if any(state_of(generator) != state for generator, state in made):
                self._has_drawn = True

    def advance(self) -> None:
        """Advance the caller's generator if a rank has drawn, once all are done."""
        if self._has_drawn:
            self._has_drawn = False
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._caller)


def state_of(generator: torch.Generator) -> bytes:
    """The state of a CPU generator."""
    return generator.get_state().numpy().tobytes()


class _DefaultGenerator:
    """Default generator of ``torch.random``, which delegates to the thread's generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own_generator() or torch.default_generator, name)


_fork_rng = torch.random.fork_rng


@contextmanager
def _fork_rng_in_thread(
    devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
) -> Iterator[None]:
    own = _own_generator() if enabled else None
    if enabled and own is None and torch._C._current_graph_task_id() != -1:
        # A backward pass repeats a forward pass, perhaps in a thread of autograd: the states that
        # it sets and restores must not be those from which other threads draw.
        own = torch.Generator()
        own.set_state(torch.default_generator.get_state())
    with ExitStack() as stack:
        if own is not None:
            stack.enter_context(thread_generator(own))
        stack.enter_context(_fork_rng(devices, enabled, *args, **kwargs))
        yield


def install_thread_generators() -> None:
    """Replace the random kernels; only the first call of the process has an effect.

    A run calls it before it starts threads, since PyTorch's kernel table must not change during an
    operation. Takes some milliseconds. Thread-safe; blocks while another thread is in it.
    """
    with _RNG_LOCK:
        if _installed:
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # PyTorch warns about the first kernel replaced in a process.
            warnings.simplefilter("ignore")
            missing = [name for name in RANDOM_KERNELS if not _replace(library, name)]
        torch.random.default_generator = _DefaultGenerator()  # type: ignore[attr-defined, assignment]
        torch.random.fork_rng = _fork_rng_in_thread
        _installed.append(library)  # last: thread_generator() reads it without the lock
    if missing:
        logger.warning(
            "this version of PyTorch (%s) has no CPU kernels %s: the operations that replace them "
            "draw from its default generator, which all threads share",
            torch.__version__,
            ", ".join(missing),
        )


def _replace(library: torch.library.Library, name: str) -> bool:
    """Replace a kernel; False if there is none of this name."""
    packet, _, overload = name.partition(".")
    try:
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        draw = torch.library.get_kernel(op, "CPU").call_boxed
    except (AttributeError, RuntimeError):
        return False
    place = [argument.name for argument in op._schema.arguments].index("generator")
    kernel = _with_generator(draw, place)
    library.impl(name, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    return True


def _with_generator(call: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A kernel that passes the thread's generator if the caller passes none.

    Args:
        place: Index of the generator among its arguments.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        generator = _own_generator()
        # PyTorch omits positional arguments that have their default value.
        if generator is not None and len(args) <= place and kwargs.get("generator") is None:
            kwargs["generator"] = generator
        return call(keys, *args, **kwargs)

    return kernel


@dataclass(frozen=True, slots=True)
class GlobalGenerators:
    """States of the process's generators on the CPU: PyTorch's default, Python's and NumPy's."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def current(cls) -> GlobalGenerators:
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def seeded_globals() -> Iterator[None]:
    """Seed Python's and NumPy's global generators from this thread's generator; restore them after.

    Only meaningful while no other thread draws from them. Has no effect if the thread has no
    generator.
    """
    if _thread.generator is None:
        yield
        return
    seed = _thread.generator.initial_seed() & _MAX_NUMPY_SEED
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seed_of(*key: int, stream: int | None = None) -> int:
    """A seed from some numbers: the upper 63 bits of the first word of NumPy's ``SeedSequence``.

    Args:
        key: The numbers, such as seed, rank and epoch.
        stream: Separates draws for different purposes with the same numbers.
    """
    sequence = np.random.SeedSequence(key, spawn_key=() if stream is None else (stream,))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1
