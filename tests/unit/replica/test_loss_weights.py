"""``(loss, weight)`` from ``train_fn``: its effects, and invalid values."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.codec import decode, encode
from coordinator.metrics import EpochAccumulator, ReportStats, Sums, exact_sum
from runtime import (
    CollectiveAborted,
    GpuWorker,
    NonFiniteError,
    ReplicaFailed,
    Trainer,
    Weighted,
    WorkerFailed,
    create_collectives,
    current_worker,
    record_scalar,
)
from runtime.core.loss_weights import _WARNED, WindowWeight, _warn_of_guess
from runtime.replica.flat import FlatParams
from runtime.replica.precision import Precision
from runtime.replica.reducer import GradientReducer
from runtime.worker.worker_config import UserFunctions, WorkerConfig
from tests.support.graphing import (
    DATA,
    a_run,
    adamw,
    assert_graphs_change_nothing,
    capturable_on_cpu,
    loss_of,
    posing,
    sgd,
    train,
)
from tests.support.pairs import pairwise
from tests.support.running import (
    ASYNC,
    CADENCE,
    CPU,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Trace,
    builder,
    counter,
    over,
    plain_sgd,
)
from tests.support.steppers import stepper_of
from tests.support.tape import Tape
from tests.unit.test_survival import Dies

__all__ = ["capturable_on_cpu", "posing"]  # fixtures

AVERAGED = [(policy, backend) for policy in (CADENCE, ASYNC) for backend in (OVER_CPU, THREAD)]
averaged = over(AVERAGED)
both = pytest.mark.parametrize("is_prompt", [True, False], ids=["host", "device"])


# -- one round of parameters -------------------------------------------------------------------


def units(batch):
    """Fractional weights, 0 for every third batch."""
    return 0.0 if batch[0] % 3 == 0 else float(sum(batch)) / 8


class OneRound:
    """A run with one round: at the end of its epoch, or of the run if it is stopped."""

    def __init__(self, way, weight=lambda batch: torch.tensor(units(batch)), stop_at=None):
        handles, started = [], threading.Event()

        def fit(model, batch):
            (x,) = batch
            worker = current_worker()
            if worker.rank == 0 and worker.local_step == stop_at:
                assert started.wait(WAIT_S)
                handles[0].stop()
            lost = torch.nan if units(x) == 0 else 1.0
            return -model.w.sum() * x.double().mean() * lost, weight(x)

        self.trace = Trace(fit)
        b = builder(train=self.trace, dataset=32, batch_size=2, ranks=2, way=way)
        b.partition_ratios([1, 1]).anchor(100).eval_fn(lambda model, _: {"w": float(model.w)})
        handles.append(b.run())
        started.set()
        self.state = handles[0].join(WAIT_S)
        assert self.state.stopped == (stop_at is not None)

    def check(self):
        wanted = pytest.approx(self.by_hand(), rel=1e-12)
        assert float(self.state.params["w"]) == wanted
        for metrics in self.state.metrics:  # of an epoch that has closed
            assert metrics.scalars["eval/w"] == wanted

    def by_hand(self):
        """The weighted mean of the replicas, each the sum of its steps."""
        total, weights = 0.0, 0.0
        for rank in (0, 1):
            own = [torch.tensor(i) for r, i in self.trace.of_epoch(0) if r == rank]
            weight = sum(map(units, own))
            total += weight * sum(float(x.double().mean()) for x in own if units(x) > 0)
            weights += weight
        return total / weights


ends = pytest.mark.parametrize("stop_at", [None, 4], ids=["closing", "stopped"])


@pairwise(way=AVERAGED, stop_at=[None, 4], kind=[torch.tensor, float])
def test_a_round_averages_by_the_sums_of_the_weights(way, stop_at, kind):
    OneRound(way, lambda batch: kind(units(batch)), stop_at).check()


@averaged
@ends
def test_a_round_on_devices_reads_weights_summed_on_the_device(way, stop_at, posing):
    OneRound(way, stop_at=stop_at).check()


@averaged
def test_no_weight_is_lost_between_rounds(way, monkeypatch):
    """The weights of each round cover the training since the last snapshot."""
    from coordinator.averaging import Averager
    from runtime.collective import Collective

    seen = []
    average, mean = Averager.average, Collective.weighted_mean_

    def watched_average(averager, payloads, weights, squares):
        seen.extend(weights)
        return average(averager, payloads, weights, squares)

    def watched_mean(collective, tensors, weight, **kwargs):
        seen.append(weight)
        return mean(collective, tensors, weight, **kwargs)

    monkeypatch.setattr(Averager, "average", watched_average)
    monkeypatch.setattr(Collective, "weighted_mean_", watched_mean)

    def fit(model, batch):
        return -model.w.sum(), batch[0].sum() / 4

    b = builder(train=fit, dataset=400, batch_size=2, ranks=2, epochs=2, way=way)
    state = b.anchor(3).run().join(WAIT_S)
    assert state.metrics[0].num_averagings >= 2
    assert sum(seen) == pytest.approx(2 * sum(range(400)) / 4, rel=1e-12)


# -- one step ----------------------------------------------------------------------------------


def two_numbers():
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def weighted(value, weight):
    """A loss whose gradient is ``value``, with a weight."""

    def train_fn(model, batch):
        return (model.weight * value).sum(), weight

    return train_fn


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 1.0, momentum=0.5),
    "fused sgd": lambda params: torch.optim.SGD(params, 1.0, momentum=0.5, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, 1.0, fused=True),
}


@both
@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_of_weight_0_is_not_made(optim, is_prompt):
    model = two_numbers()
    stepper = stepper_of(model, optim(model.parameters()), is_prompt=is_prompt)
    states = []
    for weight in (1.0, 0.0):
        value = 1.0 if weight else torch.nan
        with stepper.window(1) as window:
            loss, _ = window.add(weighted(value, torch.tensor(weight)), None, 1)
            assert float(loss) == 0.0
            window.finish()
        states.append(model.weight.detach().clone())
    assert float(states[0].norm()) > 0
    assert states[1].equal(states[0])


@both
@pytest.mark.parametrize("weights", [(2.0, 6.0), (0.0, 6.0), (6.0, 0.0), (None, 2.0), (2.0, None)])
def test_micro_batches_are_averaged_by_their_weights(weights, is_prompt):
    """The weight of those without one is their samples: 3 each."""
    model = two_numbers()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    stepper = stepper_of(model, optimizer, is_prompt=is_prompt)
    with stepper.window(6, 2) as window:
        for value, weight in zip((1.0, 5.0), weights, strict=True):
            if weight is None:
                window.add(lambda m, b, v=value: (m.weight * v).sum(), None, 3)
            else:
                lost = value if weight else torch.nan
                window.add(weighted(lost, torch.tensor(weight)), None, 3)
        end = window.finish()
    assert not end.dropped
    first, second = (3.0 if weight is None else weight for weight in weights)
    mean = (first * 1.0 + second * 5.0) / (first + second)
    torch.testing.assert_close(model.weight.data, torch.full((1, 2), -mean, dtype=torch.float64))
    assert float(end.weight.total) == first + second


@pytest.mark.parametrize("optim", ["fused sgd", "fused adamw"])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_no_value_is_read_if_the_kernels_of_the_optimizer_can_skip_a_step(optim, num_batches):
    model = two_numbers()
    optimizer = OPTIMIZERS[optim](model.parameters())
    stepper = stepper_of(model, optimizer, is_prompt=False)
    for weight in (torch.tensor(1.0), torch.tensor(0)):
        # From the second step on: the first one checks gradients and creates the state. An
        # operation that reads raises in a Tape.
        tape = Tape() if optimizer.state else nullcontext()
        with tape, stepper.window(num_batches, num_batches) as window:
            for _ in range(num_batches):
                window.add(weighted(1.0, weight), None, 1)
            window.finish()


@both
def test_low_precision_scales_a_weighted_loss_like_a_plain_one(is_prompt):
    """Weights of thousands of tokens do not overflow if the plain mean does not."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    precision = Precision("fp16", CPU)
    stepper = stepper_of(model, optimizer, precision=precision, is_prompt=is_prompt)
    before = precision.state_dict()["scale"]
    with stepper.window(2, 2) as window:
        for _ in range(2):
            window.add(
                lambda m, b: (m(b).float().sum() / 2, torch.tensor(4096)), torch.ones(1, 2), 1
            )
        window.finish()
    assert precision.state_dict()["scale"] == before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_weighted_losses_train_in_low_precision(precision, way):
    def fit(model, batch):
        y = model(batch[0].float())
        return (y - 1).square().mean(), (batch[0] > 0).sum()

    def net(device):
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def gently(params):  # so that the loss falls, whichever rank trains a batch
        return torch.optim.SGD(params, 0.1)

    settings = {"model": net, "dataset": (DATA,), "train": fit, "way": way, "epochs": 10}
    b = builder(optim=gently, **settings).precision(precision).max_grad_norm(1.0).accumulate(2)
    b.on_non_finite("raise")
    metrics = b.run().join(WAIT_S).metrics
    assert metrics[-1].avg_loss < metrics[0].avg_loss / 2


