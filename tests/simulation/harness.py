"""The simulator: the real coordinator and real worker protocols under a virtual clock.

Everything happens in one thread, in an order determined by the schedule's seed: there is
one heap of events, and nothing reads a real clock. A run either ends, with every
invariant of :mod:`tests.simulation.checks` held, or raises :class:`SimulationFailed`
with its history.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from coordinator import messages as m
from coordinator.averaging import Averager, clone_payload
from coordinator.config import ApplyPolicy, AverageBackend
from coordinator.machine import Coordinator
from coordinator.messages import (
    SAVE_ROUND,
    AbortCollective,
    Average,
    Command,
    ReportStall,
    SaveCheckpoint,
    Send,
)
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.core.group_gate import GroupGate
from runtime.evaluation.shared_evaluation import SharedEvaluations
from runtime.worker.worker_config import WAKE
from tests.simulation.checks import Checks
from tests.simulation.effects import Batch, SamplesOf, Traced, Violation, WeightOf, average, replica
from tests.simulation.replicas import Effects, Replica, average_effects
from tests.simulation.saves import Origin
from tests.simulation.schedule import Death, Schedule, draw_schedule
from tests.simulation.sim_rank import GET, Join, Op, SimRank, Torn

MAX_EVENTS = 50_000
TRACE_LINES = 400
STUCK = "nothing can happen any more and the run is not done"


class SimulationFailed(AssertionError):
    """A run broke an invariant or got stuck; the message holds its history."""


class Vanish(BaseException):
    """Raised by a hook: the worker's thread ends without a message."""


class UserError(RuntimeError):
    """An error raised by a user's function."""


class Hooks:
    """Injection points for faults; these do nothing and are overridden by subclasses."""

    def before_step(self, worker: SimRank) -> None:
        """Called before a step; may raise: any exception kills the worker, as in a thread."""

    def before_death(self, worker: SimRank) -> None:
        """Called before a worker dies by the schedule."""

    def extra_delay_s(self, sim: Simulation, rank: int, message: object) -> float:
        """Delay of a message in addition to that of the schedule."""
        return 0.0


class _Clock:
    """The clock of a reporter."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def now(self) -> float:
        return self._sim.now


class _Outbox:
    """A worker's queue to the coordinator."""

    def __init__(self, sim: Simulation, rank: int) -> None:
        self._sim = sim
        self._rank = rank

    def put(self, message: m.Event) -> None:
        self._sim.send_to_coordinator(self._rank, message)


