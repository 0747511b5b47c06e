"""The step loop of whole runs waits for no GPU, on any data path."""

from __future__ import annotations

import pytest

from tests.gpu import runs
from tests.gpu.delays import GPU
from tests.gpu.no_sync import allow_waits, forbid_waits
from tests.gpu.runs import CADENCE, OVER_CPU, QUIET_WAYS, name_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _waits_are_allowed_again():
    yield
    allow_waits()


@pytest.mark.parametrize("kind", ["read", "inline", "streamed", "resident", "there"])
@pytest.mark.parametrize(
    ("way", "ranks"), QUIET_WAYS, ids=[f"{name_of(way)}-{ranks}" for way, ranks in QUIET_WAYS]
)
def test_no_step_between_two_rounds_waits_for_the_device(way, ranks, kind):
    """S22, with batches loaded ahead, and reports on the way."""
    runs.quiet(GPU, way, ranks, kind, forbid_waits, allow_waits)


@pytest.mark.parametrize("wait", [lambda t: t.item(), lambda t: t.cpu(), lambda t: bool(t > 0)])
def test_a_wait_in_such_a_step_is_noticed(wait, monkeypatch):
    """The fault itself, so that the test above means something."""
    squares = runs.squares

    def waits(model, batch):
        wait(batch[0][0, 0])
        return squares(model, batch)

    monkeypatch.setattr(runs, "squares", waits)
    with pytest.raises(RuntimeError, match="synchroniz"):
        runs.quiet(GPU, (CADENCE, OVER_CPU), 1, "read", forbid_waits, allow_waits)