# -- ranks -------------------------------------------------------------------------------------


def on_ranks(function, num_ranks):
    with ThreadPoolExecutor(num_ranks) as pool:
        return [f.result(WAIT_S) for f in [pool.submit(function, r) for r in range(num_ranks)]]


class Ranks:
    def __init__(self, dtype, num_ranks=2):
        self.models = [nn.Linear(2, 1, bias=False).to(dtype) for _ in range(num_ranks)]
        self.ends = create_collectives(num_ranks, timeout_s=WAIT_S)
        self.reducers = [
            GradientReducer(FlatParams(m), e) for m, e in zip(self.models, self.ends, strict=True)
        ]

    def reduce(self, values, weights, num_samples):
        """The reduced gradient of each rank; ``None``: no weight."""

        def step(rank):
            reducer, model, weight = self.reducers[rank], self.models[rank], weights[rank]
            model.weight.grad = torch.full_like(model.weight, values[rank])
            window = None if weight is None else WindowWeight(weight, 1.0)
            reducer.pack(num_samples[rank], (), window)
            assert reducer.exchange(num_samples[rank])
            reducer.unpack()
            return float(model.weight.grad[0, 0]), reducer.is_empty

        return on_ranks(step, len(self.models))

    def close(self):
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ranks_agree_whichever_of_them_have_a_weight(dtype):
    ranks = Ranks(dtype)
    values, samples = (1.0, 4.0), (2, 3)
    for weights in (
        (None, None),
        (10.0, None),
        (None, None),
        (None, 0.5),
        (1e-4, 3e-4),
        (0.0, 7.0),
    ):
        plain = [n if w is None else w for n, w in zip(samples, weights, strict=True)]
        mean = sum(w * v for w, v in zip(plain, values, strict=True)) / sum(plain)
        for found, is_empty in ranks.reduce(values, weights, samples):
            assert found == pytest.approx(mean, rel=1e-2 if dtype is torch.bfloat16 else 1e-6)
            assert not is_empty
    assert [empty for _, empty in ranks.reduce((0.0, 0.0), (0.0, 0.0), samples)] == [True] * 2
    ranks.close()


