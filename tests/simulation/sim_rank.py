"""A rank of the simulation: the operations of the worker's control flow, on symbolic tensors.

:class:`~runtime.worker.flow.WorkerFlow`, protocol, reports and the division into steps are those of
a run. Operations that block there yield here: a ``float`` is time that passes, :data:`GET` waits
for a message, :class:`Join` enters a collective.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from coordinator import messages as m
from coordinator.config import ApplyPolicy, SharedConfig, part_of
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, PieceTooLarge
from runtime.data.loader import LoadedBatch
from runtime.evaluation.batch_means import BatchMeans
from runtime.evaluation.batch_source import BatchSource, SampleRange
from runtime.evaluation.predict import means_in_order
from runtime.evaluation.shared_evaluation import EvaluationPart
from runtime.replica.averager import ReducedState, Snapshot
from runtime.worker.flow import PlanLoads, ReplicaReplies, WorkerFlow
from runtime.worker.lockstep import LockstepProgress, WorkerProgress
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.reporter import Reporter
from runtime.worker.worker_config import Wake, WorkerConfig
from tests.simulation.effects import Batch, Traced, Violation, replica, squares_of
from tests.simulation.replicas import Contribution, Meeting

if TYPE_CHECKING:
    from tests.simulation.harness import Simulation


class Get:
    """Wait for a message."""


GET: Final = Get()


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


class SimRank:
    """One rank: ``StepOperations`` and ``ReplicaOperations`` of its control flow.

    Attributes:
        flow: The control flow of a real worker.
        protocol: The real protocol.
        base: The average that the replica holds.
        local: Batches trained since; none in lockstep, where each step is averaged.
    """

    def __init__(self, sim: Simulation, rank: int) -> None:
        schedule, c = sim.schedule, sim.schedule.config
        self.rank = rank
        self.protocol = WorkerProtocol(rank)
        self.base: frozenset[Batch] = frozenset()
        self.local: list[Batch] = []
        self.inbox: deque[Any] = deque()
        self.num_steps = 0
        self.num_dealt: Counter[int] = Counter()  # batches in plans sent, by epoch
        self._num_begun: Counter[int] = Counter()
        self._batches: deque[Batch] = deque()  # of the plan in progress
        self._open = OpenStep()
        self.was_built = False
        self._sim = sim
        self._in_steps = c.policy is ApplyPolicy.SYNC
        self.is_lockstep = c.world_size > 1 and self._in_steps
        self.is_single = c.world_size == 1
        self.has_body = bool(schedule.leave_chance + schedule.window_chance + schedule.call_chance)
        self._calls = False  # the body waits for an evaluation
        self.part: EvaluationPart | None = None  # of a validation that it ends
        self._too_early = 0  # the last round that cannot answer it
        self._call_draws = random.Random(f"calls of {schedule.seed} on {rank}")
        self._window_draws = random.Random(f"windows of {schedule.seed} on {rank}")
        self.left_epoch = -1
        self.progress, self.lockstep = WorkerProgress(), LockstepProgress()
        self.now = sim.clock.now
        self._snapshot: tuple[Batch, ...] = ()
        self._before: Traced | None = None
        self.replica = sim.new_replica()
        if sim.origin is not None:
            self.base = sim.origin.held
            self.lockstep.step = sim.origin.step(rank)
        self._loader = SimLoader(sim, self)
        self.flow, self._reporter = self._make_flow(sim)
        self.steps = self._run()

    def _make_flow(self, sim: Simulation) -> tuple[WorkerFlow, Reporter]:
        c: Any = sim.schedule.config
        config = WorkerConfig(
            **part_of(c, SharedConfig),
            rank=self.rank,
            world_size=c.world_size,
            survives=c.continue_on_failure,
            falls_back=bool(c.alternatives),
        )
        outbox: Any = sim.outbox(self.rank)
        clock: Any = sim.clock
        ops: Any = self
        loader: Any = self._loader
        reporter = Reporter(self.protocol, outbox, clock, sim.schedule.report_interval_s)
        recorder = Watch(self)
        return WorkerFlow(
            config,
            self.protocol,
            reporter,
            PlanLoads(self.rank, self.progress, loader),
            ops,
            ReplicaReplies(self.protocol, reporter, ops, recorder),
            recorder,
        ), reporter

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

    def _run(self) -> Steps:
        yield self._sim.draw(self._sim.schedule.build_s)
        self.protocol.on_built()
        self.was_built = True
        yield from self.flow.run()

    def _join(self, name: str, number: int, weight: int) -> Join:
        return Join((name, number), self.state, weight, self.protocol.generation)

    # -- messages ----------------------------------------------------------------------

    def has_message(self) -> bool:
        return bool(self.inbox)

    def get_message(self, timeout_s: float | None) -> Steps:
        """The next message; a wait in vain is found as a deadlock, also with a limit."""
        return (yield GET)

    def ready(self) -> m.Ready:
        statistics = self._sim.schedule.batch_statistics
        return m.Ready(rank=self.rank, scale_invariant=("Adam",), batch_statistics=statistics)

    def before_message(self, message: m.ToWorker) -> None:
        """Check that a step in progress has a plan before other messages are handled."""
        is_starved = self.flow._is_starved
        if self.is_open and not (is_starved or isinstance(message, m.StartEpoch)):
            raise Violation(f"rank {self.rank} handles {message} within a step: {self._open}")

    # -- plans and steps ---------------------------------------------------------------

    def plan_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def require_closed(self) -> None:
        if self.is_open:
            raise RuntimeError(f"the epoch has ended, and gradients are left of {self._open}")

    def begin_plan(self, plan: m.EpochPlan, position: int | None, *, begins_epoch: bool) -> None:
        if begins_epoch:
            self._sim.checks.on_begin_epoch(self.rank, plan.epoch)
        if self._in_steps:
            held = None if self.is_open else len(self.base) + len(self.local)
            self._sim.checks.on_lockstep_plan(self.rank, plan, held)
        else:
            self._sim.checks.on_own_batches(self.rank, plan)
        keys = [b for span in plan.batches for b in span]
        if plan.steps is not None:
            keys = [key for key, _ in plan.steps.pieces(self.rank)]
        self._batches = deque((plan.epoch, key) for key in keys)

    def check_drift(self) -> Steps:
        yield self._join("drift", self.lockstep.step, 0)
        self.lockstep.compared()

    def step(self, plan: m.EpochPlan, steps: PlanSteps, index: int) -> Steps:
        """The body's call of a step; some bodies leave the epoch instead."""
        sizes = steps.steps[index]
        if sizes and self._call_draws.random() < self._sim.schedule.leave_chance:
            self.left_epoch = self.progress.begun_epoch if self.is_open else plan.epoch
            self._sim.checks.on_left(self.rank, self.left_epoch)
            return False
        closes = plan.then.is_end and index + 1 == len(steps.steps)
        stays_open = self._stays_open(plan.epoch, steps.position(index), closes=closes)
        if sizes and (yield from self._load(sizes[0], answer=not self.is_open)) is None:
            return False
        self._sim.hooks.before_step(self)
        made = self._open
        for i, size in enumerate(sizes):
            if i:
                yield from self._load(size, answer=False)
            step_s = self._sim.step_s(self.rank, size)
            yield step_s
            if self._sim.schedule.memory and size > self._sim.schedule.memory[self.rank]:
                raise PieceTooLarge(size)
            made.elapsed_s += step_s
            made.batches.append((self._batches.popleft(), size))
            self._num_begun[made.batches[-1][0][0]] += 1
        # Empty pieces: the peers train the samples.
        made.empty += [self._batches.popleft() for _ in range(steps.num_empty.get(index, 0))]
        made.num_steps += 1
        if not stays_open():
            yield from self._make_step(made)
        return True

    def _load(self, size: int, *, answer: bool) -> Steps:
        self._loader.size = size
        return (yield from self.flow.await_batch(answer=answer))

    @property
    def is_open(self) -> bool:
        return self._open.num_steps > 0

    def confirm_steps(self) -> None:
        """No step is launched before the one ahead of it has succeeded."""

    def end_steps(self, *, closes: bool) -> None:
        if closes:
            self.require_closed()

    def end_epoch(self, *, is_partial: bool) -> Steps:
        if self.is_lockstep:
            yield self._join("buffers", self.lockstep.step, 0)
            self.lockstep.synced()

    def final_norm(self, plan: m.EpochPlan) -> None:
        return None

    def abandon_step(self) -> None:
        self._open = OpenStep()

    leave_epoch = halt = end_plans = abandon_step

    def abandon_steps(self) -> None:
        """No step is launched."""

    def can_send_state(self, *, has_failed: bool) -> bool:
        return True

    def _stays_open(self, epoch: int, position: int | None, *, closes: bool) -> Callable[[], bool]:
        """Draws whether the body's step continues over the next batch, as far as there is one."""
        chance, seed = self._sim.schedule.window_chance, self._sim.schedule.seed
        if not chance:
            return lambda: False
        if self.is_lockstep:  # alike on all ranks
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
        if self.is_lockstep:
            join = self._join("step", self.lockstep.step, num_samples)
            self.base = (yield replace(join, loads=tuple(trained), num_steps=num)).base
        elif self._in_steps:
            self.local += self._sim.checks.on_reduced({self.rank: trained}, [num_samples], num)
        self._open = OpenStep()
        self.lockstep.stepped(num_samples, num)
        self.num_steps += 1
        self._reporter.meter.add(len(made.batches), num_samples, made.elapsed_s)
        self._reporter.meter.add_empty(len(made.empty))
        if self.is_lockstep:
            self.protocol.on_step_reduced(len(made.batches) + len(made.empty))
        else:
            weight = sum(map(self._sim.weight_of, trained)) if self._sim.weight_of.own else None
            self.protocol.on_trained(len(made.batches), num_samples, weight)
        if self._call_draws.random() < self._sim.schedule.call_chance:
            yield from self._call_evaluate()

    def _call_evaluate(self) -> Steps:
        """Wait in the body for an evaluation on the average of a round."""
        self._calls = not (self.is_single or self.protocol.alone)
        self._too_early = self.protocol.pending_snapshot
        if self._calls:
            self._reporter.send(m.EvaluationRequested(rank=self.rank))
        while self._calls and not (self.protocol.alone or self.protocol.leaving):
            yield from self.flow.receive_next()
        self._calls = False

    # -- groups of ranks ---------------------------------------------------------------

    def connect(self, message: m.Regroup) -> Steps:
        yield from ()
        if message.generation in self._sim.unconnected:
            raise CollectiveAborted("no connection")

    def catch_up(self, message: m.Regroup) -> Steps:
        if message.donor is not None:
            donor = self._sim.workers[message.donor]
            if self.lockstep.position < donor.lockstep.position:
                self.base = donor.base
                self.lockstep.copy_from(donor.lockstep)
        yield self._join("regroup", message.generation, 0)

    # -- checkpoints -------------------------------------------------------------------

    def capture_state(self) -> dict[str, Any]:
        return {"rank": self.rank, "step": self.lockstep.step}

    @property
    def _leads(self) -> bool:
        return self.rank == self._sim.group_of(self.protocol.generation)[0]

    def capture_average(self) -> tuple[dict[str, Any], Traced | None]:
        return self.capture_state(), self._copied() if self._leads else None

    def capture(self) -> tuple[m.Payload, dict[str, Any]]:
        payload: m.Payload = self._copied()
        if self.is_lockstep:  # one rank sends the parameters, each of them its buffers
            payload = m.Payload(params=(self.state,) if self._leads else (), buffers=(self.rank,))  # type: ignore[arg-type]
        return payload, self.capture_state()

    def final_fault(self) -> None:
        return None

    def capture_final(self, *, saves: bool) -> tuple[Traced, dict[str, Any] | None]:
        return self._copied(last=True), self.capture_state() if saves else None

    # -- rounds ------------------------------------------------------------------------

    def require_finite(self) -> None:
        """Symbolic tensors are finite."""

    def enter_round(self) -> bool:
        self._check_samples()
        return True

    def all_reduce(self, message: m.SyncNow, healthy: bool) -> Steps:
        joined_at = self._sim.now
        if self.protocol.generation in self._sim.unconnected:
            raise CollectiveAborted("not connected")
        yield from self._all_reduce(message.round)
        divergence = self._sim.draw(self._sim.schedule.divergence)
        norm: Any = None
        reduced = ReducedState(divergence, norm, self._sim.now - joined_at)
        return reduced, self._sim.schedule.sync_s

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

    def start_snapshot(self) -> tuple[Snapshot, bool]:
        self._check_samples()
        self._snapshot = tuple(self.local)
        state = self.state if self.replica is None else self.replica.snapshot(self.state)
        return Snapshot(state, None, squares_of(state)), True

    def apply(self, message: m.Update, run_tasks: Callable[[], Steps]) -> Steps:
        average = message.average
        assert isinstance(average, Traced)
        if message.num_samples > 0:
            # live + (average - snapshot)
            self.local = [b for b in self.local if b not in self._snapshot]
            self.base = average.base
        if self.replica is not None and (message.num_samples > 0 or message.tasks):
            self.replica.take(average, wanted=bool(message.tasks))
        self._expect("updated")
        yield from run_tasks()
        return 0.0, None

    def undo_all_reduce(self) -> None:
        assert self._before is not None
        self.base = self._before.base
        self.local = [*self._before.local, *self.local]
        if self.replica is not None:
            self.replica.held = self._before.held
            self.replica.undo()
        self._expect("undone")

    def apply_delta(self, delta: m.Payload) -> None:
        raise Violation("there is one machine")

    # -- tasks -------------------------------------------------------------------------

    def holding(self, state: m.Payload | None) -> AbstractContextManager[None]:
        return nullcontext()

    def run_task(self, task: m.Task, round_id: int) -> Steps:
        live = self.base.union(self.local)
        held = self.base if round_id or self._sim.num_live > 1 else live
        match task.kind:
            case m.TaskKind.EVALUATE:
                self._check_held(task, "evaluated", held)
                batch_s = self._sim.schedule.batch_s(self.rank, self._sim.now)
                num_batches = self._sim.schedule.evaluate_batches
                yield self._sim.schedule.evaluate_s + num_batches * batch_s
                return (("e", 0.0),)
            case m.TaskKind.HAND_OVER:
                self._check_held(task, "checkpointed", held)
            case m.TaskKind.VALIDATE:
                return (yield from self._validate(task, held, round_id))
            case m.TaskKind.REQUESTED:
                return (yield from self._answer_call(task, round_id))
        return ()

    def drop_tasks(self, tasks: list[m.Task]) -> None:
        self._sim.evaluations.drop(tasks)
        self._sim.wake_enders()

    def _answer_call(self, task: m.Task, round_id: int) -> Steps:
        yield self._sim.schedule.evaluate_s
        is_answered = self.rank == task.rank and round_id > self._too_early and self._calls
        if is_answered and self.local:
            raise Violation(f"rank {self.rank} evaluates an average without {self.local}")
        self._calls &= not is_answered
        return () if is_answered else None

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
                    self.flow.deferred.append(message)
            self.part = None
            is_complete = part.end()
            self._sim.wake_enders()
        if self.rank != task.rank or not part.is_complete:
            return None
        return tuple(means_in_order(part.results()).items())


