"""Engine of several devices: one thread per rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coordinator.splitting import split_by_ratio
from runtime.core.checks import in_func_transform
from runtime.core.errors import ReplicaFailed
from runtime.core.loss_weights import Weight
from runtime.core.nested import movable_parts
from runtime.device.memory import is_out_of_memory
from runtime.loop.accumulation import AccumulationSchedule, reduction_seconds
from runtime.loop.balance import Balancer
from runtime.loop.caller_modes import CallerModes, modes_not_carried
from runtime.loop.gather import OutputGather, ShardOutput
from runtime.loop.learning_rate import LearningRate
from runtime.loop.loop_engine import (
    LOCAL_GRADIENTS,
    STEPPED_DEFERRED,
    STEPPED_OUTSIDE,
    WEIGHTED_TWICE,
    DirectSteps,
    total_weight,
)
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.pending_gradients import GradientSource, PendingGradients
from runtime.loop.rank_group import RankGroup
from runtime.loop.rank_replica import (
    STATE_REMEDY,
    LossFn,
    RankReplica,
    Row,
    add_rows,
    clip_and_scale_,
    divide_grads_,
    take_grads,
)
from runtime.loop.rank_threads import Task
from runtime.loop.runner import STOP_TIMEOUT_S
from runtime.loop.scatter import InputRules, Scatter
from runtime.loop.split_check import can_check, check_split, fails_in_pieces, needs_check
from runtime.replica.error_notes import add_note_once
from runtime.replica.gradients import refuse_sparse
from runtime.replica.max_norm import MaxNorm
from runtime.replica.rank_statistics import attributes_of

logger = logging.getLogger(__name__)

UNREDUCED_AT_CLOSE = (
    "the gradients of the last %d steps were never reduced, so their batches had no effect: "
    "with max_anchor, call step(reduce=True) for the last batch"
)
IN_TRANSFORM = (
    "the model was called inside a transform of torch.func (grad, vmap, jacrev), which does not "
    "reach the other devices: apply such transforms to model.module, which runs on the first "
    "device only, or in train_fn of Trainer.builder"
)
MODES_WITHOUT_EFFECT = (
    "the model was called within %s, which has no effect on the devices' threads: it does not see, "
    "count or change their operations; use it around model.module(...), which runs in the calling "
    "thread, or in forward"
)
OUTSIDE_OF_OUTPUT = (
    "a backward pass began at a tensor that forward left in an attribute of the model, or that a "
    "hook kept, as an auxiliary loss or features: it is computed from the samples of one device "
    "only. Return it from forward, out, aux = model(x), or call that part of model.module in the "
    "loop"
)
KEPT_STATE = (
    "the pieces of the devices change from %s to %s samples, and %r of the model has the size of "
    "the former: if the next call reads it, it belongs to other samples then; %s"
)
LOSS_WEIGHT_GUESSED = (
    "the model returned a loss without a dimension from each device, and the count that it is a "
    "mean over is unknown: it is weighted by samples, which is wrong where tokens are ignored, "
    "classes have weights, or the loss relates samples to each other; pass "
    "DdpConfig(loss_weight=f(inputs, output)), or return a field loss_weight"
)


class ThreadedEngine:
    """Trains one model on several devices; each rank computes in its own thread.

    The ranks run copies of the model (:class:`ModelMirror`). Their gradients are summed, and reach
    the model's parameters as the gradients of the gathered output, so hooks, optimizers and
    gradients of the model behave as on one device.

    Calls are serialized. Autograd calls ``backward`` in a thread of its choice.

    Args:
        accumulation: Number of batches of each rank between two reductions.

    Attributes:
        devices, models, optimizer, rate: See :class:`LoopEngine`.
    """

    def __init__(
        self,
        ranks: RankGroup,
        balancer: Balancer,
        accumulation: AccumulationSchedule,
        recorder: LoopRecorder,
        max_norm: MaxNorm,
        rules: InputRules | None = None,
    ) -> None:
        replicas, optimizer = ranks.replicas, ranks.optimizer
        self._mirror = ranks.mirror
        self.optimizer = optimizer
        self._replicas = replicas
        self._runner = ranks.runner
        self._balancer = balancer
        self._accumulation = accumulation
        self._recorder = recorder
        self._reduction = ranks.reduction
        self._max_norm = max_norm
        self._rules = rules or InputRules()
        self._exclusive = ReentrancyGuard(ranks.runner.check_not_replica_thread)
        self._pending = PendingGradients(len(replicas))
        self._stashed_s = [0.0] * len(replicas)
        self._has_warned = False
        self._num_guesses = 0
        self._has_warned_of_modes = False
        self._has_warned_of_state = False
        self._last_sizes: Sequence[int] = ()
        self._coupling = SampleCoupling.UNKNOWN
        self.devices = tuple(replica.device for replica in replicas)
        self.rate = LearningRate(optimizer)
        self._spans_steps = accumulation.spans_steps
        self._is_deferred = False
        self._steps = DirectSteps(self.model, optimizer, self._before_direct_step, self._after_step)

    @property
    def model(self) -> nn.Module:
        return self._mirror.models[0]

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Each rank's model, up to date."""
        if not self._runner.closed and not self._exclusive.is_held:
            with self._exclusive():
                self._prepare()
        return tuple(self._mirror.models)

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's share of a batch, by measured throughput."""
        return self._balancer.chunk_ratios

    @property
    def batch_counts(self) -> tuple[int, ...]:
        return self._accumulation.batch_counts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scatter a batch, run the ranks and gather their outputs."""
        self._runner.check_caller()
        if in_func_transform():
            raise RuntimeError(IN_TRANSFORM)
        scatter = Scatter(args, kwargs, self._rules, self.model)
        modes = self._caller_modes()
        with self._exclusive():
            self._prepare()
            sizes = self._sizes(scatter.num_samples)
            if not self._rules.is_checked and sum(map(bool, sizes)) > 1:
                self._check_split(scatter)
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
            tensors = [*scatter.tensors, *scatter.object_tensors]
            try:
                with self._mirror.comparing(None):
                    outcomes = self._runner.run(tasks, "forward", tensors)
            except BaseException as error:
                self._mirror.mark_stepped()  # some ranks may have assigned to parameters
                if isinstance(error, ReplicaFailed):
                    raise self._explained(error, scatter, modes, sizes) from error.__cause__
                raise
            self._mirror.adopt_forward([rank for rank, size in enumerate(sizes) if size])
            params = self._mirror.params
        shards = [outcome.value for outcome in outcomes if outcome.value is not None]
        scatter.adopt_writes([(s.start, s.stop, s.inputs) for s in shards])
        gather = OutputGather(scatter, shards, self.devices[0], self.backward, params)
        if self._coupling is not SampleCoupling.NO and len(shards) > 1:
            self._coupling = (
                SampleCoupling.MAYBE if gather.may_couple_samples else SampleCoupling.NO
            )
        self._warn_of_guess(gather)
        return gather.output()

    def _caller_modes(self) -> CallerModes:
        """The modes of the calling thread; warns once of those that ranks do not have."""
        if not self._has_warned_of_modes and (names := modes_not_carried()):
            self._has_warned_of_modes = True
            logger.warning(MODES_WITHOUT_EFFECT, ", ".join(names))
        return CallerModes.capture()

    def _warn_of_guess(self, gather: OutputGather) -> None:
        """Warn once if the value of a number depends on guessed weights.

        Compares the ranks' numbers at calls 1, 2, 4, 8, and so on, as it is a synchronization.
        """
        if self._has_warned or not any(each.weight_is_guessed for each in gather.gathered):
            return
        self._num_guesses += 1
        if self._num_guesses & (self._num_guesses - 1):
            return
        if any(each.depends_on_guess for each in gather.gathered):
            self._has_warned = True
            logger.warning(LOSS_WEIGHT_GUESSED)

    def _sizes(self, num_samples: int) -> Sequence[int]:
        """Shard sizes by throughput; unequal ones if outputs may couple samples, to find out."""
        least = 2 if self._mirror.uses_batch_statistics else 1  # those of one sample are undefined
        if least == 2 and not torch.is_grad_enabled():
            # As update_bn() does: the statistics of the whole batch.
            return (num_samples, *[0] * (len(self._replicas) - 1))
        sizes = self._balancer.sizes(num_samples, least)
        last, self._last_sizes = self._last_sizes, sizes
        if last and sizes != last and sum(last) == num_samples:
            self._warn_of_state(last, sizes)
        is_equal = len(set(sizes)) == 1
        if self._coupling is not SampleCoupling.MAYBE or not is_equal or sizes[0] <= least:
            return sizes
        return (sizes[0] + 1, sizes[1] - 1, *sizes[2:])

    def _warn_of_state(self, last: Sequence[int], sizes: Sequence[int]) -> None:
        """Warn once if shares change while each model keeps a tensor as long as its piece."""
        if self._has_warned_of_state:
            return
        names: list[set[str]] = []
        for model, size in zip(self._mirror.models, last, strict=True):
            names.append({name for name, t in attributes_of(model) if size and size in t.shape})
        for name in sorted(set.intersection(*names)):
            self._has_warned_of_state = True
            logger.warning(KEPT_STATE, list(last), list(sizes), name, STATE_REMEDY)
            return

    def _check_split(self, scatter: Scatter) -> None:
        """Compare the output for some samples with those for two parts of them, once."""
        is_small = self._mirror.is_small
        if not can_check(self.model) or not (is_small or needs_check(scatter)):
            return
        self._rules.is_checked = True
        new_trial, device = self._mirror.new_copy, self.devices[0]
        task = partial(check_split, new_trial, scatter, self._rules, device, may_convert=is_small)
        try:
            self._runner.run_first(task)
        except BaseException:
            self._rules.is_checked = False
            raise
        self._prepare()  # a trial may share parameters, which its eval() changes and restores

    def _explained(
        self, error: ReplicaFailed, scatter: Scatter, modes: CallerModes, sizes: Sequence[int]
    ) -> ReplicaFailed:
        """A failure of forward, with a note if the whole batch runs on one device."""
        cause, pieces = error.__cause__, [size for size in sizes if size]
        if len(pieces) < 2 or not isinstance(cause, Exception) or is_out_of_memory(cause):
            return error
        trial, device = self._mirror.new_copy(), self.devices[0]
        if trial is None:
            return error
        task = partial(fails_in_pieces, trial, scatter, self._rules, device, modes, pieces)
        note = self._runner.run_first(task)
        if note is None:
            return error
        add_note_once(cause, note)
        made = ReplicaFailed.of(error.rank, error.device, error.what, cause)
        for other in getattr(error, "__notes__", ()):
            made.add_note(other)
        return made

    def backward(
        self,
        shards: Sequence[ShardOutput],
        grads: Sequence[Sequence[Tensor | None]],
        *,
        wanted: Sequence[bool] | None,
        params: Sequence[Tensor],
        retain_graph: bool,
    ) -> tuple[list[list[Tensor | None]], Sequence[Tensor | None]]:
        """Run the shards' backward, and add up parameters' gradients if there are any."""
        with self._exclusive():
            self._recover()
            self._refuse_stray_gradients()
            with_params = wanted is None or any(wanted)
            if with_params:
                self._detect_caller_gradients()
                if self._spans_steps and wanted is not None:
                    raise RuntimeError(LOCAL_GRADIENTS)
                if wanted is None:
                    self._pending.begin(GradientSource.BACKWARD)
            tasks: list[Task | None] = [None] * len(self._replicas)
            for shard, given in zip(shards, grads, strict=True):
                replica = self._replicas[shard.rank]
                tasks[shard.rank] = partial(
                    replica.backward,
                    shard,
                    given,
                    wanted=wanted,
                    first_leaves=shards[0].leaves,
                    retain_graph=retain_graph,
                )
            tensors = [g for row in grads for g in row if g is not None]
            with self._clearing_on_error():
                try:
                    outcomes = self._runner.run(tasks, "backward", tensors)
                finally:
                    # A closure may have led one rank's graph to another rank's leaves.
                    rows = [take_grads(shard.leaves) for shard in shards]
                self._mirror.adopt()
                total: Sequence[Tensor | None] = [None] * len(params)
                if with_params:
                    by_rank: list[Row] = [total] * len(self._replicas)
                    for shard, row in zip(shards, rows, strict=True):
                        by_rank[shard.rank] = row
                    rows = []
                    into_grads = wanted is None
                    total = self._sum_or_keep(by_rank, params, into_grads=into_grads)
            return [outcomes[shard.rank].value for shard in shards], total

    def _sum_or_keep(
        self, rows: list[Row], params: Sequence[Tensor], *, into_grads: bool
    ) -> Sequence[Tensor | None]:
        """Sum a backward pass's gradients, and those kept from earlier passes, or keep them.

        Args:
            rows: One per rank; overwritten.
            into_grads: True if they are added to the parameters' gradients; others (of
                ``torch.autograd.grad``) are summed at once and alone.

        Returns:
            The model's gradients: the sum, or those of rank 0 while the others are kept.
        """
        if into_grads and (self._spans_steps or self._is_deferred):
            self._pending.hold(params, rows)
            return rows[0]
        if into_grads and self._has_deferred:
            self._pending.hold(params, rows)
            rows[1:] = self._pending.take(params)[1:]
        return self._reduction.sum(rows, params)

    @property
    def _has_deferred(self) -> bool:
        """True if ranks keep gradients of backward passes within :meth:`no_sync`."""
        is_backward = self._pending.source is GradientSource.BACKWARD
        return not self._spans_steps and is_backward and self._pending.is_held

    def _reduce_deferred(self) -> None:
        """Sum the gradients that ranks keep of passes within :meth:`no_sync` in the model."""
        if not self._has_deferred:
            return
        params = self._mirror.params
        self._reduction.sum_into(params, self._pending.take(params))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each rank keep the gradients of backward passes, for the next reduction."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Distribute batches; each rank trains its own sequentially."""
        self._runner.check_caller()
        modes = self._caller_modes()
        tensors = [part for part in movable_parts(list(batches)) if isinstance(part, Tensor)]
        with self._exclusive():
            self._prepare()
            if batches:
                self._detect_caller_gradients()
                self._pending.begin(GradientSource.ACCUMULATED)
            sizes = split_by_ratio(len(batches), self.batch_counts)
            tasks: list[Task | None] = []
            start = 0
            for replica, size in zip(self._replicas, sizes, strict=True):
                own = batches[start : start + size]
                tasks.append(partial(_accumulate, replica, modes, loss_fn, own) if own else None)
                self._recorder.record_batches(replica.rank, own)
                start += size
            with self._clearing_on_error():
                try:
                    with self._mirror.comparing(loss_fn):
                        outcomes = self._runner.run(tasks, "accumulate", tensors)
                finally:
                    rows = [take_grads(replica.leaves) for replica in self._replicas]
                self._mirror.adopt_forward([rank for rank, size in enumerate(sizes) if size])
                self._hold(rows)
                for outcome, weights in zip(outcomes, self._pending.weights, strict=True):
                    weights += [] if outcome.value is None else outcome.value[1]
                self._pending.total_weight()
        losses = [o.value[0].to(self.devices[0]) for o in outcomes if o.value is not None]
        return torch.cat(losses) if losses else torch.empty(0, device=self.devices[0])

    def _hold(self, rows: Sequence[Row]) -> None:
        """Keep gradients by rank until the step; rank 0's are those of the model."""
        params = self._mirror.params
        self._pending.hold(params, rows)
        mine = [p.grad for p in params]
        add_rows(mine, rows[0])
        for p, grad in zip(params, mine, strict=True):
            p.grad = grad
        self._pending.record_own(params)

    def step(self, weight: Weight | None = None, *, reduce: bool | None = None) -> None:
        """Step the optimizer with the gradients of the whole batch, and clear them."""
        with self._exclusive():
            start_s = time.monotonic()
            self._recover()
            self._refuse_stray_gradients()
            self.rate.check()
            self._detect_caller_gradients()
            num_stashed, reduces = 0, True
            if self._spans_steps and not self._pending.is_accumulated:
                self._stash_step(weight)
                num_stashed = len(self._pending.stashed_weights)
                reduces = num_stashed >= min(self.batch_counts) if reduce is None else reduce
                if reduces:
                    with self._clearing_on_error():
                        self._reduce_stashed()
                        self._step(empty=False)
            else:
                with self._clearing_on_error():
                    empty = self._reduce_accumulated(weight)
                    self._step(empty=empty)
            self._steps.clearing(self._mirror.params)
            self._clear_model()
            self._after_step(num_stashed, reduces=reduces, start_s=start_s)

    def _step(self, *, empty: bool) -> None:
        """Clip the model's gradients, and step its optimizer unless the weight is 0."""
        self._mirror.mark_stepped()
        if empty:
            return
        if not self._pending.is_accumulated:
            self._max_norm.clip(self._mirror.params)
        with self._steps.expected():
            self.optimizer.step()

    def _stash_step(self, weight: Weight | None) -> None:
        """Stash the gradients of a step until the reduction of several steps."""
        total_weight([*self._pending.stashed_weights, weight])
        params = self._mirror.params
        with self._clearing_on_error():
            refuse_sparse(self._mirror.names(), [p.grad for p in params])
            self._pending.stash(params, weight)

    def _reduce_stashed(self) -> None:
        """Average the gradients of all stashed steps in the model."""
        params = self._mirror.params
        rows, divisor = self._pending.take_stashed(params)
        self._reduction.sum_into(params, rows)
        divide_grads_(params, divisor)

    def _reduce_accumulated(self, weight: Weight | None) -> bool:
        """Average gradients of :meth:`accumulate` in the model, or divide those of backward.

        Returns:
            True if the total weight is 0, so that there is nothing to step with.
        """
        params = self._mirror.params
        if not self._pending.is_accumulated:
            self._reduce_deferred()
            if weight is not None:
                divide_grads_(params, weight)
            return isinstance(weight, float) and weight == 0
        if weight is not None:
            raise ValueError(WEIGHTED_TWICE)
        weight = self._pending.total_weight()
        if isinstance(weight, float) and weight == 0:
            return True
        rows, tasks = self._pending.take(params), []
        factors = self._pending.mean_factors(weight, self.devices)
        for row, (before, after) in zip(rows, factors, strict=True):
            own = [g for g in row if g is not None]
            tasks.append(
                partial(clip_and_scale_, own, self._max_norm, before, after) if own else None
            )
        self._runner.run(tasks, "average")
        self._reduction.sum_into(params, rows)
        return False

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch."""
        with self._exclusive():
            self._recover()
            if self._spans_steps or self._pending.is_accumulated:
                raise RuntimeError(LOCAL_GRADIENTS)
            with self._clearing_on_error():
                self._reduce_deferred()
            return nn.utils.clip_grad_norm_(self._mirror.params, max_norm)

    def zero_grad(self) -> None:
        with self._exclusive():
            self._recover()
            self._clear_gradients(stashed=False)

    def _before_direct_step(self) -> None:
        """Prepare a step of the optimizer that the caller makes."""
        if self._spans_steps or self._pending.is_accumulated:
            raise RuntimeError(STEPPED_OUTSIDE)
        self._refuse_stray_gradients()
        self._detect_caller_gradients()
        if self._has_deferred:
            raise RuntimeError(STEPPED_DEFERRED)
        self.rate.check()
        self._max_norm.clip(self._mirror.params)

    def _after_step(
        self, num_stashed: int = 0, *, reduces: bool = True, start_s: float | None = None
    ) -> None:
        self._mirror.mark_stepped()
        self._update_shares(num_stashed, reduces=reduces)
        self._pending.end_step()
        self.rate.advance()
        self._recorder.record_step(len(self._replicas), start_s)

    def _update_shares(self, num_stashed: int, *, reduces: bool) -> None:
        """Record each rank's speed, and update batch shares and counts when due.

        Args:
            num_stashed: Number of steps stashed for the next reduction, this one included; 0:
                each step reduces.
            reduces: True if this step reduced.
        """
        for replica in self._replicas:
            seconds, num_samples = replica.sample_timer.take(wait=False)
            self._balancer.observe(replica.rank, num_samples, seconds)
            if num_stashed:
                self._stashed_s[replica.rank] += seconds
        if self._pending.is_accumulated:
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
            self._prepare(changed=True)

    def check_caller(self) -> None:
        self._runner.check_not_replica_thread()

    def close(self) -> None:
        """End the ranks' threads, once running tasks end or a timeout has passed."""
        acquired = self._exclusive.lock.acquire(timeout=STOP_TIMEOUT_S)
        try:
            if num_stashed := len(self._pending.stashed_weights):
                logger.warning(UNREDUCED_AT_CLOSE, num_stashed)
                self._pending.drop_stashed()
            self._pending.drop()
            self._runner.close()
            self._steps.close()
            self._recorder.finish()
        finally:
            if acquired:
                self._exclusive.lock.release()

    def _prepare(self, *, changed: bool = False) -> None:
        """Bring the copies up to date, before they compute."""
        self._recover()
        if changed:
            self._mirror.mark_stepped()
        self._mirror.follow()

    def _recover(self) -> None:
        """Undo an interrupted call whose tasks did not end in time."""
        if self._runner.is_busy:
            self._runner.drain()
            self._undo()

    def _undo(self) -> None:
        """Clear the gradients of a call that failed; the copies are updated by the next one."""
        for replica in self._replicas:
            take_grads(replica.leaves)
        self._clear_gradients()
        self._mirror.mark_stepped()

    def _refuse_stray_gradients(self) -> None:
        """Raise if a backward pass of the caller reached a rank's leaves on its own."""
        if any(leaf.grad is not None for leaves in self._mirror.leaves for leaf in leaves):
            for leaves in self._mirror.leaves:
                take_grads(leaves)
            self._clear_gradients()
            raise RuntimeError(OUTSIDE_OF_OUTPUT)

    def _detect_caller_gradients(self) -> None:
        """Account for gradients that the caller added to or cleared on the model directly."""
        if any(p.grad is not None for p in self._mirror.params):
            if self._pending.source is GradientSource.EMPTY:
                self._pending.begin(GradientSource.BACKWARD)
        elif self._pending.has_run_backward:
            self._clear_gradients(stashed=False)  # cleared by optimizer.zero_grad()

    def _clear_model(self) -> None:
        for p in self._mirror.params:
            p.grad = None
        self._pending.drop()

    def _clear_gradients(self, *, stashed: bool = True) -> None:
        """Clear all gradients; stashed ones too unless ``stashed`` is false."""
        self._clear_model()
        if stashed:
            self._pending.drop_stashed()
            self._stashed_s = [0.0] * len(self._replicas)
        self._pending.end_step()

    @contextmanager
    def _clearing_on_error(self) -> Iterator[None]:
        """Clear partial gradients if the context raises."""
        try:
            yield
        except BaseException:
            if not self._runner.is_busy:
                self._undo()
            raise


def _forward(
    replica: RankReplica, modes: CallerModes, scatter: Scatter, start: int, stop: int
) -> ShardOutput:
    with modes.applied():
        return replica.forward(scatter.shard(start, stop, replica.device), start, stop)


def _accumulate(
    replica: RankReplica, modes: CallerModes, loss_fn: LossFn, batches: Sequence[Any]
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

    @property
    def is_held(self) -> bool:
        """True if the calling thread is inside."""
        return self._owner == threading.get_ident()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the mutex for the duration of the context.

        Raises:
            RuntimeError: The thread holds the mutex already.
        """
        self._check_thread()
        if self.is_held:
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


class SampleCoupling(Enum):
    """Evidence that an output relates the samples of a shard to each other."""

    UNKNOWN = auto()
    MAYBE = auto()
    """A dimension is as long as the shard, but all shards were equal: it may be a coincidence."""
    NO = auto()
