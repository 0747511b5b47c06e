"""Several replicas behind one module: one batch shared out, or several for each."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.collective import Collective
from runtime.setup.ambient import Ambient
from runtime.setup.balancer import Balancer, deal
from runtime.setup.cadence import Cadence, sync_seconds
from runtime.setup.direct import Direct
from runtime.setup.engine import Engine
from runtime.setup.gather import Call
from runtime.setup.journal import Journal
from runtime.setup.learning_rate import LearningRate
from runtime.setup.mirror import Mirror
from runtime.setup.replica import LoopReplica, LossFn, Options, Shard
from runtime.setup.replicas import END_S, Task
from runtime.setup.runner import Runner
from runtime.setup.scatter import Scatter
from runtime.setup.tree import flatten
from runtime.setup.turn import Turn
from runtime.setup.window import Window


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
    """

    def __init__(
        self,
        replicas: Sequence[LoopReplica],
        runner: Runner,
        balancer: Balancer,
        cadence: Cadence,
        journal: Journal,
        max_grad_norm: float | None,
    ) -> None:
        self._replicas = replicas
        self._first = replicas[0]
        self._runner = runner
        self._balancer = balancer
        self._cadence = cadence
        self._journal = journal
        self._max_grad_norm = max_grad_norm
        self._mirror = Mirror(replicas)
        self._turn = Turn(runner.check_thread)
        self._window = Window.EMPTY
        self._counts = [0] * len(replicas)
        self._broken = False  # a step ended half-way: what rank 0 has counts
        self._buffers_differ = False
        self._idle: list[Task | None] = [None] * (len(replicas) - 1)
        self.devices = tuple(replica.device for replica in replicas)
        self.models = tuple(replica.model for replica in replicas)
        self.optimizers = tuple(replica.optimizer for replica in replicas)
        self.rate = LearningRate(self._first.optimizer)
        self._on_cpu = all(device.type == "cpu" for device in self.devices)
        self._direct = Direct(replicas, max_grad_norm) if Direct.serves(replicas) else None
        self._loaded = False
        team = weakref.ref(self)  # the hook must not keep the threads alive

        def on_load(optimizer: torch.optim.Optimizer) -> None:
            if (self := team()) is not None:
                self._loaded = True

        self._first.optimizer.register_load_state_dict_post_hook(on_load)

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
            self._note_buffers()
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
        with self._turn.lock:
            self._settle()
            if params:
                self._open(Window.BACKWARD)
            given = {shard.rank: (shard, g) for shard, g in zip(shards, grads, strict=True)}
            meet = params and not self._direct
            ends = self._runner.ends() if meet else [None] * len(self._replicas)
            tasks = [
                partial(self._backward, replica, given.get(rank), end, params, keep)
                for rank, (replica, end) in enumerate(zip(self._replicas, ends, strict=True))
            ]
            tensors = [g for row in grads for g in row if g is not None]
            with self._dropping_gradients():
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
            self._open(Window.ACCUMULATED)
            sizes = deal(len(batches), self.batch_counts)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                own = batches[start : start + size]
                tasks.append(partial(_accumulate, replica, ambient, loss_fn, own) if own else None)
                start += size
            self._note_buffers()
            with self._dropping_gradients():
                outcomes = self._runner.run(tasks, "accumulate", tensors)
            self._counts = [a + b for a, b in zip(self._counts, sizes, strict=True)]
        losses = [o.value.to(self.devices[0]) for o in outcomes if o.value is not None]
        return torch.cat(losses) if losses else torch.empty(0, device=self.devices[0])

    # -- steps ---------------------------------------------------------------------------

    def step(self) -> None:
        """Bring the gradients to all ranks, step every optimizer, forget the gradients."""
        with self._turn():
            self._prepare()
            if self._window is Window.EMPTY and any(
                p.grad is not None for p in self._first.tensors
            ):
                self._window = Window.BACKWARD  # of rank 0's module itself
            if self._direct and self._window is Window.BACKWARD:
                self._direct.spread()
            options = self._options()
            tasks = [
                partial(self._step, rank, end, options if rank else None)
                for rank, end in enumerate(self._runner.ends())
            ]
            try:
                self._runner.run(tasks, "step")
            except BaseException:
                self._broken = True
                if not self._runner.interrupted:
                    self._forget()
                raise
            self._mirror.weights_are_alike()
            self._buffers_differ = False
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
            if self._buffers_differ:
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
                raise RuntimeError(
                    "accumulate(...) leaves each device its own gradients until step(): clip them "
                    "with DdpConfig(max_grad_norm=...)"
                )
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

    def _options(self) -> Options:
        """Settings of rank 0's optimizer, as they are before it steps."""
        return [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._first.optimizer.param_groups
        ]

    # -- keeping the replicas alike --------------------------------------------------------

    def sync_params(self) -> None:
        """Give rank 0's parameters and buffers to all."""
        with self._turn():
            self._settle()
            self._copy_weights()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every rank."""
        with self._turn():
            self._settle()
            load = partial(self._first.optimizer.load_state_dict, state)
            self._runner.run([load, *self._idle], "load")
            self._copy("copy_optimizer")
            self._loaded = False

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of every replica."""
        with self._turn():
            for model in self.models:
                setattr(model, name, value)

    def close(self) -> None:
        """End the replicas' threads, after what they are doing if that ends in time."""
        free = self._turn.lock.acquire(timeout=END_S)
        try:
            self._runner.close()
        finally:
            if free:
                self._turn.lock.release()

    def _take_loaded(self) -> None:
        """A state that was loaded into rank 0's optimizer by hand holds for all."""
        if self._loaded:
            self._loaded = False
            self._copy("copy_optimizer")

    def _prepare(self) -> None:
        """Before the replicas compute: what the caller did to rank 0 holds for all."""
        self._settle()
        self._take_loaded()
        self._mirror.flags()
        if self._broken:
            self._copy("copy_optimizer")
            self._copy_weights()
            self._broken = False
        elif self._mirror.weights_changed():
            self._copy_weights()
        elif self._buffers_differ and not self._first.model.training:
            self._copy("copy_buffers")
            self._buffers_differ = False

    def _settle(self) -> None:
        if self._runner.interrupted:
            self._runner.settle()
            self._forget()
            self._broken = True

    def _copy_weights(self) -> None:
        self._copy("copy_weights")
        self._buffers_differ = False
        self._mirror.weights_are_alike()

    def _copy(self, method: str) -> None:
        tasks = [partial(getattr(replica, method), self._first) for replica in self._replicas[1:]]
        self._runner.run([None, *tasks], method)

    def _note_buffers(self) -> None:
        if self._first.state.buffers and any(m.training for m in self._first.modules):
            self._buffers_differ = True

    def _open(self, window: Window) -> None:
        if self._window not in (Window.EMPTY, window):
            raise RuntimeError(
                "loss.backward() and accumulate(...) cannot share a step: their gradients are "
                "averaged differently; call model.step() or model.zero_grad() in between"
            )
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
