"""ClusterRun: one machine's part of a training run on several machines."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, assert_never

import torch

from coordinator import messages as m
from coordinator.cluster.cluster_ledger import ClosedEpoch, ClusterLedger
from coordinator.cluster.machine_report import MachineReport
from coordinator.cluster.member import (
    AdoptState,
    ApplyRound,
    Capture,
    Captured,
    Commit,
    FormQuorum,
    Gather,
    Member,
    MemberAction,
    Reduce,
    ResetEngine,
    ResumeGrant,
    RoundFailed,
    Wait,
)
from coordinator.codec import decode, encode
from coordinator.machine import Coordinator
from coordinator.messages import Payload, SaveCheckpoint, SaveFailed
from coordinator.metrics import EpochAccumulator, EpochMetrics
from coordinator.run_state import Phase
from runtime.checkpoint.content import CheckpointData, SavedCluster
from runtime.checkpoint.format import plain_key
from runtime.checkpoint.resume import ResumePoint
from runtime.cluster.checkpointer import (
    ClusterCheckpointer,
    ClusterCheckpointOptions,
    resumed_cluster_state,
)
from runtime.cluster.cluster_settings import ClusterSettings
from runtime.cluster.engine import (
    ClusterState,
    EngineClosed,
    PeerRefused,
    Quorum,
    StatusReader,
)
from runtime.cluster.grants import captured, epoch_grants, other_tallies, resumed_run
from runtime.cluster.tensors import (
    contribution,
    difference,
    from_wire,
    named_tensors,
    split,
    state_from_tensors,
    to_wire,
)
from runtime.core.errors import CheckpointError, ClusterError, RunAborted
from runtime.core.signals import INTERRUPTS
from runtime.core.threads import in_own_context

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 30.0
"""Longest time in which a stopping machine tries to hand over what it has trained, in seconds,
after the next round is due."""
BUILD_TIMEOUT_S = 3600.0
"""Longest time to build the model, in seconds."""


class ClusterRun:
    """One machine's part of a cluster: an inner run, and rounds with the other machines.

    The thread ``cluster`` owns the engine and waits for the network; the workers of the inner run
    never do. A machine that is healed, because it joined late or was cut off, replaces its inner
    run by one that starts from the received state.

    Args:
        data: Properties of the data that must be equal on all machines.
        make_run: Creates an inner run.

    Attributes:
        read_status: Returns the record of the run for the lighthouse; set before :meth:`start`.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        data: DataFacts,
        make_run: Callable[[ClusterHooks], InnerRun],
        checkpoints: ClusterCheckpointOptions,
    ) -> None:
        self._checkpointer = ClusterCheckpointer(checkpoints)
        self._settings = settings
        self._data = data
        self._make_run = make_run
        self._machine = settings.engine.machine
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=in_own_context(self._main), name="cluster", daemon=True
        )
        self._inner = make_run(self._cluster_hooks(None))
        resume = self._inner.resumed
        self._resumed = None if resume is None else resumed_cluster_state(resume)
        self.devices = self._inner.devices
        self.total_batches = self._inner.total_batches
        self._listener: Any = None  # the handle; see runtime.run.Listener
        self.read_status: StatusReader | None = None
        self._engine: Any = None
        self._member: Member | None = None
        self._was_granted = False  # batches, to the present inner run
        self._delta_pending = False  # sent to the inner run, and in no capture since
        self._last_capture: SaveCheckpoint | None = None  # made by the inner run
        # The replicas' state without their training since: the last capture, or the global state
        # after the last round.
        self._local: Payload | None = None
        self._global: Payload | None = None
        self._sums: list[torch.Tensor] = []
        self._quorum: Quorum | None = None
        self._reports: tuple[MachineReport, ...] = ()  # gathered in the last round
        self._round_started = 0.0
        self._closed: list[EpochMetrics] = []
        if resume is not None:
            self._closed = list(resume.data.run.metrics)
        self.past_metrics: tuple[EpochMetrics, ...] = tuple(self._closed)
        self._num_published = len(self._closed)
        self._checked_rounds = False
        self._early_stops: list[_StopRequest] = []  # before there was a member
        self._reason = ""  # of the first stop()
        self._result: Payload | None = None
        self._result_given = False  # to the inner run, before it assembled its own
        self._ended: _RunEnded | None = None
        self._aborted = False
        self._num_grants = 0  # sent to the inner run
        self._stopped = False

    def _cluster_hooks(self, resume: ResumePoint | None) -> ClusterHooks:
        progress = {"idle": True, "started": False, "grants": 0}

        def result() -> Payload | None:
            found = self._result  # once: the cluster's thread may set it now
            self._result_given = found is not None
            return found

        def on_event(machine: Coordinator, event: m.Event) -> None:
            if isinstance(event, m.ClusterRoundDone):
                progress["idle"] = False
                progress["grants"] += 1
            if not progress["started"] and machine.phase is Phase.RUNNING:
                progress["started"] = True
                self._inbox.put(_RunStarted())
            elif progress["started"] and not progress["idle"] and machine.idle:
                progress["idle"] = True
                self._inbox.put(_RunIdle(progress["grants"]))

        return ClusterHooks(
            machine=self._machine,
            resume=resume,
            on_event=on_event,
            on_capture=self._inbox.put,
            result=result,
        )

    # Called by the handle, from any thread.

    def start(self, listener: Any) -> None:
        """Connect to the cluster, and start all threads.

        Raises:
            EngineError: The lighthouse cannot be reached.
        """
        self._listener = listener
        self._engine = self._settings.connect(self._settings.engine, self._offer)
        if self._stopped:  # by a callback, or another process: the run is listed already
            self._engine.cancel_after(0.0)
        try:
            if self.read_status is not None:
                self._engine.send_status(self.read_status)
            self._inner.start(self)
            INTERRUPTS.add(self)
            self._thread.start()
        except BaseException:
            INTERRUPTS.remove(self)
            self._inner.abort()
            self._inner.wait_threads()
            self._engine.close()
            raise

    def stop(self, reason: str = "stopped", *, everywhere: bool = False) -> None:
        """Leave the cluster after one more round; the others continue unless ``everywhere``.

        The inner run continues until that round, because the others' changes that it receives
        until then must be in the state that it hands over.
        """
        self._reason = self._reason or reason
        self._inbox.put(_StopRequest(everywhere))
        self._limit_leaving(nothing_to_report=not everywhere and not self._was_granted)

    def _limit_leaving(self, *, nothing_to_report: bool = False) -> None:
        """Limit the time for which a stopping machine waits for the others."""
        if not self._stopped:
            self._stopped = True
            within_s = self._settings.period_s + LEAVE_TIMEOUT_S + self._settings.engine.timeout_s
            if self._engine is not None:  # else start() does
                self._engine.cancel_after(0.0 if nothing_to_report else within_s)

    def abort(self) -> None:
        """End at once; the other machines detect it."""
        self._aborted = True
        self._inner.abort()
        self._engine.cancel_after(0.0)

    def save(self, timeout_s: float) -> CheckpointData:
        """The state after the next round between machines, or after the last."""
        if self.owns_current_thread():
            raise RuntimeError(
                "save() waits for a round between machines, which waits for this callback: call "
                "it from another thread"
            )
        return self._checkpointer.request(timeout_s)

    def owns_current_thread(self) -> bool:
        """True if the caller is a callback of this run."""
        return self._inner.owns_current_thread()

    def wait_threads(self, timeout_s: float | None = None) -> None:
        """Wait until the cluster's thread has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def newest_checkpoint(self) -> Path | None:
        """Directory of the last checkpoint written by this machine."""
        return self._checkpointer.newest

    @property
    def report(self) -> Any:
        """The ``RunReport`` of this machine's part."""
        return self._inner.report

    # Called by the inner run, on its coordinator's thread.

    def publish(self, metrics: EpochMetrics) -> None:
        if metrics.epoch >= self._num_published:
            self._num_published = metrics.epoch + 1
            self._listener.publish(metrics)

    def finish(self, state: Any, error: BaseException | None, note: str = "") -> None:
        self._inbox.put(_RunEnded(state, error))

    # On the cluster's thread.

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            self._await(_RunStarted)
            self._join()
            self._take_part()
        except EngineClosed as closed:
            error = self._closed_reason(closed)
        except BaseException as caught:
            logger.exception("machine %s leaves the cluster", self._machine)
            error = caught
        finally:
            self._end(error)

    def _closed_reason(self, closed: EngineClosed) -> BaseException | None:
        if self._aborted:
            return RunAborted("the run was aborted")
        if self._stopped:
            if not self._was_granted:
                return None
            logger.warning(
                "machine %s could not hand over its last batches: the others train them again",
                self._machine,
            )
            return None
        return closed

    def _join(self) -> None:
        """Create the ledger and the member once the inner run has its initial weights."""
        self._inner.post(m.ClusterCheckpointRequested(reserve_s=0.0))
        self._last_capture = self._await(SaveCheckpoint)
        self._local = self._global = self._last_capture.payload
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
                ledger.restore(self._resumed.ledger)
                tensors = self._resumed.tensors
                self._global, outer = state_from_tensors(tensors, self._last_capture.payload)
                self._settings.outer.load_state(outer)
            except ValueError as error:
                raise CheckpointError(f"resume(path): {error}") from error
        self._checkpointer.start_from(ledger)
        leave_s = self._settings.period_s + LEAVE_TIMEOUT_S
        self._member = Member(self._machine, ledger, time.monotonic, leave_s=leave_s)
        for request in self._early_stops:
            self._member.stop(everywhere=request.everywhere)

    def _take_part(self) -> None:
        """Execute the member's actions until its part is over."""
        assert self._member is not None
        actions = self._member.run()
        result: Any = None
        failure: RoundFailed | None = None
        while True:
            try:
                action = actions.send(result) if failure is None else actions.throw(failure)
            except StopIteration:
                return
            logger.debug("machine %s: %s", self._machine, action)
            result = failure = None
            try:
                result = self._execute(action)
            except RoundFailed as error:
                failure = error
            if self._ended is not None and self._result is None:  # it has stopped by itself
                self._limit_leaving()
                self._member.stop()

    def _execute(self, action: MemberAction) -> Any:
        match action:
            case FormQuorum():
                return self._form_quorum()
            case AdoptState():
                self._adopt()
            case ResetEngine():
                self._engine.reset(action.step)
            case Capture():
                return self._capture(action.reserve_s)
            case Gather():
                return self._gather(action.report)
            case Reduce():
                self._reduce(action)
            case Commit():
                return self._engine.commit(action.ok)
            case ApplyRound():
                self._apply(action)
            case ResumeGrant():
                logger.info("machine %s: no round: %s", self._machine, action.reason)
                self._grant(m.ClusterRoundDone())
            case Wait():
                message = self._receive(action.until)
                # An idle report from before the last grant is void.
                return isinstance(message, _RunIdle) and message.num_grants == self._num_grants
            case _:
                assert_never(action)
        return None

    def _await(self, kind: type[Any]) -> Any:
        """Wait for a message of this type; the end of the inner run ends this one.

        Raises:
            ClusterError: No message within :data:`BUILD_TIMEOUT_S`.
        """
        while True:
            message = self._receive(time.monotonic() + BUILD_TIMEOUT_S)
            if message is None:
                raise ClusterError(
                    f"the run of this machine did not start in {BUILD_TIMEOUT_S:g} s"
                )
            if isinstance(message, kind):
                return message
            if isinstance(message, _RunEnded):
                raise EngineClosed("the run was stopped before it started")
            if isinstance(message, SaveFailed):
                raise message.error

    def _receive(self, until: float | None = None) -> _Message | None:
        """Wait for a message until this time, and record it; ``None``: there was none.

        Raises:
            BaseException: The inner run has failed.
        """
        wait_s = None if until is None else max(0.0, until - time.monotonic())
        try:
            message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None
        match message:
            case _StopRequest():
                self._on_stop(message)
            case SaveCheckpoint():
                self._last_capture = message
            case _RunEnded():
                self._ended = message
                if message.error is not None:
                    raise message.error
        return message

    def _on_stop(self, request: _StopRequest) -> None:
        if self._member is not None:
            self._member.stop(everywhere=request.everywhere)
        else:
            self._early_stops.append(request)
            self._inner.stop(self._reason or "stopped")

    def _capture(self, reserve_s: float) -> Captured:
        """Have the inner run average; one that ends before has left its final state."""
        assert self._member is not None
        if self._ended is None:
            self._inner.post(m.ClusterCheckpointRequested(reserve_s=reserve_s))
        message: _Message | None = None
        while self._ended is None and not isinstance(message, SaveCheckpoint):
            message = self._receive()
            if isinstance(message, SaveFailed):
                raise RoundFailed(str(message.error)) from message.error
        assert self._last_capture is not None
        if self._last_capture.final and self._delta_pending:
            # It ended before all ranks applied the others' changes, which its state would revert.
            return Captured()
        self._local, self._delta_pending = self._last_capture.payload, False
        member = self._member
        return captured(self._last_capture, member.ledger, self._machine, member.run_name)

    def _form_quorum(self) -> tuple[tuple[str, ...], Any]:
        while self._receive(time.monotonic()) is not None:
            pass  # a round may follow the last one at once, with no wait for messages
        try:
            self._quorum = quorum = self._engine.quorum()
        except PeerRefused as error:
            if self._machine in error.machines:
                raise ClusterError(f"the cluster refuses this machine: {error}") from error
            raise
        self._round_started = time.monotonic()
        return quorum.members, None if quorum.healed is None else quorum.healed.meta["ledger"]

    def _offer(self) -> ClusterState:
        """The state to heal a peer."""
        assert self._member is not None
        assert self._global is not None
        return ClusterState(
            tensors=named_tensors(self._global, self._settings.outer.state()),
            meta={
                "ledger": encode(self._member.ledger.state),
                "metrics": encode(self._closed),
            },
        )

    def _adopt(self) -> None:
        """Adopt the state received with the quorum."""
        assert self._quorum is not None
        assert self._quorum.healed is not None
        assert self._global is not None
        state, outer = state_from_tensors(self._quorum.healed.tensors, self._global)
        self._settings.outer.load_state(outer)
        self._global = state
        metrics = self._quorum.healed.meta["metrics"]
        self._closed = list(decode(tuple[EpochMetrics, ...], metrics, "metrics"))

    def _gather(self, report: MachineReport) -> tuple[MachineReport, ...]:
        assert self._quorum is not None
        messages = self._engine.gather(report.to_json())
        reports = []
        for machine, data in zip(self._quorum.members, messages, strict=True):
            try:
                reports.append(MachineReport.from_json(data))
            except ValueError as error:
                raise RoundFailed(f"machine {machine} sent a malformed report: {error}") from error
        self._reports = tuple(reports)
        return self._reports

    def _reduce(self, action: Reduce) -> None:
        assert self._quorum is not None
        assert self._global is not None
        rank, weights = self._quorum.rank, action.weights
        own = self._local if weights[rank] else None
        heaviest = action.samples.index(max(action.samples)) == rank
        scale = weights[rank] / sum(weights)
        self._sums = contribution(self._global, own, scale, heaviest=heaviest)
        self._engine.all_reduce(self._sums)

    def _apply(self, action: ApplyRound) -> None:
        """Apply a committed round: the new global state, and the new grant."""
        assert self._member is not None
        assert self._global is not None
        old = self._global
        if action.reduced:
            params, buffers, others = split(self._sums, old)
            self._global = Payload(
                params=tuple(self._settings.outer.step(old.params, params)),
                buffers=tuple(
                    from_wire(to_wire(b).sub(s), b)
                    for b, s in zip(old.buffers, buffers, strict=True)
                ),
                other_buffers=tuple(
                    from_wire(s, t) for t, s in zip(old.other_buffers, others, strict=True)
                ),
            )
        self._sums = []
        ledger = self._member.ledger
        self._check_num_rounds(ledger)
        closed = [self._close(e) for e in action.closed if e.epoch >= len(self._closed)]
        if action.restart and (self._was_granted or self._closed):
            self._restart_inner()
            closed = []
        self._was_granted = self._was_granted or bool(action.grant)
        if ledger.ended or self._member.leaving:
            self._result = self._global
        delta = None
        if self._local is not self._global:
            assert self._local is not None
            delta = difference(self._global, self._local)
        if self._member.leaving or (ledger.stopped and not ledger.complete):
            self._inner.stop(self._reason or "stopped")  # with the global state as its result
        elif self._ended is None:
            self._delta_pending = self._delta_pending or delta is not None
            self._grant(
                m.ClusterRoundDone(
                    epochs=(*closed, *epoch_grants(action.grant, ledger)),
                    delta=delta,
                    over=ledger.ended,
                    state=self._global,
                    round=self._round_report(ledger),
                )
            )
        self._local = self._global
        self._checkpointer.after_round(ledger, self._checkpoint)

    def _check_num_rounds(self, ledger: ClusterLedger) -> None:
        """Warn once, when the first round has settled batches, if there will be too few rounds."""
        expected, outer = ledger.expected_rounds, self._settings.outer
        if expected is None or self._checked_rounds:
            return
        self._checked_rounds = True
        if expected < outer.min_rounds:
            logger.warning(
                "cluster(outer=%s, period=%g): the run will have about %.0f rounds between "
                "machines, and this outer optimizer needs %.0f or more: use Mean(), or a shorter "
                "period",
                outer.name,
                self._settings.period_s,
                expected,
                outer.min_rounds,
            )

    def _grant(self, granted: m.ClusterRoundDone) -> None:
        self._num_grants += 1
        self._inner.post(granted)

    def _round_report(self, ledger: ClusterLedger) -> m.MachineRound:
        """The report of the round for timelines and monitors."""
        return m.MachineRound(
            step=ledger.step,
            machines=tuple(peer.machine for peer in self._reports),
            num_samples=tuple(peer.num_samples for peer in self._reports),
            num_granted=tuple(len(ledger.grants[peer.machine]) for peer in self._reports),
            round_s=time.monotonic() - self._round_started,
        )

    def _close(self, closed: ClosedEpoch) -> m.EpochGrant:
        """Record a closed epoch, and return the inner run's last grant of it."""
        assert self._member is not None
        data = self._data
        metrics = EpochAccumulator(0).close(
            epoch=closed.epoch,
            epoch_s=0.0,
            num_samples=data.num_samples,
            devices=(),
            machine=self._machine,
            others=other_tallies(closed),
        )
        self._closed.append(metrics)
        return m.EpochGrant(
            epoch=closed.epoch,
            consumed=(range(data.num_batches),),
            complete=True,
            num_samples=data.num_samples,
            others=other_tallies(closed, without=self._member.run_name),
        )

    def _restart_inner(self) -> None:
        """Replace the inner run by one that starts from the global state."""
        logger.warning(
            "machine %s continues from the others' state: the batches that it trained since its "
            "last round are trained again by the machines that have them now",
            self._machine,
        )
        point = ResumePoint(self._checkpoint(), "the state of the cluster")
        old, self._inner = self._inner, self._make_run(self._cluster_hooks(point))
        old.abort()
        self._await_end()
        self._ended = None
        self._delta_pending = False
        self._num_grants = 0
        self._was_granted = False
        self._local = self._global
        self._inner.start(self)
        if self._aborted:  # which may have reached only the old one
            self._inner.abort()
        self._await(_RunStarted)
        for metrics in self._closed[self._num_published :]:
            self.publish(metrics)

    def _checkpoint(self) -> CheckpointData:
        """The global state, with the per-rank state of this machine."""
        assert self._member is not None
        assert self._last_capture is not None
        assert self._global is not None
        ledger, outer = self._member.ledger, self._settings.outer.state()
        run = resumed_run(self._last_capture.run, ledger, self._closed)
        command = replace(self._last_capture, payload=self._global, run=run)
        cluster = SavedCluster(ledger=ledger.state, tensors=named_tensors(self._global, outer))
        return replace(self._inner.checkpoint(command), cluster=cluster)

    def _end(self, error: BaseException | None) -> None:
        """Wait for the inner run, close everything, and report to the handle, whatever fails."""
        state: Any = None
        kept: BaseException | None = None  # an error beside a state
        try:
            if self._ended is None:
                if error is not None:
                    self._inner.abort()
                elif self._result is None:
                    self._inner.stop(self._reason or "stopped")
            ended = self._await_end()
            state, error = ended.state, error or ended.error
            kept = ended.error
            if error is None and state is not None and self._result is not None:
                state = self._with_last_round(state)
        except BaseException as caught:
            error = error or caught
        for close in (self._engine.close, self._checkpointer.close):
            try:
                close()
            except BaseException as caught:
                error = error or caught
        INTERRUPTS.remove(self)
        self._listener.finish(state if error is kept else None, error)

    def _with_last_round(self, state: Any) -> Any:
        """The inner run's ``TrainedState``, updated by a round after its end."""
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

    def _await_end(self) -> _RunEnded:
        """Wait for the end of the inner run; discards its other messages."""
        while self._ended is None:
            message = self._inbox.get()
            if isinstance(message, _RunEnded):
                self._ended = message
            elif isinstance(message, _StopRequest):
                self._on_stop(message)
        return self._ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHooks:
    """The cluster's hooks in the run of one machine.

    Attributes:
        resume: State to resume from; ``None``: start from the beginning.
        on_event: Called on the coordinator's thread after each event.
        on_capture: Called on the coordinator's thread with each requested capture.
        result: Returns the global state once all is trained; else ``None``.
    """

    machine: str
    resume: ResumePoint | None
    on_event: Callable[[Coordinator, m.Event], None]
    on_capture: Callable[[SaveCheckpoint | SaveFailed], None]
    result: Callable[[], Payload | None]


