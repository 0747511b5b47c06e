"""A run that is one machine's part of a cluster."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

import torch

from coordinator import messages as m
from coordinator.cluster.facts import Facts
from coordinator.cluster.ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.member import (
    AdoptState,
    ApplyRound,
    CaptureFailed,
    Commit,
    Committed,
    Finish,
    FormQuorum,
    Gathered,
    GatherFacts,
    GatherFailed,
    Idle,
    Member,
    MemberCommand,
    MemberEvent,
    QuorumFailed,
    QuorumFormed,
    ReduceChanges,
    ReduceDone,
    Reject,
    RequestCapture,
    ResetEngine,
    ResumeGrant,
    RunReady,
    Stop,
)
from coordinator.config import AverageBackend
from coordinator.machine import Coordinator
from coordinator.messages import Payload, SaveCheckpoint, SaveFailed
from coordinator.metrics import EpochAccumulator, EpochMetrics, metrics_from_state, metrics_state
from coordinator.state import Phase, Statistics
from runtime.checkpoint.format import CheckpointData, plain_key
from runtime.checkpoint.resume import ResumePoint
from runtime.cluster.checkpointer import (
    KEY,
    ClusterCheckpointer,
    KeepOptions,
    cluster_state,
    of_resumed,
)
from runtime.cluster.engine import EngineClosed, EngineError, PeerRefused, Quorum, State
from runtime.cluster.grants import NOTHING, Account, machine_tallies, run_state
from runtime.cluster.settings import ClusterSettings
from runtime.cluster.tensors import (
    contribution,
    difference,
    from_tensors,
    from_the_wire,
    on_the_wire,
    split,
    to_tensors,
)
from runtime.core.errors import CheckpointError, ClusterError, RunAborted
from runtime.core.signals import INTERRUPTS

logger = logging.getLogger(__name__)


LEAVE_S = 30.0
"""How long a machine that stops tries to hand over what it has trained, in seconds, once the
others are due to come to a round."""


BUILD_S = 3600.0
"""How long building the model anew may take, in seconds."""


class ClusterRun:
    """Runs one machine's part of a cluster: a run inside, and rounds with the other machines.

    A thread of its own, ``cluster``, owns the engine and waits for the network; the workers of
    the run inside never do. When the machine has to go on from another's state, because it came
    late or was cut off, the run inside is replaced by one that begins there.

    Args:
        settings: How to take part.
        data: What of the data must be alike.
        make_run: Makes the run inside.
        keep: When to write checkpoints, and where.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        data: DataFacts,
        make_run: Callable[[ClusterHooks], InnerRun],
        keep: KeepOptions,
    ) -> None:
        self._keeper = ClusterCheckpointer(keep)
        self._settings = settings
        self._data = data
        self._make_run = make_run
        self._machine = settings.engine.machine
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="cluster", daemon=True)
        self._inner = make_run(self._seat(None))
        resume = self._inner.resumed
        self._resumed = None if resume is None else of_resumed(resume)
        self.devices = self._inner.devices
        self.total_batches = self._inner.total_batches
        self._listener: Any = None  # the handle; see runtime.run.Listener
        self._engine: Any = None
        self._member: Member | None = None
        self._commands: deque[MemberCommand] = deque()
        self._account = Account()
        self._capturing = False
        self._leaving = False  # with the round in progress
        self._delta_is_new = False  # told to the run inside, and in no capture since
        self._share: SaveCheckpoint | None = None  # the last capture of the run inside
        # What the replicas hold but for what they have trained since: the last capture, or what
        # the last round has made of it.
        self._own: Payload | None = None
        self._global: Payload | None = None
        self._sums: list[torch.Tensor] = []
        self._quorum: Quorum | None = None
        self._facts: tuple[Facts, ...] = ()  # of the last round
        self._round_began = 0.0
        self._closed: list[EpochMetrics] = []
        if resume is not None:
            self._closed = [metrics_from_state(saved) for saved in resume.run["metrics"]]
        self._num_published = len(self._closed)
        self._num_elsewhere = 0
        self._later: deque[Stop] = deque()
        self._result: Payload | None = None
        self._result_given = False  # to the run inside, before it made its own of what it has
        self._ended: _Ended | None = None
        self._over = False
        self._aborted = False
        self._num_runs = 0
        self._num_grants = 0  # that the run inside was told of
        self._stopped = False

    def _seat(self, resume: ResumePoint | None) -> ClusterHooks:
        told = {"idle": True, "began": False, "grants": 0}

        def result() -> Payload | None:
            self._result_given = self._result is not None
            return self._result

        def look(machine: Coordinator, event: m.Event) -> None:
            if isinstance(event, m.ClusterRoundDone):
                told["idle"] = False
                told["grants"] += 1
            if not told["began"] and machine.phase is Phase.RUNNING:
                told["began"] = True
                self._news.put(_Began())
            elif told["began"] and not told["idle"] and machine.idle:
                told["idle"] = True
                self._news.put(_Idle(told["grants"]))

        return ClusterHooks(
            machine=self._machine,
            resume=resume,
            look=look,
            take_share=self._news.put,
            result=result,
        )

    # What the handle calls, from any thread.

    def start(self, listener: Any) -> None:
        """Reach the cluster, and start everything.

        Raises:
            EngineError: The lighthouse cannot be reached.
        """
        self._listener = listener
        self._engine = self._settings.connect(self._settings.engine, self._offer)
        try:
            self._inner.start(self)
            INTERRUPTS.add(self)
            self._thread.start()
        except BaseException:
            INTERRUPTS.remove(self)
            self._inner.abort()
            self._inner.wait_threads()
            self._engine.close()
            raise

    @property
    def backend(self) -> AverageBackend:
        """The transport in use on this machine."""
        return self._inner.backend

    @property
    def backend_reason(self) -> str:
        """Why, in a sentence."""
        return self._inner.backend_reason

    def stop(self, *, everywhere: bool = False) -> None:
        """Leave the cluster in order: the others go on, unless all shall stop.

        The run inside goes on until the last round: what it is told meanwhile of the others'
        training has to be in what it hands over.
        """
        self._news.put(Stop(everywhere=everywhere))
        self._leave_in_time(nothing_to_say=not everywhere and not self._account.used)

    def _leave_in_time(self, *, nothing_to_say: bool = False) -> None:
        """Whoever stops does not wait for ever for machines that do not come."""
        if not self._stopped:
            self._stopped = True
            within_s = self._settings.period_s + LEAVE_S + self._settings.engine.timeout_s
            self._engine.give_up(0.0 if nothing_to_say else within_s)

    def abort(self) -> None:
        """End at once; the others notice."""
        self._aborted = True
        self._inner.abort()
        self._engine.give_up(0.0)

    def save(self, timeout_s: float) -> CheckpointData:
        """The state after the next round between machines, or the last one."""
        if self.owns_current_thread():
            raise RuntimeError(
                "save() waits for a round between machines, which waits for this callback: call "
                "it from another thread"
            )
        return self._keeper.ask(timeout_s)

    def owns_current_thread(self) -> bool:
        """Whether the caller is a callback of this run."""
        return self._inner.owns_current_thread()

    def wait_threads(self, timeout_s: float | None = None) -> None:
        """Wait until the cluster's thread has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def statistics(self) -> Statistics:
        """A snapshot of this machine's counters."""
        return self._inner.statistics()

    def watched(self, started: float, end: Any) -> Any:
        """What a monitor may see of this machine's part."""
        return self._inner.watched(started, end)

    # Called by the run inside, on its coordinator's thread.

    def publish(self, metrics: EpochMetrics) -> None:
        """An epoch has closed."""
        if metrics.epoch >= self._num_published:
            self._num_published = metrics.epoch + 1
            self._listener.publish(metrics)

    def finish(self, state: Any, error: BaseException | None) -> None:
        """The run inside is over."""
        self._news.put(_Ended(state, error))

    # On the cluster's thread.

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            self._await(_Began)
            self._join()
            while not self._over:
                self._turn()
        except EngineClosed as closed:
            error = self._why_closed(closed)
        except BaseException as caught:
            logger.exception("machine %s leaves the cluster", self._machine)
            error = caught
        finally:
            self._end(error)

    def _why_closed(self, closed: EngineClosed) -> BaseException | None:
        if self._aborted:
            return RunAborted("the run was aborted")
        if self._stopped:
            if not self._account.used:
                return None
            logger.warning(
                "machine %s could not hand over what it trained last: the others train it again",
                self._machine,
            )
            return None
        return closed

    def _join(self) -> None:
        """The run inside has its first weights: see what the others have."""
        self._inner.tell(m.ClusterCheckpointRequested(reserve_s=0.0))
        self._share = self._await(SaveCheckpoint)
        self._own = self._global = self._share.payload
        data = self._data
        ledger = ClusterLedger(
            settings={
                **data.settings,
                "model": self._inner.model_digest,
                "outer": self._settings.outer.name,
                "compression": self._settings.engine.compression,
            },
            num_epochs=data.num_epochs,
            batches_per_epoch=data.num_batches,
            period_s=self._settings.period_s,
            max_batches=data.max_batches,
        )
        if self._resumed is not None:
            try:
                ledger.load_state_dict(self._resumed["ledger"])
                tensors = self._resumed["tensors"]
                self._global, outer = from_tensors(tensors, self._share.payload)
                self._settings.outer.load_state(outer)
            except ValueError as error:
                raise CheckpointError(f"resume(path): {error}") from error
        self._keeper.begin(ledger)
        leave_s = self._settings.period_s + LEAVE_S
        self._member = Member(self._machine, ledger, leave_s=leave_s)
        self._feed(RunReady())

    def _await(self, kind: type[Any]) -> Any:
        """Wait for some news; the run inside may end instead, which ends this one.

        Raises:
            ClusterError: It did not come.
        """
        while True:
            try:
                news = self._news.get(timeout=BUILD_S)
            except queue.Empty:
                raise ClusterError(
                    f"the run of this machine did not begin in {BUILD_S:g} s"
                ) from None
            if isinstance(news, kind):
                return news
            if isinstance(news, _Ended):
                self._ended = news
                raise news.error or EngineClosed("the run was stopped before it began")
            if isinstance(news, SaveFailed):
                raise news.error
            if isinstance(news, Stop):
                self._later.append(news)
                if self._member is None:
                    self._inner.stop()

    def _feed(self, event: MemberEvent) -> None:
        assert self._member is not None
        logger.debug("machine %s: %s", self._machine, event)
        self._commands.extend(self._member.handle(event, time.monotonic()))

    def _turn(self) -> None:
        """Do what is to be done, or wait for what comes next."""
        assert self._member is not None
        if self._commands:
            self._execute(self._commands.popleft())
            return
        deadline = self._member.deadline
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            news = self._later.popleft() if self._later else self._news.get(timeout=wait_s)
        except queue.Empty:
            self._feed(m.Tick())
            return
        match news:
            case _Ended():
                self._on_ended(news)
            case SaveCheckpoint() | SaveFailed():
                self._on_share(news)
            case _Idle():
                if news.num_grants == self._num_grants:  # else there is more on its way
                    self._feed(Idle())
            case Stop():
                self._feed(news)
            case _Began():
                pass
            case _:
                assert_never(news)

    def _on_ended(self, news: _Ended) -> None:
        self._ended = news
        if news.error is not None:
            raise news.error
        if self._capturing:  # it ended before it could answer, and has left its last state
            self._answer_capture()
        if self._result is None:
            self._leave_in_time()
            self._feed(Stop())

    def _on_share(self, news: SaveCheckpoint | SaveFailed) -> None:
        if isinstance(news, SaveCheckpoint):
            self._share = news
            if self._capturing:
                self._answer_capture()
        elif self._capturing:
            self._capturing = False
            self._feed(CaptureFailed(error=str(news.error)))

    def _answer_capture(self) -> None:
        assert self._member is not None
        assert self._share is not None
        self._capturing = False
        if self._share.final and self._delta_is_new:
            # It ended before all ranks took what the others have changed, which its state would
            # take back.
            self._feed(NOTHING)
            return
        self._own, self._delta_is_new = self._share.payload, False
        captured = self._account.capture(self._share, self._member.ledger)
        self._feed(replace(captured, kept=()) if self._leaving else captured)

    def _execute(self, command: MemberCommand) -> None:
        logger.debug("machine %s: %s", self._machine, command)
        match command:
            case FormQuorum():
                self._form_quorum()
            case AdoptState():
                self._adopt()
            case ResetEngine():
                self._engine.reset(command.step)
            case RequestCapture():
                self._take_capture(command.reserve_s)
            case GatherFacts():
                self._gather(command)
            case ReduceChanges():
                self._reduce(command)
            case Commit():
                self._vote(command.ok)
            case ApplyRound():
                self._apply(command)
            case ResumeGrant():
                logger.info("machine %s: no round: %s", self._machine, command.reason)
                self._grant(m.ClusterRoundDone(epochs=self._account.resume()))
            case Reject():
                raise ClusterError(command.reason)
            case Finish():
                self._over = True
            case _:
                assert_never(command)

    def _form_quorum(self) -> None:
        try:
            self._quorum = self._engine.quorum()
            self._round_began = time.monotonic()
        except EngineError as error:
            if isinstance(error, PeerRefused) and self._machine in error.machines:
                raise ClusterError(f"the cluster does not take this machine: {error}") from error
            self._feed(QuorumFailed(error=str(error)))
            return
        healed = self._quorum.healed
        self._feed(
            QuorumFormed(
                members=self._quorum.members,
                healed=None if healed is None else healed.meta["ledger"],
            )
        )

    def _offer(self) -> State:
        """The state that heals a peer."""
        assert self._member is not None
        assert self._global is not None
        return State(
            tensors=to_tensors(self._global, self._settings.outer.state()),
            meta={
                "ledger": self._member.ledger.state_dict(),
                "metrics": [metrics_state(metrics) for metrics in self._closed],
            },
        )

    def _adopt(self) -> None:
        """What came with the quorum is this machine's state from here on."""
        assert self._quorum is not None
        assert self._quorum.healed is not None
        assert self._global is not None
        state, outer = from_tensors(self._quorum.healed.tensors, self._global)
        self._settings.outer.load_state(outer)
        self._global = state
        self._closed = [metrics_from_state(saved) for saved in self._quorum.healed.meta["metrics"]]

    def _take_capture(self, reserve_s: float) -> None:
        self._capturing, self._leaving = True, reserve_s == 0
        if self._ended is not None:
            self._answer_capture()
        else:
            self._inner.tell(m.ClusterCheckpointRequested(reserve_s=reserve_s))

    def _gather(self, command: GatherFacts) -> None:
        self._leaving = command.facts.leaving
        try:
            found = self._engine.gather(command.facts.to_json())
        except EngineError as error:
            self._feed(GatherFailed(error=str(error)))
            return
        assert self._quorum is not None
        facts = []
        for machine, told in zip(self._quorum.members, found, strict=True):
            try:
                facts.append(Facts.from_json(told))
            except ValueError as error:
                self._feed(GatherFailed(error=f"machine {machine} tells no facts: {error}"))
                return
        self._facts = tuple(facts)
        self._feed(Gathered(facts=self._facts))

    def _reduce(self, command: ReduceChanges) -> None:
        assert self._quorum is not None
        assert self._global is not None
        rank, weights = self._quorum.rank, command.weights
        own = self._own if weights[rank] else None
        heaviest = command.samples.index(max(command.samples)) == rank
        scale = weights[rank] / sum(weights)
        self._sums = contribution(self._global, own, scale, heaviest=heaviest)
        try:
            self._engine.all_reduce(self._sums)
        except EngineError as error:
            logger.info("machine %s: %s", self._machine, error)
            self._feed(ReduceDone(ok=False))
            return
        self._feed(ReduceDone(ok=True))

    def _vote(self, ok: bool) -> None:
        try:
            committed = self._engine.commit(ok)
        except EngineError as error:
            logger.info("machine %s: %s", self._machine, error)
            committed = False
        self._feed(Committed(ok=committed))

    def _apply(self, command: ApplyRound) -> None:
        """The round is committed: take what it has changed, and what there is to train."""
        assert self._member is not None
        assert self._global is not None
        old = self._global
        if command.reduced:
            params, buffers, others = split(self._sums, old)
            self._global = Payload(
                params=tuple(self._settings.outer.step(old.params, params)),
                buffers=tuple(
                    from_the_wire(on_the_wire(b).sub(s), b)
                    for b, s in zip(old.buffers, buffers, strict=True)
                ),
                other_buffers=tuple(
                    from_the_wire(s, t) for t, s in zip(old.other_buffers, others, strict=True)
                ),
            )
        self._sums = []
        ledger = self._member.ledger
        used = self._account.used or bool(self._closed)
        grants = self._account.commit(command.grant, ledger)
        closed = [self._close(e) for e in command.closed if e.epoch >= len(self._closed)]
        if command.restart:
            self._num_runs += 1
            if used or self._closed:
                self._replace_inner()
                closed, grants = [], self._account.commit(command.grant, ledger)
        if ledger.ended or self._leaving:
            self._result = self._global
        delta = None
        if self._own is not self._global:
            assert self._own is not None
            delta = difference(self._global, self._own)
        elsewhere = self._account.num_elsewhere(ledger)
        if self._leaving or (ledger.stopped and not ledger.complete):
            self._inner.stop()  # with the state of all machines as its result
        elif self._ended is None:
            self._delta_is_new = self._delta_is_new or delta is not None
            self._grant(
                m.ClusterRoundDone(
                    epochs=(*closed, *grants),
                    delta=delta,
                    num_batches=max(0, elsewhere - self._num_elsewhere),
                    over=ledger.ended,
                    state=self._global,
                    round=self._told_round(ledger),
                )
            )
        self._own, self._num_elsewhere = self._global, elsewhere
        self._keeper.after_round(ledger, self._checkpoint)

    def _grant(self, granted: m.ClusterRoundDone) -> None:
        self._num_grants += 1
        self._inner.tell(granted)

    def _told_round(self, ledger: ClusterLedger) -> m.MachineRound:
        """What timelines and monitors show of the round."""
        return m.MachineRound(
            step=ledger.step,
            machines=tuple(told.machine for told in self._facts),
            num_samples=tuple(told.num_samples for told in self._facts),
            num_granted=tuple(len(ledger.grants[told.machine]) for told in self._facts),
            round_s=time.monotonic() - self._round_began,
        )

    def _close(self, closed: ClosedEpoch) -> m.EpochGrant:
        """What the run inside is told of an epoch that has closed."""
        data = self._data
        metrics = EpochAccumulator(0).close(
            epoch=closed.epoch,
            epoch_s=0.0,
            num_samples=data.num_samples,
            devices=(),
            machine=self._machine,
            others=machine_tallies(closed),
        )
        self._closed.append(metrics)
        return self._account.close(
            closed,
            num_batches=data.num_batches,
            num_samples=data.num_samples,
            own=f"{self._machine}/{self._num_runs}",
        )

    def _replace_inner(self) -> None:
        """Begin the run inside anew, from the state of all machines."""
        assert self._member is not None
        logger.warning(
            "machine %s goes on from the others' state: what it trained since its last round is "
            "trained by whoever has these batches now",
            self._machine,
        )
        point = ResumePoint(self._checkpoint(), "the state of the cluster")
        old, self._inner = self._inner, self._make_run(self._seat(point))
        old.abort()
        self._await_end()
        self._ended = None
        self._delta_is_new = False
        self._num_grants = 0
        self._account = Account()
        self._own = self._global
        self._num_elsewhere = self._account.num_elsewhere(self._member.ledger)
        self._inner.start(self)
        if self._aborted:  # perhaps the old one alone
            self._inner.abort()
        self._await(_Began)
        for metrics in self._closed[self._num_published :]:
            self.publish(metrics)

    def _checkpoint(self) -> CheckpointData:
        """The state of all machines, with what this machine's ranks have of their own."""
        assert self._member is not None
        assert self._share is not None
        assert self._global is not None
        ledger, outer = self._member.ledger, self._settings.outer.state()
        run = run_state(self._share.run, ledger, self._closed)
        run[KEY] = cluster_state(ledger, self._global, outer)
        command = replace(
            self._share,
            payload=self._global,
            run=run,
            epoch=len(self._closed),
            global_step=run["global_step"],
        )
        return self._inner.checkpoint(command)

    def _end(self, error: BaseException | None) -> None:
        """Everything is over: wait for the run inside, and tell the handle, whatever fails."""
        state: Any = None
        try:
            if self._ended is None:
                if error is not None:
                    self._inner.abort()
                elif self._result is None:
                    self._inner.stop()
            ended = self._await_end()
            state, error = ended.state, error or ended.error
            if error is None and state is not None and self._result is not None:
                state = self._of_all_machines(state)
        except BaseException as caught:
            error = error or caught
        for close in (self._engine.close, self._keeper.close):
            try:
                close()
            except BaseException as caught:
                error = error or caught
        INTERRUPTS.remove(self)
        self._listener.finish(None if error else state, error)

    def _of_all_machines(self, state: Any) -> Any:
        """The ``TrainedState`` of the run inside, with a round that came after its end in it."""
        for metrics in self._closed[self._num_published :]:
            self.publish(metrics)
        state = replace(state, metrics=(*state.metrics, *self._closed[len(state.metrics) :]))
        if self._result_given:
            return state
        weights = {plain_key(key): t for key, t in self._checkpoint().weights.items()}
        return replace(
            state,
            params={name: weights.get(name, t) for name, t in state.params.items()},
            buffers={name: weights.get(name, t) for name, t in state.buffers.items()},
        )

    def _await_end(self) -> _Ended:
        """Wait for the run inside; what it told before is of no use any more."""
        while self._ended is None:
            news = self._news.get()
            if isinstance(news, _Ended):
                self._ended = news
            elif isinstance(news, Stop):
                self._later.append(news)
        return self._ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHooks:
    """What a run of one machine is given by the cluster.

    Attributes:
        machine: The machine's name.
        resume: From where the run goes on; ``None``: from the beginning.
        look: Called on the coordinator's thread after each event.
        take_share: Called there with each capture that was asked for.
        result: The state of all machines, once all is trained; else ``None``.
    """

    machine: str
    resume: ResumePoint | None
    look: Callable[[Coordinator, m.Event], None]
    take_share: Callable[[SaveCheckpoint | SaveFailed], None]
    result: Callable[[], Payload | None]


