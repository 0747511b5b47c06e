"""OwnLoop: a user's own training loop in the thread of a worker."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.evaluation.pending_means import EvaluationFn
from runtime.evaluation.predict import means_in_order
from runtime.replica.optimizers import members_of
from runtime.replica.stepper import DROPPED
from runtime.timeline.events import CALLBACKS, COMPUTE, CONTROL
from runtime.worker.loop_body import LoopBody
from runtime.worker.loop_step import BodySteps
from runtime.worker.meetings import Act, LoopPeers, MeetingPlace
from runtime.worker.misuse_watch import MisuseWatch
from runtime.worker.rank_resources import RankResources
from runtime.worker.step import WorkerSteps
from runtime.worker.task_evaluation import TaskEvaluation


class OwnLoop:
    """Runs a user's loop in the worker's thread, and its steps within the plans.

    The worker's control flow is a generator, which yields each batch to the body and continues when
    the body asks for the next one.

    Args:
        bind: Returns the user's ``loop``, bound to the worker that it is called with.
        evaluation: Evaluates data sets together with the other ranks.
        peers: Shared by all workers of the run.
        receive: Handles the worker's next message; blocks until there is one.

    Attributes:
        body: The loop and its iterators.
        left_epoch: The last epoch that the body has left; -1: none.
    """

    def __init__(
        self,
        bind: Callable[[OwnLoop], Callable[[], object]],
        rank: RankResources,
        steps: WorkerSteps,
        evaluation: TaskEvaluation,
        peers: LoopPeers,
        receive: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._steps = steps
        self._replica = replica = steps.replica
        self._peers = peers
        self._is_lockstep = replica.is_lockstep
        self.body = LoopBody(
            bind(self), self._leave_epoch, lambda e: e is self._fault, self._explain
        )
        config, stepper = rank.config, replica.stepper
        reduces = self._is_lockstep and config.world_size > 1
        self._watch = MisuseWatch(
            members_of(replica.optimizer),
            lambda: self.body.is_within,
            [stepper.params_of(n)[-1] for n in stepper.part_names or ("",)] if reduces else (),
            warns=config.rank == 0,
        )
        self._place = MeetingPlace(peers.meetings, config.rank, range(config.world_size))
        self._body_steps = BodySteps(rank, steps, self._place, self._watch)
        self._evaluation = BodyEvaluation(rank, steps, self._body_steps, evaluation, peers, receive)
        self._fault: BaseException | None = None  # raised when the body requests a batch
        self.left_epoch = -1
        # For every(): micro-batches, and by k the last multiple that was granted and its batch.
        self._serial = 0
        self._first_step = rank.progress.body_steps
        self._granted: dict[int, tuple[int, int]] = {}

    def run(self, source: Generator[Any, None, None]) -> None:
        """Call the loop until the run is over.

        Args:
            source: The worker's control flow, which yields the batches.
        """
        try:
            self.body.run(source)
        finally:
            self._watch.close()

    def _explain(self, error: BaseException) -> None:
        self._steps.explain_sizes(error, [self._body_steps.batch.micro.size])

    # Called in the body.

    def save(self) -> None:
        self._peers.save(self._rank.lockstep.step if self._is_lockstep else None)

    def every(self, k: int) -> bool:
        """See :meth:`LoopWorker.every`."""
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"every({k!r}): pass a number of steps, at least 1")
        owner = -1 if self._is_lockstep else self._rank.config.rank
        at = self._place.generation, self._place.batch
        multiple = self._rank.progress.body_steps // k
        granted, here = self._peers.grant((owner, k), multiple, self._first_step // k, at)
        if here and self._granted.get(k, (-1, -1))[0] != granted:
            self._granted[k] = granted, self._serial
        return here and self._granted[k][1] == self._serial

    @property
    def is_first(self) -> bool:
        """See :attr:`LoopWorker.is_first`."""
        ranks = self._body_steps.batch.ranks if self.body.is_within else ()
        return self._peers.first(ranks, self._rank.progress.epoch) == self._rank.config.rank

    @property
    def global_step(self) -> int:
        return self._body_steps.batch.global_step

    def set_lr(self, lr: float) -> None:
        """See :meth:`LoopWorker.set_lr`."""
        if self._fault is not None:
            return  # the step has no effect
        self._replica.schedule.set_lr(lr)
        if self._is_lockstep:
            self._body_steps.batch.lr = lr
            self._rank.lockstep.num_syncs += 1  # a peer without it is behind

    def backward(
        self, loss: Any, weight: Any, optimizer: str | None, *, retain_graph: bool
    ) -> None:
        """See :meth:`LoopWorker.backward`."""
        name = self._checked_name(optimizer, "backward")
        if self._fault is None:
            self._body_steps.backward(loss, weight, name, "backward", retain_graph=retain_graph)

    def step(self, loss: Any, weight: Any, optimizer: str | None) -> None:
        """See :meth:`LoopWorker.step`."""
        name = self._checked_name(optimizer, "step")
        if self._fault is not None:
            return  # the iterator raises it, or yields the batch again
        steps, micro = self._body_steps, self._body_steps.batch.micro
        if loss is not None:
            steps.backward(loss, weight, name, "step")
        elif weight is not None:
            raise ValueError("worker.step(weight=...) without a loss: pass it to worker.backward")
        window = steps.window_of(name)
        self._watch.before_step()
        if steps.accumulates:
            if micro.has_stepped:
                raise RuntimeError("with accumulate(k), call worker.step once for each batch")
            micro.has_stepped = True
            if not micro.is_last or steps.batch.skips:
                return
        micro.has_stepped = True
        try:
            steps.make(name, window)
        except (CollectiveAborted, CollectiveTimeout) as error:
            self._fault = steps.undo(error)
        except BaseException as error:
            self._fault = error
            raise

    def evaluate(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """See :meth:`LoopWorker.evaluate`."""
        self._require_batch("evaluate")
        self._evaluation.require()
        if self._fault is not None:
            raise self._fault
        try:
            return self._evaluation.call(dataset, fn)
        except (CollectiveAborted, CollectiveTimeout) as error:
            self._fault = self._evaluation.failed(error)
            raise self._fault from (None if self._fault is error else error)
        except BaseException as error:
            self._fault = error
            raise

    def _require_batch(self, call: str) -> None:
        if not self.body.has_batch:
            raise RuntimeError(
                f"worker.{call}() is for a batch: call it in the body of "
                "for batch in worker.batches()"
            )

    def _checked_name(self, optimizer: str | None, call: str) -> str:
        self._require_batch(call)
        names = self._body_steps.names
        if optimizer is None and not names:
            return ""
        if optimizer is None or optimizer not in names:
            remedy = "leave it out, as there is one optimizer"
            if names:
                remedy = f"pass one of {', '.join(map(repr, names))}"
            raise ValueError(f"worker.{call}(optimizer={optimizer!r}): {remedy}")
        return optimizer

    def _leave_epoch(self) -> None:
        """Leave the epoch of the batch in progress, or of the next one."""
        if self.body.is_within or self.body.advance():
            at = self._rank.progress
            # A step in progress may have batches of a later epoch, which the rank has begun.
            continues = self._body_steps.batch.continues
            self.left_epoch = at.begun_epoch if continues else at.epoch
            self._peers.leave_epoch(self._rank.config.rank, self.left_epoch)

    def has_left(self, epoch: int) -> bool:
        """True if the body has left this epoch or a later one."""
        return epoch <= self.left_epoch

    # The worker's control flow, which yields to the body.

    @property
    def is_open(self) -> bool:
        """True within an optimizer step: messages wait, as the replica must not change. In
        lockstep equal on all ranks after each step of the plan.
        """
        return self._body_steps.step.is_open

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
        lane, steps, total = self._rank.recorder.lane, self._body_steps, sum(sizes)
        for number, size in enumerate(sizes):
            is_inside = steps.step.is_open or number > 0
            if is_inside:
                steps.clock.pause()
            data = self._steps.next_batch(answer=not is_inside)
            if data is None:
                return False
            if is_inside:
                steps.clock.resume()
            else:
                steps.begin(position)
            if number == 0:
                steps.begin_batch(position, total, ranks, num_empty)
            start = lane.since
            self._serial += 1
            steps.begin_micro(data, size, is_last=number + 1 == len(sizes))
            with self._replica.precision.autocast():
                yield data
            data = steps.batch.micro.data = None
            self.body.release()
            if self._end_micro():
                return False
            lane.end_step(CONTROL, start, [size])
        if not sizes:
            lane.enter(COMPUTE)
            if steps.step.is_open:
                steps.clock.resume()
            else:
                steps.begin(position)
            steps.begin_batch(position, total, ranks, num_empty)
        try:
            self._end_batch()
        except (CollectiveAborted, CollectiveTimeout) as error:
            failure = steps.undo(error)
            raise failure from (None if failure is error else error)
        return True

    def _end_micro(self) -> bool:
        """Check what the body did with a micro-batch; returns True if it has left the epoch."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        steps, batch = self._body_steps, self._body_steps.batch
        if self.has_left(self._rank.progress.epoch):
            steps.leave()
            return True
        micro = batch.micro
        if steps.accumulates and micro.added and not micro.has_stepped:
            raise RuntimeError(
                "with accumulate(k), end each batch with worker.step(loss); to accumulate by "
                "worker.backward, leave accumulate out"
            )
        if batch.made or micro.added:
            self._steps.batches_fitted([micro.size])
            return False
        if not steps.step.windows and steps.has_gradients:
            raise RuntimeError(
                "the next batch was requested while a plain loss.backward() has left gradients: "
                "end the batch with worker.step(), or accumulate by worker.backward(loss)"
            )
        if steps.names and steps.step.before is not None:
            steps.step.before.values.begin_batch()
        batch.skips |= steps.accumulates or not batch.continues
        return False

    def _end_batch(self) -> None:
        """End a step of the plan: the body has had its batches, or this rank has none."""
        steps, batch = self._body_steps, self._body_steps.batch
        if not batch.total:
            self._follow()
        elif batch.skips and not batch.made:
            self._skip()
        if self._is_lockstep:
            self._place.end_batch(batch.made, batch.lr, is_open=steps.step.is_open)
        steps.log_losses()
        if not steps.step.is_open:
            steps.clock.stop()

    def _skip(self) -> None:
        """Skip a step of the plan, in lockstep on all ranks."""
        found, number = None, 0
        if self._is_lockstep:
            number = self._body_steps.post(Act.SKIP)
            found = self._place.follow(number)
            if found is not None and found.act is not Act.STEP:
                raise self._place.differs(found)
        self._body_steps.skip(found, number)

    def _follow(self) -> None:
        """Join the steps of the other ranks on a batch of which this rank has no samples, and wait
        for their evaluations.
        """
        steps, place = self._body_steps, self._place
        while True:
            number = steps.post(Act.FOLLOW)
            found = place.follow(number)
            if found is None or found.act is Act.NEXT or found.batch > place.batch:
                end = place.end_of_batch()
                self._adopt(end.lr)
                if end.is_open:
                    steps.follow_open()
                if found is None:  # all others skip the batch
                    steps.count(DROPPED)
                else:
                    place.number = number
                return
            earlier = found.made[:-1] if found.act is Act.STEP else found.made
            if earlier != tuple(steps.batch.made) or found.batch < place.batch:
                raise place.differs(found)
            self._adopt(found.lr)
            if found.act is Act.STEP:
                steps.commit(*steps.join(found, number))
            elif found.act is Act.EVALUATE:
                self._evaluation.join(number)

    def _adopt(self, lr: float | None) -> None:
        """Set the learning rate that the bodies of the other ranks have set."""
        if lr is not None and lr != self._body_steps.batch.lr:
            self.set_lr(lr)

    # Boundaries.

    def end_plan(self, *, closes: bool) -> None:
        """End a plan. A step over several batches continues in the next one, in lockstep on all
        ranks, also if the bodies of some have none in progress.

        Args:
            closes: The plan ends the epoch.

        Raises:
            RuntimeError: Gradients are left at the end of the epoch.
            CollectiveAborted, CollectiveTimeout: As a collective.
        """
        if closes:
            self.require_closed()
        steps, was_open = self._body_steps, self.is_open
        if self._is_lockstep and self._place.any_open():
            steps.follow_open()
        if not self.is_open:
            return
        if not was_open:  # the bodies of others are within a step that this one has ended
            steps.clock.start()
        steps.clock.pause()

    def abandon_step(self) -> None:
        """Undo a step that was in progress at the end of a plan: the run ends, or a rank has died,
        and its batches are assigned again.
        """
        step = self._body_steps.step
        if not step.is_open:
            return
        step.drop_windows()
        if step.before is not None:
            self._steps.undo(step.before)
        self.halted()

    def undo_failed(self) -> bool:
        """Undo the step in progress after the body has raised.

        Returns:
            False if an optimizer has changed the replica in it: it is in no state between steps.
        """
        steps = self._body_steps
        if self.body.is_within and steps.names and steps.batch.made:
            return False  # the other optimizers' steps on the batch are missing
        return steps.undo_failed()

    def require_closed(self) -> None:
        """Raise unless no gradients wait for a step."""
        if self._body_steps.step.windows:
            raise RuntimeError(
                "the epoch has ended, and worker.backward() has left gradients without a "
                "worker.step(): step before its last batch ends. Under SYNC choose a number of "
                "batches that worker.step() divides, with drop_last(True); under CADENCE and "
                "ASYNC, where a worker's number of batches depends on the speeds, use "
                "accumulate(n) on the builder, and worker.step(loss) for each batch"
            )

    def halted(self) -> None:
        """The group of ranks is broken; the batches since the last step are assigned again."""
        self._body_steps.halted()
        self._fault = None

    def regrouped(self, generation: int, ranks: Sequence[int]) -> None:
        self._place.join(generation, ranks)


