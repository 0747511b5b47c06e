"""ema(): moving averages of the parameters equal those of one plain device."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch import nn

from runtime import Trainer, current_worker
from runtime.replica.flat import FlatParams
from runtime.replica.param_ema import ParamEma
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
)

D = 0.9
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ranks = pytest.mark.parametrize("ranks", [1, 2, 3])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 1)
        self.tied = self.two
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))
        self.double()

    def forward(self, x):
        return self.two(self.one(x).tanh())


def loss_of(model, batch):
    model.seen += 1
    return model(batch[0]).square().mean()


class Steps:
    """Records the parameters before each optimizer step of a rank."""

    def __init__(self, inner=loss_of):
        self.inner, self.found, self.rank = inner, [], 0

    def __call__(self, model, batch):
        if current_worker().rank == self.rank:
            now = {n: p.detach().clone() for n, p in model.named_parameters()}
            if not self.found or any(not torch.equal(now[n], self.found[-1][n]) for n in now):
                self.found.append(now)
        return self.inner(model, batch)

    def ema(self, state, decay=D):
        """The moving average of the recorded parameters and the last ones."""
        average, *later = self.found
        average = {n: p.clone() for n, p in average.items()}
        for now in (*later, state.params):
            for name, value in average.items():
                value.mul_(decay).add_(now[name], alpha=1 - decay)
        return average


def make(train, ranks, way=(SYNC, THREAD), **more):
    return builder(
        model=lambda device: Net(),
        optim=lambda params: torch.optim.AdamW(params, 0.05),
        train=train,
        dataset=(X,),
        batch_size=4,
        ranks=ranks,
        way=way,
        **more,
    ).ema(D)


def close(found, wanted, rtol=1e-12):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=1e-12)


def plain(batch_size, decay=D, epochs=2):
    """The moving average of one plain device, over the same batches in any order: all of them."""
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(epochs):
        optimizer.zero_grad()
        loss_of(model, (X,)).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            average[name].mul_(decay).add_(p.detach(), alpha=1 - decay)
    return average


@pytest.mark.parametrize("backend", [THREAD, GLOO])
@ranks
def test_under_sync_the_moving_average_is_that_of_one_device(ranks, backend):
    """Each step trains the whole data set."""
    b = make(loss_of, ranks, (SYNC, backend), epochs=2).batch_size(48 // ranks)
    close(b.run().join(WAIT_S).ema_state_dict(), plain(48))


@ranks
@pytest.mark.parametrize("accumulate", [1, 2])
def test_under_sync_each_optimizer_step_counts_once(ranks, accumulate):
    steps = Steps()
    state = make(steps, ranks, epochs=2).accumulate(accumulate).run().join(WAIT_S)
    assert len(steps.found) == 2 * 12 // (ranks * accumulate)
    close(state.ema_state_dict(), steps.ema(state))


@pytest.mark.parametrize(("ranks", "way"), [(2, (SYNC, THREAD)), (1, (CADENCE, OVER_CPU))])
def test_a_step_that_fp16_skips_does_not_count(ranks, way):
    def train(model, batch):
        overflows = current_worker().local_step == 2
        return model.one.weight.sum() * (1e308 if overflows else 1.0)

    steps = Steps(train)
    state = make(steps, ranks, way, epochs=1).precision("fp16").run().join(WAIT_S)
    assert len(steps.found) == 12 // ranks - 1
    close(state.ema_state_dict(), steps.ema(state), 1e-6)


@ranks
def test_an_own_loop_has_that_of_its_train_fn(ranks):
    def loop(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))

    def optim(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)

    b = Trainer.loop(lambda device: Net(), optim, loop).dataset((X,)).batch_size(4).num_epochs(2)
    b.devices(["cpu"] * ranks).policy("sync").backend("thread").ema(D)
    found = b.run().join(WAIT_S).ema_state_dict()
    close(found, make(loss_of, ranks, epochs=2).run().join(WAIT_S).ema_state_dict())


def test_names_and_other_values_are_those_of_the_state():
    state = make(loss_of, 2).run().join(WAIT_S)
    found = state.ema_state_dict()
    assert list(found) == list(state.state_dict())
    assert torch.equal(found["tied.weight"], found["two.weight"])
    assert not torch.equal(found["two.weight"], state.params["two.weight"])
    assert torch.equal(found["fixed"], state.params["fixed"])
    assert torch.equal(found["seen"], state.buffers["seen"])
    Net().load_state_dict(found)
    close(pickle.loads(pickle.dumps(state)).ema_state_dict(), found)


def test_a_run_without_one_has_none():
    state = make(loss_of, 1)._set(ema=None).run().join(WAIT_S)
    with pytest.raises(ValueError, match=r"\.ema\(decay\)"):
        state.ema_state_dict()


def test_training_is_the_same_with_and_without():
    one = make(loss_of, 2).run().join(WAIT_S).state_dict()
    other = make(loss_of, 2)._set(ema=None).run().join(WAIT_S).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_round_moves_the_average_by_the_steps_of_a_rank(way, ranks):
    """Ranks in lockstep by a lead of 0, so that a round is due after each of their steps."""
    averages = []

    class Recorded(ParamEma):
        def move(self, average, num_batches, *, undoable=False):
            if self._params.params[0] is lead[0]:
                averages.append((num_batches, [a.clone().cpu() for a in average]))
            super().move(average, num_batches, undoable=undoable)

    lead = []

    def train(model, batch):
        if current_worker().rank == 0 and not lead:
            lead.append(model.one.weight)
        return loss_of(model, batch)

    start = FlatParams(Net())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.worker.replica.ParamEma", Recorded)
        b = make(train, ranks, way, epochs=2).anchor(2).max_anchor(2).max_batch_diff(1)
        state = b.run().join(WAIT_S)
    total = sum(num for num, _ in averages)
    trained = sum(r.num_batches for m in state.metrics for r in m.per_rank)
    assert len(averages) >= 2
    assert total <= trained / ranks + 1e-9
    expected = [flat.clone() for flat in start.flats]
    for num, average in averages:
        for flat, value in zip(expected, average, strict=True):
            flat.lerp_(value, 1 - D**num)
    last = FlatParams(state.model(Net)).flats
    rest = trained / ranks - total
    for flat, value in zip(expected, last, strict=True):
        flat.lerp_(value, 1 - D**rest)
    close(state.ema_state_dict(), dict(zip(start.names, start.views(expected), strict=True)), 1e-9)


def test_the_survivor_of_all_deaths_continues_the_average_step_by_step():
    steps, dead = Steps(), threading.Event()

    def train(model, batch):
        if current_worker().rank == 1:
            dead.set()
            raise RuntimeError("planted")
        assert dead.wait(WAIT_S)
        return steps(model, batch)

    b = make(train, 2, (CADENCE, OVER_CPU), epochs=6).on_worker_failure("continue")
    state = b.run().join(WAIT_S)
    found, wanted = state.ema_state_dict(), steps.ema(state)
    # The first steps may count together, before the rank is notified.
    close(found, wanted, 0.05)


@pytest.mark.parametrize("dies_at", [1, 4, 7])
def test_a_death_under_sync_loses_no_step_of_the_average(dies_at):
    steps, num = Steps(), [0]

    def train(model, batch):
        if current_worker().rank == 1:
            num[0] += 1
            if num[0] == dies_at:
                raise RuntimeError("planted")
        return steps(model, batch)

    b = make(train, 3, epochs=3).on_worker_failure("continue")
    state = b.run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [1]
    close(state.ema_state_dict(), steps.ema(state))


def test_a_replica_that_is_copied_has_that_of_its_donor():
    """Rank 1 is copied in epoch 1, and is the only one left from epoch 2 on."""
    steps, workers, meeting = Steps(), {}, threading.Barrier(2, timeout=WAIT_S)

    def copies(epoch, worker):
        workers[worker.rank] = worker
        if epoch == 1:
            meeting.wait()
            if worker.rank == 1:
                with torch.no_grad():
                    for p in (*worker.model.parameters(), *worker.replica.ema.flats):
                        p.add_(1.0)
                worker.replica.copy_from(workers[0].replica)
            meeting.wait()

    def train(model, batch):
        worker = current_worker()
        if worker.rank == 0 and worker.current_epoch == 2:
            raise RuntimeError("planted")
        if worker.rank == 1 and worker.current_epoch == 2:
            steps.rank = 1
        return steps(model, batch)

    b = make(train, 2, epochs=3).epoch_fn(copies)
    state = b.on_worker_failure("continue").run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [0]
    close(state.ema_state_dict(), steps.ema(state))


@ranks
def test_a_resumed_run_continues_the_average(tmp_path, ranks):
    whole = make(loss_of, ranks, epochs=4).run().join(WAIT_S)
    make(loss_of, ranks, epochs=2).checkpoint_dir(tmp_path).run().join(WAIT_S)
    state = make(loss_of, ranks, epochs=4).resume(tmp_path).run().join(WAIT_S)
    found, wanted = state.ema_state_dict(), whole.ema_state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (CADENCE, THREAD)])
def test_a_resumed_run_without_lockstep_continues_the_average(tmp_path, way):
    """Parameters that do not move: the average moves towards them by the steps alone."""

    def still(model, batch):
        return 0 * model(batch[0]).sum()

    start = {n: p.detach().clone() for n, p in Net().named_parameters()}

    together = threading.Barrier(2)

    def shift(epoch, worker):
        if epoch == 0:
            with torch.no_grad():
                for p in worker.model.parameters():
                    p.add_(1.0)
            together.wait(WAIT_S)  # before a round, whose average would be shifted once more

    def run(epochs):
        b = make(still, 2, way, epochs=epochs).epoch_fn(shift).anchor(2)
        return b._set(optim_factory=lambda params: torch.optim.SGD(params, 1.0))

    first = run(1).checkpoint_dir(tmp_path, every_steps=4).run().join(WAIT_S)
    state = run(2).resume(tmp_path).run().join(WAIT_S)
    left = [
        (s.params["one.weight"] - s.ema_state_dict()["one.weight"]).mean().item()
        for s in (first, state)
    ]
    assert left[0] == pytest.approx(D**6, 0.05)
    assert left[1] == pytest.approx(D**12, 0.15)
    assert start["one.weight"].mean() < first.ema_state_dict()["one.weight"].mean()


def test_a_checkpoint_without_an_average_starts_it_from_its_weights(tmp_path, caplog):
    make(loss_of, 2, epochs=1)._set(ema=None).checkpoint_dir(tmp_path).run().join(WAIT_S)
    steps = Steps()
    state = make(steps, 2, epochs=2).resume(tmp_path).run().join(WAIT_S)
    assert "no moving average" in caplog.text
    close(state.ema_state_dict(), steps.ema(state))


def test_each_of_several_optimizers_moves_its_part():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    seen = []

    def of_a(model, batch):
        if current_worker().rank == 0:
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        return model.a(batch[0]).square().mean()

    b = builder(
        model=lambda device: Two(),
        optim={n: lambda params: torch.optim.SGD(params, 0.1) for n in "ab"},
        train={"a": of_a, "b": lambda model, batch: model.b(batch[0]).square().mean()},
        dataset=(X,),
        batch_size=4,
        way=(SYNC, THREAD),
    ).ema(D)
    state = b.run().join(WAIT_S)
    steps = Steps()
    steps.found = seen
    close(state.ema_state_dict(), steps.ema(state))


@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_are_skipped_do_not_count(ranks, by_weight):
    """In every first of two steps the loss is not finite, or has the weight 0, on all ranks."""
    steps, num = Steps(), [0] * ranks

    def train(model, batch):
        rank = current_worker().rank
        num[rank] += 1
        loss, trains = steps(model, batch), 1 - num[rank] % 2
        if by_weight:
            return loss, len(batch[0]) * trains
        return loss if trains else loss * float("nan")

    state = make(train, ranks).on_non_finite("skip").run().join(WAIT_S)
    assert len(steps.found) == 12 // ranks // 2
    close(state.ema_state_dict(), steps.ema(state))


def test_parameters_of_16_bits_have_an_average_of_32():
    model = nn.Linear(64, 1, bias=False).to(torch.bfloat16)
    nn.init.zeros_(model.weight)
    params = FlatParams(model)
    ema = ParamEma(0.999, params)
    model.weight.data.fill_(1.0)
    for _ in range(100):
        ema.step()
    (found,) = ema.final_values(params.flats, 0).values()
    assert found.dtype is torch.bfloat16
    assert found.float().mean().item() == pytest.approx(1 - 0.999**100, 0.01)


def test_a_flag_on_the_device_skips_the_update():
    params = FlatParams(nn.Linear(4, 1))
    ema = ParamEma(0.5, params)
    before = ema.copy()
    params.flats[0].add_(1.0)
    ema.step(None, torch.ones(1))
    assert torch.equal(ema.flats[0], before[0])
    ema.step(None, torch.zeros(1))
    torch.testing.assert_close(ema.flats[0], before[0] + 0.5)


def test_an_undone_round_leaves_no_trace():
    params = FlatParams(nn.Linear(4, 1))
    ema = ParamEma(0.5, params)
    before = ema.copy()
    ema.move([flat + 1 for flat in params.flats], 3, undoable=True)
    assert not torch.equal(ema.flats[0], before[0])
    ema.undo()
    assert torch.equal(ema.flats[0], before[0])


class Modes(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda b: b.ema(1.5), "ema"),
        (lambda b: b.ema(-0.1), "ema"),
        (lambda b: b.ema("high"), "ema"),
    ],
)
def test_a_decay_out_of_range_is_refused(change, error):
    with pytest.raises((TypeError, ValueError), match=error):
        change(builder())


def test_an_optimizer_that_averages_weights_itself_is_refused():
    b = make(loss_of, 1)._set(optim_factory=lambda params: Modes(params, 0.1))
    with pytest.raises(RuntimeError, match="leave ema out"):
        b.run().join(WAIT_S)
