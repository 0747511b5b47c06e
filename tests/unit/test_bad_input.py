"""Bad values and failing user code: a clear error, in bounded time, and no thread left."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runtime import (
    ApplyPolicy,
    AverageBackend,
    ReplicaMismatch,
    TimeLimit,
    Timeline,
    Trainer,
    WorkerFailed,
    record_scalar,
)
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Counter,
    builder,
    count_up,
    counter,
    local_ways,
    numbers,
    plain_sgd,
)

BOUND_S = 5.0
ROOT = Path(__file__).parents[2]


class Planted(Exception):
    """The exception that user code raises in these tests."""


def boom(*args):
    raise Planted("planted")


def failure_of(b):
    """The error of a run, which every way of waiting must raise."""
    start = time.monotonic()
    handle = b.run()
    with pytest.raises((WorkerFailed, ValueError)) as caught:
        handle.join(WAIT_S)
    assert time.monotonic() - start < BOUND_S
    with pytest.raises(type(caught.value)) as again:
        list(handle.metrics())
    with pytest.raises(type(caught.value)) as once_more:
        handle.next_metrics(WAIT_S)
    assert again.value is once_more.value is caught.value
    assert handle.state is None or handle.state.reason == "failed"
    return caught.value


# -- the builder's calls -------------------------------------------------------

nan, inf = float("nan"), float("inf")
WRONG = [
    ("batch_size", (0,), ValueError, "at least 1"),
    ("batch_size", (-3,), ValueError, "at least 1"),
    ("batch_size", (2.0,), TypeError, "whole number"),
    ("batch_size", (True,), TypeError, "whole number"),
    ("batch_size", ("8",), TypeError, "whole number"),
    ("batch_size", (None,), TypeError, "whole number"),
    ("batch_size", ([2, 0],), ValueError, "at least 1"),
    ("batch_size", ([2, 2.5],), TypeError, "whole number"),
    ("batch_size", ([],), ValueError, "one number for each device"),
    ("num_epochs", (0,), ValueError, "at least 1"),
    ("num_epochs", (1.5,), TypeError, "whole number"),
    ("seed", (-1,), ValueError, "between 0"),
    ("seed", (2**64,), ValueError, "between 0"),
    ("seed", ("a",), TypeError, "whole number"),
    ("drop_last", (1,), TypeError, "True or False"),
    ("collate_fn", (3,), TypeError, "list of samples"),
    ("loader_workers", (-1,), ValueError, "at least 0"),
    ("loader_workers", (0.5,), TypeError, "whole number"),
    ("dataset_lock", ("yes",), TypeError, "True or False"),
    ("devices", (2.0,), TypeError, r"\['cpu', 'cpu'\]"),
    ("devices", (0,), ValueError, "at least 1"),
    ("devices", (True,), TypeError, "list"),
    ("devices", ("gpu",), ValueError, "CPU build of PyTorch|0 CUDA devices are visible"),
    ("devices", (-2,), ValueError, "at least 1"),
    ("devices", ([],), ValueError, "at least one"),
    ("devices", ([0],), TypeError, "names such as"),
    ("devices", (["gpu0"],), ValueError, "is not a device"),
    ("devices", (["meta"],), ValueError, "there is no meta here"),
    ("devices", (["cuda:77"],), ValueError, "there is no"),
    ("policy", ("often",), ValueError, "SYNC, CADENCE, ASYNC"),
    ("policy", (1,), TypeError, "SYNC, CADENCE, ASYNC"),
    ("backend", ("mpi",), ValueError, "AUTO, CPU, THREAD, GLOO, NCCL"),
    ("backend", (ApplyPolicy.SYNC,), TypeError, "AUTO, CPU, THREAD, GLOO, NCCL"),
    ("anchor", (0,), ValueError, "at least 1"),
    ("min_anchor", (0,), ValueError, "at least 1"),
    ("max_anchor", (0,), ValueError, "at least 1"),
    ("overhead_target", (0.0,), ValueError, "0.01"),
    ("overhead_target", (0.6,), ValueError, "0.5"),
    ("overhead_target", (nan,), ValueError, "0.01"),
    ("overhead_target", ("10%",), TypeError, "number"),
    ("speed_hint", (-1, 2.0), ValueError, "at least 0"),
    ("speed_hint", (0, 0.5), ValueError, "at least 1"),
    ("speed_hint", (0, inf), ValueError, "at least 1"),
    ("speed_hint", (0.0, 2), TypeError, "whole number"),
    ("max_batch_diff", (-1,), ValueError, "at least 0"),
    ("max_batch_diff", (None,), TypeError, "whole number"),
    ("max_overshoot", (-1,), ValueError, "at least 0"),
    ("divergence_threshold", (0,), ValueError, "above 0"),
    ("divergence_threshold", (nan,), ValueError, "above 0"),
    ("partition_ratios", ([],), ValueError, "each device"),
    ("partition_ratios", ([0, 0.0],), ValueError, "above 0"),
    ("partition_ratios", ([1, -1],), ValueError, "at least 0"),
    ("partition_ratios", (["a"],), TypeError, "number"),
    ("partition_ratios", (0.5,), TypeError, "list"),
    ("progressive_dispatch", (None,), TypeError, "True or False"),
    ("progressive_dispatch", (False,), ValueError, "was removed: leave it out; partition_ratios"),
    ("max_grad_norm", (0.0,), ValueError, "above 0"),
    ("max_grad_norm", (inf,), ValueError, "above 0"),
    ("max_grad_norm", (None,), TypeError, "number"),
    ("accumulate", (0,), ValueError, "at least 1"),
    ("precision", ("fp64",), ValueError, "fp32, bf16, fp16"),
    ("precision", ("bf16-true",), ValueError, "fp32, bf16, fp16"),
    ("precision", (torch.float16,), (TypeError, ValueError), "fp32, bf16, fp16"),
    ("on_non_finite", ("warn",), ValueError, "raise, skip, ignore"),
    ("scheduler", (torch.optim.SGD([torch.zeros(1)], 1.0),), TypeError, "LRScheduler"),
    ("lr_scale_ratio", (-0.1,), ValueError, "at least 0"),
    ("param_groups", ([{}],), TypeError, "parameter groups"),
    ("max_steps", (0,), ValueError, "at least 1"),
    ("eval_every", (0,), ValueError, "at least 1"),
    ("eval_rank", (-1,), ValueError, "at least 0"),
    ("eval_fn", (None,), TypeError, "dict of floats"),
    ("epoch_fn", (1,), TypeError, "worker"),
    ("metrics_fn", ("f",), TypeError, "EpochMetrics"),
    ("checkpoint_every", (0,), ValueError, "at least 1"),
    ("checkpoint_fn", ("path",), TypeError, "version, model"),
    ("checkpoint_dir", (5,), TypeError, "path as a string"),
    ("checkpoint_dir", (b"bytes",), TypeError, "path as a string"),
    ("checkpoint_dir", ("",), ValueError, "current directory"),
    ("checkpoint_dir", ("here", 0), ValueError, "at least 1"),
    ("checkpoint_dir", ("here", 1.0), TypeError, "whole number"),
    ("checkpoint_dir", ("here", 1, 0), ValueError, "at least 1"),
    ("resume", (None,), TypeError, "path as a string"),
    ("resume", ("",), ValueError, "current directory"),
    ("resume", ("here", 1), TypeError, "True or False"),
    ("snapshot_timeout", (0,), ValueError, "above 0"),
    ("collective_timeout", (-1,), ValueError, "above 0"),
    ("collective_timeout", (inf,), ValueError, "above 0"),
    ("stall_timeout", (0,), ValueError, "above 0"),
    ("stall_timeout", (inf,), ValueError, "above 0"),
    ("max_failed_rounds", (0,), ValueError, "at least 1"),
    ("vram_fraction", (0.0,), ValueError, "above 0"),
    ("vram_fraction", (1.01,), ValueError, "at most 1"),
    ("vram_fraction", (nan,), ValueError, "above 0"),
    ("vram_fraction", ("90%",), TypeError, "number"),
    ("prefetch", (-1,), ValueError, "at least 0"),
    ("prefetch", (1.0,), TypeError, "whole number"),
    ("prefetch", (None,), TypeError, "whole number"),
    ("resident", (1,), TypeError, "True or False"),
    ("resident", (None,), TypeError, "True or False"),
    ("cuda_graphs", ("yes",), TypeError, "True or False"),
    ("tune_allocator", (1,), TypeError, "True or False"),
    ("pin_threads", (1,), TypeError, "True or False"),
    ("progress", (0,), TypeError, "True or False"),
    ("steps_per_epoch", (0,), ValueError, "at least 1"),
    ("global_batch_size", (0,), ValueError, "at least 1"),
    ("sampler", (3,), TypeError, "iterable"),
    ("balance", (1,), TypeError, "True or False"),
    ("sharded", ("full",), TypeError, "ShardingStrategy"),
    ("sync_batchnorm", (1,), TypeError, "True or False"),
    ("all_gather", (1,), TypeError, "True or False"),
    ("bucket_cap_mb", (-1,), ValueError, "above 0"),
    ("loss_reduction", ("max",), ValueError, "mean, sum"),
    ("on_drift", ("warn",), ValueError, "pass one of raise"),
    ("on_drift", ("repair",), ValueError, "was removed: leave it out"),
    ("on_worker_failure", ("restart",), ValueError, "raise, continue"),
    ("ema", (1.5,), ValueError, "at most 1"),
    ("val_dataset", (numbers(4), 0), ValueError, "at least 1"),
    ("metrics_every", (0,), ValueError, "at least 1"),
    ("callbacks", (print,), TypeError, "metrics_fn"),
    ("cluster", (29510,), TypeError, "host:port"),
    ("timeline", ("t",), TypeError, "Timeline"),
]


@pytest.mark.parametrize(
    ("method", "arguments", "error", "remedy"),
    WRONG,
    ids=[f"{method}-{arguments}" for method, arguments, _, _ in WRONG],
)
def test_a_wrong_value_is_refused_when_it_is_set(method, arguments, error, remedy):
    b = builder()
    with pytest.raises(error, match=remedy) as caught:
        getattr(b, method)(*arguments)
    named = str(caught.value)
    assert method in named or "device" in named


def settings():
    """Names of the builder's settings."""
    return {name for name in dir(builder()) if not name.startswith("_")} - {"run"}


