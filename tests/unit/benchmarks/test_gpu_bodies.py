"""What ``tests/gpu`` asks of a GPU, asked of the CPU: so its logic is known to be right."""

from __future__ import annotations

import pytest
import torch

from runtime import AverageBackend
from runtime.replica import flat
from runtime.replica import non_finite as finite
from tests.gpu import loading, replicas, runs
from tests.gpu.delays import CPU
from tests.gpu.runs import ASYNC, CADENCE, OVER_CPU, SYNC, WAYS, name_of


@pytest.mark.parametrize("body", [replicas.average_over_the_cpu, replicas.average_in_shared_memory])
def test_replicas_hold_the_numbers_that_they_must(body):
    body(CPU, 30)


@pytest.mark.parametrize("dataset", [loading.Rows, loading.tensors], ids=["read", "gathered"])
def test_streamed_batches_have_their_sums(dataset):
    assert loading.exact(CPU, dataset(), slow="both", depth=2) == 2


def test_batches_made_by_the_data_set_have_their_sums():
    loading.exact(CPU, loading.MadeThere(CPU), slow="both")


@pytest.mark.parametrize("trouble", loading.TROUBLES)
def test_a_troubled_data_set_does_no_harm(trouble):
    trouble(CPU)


def test_lockstep_states_are_compared_closely():
    first, second = (runs.lockstep_state([CPU, CPU]) for _ in range(2))
    runs.assert_states_agree(first, second)
    second.params["inner.weight"].mul_(1 + 1e-6)
    with pytest.raises(AssertionError, match=r"inner\.weight"):
        runs.assert_states_agree(first, second)


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_two_workers_find_the_line(policy):
    runs.meets_the_cpu(CPU, policy)


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_workers_of_unequal_speed_find_the_line(policy):
    runs.unequal_speeds(CPU, policy)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_survivors_find_the_line(way, rank):
    runs.death([CPU] * 3, way, rank)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_a_rank_that_raises_ends_the_run(way):
    runs.raising([CPU] * 2, way)


@pytest.mark.leaks_thread("gpu-worker-1")
def test_a_rank_that_stalls_ends_the_run():
    runs.stalling([CPU] * 2, (SYNC, AverageBackend.GLOO))


def no_memory():
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_a_rank_without_memory_ends_the_run(way):
    runs.exhaust([CPU] * 2, way, no_memory, "planted")


def test_low_precision_finds_the_line():
    runs.low_precision(CPU)


class Ban:
    """Forbids a look at values, as PyTorch forbids the waits that one takes on a GPU."""

    def __init__(self, monkeypatch):
        self.is_on = False
        for module, name in ((finite, "all_finite"), (flat, "copy_with_norm")):
            monkeypatch.setattr(module, name, self._guarded(getattr(module, name)))

    def _guarded(self, look):
        def guarded(*args):
            assert not self.is_on, "a look at values"
            return look(*args)

        return guarded

    def forbid(self):
        self.is_on = True

    def allow(self):
        self.is_on = False


@pytest.mark.parametrize("kind", ["read", "inline", "streamed", "resident", "there"])
@pytest.mark.parametrize(
    ("way", "ranks"),
    # On a CPU lockstep looks at each step's gradients: there it waits for nobody.
    [(way, ranks) for way, ranks in runs.QUIET_WAYS if (way[0], ranks) != (SYNC, 2)],
)
def test_steps_between_two_rounds_look_at_nothing(way, ranks, kind, monkeypatch):
    ban = Ban(monkeypatch)
    runs.quiet(CPU, way, ranks, kind, ban.forbid, ban.allow)


def test_a_look_in_a_quiet_step_is_noticed(monkeypatch):
    ban = Ban(monkeypatch)
    squares = runs.squares

    def looks(model, batch):
        finite.all_finite([batch[0]])
        return squares(model, batch)

    monkeypatch.setattr(runs, "squares", looks)
    with pytest.raises(RuntimeError, match="a look at values"):
        runs.quiet(CPU, (CADENCE, OVER_CPU), 1, "read", ban.forbid, ban.allow)


def test_data_of_the_caller_is_there():
    runs.late_data(CPU, side_stream=False)
