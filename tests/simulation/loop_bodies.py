"""Random bodies of a user's own loop in real runs, whose last steps are short and whose ranks idle.

Ranks are real threads: a seed repeats the bodies and the sizes of the pieces, not the order of the
threads.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import pytest
import torch

from coordinator import saving
from coordinator.messages import SaveCheckpoint
from coordinator.shares import Shares
from coordinator.splitting import permutation, split_like
from runtime import GpuWorkerError, ReplicaMismatch, current_worker
from tests.support.looping import Marks, loop_builder

TIMEOUT_S = 20.0
"""Bound of every wait: reached only by a test that fails."""
LATE = ("no progress", "in time", "no step within")
"""Texts of the errors of a rank that waited in vain."""
POLICIES = ("sync", "cadence", "async")
LEAVES = ("break", "return", "late")
FAILS = ("raise", "fail", "plain")
WAYS = ("skip", *LEAVES, "two", "accumulate", "ahead", "evaluate", "stop", *FAILS)
"""Actions of a body instead of one step for each batch."""


class BodyFailed(AssertionError):
    """The run of a body violated an invariant."""


@dataclass
class Bodies:
    """The bodies of one run.

    Attributes:
        seed: Seed of their actions.
        ways: Their actions.
        alike: All ranks act alike.
        idles: Under ``SYNC`` pieces have random sizes, so that ranks idle.
        every: The body evaluates and sets the learning rate every so many steps; 0: never.
        early: It asks for that before the step.
        survives: The run survives deaths.
        windows: Steps are often over several batches.
        save_steps: Batches between two checkpoints; 0: there are none.
        eval_steps: Batches between two evaluations by the run; 0: there are none.
        violations: Of the checkpoints.
        calls: Rank of each call of the loop.
        ran: By epoch and step, the ranks that ran the body, and those that were first.
        due: By epoch and step, whether ``every`` was true on each rank.
    """

    seed: int
    policy: str
    ranks: int
    num_samples: int
    ways: frozenset[str]
    alike: bool
    idles: bool
    every: int
    early: bool
    survives: bool
    windows: bool
    save_steps: int
    eval_steps: int
    violations: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    ran: dict[tuple[int, int], list[bool]] = field(default_factory=lambda: defaultdict(list))
    due: dict[tuple[int, int], list[bool]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_events(self) -> int:
        """Batches whose body ran."""
        return sum(map(len, self.ran.values()))

    @property
    def trace(self) -> list[tuple[float, str, object]]:
        """The batches, in order, with whether each rank that ran the body was first."""
        return [(0.0, f"{epoch}, {at}", firsts) for (epoch, at), firsts in self.ran.items()]

    @property
    def is_sync(self) -> bool:
        """True if ranks are in lockstep."""
        return self.policy == "sync"

    def loop(self, worker):
        """The loop of every rank."""
        self.calls.append(worker.rank)
        for batch in worker.batches():
            at, who = (worker.epoch, worker.global_step), "" if self.alike else worker.rank
            number = random.Random(f"{self.seed} {who} {at}").random()
            way = WAYS[int(number * 2 * len(WAYS))] if number < 0.5 else "step"
            self.ran[at].append(worker.is_first)
            if self.every and self.early and self.is_sync:
                self._act_if_due(worker, at)
            way = way if way in self.ways else "step"
            if self.windows and number > 0.6:
                way = "accumulate"
            if way in ("break", "return"):
                if way == "break":
                    break
                return
            if not self._train(worker, batch, way):
                continue
            if self.every and not (self.early and self.is_sync):
                self._act_if_due(worker, at)
            if way == "late":
                break

    def _train(self, worker, batch, way):
        """Train a batch; True if the body has stepped."""
        loss = worker.model.loss(worker.epoch, batch)
        if way == "skip":
            return False
        if way == "accumulate":
            worker.backward(loss)
            return False
        if way == "plain":
            loss.backward()
            return False
        if way == "raise":
            raise ValueError("planted")
        if way == "evaluate" and self.is_sync:  # between the forward and the backward pass
            evaluate(worker)
        worker.step(loss)
        if way == "two":
            self._scale_lr(worker)
            worker.step(worker.model.loss(worker.epoch, batch))
        if way == "ahead":  # a step over this batch and the next one
            worker.backward(worker.model.loss(worker.epoch, batch))
            return False
        if way == "evaluate":
            evaluate(worker)
        if way == "stop":
            worker.stop()
        if way == "fail":
            evaluate(worker, fails=worker.rank)
        return True

    @staticmethod
    def _scale_lr(worker):
        worker.set_lr(0.9 * worker.optimizer.param_groups[0]["lr"])

    def _act_if_due(self, worker, at):
        due = worker.every(self.every)
        self.due[at].append(due)
        if due:
            evaluate(worker)
            self._scale_lr(worker)

    def run(self):
        """Run to the end, and check it; returns the name of the end."""
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
            if self.idles:
                self._draw_sizes(patch)
            builder = loop_builder(
                self.loop,
                model=lambda device: Marks(2, self.num_samples).to(device),
                dataset=(torch.arange(self.num_samples),),
                ranks=self.ranks,
                policy=self.policy,
            )
            builder.collective_timeout(TIMEOUT_S).stall_timeout(TIMEOUT_S).progress(False)
            if self.idles:
                builder.balance(True)
            if self.save_steps:
                builder.checkpoint_dir(directory, every_steps=self.save_steps)
                patch.setattr(saving, "SaveCheckpoint", self._saved)
            if self.eval_steps:
                builder.eval_fn(self._evaluated).eval_every(self.eval_steps)
            if self.survives:
                builder.on_worker_failure("continue")
            builder.seed(self.seed)
            try:
                state, end = builder.run().join(2 * TIMEOUT_S), "finished"
            except (GpuWorkerError, ReplicaMismatch) as error:
                state, end = None, self._check_error(error)
        if self.violations:
            raise BodyFailed(self.violations[0])
        if state is not None:
            self._check(state)
        return end

    def _evaluated(self, model, epoch):
        """Check that an evaluation is between two steps."""
        if "stop" not in self.ways and any(p.grad is not None for p in model.parameters()):
            self.violations.append(f"epoch {epoch} is evaluated within a step")
        return {}

    def _saved(self, **values):
        """Check a checkpoint: it has the effect of the samples that it records."""
        n, run = self.num_samples, values["run"]
        marks = values["payload"].params[0][: 2 * n].view(2, n) > 0
        recorded = {metrics.epoch: [(0, n)] for metrics in run.metrics}
        for state in run.epochs:
            recorded[state.epoch] = [(2 * span.start, 2 * span.stop) for span in state.consumed]
        for epoch, ranges in recorded.items():
            order = permutation(n, epoch, self.seed)
            wanted = {int(i) for start, stop in ranges for i in order[start:stop]}
            found = set(marks[epoch].nonzero().flatten().tolist())
            omits = self.ways & {"skip", *LEAVES}
            if found - wanted or (wanted - found and not omits):
                self.violations.append(
                    f"a checkpoint in epoch {epoch} lacks the effect of {sorted(wanted - found)} "
                    f"and records {sorted(found - wanted)} as not trained"
                )
        return SaveCheckpoint(**values)

    def _draw_sizes(self, patch):
        """Draw the pieces of each plan, and of each short step, with none for some ranks."""
        draws = random.Random(f"sizes of {self.seed}")

        def sizes(self, total, ranks):
            self.num_plans += 1
            busy = draws.sample(list(ranks), draws.randint(1, min(total, len(ranks))))
            parts = split_like(total, [draws.random() + 0.1 for _ in busy])
            self._ranks = tuple(ranks)
            self._sizes = tuple(dict(zip(busy, parts, strict=True)).get(r, 0) for r in ranks)
            return self._sizes

        patch.setattr(Shares, "sizes", sizes)
        patch.setattr(Shares, "short_sizes", sizes)

    def _check_error(self, error):
        text = str(error)
        if any(late in text for late in LATE):
            raise BodyFailed(f"a rank waited in vain: {text}") from error
        if not isinstance(error.__cause__, RuntimeError | ValueError | None):
            raise BodyFailed(f"an unexpected error: {text}") from error
        if isinstance(error, ReplicaMismatch) and (self.alike or not self.is_sync):
            raise BodyFailed(f"bodies that act alike differ: {text}") from error
        return type(error).__name__

    def _check(self, state):
        for metrics in state.metrics:
            if metrics.num_samples > self.num_samples:
                raise BodyFailed(f"epoch {metrics.epoch} trained {metrics.num_samples} samples")
            if not self.ways & {"stop", *LEAVES} and metrics.num_samples != self.num_samples:
                raise BodyFailed(f"epoch {metrics.epoch} trained {metrics.num_samples} samples")
        if not self.is_sync or state.failures or self.ways & {*LEAVES, *FAILS}:
            return  # batches may have been repeated
        for at, firsts in self.ran.items():
            if sum(firsts) != 1:
                raise BodyFailed(f"{sum(firsts)} of the ranks that ran the body {at} were first")
        for at, due in self.due.items():
            if len(set(due)) != 1:
                raise BodyFailed(f"every() was true on some ranks only in the batch {at}")


def evaluate(worker, fails=None):
    """Evaluate five samples, in three batches; ``fails``: a rank that raises."""

    def size(model, batch):
        if fails == current_worker().rank:
            raise ValueError("planted")
        return {"size": len(batch[0])}

    assert worker.evaluate((torch.arange(5),), size) == {"size": pytest.approx(1.8)}


def draw_bodies(seed, policy=None):
    """The bodies of a seed."""
    draws = random.Random(seed)
    ranks = draws.choice((1, 2, 2, 3, 3, 4))
    policy = policy or draws.choice(POLICIES)
    early = draws.random() < 0.4  # no evaluation within a step over several batches
    ways = frozenset(way for way in WAYS if draws.random() < 0.25)
    return Bodies(
        seed,
        policy,
        ranks,
        num_samples=draws.randint(13, 24),
        ways=ways - {"accumulate", "ahead"} if early else ways,
        alike=draws.random() < 0.5,
        idles=policy == "sync" and ranks > 1 and draws.random() < 0.5,
        every=draws.choice((0, 1, 2, 3, 5)),
        early=early,
        survives=draws.random() < 0.4,
        windows=not early and draws.random() < 0.3,
        save_steps=draws.choice((0, 0, 3, 8)),
        eval_steps=draws.choice((0, 0, 4, 7)),
    )


def simulate_bodies(seed):
    """Run the bodies of a seed to their end."""
    logging.disable(logging.CRITICAL)  # of the errors that bodies raise
    bodies = draw_bodies(seed)
    bodies.run()
    return bodies