def test_every_setting_refuses_a_wrong_value():
    """``dataset`` does so in ``run()``, and ``no_divergence_guard`` has no value."""
    untested = settings() - {method for method, *_ in WRONG}
    assert untested == {"dataset", "no_divergence_guard"}, "add a wrong value to WRONG"


def test_every_setting_is_on_the_page_of_training():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    missing = {name for name in settings() if f"`{name}(" not in page}
    assert missing == set(), "add a row to a table of docs/training.md"


def test_every_method_returns_the_builder_and_the_defaults_run(tmp_path):
    b = Trainer.builder(counter, plain_sgd, count_up)
    values = {
        "dataset": (numbers(12),),
        "batch_size": (2,),
        "sampler": (range(12),),
        "num_epochs": (1,),
        "devices": (["cpu", torch.device("cpu")],),
        "policy": (CADENCE,),
        "backend": (AverageBackend.AUTO,),
        "seed": (3,),
        "drop_last": (False,),
        "loader_workers": (0,),
        "dataset_lock": (True,),
        "anchor": (2,),
        "min_anchor": (1,),
        "max_anchor": (9,),
        "overhead_target": (0.1,),
        "speed_hint": (1, 2),
        "max_batch_diff": (5,),
        "max_overshoot": (2,),
        "divergence_threshold": (0.1,),
        "no_divergence_guard": (),
        "partition_ratios": ((1, 2),),
        "balance": (False,),
        "sync_batchnorm": (False,),
        "all_gather": (False,),
        "bucket_cap_mb": (None,),
        "progressive_dispatch": (True,),
        "max_grad_norm": (5,),
        "accumulate": (2,),
        "loss_reduction": ("sum",),
        "precision": ("fp32",),
        "on_non_finite": ("raise",),
        "scheduler": (lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0),),
        "lr_scale_ratio": (0.5,),
        "param_groups": (lambda m: [{"params": list(m.parameters())}],),
        "ema": (0.9,),
        "max_steps": (100,),
        "eval_every": (10,),
        "eval_rank": (1,),
        "val_dataset": (numbers(6), 2, 10, lambda m, batch: {"x": 1.0}),
        "eval_fn": (lambda m, e: {},),
        "epoch_fn": (lambda e, w: None,),
        "metrics_fn": (lambda m: None,),
        "metrics_every": (4,),
        "callbacks": (TimeLimit(1000),),
        "checkpoint_every": (1,),
        "checkpoint_fn": (lambda v, m: None,),
        "checkpoint_dir": (tmp_path, 2, 1),
        "resume": (str(tmp_path), True),
        "snapshot_timeout": (5,),
        "collective_timeout": (20,),
        "stall_timeout": (60.0,),
        "on_drift": ("raise",),
        "on_worker_failure": ("continue",),
        "max_failed_rounds": (5,),
        "vram_fraction": (1.0,),
        "prefetch": (2,),
        "resident": (True,),
        "cuda_graphs": (False,),
        "tune_allocator": (False,),
        "pin_threads": (False,),
        "progress": (False,),
        "timeline": (Timeline(),),
    }
    for method, arguments in values.items():
        assert getattr(b, method)(*arguments) is b, method
    others = {"cluster", "collate_fn", "global_batch_size", "sharded", "steps_per_epoch"}
    assert settings() == {*values, *others}, "add a valid value of the new setting to `values`"
    assert b.run().join(WAIT_S).metrics[0].num_samples == 12