class InnerRun(Protocol):
    """The run of one machine; see :class:`~runtime.run.Run`."""

    devices: tuple[torch.device, ...]
    total_batches: int
    model_digest: str
    resumed: ResumePoint | None
    report: Any

    def start(self, listener: Any) -> None: ...

    def post(self, event: m.Event) -> None: ...

    def stop(self, reason: str = "stopped") -> None: ...

    def abort(self) -> None: ...

    def wait_threads(self, timeout_s: float | None = None) -> None: ...

    def owns_current_thread(self) -> bool: ...

    def checkpoint(self, command: SaveCheckpoint) -> CheckpointData: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Properties of the data that must be equal on all machines, and its sizes.

    Attributes:
        settings: Properties by name, as JSON.
        max_batches: Batches of the whole run; ``None``: all of its epochs.
    """

    settings: Mapping[str, Any]
    num_epochs: int
    num_batches: int
    num_samples: int
    max_batches: int | None


@dataclass(frozen=True, slots=True)
class _RunStarted:
    """The inner run is idle with its initial weights."""


@dataclass(frozen=True, slots=True)
class _RunIdle:
    """The inner run has trained all batches of its first ``num_grants`` grants."""

    num_grants: int


@dataclass(frozen=True, slots=True)
class _RunEnded:
    """The inner run has ended."""

    state: Any
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _StopRequest:
    """``stop()`` was called."""

    everywhere: bool


_Message = _RunStarted | _RunIdle | _RunEnded | _StopRequest | SaveCheckpoint | SaveFailed