class InnerRun(Protocol):
    """The run of one machine; see :class:`~runtime.run.Run`."""

    devices: tuple[torch.device, ...]
    total_batches: int
    model_digest: str
    resumed: ResumePoint | None

    def start(self, listener: Any) -> None:
        """Start everything."""

    def tell(self, event: m.Event) -> None:
        """Put an event into the coordinator's inbox."""

    def stop(self) -> None:
        """End at a step boundary."""

    def abort(self) -> None:
        """End at once."""

    def wait_threads(self, timeout_s: float | None = None) -> None:
        """Wait until the coordinator's thread has ended."""

    def owns_current_thread(self) -> bool:
        """Whether the caller is a callback of this run."""

    def checkpoint(self, command: SaveCheckpoint) -> CheckpointData:
        """The whole state under the names of the model."""

    def statistics(self) -> Statistics:
        """A snapshot of counters."""

    def watched(self, started: float, end: Any) -> Any:
        """What a monitor may see."""

    @property
    def backend(self) -> AverageBackend:
        """The transport in use."""

    @property
    def backend_reason(self) -> str:
        """Why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What of the data every machine must have alike, and what counting takes.

    Attributes:
        settings: Names and values, as JSON.
        num_epochs: Epochs of the run.
        num_batches: Batches of an epoch.
        num_samples: Samples in them.
        max_batches: Batches of the whole run; ``None``: all of its epochs.
    """

    settings: Mapping[str, Any]
    num_epochs: int
    num_batches: int
    num_samples: int
    max_batches: int | None


@dataclass(frozen=True, slots=True)
class _Began:
    """The inner run stands idle with its first weights."""


@dataclass(frozen=True, slots=True)
class _Idle:
    """The run inside has trained all that it was granted, in so many grants."""

    num_grants: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """The inner run is over."""

    state: Any
    error: BaseException | None


_News = _Began | _Idle | _Ended | Stop | SaveCheckpoint | SaveFailed
