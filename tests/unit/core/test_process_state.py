"""State of PyTorch that belongs to the process, used by several threads at once."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import pytest
import torch
import torch._dynamo.convert_frame
import torch._dynamo.eval_frame
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import cached
from torch.utils import checkpoint

from runtime import (
    FSDP,
    DataParallelCoordinator,
    Trainer,
    create_collectives,
    current_worker,
    predict,
)
from runtime.core import process_state
from runtime.core.process_state import ProcessState, import_dynamo
from runtime.core.threads import prepare_threads
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, at_once, builder

prepare_threads()

# The first use of forward-mode AD compiles decompositions with it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def slope_by_jvp(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def slope_by_dual_level(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            torch.sin(forward_ad.make_dual(x, torch.ones_like(x)))
        ).tangent.clone()


def slope_by_jacfwd(x):
    return torch.func.jacfwd(torch.sin)(x).diagonal()


WAYS = [slope_by_jvp, slope_by_dual_level, slope_by_jacfwd]


@pytest.mark.parametrize("way", WAYS)
def test_forward_ad_of_one_thread_waits_for_that_of_another(way):
    x = torch.linspace(0, 1, 5)
    inside, done = threading.Event(), threading.Event()

    def holds():
        with forward_ad.dual_level():
            inside.set()
            assert not done.wait(0.05)  # the other thread cannot have completed
        assert done.wait(WAIT_S)

    def follows():
        assert inside.wait(WAIT_S)
        slope = way(x)
        done.set()
        return slope

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(holds), pool.submit(follows)
        torch.testing.assert_close(second.result(WAIT_S), x.cos())
        first.result(WAIT_S)


def test_forward_ad_nests_within_a_thread():
    x = torch.linspace(0, 1, 5)
    ones = torch.ones_like(x)
    second = torch.func.jvp(slope_by_jvp, (x,), (ones,))[1]
    torch.testing.assert_close(second, -x.sin())


def test_forward_ad_that_another_thread_never_leaves_is_named(monkeypatch):
    monkeypatch.setattr(process_state, "FORWARD_AD_TIMEOUT_S", 0.01)
    with (
        forward_ad.dual_level(),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="forward-mode AD"),
    ):
        pool.submit(slope_by_jvp, torch.ones(2)).result(WAIT_S)


def test_cached_parametrizations_are_those_of_the_thread():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    with ExitStack() as outer, ThreadPoolExecutor(1) as pool:
        outer.enter_context(cached())
        mine = layer.weight
        assert layer.weight is mine

        def other():
            plain = layer.weight
            with cached():
                first, again = layer.weight, layer.weight
            return plain, first, again, layer.weight

        plain, first, again, after = pool.submit(other).result(WAIT_S)
        assert first is again
        assert len({id(value) for value in (mine, plain, first, after)}) == 4
        assert layer.weight is mine  # that another thread has left the context changes nothing
    assert layer.weight is not mine
    assert not parametrize._cache_enabled


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["sync", "cadence"])
def test_weight_norm_within_cached_trains_as_on_one_device(way):
    def train(model, batch):
        with cached():
            return ((model(batch[0]) + model(batch[0]) - batch[1]) ** 2).mean()

    def net(device):
        torch.manual_seed(0)
        return torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)).double()

    x = torch.randn(32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = (x, x[:, :1])

    def final(ranks):
        b = builder(
            model=net,
            optim=lambda params: torch.optim.SGD(params, 0.05),
            train=train,
            dataset=data,
            batch_size=4 * (3 - ranks),
            epochs=2,
            ranks=ranks,
            way=way,
        )
        return b.seed(0).run().join(WAIT_S)

    together, alone = final(2), final(1)
    if way[0] is SYNC:
        for name, value in alone.params.items():
            torch.testing.assert_close(together.params[name], value, rtol=0, atol=1e-12)
    assert together.metrics[-1].avg_loss < together.metrics[0].avg_loss


@contextmanager
def switched(read, write, value):
    """A context made of a function that sets, as users write them."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def fp32_precision(*where):
    return lambda: C._get_fp32_precision_getter(*where)


def attribute(module, name):
    return lambda: getattr(module, name)


