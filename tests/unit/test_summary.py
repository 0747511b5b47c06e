"""Lines of a run on stderr: the first, those of epochs, the headline; none with progress off."""

import fcntl
import itertools
import logging
import os
import pty
import re
import struct
import sys
import termios
from contextlib import suppress
from functools import partial

import pytest

from runtime.core.context import announce
from tests.house import ROOT
from tests.support import programs

SCRIPT = """
import logging, os, signal
import torch
from torch import nn
from runtime import Trainer, current_worker

def train(model, batch):
    worker = current_worker()
    if {how!r} == "interrupted" and (worker.rank, worker.local_step) == (0, 500):
        os.kill(os.getpid(), signal.SIGINT)
    return model(batch[0]).square().mean()

def main(how):
    {before}
    if how == "setup":
        model = Trainer.setup(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, 0.1), ["cpu"] * 2)
        model(torch.ones(4, 2)).sum().backward()
        model.step()
        model.close()
        return
    b = Trainer.builder(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, 0.1), train)
    b.dataset((torch.ones(40, 2),)).batch_size(2).num_epochs(1 if how != "interrupted" else 10**6)
    b.devices(["cpu"] * 2).policy("cadence")
    if how == "quiet":
        b.progress(False)
    b.run().join()

if __name__ == "__main__":
    main({how!r})
"""


def stderr_of(how, before="pass", check=True):
    done = programs.run(
        [sys.executable, "-c", SCRIPT.format(how=how, before=before)], timeout=55, check=check
    )
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "run",
            [
                "2 workers on 2 x cpu",
                "equal devices",
                "policy CADENCE over CPU",
                "batches of 2 on each worker; 10 steps an epoch on each worker, 1 epoch",
                "learning rate x 1",
                "THREAD",
            ],
        ),
        (
            "setup",
            ["your own loop", "2 workers on 2 x cpu", "equal devices", "over THREAD"],
        ),
    ],
    ids=["run", "setup"],
)
def test_the_first_line_names_devices_policy_and_batch(how, expected):
    lines = stderr_of(how).splitlines()
    first = [lines[0], *itertools.takewhile(lambda line: line.startswith("  "), lines[1:])]
    whole = " ".join(line.strip() for line in first)
    assert [part for part in expected if part not in whole] == []
    assert "not all devices are CUDA devices" in whole
    assert max(map(len, lines)) < 80


def test_after_the_epochs_a_headline_names_throughput_and_losses():
    lines = stderr_of("run").splitlines()
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert re.fullmatch(r"epoch 0: loss [\d.e-]+; 40 samples in [\d.]+ s", epochs[0])
    assert len(epochs) == 1
    headline = " ".join(lines[lines.index(epochs[0]) + 1 :])
    assert re.match(r"[\d,]+ samples/s, \d+ % of what these devices can do alone;", headline)


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


def test_a_configured_logger_receives_the_summary_and_the_epochs_instead():
    logged = "logging.basicConfig(level=logging.INFO, format='LOG %(name)s: %(message)s')"
    lines = stderr_of("run", logged).splitlines()
    (first,) = [line for line in lines if "policy CADENCE" in line]
    assert first.startswith("LOG runtime.run: 2 workers")
    (epoch,) = [line for line in lines if "epoch 0" in line]
    assert epoch.startswith("LOG runtime.loggers.progress: epoch 0: loss")
    (headline,) = [line for line in lines if "can do alone" in line]
    assert headline.startswith("LOG runtime.run: ")
    assert "; lost: " in headline


def test_no_line_of_a_terminal_of_80_columns_wraps():
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with programs.Popen(
        [sys.executable, "-c", SCRIPT.format(how="run", before="pass")], cwd=ROOT, stderr=side
    ) as process:
        os.close(side)
        written = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(main, 65536):
                written += part
        assert process.wait(55) == 0
    os.close(main)
    shown = [line for line in re.split(r"[\r\n]+", written.decode()) if line]
    assert max(map(len, shown)) < 80
    bars = [line for line in shown if "|" in line]
    assert re.match(r"epoch 0: loss [\d.e-]+, [\d,]+ samples/s 100%\|", bars[-1])
    assert re.search(r"\| \d\d:\d\d<00:00$", bars[-1])
    assert any("can do alone" in line for line in shown[shown.index(bars[-1]) + 1 :])


def test_a_warning_is_folded_unless_there_is_a_handler(monkeypatch, capsys):
    text = f"rank 1 takes 3.00 times as long{', as before' * 10}"
    warn = partial(announce, logging.getLogger("runtime.run"), text, level=logging.WARNING)
    warn()
    assert capsys.readouterr().err == ""  # the test has a handler
    monkeypatch.setattr(logging.getLogger("runtime"), "propagate", False)
    warn()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert " ".join(map(str.strip, lines)) == text
    assert max(map(len, lines)) < 80
    monkeypatch.setattr(logging.getLogger("runtime"), "level", logging.ERROR)
    warn()
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_a_run_without_a_headline():
    lines = stderr_of("interrupted", check=False).splitlines()
    assert any(line.startswith("KeyboardInterrupt") for line in lines)
    assert [line for line in lines if "samples/s" in line] == []