def test_whole_numbers_and_floats_of_numpy_are_taken():
    b = builder(dataset=8).batch_size(np.int64(4)).overhead_target(np.float32(0.25))
    assert b._settings.overhead_target == 0.25
    (metrics,) = b.run().join(WAIT_S).metrics
    assert sum(rank.num_batches for rank in metrics.per_rank) == 2


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_factory_that_is_no_function_is_refused(position):
    arguments = [counter, plain_sgd, count_up]
    arguments[position] = 5
    with pytest.raises(TypeError, match="must be a function"):
        Trainer.builder(*arguments)


# -- run() ---------------------------------------------------------------------


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("missing", ["dataset", "batch_size", "num_epochs"])
def test_run_names_the_missing_setting(missing, clustered):
    b = Trainer.builder(counter, plain_sgd, count_up)
    if clustered:
        b.cluster("host:1")
    for name, value in (("dataset", numbers(4)), ("batch_size", 2), ("num_epochs", 1)):
        if name != missing:
            getattr(b, name)(value)
    with pytest.raises(ValueError, match=rf"{missing} is not set: call \.{missing}\("):
        b.run()


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda b: b.dataset([]), "the data set is empty"),
        (lambda b: b.drop_last(True).batch_size(30), "lower batch_size"),
        (lambda b: b.partition_ratios([1, 1, 1]), "3 entries for 2 devices"),
        (lambda b: b.batch_size([2, 2, 2]), "3 entries for 2 devices"),
        (
            lambda b: b.policy(CADENCE).batch_size([3, 1]).drop_last(True),
            r"leave drop_last out",
        ),
        (
            lambda b: (
                b.policy(CADENCE)
                .batch_size([3, 1])
                .scheduler(lambda optimizer: None, interval="epoch")
            ),
            r"step it once a batch",
        ),
        (lambda b: b.policy(SYNC).batch_size([3, 2]), "5, is no multiple of the 2 devices"),
        (
            lambda b: b.policy(SYNC).batch_size([3, 1]).partition_ratios([1, 2]),
            "leave one of them out",
        ),
        (lambda b: b.policy(SYNC).balance(True).partition_ratios([1, 2]), "leave one of them out"),
        (lambda b: b.policy(CADENCE).balance(True), "leave it out"),
        (lambda b: b.speed_hint(2, 2.0), "no rank 2 of 2"),
        (lambda b: b.eval_rank(2), "eval_rank: there is no rank 2 of 2"),
        (lambda b: b.anchor(9).max_anchor(8), "raise max_anchor"),
        (lambda b: b.anchor(2).min_anchor(3), "is above the anchor at the start, 2"),
        (lambda b: b.max_anchor(8).min_anchor(9), "is above the anchor at the start, 8"),
        (lambda b: b.checkpoint_every(2), "needs checkpoint_fn"),
        (lambda b: b.checkpoint_dir(__file__), "is a file; pass a directory"),
        (lambda b: b.resume(__file__, True), "is a file; pass a directory"),
        (lambda b: b.policy(SYNC).progressive_dispatch(True), "leave it out"),
        (lambda b: b.prefetch(0).loader_workers(2), "leave one of them out"),
        (lambda b: b.dataset([1.0, 2.0]).resident(True), "pass a tuple of its tensors"),
        (lambda b: b.backend(AverageBackend.NCCL), "use THREAD, CPU or AUTO"),
    ],
)
def test_run_refuses_values_that_do_not_fit_together(change, remedy):
    with pytest.raises(ValueError, match=remedy):
        change(builder(dataset=20)).run()


