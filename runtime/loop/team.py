"""Several replicas behind one module: one batch shared out, or several for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.collective import Collective
from runtime.core.nested import flatten
from runtime.loop.alike import Likeness
from runtime.loop.ambient import Ambient
from runtime.loop.balance import Balancer, deal
from runtime.loop.cadence import Cadence, sync_seconds
from runtime.loop.direct import Direct
from runtime.loop.engine import CLIP_LATE, MIXED, Engine
from runtime.loop.gather import Call
from runtime.loop.journal import Journal
from runtime.loop.learning_rate import LearningRate
from runtime.loop.replica import LoopReplica, LossFn, Options, Shard
from runtime.loop.replicas import END_S, Task
from runtime.loop.runner import Runner
from runtime.loop.scatter import Scatter
from runtime.loop.turn import Turn
from runtime.loop.window import Window


class Team(Engine):
    """Runs replicas in their threads and keeps them alike.

    Calls are serialised; backward comes through autograd, in whatever thread that uses.

    Args:
        replicas: In order of rank; rank 0's model is the user's.
        runner: Runs what they do.
        balancer: Shares batches out.
        cadence: Says how many batches each rank runs between two reductions.
        journal: Takes down what happens.
        max_grad_norm: Clips gradients; ``None``: they stay as they are.
        drifting: Whether devices compute different bits from the same gradients.
    """

    def __init__(
        self,
        replicas: Sequence[LoopReplica],
        runner: Runner,
        balancer: Balancer,
        cadence: Cadence,
        journal: Journal,
        max_grad_norm: float | None,
        *,
        drifting: bool = False,
    ) -> None:
        self._replicas = replicas
        self._first = replicas[0]
        self._runner = runner
        self._balancer = balancer
        self._cadence = cadence
        self._journal = journal
        self._max_grad_norm = max_grad_norm
        self._likeness = Likeness(replicas, runner, drifting=drifting)
        self._turn = Turn(runner.check_thread)
        self._window = Window.EMPTY
        self._counts = [0] * len(replicas)
        self._idle: list[Task | None] = [None] * (len(replicas) - 1)
        self.devices = tuple(replica.device for replica in replicas)
        self.models = tuple(replica.model for replica in replicas)
        self.optimizers = tuple(replica.optimizer for replica in replicas)
        self.rate = LearningRate(self._first.optimizer)
        self._on_cpu = all(device.type == "cpu" for device in self.devices)
        self._direct = Direct(replicas, max_grad_norm) if Direct.serves(replicas) else None

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """By measured throughput."""
        return self._balancer.chunk_ratios

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """By ElChe, where it is on."""
        return self._cadence.batch_counts

    # -- forward and backward ------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Share a batch out, run the replicas, and put their outputs together."""
        self._runner.check_caller()
        scatter = Scatter(args, kwargs)
        ambient = Ambient.capture()
        with self._turn():
            self._prepare()
            sizes = self._balancer.sizes(scatter.num_samples)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                # A batch without samples goes to rank 0 as it is.
                if size or not (start or tasks):
                    stop = start + size
                    tasks.append(partial(_forward, replica, ambient, scatter, start, stop))
                else:
                    tasks.append(None)
                start += size
            with self._likeness.computing(prepared=True):
                outcomes = self._runner.run(tasks, "forward", scatter.tensors)
        shards = [outcome.value for outcome in outcomes if outcome.value is not None]
        return Call(scatter, shards, self.devices[0], self.backward).output()

    def backward(
        self,
        shards: Sequence[Shard],
        grads: Sequence[Sequence[Tensor | None]],
        *,
        params: bool,
        keep: bool,
    ) -> list[list[Tensor | None]]:
        """Run the shards' backward and, where parameters get gradients, add these up."""
        with self._turn():
            self._settle()
            if params:
                self._notice_gradients()
                self._open(Window.BACKWARD)
            given = {shard.rank: (shard, g) for shard, g in zip(shards, grads, strict=True)}
            meet = params and not self._direct
            ends = self._runner.ends() if meet else [None] * len(self._replicas)
            tasks = [
                partial(self._backward, replica, given.get(rank), end, params, keep)
                for rank, (replica, end) in enumerate(zip(self._replicas, ends, strict=True))
            ]
            tensors = [g for row in grads for g in row if g is not None]
            with self._dropping_gradients(), self._likeness.computing(prepared=False):
                outcomes = self._runner.run(tasks, "backward", tensors)
                if params and self._direct:
                    self._direct.collect()
            if params:
                self._journal.reductions(self._replicas)
            return [outcomes[shard.rank].value for shard in shards]

    def _backward(
        self,
        replica: LoopReplica,
        given: tuple[Shard, Sequence[Tensor | None]] | None,
        end: Collective | None,
        params: bool,
        keep: bool,
    ) -> list[Tensor | None]:
        """In a replica's thread; one without a shard takes part with nothing."""
        with self._runner.waking_peers():
            found: list[Tensor | None] = []
            if given is not None:
                found = replica.backward(*given, params=params, keep=keep)
            if end is not None:
                replica.collect(end)
            return found

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Deal batches out; each replica trains its own, one after the other."""
        self._runner.check_caller()
        ambient = Ambient.capture()
        tensors: list[Tensor] = []
        flatten(list(batches), tensors, strict=False)
        with self._turn():
            self._prepare()
            if batches:
                self._notice_gradients()
                self._open(Window.ACCUMULATED)
            sizes = deal(len(batches), self.batch_counts)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                own = batches[start : start + size]
                tasks.append(partial(_accumulate, replica, ambient, loss_fn, own) if own else None)
                start += size
            with self._dropping_gradients(), self._likeness.computing(prepared=True):
                outcomes = self._runner.run(tasks, "accumulate", tensors)
            self._counts = [a + b for a, b in zip(self._counts, sizes, strict=True)]
        losses = [o.value.to(self.devices[0]) for o in outcomes if o.value is not None]
        return torch.cat(losses) if losses else torch.empty(0, device=self.devices[0])

    # -- steps ---------------------------------------------------------------------------

    def step(self) -> None:
        """Bring the gradients to all ranks, step every optimizer, forget the gradients."""
        with self._turn():
            self._prepare()
            self.rate.check()
            self._notice_gradients()
            options = self._likeness.groups.options()
            tasks = [
                partial(self._step, rank, end, options if rank else None)
                for rank, end in enumerate(self._runner.ends())
            ]
            try:
                if self._direct and self._window is Window.BACKWARD:
                    self._direct.spread()
                self._runner.run(tasks, "step")
                self._likeness.stepped()
            except BaseException:
                self._likeness.broken = True
                if not self._runner.interrupted:
                    self._forget()
                raise
            self._measure()
            self._window, self._counts = Window.EMPTY, [0] * len(self._replicas)
            self.rate.advance()
            self._journal.step += 1

    def _step(self, rank: int, end: Collective, options: Options | None) -> None:
        """In a replica's thread."""
        replica = self._replicas[rank]
        with self._runner.waking_peers():
            if self._window is Window.ACCUMULATED:
                replica.average(end, self._counts[rank], self._max_grad_norm)
            elif self._window is Window.BACKWARD and not self._direct:
                if rank == 0 and self._max_grad_norm is not None:
                    replica.clip(self._max_grad_norm)
                replica.spread(end)
            if self._likeness.buffers_differ:
                if not self._on_cpu:
                    replica.broadcast_buffers(end)
                elif rank:  # nobody writes to rank 0's until all have stepped
                    replica.copy_buffers(self._first)
            replica.step(options)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch, on rank 0."""
        with self._turn():
            self._settle()
            if self._window is Window.ACCUMULATED:
                raise RuntimeError(CLIP_LATE)
            outcomes = self._runner.run([partial(self._first.clip, max_norm), *self._idle], "clip")
            norm: Tensor = outcomes[0].value
            return norm

    def zero_grad(self) -> None:
        """Forget all gradients since the last step."""
        with self._turn():
            self._settle()
            self._forget()

    def _measure(self) -> None:
        """Take in how fast each rank was; share out anew where it is time."""
        for replica in self._replicas:
            seconds, num_samples = replica.sample_timer.take(wait=False)
            self._balancer.observe(replica.rank, num_samples, seconds)
        if self._window is Window.ACCUMULATED:
            self._journal.reductions(self._replicas)
            shares = self._cadence.report(
                [r.batch_timer.take(wait=False) for r in self._replicas],
                sync_seconds([r.sync_timer.take(wait=False) for r in self._replicas]),
            )
            changed = shares is not None
            if shares is not None:
                self._balancer.adopt(shares)
        else:
            changed = self._balancer.step()
        if changed:
            self._journal.rebalanced(len(self._replicas))

    # -- keeping the replicas alike --------------------------------------------------------

    def sync_params(self) -> None:
        """Give rank 0's parameters and buffers to all."""
        with self._turn():
            self._settle()
            self._likeness.sync()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every rank."""
        with self._turn():
            self._settle()
            self._likeness.load_optimizer(state)

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of every replica."""
        with self._turn():
            self._settle()
            self._likeness.set_attribute(name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to every replica."""
        with self._turn():
            self._settle()
            self._likeness.register_buffer(name, tensor, persistent)

    def close(self) -> None:
        """End the replicas' threads, after what they are doing if that ends in time."""
        free = self._turn.lock.acquire(timeout=END_S)
        try:
            self._runner.close()
        finally:
            if free:
                self._turn.lock.release()

    def _prepare(self) -> None:
        """Before the replicas compute: what the caller did to rank 0 holds for all."""
        self._settle()
        self._likeness.prepare()

    def _settle(self) -> None:
        if self._runner.interrupted:
            self._runner.settle()
            self._forget()
            self._likeness.broken = True

    def _notice_gradients(self) -> None:
        """What the caller did to rank 0's gradients by itself: trained its module, or zeroed."""
        if any(p.grad is not None for p in self._first.tensors):
            if self._window is Window.EMPTY:
                self._window = Window.BACKWARD
        elif self._window is Window.BACKWARD or self._counts[0]:
            self._forget()  # by optimizer.zero_grad()

    def _open(self, window: Window) -> None:
        if self._window not in (Window.EMPTY, window):
            raise RuntimeError(MIXED)
        self._window = window

    def _forget(self) -> None:
        for replica in self._replicas:
            replica.zero_grad()
        self._window, self._counts = Window.EMPTY, [0] * len(self._replicas)

    @contextmanager
    def _dropping_gradients(self) -> Iterator[None]:
        """Around what adds to gradients: half of them are no use."""
        try:
            yield
        except BaseException:
            if not self._runner.interrupted:
                self._forget()
            raise


def _forward(
    replica: LoopReplica, ambient: Ambient, scatter: Scatter, start: int, stop: int
) -> Shard:
    with ambient.applied():
        return replica.forward(scatter.piece(start, stop, replica.device), start, stop)


def _accumulate(
    replica: LoopReplica, ambient: Ambient, loss_fn: LossFn, batches: Sequence[Any]
) -> Tensor:
    with ambient.applied():
        return replica.accumulate(loss_fn, batches)
