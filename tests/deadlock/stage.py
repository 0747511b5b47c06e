"""The real coordinator with one real worker and one rank scripted by the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from coordinator import messages as m
from coordinator.config import CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.service import Service
from runtime import GpuWorker, UserFunctions, WorkerConfig, create_collectives
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import InlineLoader, LoaderSpec
from runtime.worker.worker_config import WorkerEndpoints
from tests.deadlock.faults import BOUND_S
from tests.support.running import CADENCE, CPU, OVER_CPU, count_up, counter, numbers, plain_sgd
from tests.unit.worker.test_worker import Alone


@contextmanager
def running(*workers: Alone) -> Iterator[None]:
    """Workers on their own threads; each is shut down at the end."""
    threads = [threading.Thread(target=alone.worker.run, daemon=True) for alone in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for alone, thread in zip(workers, threads, strict=True):
            alone.send(m.Shutdown(snapshot=False))
            thread.join(BOUND_S)
    assert not any(thread.is_alive() for thread in threads)


class Stage:
    """A run of two ranks: rank 0 is a worker, rank 1 is scripted.

    Use it in a ``with`` block, which leaves no thread behind: an unfinished run then
    ends by the death of the scripted rank.

    Args:
        train: The worker's ``train_fn``.
        num_batches: Batches of one sample each.
        policy: The policy of averaging.
        backend: The transport of the averages.
        settings: Further settings of the coordinator.

    Attributes:
        collectives: The ends of both ranks.
        machine: The coordinator.
    """

    def __init__(
        self,
        *,
        train: Any = count_up,
        num_batches: int = 100,
        policy: Any = CADENCE,
        backend: Any = OVER_CPU,
        **settings: Any,
    ) -> None:
        config = CoordinatorConfig(
            devices=("cpu", "cpu"),
            num_samples=num_batches,
            batch_size=1,
            num_epochs=1,
            policy=policy,
            backend=backend,
            **settings,
        )
        self.machine = Coordinator(config)
        self.collectives = create_collectives(2, "thread", None, BOUND_S)
        self._train = train
        self._inbox = queue.SimpleQueue()
        self._outboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(2)]
        self._unread: list[Any] = []
        self._ended = threading.Event()
        self._service = Service(
            self.machine,
            self._inbox,
            self._outboxes,
            abort_collective=lambda *_: [c.abort() for c in self.collectives],
            on_metrics=lambda metrics: None,
            on_end=self._ended.set,
        )
        self._thread = threading.Thread(target=self._work, name="gpu-worker-0", daemon=True)

    def _work(self) -> None:
        config = self.machine.run_state.config
        try:
            worker = GpuWorker(
                WorkerConfig(
                    world_size=2,
                    num_samples=config.num_samples,
                    policy=config.policy,
                    report_interval_s=1e9,
                ),
                UserFunctions(model_factory=counter, optim_factory=plain_sgd, train_fn=self._train),
                WorkerEndpoints(self._outboxes[0], self._inbox),
                make_loader=lambda worker, wake: InlineLoader(
                    LoaderSpec(
                        adapter=adapt_dataset(numbers(config.num_samples)),
                        index=EpochIndex(config.num_samples, 1, 0),
                        device=CPU,
                        seed=0,
                        rank=0,
                    )
                ),
                collective=self.collectives[0],
            )
            worker.run()
        except BaseException as error:
            self._inbox.put(m.Failed(rank=0, epoch=0, step=0, error=error))
        finally:
            self._inbox.put(m.ThreadEnded(rank=0))

    # -- the scripted rank ---------------------------------------------------------------

    def play(self, *messages: Any) -> None:
        """Send messages of rank 1."""
        for message in messages:
            self._inbox.put(message)

    def train(self) -> None:
        """Report that rank 1, the slow one, has trained its next plan."""
        number = self.expect(m.StartEpoch).plan.num_batches
        stats = m.ReportStats(num_batches=number, num_samples=number, compute_s=0.05 * number)
        self.play(m.EpochReport(rank=1, epoch=0, stats=stats))

    def expect(self, kind: Any) -> Any:
        """The next message of a kind to rank 1; others stay queued."""
        for message in self._unread:
            if isinstance(message, kind):
                self._unread.remove(message)
                return message
        while not isinstance(message := self._outboxes[1].get(timeout=BOUND_S), kind):
            self._unread.append(message)
        return message

    def join_round(self) -> m.SyncNow:
        """Rank 1 joins the collective of the next round on request."""
        call = self.expect(m.SyncNow)
        (flat,) = self.snapshot(call.round, 1.0, 1).payload.params
        self.collectives[1].barrier()
        self.collectives[1].weighted_mean_([flat], 1)
        return call

    def snapshot(self, round_id: int, value: float, num_samples: int) -> m.ParamSnapshot:
        """A snapshot of rank 1 for a round."""
        flat = torch.zeros(8, dtype=torch.float64)  # one parameter, padded to 64 bytes
        flat[0] = value
        return m.ParamSnapshot(
            rank=1,
            round=round_id,
            payload=m.Payload(params=(flat,)),
            num_samples=num_samples,
            num_batches=num_samples,
        )

    # -- the run -----------------------------------------------------------------------

    def __enter__(self) -> Stage:
        self._service.start()
        self._thread.start()
        self.play(m.Ready(rank=1))
        return self

    def join(self) -> Any:
        """Wait for the end of the run; returns its outcome."""
        assert self._ended.wait(BOUND_S), "the run did not end"
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()
        self._service.join(BOUND_S)
        return self.machine.outcome

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.play(m.ThreadEnded(rank=1))
        self.join()
        for collective in self.collectives:
            collective.close()
