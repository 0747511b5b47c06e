"""GpuWorker: the training loop of one device, in one thread.

The worker blocks on nothing but its inbox, where the coordinator's messages and the
loader's wake-ups arrive, and on the collectives that it is told to join. Between two
steps it answers every message; inside a step it answers none.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from coordinator import messages as m
from coordinator.errors import GpuWorkerError
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.core.vector_math import resolve_vector_math
from runtime.data.loader import Loader
from runtime.device.base import DeviceContext, open_device
from runtime.replica.build import BuildOrder
from runtime.replica.graph_fallback import Fallbacks
from runtime.replica.step import TrainFn
from runtime.timeline.causes import COMPUTE, DATA
from runtime.worker.agreement import StopAgreement
from runtime.worker.config import WAKE, UserFunctions, Wake, WorkerConfig, WorkerEndpoints
from runtime.worker.lockstep import Lockstep
from runtime.worker.peers import Peers
from runtime.worker.protocol import WorkerState
from runtime.worker.step_worker import StepWorker
from runtime.worker.windows import Windows

DRAIN_S = 30.0
"""How long a rank whose collective was broken waits to hear of the end of the run."""


class GpuWorker(StepWorker):
    """Trains one replica on one device. Build and use it in one thread.

    Args:
        config: Settings.
        functions: The user's functions.
        endpoints: Queues from :meth:`channels`.
        make_loader: Gives the worker's loader; it is told the worker and a function
            that wakes the worker. ``None``: for tools that only call :meth:`train_step`.
        collective: Under ``SYNC`` reduces gradients, else serves ``SyncNow``.
        build_order: Shared by all workers of a run; ``None``: a worker on its own.
        agreement: Shared by all workers of a lockstep run.
        peers: Shared by all workers of a run that meet in collectives; without it the
            worker cannot join a new group after a death.
        device: Where it trains; ``None``: made from the settings.
        fallbacks: Shared by all workers of a run; tells what is not captured.
        resume: Where an earlier run stood, of which this one goes on.

    Raises:
        TypeError, ValueError: What a factory gives cannot be trained.
    """

    def __init__(
        self,
        config: WorkerConfig,
        functions: UserFunctions,
        endpoints: WorkerEndpoints,
        *,
        make_loader: Callable[[GpuWorker, Callable[[], None]], Loader] | None = None,
        collective: Collective | None = None,
        build_order: BuildOrder | None = None,
        agreement: StopAgreement | None = None,
        peers: Peers | None = None,
        device: DeviceContext | None = None,
        fallbacks: Fallbacks | None = None,
        resume: ResumePoint | None = None,
    ) -> None:
        resolve_vector_math()  # where no run did it
        super().__init__(
            config,
            functions,
            endpoints,
            collective,
            build_order or BuildOrder(alone=True),
            device or open_device(config.device, config.num_cpu_workers),
            Lockstep(agreement),
            peers,
            fallbacks,
            resume,
        )
        self._inbox = endpoints.inbox
        self._deferred: deque[Any] = deque()
        self._submitted: list[m.EpochPlan] = []
        self._loader = make_loader(self, lambda: self._inbox.put(WAKE)) if make_loader else None
        self._protocol.built()
        if peers is not None:
            peers.replicas[self.rank] = self

    # -- plans -------------------------------------------------------------------

    def wait_for_epoch_plan(self) -> m.EpochPlan | None:
        """Block until there is a plan; answer everything else meanwhile.

        Returns:
            The next plan, or ``None`` once ``Shutdown`` came.
        """
        while True:
            leaving = self.handle_control()
            # Under lockstep a peer may have begun a plan that came before an orderly end:
            # every rank then begins it, and all of them stop after its first step.
            all_begin = self._lockstep and self._wants_snapshot()
            plan = self._protocol.begin_plan(
                leaving_too=all_begin and not self._together.stop_reached
            )
            if plan is not None:
                return plan
            if leaving:
                return None
            self._receive(self._next_message())

    def run_epoch_plan(self, plan: m.EpochPlan, train_fn: TrainFn | None = None) -> bool:
        """Train a plan to its end, answering messages between steps.

        Args:
            plan: From :meth:`wait_for_epoch_plan`, or one of your own.
            train_fn: Instead of the worker's own.

        Returns:
            Whether ``Shutdown`` came before the end.
        """
        fn = train_fn or self._functions.train_fn
        if self._protocol.plan is not plan:
            self._protocol.plans.appendleft(plan)
            self._protocol.begin_plan()
        with worker_context(self):
            self._begin_epoch(plan.epoch)
            self._verify_graphs()
            self._submit(plan)
            self._submitted.remove(plan)
            windows = Windows(plan, self.config)
            last = len(windows.steps) - 1
            for index, sizes in enumerate(windows.steps):
                if not self._may_step():
                    self._abandon(plan)
                    return self._protocol.leaving
                position = windows.position(index) if self._lockstep else None
                if not self._run_window(sizes, position, fn):
                    self._abandon(plan)
                    return True
                if index < last:  # else the plan's own report follows
                    self._reporter.report_if_due()
            self._sync_buffers()
            self._capture_if_reached()
        self._end_plan(plan)
        return False

    def _may_step(self) -> bool:
        """Answer messages; whether the next step may begin."""
        trains = not self._lockstep and self._protocol.state is WorkerState.TRAINING
        if trains and self._inbox.empty() and not (self._deferred or self._reporter.held):
            return True  # as most steps find it
        if self.handle_control() and not self._finish_together():
            return False
        if not self._lockstep:
            return True
        self._capture_if_reached()
        return not self._together.stop_reached

    def _finish_together(self) -> bool:
        """Under lockstep a stop is agreed: this step is still made, by all ranks."""
        if self._lockstep and self._wants_snapshot():
            self._together.propose_stop()
            return True
        return False

    def _wants_snapshot(self) -> bool:
        shutdown = self._protocol.shutdown
        return shutdown is not None and shutdown.snapshot

    def _await_batch(self, *, answer: bool, then: int = COMPUTE) -> Any:
        """The next batch; while it is being loaded, messages are answered or put aside.

        Between steps a stalled loader must not delay an acknowledgement (D8); inside a
        step the replica is in no state to answer.

        Args:
            answer: Whether messages are answered.
            then: What the time goes to from there on.
        """
        assert self._loader is not None, "a worker without a loader has no plans"
        lane = self._lane
        asked = 0.0 if lane is None else time.monotonic()
        if lane is not None and self._loader.reads_inline:
            lane.enter(DATA, asked)
        loaded = self._loader.try_next()
        if lane is not None and lane.cause != DATA:
            if loaded is not None:
                lane.enter_past(DATA, asked, then)
                return loaded.data
            lane.enter(DATA, asked)
        while loaded is None:
            message = self._next_message()
            if isinstance(message, Wake):
                pass
            elif not answer:
                self._deferred.append(message)
            else:
                self._receive(message)
                if self.handle_control():
                    if not self._finish_together():
                        return None
                    answer = False
            loaded = self._loader.try_next()
        if lane is not None:
            lane.enter(then)
        return loaded.data

    def _submit(self, plan: m.EpochPlan) -> None:
        """Start loading a plan, unless it was when it arrived."""
        if not any(p is plan for p in self._submitted):
            self._submitted.append(plan)
            if self._loader is not None:
                self._loader.submit(plan)

    def _abandon(self, plan: m.EpochPlan) -> None:
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        if self._together.stop_reached:
            self._own.keep_buffers()
            self._sync_buffers()
        self._end_plan(plan)

    def _end_plan(self, plan: m.EpochPlan) -> None:
        if self._lockstep or self.world_size == 1:
            self._judge.require_finite()  # no round follows: the report closes the epoch
        self._protocol.end_plan()
        self.report_epoch(plan.epoch)

    # -- messages ------------------------------------------------------------------

    def handle_control(self) -> bool:
        """Answer every message that has arrived; while parked, wait for the release.

        Returns:
            Whether ``Shutdown`` came.
        """
        self._reporter.flush()
        while True:
            while self._deferred:
                self._receive(self._deferred.popleft())
            if not self._inbox.empty():
                # This thread is the only reader.
                self._receive(self._inbox.get_nowait())
                continue
            if self._protocol.may_train:
                return False
            if not self._protocol.parked:
                return self._protocol.leaving
            if self._protocol.report_due:
                self.report_timing()
            self._receive(self._next_message())

    def _next_message(self, timeout_s: float | None = None) -> Any:
        """Block for a message; what still waits for copies is sent first.

        Raises:
            queue.Empty: None came in time.
        """
        self._reporter.flush(wait=True)
        with self._context.idle():
            return self._inbox.get(timeout=timeout_s)

    def _receive(self, message: m.ToWorker | Wake) -> None:
        if isinstance(message, Wake):
            return
        if isinstance(message, m.StartEpoch) and self._protocol.takes_plans:
            self._submit(message.plan)
        work = self._protocol.receive(message)
        if isinstance(work, m.Regroup):
            self._regroup(work)
        elif isinstance(work, m.Capture):
            (self._capture_together if self._lockstep else self._capture_now)(work.id)
        elif work is not None:
            self._answers.answer(work)

    # -- the thread's life ---------------------------------------------------------------

    def run(self) -> None:
        """Train plan after plan until ``Shutdown``, then leave."""
        try:
            self._live()
        finally:
            self._end_graphs()

    def _live(self) -> None:
        self._reporter.put(m.Ready(rank=self.rank))
        while True:
            try:
                self._train_plans()
                break
            except CollectiveAborted as error:
                # Another rank failed, which is told by that rank; if by none, by this one.
                survives = self.config.survives and self._lockstep
                if not survives and not self.drain_until_shutdown(DRAIN_S):
                    raise GpuWorkerError(
                        f"rank {self.rank}: a collective was broken, and no rank has told why "
                        f"within {DRAIN_S:g} s"
                    ) from error
            except CollectiveTimeout:
                # A peer is late, not dead: with others that wait, meet it anew.
                if not (self.config.survives and self._lockstep):
                    raise
            if self._protocol.leaving:
                break
            self._halt()
        if self._wants_snapshot():
            self.send_final_snapshot()
        self.report_exiting()

    def _train_plans(self) -> None:
        while (plan := self.wait_for_epoch_plan()) is not None:
            if self.run_epoch_plan(plan):
                return

    def _halt(self) -> None:
        """The group of ranks is broken: leave the plan, say where, and wait for the new one."""
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        self._context.finish()  # a peer may copy from this replica as soon as it is told
        self._protocol.halt()
        self._reporter.put(
            m.Halted(
                rank=self.rank,
                generation=self._protocol.generation,
                step=self._together.step,
                num_syncs=self._together.num_syncs,
                report=self._reporter.take_report(),
            )
        )

    def report_exiting(self) -> None:
        """Tell the coordinator that nothing more will come."""
        self._protocol.gone()
        self._reporter.put(m.Exiting(rank=self.rank))
        self._reporter.flush(wait=True)

    def drain_until_shutdown(self, timeout_s: float | None = None) -> bool:
        """Take messages, joining no round and training nothing, until ``Shutdown`` (D2).

        Args:
            timeout_s: How long to wait for it; ``None``: as long as it takes.

        Returns:
            Whether it came.
        """
        self._protocol.leave()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._protocol.shutdown is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._deferred.popleft() if self._deferred else self._next_message(left)
            except queue.Empty:
                return False
            if not isinstance(message, Wake):
                self._protocol.receive(message)
        return True

    def close(self) -> bool:
        """End the loader and the worker; returns whether its thread has ended. Idempotent."""
        ended = True if self._loader is None else bool(self._loader.close())
        self._loader = None
        self._let_go()
        return ended
