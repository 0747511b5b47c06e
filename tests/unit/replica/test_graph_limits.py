"""Steps that cannot be captured, or not completely: made eagerly, with a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.replica.optimizers import load_optimizer_state
from tests.support.graphing import (
    DATA,
    a_run,
    assert_equal_runs,
    assert_graphs_change_nothing,
    capturable_on_cpu,
    loss_of,
    posing,
    sgd,
    train,
    warnings_of,
)
from tests.support.running import SYNC, THREAD, local_ways

__all__ = ["capturable_on_cpu", "posing"]  # fixtures


# -- steps that cannot be captured -----------------------------------------------------------------


def reading(model, batch):
    loss = loss_of(model, batch)
    return loss * (2.0 if loss.item() > 1e9 else 1.0)


def test_a_step_that_reads_the_device_is_made_eagerly_with_one_warning(posing, caplog):
    expected = train(a_run(loss=reading, ranks=2, way=(SYNC, THREAD)))
    state = train(a_run(loss=reading, ranks=2, way=(SYNC, THREAD)).cuda_graphs(True))
    assert_equal_runs(state, expected)
    (warning,) = warnings_of(caplog)
    assert "without a graph" in warning
    assert "not permitted when stream is capturing" in warning
    assert posing.fake.graphs == []


def test_an_optimizer_that_reads_the_device_steps_behind_a_graph(posing, caplog):
    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            float(self.param_groups[0]["params"][0].detach().sum())
            return super().step(closure)

    assert_graphs_change_nothing(lambda: a_run(optim=lambda params: Reading(params, 0.01)))
    (warning,) = warnings_of(caplog)
    assert "the optimizer steps without a graph" in warning
    assert posing.num_replays == [45]


def test_a_setting_that_moves_with_each_step_leaves_the_optimizer_out(posing, caplog):
    def make():
        return a_run(optim=sgd).scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.99))

    assert_graphs_change_nothing(make)
    (warning,) = warnings_of(caplog)
    assert "(lr)" in warning
    assert "fused=True" in warning
    assert max(posing.num_replays) > 30


def test_a_learning_rate_that_is_set_once_is_captured_again(posing, caplog):
    def slower(epoch, worker):
        if epoch == 2:
            worker.set_lr(0.001)

    assert_graphs_change_nothing(lambda: a_run(optim=sgd).epoch_fn(slower))
    assert warnings_of(caplog) == []
    assert posing.num_replays == [29, 16]


class Replacing(nn.Module):
    """Keeps a mean by replacing its buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.inner(x - self.seen)


def test_a_buffer_that_is_replaced_keeps_the_step_eager(posing, caplog):
    def make():
        return a_run(model=lambda d: Replacing().to(d, torch.float64), loss=loss_of)

    assert_graphs_change_nothing(make)
    (warning,) = warnings_of(caplog)
    assert "'seen'" in warning
    assert "in place" in warning


def test_fp16_is_made_eagerly(posing, caplog):
    train(
        a_run(model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d), loss=half)
        .precision("fp16")
        .cuda_graphs(True)
    )
    (warning,) = warnings_of(caplog)
    assert "use bf16" in warning


def half(model, batch):
    return model(batch[0].float()).square().mean().float()


def test_bf16_is_captured(posing):
    def run(flag):
        b = a_run(model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d), loss=half)
        return train(b.precision("bf16").cuda_graphs(flag))

    expected = run(False)
    actual = run(True)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], tensor)
    assert posing.num_replays == [45]


def test_cuda_graphs_on_a_cpu_warn_that_they_have_no_effect(caplog):
    train(a_run().cuda_graphs(True))
    (warning,) = warnings_of(caplog)
    assert "no effect on cpu" in warning


# -- steps whose capture would be wrong -------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Counts its steps in Python, as many optimizers do."""

    def __init__(self, params, where):
        super().__init__(params, {"lr": 0.01, "k": 0})
        self._where = where

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += self._where == "group"
            for p in group["params"]:
                state = self.state[p]
                if self._where == "state":
                    state["step"] = state.get("step", 0) + 1
                elif self._where == "tensor":
                    state["step"] = state.get("step", torch.zeros(())) + 1
                p.sub_(p.grad, alpha=group["lr"] / (1 + group["k"] + float(state.get("step", 0))))


@pytest.mark.parametrize("where", ["group", "state"])
def test_an_optimizer_that_counts_in_python_steps_behind_the_graph(where, posing, caplog):
    assert_graphs_change_nothing(lambda: a_run(optim=lambda params: Counting(params, where)))
    (warning,) = warnings_of(caplog)
    assert "the optimizer steps without a graph" in warning
    assert "in Python" in warning
    assert posing.num_replays == [45]


