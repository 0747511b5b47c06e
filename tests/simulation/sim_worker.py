"""A worker with symbolic tensors and the real protocol, reports and loop.

It follows :class:`runtime.worker.worker.GpuWorker` message for message, as a generator: what
blocks there is yielded here. A ``float`` is time that passes, :data:`GET` waits for a
message, :class:`Join` enters a collective.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, assert_never

from coordinator import messages as m
from coordinator.config import ApplyPolicy, SharedConfig, part_of
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, PieceTooLarge
from runtime.evaluation.batch_means import BatchMeans
from runtime.evaluation.batch_source import BatchSource, SampleRange
from runtime.evaluation.predict import means_in_order
from runtime.evaluation.shared_evaluation import EvaluationPart
from runtime.worker.lockstep import LockstepProgress
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.reporter import Reporter
from runtime.worker.worker_config import WAKE, Wake, WorkerConfig
from tests.simulation.effects import Batch, Traced, Violation, replica, squares_of
from tests.simulation.replicas import Contribution, Meeting

if TYPE_CHECKING:
    from tests.simulation.harness import Simulation


class Get:
    """Wait for a message."""


GET: Final = Get()


class _EpochLeft(Exception):
    """The body leaves the epoch in lockstep."""


@dataclass(slots=True)
class OpenStep:
    """The step of a body in progress: its batches are not counted yet.

    Attributes:
        batches: The rank's batches, with their samples.
        empty: Batches of which peers train all samples.
        num_steps: Steps of the plan.
        elapsed_s: Their time.
    """

    batches: list[tuple[Batch, int]] = field(default_factory=list)
    empty: list[Batch] = field(default_factory=list)
    num_steps: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Join:
    """Enter a collective.

    Attributes:
        key: Which one; every rank must enter the same.
        state: The replica.
        weight: Samples behind it.
        generation: The group of ranks that it is entered with.
        loads: Under ``SYNC``, the micro-batches behind the gradients.
        num_steps: Steps of the plan that it ends.
        brought: The tensors of the replica, where it has any.
    """

    key: tuple[str, int]
    state: Traced
    weight: float
    generation: int
    loads: tuple[Batch, ...] = ()
    num_steps: int = 1
    brought: Contribution | None = None


class Torn(CollectiveAborted):
    """The group broke after all had joined: this rank misses the average that others have."""

    def __init__(self, average: Traced | None) -> None:
        super().__init__("aborted")
        self.average = average


Op = float | Get | Join
Steps = Generator[Op, Any, Any]


class SimWorker:
    """One rank.

    Attributes:
        protocol: The real protocol.
        base: The average that the replica holds.
        local: Batches trained since; none in lockstep, where each step is averaged.
        ready_at: Time at which its last batch is loaded.
    """

    def __init__(self, sim: Simulation, rank: int) -> None:
        schedule, c = sim.schedule, sim.schedule.config
        self.rank = rank
        self.protocol = WorkerProtocol(rank)
        self.base: frozenset[Batch] = frozenset()
        self.local: list[Batch] = []
        self.inbox: deque[Any] = deque()
        self.num_steps = 0
        self.ready_at = self._taken_at = 0.0
        self.num_dealt: Counter[int] = Counter()  # batches in plans sent, by epoch
        self._num_begun: Counter[int] = Counter()
        self._open = OpenStep()
        self._is_starved = False
        self.was_built = False
        self._sim = sim
        self._in_steps = c.policy is ApplyPolicy.SYNC
        self._is_lockstep = c.world_size > 1 and self._in_steps
        self._config = WorkerConfig(
            **part_of(c, SharedConfig),
            rank=rank,
            world_size=c.world_size,
            survives=c.continue_on_failure,
        )
        self._reporter = Reporter(
            self.protocol,
            sim.outbox(rank),  # type: ignore[arg-type]
            sim.clock,  # type: ignore[arg-type]
            schedule.report_interval_s,
        )
        self._deferred: deque[Any] = deque()
        self._calls = False  # the body waits for an evaluation
        self.part: EvaluationPart | None = None  # of a validation that it ends
        self._too_early = 0  # the last round that cannot answer it
        self._call_draws = random.Random(f"calls of {schedule.seed} on {rank}")
        self._window_draws = random.Random(f"windows of {schedule.seed} on {rank}")
        self._begun_epoch = self._left_epoch = -1
        self._lockstep = LockstepProgress()
        self._snapshot: tuple[Batch, ...] = ()
        self._before: Traced | None = None
        self.replica = sim.new_replica()
        if sim.origin is not None:
            self.base = sim.origin.held
            self._lockstep.step = sim.origin.step(rank)
        self.steps = self._run()

    @property
    def state(self) -> Traced:
        """The present state of the replica."""
        return replica(self.base, self.local)

    def _copied(self, *, last: bool = False) -> Traced:
        """The present state of the replica, with its tensors."""
        tensors = self.replica
        return self.state if tensors is None else tensors.copy(self.state, last=last)

    def _expect(self, when: str) -> None:
        """Check the values of the tensors."""
        if self.replica is not None:
            self.replica.expect(self.local, when)

    # -- the thread's life -----------------------------------------------------------

    def _run(self) -> Steps:
        yield self._sim.draw(self._sim.schedule.build_s)
        self.protocol.on_built()
        self.was_built = True
        statistics = self._sim.schedule.batch_statistics
        self._reporter.send(
            m.Ready(rank=self.rank, scale_invariant=("Adam",), batch_statistics=statistics)
        )
        while True:
            try:
                yield from self._train_plans()
                break
            except PieceTooLarge as error:
                self._halt(too_large=error.num_samples)
                if self.protocol.leaving:
                    break
                continue
            except _EpochLeft:
                self._halt()
                if self.protocol.leaving:
                    break
                continue
            except CollectiveAborted as error:
                if not (self._goes_on and self._is_lockstep):
                    yield from self._drain_until_shutdown()
                fault = str(error) if error.failed else None
            except CollectiveTimeout:
                fault = None
                if not (self._sim.schedule.config.continue_on_failure and self._is_lockstep):
                    raise
            if self.protocol.leaving:
                self._reporter.report_rest()
                break
            self._halt(fault)
        if self._wants_snapshot():
            counts = self._is_lockstep or self._config.world_size == 1
            assert self.protocol.shutdown is not None
            self._reporter.send(
                m.FinalSnapshot(
                    rank=self.rank,
                    payload=self._copied(last=True),
                    num_samples=0 if self._is_lockstep else self.protocol.samples,
                    weight=None if self._is_lockstep else self.protocol.weight,
                    step=self._lockstep.step if counts else 0,
                    extra=self._extra() if self.protocol.shutdown.capture else None,
                )
            )
        self.protocol.on_gone()
        self._reporter.send(m.Exiting(rank=self.rank))

    def _train_plans(self) -> Steps:
        while (plan := (yield from self._wait_for_plan())) is not None:
            if (yield from self._run_plan(plan)):
                return
        self._open = OpenStep()

    @property
    def _goes_on(self) -> bool:
        schedule = self._sim.schedule
        return self._config.redoes or bool(schedule.config.alternatives or schedule.leave_chance)

    def _halt(self, fault: str | None = None, too_large: int = 0) -> None:
        self._open = OpenStep()
        if not self.protocol.leaving:
            self.protocol.halt()
        self._send_halted(fault, too_large)

    def _send_halted(self, fault: str | None = None, too_large: int = 0) -> None:
        self._reporter.send(
            m.Halted(
                rank=self.rank,
                generation=self.protocol.generation,
                step=self._lockstep.step,
                num_syncs=self._lockstep.num_syncs,
                fault=fault,
                report=self._reporter.take_report(),
                too_large=too_large,
                left=self._reporter.epoch if self._reporter.epoch <= self._left_epoch else None,
            )
        )

    def _regroup(self, message: m.Regroup) -> Steps:
        if message.generation in self._sim.unconnected:
            self._reporter.send(
                m.ConnectFailed(
                    rank=self.rank,
                    generation=message.generation,
                    backend=message.backend,
                    error="no connection",
                )
            )
            if message.step is not None:
                self.protocol.generation = message.generation
                self._send_halted()
                return
        self.protocol.on_regrouped(message.generation)
        if message.step is None:
            return
        if message.donor is not None:
            donor = self._sim.workers[message.donor]
            if self._lockstep.position < donor._lockstep.position:
                self.base = donor.base
                self._lockstep.copy_from(donor._lockstep)
        yield self._join("regroup", message.generation, 0)
        self._reporter.send(m.Regrouped(rank=self.rank, generation=message.generation))

    def _join(self, name: str, number: int, weight: int) -> Join:
        return Join((name, number), self.state, weight, self.protocol.generation)

    def _drain_until_shutdown(self) -> Steps:
        self.protocol.leave()
        while self.protocol.shutdown is None:
            message = self._deferred.popleft() if self._deferred else (yield GET)
            if not isinstance(message, Wake):
                self.protocol.receive(message)

    def _wants_snapshot(self) -> bool:
        shutdown = self.protocol.shutdown
        return shutdown is not None and shutdown.snapshot

    # -- plans -----------------------------------------------------------------------

    def _wait_for_plan(self) -> Steps:
        while True:
            leaving = False
            if not (yield from self._continues_step()):
                leaving = yield from self._handle_control()
            plan = self.protocol.begin_plan()
            if plan is not None:
                return plan
            if leaving:
                return None
            yield from self._receive((yield GET))

    def _continues_step(self) -> Steps:
        if not self._open.num_steps or self._is_starved:
            return False
        deferred: list[Any] = []
        while self._open.num_steps and not self.protocol.plans:
            if self.protocol.leaving:
                self._open = OpenStep()
                break
            message = self._deferred.popleft() if self._deferred else (yield GET)
            if isinstance(message, Wake | m.StartEpoch):
                yield from self._receive(message)
                continue
            deferred.append(message)
            if self.protocol.ends_step(message):
                self._open = OpenStep()
        self._deferred.extendleft(reversed(deferred))
        return bool(self._open.num_steps)

    def _run_plan(self, plan: m.EpochPlan) -> Steps:
        if plan.epoch > self._begun_epoch and self._open.num_steps:
            raise RuntimeError(f"the epoch has ended, and gradients are left of {self._open}")
        self._reporter.epoch = plan.epoch
        if plan.epoch > self._begun_epoch:
            self._begun_epoch = plan.epoch
            self._sim.checks.on_begin_epoch(self.rank, plan.epoch)
        if self._in_steps:
            held = None if self._open.num_steps else len(self.base) + len(self.local)
            self._sim.checks.on_lockstep_plan(self.rank, plan, held)
        else:
            self._sim.checks.on_own_batches(self.rank, plan)
        windows = PlanSteps(plan, self._config)
        keys = [b for span in plan.batches for b in span]
        if plan.steps is not None:
            keys = [key for key, _ in plan.steps.pieces(self.rank)]
        batches = deque((plan.epoch, key) for key in keys)
        for index, sizes in enumerate(windows.steps):
            if not (self._open.num_steps or (yield from self._may_step())):
                self._abandon(plan)
                return self.protocol.leaving
            empty = windows.num_empty.get(index, 0)
            if sizes and self._call_draws.random() < self._sim.schedule.leave_chance:
                self._leave_epoch(plan.epoch)
                return self.protocol.leaving
            closes = not (plan.more or plan.pauses) and index + 1 == len(windows.steps)
            stays_open = self._stays_open(plan.epoch, windows.position(index), closes=closes)
            if not (yield from self._run_window(sizes, batches, empty, stays_open)):
                self._abandon(plan)
                return True
            if index + 1 < len(windows.steps) and not self._open.num_steps:
                self._reporter.report_if_due()
        if self._open.num_steps:
            self._end_within_step(plan)
            return False
        if not plan.more:
            yield from self._sync_buffers()
        self.protocol.end_plan()
        self._reporter.report_epoch(plan.epoch)
        return False

    def _end_within_step(self, plan: m.EpochPlan) -> None:
        if self._is_lockstep and not (plan.more or plan.pauses):
            raise RuntimeError(f"the epoch has ended, and gradients are left of {self._open}")
        self._is_starved = not plan.num_batches
        self.protocol.end_plan()
        self._reporter.report_epoch(plan.epoch, open_epoch=self._begun_epoch)

    def _may_step(self) -> Steps:
        return not (yield from self._handle_control())

    def _abandon(self, plan: m.EpochPlan) -> None:
        self.protocol.end_plan()
        self._reporter.report_epoch(plan.epoch)

    def _stays_open(self, epoch: int, position: int | None, *, closes: bool) -> Callable[[], bool]:
        """Draws whether the body's step continues over the next batch, as far as there is one."""
        chance, seed = self._sim.schedule.window_chance, self._sim.schedule.seed
        if not chance:
            return lambda: False
        if self._is_lockstep:  # alike on all ranks
            draws = random.Random(f"windows of {seed} at {epoch} {position}")
            is_open = draws.random() < chance and not (closes and draws.random() < 0.9)
            return lambda: is_open
        ledger = self._sim.machine.run_state.ledger

        def drawn_now() -> bool:
            ends = self._num_begun[epoch] == self.num_dealt[epoch]
            ends = ends and not ledger.may_assign(self.rank, epoch)
            ends = ends and self._window_draws.random() < 0.9  # else it fails
            return self._window_draws.random() < chance and not ends

        return drawn_now

    def _leave_epoch(self, epoch: int) -> None:
        if self._open.num_steps:
            epoch = self._begun_epoch
        self._open = OpenStep()
        self._sim.checks.on_left(self.rank, epoch)
        self._left_epoch = epoch
        if self._is_lockstep:
            raise _EpochLeft
        self._reporter.leave_epoch(epoch, self.protocol.leave_epoch(epoch))

    def _sync_buffers(self) -> Steps:
        if self._is_lockstep:
            yield self._join("buffers", self._lockstep.step, 0)
            self._lockstep.synced()

    def _run_window(
        self,
        sizes: Any,
        batches: deque[Batch],
        num_empty: int,
        stays_open: Callable[[], bool],
    ) -> Steps:
        answer = not self._open.num_steps
        if sizes and not (yield from self._await_batch(sizes[0], answer=answer)):
            return False
        self._sim.hooks.before_step(self)
        made = self._open
        for i, size in enumerate(sizes):
            if i:
                yield from self._await_batch(size, answer=False)
            step_s = self._sim.step_s(self.rank, size)
            yield step_s
            if self._sim.schedule.memory and size > self._sim.schedule.memory[self.rank]:
                raise PieceTooLarge(size)
            made.elapsed_s += step_s
            made.batches.append((batches.popleft(), size))
            self._num_begun[made.batches[-1][0][0]] += 1
        # Empty pieces: the peers train the samples.
        made.empty += [batches.popleft() for _ in range(num_empty)]
        made.num_steps += 1
        if not stays_open():
            yield from self._make_step(made)
        return True

    def _make_step(self, made: OpenStep) -> Steps:
        """Make the step of all batches since the last one."""
        num_samples, trained = sum(size for _, size in made.batches), []
        if len({epoch for (epoch, _), _ in made.batches}) > 1:
            self._sim.spans_epochs = True
        for batch, size in made.batches:
            if self._in_steps:  # counted once the gradients are averaged
                trained.append(batch)
                continue
            counted = self._sim.checks.on_trained_own(self.rank, batch, size)
            self.local += counted
            trained += counted
            if self.replica is not None:
                for one in counted:
                    self.replica.train(one)
        trained += made.empty
        num = made.num_steps
        if self._is_lockstep:
            join = self._join("step", self._lockstep.step, num_samples)
            self.base = (yield replace(join, loads=tuple(trained), num_steps=num)).base
        elif self._in_steps:
            self.local += self._sim.checks.on_reduced({self.rank: trained}, [num_samples], num)
        self._open = OpenStep()
        self._lockstep.stepped(num_samples, num)
        self.num_steps += 1
        self._reporter.meter.add(len(made.batches), num_samples, made.elapsed_s)
        self._reporter.meter.add_empty(len(made.empty))
        if self._is_lockstep:
            self.protocol.on_step_reduced(len(made.batches) + len(made.empty))
        else:
            weight = sum(map(self._sim.weight_of, trained)) if self._sim.weight_of.own else None
            self.protocol.on_trained(len(made.batches), num_samples, weight)
        if self._call_draws.random() < self._sim.schedule.call_chance:
            yield from self._call_evaluate()

    def _call_evaluate(self) -> Steps:
        """Wait in the body for an evaluation on the average of a round."""
        self._calls = self._config.world_size > 1 and not self.protocol.alone
        self._too_early = self.protocol.pending_snapshot
        if self._calls:
            self._reporter.send(m.EvaluationRequested(rank=self.rank))
        while self._calls and not (self.protocol.alone or self.protocol.leaving):
            yield from self._receive(self._deferred.popleft() if self._deferred else (yield GET))
        self._calls = False

    def _answer_call(self, task: m.Task, round_id: int) -> Steps:
        yield self._sim.schedule.evaluate_s
        is_answered = self.rank == task.rank and round_id > self._too_early and self._calls
        if is_answered and self.local:
            raise Violation(f"rank {self.rank} evaluates an average without {self.local}")
        self._calls &= not is_answered
        return () if is_answered else None

    def _await_batch(self, size: int, *, answer: bool) -> Steps:
        load_s, ahead = self._sim.load_s(self.rank, size), self._sim.schedule.reads_ahead
        if self._sim.schedule.data_s:
            self._reporter.meter.add_load(load_s, ahead=ahead)
        ready = (self._taken_at if ahead else self._sim.now) + load_s
        if ready > self._sim.now:
            self.ready_at = ready
            self._sim.wake_at(self, ready)
            while self._sim.now < ready:
                message = yield GET
                if isinstance(message, Wake):
                    continue
                if not answer:
                    self._deferred.append(message)
                    continue
                yield from self._receive(message)
                if (yield from self._handle_control()):
                    return False
        self._taken_at = self._sim.now
        return True

    # -- checkpoints -------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        return {"rank": self.rank, "step": self._lockstep.step}

    def _capture(self, capture: int) -> None:
        report = self._reporter.take_report(wait=True)
        payload: m.Payload = self._copied()
        if self._is_lockstep:  # one rank sends the parameters, each of them its buffers
            leads = self.rank == self._sim.group_of(self.protocol.generation)[0]
            payload = m.Payload(params=(self.state,) if leads else (), buffers=(self.rank,))  # type: ignore[arg-type]
        self._reporter.send(
            m.CapturedState(
                rank=self.rank,
                id=capture,
                payload=payload,
                num_samples=int(self._is_lockstep),
                step=self._lockstep.step,
                extra=self._extra(),
                report=report,
            )
        )

    # -- messages ----------------------------------------------------------------------

    def _handle_control(self) -> Steps:
        while True:
            while self._deferred:
                yield from self._receive(self._deferred.popleft())
            if self.inbox:
                yield from self._receive((yield GET))
                continue
            if self.protocol.leaving:
                return True
            if not self.protocol.parked:
                return False
            if self.protocol.report_due:
                self._reporter.report_timing()
            yield from self._receive((yield GET))

    def _receive(self, message: m.ToWorker | Wake) -> Steps:
        if message is WAKE:
            return
        assert not isinstance(message, Wake)
        if self._open.num_steps and not (self._is_starved or isinstance(message, m.StartEpoch)):
            raise Violation(f"rank {self.rank} handles {message} within a step: {self._open}")
        work = self.protocol.receive(message)
        if work is None:
            return
        if not isinstance(work, m.ToWorkerReplica):
            self._reporter.send(work)
            return
        match work:
            case m.SyncNow():
                yield from self._run_sync_round(work)
            case m.RequestParams():
                self._send_snapshot(work)
            case m.Update():
                yield from self._take_update(work)
            case m.RunTasks():
                live = self.base if self._sim.num_live > 1 else self.base.union(self.local)
                yield from self._run_tasks(work.tasks, live)
            case m.TakeCheckpoint():
                self._capture(work.id)
            case m.Halt():
                raise CollectiveAborted("a rank died")
            case m.Regroup():
                yield from self._regroup(work)
            case m.Rollback():
                assert self._before is not None
                self.base = self._before.base
                self.local = [*self._before.local, *self.local]
                if self.replica is not None:
                    self.replica.held = self._before.held
                    self.replica.undo()
                self._expect("undone")
            case m.ApplyDelta():
                raise Violation("there is one machine")
            case _:
                assert_never(work)

    def _run_sync_round(self, message: m.SyncNow) -> Steps:
        report = self._reporter.take_report(wait=message.capture)
        ok, extra, average = False, None, None
        fault: str | None = None
        joined_at = self._sim.now
        try:
            if self.protocol.generation in self._sim.unconnected:
                raise CollectiveAborted("not connected")
            yield from self._all_reduce(message.round)
            ok = True
            if message.capture:
                extra = self._extra()
                if self.rank == self._sim.group_of(self.protocol.generation)[0]:
                    average = self._copied()
        except (CollectiveAborted, CollectiveTimeout) as error:
            fault = str(error) if error.failed else None
        finally:
            self.protocol.on_synced(message, ok=ok)
            if ok:
                self._sim.checks.on_lr_factor(self.rank, message.round, self.protocol.lr_factor)
            divergence = self._sim.draw(self._sim.schedule.divergence) if ok else None
            self._reporter.send(
                m.SyncAck(
                    rank=self.rank,
                    round=message.round,
                    divergence=divergence,
                    sync_s=self._sim.schedule.sync_s if ok else 0.0,
                    wait_s=self._sim.now - joined_at if ok else 0.0,
                    ok=ok,
                    fault=fault,
                    report=report,
                    extra=extra,
                    average=average,
                )
            )
        if ok:
            yield from self._run_tasks(message.tasks, self.base, message.round)
        else:
            self._sim.evaluations.drop([t for t in message.tasks if t.rank == self.rank])
            self._sim.wake_enders()

    def _all_reduce(self, round_id: int) -> Steps:
        self._check_samples()
        join, tensors, weight = (
            self._join("round", round_id, 0),
            self.replica,
            self.protocol.weight,
        )
        self._before = join.state
        if tensors is None:
            self.base = (yield replace(join, weight=weight)).base
        else:
            self._before = replace(self._before, held=tensors.held)
            brought = tensors.bring(weight)
            try:
                average = yield replace(join, state=self._before, weight=weight, brought=brought)
            except (CollectiveAborted, CollectiveTimeout) as error:
                torn = error.average if isinstance(error, Torn) else None
                met = Meeting(0, [brought], error) if torn is None else self._meeting(torn, True)
                with suppress(type(error)):
                    tensors.meet(met, weight)
                self._expect("a round that failed")
                raise
            tensors.meet(self._meeting(average, torn=False), weight)
            self.base, tensors.held = average.base, average.held
        self.local.clear()
        self._expect("averaged")

    def _meeting(self, average: Traced, torn: bool) -> Meeting:
        ranks = self._sim.group_of(self.protocol.generation)
        return Meeting(ranks.index(self.rank), average.brought, torn=torn)

    def _check_samples(self) -> None:
        """Check that the protocol's samples since the last round are those of its batches."""
        if self.protocol.samples != sum(map(self._sim.samples_of, self.local)):
            raise Violation(f"{self.protocol.samples} samples for the batches {self.local}")

    def _send_snapshot(self, message: m.RequestParams) -> None:
        self._check_samples()
        report = self._reporter.take_report(wait=message.capture)
        self._snapshot = tuple(self.local)
        state = self.state if self.replica is None else self.replica.snapshot(self.state)
        self.protocol.on_snapshot_taken(message.round)
        self._reporter.send(
            m.ParamSnapshot(
                rank=self.rank,
                round=message.round,
                payload=state,
                num_samples=self.protocol.samples,
                weight=self.protocol.weight,
                num_batches=self.protocol.batches,
                squares=squares_of(state),
                report=report,
                extra=self._extra() if message.capture else None,
            )
        )

    def _take_update(self, message: m.Update) -> Steps:
        if not self.protocol.on_updated(message):
            return
        self._sim.checks.on_lr_factor(self.rank, message.round, self.protocol.lr_factor)
        average = message.average
        assert isinstance(average, Traced)
        if message.num_samples > 0:
            # live + (average - snapshot)
            self.local = [b for b in self.local if b not in self._snapshot]
            self.base = average.base
        if self.replica is not None and (message.num_samples > 0 or message.tasks):
            self.replica.take(average, wanted=bool(message.tasks))
        self._expect("updated")
        yield from self._run_tasks(message.tasks, self.base, message.round)
        self._reporter.send(m.SyncAck(rank=self.rank, round=message.round))

    def _run_tasks(
        self, tasks: Sequence[m.Task], held: frozenset[Batch], round_id: int = 0
    ) -> Steps:
        for task in tasks:
            began = self._sim.now
            values: tuple[tuple[str, float], ...] | None = ()
            match task.kind:
                case m.TaskKind.EVALUATE:
                    self._check_held(task, "evaluated", held)
                    batch_s = self._sim.schedule.batch_s(self.rank, self._sim.now)
                    num_batches = self._sim.schedule.evaluate_batches
                    yield self._sim.schedule.evaluate_s + num_batches * batch_s
                    values = (("e", 0.0),)
                case m.TaskKind.HAND_OVER:
                    self._check_held(task, "checkpointed", held)
                case m.TaskKind.VALIDATE:
                    values = yield from self._validate(task, held, round_id)
                case m.TaskKind.REQUESTED:
                    values = yield from self._answer_call(task, round_id)
            seconds = self._sim.now - began
            self._reporter.send(
                m.TaskDone(rank=self.rank, task=task, values=values, seconds=seconds)
            )

    def _check_held(self, task: m.Task, what: str, held: frozenset[Batch]) -> None:
        if task.at is None:
            self._sim.checks.on_per_epoch(self.rank, what, task.epoch, held)
        else:
            self._sim.checks.on_evaluated_within(self.rank, task.at)

    def _validate(self, task: m.Task, held: frozenset[Batch], round_id: int) -> Steps:
        """Evaluate batches that no other rank has taken; the rank of the task is the last."""
        source = Numbers(self._sim.schedule.config.val_batches)
        part = self._sim.evaluations.join(task, self.rank, round_id, source)
        if part is None:
            return None
        is_complete = False
        while not is_complete:
            while part.may_continue() and (samples := part.take()) is not None:
                self._sim.checks.on_validated(self.rank, task, held)
                yield self._sim.step_s(self.rank, 1)
                self._sim.checks.on_validated_batch(task, samples.batch)
                means = BatchMeans(samples.batch, (("at", float(samples.batch), 1.0),))
                part.give(samples, means)
            self.part = part
            while not part.may_end and self.rank == task.rank:
                message = yield GET
                if not isinstance(message, Wake):
                    self._deferred.append(message)
            self.part = None
            is_complete = part.end()
            self._sim.wake_enders()
        if self.rank != task.rank or not part.is_complete:
            return None
        return tuple(means_in_order(part.results()).items())


class Numbers(BatchSource):
    """The numbers of the batches of a validation set."""

    num_samples = None

    def __init__(self, num_batches: int) -> None:
        self._left = deque(range(num_batches))

    def take(self) -> SampleRange | None:
        """The next batch."""
        if not self._left:
            return None
        batch = self._left.popleft()
        return SampleRange(batch, batch, batch + 1, lambda start, stop: None)