def test_the_weight_of_a_failed_reduction_is_dropped():
    ranks = Ranks(torch.float32)
    broken, ranks.ends = ranks.ends, create_collectives(2, timeout_s=WAIT_S)
    model, reducer = ranks.models[0], ranks.reducers[0]
    model.weight.grad = torch.ones_like(model.weight)
    reducer.pack(2, (), WindowWeight(50.0, 1.0))
    broken[1].abort()
    with pytest.raises(CollectiveAborted):
        reducer.exchange(2)
    for end, other in zip(ranks.ends, ranks.reducers, strict=True):
        other.collective = end
    found = ranks.reduce((1.0, 4.0), (None, 8.0), (2, 2))
    assert [value for value, _ in found] == pytest.approx([3.4, 3.4])
    ranks.close()


def test_weighted_training_continues_after_the_death_of_a_rank():
    models = {}

    def fit(model, batch):
        models[current_worker().rank] = model
        (x,) = batch
        return (model(x) - 1).square().mean(), (x > 0).sum()

    def net(device):
        torch.manual_seed(0)
        return nn.Linear(3, 1).double()

    fault = Dies((1, 3), inner=fit)
    settings = {"ranks": 3, "epochs": 3, "optim": sgd, "way": (SYNC, THREAD)}
    b = builder(model=net, dataset=(DATA,), train=fault, **settings)
    state = b.on_worker_failure("continue").run().join(WAIT_S)
    assert fault.num_shots == 1
    assert [m.num_samples for m in state.metrics] == [66] * 3
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
    for key, value in models[0].state_dict().items():
        assert torch.equal(value, models[2].state_dict()[key]), key


