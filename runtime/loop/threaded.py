"""One thread per device: replicas run in their threads and are kept identical."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from coordinator.dispatch import split_by_ratio
from runtime.collective import Collective
from runtime.core.errors import (
    ReplicaFailed,
)
from runtime.core.loss_weights import (
    Weight,
)
from runtime.core.nested import flatten
from runtime.loop.accumulation import Cadence, sync_seconds
from runtime.loop.balance import Balancer
from runtime.loop.caller_modes import CallerModes
from runtime.loop.gather import Call, Shard
from runtime.loop.learning_rate import LearningRate
from runtime.loop.loop_engine import CLIP_LATE, MIXED, WEIGHED_TWICE, total_weight
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.loop_replica import LoopReplica, LossFn, Options
from runtime.loop.mirror import ReplicaMirror
from runtime.loop.rank_threads import Task
from runtime.loop.runner import END_S, Runner
from runtime.loop.scatter import Scatter

logger = logging.getLogger(__name__)

SMALL = 1 << 20
"""Elements of all ranks together up to which one thread brings gradients across faster than
the ranks can meet."""
HELD_AT_THE_END = (
    "the gradients of the last %d steps were never reduced, so that their batches have trained "
    "nothing: with max_anchor, call step(reduce=True) for the last batch"
)
GUESSED = (
    "the model returned a loss without a dimension from each device, and nothing tells what it is "
    "a mean over: it is weighted by samples, which is wrong where tokens are ignored or classes "
    "have weights; pass DdpConfig(loss_weight=f(inputs, output)), or return a field loss_weight"
)


class ThreadedEngine:
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

    Attributes:
        devices: Theirs, in order of rank.
        models: The replicas' models.
        optimizers: One for each.
        rate: The learning rate.
    """

    def __init__(
        self,
        replicas: Sequence[LoopReplica],
        runner: Runner,
        balancer: Balancer,
        cadence: Cadence,
        journal: LoopRecorder,
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
        self._drifting = drifting
        self._likeness = ReplicaMirror(replicas, runner)
        self._turn = ReentrancyGuard(runner.check_thread)
        self._window = GradientSource.EMPTY
        self._counts = [0] * len(replicas)
        self._weights: list[list[Weight | None]] = [[] for _ in replicas]
        self._held: list[Weight | None] = []  # weights of the steps that wait for a reduction
        self._held_s = [0.0] * len(replicas)
        self._has_warned = False
        self._crossing = SampleCoupling.UNKNOWN
        self._idle: list[Task | None] = [None] * (len(replicas) - 1)
        self.devices = tuple(replica.device for replica in replicas)
        self.models = tuple(replica.model for replica in replicas)
        self.optimizers = tuple(replica.optimizer for replica in replicas)
        self.rate = LearningRate(self._first.optimizer)
        self._spaced = cadence.spaces_steps
        self._on_cpu = all(device.type == "cpu" for device in self.devices)
        self._direct = (
            InlineExchange(replicas, max_grad_norm) if InlineExchange.serves(replicas) else None
        )

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """By measured throughput."""
        return self._balancer.chunk_ratios

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """By ElChe, where it is on."""
        return self._cadence.batch_counts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Share a batch out, run the replicas, and put their outputs together."""
        self._runner.check_caller()
        scatter = Scatter(args, kwargs)
        ambient = CallerModes.capture()
        with self._turn():
            self._prepare()
            sizes = self._sizes(scatter.num_samples)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                # A batch without samples goes to rank 0 as it is.
                if size or not (start or tasks):
                    stop = start + size
                    tasks.append(partial(_forward, replica, ambient, scatter, start, stop))
                else:
                    tasks.append(None)
                if size and torch.is_grad_enabled():
                    self._journal.given(replica.rank, [size])
                start += size
            with self._likeness.computing(prepared=True):
                outcomes = self._runner.run(tasks, "forward", scatter.tensors)
        shards = [outcome.value for outcome in outcomes if outcome.value is not None]
        call = Call(scatter, shards, self.devices[0], self.backward)
        if self._crossing is not SampleCoupling.NO and len(shards) > 1:
            self._crossing = SampleCoupling.MAYBE if call.looks_crossed else SampleCoupling.NO
        if not self._has_warned and any(merged.is_guessed for merged in call.merged):
            self._has_warned = True
            logger.warning(GUESSED)
        return call.output()

    def _sizes(self, num_samples: int) -> Sequence[int]:
        """Pieces by measured speed; unequal ones where that tells what an output's dimension is."""
        sizes = self._balancer.sizes(num_samples)
        if self._crossing is not SampleCoupling.MAYBE or len(set(sizes)) > 1 or sizes[0] < 2:
            return sizes
        return (sizes[0] + 1, sizes[1] - 1, *sizes[2:])

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
                self._open(GradientSource.BACKWARD)
            given = {shard.rank: (shard, g) for shard, g in zip(shards, grads, strict=True)}
            collects = params and not self._spaced
            direct = self._direct if collects else None
            meet = collects and direct is None
            ends = self._runner.ends() if meet else [None] * len(self._replicas)
            tasks = [
                partial(self._backward, replica, given.get(rank), end, params, keep)
                for rank, (replica, end) in enumerate(zip(self._replicas, ends, strict=True))
            ]
            tensors = [g for row in grads for g in row if g is not None]
            with self._dropping_gradients(), self._likeness.computing(prepared=False):
                outcomes = self._runner.run(tasks, "backward", tensors, self._meeting(collects))
                if direct is not None:
                    direct.collect()
            if direct is not None:
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
        ambient = CallerModes.capture()
        tensors: list[Tensor] = []
        flatten(list(batches), tensors, strict=False)
        with self._turn():
            self._prepare()
            if batches:
                self._notice_gradients()
                self._open(GradientSource.ACCUMULATED)
            sizes = split_by_ratio(len(batches), self.batch_counts)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                own = batches[start : start + size]
                tasks.append(partial(_accumulate, replica, ambient, loss_fn, own) if own else None)
                self._journal.given(replica.rank, own)
                start += size
            with self._dropping_gradients(), self._likeness.computing(prepared=True):
                outcomes = self._runner.run(tasks, "accumulate", tensors)
                for outcome, own in zip(outcomes, self._weights, strict=True):
                    own += [] if outcome.value is None else outcome.value[1]
                total_weight([weight for own in self._weights for weight in own])
            self._counts = [a + b for a, b in zip(self._counts, sizes, strict=True)]
        losses = [o.value[0].to(self.devices[0]) for o in outcomes if o.value is not None]
        return torch.cat(losses) if losses else torch.empty(0, device=self.devices[0])

    def step(self, weight: Weight | None = None, *, reduce: bool | None = None) -> None:
        """Bring the gradients to all ranks, step every optimizer, forget the gradients."""
        with self._turn():
            self._prepare()
            self.rate.check()
            self._notice_gradients()
            held, reduces = 0, True
            if self._spaced and self._window is not GradientSource.ACCUMULATED:
                self._hold(weight)
                held = len(self._held)
                reduces = held >= min(self.batch_counts) if reduce is None else reduce
                if reduces:
                    self._update(self._collect_held())
            else:
                self._update(weight)
            self._measure(held, reduces=reduces)
            self._clear_window()
            self.rate.advance()
            self._journal.step += 1

    def _update(self, weight: Weight | None) -> None:
        """Step every optimizer with the gradients of all ranks."""
        weights = self._take_weights(weight)
        options = self._likeness.groups.options()
        tasks = [
            partial(self._step, rank, end, options if rank else None, weights)
            for rank, end in enumerate(self._runner.ends())
        ]
        try:
            if self._direct and self._window is GradientSource.BACKWARD:
                with self._timing_sync(self._first, 1):
                    self._direct.spread()
            self._runner.run(tasks, "step", (), self._meeting(True))
            if self._drifting:
                self._likeness.copy("copy_params")
            self._likeness.are_alike()
        except BaseException:
            self._likeness.broken = True
            if not self._runner.interrupted:
                self._forget()
            raise

    def _hold(self, weight: Weight | None) -> None:
        """Put the gradients of a step aside, for a reduction of several steps."""
        total_weight([*self._held, weight])
        with self._dropping_gradients():
            self._on_each("step", [replica.hold for replica in self._replicas])
        self._held.append(weight)

    def _collect_held(self) -> Weight:
        """Bring the sum of what is held to rank 0; gives what it is to be divided by."""
        weight = total_weight(self._held)
        divisor = float(len(self._held)) if weight is None else weight
        self._held = []
        self._window = GradientSource.BACKWARD
        with self._dropping_gradients():
            self._on_each("step", [replica.give_back for replica in self._replicas])
            if self._direct:
                with self._timing_sync(self._first, 0):
                    self._direct.collect()
                self._journal.reductions(self._replicas)
            else:
                pairs = zip(self._replicas, self._runner.ends(), strict=True)
                tasks = [partial(self._collect, replica, end) for replica, end in pairs]
                self._runner.run(tasks, "step", (), self._meeting(True))
        return divisor

    def _collect(self, replica: LoopReplica, end: Collective) -> None:
        """In a replica's thread."""
        with self._runner.waking_peers():
            end.barrier()  # that the slowest is waited for is no cost of the exchange
            with self._timing_sync(replica, 0):
                replica.collect(end)

    @contextmanager
    def _timing_sync(self, replica: LoopReplica, number: int) -> Iterator[None]:
        """Around a part of an exchange whose time fits the cadence."""
        if self._spaced:
            replica.sync_timer.start()
        yield
        if self._spaced:
            replica.sync_timer.stop(number)

    def _on_each(self, what: str, tasks: Sequence[Callable[[], None]]) -> None:
        """Do a little on every replica: on the CPU in the caller's thread."""
        if not self._on_cpu:
            self._runner.run(list(tasks), what)
            return
        for replica, task in zip(self._replicas, tasks, strict=True):
            with _naming(replica, what):
                task()

    def _take_weights(self, weight: Weight | None) -> list[Weight] | None:
        """Divide what came by backward; give the ranks' weights of what was accumulated.

        Gradients of no weight at all are forgotten, so that no optimizer changes anything.
        """
        if self._window is GradientSource.ACCUMULATED:
            if weight is not None:
                raise ValueError(WEIGHED_TWICE)
            weight = total_weight([weight for own in self._weights for weight in own])
            if weight is None:
                return None
        if weight is None:
            return None
        if isinstance(weight, float) and weight == 0:
            self._forget()
            return None
        if self._window is GradientSource.ACCUMULATED:
            totals = [total_weight(own) for own in self._weights]
            return [0.0 if total is None else total for total in totals]
        self._runner.run([partial(self._first.divide, weight), *self._idle], "weigh")
        return None

    def _step(
        self, rank: int, end: Collective, options: Options | None, weights: list[Weight] | None
    ) -> None:
        """In a replica's thread."""
        replica = self._replicas[rank]
        with self._runner.waking_peers():
            if self._window is GradientSource.ACCUMULATED:
                replica.average(end, self._counts[rank], self._max_grad_norm, weights)
            elif self._window is GradientSource.BACKWARD and not self._direct:
                if rank == 0 and self._max_grad_norm is not None:
                    replica.clip(self._max_grad_norm)
                with self._timing_sync(replica, 1):
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
            if self._spaced or self._window is GradientSource.ACCUMULATED:
                raise RuntimeError(CLIP_LATE)
            outcomes = self._runner.run([partial(self._first.clip, max_norm), *self._idle], "clip")
            norm: Tensor = outcomes[0].value
            return norm

    def zero_grad(self) -> None:
        """Forget all gradients since the last step."""
        with self._turn():
            self._settle()
            self._forget(held=False)

    def _measure(self, num_held: int, *, reduces: bool) -> None:
        """Take in how fast each rank was; share out anew where it is time.

        Args:
            num_held: Steps of the reduction that this one belongs to; 0: it has its own.
            reduces: Whether that was made.
        """
        for replica in self._replicas:
            seconds, num_samples = replica.sample_timer.take(wait=False)
            self._balancer.observe(replica.rank, num_samples, seconds)
            if num_held:
                self._held_s[replica.rank] += seconds
        if self._window is GradientSource.ACCUMULATED:
            times = [r.batch_timer.take(wait=False) for r in self._replicas]
            shares = self._cadence.report(times, self._sync_s())
            if shares is not None:
                self._balancer.adopt(shares)
            return
        self._balancer.step()
        if num_held and reduces:
            self._cadence.report([(s, num_held) for s in self._held_s], self._sync_s())
            self._held_s = [0.0] * len(self._replicas)

    def _sync_s(self) -> float:
        return sync_seconds([r.sync_timer.take(wait=False) for r in self._replicas])

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
            for replica in self._replicas:
                replica.set_attribute(name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to every replica."""
        with self._turn():
            self._settle()
            for replica in self._replicas:
                replica.register_buffer(name, tensor, persistent)

    def close(self) -> None:
        """End the replicas' threads, after what they are doing if that ends in time."""
        free = self._turn.lock.acquire(timeout=END_S)
        try:
            if self._held:
                logger.warning(HELD_AT_THE_END, len(self._held))
                self._held = []
            self._runner.close()
            for replica in self._replicas:
                replica.guard.close()
            self._journal.finish()
        finally:
            if free:
                self._turn.lock.release()

    def _meeting(self, exchanged: bool) -> Sequence[LoopReplica]:
        """The replicas that exchange gradients in their own threads."""
        return self._replicas if exchanged and self._journal.on else ()

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
            if self._window is GradientSource.EMPTY:
                self._window = GradientSource.BACKWARD
        elif self._window is GradientSource.BACKWARD or any(
            map(_leaves_gradients, self._weights[0])
        ):
            self._forget(held=False)  # by optimizer.zero_grad()

    def _open(self, window: GradientSource) -> None:
        is_mixed = self._held and window is GradientSource.ACCUMULATED
        if is_mixed or self._window not in (GradientSource.EMPTY, window):
            raise RuntimeError(MIXED)
        self._window = window

    def _forget(self, *, held: bool = True) -> None:
        """Forget the gradients, and those held for a reduction of several steps."""
        for replica in self._replicas:
            replica.zero_grad()
            if held:
                replica.forget_held()
        if held:
            self._held = []
            self._held_s = [0.0] * len(self._replicas)
        self._clear_window()

    def _clear_window(self) -> None:
        self._window, self._counts = GradientSource.EMPTY, [0] * len(self._replicas)
        self._weights = [[] for _ in self._replicas]

    @contextmanager
    def _dropping_gradients(self) -> Iterator[None]:
        """Around what adds to gradients: half of them are no use."""
        try:
            yield
        except BaseException:
            if not self._runner.interrupted:
                self._forget()
            raise


def _leaves_gradients(weight: Weight | None) -> bool:
    """Whether a batch of this weight was run backward."""
    return weight is None or isinstance(weight, Tensor) or weight > 0


def _forward(
    replica: LoopReplica, ambient: CallerModes, scatter: Scatter, start: int, stop: int
) -> Shard:
    with ambient.applied():
        return replica.forward(scatter.piece(start, stop, replica.device), start, stop)


def _accumulate(
    replica: LoopReplica, ambient: CallerModes, loss_fn: LossFn, batches: Sequence[Any]
) -> tuple[Tensor, list[Weight | None]]:
    with ambient.applied():
        return replica.accumulate(loss_fn, batches)


class ReentrancyGuard:
    """Lets threads have their turns.

    Args:
        check_thread: Raises in a thread that others wait for.

    Attributes:
        lock: Held by whoever has its turn.
    """

    def __init__(self, check_thread: Callable[[], None]) -> None:
        self._check_thread = check_thread
        self.lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for this thread's turn, and have it.

        Raises:
            RuntimeError: Called from inside another call, which waits for this one.
        """
        self._check_thread()
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "the model was called from inside one of its own calls: do that once the call has "
                "returned"
            )
        with self.lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


class GradientSource(Enum):
    """Where the gradients since the last step came from."""

    EMPTY = auto()
    BACKWARD = auto()
    """From ``loss.backward()``: those of the whole batch, on rank 0."""
    ACCUMULATED = auto()
    """From ``accumulate``: each rank's own."""


class SampleCoupling(Enum):
    """Whether an output relates the samples of a piece to each other."""

    UNKNOWN = auto()
    MAYBE = auto()
    """Its shape says so, but the pieces were equal, so that it may be chance."""
    NO = auto()


class InlineExchange:
    """Brings gradients to rank 0 and from there to all, while the replicas' threads rest.

    Args:
        replicas: On the CPU, in order of rank.
        max_grad_norm: Rank 0's gradients are clipped to it before all get them.
    """

    def __init__(self, replicas: Sequence[LoopReplica], max_grad_norm: float | None) -> None:
        self._first, *self._others = replicas
        self._max_grad_norm = max_grad_norm

    @staticmethod
    def serves(replicas: Sequence[LoopReplica]) -> bool:
        """Whether all replicas are on the CPU, and small."""
        return (
            all(replica.device.type == "cpu" for replica in replicas)
            and sum(replica.exchange.num_elements for replica in replicas) <= SMALL
        )

    def collect(self) -> None:
        """Add all ranks' gradients up on rank 0; the others have none afterwards."""
        for replica in self._others:
            with _naming(replica, "backward"):
                replica.hand_to(self._first)

    def spread(self) -> None:
        """Give rank 0's gradients, clipped, to all."""
        with _naming(self._first, "step"):
            self._first.state.params.check()
            if self._max_grad_norm is not None:
                self._first.clip(self._max_grad_norm)
        for replica in self._others:
            with _naming(replica, "step"):
                replica.take_from(self._first)


@contextmanager
def _naming(replica: LoopReplica, what: str) -> Iterator[None]:
    """Errors come out as those of tasks in the replicas' threads do."""
    try:
        yield
    except Exception as error:
        raise ReplicaFailed(replica.rank, str(replica.device), what, error) from error
