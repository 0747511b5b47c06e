"""Engine of several devices: one thread per replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coordinator.splitting import split_by_ratio
from runtime.collective import Collective
from runtime.core.errors import ReplicaFailed
from runtime.core.loss_weights import Weight
from runtime.core.nested import flatten
from runtime.loop.accumulation import AccumulationSchedule, reduction_seconds
from runtime.loop.balance import Balancer
from runtime.loop.caller_modes import CallerModes
from runtime.loop.gather import OutputGather, ShardOutput
from runtime.loop.learning_rate import LearningRate
from runtime.loop.loop_engine import LOCAL_GRADIENTS, MIXED_GRADIENTS, WEIGHTED_TWICE, total_weight
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.loop_replica import LoopReplica, LossFn, Options
from runtime.loop.mirror import ReplicaMirror
from runtime.loop.rank_threads import Task
from runtime.loop.runner import STOP_TIMEOUT_S, Runner
from runtime.loop.scatter import Scatter

logger = logging.getLogger(__name__)

MAX_INLINE_ELEMENTS = 1 << 20
"""Up to this many elements over all ranks, one thread exchanges gradients faster than the ranks'
threads do, which have to meet at a barrier."""
UNREDUCED_AT_CLOSE = (
    "the gradients of the last %d steps were never reduced, so their batches had no effect: "
    "with max_anchor, call step(reduce=True) for the last batch"
)
LOSS_WEIGHT_GUESSED = (
    "the model returned a loss without a dimension from each device, and the count that it is a "
    "mean over is unknown: it is weighted by samples, which is wrong where tokens are ignored or "
    "classes have weights; pass DdpConfig(loss_weight=f(inputs, output)), or return a field "
    "loss_weight"
)


class ThreadedEngine:
    """Trains one replica per device, each in its own thread, and keeps the replicas identical.

    Calls are serialized. Autograd calls ``backward`` in a thread of its choice.

    Args:
        replicas: In order of rank; rank 0's model is the user's.
        runner: Runs tasks in the replicas' threads.
        balancer: Divides batches among devices.
        accumulation: Number of batches of each rank between two reductions.
        recorder: Records the work on a timeline.
        max_grad_norm: Clip gradients to this L2 norm; ``None``: do not clip.
        devices_differ: Whether devices compute different bits from the same gradients; then
            rank 0's parameters are copied after each step.

    Attributes:
        devices, models, optimizers, rate: See :class:`LoopEngine`.
    """

    def __init__(
        self,
        replicas: Sequence[LoopReplica],
        runner: Runner,
        balancer: Balancer,
        accumulation: AccumulationSchedule,
        recorder: LoopRecorder,
        max_grad_norm: float | None,
        *,
        devices_differ: bool = False,
    ) -> None:
        self._replicas = replicas
        self._first = replicas[0]
        self._runner = runner
        self._balancer = balancer
        self._accumulation = accumulation
        self._recorder = recorder
        self._max_grad_norm = max_grad_norm
        self._devices_differ = devices_differ
        self._mirror = ReplicaMirror(replicas, runner)
        self._exclusive = ReentrancyGuard(runner.check_not_replica_thread)
        self._source = GradientSource.EMPTY
        self._counts = [0] * len(replicas)
        self._weights: list[list[Weight | None]] = [[] for _ in replicas]
        self._stashed_weights: list[Weight | None] = []  # of steps not yet reduced
        self._stashed_s = [0.0] * len(replicas)
        self._has_warned = False
        self._coupling = SampleCoupling.UNKNOWN
        self._idle: list[Task | None] = [None] * (len(replicas) - 1)
        self.devices = tuple(replica.device for replica in replicas)
        self.models = tuple(replica.model for replica in replicas)
        self.optimizers = tuple(replica.optimizer for replica in replicas)
        self.rate = LearningRate(self._first.optimizer)
        self._spans_steps = accumulation.spans_steps
        self._on_cpu = all(device.type == "cpu" for device in self.devices)
        self._inline = (
            InlineExchange(replicas, max_grad_norm) if InlineExchange.supports(replicas) else None
        )

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's share of a batch, by measured throughput."""
        return self._balancer.chunk_ratios

    @property
    def batch_counts(self) -> tuple[int, ...]:
        return self._accumulation.batch_counts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scatter a batch, run the replicas and gather their outputs."""
        self._runner.check_caller()
        scatter = Scatter(args, kwargs)
        modes = CallerModes.capture()
        with self._exclusive():
            self._prepare()
            sizes = self._sizes(scatter.num_samples)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                # An empty batch goes to rank 0.
                if size or not (start or tasks):
                    stop = start + size
                    tasks.append(partial(_forward, replica, modes, scatter, start, stop))
                else:
                    tasks.append(None)
                if size and torch.is_grad_enabled():
                    self._recorder.record_batches(replica.rank, [size])
                start += size
            with self._mirror.watching_buffers(prepared=True):
                outcomes = self._runner.run(tasks, "forward", scatter.tensors)
        shards = [outcome.value for outcome in outcomes if outcome.value is not None]
        gather = OutputGather(scatter, shards, self.devices[0], self.backward)
        if self._coupling is not SampleCoupling.NO and len(shards) > 1:
            self._coupling = (
                SampleCoupling.MAYBE if gather.may_couple_samples else SampleCoupling.NO
            )
        if not self._has_warned and any(gathered.weight_is_guessed for gathered in gather.gathered):
            self._has_warned = True
            logger.warning(LOSS_WEIGHT_GUESSED)
        return gather.output()

    def _sizes(self, num_samples: int) -> Sequence[int]:
        """Shard sizes by throughput; unequal ones if outputs may couple samples, to find out."""
        sizes = self._balancer.sizes(num_samples)
        if self._coupling is not SampleCoupling.MAYBE or len(set(sizes)) > 1 or sizes[0] < 2:
            return sizes
        return (sizes[0] + 1, sizes[1] - 1, *sizes[2:])

    def backward(
        self,
        shards: Sequence[ShardOutput],
        grads: Sequence[Sequence[Tensor | None]],
        *,
        param_grads: bool,
        retain_graph: bool,
    ) -> list[list[Tensor | None]]:
        """Run the shards' backward, and add up parameters' gradients if there are any."""
        with self._exclusive():
            self._recover()
            if param_grads:
                self._detect_caller_gradients()
                self._set_source(GradientSource.BACKWARD)
            work = {shard.rank: (shard, g) for shard, g in zip(shards, grads, strict=True)}
            reduces = param_grads and not self._spans_steps
            inline = self._inline if reduces else None
            is_collective = reduces and inline is None
            collectives = (
                self._runner.collectives() if is_collective else [None] * len(self._replicas)
            )
            tasks = [
                partial(
                    self._backward, replica, work.get(rank), collective, param_grads, retain_graph
                )
                for rank, (replica, collective) in enumerate(
                    zip(self._replicas, collectives, strict=True)
                )
            ]
            tensors = [g for row in grads for g in row if g is not None]
            with self._clearing_on_error(), self._mirror.watching_buffers(prepared=False):
                outcomes = self._runner.run(
                    tasks, "backward", tensors, self._recorded_replicas(reduces)
                )
                if inline is not None:
                    inline.reduce_to_first()
            if inline is not None:
                self._recorder.record_reductions(self._replicas)
            return [outcomes[shard.rank].value for shard in shards]

    def _backward(
        self,
        replica: LoopReplica,
        work: tuple[ShardOutput, Sequence[Tensor | None]] | None,
        collective: Collective | None,
        param_grads: bool,
        retain_graph: bool,
    ) -> list[Tensor | None]:
        """Run in a replica's thread; one without a shard only joins the reduction."""
        with self._runner.aborting_on_error():
            found: list[Tensor | None] = []
            if work is not None:
                found = replica.backward(*work, param_grads=param_grads, retain_graph=retain_graph)
            if collective is not None:
                replica.reduce_to_first(collective)
            return found

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Distribute batches; each replica trains its own sequentially."""
        self._runner.check_caller()
        modes = CallerModes.capture()
        tensors: list[Tensor] = []
        flatten(list(batches), tensors, strict=False)
        with self._exclusive():
            self._prepare()
            if batches:
                self._detect_caller_gradients()
                self._set_source(GradientSource.ACCUMULATED)
            sizes = split_by_ratio(len(batches), self.batch_counts)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                own = batches[start : start + size]
                tasks.append(partial(_accumulate, replica, modes, loss_fn, own) if own else None)
                self._recorder.record_batches(replica.rank, own)
                start += size
            with self._clearing_on_error(), self._mirror.watching_buffers(prepared=True):
                outcomes = self._runner.run(tasks, "accumulate", tensors)
                for outcome, own in zip(outcomes, self._weights, strict=True):
                    own += [] if outcome.value is None else outcome.value[1]
                total_weight([weight for own in self._weights for weight in own])
            self._counts = [a + b for a, b in zip(self._counts, sizes, strict=True)]
        losses = [o.value[0].to(self.devices[0]) for o in outcomes if o.value is not None]
        return torch.cat(losses) if losses else torch.empty(0, device=self.devices[0])

    def step(self, weight: Weight | None = None, *, reduce: bool | None = None) -> None:
        """Reduce the gradients, step every optimizer and clear the gradients."""
        with self._exclusive():
            self._prepare()
            self.rate.check()
            self._detect_caller_gradients()
            num_stashed, reduces = 0, True
            if self._spans_steps and self._source is not GradientSource.ACCUMULATED:
                self._stash_step(weight)
                num_stashed = len(self._stashed_weights)
                reduces = num_stashed >= min(self.batch_counts) if reduce is None else reduce
                if reduces:
                    self._update(self._reduce_stashed())
            else:
                self._update(weight)
            self._update_shares(num_stashed, reduces=reduces)
            self._reset_source()
            self.rate.advance()
            self._recorder.step += 1

    def _update(self, weight: Weight | None) -> None:
        """Step every optimizer with the reduced gradients."""
        weights = self._apply_weight(weight)
        options = self._mirror.groups.options()
        tasks = [
            partial(self._step, rank, collective, options if rank else None, weights)
            for rank, collective in enumerate(self._runner.collectives())
        ]
        try:
            if self._inline and self._source is GradientSource.BACKWARD:
                with self._timing_reduction(self._first, 1):
                    self._inline.broadcast_from_first()
            self._runner.run(tasks, "step", (), self._recorded_replicas(True))
            if self._devices_differ:
                self._mirror.copy("copy_params")
            self._mirror.mark_synced()
        except BaseException:
            self._mirror.is_inconsistent = True
            if not self._runner.interrupted:
                self._clear_gradients()
            raise

    def _stash_step(self, weight: Weight | None) -> None:
        """Stash the gradients of a step until the reduction of several steps."""
        total_weight([*self._stashed_weights, weight])
        with self._clearing_on_error():
            self._run_on_each("step", [replica.stash for replica in self._replicas])
        self._stashed_weights.append(weight)

    def _reduce_stashed(self) -> Weight:
        """Sum all stashed gradients on rank 0; returns the divisor of their mean."""
        weight = total_weight(self._stashed_weights)
        divisor = float(len(self._stashed_weights)) if weight is None else weight
        self._stashed_weights = []
        self._source = GradientSource.BACKWARD
        with self._clearing_on_error():
            self._run_on_each("step", [replica.unstash for replica in self._replicas])
            if self._inline:
                with self._timing_reduction(self._first, 0):
                    self._inline.reduce_to_first()
                self._recorder.record_reductions(self._replicas)
            else:
                pairs = zip(self._replicas, self._runner.collectives(), strict=True)
                tasks = [
                    partial(self._reduce_stash, replica, collective)
                    for replica, collective in pairs
                ]
                self._runner.run(tasks, "step", (), self._recorded_replicas(True))
        return divisor

    def _reduce_stash(self, replica: LoopReplica, collective: Collective) -> None:
        """Run in a replica's thread."""
        with self._runner.aborting_on_error():
            collective.barrier()  # keeps the wait for the slowest rank out of the timing
            with self._timing_reduction(replica, 0):
                replica.reduce_to_first(collective)

    @contextmanager
    def _timing_reduction(self, replica: LoopReplica, count: int) -> Iterator[None]:
        """Time a part of a reduction for the accumulation schedule."""
        if self._spans_steps:
            replica.sync_timer.start()
        yield
        if self._spans_steps:
            replica.sync_timer.stop(count)

    def _run_on_each(self, operation: str, tasks: Sequence[Callable[[], None]]) -> None:
        """Run a short task on every replica; on CPUs in the caller's thread."""
        if not self._on_cpu:
            self._runner.run(list(tasks), operation)
            return
        for replica, task in zip(self._replicas, tasks, strict=True):
            with _as_replica_failure(replica, operation):
                task()

    def _apply_weight(self, weight: Weight | None) -> list[Weight] | None:
        """Divide gradients of backward by ``weight``; return the ranks' accumulated weights.

        With a total weight of 0 the gradients are cleared, so that optimizers change nothing.
        """
        if self._source is GradientSource.ACCUMULATED:
            if weight is not None:
                raise ValueError(WEIGHTED_TWICE)
            weight = total_weight([weight for own in self._weights for weight in own])
            if weight is None:
                return None
        if weight is None:
            return None
        if isinstance(weight, float) and weight == 0:
            self._clear_gradients()
            return None
        if self._source is GradientSource.ACCUMULATED:
            totals = [total_weight(own) for own in self._weights]
            return [0.0 if total is None else total for total in totals]
        self._runner.run([partial(self._first.divide, weight), *self._idle], "divide")
        return None

    def _step(
        self,
        rank: int,
        collective: Collective,
        options: Options | None,
        weights: list[Weight] | None,
    ) -> None:
        """Run in a replica's thread."""
        replica = self._replicas[rank]
        with self._runner.aborting_on_error():
            if self._source is GradientSource.ACCUMULATED:
                replica.average(collective, self._counts[rank], self._max_grad_norm, weights)
            elif self._source is GradientSource.BACKWARD and not self._inline:
                if rank == 0 and self._max_grad_norm is not None:
                    replica.clip(self._max_grad_norm)
                with self._timing_reduction(replica, 1):
                    replica.broadcast_from_first(collective)
            if self._mirror.buffers_may_differ:
                if not self._on_cpu:
                    replica.broadcast_buffers(collective)
                elif rank:  # rank 0's are not written until all ranks have stepped
                    replica.copy_buffers(self._first)
            replica.step(options)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch, on rank 0."""
        with self._exclusive():
            self._recover()
            if self._spans_steps or self._source is GradientSource.ACCUMULATED:
                raise RuntimeError(LOCAL_GRADIENTS)
            outcomes = self._runner.run([partial(self._first.clip, max_norm), *self._idle], "clip")
            norm: Tensor = outcomes[0].value
            return norm

    def zero_grad(self) -> None:
        with self._exclusive():
            self._recover()
            self._clear_gradients(stashed=False)

    def _update_shares(self, num_stashed: int, *, reduces: bool) -> None:
        """Record each rank's speed, and update batch shares and counts when due.

        Args:
            num_stashed: Number of steps stashed for the next reduction, this one included; 0:
                each step reduces.
            reduces: Whether this step reduced.
        """
        for replica in self._replicas:
            seconds, num_samples = replica.sample_timer.take(wait=False)
            self._balancer.observe(replica.rank, num_samples, seconds)
            if num_stashed:
                self._stashed_s[replica.rank] += seconds
        if self._source is GradientSource.ACCUMULATED:
            times = [r.batch_timer.take(wait=False) for r in self._replicas]
            shares = self._accumulation.report(times, self._reduction_s())
            if shares is not None:
                self._balancer.adopt(shares)
            return
        self._balancer.step()
        if num_stashed and reduces:
            self._accumulation.report(
                [(s, num_stashed) for s in self._stashed_s], self._reduction_s()
            )
            self._stashed_s = [0.0] * len(self._replicas)

    def _reduction_s(self) -> float:
        return reduction_seconds([r.sync_timer.take(wait=False) for r in self._replicas])

    def sync_params(self) -> None:
        with self._exclusive():
            self._recover()
            self._mirror.sync()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        with self._exclusive():
            self._recover()
            self._mirror.load_optimizer(state)

    def set_attribute(self, name: str, value: object) -> None:
        with self._exclusive():
            self._recover()
            for replica in self._replicas:
                replica.set_attribute(name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        with self._exclusive():
            self._recover()
            for replica in self._replicas:
                replica.register_buffer(name, tensor, persistent)

    def close(self) -> None:
        """End the replicas' threads, once running tasks end or a timeout has passed."""
        acquired = self._exclusive.lock.acquire(timeout=STOP_TIMEOUT_S)
        try:
            if self._stashed_weights:
                logger.warning(UNREDUCED_AT_CLOSE, len(self._stashed_weights))
                self._stashed_weights = []
            self._runner.close()
            for replica in self._replicas:
                replica.guard.close()
            self._recorder.finish()
        finally:
            if acquired:
                self._exclusive.lock.release()

    def _recorded_replicas(self, reduces: bool) -> Sequence[LoopReplica]:
        """The replicas whose exchange in a task is recorded; none without a timeline."""
        return self._replicas if reduces and self._recorder.enabled else ()

    def _prepare(self) -> None:
        """Copy the caller's changes of rank 0 to the others, before they compute."""
        self._recover()
        self._mirror.prepare()

    def _recover(self) -> None:
        if self._runner.interrupted:
            self._runner.drain()
            self._clear_gradients()
            self._mirror.is_inconsistent = True

    def _detect_caller_gradients(self) -> None:
        """Account for gradients that the caller added to or cleared on rank 0 directly."""
        if any(p.grad is not None for p in self._first.tensors):
            if self._source is GradientSource.EMPTY:
                self._source = GradientSource.BACKWARD
        elif self._source is GradientSource.BACKWARD or any(map(_has_backward, self._weights[0])):
            self._clear_gradients(stashed=False)  # cleared by optimizer.zero_grad()

    def _set_source(self, source: GradientSource) -> None:
        is_mixed = self._stashed_weights and source is GradientSource.ACCUMULATED
        if is_mixed or self._source not in (GradientSource.EMPTY, source):
            raise RuntimeError(MIXED_GRADIENTS)
        self._source = source

    def _clear_gradients(self, *, stashed: bool = True) -> None:
        """Clear all gradients; stashed ones too unless ``stashed`` is false."""
        for replica in self._replicas:
            replica.zero_grad()
            if stashed:
                replica.clear_stash()
        if stashed:
            self._stashed_weights = []
            self._stashed_s = [0.0] * len(self._replicas)
        self._reset_source()

    def _reset_source(self) -> None:
        self._source, self._counts = GradientSource.EMPTY, [0] * len(self._replicas)
        self._weights = [[] for _ in self._replicas]

    @contextmanager
    def _clearing_on_error(self) -> Iterator[None]:
        """Clear partial gradients if the context raises."""
        try:
            yield
        except BaseException:
            if not self._runner.interrupted:
                self._clear_gradients()
            raise