class Carrying(nn.Module):
    """Carries a hidden state from step to step, as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.hidden = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        self.hidden = 0.9 * self.hidden + 0.1 * x.detach().mean(0)
        return self.inner(x - self.hidden)


def test_an_attribute_that_is_replaced_keeps_the_step_eager(posing, caplog):
    assert_graphs_change_nothing(lambda: a_run(model=lambda d: Carrying().to(d, torch.float64)))
    (warning,) = warnings_of(caplog)
    assert "'hidden'" in warning


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x - self.shift)


def test_a_buffer_that_is_replaced_between_steps_is_captured_again(posing, caplog):
    def shift(epoch, worker):
        worker.model.shift = torch.full((3,), 0.1 * epoch, dtype=torch.float64)

    def make():
        return a_run(model=lambda d: Shifted().to(d, torch.float64)).epoch_fn(shift)

    assert_graphs_change_nothing(make)
    assert posing.num_replays == [13, 13, 13]
    assert warnings_of(caplog) == []


def test_under_lockstep_an_unused_parameter_leaves_the_optimizer_out(posing, caplog):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)

    def make():
        return a_run(model=lambda d: Half().to(d, torch.float64), way=(SYNC, THREAD), ranks=2)

    assert_graphs_change_nothing(make)
    (warning,) = warnings_of(caplog)
    assert "has no gradient" in warning
    replays = [n for n in posing.num_replays if n]
    assert len(replays) == 2
    assert max(replays) <= 21


def test_dropped_steps_do_not_count_as_warm_up_of_the_optimizer(posing):
    """The optimizer has no state before its first step, and a graph must not create it."""
    data = DATA.clone()
    data[:] = torch.nan

    def mend(epoch, worker):
        if epoch == 1:
            data.copy_(DATA)

    b = a_run(model=lambda d: nn.Sequential(nn.Linear(3, 1)).to(d, torch.float64), dataset=(data,))
    state = train(b.on_non_finite("skip").epoch_fn(mend).cuda_graphs(True))
    assert [e.num_skipped for e in state.metrics] == [66, 0, 0]
    assert all(torch.isfinite(p).all() for p in state.params.values())
    assert sum(posing.num_replays) > 0


def test_three_ranks_of_a_lockstep_run_are_all_captured(posing):
    """One after the other, each on its own GPU."""
    state = train(a_run(way=(SYNC, THREAD), ranks=3, epochs=6).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 6
    assert len(posing.num_replays) == 6
    assert min(posing.num_replays) > 0


@local_ways
def test_workers_that_share_a_gpu_make_eager_steps_with_one_warning(way, posing, caplog):
    """A capture in one would break the random draws of the others."""
    posing.shared = True
    state = train(a_run(way=way, ranks=2).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 3
    (warning,) = warnings_of(caplog)
    assert "several workers share cuda:0" in warning
    assert "a GPU of its own" in warning
    assert posing.fake.graphs == []


def test_batches_that_cannot_be_captured_are_logged(posing, caplog):
    def collate(samples):
        return torch.stack([x for (x,) in samples]), {1, 2}

    dataset = torch.utils.data.TensorDataset(DATA)
    state = train(a_run(dataset=dataset).collate_fn(collate).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 3
    (warning,) = warnings_of(caplog)
    assert "not a plain tensor" in warning
    assert posing.num_replays == []


def test_a_group_that_is_added_later_is_trained(posing):
    def first(params):
        return sgd(list(params)[:1])

    def add(epoch, worker):
        if epoch == 1:
            rest = list(worker.model.parameters())[1:]
            worker.optimizer.add_param_group({"params": rest})

    state = train(a_run(optim=first).epoch_fn(add).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [66] * 3
    assert len(posing.num_replays) == 2


def test_an_optimizer_keeps_its_device_of_step_counts_when_it_loads_a_state(posing):
    """A replica on a GPU may load the state of one on a CPU, or of a file."""
    seen = []

    def load(epoch, worker):
        if epoch == 1:
            state = worker.optimizer.state_dict()
            for group in state["param_groups"]:
                group["capturable"] = False
            load_optimizer_state(worker.optimizer, state)
        seen.append(worker.optimizer.param_groups[0]["capturable"])

    train(a_run().epoch_fn(load).cuda_graphs(True))
    assert seen == [True] * 3
    assert len(posing.num_replays) == 2
