"""The step loop never synchronises with the GPU, on any data path."""

from __future__ import annotations

import pytest

from tests.gpu import runs
from tests.gpu.delays import GPU
from tests.gpu.no_sync import allow_sync, forbid_sync
from tests.gpu.runs import CADENCE, GUARDED_WAYS, OVER_CPU, name_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _sync_allowed_afterwards():
    yield
    allow_sync()


@pytest.mark.parametrize("kind", ["read", "inline", "streamed", "resident", "on_device"])
@pytest.mark.parametrize(
    ("way", "ranks"), GUARDED_WAYS, ids=[f"{name_of(way)}-{ranks}" for way, ranks in GUARDED_WAYS]
)
def test_steps_between_two_rounds_never_synchronise(way, ranks, kind):
    """With batches loaded ahead and reports being sent."""
    runs.guarded_steps(GPU, way, ranks, kind, forbid_sync, allow_sync)


@pytest.mark.parametrize("wait", [lambda t: t.item(), lambda t: t.cpu(), lambda t: bool(t > 0)])
def test_a_planted_synchronisation_is_detected(wait, monkeypatch):
    """Shows that the test above can fail."""
    squares = runs.squares

    def waits(model, batch):
        wait(batch[0][0, 0])
        return squares(model, batch)

    monkeypatch.setattr(runs, "squares", waits)
    with pytest.raises(RuntimeError, match="synchroniz"):
        runs.guarded_steps(GPU, (CADENCE, OVER_CPU), 1, "read", forbid_sync, allow_sync)