class BodyEvaluation:
    """Evaluates for a body: in lockstep at a meeting of all ranks, otherwise with the average of a
    round that the call forces.

    Args:
        steps: The steps of the worker.
        body: The steps of the body.
        evaluation: Evaluates data sets together with the other ranks.
        receive: Handles the worker's next message; blocks until there is one.
    """

    def __init__(
        self,
        rank: RankResources,
        steps: WorkerSteps,
        body: BodySteps,
        evaluation: TaskEvaluation,
        peers: LoopPeers,
        receive: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._steps = steps
        self._replica = steps.replica
        self._body = body
        self._evaluation = evaluation
        self._is_member = peers.is_member
        self._receive = receive
        self._is_lockstep = steps.replica.is_lockstep
        # The weights of the ranks differ between two averaging rounds.
        self._waits_for_rounds = not self._is_lockstep and rank.config.world_size > 1

    def require(self) -> None:
        """Refuse an evaluation within a step, before one, and in a cluster."""
        made, has_windows = self._body.batch.made, bool(self._body.step.windows)
        if has_windows or (self._waits_for_rounds and made and self._body.has_gradients):
            raise RuntimeError(
                "worker.evaluate() between worker.backward() and worker.step(): call it after "
                "worker.step(), or before worker.backward()"
            )
        if self._is_member:
            raise RuntimeError(
                "worker.evaluate() in a cluster: this machine's weights are not the average over "
                "the machines; set val_dataset(ds, fn=fn) on the builder"
            )
        if self._waits_for_rounds and not made:
            raise RuntimeError(
                f"worker.evaluate() before worker.step(): under {self._rank.config.policy.name} it "
                "waits for an averaging round, which changes the weights; call it after "
                "worker.step()"
            )

    def call(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """See :meth:`LoopWorker.evaluate`; the time does not belong to the step.

        Raises:
            CollectiveAborted, CollectiveTimeout: The step is not undone yet.
        """
        timer, lane = self._rank.timer, self._rank.recorder.lane
        timer.pause()
        lane.enter(CALLBACKS)
        try:
            if self._is_lockstep:
                return self._with_all(dataset, fn)
            if self._waits_for_rounds and not self._rank.protocol.alone:
                return self._with_average(dataset, fn)
            return self._evaluation.alone(dataset, fn)
        finally:
            timer.resume()
            lane.enter(COMPUTE)

    def _with_average(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """Request a round, join it here, and evaluate its average together with all ranks."""
        protocol, body = self._rank.protocol, self._body
        body.batch.micro.was_averaged = True
        body.log_losses()
        # The average of a snapshot that was sent before lacks the steps since.
        call = self._evaluation.request(dataset, fn, protocol.pending_snapshot)
        try:
            with self._replica.precision.without_autocast():
                while not (call.is_answered or protocol.alone):
                    if protocol.leaving:
                        raise CollectiveAborted("the run ends before the evaluation")
                    self._receive()
        finally:
            self._evaluation.shared.close(self._replica.rank)
        if call.part is None:
            return self._evaluation.alone(dataset, fn)
        return means_in_order(call.part.results())

    def _with_all(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """Evaluate in lockstep on all ranks that call, each with the next batch when it is free."""
        self._steps.confirm_steps()
        number, place = self._body.post(Act.EVALUATE), self._body.place
        place.wait_for_all(number)
        with self._averaged_buffers():
            key, num_ranks = (place.generation, number), len(place.ranks)
            return self._evaluation.together(key, num_ranks, dataset, fn)

    def join(self, number: int) -> None:
        """In lockstep, wait for the evaluation of the other ranks at a meeting."""
        self._steps.confirm_steps()
        with self._averaged_buffers():
            pass
        place = self._body.place
        self._evaluation.wait((place.generation, number), len(place.ranks))

    @contextmanager
    def _averaged_buffers(self) -> Iterator[None]:
        """The buffers of the replica are the average over the ranks; all ranks enter together."""
        checkpoint, lockstep = self._replica.checkpoint, self._rank.lockstep
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

    def failed(self, error: BaseException) -> BaseException:
        """Undo a batch without a step after a failed evaluation, and end one with a step; returns
        the error to raise.
        """
        body = self._body
        if not body.batch.made:
            return body.undo(error)
        self._steps.is_torn |= bool(body.names)
        body.clock.stop()
        body.log_losses()
        return error