# -- values that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
@pytest.mark.parametrize("mode", ["raise", "skip", "ignore"])
def test_a_nan_of_weight_0_is_ignored(way, mode):
    def fit(model, batch):
        is_dead = bool(batch[0][0] % 2)
        record_scalar("loss", torch.tensor(torch.nan if is_dead else 1.0))
        return model.w.sum() * (torch.nan if is_dead else 1.0), 0 if is_dead else 1.5

    b = builder(train=fit, dataset=20, batch_size=5, epochs=3, way=way).on_non_finite(mode)
    state = b.run().join(WAIT_S)
    for metrics in state.metrics:
        assert metrics.num_skipped == 0
        assert metrics.avg_loss == metrics.avg_loss
        assert metrics.scalars["loss"] == 1.0
    assert torch.isfinite(state.params["w"]).all()


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_a_nan_with_a_weight_is_a_fault(way):
    def fit(model, batch):
        return model.w.sum() * torch.nan, 1

    with pytest.raises(WorkerFailed) as caught:
        builder(train=fit, way=way).run().join(WAIT_S)
    assert isinstance(caught.value.__cause__, NonFiniteError)
    state = builder(train=fit, way=way).on_non_finite("skip").run().join(WAIT_S)
    assert state.metrics[0].num_skipped == 20


# -- graphs ------------------------------------------------------------------------------------


def of_tokens(model, batch):
    """Some batches have the weight 0."""
    (x,) = batch
    is_counted = (x[:, 0] > 0.3) & (x[:1, 1] > -0.5)
    loss = loss_of(model, batch)
    errors = (model(x).squeeze(1) - x.sum(1)).square()
    return 0 * loss + (errors * is_counted).sum() / is_counted.sum(), is_counted.sum()


def fused(params):
    return torch.optim.SGD(params, 0.01, momentum=0.9, fused=True)


