"""How a worker answers the messages that move tensors."""

from __future__ import annotations

from typing import assert_never

from torch import nn

from coordinator import messages as m
from runtime.averaging import ReplicaAverager
from runtime.context import worker_context
from runtime.device import DeviceContext
from runtime.evaluation import evaluate_model, hand_over
from runtime.protocol import WorkerProtocol
from runtime.reporter import Reporter
from runtime.worker_types import UserFunctions


class Answers:
    """Does what the protocol says is to be done for a message, in the worker's thread.

    Args:
        worker: What ``current_worker()`` gives inside the user's functions.
        model: The replica.
        protocol: The worker's protocol.
        averager: The replica's side of an averaging.
        reporter: The way to the coordinator.
        functions: The user's functions.
        clock: Tells the time.
    """

    def __init__(
        self,
        worker: object,
        model: nn.Module,
        protocol: WorkerProtocol,
        averager: ReplicaAverager,
        reporter: Reporter,
        functions: UserFunctions,
        clock: DeviceContext,
    ) -> None:
        self._worker = worker
        self._model = model
        self._protocol = protocol
        self._averager = averager
        self._reporter = reporter
        self._functions = functions
        self._clock = clock
        self._rank = protocol.rank
        self._snapshot_s = 0.0

    def answer(self, work: m.ToWorker) -> None:
        """Answer a message that :meth:`WorkerProtocol.receive` returned."""
        match work:
            case m.SyncNow():
                self._sync_now(work)
            case m.RequestParams():
                self._send_snapshot(work)
            case m.Update():
                self._take_update(work)
            case m.Evaluate():
                self._per_epoch(work.epoch, None)
            case m.Checkpoint():
                self._per_epoch(None, work.version)
            case m.StartEpoch() | m.Throttle() | m.Resume() | m.SetGlobalStep() | m.Shutdown():
                raise AssertionError("the protocol handles these itself")
            case _:
                assert_never(work)

    def _sync_now(self, message: m.SyncNow) -> None:
        report = self._reporter.take_report()
        ok, divergence, sync_s = False, None, 0.0
        try:
            start = self._clock.now()
            divergence, waited = self._averager.all_reduce(self._protocol.samples)
            sync_s = max(0.0, self._clock.now() - start - waited)
            ok = True
        finally:
            self._protocol.synced(message, ok=ok)
            self._reporter.put(
                m.SyncAck(
                    rank=self._rank,
                    round=message.round,
                    divergence=divergence,
                    sync_s=sync_s,
                    ok=ok,
                    report=report,
                )
            )
        self._per_epoch(message.evaluate, message.checkpoint)

    def _send_snapshot(self, message: m.RequestParams) -> None:
        report = self._reporter.take_report()
        start = self._clock.now()
        payload = self._averager.snapshot(reuse=True)
        self._protocol.snapshot_taken(message.round)
        self._snapshot_s = self._clock.now() - start
        self._reporter.put(
            m.ParamSnapshot(
                rank=self._rank,
                round=message.round,
                payload=payload,
                num_samples=self._protocol.samples,
                num_batches=self._protocol.batches,
                report=report,
            )
        )

    def _take_update(self, message: m.Update) -> None:
        if not self._protocol.updated(message):
            return
        start, aside = self._clock.now(), 0.0

        def per_epoch() -> None:
            nonlocal aside
            before = self._clock.now()
            self._per_epoch(message.evaluate, message.checkpoint)
            aside = self._clock.now() - before

        wanted = message.evaluate is not None or message.checkpoint is not None
        if message.num_samples > 0:
            self._averager.take(message.average, meanwhile=per_epoch if wanted else None)
        elif wanted:
            per_epoch()
        sync_s = self._snapshot_s + self._clock.now() - start - aside
        self._reporter.put(m.SyncAck(rank=self._rank, round=message.round, sync_s=sync_s))

    def _per_epoch(self, evaluate: int | None, checkpoint: int | None) -> None:
        """What is to be done while the live state is an average."""
        f = self._functions
        with worker_context(self._worker):
            if evaluate is not None and f.eval_fn is not None:
                values = evaluate_model(f.eval_fn, self._model, evaluate)
                self._reporter.put(m.EvalReport(rank=self._rank, epoch=evaluate, values=values))
            if checkpoint is not None and f.checkpoint_fn is not None:
                hand_over(f.checkpoint_fn, checkpoint, self._model, self._rank)
                self._reporter.put(m.CheckpointDone(rank=self._rank, version=checkpoint))
