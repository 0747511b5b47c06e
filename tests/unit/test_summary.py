"""Summary of a run on stderr: printed once, and not at all with progress off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house import ROOT
from tests.support import programs

SCRIPT = """
import logging, sys
import torch
from torch import nn
from runtime import Trainer

def main(how):
    {before}
    if how == "setup":
        model = Trainer.setup(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, 0.1), ["cpu"] * 2)
        model(torch.ones(4, 2)).sum().backward()
        model.step()
        model.close()
        return
    b = Trainer.builder(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, 0.1),
                        lambda m, batch: m(batch[0]).square().mean())
    b.dataset((torch.ones(40, 2),)).batch_size(2).num_epochs(1).devices(["cpu"] * 2)
    if how in ("quiet", "lines"):
        b.progress(how == "lines")
    b.run().join()

if __name__ == "__main__":
    main({how!r})
"""


def stderr_of(how, before="pass", start=programs.run):
    done = start(
        [sys.executable, "-c", SCRIPT.format(how=how, before=before)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("how", "start", "expected"),
    [
        # One of them is a whole start, in which the imports are as silent.
        (
            "run",
            subprocess.run,
            ["2 workers on 2 x cpu", "equal devices", "policy CADENCE over CPU", "THREAD"],
        ),
        (
            "setup",
            programs.run,
            ["your own loop", "2 workers on 2 x cpu", "equal devices", "over THREAD"],
        ),
    ],
    ids=["run", "setup"],
)
def test_the_summary_line_names_devices_policy_transport_and_reason(how, start, expected):
    told = stderr_of(how, start=start)
    assert len(told.splitlines()) == 1
    assert [part for part in expected if part not in told] == []
    assert "not all devices are CUDA devices" in told


@pytest.mark.parametrize(
    ("how", "before"),
    [
        ("quiet", "pass"),
        ("run", "logging.getLogger('runtime').setLevel(logging.WARNING)"),
        ("setup", "logging.getLogger('runtime').setLevel(logging.ERROR)"),
        ("run", "logging.getLogger('runtime').addHandler(logging.NullHandler())"),
        ("run", "logging.disable(logging.INFO)"),
        ("run", "logging.basicConfig(level=logging.WARNING)"),
    ],
)
def test_the_summary_is_omitted_with_progress_off(how, before):
    assert stderr_of(how, before) == ""


LOGGED = "logging.basicConfig(level=logging.INFO, format='LOG %(name)s: %(message)s')"


def test_a_configured_logger_receives_the_summary_instead():
    lines = [line for line in stderr_of("run", LOGGED).splitlines() if "policy CADENCE" in line]
    assert len(lines) == 1
    assert lines[0].startswith("LOG runtime.run: 2 workers")


@pytest.mark.parametrize(
    ("how", "before", "start"),
    [
        ("lines", "pass", "epoch 0: loss"),
        ("lines", LOGGED, "LOG runtime.metrics_thread: epoch 0: loss"),
        ("run", LOGGED, "LOG runtime.metrics_thread: epoch 0: loss"),
    ],
)
def test_off_a_terminal_each_epoch_has_a_line(how, before, start):
    """With progress(True), or with a logger enabled for INFO."""
    lines = [line for line in stderr_of(how, before).splitlines() if "epoch 0" in line]
    assert len(lines) == 1
    assert lines[0].startswith(start)