def by(read, write, value):
    return partial(switched, read, write, value), read


C = torch._C
BACKENDS = torch.backends
DYNAMO = torch._dynamo.eval_frame
FP16 = "cublas_allow_fp16_reduced_precision_reduction"
VALIDATES = attribute(torch.distributions.Distribution, "_validate_args")
VALIDATE = torch.distributions.Distribution.set_default_validate_args
OF_PROCESS = {
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), C._get_flash_sdp_enabled),
    "sdpa_kernel (priority)": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        C._get_sdp_priority_order,
    ),
    "sdpa_kernel (math)": (
        lambda: BACKENDS.cuda.sdp_kernel(enable_math=False),
        C._get_math_sdp_enabled,
    ),
    "cudnn.flags (enabled)": (lambda: BACKENDS.cudnn.flags(enabled=False), C._get_cudnn_enabled),
    "cudnn.flags (benchmark)": (
        lambda: BACKENDS.cudnn.flags(enabled=True, benchmark=True),
        C._get_cudnn_benchmark,
    ),
    "cudnn.flags (deterministic)": (
        lambda: BACKENDS.cudnn.flags(enabled=True, deterministic=True),
        C._get_cudnn_deterministic,
    ),
    "cudnn.flags (allow_tf32)": (
        lambda: BACKENDS.cudnn.flags(enabled=True, allow_tf32=False),
        C._get_cudnn_allow_tf32,
    ),
    "fp32_precision (cuda, all)": (
        lambda: BACKENDS.cudnn.flags(enabled=True, fp32_precision="tf32"),
        fp32_precision("cuda", "all"),
    ),
    "mkldnn.flags (enabled)": (lambda: BACKENDS.mkldnn.flags(), C._get_mkldnn_enabled),
    "mkldnn.flags (deterministic)": (
        lambda: BACKENDS.mkldnn.flags(enabled=True, deterministic=True),
        C._get_mkldnn_deterministic,
    ),
    "fp32_precision (mkldnn, all)": (
        lambda: BACKENDS.mkldnn.flags(enabled=True, fp32_precision="bf16"),
        fp32_precision("mkldnn", "all"),
    ),
    "fp32_precision (generic, all)": (
        lambda: BACKENDS.flags(fp32_precision="tf32"),
        fp32_precision("generic", "all"),
    ),
    "nnpack.flags": (lambda: BACKENDS.nnpack.flags(), C._get_nnpack_enabled),
    "miopen.flags": (lambda: BACKENDS.miopen.flags(immediate=True), C._get_miopen_immediate),
    "anomaly detection": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
    "anomaly detection (set_detect_anomaly)": (
        lambda: torch.autograd.set_detect_anomaly(False, check_nan=False),
        torch.is_anomaly_check_nan_enabled,
    ),
    "check_sparse_tensor_invariants": (
        torch.sparse.check_sparse_tensor_invariants,
        C._check_sparse_tensor_invariants,
    ),
    "set_checkpoint_debug_enabled": (
        lambda: checkpoint.set_checkpoint_debug_enabled(True),
        attribute(checkpoint, "_checkpoint_debug_enabled"),
    ),
    "set_checkpoint_early_stop": (
        lambda: checkpoint.set_checkpoint_early_stop(False),
        attribute(checkpoint, "_enable_checkpoint_early_stop"),
    ),
    "jit.fuser (NNC)": (lambda: torch.jit.fuser("none"), C._jit_texpr_fuser_enabled),
    "jit.fuser (cpu)": (lambda: torch.jit.fuser("fuser0"), C._jit_can_fuse_on_cpu),
    "jit.fuser (oneDNN)": (lambda: torch.jit.fuser("fuser3"), C._jit_llga_enabled),
    "set_printoptions": (
        lambda: torch._tensor_str.printoptions(precision=2),
        attribute(torch._tensor_str.PRINT_OPTS, "precision"),
    ),
    "fx.traceback.preserve_node_meta": (
        torch.fx.traceback.preserve_node_meta,
        attribute(torch.fx.traceback, "should_preserve_node_meta"),
    ),
    "torch.compiler.set_stance": (
        lambda: switched(
            attribute(DYNAMO, "_stance"), DYNAMO._set_stance, DYNAMO.DynamoStance("force_eager")
        ),
        attribute(DYNAMO, "_stance"),
    ),
    "default dtype": by(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "use_deterministic_algorithms": by(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "warn"
    ),
    "deterministic.fill_uninitialized_memory": by(
        C._get_deterministic_fill_uninitialized_memory,
        C._set_deterministic_fill_uninitialized_memory,
        False,
    ),
    "set_float32_matmul_precision": by(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "fp32_precision (cuda, conv)": by(
        fp32_precision("cuda", "conv"),
        lambda value: setattr(BACKENDS.cudnn.conv, "fp32_precision", value),
        "ieee",
    ),
    "allow_fp16_reduced_precision_reduction": by(
        getattr(C, f"_get_{FP16}"),
        lambda value: getattr(C, f"_set_{FP16}")(*value),
        (False, True),
    ),
    "allow_fp16_accumulation": by(
        C._get_cublas_allow_fp16_accumulation, C._set_cublas_allow_fp16_accumulation, True
    ),
    "allow_fp16_bf16_reduction_math_sdp": by(
        C._get_math_sdp_allow_fp16_bf16_reduction, C._set_math_sdp_allow_fp16_bf16_reduction, True
    ),
    "set_warn_always": by(torch.is_warn_always_enabled, torch.set_warn_always, True),
    "quantized.engine": by(C._get_qengine, C._set_qengine, 1),
    "mha.set_fastpath_enabled": by(
        BACKENDS.mha.get_fastpath_enabled, BACKENDS.mha.set_fastpath_enabled, False
    ),
    "set_swap_module_params_on_conversion": by(
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
        True,
    ),
    "set_overwrite_module_params_on_conversion": by(
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
        True,
    ),
    "set_default_validate_args": (
        # A compilation before may have set it to False.
        lambda: switched(VALIDATES, VALIDATE, not VALIDATES()),
        VALIDATES,
    ),
}
"""Contexts that set what all threads of the process share, by the name in the warning."""
if BACKENDS.opt_einsum.is_available():
    OF_PROCESS["opt_einsum.flags"] = (
        lambda: BACKENDS.opt_einsum.flags(enabled=False),
        attribute(BACKENDS.opt_einsum, "enabled"),
    )
if hasattr(C, "_get_cudnn_depthwise_kernel"):
    OF_PROCESS["cudnn.flags (depthwise_kernel)"] = by(
        C._get_cudnn_depthwise_kernel, C._set_cudnn_depthwise_kernel, "native"
    )

BY_FUNCTIONS = {
    "set_printoptions",
    "deterministic.fill_uninitialized_memory",
    "set_float32_matmul_precision",
    "fp32_precision (cuda, conv)",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
    "allow_fp16_bf16_reduction_math_sdp",
    "set_warn_always",
    "quantized.engine",
    "mha.set_fastpath_enabled",
    "set_swap_module_params_on_conversion",
    "set_overwrite_module_params_on_conversion",
    "set_default_validate_args",
}
"""Names of settings without a public context, which calls of own loops do not hold."""

OF_THREAD = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "set_multithreading_enabled": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        C._is_multithreading_enabled,
    ),
    "_force_original_view_tracking": (
        lambda: torch.autograd.grad_mode._force_original_view_tracking(True),
        C._is_view_replay_enabled,
    ),
    "disable_saved_tensors_hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("planted"),
        C._autograd._saved_tensors_hooks_is_enabled,
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "autocast (dtype)": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast (cache_enabled)": (
        lambda: torch.autocast("cpu", cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "torch.device": (lambda: torch.device("meta"), torch.get_default_device),
    "_set_fwd_grad_enabled": (
        lambda: forward_ad._set_fwd_grad_enabled(False),
        C._is_fwd_grad_enabled,
    ),
    "jit.optimized_execution": (
        lambda: torch.jit.optimized_execution(False),
        C._get_graph_executor_optimize,
    ),
    "serialization.skip_data": (
        torch.serialization.skip_data,
        attribute(torch.serialization._serialization_tls, "skip_data"),
    ),
    "set_num_threads": by(torch.get_num_threads, torch.set_num_threads, 7),
    "set_flush_denormal": by(
        lambda: bool(torch.tensor([1e-40]) * 1 == 0), torch.set_flush_denormal, True
    ),
}
"""Contexts that set what belongs to the thread, so that each worker has its own."""