# -- factories -----------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.lazy = nn.LazyLinear(3)


class Frozen(Counter):
    def __init__(self):
        super().__init__()
        self.w.requires_grad_(False)


def foreign(params):
    return torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))], 1.0)


def lbfgs(params):
    return torch.optim.LBFGS(params)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("values", "cause", "remedy"),
    [
        ({"model": boom}, Planted, "planted"),
        ({"model": lambda d: None}, TypeError, "return a torch.nn.Module"),
        ({"model": lambda d: Lazy()}, ValueError, "lazy"),
        ({"model": lambda d: Frozen()}, ValueError, "nothing can be trained"),
        ({"model": lambda d: Counter().to("meta")}, ValueError, r"end the factory with \.to"),
        ({"optim": boom}, Planted, "planted"),
        ({"optim": lambda p: "SGD"}, TypeError, "return a torch.optim.Optimizer"),
        ({"optim": foreign}, ValueError, "build it from the parameters"),
        ({"optim": lbfgs}, ValueError, "AdamW or SGD"),
    ],
)
@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (SYNC, THREAD)], ids=["CPU", "SYNC"])
def test_an_invalid_result_of_a_factory_is_named_in_the_error(way, values, cause, remedy):
    error = failure_of(builder(way=way, **values))
    assert type(error) is WorkerFailed
    assert (error.rank, error.epoch, error.step) == (0, 0, 0)
    assert type(error.__cause__) is cause
    assert remedy.replace("\\", "") in str(error.__cause__)


