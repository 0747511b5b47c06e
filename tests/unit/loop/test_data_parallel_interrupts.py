"""Ctrl-C at any line of a batch: the next call restores identical replicas, or raises."""

from __future__ import annotations

import linecache
import sys
import threading
from contextlib import suppress

import pytest
import torch

from runtime import ReplicaFailed
from runtime.loop import (
    data_parallel,
    mirror,
    rank_threads,
    runner,
    shard_loss,
    shard_samples,
)
from tests.support.parallel import identical, loss_fn, mlp, replicas, samples_of

# Python code of the standard library can be interrupted at any line too.
MODULES = (data_parallel, mirror, rank_threads, runner, shard_loss, shard_samples, threading)
FILES = {module.__file__ for module in MODULES}


class Interrupt:
    """Raises ``KeyboardInterrupt`` before a line that the calling thread executes.

    Not at the head of a ``with``: there the interpreter takes none between the end of the
    block and the release of what it holds.

    Args:
        num_lines: How many lines are executed before.
    """

    def __init__(self, num_lines):
        self.left = num_lines
        self.fired = False

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not self.fired:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not line.strip().startswith("with "):
                self.left -= 1
                if self.left < 0:
                    self.fired = True
                    raise KeyboardInterrupt(f"before {line.strip()!r}")
        return self._trace


class Drifting(torch.optim.SGD):
    """Rounds differently on every rank if ``devices_differ``, as devices of different kinds do.

    Like a fused optimizer it leaves no trace in the versions of tensors.
    """

    def __init__(self, params, devices_differ):
        super().__init__(params, 0.1)
        self.devices_differ = devices_differ

    def step(self, closure=None):
        rank = int(threading.current_thread().name[-1]) if self.devices_differ else 0
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1).mul_(1 + rank * 1e-12)
            self.state[p]["step"] = self.state[p].get("step", 0) + 1


def steps_of(coordinator):
    return [
        {int(optimizer.state[p]["step"]) for p in optimizer.param_groups[0]["params"]}
        for optimizer in coordinator.optimizers
    ]


def make(devices_differ, loss):
    coordinator = replicas(
        2,
        model=lambda device: mlp(device, norm=True),
        optim=lambda params: Drifting(params, devices_differ),
        loss=loss,
    )
    coordinator._devices_differ = devices_differ
    coordinator.train_batch(samples_of(9))
    return coordinator


@pytest.mark.parametrize("fails", [False, True], ids=["", "in a batch that fails"])
@pytest.mark.parametrize("devices_differ", [False, True], ids=["equal", "unequal"])
def test_after_ctrl_c_at_any_line_the_replicas_are_identical_at_the_next_call(
    devices_differ, fails
):
    broken = threading.Event()

    def loss(model, samples):
        if broken.is_set() and threading.current_thread().name.endswith("1"):
            raise LookupError("planted")
        return loss_fn(model, samples)

    num_lines, fired = 0, True
    with make(devices_differ, loss) as coordinator:
        while fired:
            if fails:
                broken.set()
            with Interrupt(num_lines) as interrupt, suppress(KeyboardInterrupt, ReplicaFailed):
                coordinator.train_batch(samples_of(9, num_lines))
            broken.clear()
            coordinator.train_batch(samples_of(9, num_lines + 1))
            assert identical(coordinator), num_lines
            first, *others = steps_of(coordinator)
            assert all(steps == first for steps in others), num_lines
            # Batches without a step have not changed the buffers.
            assert {coordinator.primary[1].num_batches_tracked.item()} == first, num_lines
            num_lines, fired = num_lines + 1, interrupt.fired
    assert num_lines > 60


def test_ctrl_c_between_the_step_and_the_copy_for_unequal_devices_is_repaired(monkeypatch):
    with make(True, loss_fn) as coordinator:

        def interrupted(copy):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "_copy_from_primary", interrupted)
            with pytest.raises(KeyboardInterrupt):
                coordinator.train_batch(samples_of(9))
        assert not identical(coordinator)
        seen = []
        coordinator._shards.loss_fn = lambda model, samples: (
            seen.append(model[0].weight.detach().clone()),
            loss_fn(model, samples),
        )[1]
        coordinator.train_batch(samples_of(9))
        assert all(weight.equal(seen[0]) for weight in seen)  # before they compute
        assert identical(coordinator)
