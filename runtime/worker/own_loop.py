"""OwnLoop: a user's own training loop in the thread of a worker, and LoopWorker, its interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from runtime.core.errors import CollectiveAborted, CollectiveTimeout, ReplicaMismatch
from runtime.core.loss_weights import check_weight, with_graph
from runtime.device.metering import StepMeter
from runtime.device.timing import StepTimer
from runtime.evaluation.pending_means import EvaluationFn
from runtime.evaluation.predict import means_in_order
from runtime.replica.optimizers import Optimizers
from runtime.replica.stepper import DROPPED, AccumulationWindow, StepEnd
from runtime.timeline.events import CALLBACKS, COMPUTE, CONTROL
from runtime.timeline.rank_lane import RankLane
from runtime.worker.meetings import Act, LoopPeers, Post
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.replica import WorkerReplica
from runtime.worker.step import BeforeStep, WorkerSteps
from runtime.worker.task_evaluation import TaskEvaluation
from runtime.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

Loop = Callable[["LoopWorker"], object]

CHANGED_GRADIENTS = (
    "the loop changes gradients before worker.step(), such as by clip_grad_norm_, when they are "
    "those of one worker's samples, and step() reduces them afterwards: clip by max_grad_norm(f) "
    "on the builder, or change them in a hook, worker.optimizer.register_step_pre_hook(f), which "
    "runs after the reduction"
)
CHANGED_WEIGHTS = (
    "the loop changes weights between backward() and worker.step(), when gradients are those of "
    "one worker's samples: weights that it computes from them, as SAM does, differ between "
    "workers. Trainer.setup has the gradients of the whole batch after loss.backward(); make a "
    "change that is the same on all workers after worker.step()"
)


class OwnLoop:
    """Runs a user's loop in the worker's thread, and makes its steps.

    The worker's control flow is a generator, which yields each batch to the body and continues when
    the body asks for the next one.

    Args:
        function: ``loop(worker)``.
        protocol: Counts the batches.
        meter: Counts them for reports.
        evaluation: Evaluates data sets together with the other ranks.
        peers: Shared by all workers of the run.
        lane: Lane for the time of each step; ``None``: not recorded.
        receive: Handles the worker's next message; blocks until there is one.
    """

    def __init__(
        self,
        function: Loop,
        worker: Any,
        config: WorkerConfig,
        steps: WorkerSteps,
        replica: WorkerReplica,
        protocol: WorkerProtocol,
        timer: StepTimer,
        meter: StepMeter,
        evaluation: TaskEvaluation,
        peers: LoopPeers,
        lane: RankLane | None,
        receive: Callable[[], None],
    ) -> None:
        self._function = function
        self._config = config
        self._steps = steps
        self._replica = replica
        self._stepper = replica.stepper
        self._log = replica.stepper.log
        self._protocol = protocol
        self._timer = timer
        self._meter = meter
        self.peers = peers
        self._lane = lane
        self._is_lockstep = replica.is_lockstep
        self._receive = receive
        self._evaluation = evaluation
        self._names = replica.stepper.part_names
        self._micro = config.accumulate * config.num_micro_batches > 1
        if self._micro and self._names:
            raise ValueError(
                f"accumulate({config.accumulate}) cannot be combined with several optimizers: "
                "leave it out, and accumulate by worker.backward(loss, optimizer=...)"
            )
        self._precision = replica.precision
        # The iterator, and the group of ranks that it meets.
        self._source: Generator[Any, None, None] | None = None
        self._data: Any = None
        self._is_active = False  # the body has a batch
        self._is_ahead = False  # it is the first one of the next call of the loop
        self._is_over = self._is_finishing = False
        self._num_iterators, self._left_epoch = 0, -1
        self._ranks: Sequence[int] = range(config.world_size)
        self._generation, self._meeting, self._batch = 0, 0, -1
        # The optimizer step in progress.
        self._windows: dict[str, AccumulationWindow] = {}
        self._before: BeforeStep | None = None
        self._num_begun = 0  # optimizer steps at its beginning
        # Not counted yet, and not timed.
        self._num_steps = self._num_batches = self._num_samples = 0
        self._num_empty = self._num_timed = 0
        self._is_paused = False  # its timer, between two plans
        # In progress on other ranks only, and before this batch.
        self._is_followed = self._continues = False
        self._skips = False  # a micro-batch of it was skipped
        self._fault: BaseException | None = None  # raised when the body requests a batch
        # The batch in progress.
        self._serial = self._size = self._total = 0
        self._is_last = True  # micro-batch
        # step() was called, and evaluate() has waited for a round.
        self._has_stepped = self._was_averaged = self._is_dropped = False
        self._added: set[str] = set()  # optimizers with gradients of it
        self._made: list[str] = []  # optimizers of its steps
        self._losses: dict[str, list[Tensor]] = {}
        # For every(): the last multiple of k that was granted, and this rank's batch.
        self._first_step = replica.progress.body_steps
        self._granted: dict[int, tuple[int, int]] = {}
        self._lr: float | None = None  # set within the step of the plan
        self._trained_by: Sequence[int] = ()  # the ranks with samples in it
        self.global_step = 0
        self.worker = LoopWorker(worker, self)
        self._hooks = [
            each.register_step_pre_hook(self._require_worker_step)
            for each in self.worker.optimizers.values()
        ]
        self._has_warned = self._has_warned_of_weights = replica.rank > 0
        self._watch_gradients(config.world_size)

    # The iterator, called in the body.

    def run(self, source: Generator[Any, None, None]) -> None:
        """Call the loop until the run is over.

        Args:
            source: The worker's control flow, which yields the batches.
        """
        self._source = source
        try:
            while True:
                try:
                    self._function(self.worker)
                except (CollectiveAborted, CollectiveTimeout) as error:
                    if error is not self._fault:
                        raise
                    # evaluate() has raised it: the batches continue in a new group
                except (RuntimeError, ValueError) as error:
                    if self._is_active:
                        self._steps.explain_sizes(error, [self._size])
                    raise
                else:
                    if self._is_over:
                        break
                    self._leave_epoch()
                if not self._advance():
                    break
                self._is_ahead = True
        finally:
            self._source = None
            source.close()
            for hook in self._hooks:
                hook.remove()

    def batches(self) -> Iterator[Any]:
        """See :meth:`LoopWorker.batches`."""
        if self._is_active and not self._is_ahead:
            self._leave_epoch()
        self._num_iterators += 1
        own = self._num_iterators
        while own == self._num_iterators:
            if not self._is_ahead and not self._advance():
                return
            self._is_ahead = False
            yield self._data

    def steps(self) -> Iterator[int]:
        """See :meth:`LoopWorker.steps`."""
        for _ in self.batches():
            yield self._replica.progress.local_step

    def _advance(self) -> bool:
        """Continue the worker to its next batch; False at the end of the run."""
        if self._source is None or self._is_over:
            return False
        self._is_active = False
        try:
            self._data = next(self._source)
        except BaseException as error:
            self._is_over = True
            self._data = None
            if isinstance(error, StopIteration):
                return False
            raise
        self._is_active = True
        return True

    def save(self) -> None:
        """See :meth:`LoopWorker.save`."""
        self.peers.save(self._replica.lockstep.step if self._is_lockstep else None)

    def every(self, k: int) -> bool:
        """See :meth:`LoopWorker.every`."""
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"every({k!r}): pass a number of steps, at least 1")
        owner, at = -1 if self._is_lockstep else self._replica.rank, (self._generation, self._batch)
        multiple = self._replica.progress.body_steps // k
        granted, here = self.peers.grant((owner, k), multiple, self._first_step // k, at)
        if here and self._granted.get(k, (-1, -1))[0] != granted:
            self._granted[k] = granted, self._serial
        return here and self._granted[k][1] == self._serial

    @property
    def is_first(self) -> bool:
        """See :attr:`LoopWorker.is_first`."""
        ranks = self._trained_by if self._is_active else ()
        return self.peers.first(ranks, self._replica.progress.epoch) == self._replica.rank

    def set_lr(self, lr: float) -> None:
        """See :meth:`LoopWorker.set_lr`."""
        if self._fault is not None:
            return  # the step has no effect
        self._replica.schedule.set_lr(lr)
        if self._is_lockstep:
            self._lr = lr
            self._replica.lockstep.num_syncs += 1  # a peer without it is behind

    def _leave_epoch(self) -> None:
        """Leave the epoch of the batch in progress, or of the next one."""
        if self._is_active or self._advance():
            at = self._replica.progress
            # A step in progress may have batches of a later epoch, which the rank has begun.
            self._left_epoch = at.begun_epoch if self._continues else at.epoch
            self.peers.leave_epoch(self._replica.rank, self._left_epoch)

    def has_left(self, epoch: int) -> bool:
        """True if the body has left this epoch or a later one."""
        return epoch <= self._left_epoch

    @property
    def left_epoch(self) -> int:
        """The last epoch that the body has left; -1: none."""
        return self._left_epoch

    def left_now(self, epoch: int) -> int | None:
        """The epoch, if the body has left it."""
        return epoch if self.has_left(epoch) else None

    # The steps, called in the body.

    def backward(
        self, loss: Any, weight: Any, optimizer: str | None, *, retain_graph: bool
    ) -> None:
        """See :meth:`LoopWorker.backward`."""
        name = self._checked_name(optimizer, "backward")
        if self._fault is None:
            self._add(loss, weight, name, "backward", retain_graph=retain_graph)

    def step(self, loss: Any, weight: Any, optimizer: str | None) -> None:
        """See :meth:`LoopWorker.step`."""
        name = self._checked_name(optimizer, "step")
        if self._fault is not None:
            return  # the iterator raises it, or yields the batch again
        if loss is not None:
            self._add(loss, weight, name, "step")
        elif weight is not None:
            raise ValueError("worker.step(weight=...) without a loss: pass it to worker.backward")
        window = self._windows.get(name) or self._open_by_hand(name)
        self._warn_of_changed_gradients()
        if self._micro:
            if self._has_stepped:
                raise RuntimeError("with accumulate(k), call worker.step once for each batch")
            self._has_stepped = True
            if not self._is_last or self._skips:
                return
        self._has_stepped = True
        try:
            self._make(name, window)
        except (CollectiveAborted, CollectiveTimeout) as error:
            self._fault = self._undo(error)
        except BaseException as error:
            self._fault = error
            raise

    def evaluate(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """See :meth:`LoopWorker.evaluate`."""
        self._require_batch("evaluate")
        self._require_evaluable()
        if self._fault is not None:
            raise self._fault
        try:
            with self._untimed():
                if self._is_lockstep:
                    return self._evaluate_together(dataset, fn)
                if self._waits_for_rounds and not self._protocol.alone:
                    return self._evaluate_average(dataset, fn)
                return self._evaluation.alone(dataset, fn)
        except (CollectiveAborted, CollectiveTimeout) as error:
            self._fault = self._undo_evaluation(error)
            raise self._fault from (None if self._fault is error else error)
        except BaseException as error:
            self._fault = error
            raise

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """An evaluation, whose time does not belong to the step."""
        lane = self._lane
        self._timer.pause()
        if lane is not None:
            lane.enter(CALLBACKS)
        try:
            yield
        finally:
            self._timer.resume()
            if lane is not None:
                lane.enter(COMPUTE)

    @property
    def _waits_for_rounds(self) -> bool:
        """True if the weights of the ranks differ between two averaging rounds."""
        return not self._is_lockstep and self._config.world_size > 1

    def _require_evaluable(self) -> None:
        if self._windows or (self._waits_for_rounds and self._made and self._any_gradients()):
            raise RuntimeError(
                "worker.evaluate() between worker.backward() and worker.step(): call it after "
                "worker.step(), or before worker.backward()"
            )
        if self.peers.is_member:
            raise RuntimeError(
                "worker.evaluate() in a cluster: this machine's weights are not the average over "
                "the machines; set val_dataset(ds, fn=fn) on the builder"
            )
        if self._waits_for_rounds and not self._made:
            raise RuntimeError(
                f"worker.evaluate() before worker.step(): under {self._config.policy.name} it "
                "waits for an averaging round, which changes the weights; call it after "
                "worker.step()"
            )

    def _evaluate_average(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """Request a round, join it here, and evaluate its average together with all ranks."""
        protocol = self._protocol
        self._was_averaged = True
        if self._losses:
            self._log_losses()
            self._losses = {}
        # The average of a snapshot that was sent before lacks the steps since.
        after = protocol.pending_snapshot
        call = self._evaluation.request(dataset, fn, after)
        try:
            with self._precision.without_autocast():
                while not (call.is_answered or protocol.alone):
                    if protocol.leaving:
                        raise CollectiveAborted("the run ends before the evaluation")
                    self._receive()
        finally:
            self._evaluation.shared.close(self._replica.rank)
        if call.part is None:
            return self._evaluation.alone(dataset, fn)
        return means_in_order(call.part.results())

    def _evaluate_together(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """Evaluate in lockstep on all ranks that call, each with the next batch when it is free."""
        generation, number = self._generation, self._meeting
        self._steps.confirm_steps()
        self._post(Act.EVALUATE)
        self.peers.meetings.wait_for_all(generation, self._ranks, number, self._batch)
        with self._averaged_buffers():
            key, num_ranks = (generation, number), len(self._ranks)
            return self._evaluation.together(key, num_ranks, dataset, fn)

    @contextmanager
    def _averaged_buffers(self) -> Iterator[None]:
        """The buffers of the replica are the average over the ranks; all ranks enter together."""
        checkpoint, lockstep = self._replica.checkpoint, self._replica.lockstep
        num_syncs = lockstep.num_syncs
        # The buffers return bit for bit: a backward pass that has saved them may follow.
        buffers = tuple(self._replica.state.buffers.tensors())
        with _unsafe_preserve_version_counter(buffers):
            checkpoint.keep_buffers()
            try:
                self._replica.sync_buffers()
                yield
            finally:
                checkpoint.return_buffers()
                lockstep.num_syncs = num_syncs

    def _undo_evaluation(self, error: BaseException) -> BaseException:
        """Undo a batch without a step after a failed evaluation, and end one with a step."""
        if not self._made:
            return self._undo(error)
        self._steps.is_torn |= bool(self._names)
        self._timer.stop(self._num_timed)
        if self._losses:
            self._log_losses()
        return error

    def _require_batch(self, call: str) -> None:
        if not self._is_active or self._is_ahead:
            raise RuntimeError(
                f"worker.{call}() is for a batch: call it in the body of "
                "for batch in worker.batches()"
            )

    def _checked_name(self, optimizer: str | None, call: str) -> str:
        self._require_batch(call)
        if optimizer is None and not self._names:
            return ""
        if optimizer is None or optimizer not in self._names:
            remedy = "leave it out, as there is one optimizer"
            if self._names:
                remedy = f"pass one of {', '.join(map(repr, self._names))}"
            raise ValueError(f"worker.{call}(optimizer={optimizer!r}): {remedy}")
        return optimizer

    def _add(
        self, loss: Any, weight: Any, name: str, call: str, *, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of a loss on the batch."""
        if weight is not None:
            weight = check_weight(f"worker.{call}: weight", weight)
            if isinstance(loss, Tensor):
                loss = with_graph(loss, weight, self._replica.model.parameters())
        _check_loss(loss, call)
        window = self._windows.get(name) or self._open(name)
        is_first = name not in self._added
        if is_first:
            self._added.add(name)
            window.num_samples += self._size
            if self._names:
                window.values.begin_batch()
        if weight is None:
            self._stepper.check_rows(name, self._data, self._size)
        size, total = self._size, self._total
        fraction = size / total if self._micro and size != total else 1.0
        add = partial(
            window.add_loss, loss, size, weight, fraction=fraction, retain_graph=retain_graph
        )
        if not (self._names or self._precision.dtype):
            add()
        else:
            with self._precision.without_autocast():
                loss = add(inputs=self._stepper.inputs_of(name) if self._names else None)
        if self._names:
            losses = self._losses.setdefault(name, [])
            if is_first:
                losses.append(loss)
            else:
                losses[-1] = losses[-1] + loss
        for p in self._watched:
            self._watch(p)

    def _open(self, name: str) -> AccumulationWindow:
        if self._was_averaged:
            raise RuntimeError(
                "worker.backward() or worker.step() after worker.evaluate() on the same batch: "
                f"under {self._config.policy.name} its averaging round has counted the batch; make "
                "all steps on a batch before the evaluation"
            )
        if self._made:  # a further step on the batch
            self._steps.confirm_steps()
            self._keep_values()
            self._before = self._steps.state_before()
        if self._precision.scales and self._has_gradients(name):
            raise ValueError(
                "gradients of a plain loss.backward() are not scaled, as fp16 requires: call "
                "worker.backward(loss)"
            )
        assert self._before is not None, "a batch is in progress"
        values = self._log.new_values() if self._names else self._before.values
        window = self._stepper.open_window(
            values, name or None, run_ahead=self._is_lockstep and not (self._names or self._made)
        )
        self._windows[name] = window
        return window

    def _open_by_hand(self, name: str) -> AccumulationWindow:
        """The window of a step with gradients of plain backward passes."""
        if not self._has_gradients(name):
            of = f"optimizer={name!r}" if name else ""
            raise RuntimeError(
                f"worker.step({of}) without a gradient: pass the loss, or call "
                "worker.backward(loss) before"
            )
        window = self._open(name)
        window.num_samples = self._size
        self._added.add(name)
        return window

    def _has_gradients(self, name: str) -> bool:
        return any(p.grad is not None for p in self._stepper.params_of(name))

    def _any_gradients(self) -> bool:
        return any(map(self._has_gradients, self._names or ("",)))

    def _make(self, name: str, window: AccumulationWindow) -> None:
        """Make the optimizer step of a window that is complete on this rank."""
        number = self._meeting
        if self._is_lockstep:
            self._post(Act.STEP, name)
        if self._names or self._precision.dtype:
            with self._precision.without_autocast():
                end = self._finish(window, number)
        else:
            end = self._finish(window, number)
        window.close()
        del self._windows[name]
        self._commit(name, end)

    def _post(self, act: Act, *names: str) -> None:
        made = (*self._made, *names)
        post = Post(act, self._batch, made, self._num_steps, self._lr)
        number, self._meeting = self._meeting, self._meeting + 1
        rank = self._replica.rank
        self.peers.meetings.post(self._generation, self._ranks, rank, number, post)

    def _require_worker_step(self, *_: object) -> None:
        """Refuse a step of the optimizer that the body makes itself."""
        if self._is_active and not self._is_finishing:
            raise RuntimeError(
                "worker.optimizer.step() would change the replica of this rank alone: call "
                "worker.step(loss), or worker.step() after loss.backward(), which also clips by "
                "max_grad_norm(...) and clears the gradients"
            )

    def _watch_gradients(self, world_size: int) -> None:
        """Watch the gradient of a parameter of each optimizer, where ranks reduce gradients."""
        self._watched: dict[nn.Parameter, tuple[Tensor | None, int]] = {}
        self._weights: dict[nn.Parameter, int] = {}  # versions at the first backward pass
        if not self._is_lockstep or world_size == 1:
            return
        for name in self._names or ("",):
            p = self._replica.stepper.params_of(name)[-1]
            hook = p.register_post_accumulate_grad_hook(self._watch)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _watch(self, p: nn.Parameter) -> None:
        """Record the version of a gradient after a backward pass."""
        self._watched[p] = p.grad, -1 if p.grad is None else p.grad._version
        self._weights.setdefault(p, p._version)

    def _warn_of_changed_gradients(self) -> None:
        """Warn once if the body has changed a gradient, such as by clipping, or a weight."""
        watched, self._watched = self._watched, {}
        weights, self._weights = self._weights, {}
        is_changed = any(p._version != version for p, version in weights.items())
        if is_changed and not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            logger.warning(CHANGED_WEIGHTS)
        for p, (grad, version) in watched.items():
            is_changed = grad is not None and p.grad is grad and grad._version != version
            if is_changed and not self._has_warned:
                self._has_warned = True
                logger.warning(CHANGED_GRADIENTS)

    def _finish(self, window: AccumulationWindow, number: int) -> StepEnd:
        """Reduce and step; under lockstep only if no rank skips the batch."""
        self._is_finishing = True
        try:
            return self._reduce_and_step(window, number)
        finally:
            self._is_finishing = False

    def _reduce_and_step(self, window: AccumulationWindow, number: int) -> StepEnd:
        if not self._is_lockstep:
            return window.finish()
        meetings, generation = self.peers.meetings, self._generation
        if self._runs_ahead:
            # The reduction does not order the ranks' hosts.
            meetings.wait_for_all(generation, self._ranks, number, self._batch)
            end = window.finish() if meetings.all_step(generation, number) else DROPPED
        else:
            end = window.finish(agreed=partial(meetings.all_step, generation, number))
        if end.dropped and not meetings.all_step(generation, number):
            window.values.drop()
        return end

    @property
    def _runs_ahead(self) -> bool:
        collective = self._replica.averager.collective
        return collective is not None and collective.host_runs_ahead

    def _commit(self, name: str, end: StepEnd) -> None:
        """Count a step that was made or dropped."""
        if not self._made:
            self._count(end)
        else:
            if self._is_lockstep:
                self._replica.lockstep.num_syncs += 1  # a peer without it is behind
            self._keep_values()
            if end.dropped and not self._is_dropped:
                self._meter.num_skipped += self._size
        self._before = self._steps.state_before() if self._windows else None
        self._is_dropped |= end.dropped
        self._made.append(name)
        self._added.discard(name)
        self._replica.progress.body_steps += 1

    def _keep_values(self) -> None:
        """Keep the values since the last step on the batch."""
        if self._before is not None:
            self._log.end()
            self._log.kept.keep(self._before.values)

    def _count(self, end: StepEnd) -> None:
        """Count the batches since the last count."""
        assert self._before is not None, "a batch is in progress"
        self._steps.commit(self._before, end, self._num_batches, self._num_samples, self._num_steps)
        if self._num_empty:
            self._steps.count_empty(self._num_empty)
        self._num_steps = self._num_batches = self._num_samples = self._num_empty = 0

    def _undo(self, error: BaseException) -> BaseException:
        """Undo the step in progress after a failed collective; returns the error to raise."""
        self._drop_windows()
        self._steps.is_torn |= bool(self._made)
        cause = None if self._before is None else self._steps.undo(self._before)
        if cause is None:
            return error
        cause.__cause__ = error
        return cause

    def undo_failed(self) -> bool:
        """Undo the step in progress after the body has raised.

        Returns:
            False if an optimizer has changed the replica in it: it is in no state between steps.
        """
        if self._is_active and self._names and self._made:
            return False  # the other optimizers' steps on the batch are missing
        if not self.is_open or self._before is None:
            return True
        if self._stepper.num_begun != self._num_begun:
            return False
        self._drop_windows()
        self._stepper.clear_gradients()
        self._steps.undo_failed(self._before)
        return not self._steps.is_torn

    def _drop_windows(self) -> None:
        for window in self._windows.values():
            window.close()
        self._windows.clear()

    # The worker's control flow, which yields to the body.

    @property
    def is_open(self) -> bool:
        """True within an optimizer step: messages wait, as the replica must not change. Under
        lockstep equal on all ranks after each step of the plan.
        """
        return bool(self._num_steps or self._windows or self._is_followed)

    def train_step(
        self, sizes: Sequence[int], position: int | None, ranks: Sequence[int], num_empty: int
    ) -> Generator[Any, None, bool]:
        """Yield the batches of a step of the plan.

        Args:
            sizes: Samples of each micro-batch; empty if this rank only receives.
            position: As in :meth:`WorkerSteps.run`.
            ranks: Under lockstep, the ranks with samples.
            num_empty: Its batches without samples for this rank.

        Returns:
            False if ``Shutdown`` was received while waiting for data.

        Raises:
            CollectiveAborted, CollectiveTimeout: The step failed and is undone.
            RuntimeError: The body left gradients without a step.
        """
        lane = self._lane
        self._total = sum(sizes)
        for number, size in enumerate(sizes):
            is_inside = self.is_open or number > 0
            if is_inside:
                self._pause()
            batch = self._steps.next_batch(answer=not is_inside)
            if batch is None:
                return False
            if is_inside:
                self._resume()
            else:
                self._prepare(position)
            if number == 0:
                self._begin_step(position, ranks, num_empty)
            start = 0.0 if lane is None else lane.since
            self._begin_batch(size, is_last=number + 1 == len(sizes))
            with self._precision.autocast():
                yield batch
            batch = self._data = None  # the loader may use its memory again
            if self._end_batch():
                return False
            if lane is not None:
                lane.end_step(CONTROL, start, [size])
        if not sizes:
            if lane is not None:
                lane.enter(COMPUTE)
            if self.is_open:
                self._resume()
            else:
                self._prepare(position)
            self._begin_step(position, ranks, num_empty)
        try:
            self._end_step()
        except (CollectiveAborted, CollectiveTimeout) as error:
            failure = self._undo(error)
            raise failure from (None if failure is error else error)
        return True

    def _prepare(self, position: int | None) -> None:
        self._before = self._steps.prepare(position)
        self._num_begun = self._stepper.num_begun
        self._num_timed = 0

    def _begin_step(self, position: int | None, ranks: Sequence[int], num_empty: int) -> None:
        self._continues = self.is_open
        self.global_step = self._steps.position_of(position, self._num_batches)
        self._batch += 1
        self._is_followed = False
        self._trained_by = ranks
        self._lr = None
        self._num_steps += 1
        self._num_empty += num_empty
        self._made = []
        self._losses = {}
        self._skips = self._is_dropped = False

    def _begin_batch(self, size: int, *, is_last: bool) -> None:
        self._size, self._is_last = size, is_last
        self._serial += 1
        self._was_averaged = False
        self._num_batches += 1
        self._num_timed += 1
        self._num_samples += size
        self._has_stepped = False
        self._added.clear()
        self._weights.clear()
        self._log.num_samples = size
        if self._before is not None and not self._names:
            self._before.values.begin_batch()

    def _end_batch(self) -> bool:
        """Check what the body did with a batch; returns True if it has left the epoch."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if self.has_left(self._replica.progress.epoch):
            self._leave_batch()
            return True
        if self._micro and self._added and not self._has_stepped:
            raise RuntimeError(
                "with accumulate(k), end each batch with worker.step(loss); to accumulate by "
                "worker.backward, leave accumulate out"
            )
        if self._made or self._added:
            self._steps.batches_fitted([self._size])
            return False
        if not self._windows:
            self._require_no_gradients()
        if self._names and self._before is not None:
            self._before.values.begin_batch()
        self._skips |= self._micro or not self._continues
        return False

    def _leave_batch(self) -> None:
        """Give a batch back without a step, and count one with a step."""
        self._timer.stop(self._num_timed if self._made else 0)
        self._drop_windows()
        self._stepper.clear_gradients()
        if not self._made and self._before is not None:
            error = self._steps.undo(self._before)
            if error is not None:
                raise error
            return
        self._keep_values()
        if self._losses:
            self._log_losses()

    def _require_no_gradients(self) -> None:
        if self._any_gradients():
            raise RuntimeError(
                "the next batch was requested while a plain loss.backward() has left gradients: "
                "end the batch with worker.step(), or accumulate by worker.backward(loss)"
            )

    def _end_step(self) -> None:
        """End a step of the plan: the body has had its batches, or this rank has none."""
        if not self._total:
            self._follow()
        elif self._skips and not self._made:
            self._skip()
        if self._is_lockstep:
            made = tuple(self._made)
            post = Post(Act.NEXT, self._batch, made, lr=self._lr, is_open=self.is_open)
            rank = self._replica.rank
            self.peers.meetings.end_batch(self._generation, self._ranks, rank, self._meeting, post)
        if self._losses:
            self._log_losses()
        if not self.is_open:
            self._timer.stop(self._num_timed)

    def _skip(self) -> None:
        """Skip a step of the plan; under lockstep on all ranks."""
        self._drop_windows()
        assert self._before is not None
        if self._micro:
            self._before.values.drop()
        if self._is_lockstep:
            number = self._meeting
            self._post(Act.SKIP)
            found = self._await_step(number)
            if found is not None and found.act is not Act.STEP:
                raise self._differs(found)
            if found is not None:
                self._replica.progress.body_steps += 1  # as on the ranks that step in vain
                if not self._runs_ahead:
                    self._join(found, number)
        self._count(DROPPED)

    def _await_step(self, number: int) -> Post | None:
        return self.peers.meetings.follow(self._generation, self._ranks, number, self._batch)

    def _join(self, step: Post, number: int) -> tuple[str, StepEnd]:
        """Join the step of other ranks, with the gradients of earlier batches or none."""
        name = step.optimizer
        window = self._windows.pop(name, None)
        window = window or self._stepper.open_window(self._log.new_values(), name or None)
        try:
            with self._precision.without_autocast():
                return name, self._finish(window, number)
        finally:
            window.close()

    def _follow(self) -> None:
        """Join the steps of the other ranks on a batch of which this rank has no samples, and wait
        for their evaluations.
        """
        while True:
            number = self._meeting
            self._post(Act.FOLLOW)
            found = self._await_step(number)
            if found is None or found.act is Act.NEXT or found.batch > self._batch:
                self._end_as(self.peers.meetings.end_of(self._generation, self._batch))
                if found is None:  # all others skip the batch
                    self._count(DROPPED)
                else:
                    self._meeting = number
                return
            earlier = found.made[:-1] if found.act is Act.STEP else found.made
            if earlier != tuple(self._made) or found.batch < self._batch:
                raise self._differs(found)
            self._adopt(found.lr)
            if found.act is Act.STEP:
                self._commit(*self._join(found, number))
            elif found.act is Act.EVALUATE:
                self._steps.confirm_steps()
                with self._averaged_buffers():
                    pass
                self._evaluation.wait((self._generation, number), len(self._ranks))

    def _end_as(self, end: Post) -> None:
        """End a batch as the bodies of the other ranks."""
        self._adopt(end.lr)
        if end.is_open:
            self._follow_open()

    def _follow_open(self) -> None:
        """Be within the step that is in progress on other ranks."""
        if not self.is_open:
            self._is_followed = True
            self._before = self._steps.state_before()

    def _adopt(self, lr: float | None) -> None:
        """Set the learning rate that the bodies of the other ranks have set."""
        if lr is not None and lr != self._lr:
            self.set_lr(lr)

    def _differs(self, found: Post) -> ReplicaMismatch:
        return ReplicaMismatch(
            "under SYNC the bodies of all ranks make the same steps on each batch, and these "
            f"differ: a rank made {found}; rank {self._replica.rank} made "
            f"{Post(Act.NEXT, self._batch - 1, ())}"
        )

    def _log_losses(self) -> None:
        """Log the losses of several optimizers: each one's mean over its steps, and their sum."""
        values = self._log.new_values()
        values.begin_batch()
        means = {
            name: losses[0] if len(losses) == 1 else torch.stack(losses).mean()
            for name, losses in self._losses.items()
        }
        values.push_loss(torch.stack([*means.values()]).sum(), self._size)
        if self._is_dropped:
            values.drop()
        for name, mean in means.items():
            values.push_scalar(f"loss/{name}", mean, self._size)
        self._log.values.keep(values)

    # Boundaries.

    def end_plan(self, *, closes: bool) -> None:
        """End a plan. A step over several batches continues in the next one, under lockstep on all
        ranks, also if the bodies of some have none in progress.

        Args:
            closes: The plan ends the epoch.

        Raises:
            RuntimeError: Gradients are left at the end of the epoch.
            CollectiveAborted, CollectiveTimeout: As a collective.
        """
        if closes:
            self.require_closed()
        is_open, meetings = self.is_open, self.peers.meetings
        if self._is_lockstep and meetings.any_open(self._generation, self._ranks, self._batch):
            self._follow_open()
        if not self.is_open:
            return
        if not is_open:  # the bodies of others are within a step that this one has ended
            self._num_timed = 0
            self._timer.start()
        self._pause()

    def _pause(self) -> None:
        """Exclude the wait for a batch from the time of the step in progress."""
        if not self._is_paused:
            self._is_paused = True
            self._timer.pause()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._timer.resume()

    def abandon_step(self) -> None:
        """Undo a step that was in progress at the end of a plan: the run ends, or a rank has died,
        and its batches are assigned again.
        """
        if not self.is_open:
            return
        self._drop_windows()
        if self._before is not None:
            self._steps.undo(self._before)
        self.halted()

    def require_closed(self) -> None:
        """Raise unless no gradients wait for a step."""
        if self._windows:
            raise RuntimeError(
                "the epoch has ended, and worker.backward() has left gradients without a "
                "worker.step(): step before its last batch ends. Under SYNC choose a number of "
                "batches that worker.step() divides, with drop_last(True); under CADENCE and "
                "ASYNC, where a worker's number of batches depends on the speeds, use "
                "accumulate(n) on the builder, and worker.step(loss) for each batch"
            )

    def halted(self) -> None:
        """The group of ranks is broken; the batches since the last step are assigned again."""
        self._drop_windows()
        self._num_steps = self._num_batches = self._num_samples = self._num_empty = 0
        self._is_paused = self._is_followed = False
        self._log.end()
        self._fault = None

    def regrouped(self, generation: int, ranks: Sequence[int]) -> None:
        """Meet these ranks from now on."""
        self._generation, self._ranks = generation, ranks
        self._meeting, self._batch = 0, -1


