"""How many files a batch and a round pass in a real run: what docs/design.md names, no more."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from coordinator import messages as m
from runtime.data.loader import LoadedBatch
from tests.support.running import CADENCE, OVER_CPU, THREAD, WAIT_S, builder

ROOT = Path(__file__).parents[2]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


class Read(Dataset):
    """Read by code of its own, so that a thread loads it ahead."""

    def __len__(self):
        return 40

    def get_batch(self, indices):
        return torch.as_tensor(indices)


class Files:
    """Files of the project that had one of some kinds of objects in a frame's variables.

    Used as a profile function of every thread that starts meanwhile.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds
        self.found: set[str] = set()

    def __call__(self, frame, event, _):
        if event != "return":
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in (
            "runtime",
            "coordinator",
        ):
            return
        if any(isinstance(value, self._kinds) for value in dict(frame.f_locals).values()):
            self.found.add(str(path.relative_to(ROOT)))

    def of_run(self, b) -> set[str]:
        """Run to the end; the files."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            b.run().join(WAIT_S)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return self.found


def named(heading: str) -> set[str]:
    """The files in the table under a heading."""
    section = DESIGN.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return set(re.findall(r"`((?:runtime|coordinator)/[\w/]+\.py)`", "\n".join(rows)))


def test_a_batch_passes_twelve_files_at_most_on_its_way_to_the_report():
    files = Files(LoadedBatch, m.Tally, m.BatchReport)
    found = files.of_run(builder(dataset=Read(), way=(CADENCE, OVER_CPU)))
    of_the_worker = {path for path in found if path.startswith("runtime/")}
    assert of_the_worker
    assert of_the_worker <= named("The path of a batch")
    assert len(named("The path of a batch")) <= 12


@pytest.mark.parametrize(
    ("way", "kind"),
    [((CADENCE, THREAD), m.SyncNow), ((CADENCE, OVER_CPU), m.RequestParams | m.Update)],
    ids=["collective", "snapshots"],
)
def test_a_message_of_a_round_passes_eight_files_at_most_over_both_transports(way, kind):
    files = Files(*getattr(kind, "__args__", (kind,)))
    found = files.of_run(builder(dataset=Read(), way=way).anchor(2))
    assert found
    assert found <= named("The path of an averaging round")
    assert len(named("The path of an averaging round")) <= 8


@pytest.mark.parametrize("way", [(CADENCE, THREAD), (CADENCE, OVER_CPU)])
def test_an_answer_passes_the_same_files_over_both_transports(way):
    found = Files(m.SyncAck, m.ParamSnapshot).of_run(builder(dataset=Read(), way=way).anchor(2))
    found -= {"coordinator/messages.py"}  # where they are defined
    coordinators = {
        f"coordinator/{name}.py" for name in ("service", "failures", "machine", "rounds")
    }
    workers = {f"runtime/worker/{name}.py" for name in ("rounds", "reporter")}
    assert coordinators | {"runtime/worker/reporter.py"} <= found <= coordinators | workers