def _has_backward(weight: Weight | None) -> bool:
    """True if a batch of this weight ran backward."""
    return weight is None or isinstance(weight, Tensor) or weight > 0


def _forward(
    replica: LoopReplica, modes: CallerModes, scatter: Scatter, start: int, stop: int
) -> ShardOutput:
    with modes.applied():
        return replica.forward(scatter.shard(start, stop, replica.device), start, stop)


def _accumulate(
    replica: LoopReplica, modes: CallerModes, loss_fn: LossFn, batches: Sequence[Any]
) -> tuple[Tensor, list[Weight | None]]:
    with modes.applied():
        return replica.accumulate(loss_fn, batches)


class ReentrancyGuard:
    """A mutex that raises on reentry instead of deadlocking.

    Args:
        check_thread: Raises in a replica's thread.

    Attributes:
        lock: Held while a thread is inside.
    """

    def __init__(self, check_thread: Callable[[], None]) -> None:
        self._check_thread = check_thread
        self.lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the mutex for the duration of the context.

        Raises:
            RuntimeError: The thread holds the mutex already.
        """
        self._check_thread()
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "the model was called from inside one of its own calls: call it after that "
                "call has returned"
            )
        with self.lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


class GradientSource(Enum):
    """Origin of the gradients since the last step."""

    EMPTY = auto()
    BACKWARD = auto()
    """``loss.backward()``: rank 0 holds the gradients of the whole batch."""
    ACCUMULATED = auto()
    """``accumulate``: each rank holds its own gradients."""


class SampleCoupling(Enum):
    """Evidence that an output relates the samples of a shard to each other."""

    UNKNOWN = auto()
    MAYBE = auto()
    """A dimension is as long as the shard, but all shards were equal: it may be a coincidence."""
    NO = auto()


class InlineExchange:
    """Exchanges gradients of CPU replicas in the caller's thread, while their threads are idle.

    Args:
        replicas: On the CPU, in order of rank.
        max_grad_norm: Clip rank 0's gradients to this L2 norm before they are copied.
    """

    def __init__(self, replicas: Sequence[LoopReplica], max_grad_norm: float | None) -> None:
        self._first, *self._others = replicas
        self._max_grad_norm = max_grad_norm

    @staticmethod
    def supports(replicas: Sequence[LoopReplica]) -> bool:
        """True if all replicas are small and on the CPU."""
        return (
            all(replica.device.type == "cpu" for replica in replicas)
            and sum(replica.exchange.num_elements for replica in replicas) <= MAX_INLINE_ELEMENTS
        )

    def reduce_to_first(self) -> None:
        """Sum all ranks' gradients on rank 0; the others have none afterwards."""
        for replica in self._others:
            with _as_replica_failure(replica, "backward"):
                replica.add_grads_to(self._first)

    def broadcast_from_first(self) -> None:
        """Clip rank 0's gradients and copy them to all."""
        with _as_replica_failure(self._first, "step"):
            self._first.state.params.check()
            if self._max_grad_norm is not None:
                self._first.clip(self._max_grad_norm)
        for replica in self._others:
            with _as_replica_failure(replica, "step"):
                replica.copy_grads_from(self._first)


@contextmanager
def _as_replica_failure(replica: LoopReplica, operation: str) -> Iterator[None]:
    """Raise errors as :class:`ReplicaFailed`, like tasks in the replicas' threads."""
    try:
        yield
    except Exception as error:
        raise ReplicaFailed(replica.rank, str(replica.device), operation, error) from error