of_process = pytest.mark.parametrize("name", OF_PROCESS)
of_thread = pytest.mark.parametrize("name", OF_THREAD)
noisy = pytest.mark.filterwarnings(
    "ignore:.*(torch.backends.cuda.sdp_kernel|Anomaly Detection|TF32 acceleration)"
)


class Overlap:
    """Two threads that are inside a context at once; the one that entered first leaves first."""

    def __init__(self, context):
        self._context = context
        self._steps = [threading.Event() for _ in range(3)]
        self._done = [False, False]

    def __call__(self, rank):
        """Be inside the context once."""
        if self._done[rank]:
            return
        self._done[rank] = True
        first_inside, both_inside, first_left = self._steps
        if rank == 1:
            assert first_inside.wait(WAIT_S)
        with self._context():
            (both_inside if rank == 1 else first_inside).set()
            assert (first_left if rank == 1 else both_inside).wait(WAIT_S)
        if rank == 0:
            first_left.set()


def warnings_of(caplog):
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if "settings of the whole process" in text]


def overlapping_run(overlap, *, way=(SYNC, THREAD)):
    def train(model, batch):
        overlap(current_worker().rank)
        return model.l.weight.square().sum()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 1)

    return builder(
        model=lambda device: Net(),
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train,
        dataset=(torch.randn(8, 2),),
        batch_size=2,
        epochs=1,
        ranks=2,
        way=way,
    )