@pytest.mark.parametrize("optim", [adamw, sgd, fused])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_weighted_steps_of_a_graph_equal_eager_steps(optim, accumulate, posing):
    def make():
        return a_run(optim=optim, loss=of_tokens).accumulate(accumulate).max_grad_norm(0.5)

    assert_graphs_change_nothing(make)
    (replays, *second) = posing.num_replays
    assert replays == 3 * (16 // accumulate) - 3
    assert len(second) == (optim is not fused)  # otherwise a read comes between two graphs


def test_weighted_steps_of_graphs_on_several_ranks_equal_eager_steps(posing):
    assert_graphs_change_nothing(lambda: a_run(loss=of_tokens, way=(SYNC, THREAD), ranks=2))
    assert len(posing.num_replays) >= 2
    assert all(n >= 8 for n in posing.num_replays)


def test_a_first_weight_during_a_capture_splits_the_graph_for_its_read(posing):
    """The function returns a weight for the first time in the capture, which is then split."""
    calls = []

    def fit(model, batch):
        calls.append(0)
        loss = loss_of(model, batch)
        return loss if len(calls) < 4 else (loss, (batch[0] > 0).sum())

    state = train(a_run(loss=fit, optim=sgd).cuda_graphs(True))
    assert state.metrics[-1].num_samples == 66
    assert len(posing.num_replays) == 2
    assert posing.num_replays[1] > 10


# -- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [0.25, torch.tensor(0.25)])
def test_losses_and_scalars_are_means_by_weight(unit):
    def fit(model, batch):
        record_scalar("first", float(batch[0]))
        return Weighted(model.w.sum() * 0 + float(batch[0]), unit * float(batch[0]))

    metrics = builder(train=fit, dataset=10, batch_size=1, ranks=1).run().join(WAIT_S).metrics[0]
    mean = sum(i * i for i in range(10)) / sum(range(10))
    assert metrics.avg_loss == pytest.approx(mean)
    assert metrics.scalars["first"] == pytest.approx(mean)
    assert metrics.per_rank[0].avg_loss == pytest.approx(mean)
    assert metrics.num_samples == 10


def test_partial_sums_with_weights_come_back_from_a_checkpoint():
    stats = EpochAccumulator(1)
    weight = exact_sum([0.1, 0.2, 0.3])
    stats.add(0, ReportStats(loss_sum=1.0, loss_samples=weight, scalars={"x": (1.0, 0.1)}))
    stats.add(0, ReportStats(loss_sum=2.0, loss_samples=4, scalars={"x": (2.0, 3)}))
    saved = decode(tuple[Sums, ...], encode(tuple(stats.ranks)), "")
    again = EpochAccumulator(1, saved)
    closing = {"epoch": 0, "epoch_s": 1.0, "num_samples": 1, "devices": ["cpu"]}
    assert repr(again.close(**closing)) == repr(stats.close(**closing))  # nan differs from nan
    assert again.close(**closing).avg_loss == pytest.approx(3.0 / 4.6)


def test_a_step_result_has_its_weight():
    def worker():
        endpoints, _ = GpuWorker.channels()
        functions = UserFunctions(
            model_factory=counter, optim_factory=plain_sgd, train_fn=lambda m, b: m.w.sum()
        )
        return GpuWorker(WorkerConfig(), functions, endpoints)

    made = worker()
    batch = (torch.arange(3),)
    assert made.train_step(batch).weight == 3
    result = made.train_step(batch, lambda model, b: (model.w.sum(), torch.tensor(7)))
    assert result.weight == 7
    assert made.snapshot_params().weight == 10
    assert made.snapshot_params().num_samples == 6
    made.close()


# -- invalid weights ---------------------------------------------------------------------------

BAD = {
    "negative": (-1, ValueError, "the weight -1"),
    "nan": (float("nan"), ValueError, "the weight nan"),
    "infinite": (float("inf"), ValueError, "the weight inf"),
    "bool": (True, TypeError, "of type bool"),
    "text": ("1", TypeError, "of type str"),
    "none": (None, TypeError, "of type NoneType"),
    "vector": (torch.ones(2), ValueError, r"of shape \(2,\)"),
    "mask": (torch.tensor(True), TypeError, "of torch.bool"),
    "complex": (torch.tensor(1j), TypeError, "of torch.complex64"),
    "negative tensor": (torch.tensor(-2.0), ValueError, "the weight -2"),
    "nan tensor": (torch.tensor(torch.nan), ValueError, "the weight nan"),
}


def refused(weight, **kwargs):
    with pytest.raises(WorkerFailed) as caught:
        builder(train=lambda m, b: (m.w.sum(), weight), **kwargs).run().join(WAIT_S)
    return caught.value.__cause__


@pytest.mark.parametrize(("weight", "kind", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
def test_an_invalid_weight_is_refused(weight, kind, message, way):
    cause = refused(weight, way=way)
    assert type(cause) is kind
    assert cause.args[0].startswith("train_fn returned")
    with pytest.raises(kind, match=message):
        raise cause
    assert "return (loss, weight) with the mean loss" in str(cause)


@pytest.mark.parametrize("weight", [-2.0, torch.nan, torch.inf])
@pytest.mark.parametrize("mode", ["raise", "ignore"])
def test_an_invalid_weight_on_a_device_is_refused_when_it_is_read(weight, mode, posing):
    handle = (
        builder(train=lambda m, b: (m.w.sum(), torch.tensor(weight)), ranks=1)
        .on_non_finite(mode)
        .run()
    )
    with pytest.raises(WorkerFailed) as caught:
        handle.join(WAIT_S)
    assert f"the weight {float(weight)} in step 0" in str(caught.value.__cause__)


@pytest.mark.parametrize("result", [(), (1,), (1, 2, 3)])
def test_tuples_of_another_length_are_refused(result):
    with pytest.raises(WorkerFailed, match=f"a tuple of {len(result)}: return"):
        builder(train=lambda m, b: result).run().join(WAIT_S)


AMBIGUOUS = {
    "accuracy": (lambda loss: (loss, 0.75), "a fraction is not taken for one"),
    "accuracy tensor": (lambda loss: (loss, torch.tensor(0.75)), "a fraction is not taken"),
    "second loss": (lambda loss: (loss, loss * 2), "add losses up"),
}


@pytest.mark.parametrize(("result", "message"), AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("door", ["builder", "one device", "accumulate"])
def test_a_second_value_that_is_hardly_a_weight_is_refused(result, message, door):
    def accumulate():
        with closing(Trainer.setup(nn.Linear(2, 1), sgd, devices=[CPU] * 2)) as model:
            batches = [torch.ones(4, 2)] * 2
            model.accumulate(lambda m, b: result(m(b).square().mean()), batches)

    def run():
        ranks = 1 if door == "one device" else 2
        builder(train=lambda m, b: result(m.w.sum()), ranks=ranks).run().join(WAIT_S)

    with pytest.raises((WorkerFailed, ReplicaFailed)) as caught:
        (accumulate if door == "accumulate" else run)()
    error = str(caught.value.__cause__ or caught.value)
    assert message in error
    assert "gpuworker.Weighted(loss, weight" in error
    assert door == "accumulate" or "gpuworker.record_scalar(name, value)" in error


@pytest.mark.parametrize("kind", [dict, list])
def test_other_second_values_are_refused_with_the_call_that_records_them(kind):
    assert "gpuworker.record_scalar(name, value)" in str(refused(kind()))


def test_a_count_of_right_samples_in_the_explicit_form_is_refused():
    with pytest.raises(WorkerFailed) as caught:
        builder(train=lambda m, b: Weighted(m.w.sum(), 1, 3)).run().join(WAIT_S)
    assert "record it by gpuworker.record_scalar" in str(caught.value.__cause__)


def test_a_fraction_above_one_is_reported_once(caplog):
    _WARNED.clear()
    for _ in range(2):
        builder(train=lambda m, b: (m.w.sum(), 2.5)).run().join(WAIT_S)
    assert caplog.text.count("gpuworker.Weighted(loss, weight) to confirm") == 1


@pytest.mark.parametrize("kind", [np.int64, np.float32, lambda n: torch.tensor([n])])
def test_numbers_and_scalars_of_any_kind_are_weights(kind):
    def trained(kind):
        def train(model, batch):
            i = int(batch[0][0])
            return model.w.sum() * i, kind(1 + i)

        return builder(train=train, dataset=8, way=(SYNC, THREAD)).run().join(WAIT_S).params["w"]

    assert torch.equal(trained(kind), trained(int))
    assert not torch.equal(trained(int), trained(lambda _: 1))


# Model outputs in place of a loss.


@dataclass
class Output:
    """An output in the form of the Transformers library."""

    loss: torch.Tensor
    logits: torch.Tensor


class Tagger(nn.Module):
    """Predicts each label at its position or, as a causal language model, the next one."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(7, 7, dtype=torch.float64)

    def forward(self, ids, labels):
        logits = self.table(ids)
        first, labels = (logits[:, :-1], labels[:, 1:]) if self.causal else (logits, labels)
        loss = nn.functional.cross_entropy(first.transpose(1, 2), labels)
        return Output(loss, logits if self.causal else logits[:, :, :, None])


def texts():
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 7, (24, 6), generator=draw)
    labels = ids.clone()
    labels[torch.rand(24, 6, generator=draw) < 0.4] = -100
    labels[:, 1] = ids[:, 1]  # no text without a label
    return {"ids": ids, "labels": labels}


def as_output(model, batch):
    return model(**batch)


def as_dict(model, batch):
    return {"loss": model(**batch).loss, "logits": model(**batch).logits}


def by_hand(model, batch):
    labels = batch["labels"][:, 1:] if model.causal else batch["labels"]
    return model(**batch).loss, (labels != -100).sum()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("returned", [as_output, as_dict])
def test_the_weight_of_an_outputs_loss_is_its_number_of_labels(returned, causal, caplog):
    def trained(train_fn):
        torch.manual_seed(1)
        b = builder(model=lambda device: Tagger(causal), train=train_fn, dataset=texts(), ranks=2)
        state = b.policy(SYNC).backend(THREAD).accumulate(2).seed(4).run().join(WAIT_S)
        return state.params["table.weight"], state.metrics[0].avg_loss

    (params, loss), (wanted, wanted_loss) = trained(returned), trained(by_hand)
    assert torch.equal(params, wanted)
    assert loss == wanted_loss
    plain, _ = trained(lambda model, batch: model(**batch).loss)
    assert not torch.allclose(plain, wanted)
    assert not caplog.records


def test_an_output_may_have_a_field_with_its_weight():
    def trained(train_fn):
        b = builder(model=lambda device: Tagger(False), train=train_fn, dataset=texts(), ranks=2)
        return b.policy(SYNC).backend(THREAD).seed(4).run().join(WAIT_S).params["table.weight"]

    def by_field(model, batch):
        weight = batch["ids"].sum().double()
        return {"loss": model(**batch).loss, "loss_weight": weight}

    def by_pair(model, batch):
        return model(**batch).loss, batch["ids"].sum()

    assert torch.equal(trained(by_field), trained(by_pair))


def test_an_output_without_a_weight_is_warned_of_once(caplog):
    _warn_of_guess.cache_clear()

    def train(model, batch):
        return {"loss": model.w.sum()}

    state = builder(train=train, ranks=1).run().join(WAIT_S)
    assert state.params["w"].item() == -10.0
    warnings = [r.message for r in caplog.records if "return output.loss, or" in r.message]
    assert len(warnings) == 1


@pytest.mark.parametrize("output", [{"logits": torch.ones(2)}, {"loss": 3.0}, {}])
def test_an_output_without_a_loss_is_refused(output):
    with pytest.raises(WorkerFailed) as caught:
        builder(train=lambda model, batch: output).run().join(WAIT_S)
    assert "return the batch's mean loss as a tensor" in str(caught.value.__cause__)
