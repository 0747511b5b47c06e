"""Operations of a worker's control flow in its thread, in which they block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

from torch import nn

from coordinator import messages as m
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, mark_failed
from runtime.core.rng import thread_generator
from runtime.device.base import PendingCopy
from runtime.evaluation.pending_means import evaluating, keeping_modes
from runtime.replica.averager import ReducedState, Snapshot
from runtime.replica.batch_norm import uses_own_statistics
from runtime.replica.error_notes import add_note_once
from runtime.replica.flat import norm
from runtime.worker.own_loop import OwnLoop
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.rank_resources import seed_generator
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.run_peers import RunPeers
from runtime.worker.step import WorkerSteps
from runtime.worker.task_evaluation import TaskEvaluation
from runtime.worker.worker_config import EvalFn, UserFunctions, WorkerConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
Flow = Generator[Any, Any, T]
"""A part of a worker's control flow. In a thread it yields batches for the body of an own loop; in
the simulation, what its operations wait for.
"""
COMPARED_STEPS = 2
"""First steps after each of which the objects that workers share are compared."""


class StepOperations:
    """Epochs, plans and steps of one worker.

    Args:
        worker: The result of ``current_worker()`` in user functions.

    Attributes:
        train_fn: The function of the steps, unless there is an own loop.
    """

    def __init__(
        self,
        worker: Any,
        config: WorkerConfig,
        functions: UserFunctions,
        steps: WorkerSteps,
        loop: OwnLoop | None,
        peers: RunPeers,
        inbox: SimpleQueue[Any],
    ) -> None:
        self.train_fn = functions.train_fn
        self.is_lockstep = steps.replica.is_lockstep
        self.progress, self.lockstep = steps.replica.progress, steps.replica.lockstep
        self.confirm_steps, self.abandon_steps = steps.confirm_steps, steps.abandon_steps
        self._worker: Any = worker
        self._inbox = inbox
        self._config = config
        self._epoch_fn = functions.epoch_fn
        self._steps = steps
        self._replica = steps.replica
        self._loop = loop
        self._peers = peers
        self._shared = peers.order.shared  # compared until one rank ends its first epoch
        self._num_compared = 0  # steps
        if self._shared is not None:
            self._replica.stepper.compare_shared(self._shared)
        self._checks_state = config.saves  # before the first step, and after it

    def get_message(self, timeout_s: float | None) -> Flow[Any]:
        """Wait for a message.

        Raises:
            queue.Empty: None was received in time.
        """
        yield from ()
        return self._inbox.get(timeout=timeout_s)

    def has_message(self) -> bool:
        """True if a message waits in the inbox."""
        return not self._inbox.empty()

    def ready(self) -> m.Ready:
        """The first message of the worker."""
        rates = self._replica.rates
        return m.Ready(
            rank=self._config.rank,
            scale_invariant=() if rates is None else rates.names,
            batch_statistics=uses_own_statistics(self._replica.model),
        )

    @contextmanager
    def user_context(self) -> Iterator[None]:
        """Context of user functions; that of an own loop is entered once for the run."""
        generator = self._replica.generator
        draws = generator if self._config.device.type == "cpu" else None
        with worker_context(self._worker), thread_generator(draws):
            yield

    # Epochs and plans.

    def resume_epochs(self) -> None:
        """Call ``epoch_fn`` for the epochs that the checkpoint had begun, for its effect outside of
        the replica, and restore the replica after it.
        """
        replica = self._replica
        if not replica.resumed_epochs:
            return
        with self.user_context(), replica.resuming() as at:
            for epoch in at:
                self.progress.epoch = epoch
                self._call_epoch_fn(epoch)

    def _call_epoch_fn(self, epoch: int) -> None:
        config, replica = self._config, self._replica
        seed_generator(replica.generator, config.seed, config.rank, epoch)
        if self._epoch_fn is not None:
            self._epoch_fn(epoch, self._worker)
            replica.state.params.adopt_groups()

    def plan_context(self) -> AbstractContextManager[None]:
        return nullcontext() if self._loop is not None else self.user_context()

    def begin_plan(self, plan: m.EpochPlan, position: int | None, *, begins_epoch: bool) -> None:
        """Begin a plan, and its epoch if it is the first one of it.

        Args:
            position: Position of the schedule; ``None``: computed from this rank's counts.
        """
        replica, schedule = self._replica, self._replica.schedule
        replica.checkpoint.return_buffers()
        schedule.step_by_metrics(plan.metrics)
        schedule.advance(self._steps.position_of(position))  # for epoch_fn
        if begins_epoch:
            self._begin_epoch(plan.epoch)
        if self._shared is not None and not self._num_compared:
            self._shared.compare()
        self._steps.check_graphs()
        if self._checks_state:
            replica.checkpoint.check(has_stepped=False)

    def _begin_epoch(self, epoch: int) -> None:
        if self._num_compared:
            self._end_shared()
        checkpoint = self._replica.checkpoint
        checkpoint.before_epoch_fn()
        self._call_epoch_fn(epoch)
        self._replica.check_structure()
        checkpoint.after_epoch_fn(epoch)

    def end_plans(self) -> None:
        """Undo a step in progress: no plan follows."""
        self.abandon_step()
        self._end_shared()

    def _end_shared(self) -> None:
        """Compare the shared objects for the last time."""
        if self._shared is not None:
            self._shared.compare()
            self._shared.close()
            self._shared = None
            self._replica.stepper.compare_shared(None)

    def note_shared(self, error: Exception) -> None:
        """Add a note to an error if the workers have changed a shared object."""
        if self._shared is not None and self._shared.compare(warn=False):
            add_note_once(error, self._shared.message())

    def check_drift(self) -> Flow[None]:
        """In lockstep, compare the replicas."""
        yield from ()
        self._compare_replicas(frozen=False)

    def _compare_replicas(self, *, frozen: bool) -> None:
        self._steps.confirm_steps()
        self._replica.check_drift(self._peers.replicas, frozen=frozen)

    def step(self, plan: m.EpochPlan, steps: PlanSteps, index: int) -> Flow[bool]:
        """Make a step of a plan; with an own loop, yield each batch to its body.

        Returns:
            False if the plan ends with it: its body has left the epoch, or ``Shutdown`` was
            received while waiting for data.
        """
        sizes, num_empty = steps.steps[index], steps.num_empty.get(index, 0)
        position, loop = steps.position(index), self._loop
        if loop is not None:
            ranks = steps.ranks(index)
            if not (yield from loop.train_step(sizes, position, ranks, num_empty)):
                return False
        elif not self._steps.run(sizes, position, self.train_fn):
            return False
        if self._shared is not None and self._num_compared < COMPARED_STEPS:
            self._num_compared += 1
            self._shared.compare()
        if self._checks_state and not self.is_open:
            self._checks_state = False
            self._steps.confirm_steps()
            self._replica.checkpoint.check(has_stepped=True)
        if num_empty and loop is None:
            self._steps.count_empty(num_empty)
        return True

    @property
    def is_open(self) -> bool:
        """True within an optimizer step over several batches, in which no message is handled."""
        return self._loop is not None and self._loop.is_open

    def end_steps(self, *, closes: bool) -> None:
        """End the steps of a plan; ``closes``: no step may continue in the next one."""
        if self._loop is not None:
            self._loop.end_plan(closes=closes)

    def end_epoch(self, *, is_partial: bool) -> Flow[None]:
        """Compare the replicas and average the buffers, after the last step of an epoch.

        Args:
            is_partial: More of the epoch is left.
        """
        yield from ()
        self._replica.check_structure()
        self._compare_replicas(frozen=True)
        if is_partial:
            self._replica.checkpoint.keep_buffers()
        self._replica.sync_buffers()

    def final_norm(self, plan: m.EpochPlan) -> float | None:
        """Check that the replica is finite, if no round follows the plan.

        Returns:
            The norm of the parameters, on one rank.
        """
        replica = self._replica
        if not (self.is_lockstep or replica.is_single):
            return None
        replica.finite_check.require_finite()
        if not (replica.averager.leads and plan.num_batches):
            return None
        return float(norm(replica.state.params.flats))

    # The body of an own loop.

    @property
    def has_body(self) -> bool:
        return self._loop is not None

    @property
    def left_epoch(self) -> int:
        """The last epoch that the body has left; -1: none."""
        return -1 if self._loop is None else self._loop.left_epoch

    def require_closed(self) -> None:
        """Raise if gradients wait for a step as the epoch ends."""
        if self._loop is not None:
            self._loop.require_closed()

    def leave_epoch(self) -> None:
        """Drop the batches since the last step, of an epoch that the body has left."""
        assert self._loop is not None, "its body has left the epoch"
        self._steps.confirm_steps()
        if self._replica.is_sharded:
            raise RuntimeError(
                "sharded(...): the body has left an epoch, after which the ranks would form a new "
                "group: use continue to skip batches, or worker.stop()"
            )
        self._loop.halted()

    def abandon_step(self) -> None:
        """Undo a step over several batches that is in progress at the end of a plan."""
        if self._loop is not None:
            self._loop.abandon_step()

    def undo_failed(self) -> bool:
        """Undo the step in progress after user code has raised; False if the state is torn."""
        if self._loop is not None and not self._loop.undo_failed():
            return False
        self._steps.abandon_steps()
        return True

    # Groups of ranks.

    def halt(self) -> None:
        """Drop the step in progress, as the group of ranks is broken; peers may copy the state."""
        if self._loop is not None:
            self._loop.halted()
        self._replica.context.finish()  # a peer may copy from this replica after the report

    def connect(self, message: m.Regroup) -> Flow[None]:
        """Join the collective of the remaining ranks.

        Raises:
            CollectiveAborted, CollectiveTimeout: The group could not be connected.
        """
        yield from ()
        groups, rank = self._peers.groups, self._config.rank
        assert groups is not None, "a standalone worker has no group"
        self._replica.join(groups.connect(message.generation, message.ranks, rank, message.backend))
        self._steps.is_torn = False
        if self._loop is not None:
            self._loop.regrouped(message.generation, message.ranks)

    def catch_up(self, message: m.Regroup) -> Flow[None]:
        """In lockstep, copy the state of the rank that is ahead.

        Raises:
            CollectiveAborted, CollectiveTimeout: Another rank has died.
        """
        yield from ()
        replica, donor = self._replica, message.donor
        if donor is not None and donor != self._config.rank:
            replica.copy_if_behind(self._peers.replicas.get(donor), donor)
        assert replica.averager.collective is not None, "it is connected"
        replica.averager.collective.barrier()  # the donor must not train before all have copied

    def can_send_state(self, *, has_failed: bool) -> bool:
        """True if the state is one between two steps, and complete on this rank."""
        is_torn = has_failed and self._steps.is_torn
        return not is_torn and self._replica.state.params.is_whole

    def close(self) -> None:
        """Release the own loop, and break cycles of references: the replica is freed at once."""
        self._loop = self._worker = None


class ReplicaOperations:
    """The part of replies to messages that works on the replica.

    Args:
        worker: The result of ``current_worker()`` in user functions.
        evaluation: Evaluates batches together with the other ranks.
    """

    def __init__(
        self,
        worker: Any,
        config: WorkerConfig,
        functions: UserFunctions,
        steps: WorkerSteps,
        protocol: WorkerProtocol,
        recorder: WorkerRecorder,
        evaluation: TaskEvaluation,
    ) -> None:
        self._worker: Any = worker
        self._config = config
        self._functions = functions
        self._steps = steps
        self._replica = steps.replica
        self._averager = steps.replica.averager
        self._finite_check = steps.replica.finite_check
        self._protocol = protocol
        self._recorder = recorder
        self._evaluation = evaluation
        self.now = steps.replica.context.now
        self.is_lockstep, self.lockstep = steps.replica.is_lockstep, steps.replica.lockstep
        self.is_single = steps.replica.is_single
        self.confirm_steps = steps.confirm_steps
        self.require_finite = self._finite_check.require_finite
        self.capture_state = steps.replica.capture_state
        self.undo_all_reduce = self._averager.undo_all_reduce
        self.apply_delta = self._averager.apply_delta
        self._snapshot_s = 0.0

    def enter_round(self) -> bool:
        """Check the replica before a round; returns True if it is finite."""
        healthy = self._finite_check.enter_round(self._protocol.samples)
        self._steps.flush_weight()
        return healthy

    def all_reduce(self, message: m.SyncNow, healthy: bool) -> Flow[tuple[ReducedState, float]]:
        """Average the replica with those of the other ranks.

        Returns:
            Measurements, and the seconds of the exchange without waits.

        Raises:
            CollectiveAborted, CollectiveTimeout: The round failed; the state is that of before.
        """
        yield from ()
        start = self.now()
        reduced = self._all_reduce(healthy)
        sync_s = max(0.0, self.now() - start - reduced.waited_s)
        if not healthy:
            self._finite_check.require_finite()  # no rank had a finite state
            self._finite_check.healed()
        return reduced, sync_s

    def _all_reduce(self, healthy: bool) -> ReducedState:
        """See :meth:`ReplicaAverager.all_reduce`."""
        if self._averager.collective is None:
            raise CollectiveAborted("the ranks are not connected")
        try:
            return self._averager.all_reduce(
                self._protocol.weight,
                healthy=healthy if self._finite_check.can_heal else None,
                num_batches=self._protocol.batches,
            )
        except (CollectiveAborted, CollectiveTimeout):
            raise
        except RuntimeError as error:
            if not self._config.falls_back:
                raise
            aborted = CollectiveAborted(f"{type(error).__name__}: {error}")
            raise mark_failed(aborted) from error

    def capture_average(self) -> tuple[m.Extra, m.Payload | None]:
        """This rank's own part of a checkpoint, and on one rank the average of a round."""
        extra = self._replica.capture_state()
        return extra, self._averager.snapshot(reuse=False) if self._averager.leads else None

    def start_snapshot(self) -> tuple[Snapshot, bool]:
        """Take a snapshot of the replica for a round; returns True with it if it is finite."""
        start = self.now()
        snapshot = self._averager.start_snapshot()
        self._snapshot_s = self.now() - start
        healthy = self._finite_check.enter_round(self._protocol.samples, snapshot.squares)
        self._steps.flush_weight()
        self._averager.note_batches(self._protocol.batches)
        return snapshot, healthy

    def apply(
        self, message: m.Update, run_tasks: Callable[[], Flow[None]]
    ) -> Flow[tuple[float, PendingCopy | None]]:
        """Apply the average of a round to the replica, which keeps the training since.

        Args:
            run_tasks: Does the tasks of the message, while the state is the average.

        Returns:
            Seconds of this rank's part in the round, and the pending copy of the average.
        """
        yield from ()
        start, tasks_s = self.now(), 0.0

        def at_average() -> None:
            nonlocal tasks_s
            before = self.now()
            exhaust(run_tasks())
            tasks_s = self.now() - before

        arrival: PendingCopy | None = None
        if self._finite_check.is_bad:
            arrival = self._replace(message)
            at_average()
        elif message.num_samples > 0 or message.tasks:
            # Without samples the average equals all replicas. Tasks must not see the training since
            # the snapshot.
            average, tasks = message.average, at_average if message.tasks else None
            arrival = self._averager.apply(average, tasks, message.mean_batches)
        return self._snapshot_s + self.now() - start - tasks_s, arrival

    def _replace(self, message: m.Update) -> PendingCopy | None:
        """Replace a replica that is not finite by the average, without the training since then.

        Raises:
            NonFiniteError: No rank had a finite state.
        """
        if message.num_samples == 0:
            self._finite_check.require_finite()
        arrival = self._averager.replace(message.average, message.mean_batches)
        self._finite_check.healed(self._protocol.discard_samples())
        return arrival

    def holding(self, state: m.Payload | None) -> AbstractContextManager[None]:
        """Context in which the replica has a state; ``None``: the live one, which is finite."""
        self._finite_check.require_finite()
        return self._averager.holding(state)

    def run_task(self, task: m.Task, round: int) -> Flow[tuple[tuple[str, float], ...] | None]:
        """Do a task on the live state; its random draws do not change those of the worker.

        Returns:
            The results, on the rank that ends it.
        """
        yield from ()
        with worker_context(self._worker), thread_generator(None):
            return self._run_task(task, round)

    def _run_task(self, task: m.Task, round: int) -> tuple[tuple[str, float], ...] | None:
        f, model, log = self._functions, self._replica.model, self._replica.stepper.log
        match task.kind:
            case m.TaskKind.EVALUATE if f.eval_fn is not None:
                with self._replica.at_eval_point(), log.closed("eval_fn"):
                    return evaluate_model(f.eval_fn, model, task.epoch)
            case m.TaskKind.HAND_OVER if f.checkpoint_fn is not None:
                with self._replica.at_eval_point(), log.closed("checkpoint_fn"):
                    rank = self._config.rank
                    call_checkpoint_fn(f.checkpoint_fn, task.epoch + 1, model, rank)
            case m.TaskKind.VALIDATE:
                with self._recorder.validation(task.epoch):
                    return self._evaluation.validate(task, round)
            case m.TaskKind.REQUESTED:
                with self._recorder.validation(self._replica.progress.epoch):
                    return self._evaluation.answer(task, round)
        return ()

    def drop_tasks(self, tasks: list[m.Task]) -> None:
        """End tasks of this rank, which has not received their average."""
        self._evaluation.shared.drop(tasks)

    def capture(self) -> tuple[m.Payload, m.Extra]:
        """The complete current state, and this rank's own part of a checkpoint."""
        params = not self.is_lockstep or self._averager.leads
        with self._replica.at_eval_point():
            payload = self._averager.snapshot(reuse=False, params=params)
            return payload, self._replica.capture_state()

    def final_fault(self) -> m.Failed | None:
        """The failure to report if the final state is not finite."""
        fault = self._finite_check.final_fault(self._replica.progress.epoch)
        self._steps.flush_weight()
        return fault

    def capture_final(self, *, saves: bool) -> tuple[m.Payload, m.Extra | None]:
        """The final state; ``saves``: with this rank's own part of a checkpoint."""
        self._averager.note_batches(self._protocol.batches)
        with self._replica.at_eval_point():
            payload = self._averager.last_snapshot()
            return payload, self._replica.capture_state() if saves else None

    def close(self) -> bool:
        """Close the evaluation, and break a cycle of references; False if a thread is alive."""
        self._worker = None
        return self._evaluation.close()


