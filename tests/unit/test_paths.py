"""Files on the path of a batch and of a round in a real run: only those in docs/design.md."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from coordinator import messages as m
from coordinator.messages import Send
from runtime import Timeline
from runtime.data.loader import LoadedBatch
from tests.support.running import CADENCE, OVER_CPU, THREAD, WAIT_S, builder, count_up

ROOT = Path(__file__).parents[2]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


class Files:
    """Files of the project in which objects of some types were a variable or an argument.

    Used as a profile function of every thread that starts meanwhile. What is in a command, in a
    message or in a list counts as well.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds
        self.found: set[str] = set()

    def __call__(self, frame, event, _):
        if event not in ("call", "return"):
            return
        if any(self._is_in(value) for value in dict(frame.f_locals).values()):
            self.note(frame)
            if event == "call":
                self.note(frame.f_back)

    def _is_in(self, value) -> bool:
        if isinstance(value, list | tuple):
            return any(isinstance(item, self._kinds) for item in value)
        inner = {Send: "message", m.StartEpoch: "plan"}.get(type(value))
        if inner is not None:
            value = getattr(value, inner, None)  # not set yet during construction
        return isinstance(value, self._kinds)

    def note(self, frame) -> None:
        """Record the file of this frame."""
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            path = path.relative_to(ROOT)
            # The module that defines messages is not on their path.
            if path.parts[0] in ("runtime", "coordinator") and path.name != "messages.py":
                self.found.add(str(path))

    def note_callers(self) -> None:
        """All callers of the caller, up to the thread's target."""
        frame = sys._getframe(1)
        target = ROOT / "runtime" / "worker" / "worker_threads.py"
        while frame is not None and Path(frame.f_code.co_filename) != target:
            self.note(frame)
            frame = frame.f_back

    def of_run(self, b) -> set[str]:
        """Run to the end; returns the files."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            b.run().join(WAIT_S)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return self.found


class Read(Dataset):
    """A data set with its own code, so that a thread loads it ahead."""

    def __init__(self, files=None):
        self._files = files

    def __len__(self):
        return 40

    def get_batch(self, indices):
        if self._files is not None:
            self._files.note_callers()
        return torch.as_tensor(indices)


def named(heading: str) -> set[str]:
    """The files in the table under a heading."""
    section = DESIGN.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return set(re.findall(r"`((?:runtime|coordinator)/[\w/]+\.py)`", "\n".join(rows)))


def test_a_batch_passes_thirteen_files_at_most_on_its_way_to_the_report():
    """As an index of a plan, as samples, as the argument of a step, and as a number in a report."""
    files = Files(m.EpochPlan, LoadedBatch, m.ReportStats, m.BatchReport, m.EpochReport)

    def train(model, indices):
        files.note_callers()
        return count_up(model, indices)

    found = files.of_run(
        builder(dataset=Read(files), train=train, way=(CADENCE, OVER_CPU)).anchor(2)
    )
    of_the_worker = {path for path in found if path.startswith("runtime/")}
    assert of_the_worker == named("The path of a batch")
    assert len(named("The path of a batch")) <= 13


@pytest.mark.parametrize(
    ("way", "kind"),
    [((CADENCE, THREAD), m.SyncNow), ((CADENCE, OVER_CPU), m.RequestParams | m.Update)],
    ids=["collective", "snapshots"],
)
def test_a_message_of_a_round_passes_eight_files_at_most_over_both_transports(way, kind):
    kinds = getattr(kind, "__args__", (kind,))
    found = Files(*kinds).of_run(builder(dataset=Read(), way=way).anchor(2))
    assert found == named("The path of an averaging round")
    assert len(found) <= 8
    watched = Files(*kinds).of_run(builder(dataset=Read(), way=way).anchor(2).timeline(Timeline()))
    assert watched == found | {"runtime/timeline/coordinator_lane.py"}


@pytest.mark.parametrize("way", [(CADENCE, THREAD), (CADENCE, OVER_CPU)])
def test_an_answer_passes_the_same_files_over_both_transports(way):
    found = Files(m.SyncAck, m.ParamSnapshot).of_run(builder(dataset=Read(), way=way).anchor(2))
    coordinators = {f"coordinator/{name}.py" for name in ("service", "stall", "machine", "rounds")}
    assert found == coordinators | {
        "runtime/worker/flow.py",
        "runtime/worker/reporter.py",
    }