class LoopWorker:
    """The worker as passed to ``loop(worker)`` of :meth:`gpuworker.Trainer.loop`.

    ``loop`` runs in the thread of each worker, on its device, with its compute stream current. The
    usual body is::

        def loop(worker):
            for batch in worker.batches():
                loss = loss_fn(worker.model, batch)
                worker.step(loss)

    Averaging rounds, checkpoints, epochs and deaths of other ranks are handled between two batches,
    when the iterator yields the next one, and not within a step over several batches; nothing
    changes the replica while the body runs. A batch is valid until then: clone tensors to keep them
    longer. After a death under ``SYNC`` a step may
    not be made; ``step`` then returns without an effect, and the iterator yields the batch again.
    Local variables of the loop are kept.

    Only for use in the thread of the worker.

    Attributes:
        model: The worker's replica.
        optimizer: Its optimizer; of several, ``worker.optimizer[name]`` is one.
        optimizers: The optimizers by name; of a single one, under the empty name.
        rank: The worker's rank.
        world_size: Number of ranks at the start of the run.
        device: The worker's device.
    """

    def __init__(self, owner: Any, loop: OwnLoop) -> None:
        self._owner = owner
        self._loop = loop
        self.model: nn.Module = owner.model
        self.optimizer: torch.optim.Optimizer = owner.optimizer
        self.optimizers: dict[str, torch.optim.Optimizer] = (
            dict(owner.optimizer.members)
            if isinstance(owner.optimizer, Optimizers)
            else {"": owner.optimizer}
        )
        self.rank: int = owner.rank
        self.world_size: int = owner.world_size
        self.device: torch.device = owner.device

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches that the coordinator assigns to this worker, of all epochs.

        Each is on the worker's device. The iterator ends with the run. Under ``SYNC`` a rank
        without samples in a step does not enter the body; its replica makes the steps of the
        others.

        ``continue`` before a step skips the batch: under ``SYNC`` all ranks discard it. ``break``
        and ``return`` leave the epoch: the rest of this worker's batches is assigned to the other
        workers, and ``loop`` is called again, or a further ``batches()`` continues, with the next
        epoch. An exception ends the worker.

        Raises:
            RuntimeError: The last batch left gradients without a step.
        """
        return self._loop.batches()

    def steps(self) -> Iterator[int]:
        """Count the worker's steps from 0 instead of :meth:`batches`, with ``steps_per_epoch(n)``.

        All rules of :meth:`batches` apply.
        """
        return self._loop.steps()

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        optimizer: str | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of a loss. As after ``loss.backward()``, gradients add up until
        :meth:`step`, also over several batches; divide each loss as on one device. The batches
        count as trained with the step; an epoch that ends before it is an error.

        Args:
            loss: A scalar: the mean over the batch.
            weight: The number of units of which it is the mean, such as tokens; ``None``: the
                samples. With weights, the gradients of a step are the mean over the units of all
                its calls on all ranks: do not divide the losses.
            optimizer: Compute only the gradients of this optimizer's parameters; required if there
                are several.
            retain_graph: As in ``loss.backward``: another loss of the same forward pass follows.

        Raises:
            TypeError, ValueError: An argument is invalid.
            RuntimeError: Called outside the body of :meth:`batches`.
        """
        self._loop.backward(loss, weight, optimizer, retain_graph=retain_graph)

    def step(
        self,
        loss: Tensor | None = None,
        weight: float | Tensor | None = None,
        optimizer: str | None = None,
    ) -> None:
        """Make an optimizer step: the backward pass of a loss, the reduction over the ranks under
        ``SYNC``, clipping and step. Blocks under ``SYNC`` until all ranks step.

        Under ``SYNC`` the gradient is the mean over the ranks, weighted by samples or ``weight``,
        and all ranks with samples must make the same steps on each batch. The batch counts as
        trained with its first step. Gradients are ``None`` afterwards.

        Args:
            loss: As in :meth:`backward`; ``None``: use the gradients of earlier backward passes.
            weight: As in :meth:`backward`.
            optimizer: The optimizer to step; required if there are several.

        Raises:
            TypeError, ValueError: An argument is invalid.
            RuntimeError: Called outside the body of :meth:`batches`, or there is no gradient.
            NonFiniteError: See ``on_non_finite``.
            ReplicaMismatch: Under ``SYNC``, another rank makes other steps.
        """
        self._loop.step(loss, weight, optimizer)

    @property
    def epoch(self) -> int:
        """The epoch of the batch, counted from 0."""
        return int(self._owner.current_epoch)

    @property
    def global_step(self) -> int:
        """Batches of all ranks before this one: the position of the schedule. It is constant within
        the body, also after :meth:`step`, like the index of ``enumerate(loader)``; a counter of
        completed steps is one step ahead there. Equal on all ranks under ``SYNC``; otherwise those
        of other ranks are included after each averaging round.
        """
        return self._loop.global_step

    @property
    def is_first(self) -> bool:
        """True on the lowest rank that is alive, under ``SYNC`` of those with samples in the step;
        a rank that has left the epoch is none.
        """
        return self._loop.is_first

    def log(self, **scalars: float | Tensor) -> None:
        """Record scalars for the batch; see :func:`gpuworker.record_scalar`."""
        for name, value in scalars.items():
            self._owner.record_scalar(name, value)

    def evaluate(self, ds: Any, fn: EvaluationFn) -> dict[str, float]:
        """Evaluate a data set within an epoch, on all workers, and return the means.

        ``fn`` is called in evaluation mode without gradients. Each sample is evaluated once, in
        batches of the run's size or of the ``DataLoader``; the means are weighted by samples.
        Modes, buffers and random generators are as before afterwards, and training continues with
        the same bits. Blocks until all workers have evaluated their batches. Each evaluates the
        next batch when it has completed one.

        Under ``SYNC`` all ranks with samples call it at the same step with the same data. Buffers,
        such as the statistics of batch normalisation, are averaged for it. If a rank dies or leaves
        the epoch meanwhile, the evaluation is not made: the error ends this call of ``loop``, and
        if the run continues with the other ranks, ``loop`` is called again with the next batch.

        Under ``CADENCE`` and ``ASYNC`` with several workers any rank calls it, after its last step
        on a batch. The call forces an averaging round, which the others join at their next
        boundary; they evaluate batches, with the ``fn`` of the caller, and train on. The result is
        that of the round's average, which the replica holds afterwards. Batches of a rank that dies
        are evaluated by the others.

        Args:
            ds: As for ``dataset`` on the builder.
            fn: ``f(model, batch)``: a dict of means over the batch, or ``(dict, weight)``. Called
                in the threads of all workers.

        Raises:
            RuntimeError: Called outside the body of :meth:`batches`, or between :meth:`backward`
                and :meth:`step`; with several workers under ``CADENCE`` or ``ASYNC``, before
                :meth:`step`; or in a cluster, where ``val_dataset`` on the builder evaluates.
            EvaluationFailed: ``fn``, the model or the data set raised; under ``CADENCE`` and
                ``ASYNC`` on any rank.
            ReplicaMismatch: Under ``SYNC``, another rank makes a step instead.
            CollectiveAborted, CollectiveTimeout: Under ``SYNC``, another rank has died, or is late;
                otherwise, the run ends before the evaluation.
        """
        return self._loop.evaluate(ds, fn)

    def every(self, k: int) -> bool:
        """True within one batch for each multiple of ``k`` optimizer steps, under ``SYNC`` on all
        ranks with samples in it; otherwise of this rank's steps.
        """
        return self._loop.every(k)

    def set_lr(self, x: float) -> None:
        """Set the learning rate of all groups; a scheduler overwrites it with its next step. Under
        ``SYNC`` it holds on ranks without samples in the step, too.
        """
        self._loop.set_lr(x)

    def save(self) -> None:
        """Request a checkpoint into ``checkpoint_dir`` at the next boundary; returns at once.

        Requests of several ranks at one boundary make one checkpoint.

        Raises:
            RuntimeError: The run has no ``checkpoint_dir``.
        """
        self._loop.save()

    def stop(self) -> None:
        """Request the end of the run at a step boundary; returns at once."""
        self._owner.request_stop()


def _check_loss(loss: object, call: str) -> None:
    """Check that the loss of a body is a scalar with a graph.

    Raises:
        TypeError, ValueError: It is not.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"worker.{call}({type(loss).__name__}): pass the loss, a scalar tensor")
    if loss.numel() != 1:
        raise ValueError(
            f"worker.{call}: the loss has the shape {tuple(loss.shape)}: pass a scalar, for "
            "instance loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"worker.{call}: the loss has no gradient: compute it from the output of worker.model, "
            "outside torch.no_grad(), and do not detach it"
        )