def exhaust(flow: Flow[T]) -> T:
    """Run a flow that yields nothing; returns its result."""
    try:
        next(flow)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("only the body of an own loop takes batches")


def evaluate_model(eval_fn: EvalFn, model: nn.Module, epoch: int) -> tuple[tuple[str, float], ...]:
    """Call the evaluation function in evaluation mode, without gradients.

    Returns:
        Name and value of each result.

    Raises:
        TypeError: It did not return a dict of numbers.
    """
    with evaluating(model):
        values = eval_fn(model, epoch)
    return check_eval_values(values)


def check_eval_values(values: Any) -> tuple[tuple[str, float], ...]:
    """Name and value of each result of the evaluation function.

    Raises:
        TypeError: It is not a dict of numbers.
    """
    try:
        return tuple((str(name), float(value)) for name, value in values.items())
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"eval_fn returned {values!r:.200}: return a dict of floats, for instance end it with "
            "return {'accuracy': accuracy}, which is recorded as 'eval/accuracy'"
        ) from None


def call_checkpoint_fn(
    checkpoint_fn: Callable[[int, nn.Module], object], version: int, model: nn.Module, rank: int
) -> None:
    """Call the checkpoint function; a failure is logged only."""
    try:
        with keeping_modes(model):
            checkpoint_fn(version, model)
    except Exception:
        logger.exception("rank %d: checkpoint_fn failed for version %d", rank, version)