class Simulation:
    """One run.

    Attributes:
        now: The virtual time.
        machine: The real coordinator.
        workers: One for each rank.
        dead: Ranks that died.
        per_global: Batches in a global batch of ``SYNC``.
        result: The last average.
        average_pending: True while an average is computed.
        origin: The checkpoint from which the run continues, if any.
        saved: The checkpoints that it has made.
        evaluations: Validations that ranks do together.
        choices: The transports that were chosen.
        num_faults: Collectives that failed.
        unconnected: Groups that could not be connected.
    """

    def __init__(
        self,
        schedule: Schedule,
        hooks: Hooks | None = None,
        origin: Origin | None = None,
        *,
        tensors: bool = False,
    ) -> None:
        c = schedule.config
        self._tensors = tensors and c.policy is not ApplyPolicy.SYNC and origin is None
        self._per_epoch = c.batches_per_epoch
        self._mixer = Averager()
        self.origin = origin
        self.saved: list[SaveCheckpoint] = []
        self.schedule = schedule
        self.hooks = hooks or Hooks()
        self.now = 0.0
        self.rng = random.Random(schedule.seed)
        self.clock = _Clock(self)
        self.samples_of = SamplesOf(c.num_samples, c.batch_size)
        lockstep = c.policy is ApplyPolicy.SYNC and c.world_size > 1
        self.weight_of = WeightOf(self.samples_of, schedule.seed % 2 == 1 and not lockstep)
        self.gate = GroupGate()
        self.evaluations = SharedEvaluations(self.gate)
        self.machine = Coordinator(c, None if origin is None else origin.run)
        is_whole = c.policy is ApplyPolicy.SYNC and c.global_batch_size is not None
        self.per_global = 1 if is_whole else c.world_size
        if origin is not None:
            self.per_global = origin.run.per_global
        self.result: Traced = replica(frozenset() if origin is None else origin.held, ())
        self.dead: set[int] = set()
        # A step was over batches of two epochs, and its samples count in the last one.
        self.spans_epochs = origin is not None and schedule.window_chance > 0
        self.average_pending = False
        self.checks = Checks(self)
        self.inbox: deque[m.Event] = deque()
        self._comes = False
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=TRACE_LINES)
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._channel_ends: dict[tuple[str, int], float] = {}
        self._waiting: set[int] = set()
        self._ended: set[int] = set()
        self._joined: dict[int, dict[int, Join]] = {}
        self._groups: dict[int, tuple[int, ...]] = {0: tuple(range(c.world_size))}
        self._backends: dict[int, AverageBackend | None] = {0: self.machine.run_state.collective}
        self._delivers = False
        self.unconnected: set[int] = set()
        self.num_faults = 0
        self.choices: list[m.BackendChosen] = []
        self._broken: set[int] = set()
        self._over = False
        self._marked: dict[int, Exception | Vanish] = {}
        self.workers = [SimRank(self, rank) for rank in range(c.world_size)]

    # -- for the workers ---------------------------------------------------------------

    def draw(self, longest: float) -> float:
        """A number from 0 up to ``longest``."""
        return self.rng.random() * longest

    def step_s(self, rank: int, size: int) -> float:
        """Seconds of a micro-batch that begins now."""
        full = self.schedule.batch_s(rank, self.now)
        return full * size / self.schedule.config.batch_size + self.draw(
            full * self.schedule.jitter
        )

    def load_s(self, rank: int, size: int) -> float:
        """Seconds in which a micro-batch is loaded."""
        chance, data_s = self.schedule.load_chance, self.schedule.data_s
        late_s = self.draw(self.schedule.load_s) if chance and self.rng.random() < chance else 0.0
        share = size / self.schedule.config.batch_size
        return late_s + (data_s[rank] * share if data_s else 0.0)

    def outbox(self, rank: int) -> _Outbox:
        """The worker's queue to the coordinator."""
        return _Outbox(self, rank)

    def wake_at(self, worker: SimRank, time: float) -> None:
        """Put a loader's wake-up into the worker's inbox."""
        self._at(time, lambda: self._deliver(worker, WAKE))

    def group_of(self, generation: int) -> tuple[int, ...]:
        """The ranks of a generation's group."""
        return self._groups[generation]

    def ended(self, worker: SimRank) -> bool:
        """True if the worker's thread has ended."""
        return worker.rank in self._ended

    def settled(self) -> frozenset[tuple[int, int]]:
        """Batches that are in the result whichever rank dies now."""
        alive = [w for w in self.workers if w.rank not in self.dead] or self.workers
        if len(alive) == 1:
            return self.averaged().union(alive[0].base, alive[0].local)
        return self.averaged()

    def averaged(self) -> frozenset[tuple[int, int]]:
        """Batches in the last average that every rank has, or is about to apply."""
        return self.result.base if self._delivers else self._held_by_all()

    def _held_by_all(self) -> frozenset[tuple[int, int]]:
        alive = [w for w in self.workers if w.rank not in self.dead] or self.workers
        return frozenset.intersection(*(w.base for w in alive))

    @property
    def num_live(self) -> int:
        """Ranks that have not died."""
        return len(self.workers) - len(self.dead)

    # -- channels --------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._order), action))

    def _arrival(self, way: str, rank: int, message: object) -> float:
        """Arrival time of a message: delayed, but in order of sending."""
        delay = self.draw(self.schedule.delay_s) + self.hooks.extra_delay_s(self, rank, message)
        time = max(self.now + delay, self._channel_ends.get((way, rank), 0.0))
        self._channel_ends[way, rank] = time
        return time

    def send_to_coordinator(self, rank: int, message: m.Event) -> None:
        """Send a message."""
        if rank in self._ended:
            return
        self.trace.append((self.now, f"rank {rank} sends", message))
        if isinstance(message, m.SyncAck) and message.ok:
            factor = self.workers[rank].protocol.lr_factor
            self.checks.on_lr_factor(rank, message.round, factor)
        time = self._arrival("up", rank, message)
        s = self.schedule
        if s.late_chance and isinstance(message, m.ParamSnapshot) and self._lot(s.late_chance):
            time += self.draw(s.late_s)
            self._channel_ends["up", rank] = time
        self._at(time, lambda: self._put(message))

    def _lot(self, chance: float) -> bool:
        return self.rng.random() < chance

    def _send_to_worker(self, rank: int, message: m.ToWorker) -> None:
        worker = self.workers[rank]
        if isinstance(message, m.StartEpoch):
            worker.num_dealt[message.plan.epoch] += message.plan.num_batches
        self._at(self._arrival("down", rank, message), lambda: self._deliver(worker, message))

    def _deliver(self, worker: SimRank, message: Any) -> None:
        if worker.rank in self._ended:
            return
        worker.inbox.append(message)
        if worker.rank in self._waiting:
            # A thread wakes up late and finds all messages that arrived meanwhile.
            self._waiting.remove(worker.rank)
            wake_s = self.draw(self.schedule.wake_s)
            self._at(self.now + wake_s, lambda: self._resume(worker, worker.inbox.popleft()))

    # -- the coordinator ----------------------------------------------------------------

    def _put(self, event: m.Event) -> None:
        """An event arrives in the coordinator's inbox."""
        self.trace.append((self.now, "inbox <-", event))
        self.checks.on_event(event)
        self.inbox.append(event)
        if not self.schedule.busy_s:
            self._serve()
        elif not self._comes:
            self._comes = True
            self._at(self.now + self.draw(self.schedule.busy_s), self._serve)

    def _serve(self) -> None:
        """The coordinator's thread handles all messages of its inbox and waits again."""
        self._comes = False
        while self.inbox:
            self._handle(self.inbox.popleft())

    def _handle(self, event: m.Event) -> None:
        self.trace.append((self.now, "coordinator <-", event))
        if isinstance(event, m.SaveRequested):
            self.checks.saves.on_request(event.ticket)
        commands = self.machine.handle(event, self.now)
        for command in commands:
            self.trace.append((self.now, "coordinator ->", command))
            self.checks.on_command(command)
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Send():
                if isinstance(command.message, m.Update):
                    assert isinstance(command.message.average, Traced)
                    self.result = command.message.average
                elif isinstance(command.message, m.RequestParams):
                    # No average is in flight; the last one may be that of a collective.
                    self.result = replace(self.result, base=self._held_by_all())
                    self._delivers = True
                elif isinstance(command.message, m.SyncNow):
                    self._delivers = False
                elif isinstance(command.message, m.Regroup):
                    self._regroup(command.message)
                self._send_to_worker(command.rank, command.message)
            case Average() if command.round == SAVE_ROUND:
                mean = m.Payload(params=(), buffers=("mean",))  # type: ignore[arg-type]
                done = m.Averaged(round=SAVE_ROUND, average=mean, kept=mean)
                time = self.now + self.draw(self.schedule.average_s)
                self._at(time, lambda: self._put(done))
            case SaveCheckpoint():
                self.checks.saves.on_save(command)
                self.saved.append(command)
            case Average():
                self.average_pending = True
                self._at(self.now + self.draw(self.schedule.average_s), self._averager(command))
            case AbortCollective():
                self._abort(command.generation)
            case m.BackendChosen():
                self.choices.append(command)
            case ReportStall():
                if not self.schedule.collective_timeout_s:  # otherwise a late rank may stall
                    raise Violation(STUCK) from command.error

    def _regroup(self, message: m.Regroup) -> None:
        generation = message.generation
        if generation not in self._groups:
            self._backends[generation] = message.backend
            if self._may_fail(generation) and self._lot(self.schedule.unconnected_chance):
                self.unconnected.add(generation)
        self._groups[generation] = message.ranks

    def _may_fail(self, generation: int) -> bool:
        """True if the group's backend is the failing one, and another is usable."""
        c = self.schedule.config
        meeting = [b for b in c.backends if b is not AverageBackend.CPU]
        return bool(c.alternatives) and self._backends[generation] is meeting[0]

    def _averager(self, job: Average) -> Callable[[], None]:
        def finish() -> None:
            parts = [p for p in job.payloads if isinstance(p, Traced)]
            self.average_pending = False
            mean = average(parts, job.weights, self.weight_of)
            if parts[0].held is not None:
                mean = self._averaged(job, mean, parts)
            divergences = tuple((r, self.draw(self.schedule.divergence)) for r in job.ranks)
            self._put(
                m.Averaged(
                    round=job.round,
                    average=mean,
                    num_samples=sum(job.weights),
                    divergences=divergences,
                    compute_s=self.schedule.average_s,
                    kept=_kept(mean) if job.keep else None,
                )
            )

        return finish

    def _averaged(self, job: Average, mean: Traced, parts: Sequence[Traced]) -> Traced:
        """The average of real tensors, by the coordinator's averager."""
        made = self._mixer.average(job.payloads, job.weights, job.squares).average
        held = self._effects(parts, job.weights)
        return replace(
            mean,
            params=made.params,
            buffers=made.buffers,
            other_buffers=made.other_buffers,
            held=held,
        )

    def _effects(self, parts: Sequence[Traced], weights: Sequence[float]) -> Effects:
        local = [[self._place_of(batch) for batch in part.local] for part in parts]
        whole = [part.held.plus(places) for part, places in zip(parts, local, strict=True)]
        return average_effects(whole, weights, local, parts[0].held)

    def _place_of(self, batch: Batch) -> int:
        return batch[0] * self._per_epoch + batch[1]

    def new_replica(self) -> Replica | None:
        """The tensors of a rank, if this run has any."""
        c = self.schedule.config
        if not self._tensors:
            return None
        meets = AverageBackend.CPU not in c.backends
        return Replica(self._place_of, self._per_epoch * c.num_epochs, rounds=meets)

    # -- the workers' threads --------------------------------------------------------------

    def _resume(
        self, worker: SimRank, value: object = None, error: BaseException | None = None
    ) -> None:
        """Let a worker run until it blocks."""
        if worker.rank in self._ended:
            return
        died = self._marked.pop(worker.rank, None)
        if died is not None:
            self.hooks.before_death(worker)
            error = died
        try:
            op: Op = worker.steps.send(value) if error is None else worker.steps.throw(error)
            while op is GET and worker.inbox:
                op = worker.steps.send(worker.inbox.popleft())
        except StopIteration:
            self._end(worker)
            return
        except Violation:
            raise
        except Vanish:
            self._die(worker, None)
            return
        except Exception as error:
            self._die(worker, error)
            return
        if isinstance(op, Join):
            self._join(worker, op)
        elif op is GET:
            self._waiting.add(worker.rank)
        else:
            assert isinstance(op, float | int)
            self._at(self.now + op, lambda: self._resume(worker))

    def wake_enders(self) -> None:
        """Wake the ranks that wait for the parts of others in a validation."""
        for worker in self.workers:
            if worker.part is not None and worker.part.may_end:
                self.wake_at(worker, self.now)

    def _die(self, worker: SimRank, error: Exception | None) -> None:
        self.dead.add(worker.rank)
        self.evaluations.leave(worker.rank)
        self.wake_enders()
        if error is not None:
            failed = m.Failed(rank=worker.rank, epoch=0, step=worker.num_steps, error=error)
            self.send_to_coordinator(worker.rank, failed)
        self._end(worker)

    def _end(self, worker: SimRank) -> None:
        self.send_to_coordinator(worker.rank, m.ThreadEnded(rank=worker.rank))
        self._ended.add(worker.rank)

    def _mark(self, death: Death) -> None:
        """The worker dies as soon as its thread runs again."""
        worker = self.workers[death.rank]
        self._marked[death.rank] = Vanish() if death.vanishes else UserError("raised")
        self.trace.append((self.now, f"rank {death.rank} dies", death))
        if death.rank in self._waiting:
            self._waiting.remove(death.rank)
            self._resume(worker)

    # -- collectives ---------------------------------------------------------------------

    def _join(self, worker: SimRank, join: Join) -> None:
        self.trace.append((self.now, f"rank {worker.rank} joins", join.key))
        generation, ranks = join.generation, self._groups[join.generation]
        if self._is_broken(generation):
            self._at(self.now, lambda: self._resume(worker, error=CollectiveAborted("aborted")))
            return
        joined = self._joined.setdefault(generation, {})
        if any(other.key != join.key for other in joined.values()):
            peers = {rank: other.key for rank, other in joined.items()}
            raise Violation(f"rank {worker.rank} joins {join.key}, its peers {peers}")
        if worker.rank not in ranks:
            raise Violation(f"rank {worker.rank} joins {join.key} of {ranks}")
        joined[worker.rank] = join
        if len(joined) == len(ranks):
            self._reduce(generation)
        elif self.schedule.collective_timeout_s:
            late = self.now + self.schedule.collective_timeout_s
            self._at(late, lambda: self._time_out(worker, join))

    def _is_broken(self, generation: int) -> bool:
        return self._over or generation in self._broken

    def _reduce(self, generation: int) -> None:
        joined = sorted(self._joined.pop(generation).items())
        state: Traced | None = None
        name = joined[0][1].key[0]
        faulty = name in ("round", "step") and self._may_fail(generation)
        if faulty and self._lot(self.schedule.fault_chance):
            self._fail(generation, joined)
            return
        if name != "regroup":
            states = [j.state for _, j in joined]
            weights = [j.weight if name != "buffers" else 0 for _, j in joined]
            if name == "step":
                loads = {rank: j.loads for rank, j in joined}
                batches = self.checks.on_reduced(loads, weights, joined[0][1].num_steps)
                # The average is checked by batches, whichever ranks trained their pieces.
                states[0] = replica(states[0].base, batches)
                weights = [sum(map(self.weight_of, batches)), *[0] * (len(joined) - 1)]
            state = average(states, weights, self.weight_of)
            if joined[0][1].brought is not None:
                brought = tuple(j.brought for _, j in joined)
                held = self._effects([j.state for _, j in joined], weights)
                state = replace(state, brought=brought, held=held)
        time = self.now + self.draw(self.schedule.sync_s)
        for rank, _ in joined:
            # The ranks leave one after the other, in any order.
            later = time + self.draw(self.schedule.delay_s) + self.draw(self.schedule.linger_s)
            self._at(later, self._leaver(self.workers[rank], generation, state))

    def _fail(self, generation: int, joined: Sequence[tuple[int, Join]]) -> None:
        """The exchange fails on one rank, which breaks the group for the others.

        Some of them may have the average already, in a round.
        """
        failing = self.rng.choice([rank for rank, _ in joined])
        self._broken.add(generation)
        self.num_faults += 1
        spared: Traced | None = None
        if joined[0][1].key[0] == "round" and joined[0][1].brought is None:
            weights = [join.weight for _, join in joined]
            spared = average([join.state for _, join in joined], weights, self.weight_of)
        for rank, _ in joined:
            worker = self.workers[rank]
            later = self.now + self.draw(self.schedule.delay_s)
            if rank != failing and spared is not None and self._lot(0.5):
                self._at(later, partial(self._resume, worker, spared))
                continue
            error = CollectiveAborted("the exchange failed")
            error.failed = rank == failing
            self._at(later, partial(self._resume, worker, error=error))

    def _leaver(self, worker: SimRank, generation: int, state: Traced | None) -> Callable[[], None]:
        def leave() -> None:
            # A group that breaks meanwhile may lose the result on some ranks only.
            if self._is_broken(generation) and self._lot(self.schedule.torn_chance):
                self._resume(worker, error=Torn(state))
            else:
                self._resume(worker, state)

        return leave

    def _time_out(self, worker: SimRank, join: Join) -> None:
        if self._joined.get(join.generation, {}).get(worker.rank) is not join:
            return
        self.trace.append((self.now, f"rank {worker.rank} waits", "too long"))
        del self._joined[join.generation][worker.rank]
        self._abort(join.generation)
        self._resume(worker, error=CollectiveTimeout("too long"))

    def _abort(self, generation: int | None) -> None:
        self.gate.abort(generation)
        self.wake_enders()
        if generation is None:
            self._over = True
        else:
            self._broken.add(generation)
        for broken in sorted(self._joined):
            if self._is_broken(broken):
                for rank in sorted(self._joined.pop(broken)):
                    self._resume(self.workers[rank], error=CollectiveAborted("aborted"))

    # -- the run -----------------------------------------------------------------------

    def run(self) -> Simulation:
        """Run to the end.

        Raises:
            SimulationFailed: An invariant broke, or nothing can happen any more.
        """
        try:
            self._run()
        except Exception as error:
            raise SimulationFailed(self._report(error)) from error
        return self

    def _run(self) -> None:
        assert self.schedule.config.backend is not AverageBackend.AUTO
        for worker in self.workers:
            self._resume(worker)
        if self.schedule.stop_at_s is not None:
            self._at(self.schedule.stop_at_s, lambda: self._put(m.StopRequested()))
        for number, time in enumerate(self.schedule.saves_at_s):
            request = m.SaveRequested(ticket=number)
            self._at(time, partial(self._put, request))
        for death in self.schedule.deaths:
            self._at(death.at_s, partial(self._mark, death))
        while not (self.machine.done and len(self._ended) == len(self.workers)):
            deadline = self.machine.deadline
            if deadline is not None and (not self._heap or deadline < self._heap[0][0]):
                self.now = max(self.now, deadline)
                self._handle(m.Tick())
                self._serve()
            elif self._heap:
                self.now, _, action = heapq.heappop(self._heap)
                action()
            else:
                raise Violation(STUCK)
            self.num_events += 1
            if self.num_events > MAX_EVENTS:
                raise Violation(f"{MAX_EVENTS} events and no end")
        self.checks.at_end()

    def _report(self, error: BaseException) -> str:
        history = "\n".join(f"{t:10.6f}  {who:<16} {what}" for t, who, what in self.trace)
        states = "\n".join(
            f"rank {w.rank}: {w.protocol.state.value}, {w.protocol.batches} since the round, "
            f"{len(w.protocol.plans)} plans wait, {self.machine.run_state.ranks[w.rank]}"
            for w in self.workers
        )
        return (
            f"seed {self.schedule.seed}: {type(error).__name__}: {error}\n\n{history}\n\n"
            f"{self.schedule}\n\n{self.machine.phase} {self.machine.rounds.round.state}\n{states}\n"
            f"replay: python -m tests.simulation.replay --seed {self.schedule.seed}"
            f"{' --late' if self.schedule.late else ''}"
        )


def _kept(mean: Traced) -> Traced:
    """A copy of an average, whose own memory is reused."""
    copied = clone_payload(mean)
    return replace(
        mean, params=copied.params, buffers=copied.buffers, other_buffers=copied.other_buffers
    )


def simulate(
    seed: int,
    hooks: Hooks | None = None,
    draw: Callable[[int], Schedule] = draw_schedule,
    *,
    tensors: bool = False,
) -> Simulation:
    """Run the schedule of a seed to its end."""
    return Simulation(draw(seed), hooks, tensors=tensors).run()