@noisy
@of_process
def test_a_context_that_overlaps_in_two_threads_leaves_the_process_changed(name):
    context, read = OF_PROCESS[name]
    before = read()
    overlap = Overlap(context)
    with held():
        at_once(overlap, range(2))
        assert read() != before
    assert read() == before


@contextmanager
def held():
    ProcessState.acquire()
    try:
        yield
    finally:
        ProcessState.release()


@noisy
@pytest.mark.parametrize("name", [n for n in OF_PROCESS if n not in BY_FUNCTIONS])
def test_what_overlapping_contexts_leave_changed_is_restored_after_a_call(name):
    context, read = OF_PROCESS[name]
    before = read()
    overlap = Overlap(context)
    with ProcessState.held():
        at_once(overlap, range(2))
        assert read() != before
    assert read() == before


@pytest.mark.parametrize("name", ["sdpa_kernel", "set_warn_always"])
def test_a_run_that_starts_within_a_call_restores_what_only_runs_hold(name):
    context, read = OF_PROCESS[name]
    before = read()
    overlap = Overlap(context)
    with ExitStack() as run:
        with ProcessState.held():
            run.enter_context(held())
        at_once(overlap, range(2))
        assert read() != before
    assert read() == before


@noisy
@of_process
def test_what_overlapping_contexts_leave_changed_is_restored_after_the_run(name, caplog):
    context, read = OF_PROCESS[name]
    before = read()
    with caplog.at_level(logging.WARNING):
        overlapping_run(Overlap(context)).run().join(WAIT_S)
    assert read() == before
    (text,) = warnings_of(caplog)
    assert f"{name}" in text
    assert "before the run" in text


@of_thread
def test_a_context_of_the_thread_is_not_seen_by_other_threads(name):
    context, read = OF_THREAD[name]
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(read).result(WAIT_S)
        with context():
            assert read() != before
            assert pool.submit(read).result(WAIT_S) == before


def test_all_settings_of_the_process_can_be_read_and_written_back():
    before = [setting.read() for setting in process_state._SETTINGS]
    for setting, value in zip(process_state._SETTINGS, before, strict=True):
        if value is not None:
            setting.write(value)
    assert [setting.read() for setting in process_state._SETTINGS] == before


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["sync", "cadence"])
def test_a_run_that_starts_within_the_overlap_of_another_does_not_keep_it(way, caplog):
    before = C._get_flash_sdp_enabled()
    inside = threading.Event()
    ended = threading.Event()

    @contextmanager
    def context():
        with sdpa_kernel(SDPBackend.MATH):
            yield
            inside.set()
            assert ended.wait(WAIT_S)

    first = overlapping_run(Overlap(context), way=way).run()
    assert inside.wait(WAIT_S)
    assert C._get_flash_sdp_enabled() is not before
    second = overlapping_run(lambda rank: ended.set(), way=way).run()
    with caplog.at_level(logging.WARNING):
        first.join(WAIT_S)
        second.join(WAIT_S)
    assert C._get_flash_sdp_enabled() is before
    assert len(warnings_of(caplog)) == 1