def test_a_scheduler_factory_and_param_groups_that_fail_are_the_cause():
    for b in (builder().scheduler(boom), builder().param_groups(boom)):
        assert isinstance(failure_of(b).__cause__, Planted)


def test_an_invalid_result_of_a_scheduler_factory_is_named():
    error = failure_of(builder().scheduler(lambda optimizer: 5))
    assert "scheduler(f): f(optimizer) returned int" in str(error.__cause__)


@pytest.mark.parametrize("groups", [5, None])
def test_an_invalid_result_of_param_groups_is_named(groups):
    error = failure_of(builder().param_groups(lambda model: groups))
    words = f"param_groups(f): f(model) returned {type(groups).__name__}: return a list"
    assert words in str(error.__cause__)


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        (lambda: nn.Linear(3, 2), r"shape of 'weight' is \(2, 3\), on rank 0 it is \(2, 4\)"),
        (lambda: nn.Linear(4, 2, bias=False), "rank 0 has trainable tensor 'bias'"),
        (lambda: nn.Linear(4, 2).double(), "dtype of 'weight'"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), "'weight'"),
    ],
    ids=["shape", "missing", "dtype", "names"],
)
def test_replicas_that_differ_are_a_value_error(second, difference):
    built = []

    def model(device):
        built.append(nn.Linear(4, 2) if not built else second())
        return built[-1]

    error = failure_of(builder(model=model))
    assert type(error) is ReplicaMismatch
    assert isinstance(error, ValueError)
    assert re.search(difference, str(error))


def test_one_module_for_two_workers_is_refused():
    shared = Counter()
    error = failure_of(builder(model=lambda device: shared))
    assert "new module at each call" in str(error)


# -- train_fn ------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 2, sparse=True)
        self.w = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("place", ["train_fn", "epoch_fn", "eval_fn"])
def test_a_stop_iteration_is_the_cause_of_the_failure(place):
    def exhausted(*args):
        return next(iter([]))

    b = builder(train=exhausted) if place == "train_fn" else getattr(builder(), place)(exhausted)
    assert isinstance(failure_of(b).__cause__, StopIteration)


def test_a_sparse_gradient_is_refused():
    error = failure_of(
        builder(model=lambda d: TwoLayers(), train=lambda m, b: m.embed(b[0] % 8).sum() + m.w.sum())
    )
    assert "sparse=False" in str(error.__cause__)


@pytest.mark.parametrize(
    ("loss", "cause", "remedy"),
    [
        (lambda m, b: m.w.expand(3), ValueError, "return a scalar"),
        (lambda m, b: torch.zeros(()), ValueError, "without a gradient"),
        (lambda m, b: m.w.sum().detach(), ValueError, "without a gradient"),
        (lambda m, b: nn.Parameter(torch.ones(())) * 1, ValueError, "no trainable parameter"),
        (lambda m, b: 0.5, TypeError, "mean loss as a tensor"),
        (lambda m, b: None, TypeError, "mean loss as a tensor"),
        (boom, Planted, "planted"),
    ],
    ids=["vector", "constant", "detached", "other model", "float", "none", "raises"],
)
@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (SYNC, THREAD)], ids=["CPU", "SYNC"])
def test_an_invalid_result_of_train_fn_is_named(way, loss, cause, remedy):
    error = failure_of(builder(train=loss, way=way))
    assert type(error) is WorkerFailed
    assert type(error.__cause__) is cause
    assert remedy in str(error.__cause__)


