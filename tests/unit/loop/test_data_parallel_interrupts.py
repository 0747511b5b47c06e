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
    rank_replica,
    rank_threads,
    runner,
    shard_loss,
    shard_samples,
)
from tests.support.own_loop import exchanging_gradients
from tests.support.pairs import SCALE
from tests.support.parallel import identical, loss_fn, mlp, replicas, samples_of

# Python code of the standard library can be interrupted at any line too.
MODULES = (
    *(data_parallel, mirror, rank_threads, rank_replica, runner, shard_loss, shard_samples),
    threading,
)
EVERY = 1 if SCALE > 1 else 5
"""Lines from one interruption to the next."""
FILES = {module.__file__ for module in MODULES}


class Interrupt:
    """Raises ``KeyboardInterrupt`` before a line that the calling thread executes.

    Not at the head of a ``with``: there the interpreter takes none between the end of the
    block and the release of what it holds.

    Args:
        num_lines: Number of lines executed before.
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


class Silent(torch.optim.SGD):
    """Like a fused optimizer it leaves no trace in the versions of tensors."""

    def __init__(self, params):
        super().__init__(params, 0.1)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)
            self.state[p]["step"] = self.state[p].get("step", 0) + 1


def make(loss):
    coordinator = replicas(2, model=lambda device: mlp(device, norm=True), optim=Silent, loss=loss)
    coordinator.train_batch(samples_of(9))
    return coordinator


@pytest.mark.parametrize("fails", [False, True], ids=["", "in a batch that fails"])
@pytest.mark.parametrize(("how", "first"), [("directly", 0), ("copies", 1)])
def test_after_ctrl_c_at_any_line_the_replicas_are_identical_at_the_next_call(how, first, fails):
    broken = threading.Event()

    def loss(model, samples):
        if broken.is_set() and threading.current_thread().name.endswith("1"):
            raise LookupError("planted")
        return loss_fn(model, samples)

    num_lines, fired = first % EVERY, True
    with exchanging_gradients(how), make(loss) as coordinator:
        while fired:
            if fails:
                broken.set()
            with Interrupt(num_lines) as interrupt, suppress(KeyboardInterrupt, ReplicaFailed):
                coordinator.train_batch(samples_of(9, num_lines))
            broken.clear()
            coordinator.train_batch(samples_of(9, num_lines + 1))
            assert identical(coordinator), num_lines
            optimizer = coordinator.optimizers[0]
            steps = {optimizer.state[p]["step"] for p in coordinator.primary.parameters()}
            # Batches without a step have not changed the buffers.
            assert {coordinator.primary[1].num_batches_tracked.item()} == steps, num_lines
            num_lines, fired = num_lines + EVERY, interrupt.fired
    assert num_lines > 60