def test_a_default_dtype_that_a_worker_sets_is_restored(caplog):
    def train(model, batch):
        torch.set_default_dtype(torch.float64)
        return model(batch[0]).square().mean()

    b = builder(
        model=lambda device: nn.Linear(2, 1),
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train,
        dataset=(torch.randn(4, 2, dtype=torch.float32),),
        batch_size=2,
        epochs=1,
        ranks=1,
        way=(SYNC, THREAD),
    )
    try:
        b.run().join(WAIT_S)
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    (text,) = warnings_of(caplog)
    assert "default dtype (set_default_dtype) was torch.float64 and is torch.float32" in text


class Shared:
    """A value that copies of a module share."""

    def __init__(self, value):
        self.value = value

    def __deepcopy__(self, memo):
        return self


class Overlapping(nn.Module):
    """A layer whose replicas are inside a context at once, in the forward or the backward pass."""

    def __init__(self, overlap, backward=False):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.overlap = Shared(overlap)
        self.backward = backward

    def forward(self, x):
        rank = int(threading.current_thread().name.rpartition("-")[2])
        overlap = self.overlap.value
        y = self.layer(x)
        if overlap is None:
            return y
        if not self.backward:
            overlap(rank)
        elif y.requires_grad:
            y.register_hook(lambda grad: overlap(rank))
        return y


def loop_of_worker(net, overlap, x):
    def body(worker):
        for (batch,) in worker.batches():
            overlap(worker.rank)
            worker.step(worker.model(batch).square().mean())

    trainer = Trainer.loop(lambda device: nn.Linear(2, 1), sgd_of, body)
    trainer.dataset((x,)).batch_size(2).num_epochs(1).devices(["cpu"] * 2).run().join(WAIT_S)


def sgd_of(module):
    return torch.optim.SGD(module.parameters(), 0.1)


def through_setup(net, overlap, x):
    with Trainer.setup(net, lambda params: torch.optim.SGD(params, 0.1), ["cpu"] * 2) as model:
        net.overlap.value = None
        model(x)  # the first call runs some samples on rank 0 alone
        net.overlap.value = overlap
        model(x).square().mean().backward()
        model.step()


def through_accumulate(net, overlap, x):
    with Trainer.setup(net, lambda params: torch.optim.SGD(params, 0.1), ["cpu"] * 2) as model:
        model.accumulate(lambda replica, batch: replica(batch[0]).square().mean(), [(x,)] * 2)
        model.step()


def through_coordinator(net, overlap, x):
    with DataParallelCoordinator(
        net,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda model, samples: model(samples).square().mean(),
        ["cpu"] * 2,
    ) as replicas:
        replicas.train_batch(x)


def through_predict(net, overlap, x):
    predict(net, (x,), batch_size=2, devices=["cpu"] * 2)


def through_evaluation(net, overlap, x):
    state = overlapping_run(lambda rank: None).run().join(WAIT_S)

    def fn(model, batch):
        overlap(current_worker().rank)
        return {"loss": model.l.weight.sum()}

    state.evaluate((x,), fn, batch_size=2, devices=["cpu"] * 2)


def through_fsdp(net, overlap, x):
    ends = create_collectives(2)

    def forward(rank):
        threading.current_thread().name = f"rank-{rank}"
        with closing(ends[rank]):
            FSDP(Overlapping(overlap), ends[rank])(x)

    at_once(forward, range(2))


OWN_LOOPS = [through_setup, through_accumulate, through_coordinator]
DOORS = [
    *((door, False) for door in (loop_of_worker, *OWN_LOOPS, through_fsdp)),
    *((door, False) for door in (through_predict, through_evaluation)),
    *((door, True) for door in OWN_LOOPS),
]