class Watch(WorkerRecorder):
    """Checks each message before it is handled."""

    def __init__(self, rank: SimRank) -> None:
        super().__init__()
        self._rank = rank

    @contextmanager
    def handling(self, message: m.ToWorker, protocol: WorkerProtocol) -> Iterator[None]:
        """Check that the message may be handled."""
        self._rank.before_message(message)
        yield


class SimLoader:
    """The loader of a rank, whose batches take time.

    Attributes:
        size: Samples of the next batch.
    """

    reads_inline = False

    def __init__(self, sim: Simulation, rank: SimRank) -> None:
        self._sim = sim
        self._rank = rank
        self.reads_ahead = sim.schedule.reads_ahead
        self.size = 0
        self._taken_at = 0.0
        self._load: tuple[float, float] | None = None  # its seconds and end

    def submit(self, plan: m.EpochPlan) -> None:
        """A batch is loaded when it is requested, or from the start of the last step on."""

    def cancel(self) -> None:
        self._load = None

    def try_next(self) -> LoadedBatch | None:
        """The next batch, once it is loaded."""
        sim = self._sim
        if self._load is None:
            load_s = sim.load_s(self._rank.rank, self.size)
            ready_at = (self._taken_at if self.reads_ahead else sim.now) + load_s
            self._load = load_s, ready_at
            if ready_at > sim.now:
                sim.wake_at(self._rank, ready_at)
        load_s, ready_at = self._load
        if sim.now < ready_at:
            return None
        self._load, self._taken_at = None, sim.now
        load_s = load_s if sim.schedule.data_s else 0.0  # otherwise reads are not measured
        return LoadedBatch(True, self.size, 0, 0, load_s=load_s)


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