class Slow(Dataset):
    """A data set read by a loader thread."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index)


# -- data sets and callbacks ---------------------------------------------------


class Broken(Slow):
    def __getitem__(self, index):
        return boom() if index == 33 else super().__getitem__(index)


class Ragged(Slow):
    def __getitem__(self, index):
        return torch.zeros(1 + index % 2)


class BrokenBatches:
    def __len__(self):
        return 40

    def get_batch(self, indices):
        return boom() if 33 in indices else (indices,)


class ShortBatches(BrokenBatches):
    def get_batch(self, indices):
        return (indices[1:],)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)])
@pytest.mark.parametrize(
    ("dataset", "cause"),
    [
        (Broken(), Planted),
        (BrokenBatches(), Planted),
        (Ragged(), RuntimeError),
        (ShortBatches(), ValueError),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_data_set_that_fails_is_the_cause(way, dataset, cause):
    error = failure_of(builder(dataset=dataset, batch_size=4, way=way))
    assert isinstance(error, WorkerFailed)
    assert isinstance(error.__cause__, cause)


class Recording(Slow):
    def __getitem__(self, index):
        record_scalar("read", 1.0)
        return super().__getitem__(index)


@pytest.mark.parametrize("setting", [{}, {"prefetch": 0}, {"loader_workers": 1}], ids=str)
def test_a_scalar_recorded_by_a_data_set_belongs_to_no_batch(setting):
    b = builder(dataset=Recording())
    for name, value in setting.items():
        getattr(b, name)(value)
    with pytest.raises(WorkerFailed, match="call it in train_fn") as caught:
        b.run().join(WAIT_S)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_a_collate_fn_that_fails_is_the_cause(way):
    error = failure_of(builder(dataset=Slow(), way=way).collate_fn(boom))
    assert isinstance(error.__cause__, Planted)


@local_ways
@pytest.mark.parametrize("callback", ["eval_fn", "epoch_fn"])
def test_a_callback_that_fails_is_the_cause(way, callback):
    b = builder(dataset=40, epochs=100, ranks=3, way=way)
    error = failure_of(getattr(b, callback)(lambda *a: boom()))
    assert isinstance(error.__cause__, Planted)


@pytest.mark.parametrize("values", [None, 0.5, {"a": "b"}, {"a": torch.zeros(2)}])
@local_ways
def test_eval_fn_must_return_a_dict_of_floats_and_the_trained_state_is_kept(values, way):
    calls = []

    def evaluate(model, epoch):
        calls.append(epoch)
        return values

    handle = builder(way=way, epochs=400).eval_fn(evaluate).run()
    with pytest.raises(
        WorkerFailed, match=r"eval_fn returned .*: return a dict of floats"
    ) as error:
        handle.join(WAIT_S)
    assert isinstance(error.value.__cause__, TypeError)
    assert error.value.epoch == calls[0] == 0
    assert len(calls) == len(handle.state.metrics) < 400
    assert float(handle.state.params["w"]) != 0
    assert handle.state.reason == "failed"


def test_record_scalar_of_a_vector_is_refused():
    def train(model, batch):
        record_scalar("v", torch.zeros(3))
        return count_up(model, batch)

    error = failure_of(builder(train=train))
    assert "reduce it first" in str(error.__cause__)


def test_a_parameter_moved_during_training_is_named():
    def train(model, batch):
        model.w.data = model.w.data.clone()
        return count_up(model, batch)

    error = failure_of(builder(train=train))
    assert "'w' was moved" in str(error.__cause__)


def test_a_buffer_that_changes_its_shape_is_named():
    class Growing(Counter):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

    def train(model, batch):
        model.seen = torch.zeros(len(model.seen) + 1)
        return count_up(model, batch)

    error = failure_of(builder(model=lambda d: Growing(), train=train))
    assert "'seen' changed its shape" in str(error.__cause__)


def test_system_exit_in_train_fn_is_an_error_of_the_run():
    def train(model, batch):
        raise SystemExit(3)

    assert isinstance(failure_of(builder(train=train)).__cause__, SystemExit)