@pytest.mark.parametrize(("door", "backward"), DOORS)
def test_overlapping_contexts_leave_nothing_changed_through_any_door(
    door, backward, caplog, monkeypatch
):
    monkeypatch.setattr(ProcessState, "_warned", set())
    before = C._get_flash_sdp_enabled()
    overlap = Overlap(lambda: sdpa_kernel(SDPBackend.MATH))
    with caplog.at_level(logging.WARNING):
        door(Overlapping(overlap, backward), overlap, torch.randn(8, 2))
    assert C._get_flash_sdp_enabled() is before
    (text,) = warnings_of(caplog)
    assert "sdpa_kernel (flash) was False and is True again" in text


def test_an_own_loop_warns_once_of_a_setting_that_each_step_leaves_changed(caplog, monkeypatch):
    monkeypatch.setattr(ProcessState, "_warned", set())
    before = C._get_flash_sdp_enabled()
    net = Overlapping(None)
    with (
        Trainer.setup(net, lambda params: torch.optim.SGD(params, 0.1), ["cpu"] * 2) as model,
        caplog.at_level(logging.WARNING),
    ):
        model(torch.randn(4, 2))
        for _ in range(3):
            net.overlap.value = Overlap(lambda: sdpa_kernel(SDPBackend.MATH))
            model(torch.randn(4, 2))
            assert C._get_flash_sdp_enabled() is before
    assert len(warnings_of(caplog)) == 1


def test_a_setting_that_the_caller_changes_between_calls_of_an_own_loop_stays():
    with Trainer.setup(
        nn.Linear(2, 1), lambda params: torch.optim.SGD(params, 0.1), ["cpu"] * 2
    ) as model:
        model(torch.randn(4, 2))
        with sdpa_kernel(SDPBackend.MATH):
            model(torch.randn(4, 2))
            assert not C._get_flash_sdp_enabled()
        model(torch.randn(4, 2))
        assert C._get_flash_sdp_enabled()
    assert C._get_flash_sdp_enabled()


FIRST_RUN = """
import gc
import sys
import threading
import torch
from runtime import Trainer

DYNAMO = "torch._dynamo.convert_frame"
collects = sys.argv[1] == "True"
if not collects:
    gc.disable()
assert DYNAMO not in sys.modules
imported = []

def model(device):
    imported.append(DYNAMO in sys.modules)
    assert gc.isenabled() is collects
    return torch.nn.Linear(2, 1)

def optimizer(params):
    imported.append(DYNAMO in sys.modules)
    return torch.optim.SGD(params, 0.1)

def train(model, batch):
    return model(batch[0]).square().mean()

net = torch.nn.Linear(2, 1)
if sys.argv[2] == "setup":
    with Trainer.setup(net, optimizer, ["cpu"] * 2):
        pass
else:
    trainer = Trainer.builder(model, optimizer, train).dataset((torch.ones(4, 2),))
    handle = trainer.batch_size(1).num_epochs(1).devices(["cpu"] * 2).progress(False).run()
    assert not any(thread.name == "import-dynamo" for thread in threading.enumerate())
    handle.join()
assert imported and all(imported), imported
assert gc.isenabled() is collects
"""


@pytest.mark.parametrize("door", ["builder", "setup"])
@pytest.mark.parametrize("collects", [True, False])
def test_dynamo_is_imported_before_the_first_model_and_optimizer_of_a_process(door, collects):
    command = [sys.executable, "-W", "ignore", "-c", FIRST_RUN, str(collects), door]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_a_repeated_import_of_dynamo_leaves_garbage_collection_and_limits_alone(monkeypatch):
    import_dynamo()
    check = torch._dynamo.convert_frame.exceeds_recompile_limit
    monkeypatch.setattr(process_state.CompileLimits, "num_replicas", 1)
    at_once(lambda n: (import_dynamo(), process_state.CompileLimits.extend(n)), range(8))
    assert torch._dynamo.convert_frame.exceeds_recompile_limit is check
    assert process_state.CompileLimits.num_replicas == 7
    assert gc.isenabled()
