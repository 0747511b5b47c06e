"""Replicas that differ under SYNC: named with tensor, ranks and step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpuworker
from gpuworker import current_worker
from runtime.replica.drift import DriftCheck
from runtime.worker import flow as flow_file
from tests.support.running import CADENCE, GLOO, OVER_CPU, SYNC, THREAD, WAIT_S, builder

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.teacher = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


def train(model, batch):
    return model(batch[0]).square().mean()


def adam(params, lr=0.01):
    return torch.optim.AdamW(params, lr)


def run(
    change,
    at=1,
    epochs=3,
    ranks=2,
    configure=lambda b: b,
    way=(SYNC, THREAD),
    train=train,
    optim=adam,
):
    def epoch_fn(epoch, worker):
        if epoch == at and worker.rank == ranks - 1:
            change(worker)

    b = builder(
        model=lambda device: Net(),
        optim=optim,
        train=train,
        dataset=(X,),
        batch_size=4,
        epochs=epochs,
        ranks=ranks,
        way=way,
    )
    return configure(b.epoch_fn(epoch_fn)).run().join(WAIT_S)


@torch.no_grad()
def negated(worker):
    worker.model.head.weight.data.neg_()


@torch.no_grad()
def one_element(worker):
    worker.model.head.bias += 1e-4


def state(worker):
    worker.optimizer.state[worker.model.body.weight]["exp_avg_sq"].mul_(2)


def step_count(worker):
    worker.optimizer.state[worker.model.body.weight]["step"] += 1


def learning_rate(worker):
    worker.set_lr(0.1)


@torch.no_grad()
def teacher(worker):
    worker.model.teacher.weight.mul_(2)


CHANGES = [
    (negated, "'body.weight'"),  # its gradient depends on the head
    (one_element, "'body"),
    (state, "'body.weight'"),
    (step_count, "'body.weight'"),
    (learning_rate, "'body.weight'"),
]


@pytest.mark.parametrize("backend", [THREAD, GLOO])
@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_on_one_rank_is_named_at_the_end_of_its_epoch(change, name, backend):
    with pytest.raises(gpuworker.ReplicaMismatch) as caught:
        run(change, ranks=3 if backend is THREAD else 2, way=(SYNC, backend))
    message = str(caught.value)
    last = 2 if backend is THREAD else 1
    assert f"of rank {last} differs from that of rank 0" in message
    assert "let it act alike on every rank. If train_fn" in message
    steps = -(-16 // (4 * (last + 1)))
    assert f"at step {2 * steps} of SYNC" in message
    assert f"last equal at step {steps}" in message
    assert name in message or "'head" in message


def test_frozen_parameters_of_a_teacher_become_those_of_rank_0_with_one_warning(caplog):
    def updates_teacher(model, batch):
        with torch.no_grad():
            model.teacher.weight.add_(1.0)
        return train(model, batch)

    b = builder(
        model=lambda device: Net(),
        optim=adam,
        train=updates_teacher,
        dataset=(X[:9],),  # the last step has a sample for rank 0 alone
        batch_size=4,
        epochs=3,
        way=(SYNC, THREAD),
    )
    trained = b.run().join(WAIT_S).params["teacher.weight"]
    torch.testing.assert_close(trained, Net().teacher.weight + 6, check_stride=False)
    warnings = [r.getMessage() for r in caplog.records if "replicas differ" in r.getMessage()]
    assert len(warnings) == 1
    assert "frozen parameter 'teacher.weight' of rank 1" in warnings[0]
    assert "drop_last(True)" in warnings[0]


def test_buffers_are_averaged_where_frozen_parameters_become_those_of_rank_0(caplog):
    def model(device):
        net = Net()
        net.register_buffer("seen", torch.zeros(()))
        return net

    def counts(model, batch):
        with torch.no_grad():
            model.teacher.weight.add_(1.0)
            model.seen.add_(1.0 if len(batch[0]) == 1 or current_worker().rank == 0 else 10.0)
        return train(model, batch)

    b = builder(
        model=model, optim=adam, train=counts, dataset=(X[:9],), batch_size=4, way=(SYNC, THREAD)
    )
    state = b.run().join(WAIT_S)
    assert "frozen parameter 'teacher.weight'" in caplog.text
    # rank 0 counts two steps with 5 samples, rank 1 one step with 4
    assert state.buffers["seen"].item() == pytest.approx((2 * 5 + 10 * 4) / 9)
    assert "buffer 'seen' differs between the ranks" in caplog.text


def test_a_change_of_frozen_parameters_on_one_rank_is_repaired(caplog):
    found = {}

    def keep(epoch, worker):
        found[epoch, worker.rank] = worker.model.teacher.weight.detach().clone()
        if (epoch, worker.rank) == (1, 1):
            teacher(worker)

    run(lambda worker: None, configure=lambda b: b.epoch_fn(keep))
    assert "frozen parameter 'teacher.weight' of rank 1" in caplog.text
    assert all(torch.equal(found[2, rank], Net().teacher.weight) for rank in range(2))


@pytest.mark.parametrize("way", [(SYNC, THREAD), (SYNC, GLOO)])
def test_flags_that_differ_between_ranks_are_named_once(way, caplog):
    def freeze(worker):
        worker.model.body.weight.requires_grad_(False)
        worker.model.head.eval()

    run(freeze, epochs=4, way=way)
    (record,) = [each for each in caplog.records if "requires_grad" in each.message]
    assert "'body.weight' differs between the ranks of SYNC: [True, False]" in record.message


def test_modes_that_differ_between_ranks_are_named(caplog):
    run(lambda worker: worker.model.head.eval())
    assert "training of module 'head' differs between the ranks of SYNC" in caplog.text
    caplog.clear()
    run(lambda worker: worker.model.eval())
    assert "training of the model differs between the ranks of SYNC" in caplog.text


def test_flags_that_change_alike_are_not_reported(caplog):
    def epoch_fn(epoch, worker):
        worker.model.body.requires_grad_(epoch != 1)
        worker.model.head.train(epoch != 1)

    run(lambda worker: None, configure=lambda b: b.epoch_fn(epoch_fn))
    assert "differs between" not in caplog.text


def test_a_change_in_the_last_epoch_is_noticed():
    with pytest.raises(gpuworker.ReplicaMismatch, match=r"at step 6 .*'head\.weight' of rank 1"):
        run(negated, at=2)


def test_exchanged_elements_are_noticed():
    @torch.no_grad()
    def exchange(epoch, worker):
        if worker.rank == 1:
            weight = worker.model.body.weight
            weight.copy_(weight.roll(2, dims=0))  # whole words of the checksum

    b = builder(
        model=lambda device: nn.ModuleDict({"body": nn.Linear(2, 4)}),
        optim=lambda params: torch.optim.SGD(params, 0.0),
        train=lambda model, batch: model["body"](batch[0][:, :2]).square().mean(),
        dataset=(X,),
        batch_size=4,
        epochs=1,
        way=(SYNC, THREAD),
    )
    with pytest.raises(gpuworker.ReplicaMismatch, match=r"parameter 'body\.weight' of rank 1"):
        b.epoch_fn(exchange).run().join(WAIT_S)


def test_a_change_within_a_long_epoch_is_noticed_before_its_end(monkeypatch):
    monkeypatch.setattr(flow_file, "DRIFT_INTERVAL", 1)

    def drifting(model, batch):
        worker = gpuworker.current_worker()
        if worker.rank == 1 and worker.local_step == 0:
            model.head.weight.data.mul_(2)
        return train(model, batch)

    with pytest.raises(gpuworker.ReplicaMismatch, match=r"at step 1 .*last equal at step 0"):
        run(lambda worker: None, train=drifting)


def test_parameters_that_differ_are_averaged_under_cadence():
    """Weights and their negation, of two ranks that train the whole first epoch without a round."""
    state = run(
        negated,
        at=0,
        way=(CADENCE, OVER_CPU),
        configure=lambda b: b.partition_ratios([1, 1]).anchor(100),
        optim=lambda params: adam(params, 0.0),
    )
    before = Net().head.weight.detach()
    factors = state.params["head.weight"] / before
    assert factors.abs().max() < 1
    torch.testing.assert_close(factors, factors[:1, :1].expand_as(factors))


def test_an_optimizer_that_steps_on_local_gradients_is_noticed():
    def steps_itself(model, batch):
        loss = train(model, batch)
        with torch.no_grad():
            for p, g in zip(
                model.head.parameters(),
                torch.autograd.grad(loss, model.head.parameters(), retain_graph=True),
                strict=False,
            ):
                p -= 0.1 * g
        return train(model, batch)

    with pytest.raises(gpuworker.ReplicaMismatch, match=r"parameter 'head\.\w+' of rank 1"):
        run(lambda worker: None, train=steps_itself)


def test_equal_replicas_cost_one_exchange_for_each_comparison(monkeypatch):
    found = []
    compare = DriftCheck.compare

    def counted(self, collective, *, frozen):
        drift = compare(self, collective, frozen=frozen)
        found.append(drift)
        return drift

    monkeypatch.setattr(DriftCheck, "compare", counted)
    monkeypatch.setattr(DriftCheck, "_first_difference", None)  # not called
    run(lambda worker: None)
    assert found == [None] * 6


def test_the_removed_reaction_and_unknown_ones_are_refused():
    with pytest.raises(ValueError, match=r'on_drift\("repair"\) was removed: leave it out, and'):
        builder().on_drift("repair")
    with pytest.raises(ValueError, match=r"on_drift\('ignore'\): pass one of raise$"):
        builder().on_drift("ignore")
