"""The checks of ``tests/gpu``, run on the CPU to test their logic."""

from __future__ import annotations

import pytest
import torch

from runtime import AverageBackend
from runtime.replica import flat
from runtime.replica import non_finite as finite
from tests.gpu import loading, replicas, runs
from tests.gpu.delays import CPU
from tests.gpu.runs import ASYNC, CADENCE, OVER_CPU, SYNC
from tests.support.running import THREAD, over

pytestmark = pytest.mark.slow

each_policy = over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, THREAD)])


@pytest.mark.parametrize("body", [replicas.average_over_the_cpu, replicas.average_in_shared_memory])
def test_averaged_replicas_hold_the_expected_values(body):
    body(CPU, 30)


@pytest.mark.parametrize("dataset", [loading.Rows, loading.tensors], ids=["read", "gathered"])
def test_streamed_batches_have_the_expected_sums(dataset):
    assert loading.exact(CPU, dataset(), slow="both", depth=2) == 2


def test_batches_created_by_the_data_set_have_the_expected_sums():
    loading.exact(CPU, loading.DeviceRows(CPU), slow="both")


@pytest.mark.parametrize("scenario", loading.SCENARIOS)
def test_batches_are_exact_in_every_scenario(scenario):
    scenario(CPU)


def test_states_of_sync_runs_are_compared_closely():
    first, second = (runs.sync_state([CPU, CPU]) for _ in range(2))
    runs.assert_states_agree(first, second)
    second.params["inner.weight"].mul_(1 + 1e-6)
    with pytest.raises(AssertionError, match=r"inner\.weight"):
        runs.assert_states_agree(first, second)


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_two_workers_converge(policy):
    runs.converges_as_on_cpu(CPU, policy)


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_workers_of_unequal_speed_converge(policy):
    runs.unequal_speeds(CPU, policy)


@each_policy
def test_survivors_converge(way):
    runs.survivors_continue([CPU] * 3, way, 0)


@each_policy
def test_a_rank_that_raises_ends_the_run(way):
    runs.raising([CPU] * 2, way)


@pytest.mark.leaks_thread("gpu-worker-1")
def test_a_rank_that_stalls_ends_the_run():
    runs.stalling([CPU] * 2, (SYNC, AverageBackend.GLOO))


def no_memory():
    raise torch.OutOfMemoryError("planted")


@each_policy
def test_a_rank_without_memory_ends_the_run(way):
    runs.exhaust([CPU] * 2, way, no_memory, "planted")


def test_low_precision_converges():
    runs.low_precision(CPU)


class ReadGuard:
    """Fails on reads of tensor values, which would synchronise on a GPU."""

    def __init__(self, monkeypatch):
        self.is_guarded = False
        for module, name in ((finite, "all_finite"), (flat, "copy_with_norm")):
            monkeypatch.setattr(module, name, self._guarded(getattr(module, name)))

    def _guarded(self, read):
        def guarded(*args):
            assert not self.is_guarded, "tensor values were read"
            return read(*args)

        return guarded

    def forbid(self):
        self.is_guarded = True

    def allow(self):
        self.is_guarded = False


@pytest.mark.parametrize(
    ("way", "ranks", "kind"),
    [
        *(
            ((CADENCE, OVER_CPU), 2, kind)
            for kind in ("inline", "streamed", "resident", "on_device")
        ),
        # On the CPU, SYNC checks each step's gradients, which synchronises with no device.
        *((*run, "read") for run in runs.GUARDED_WAYS if (run[0][0], run[1]) != (SYNC, 2)),
    ],
)
def test_steps_between_two_rounds_read_no_values(way, ranks, kind, monkeypatch):
    guard = ReadGuard(monkeypatch)
    runs.guarded_steps(CPU, way, ranks, kind, guard.forbid, guard.allow)


def test_a_read_in_a_guarded_step_is_detected(monkeypatch):
    guard = ReadGuard(monkeypatch)
    squares = runs.squares

    def reading(model, batch):
        finite.all_finite([batch[0]])
        return squares(model, batch)

    monkeypatch.setattr(runs, "squares", reading)
    with pytest.raises(RuntimeError, match="tensor values were read"):
        runs.guarded_steps(CPU, (CADENCE, OVER_CPU), 1, "read", guard.forbid, guard.allow)


def test_the_callers_data_is_complete():
    runs.late_data(CPU, side_stream=False)
