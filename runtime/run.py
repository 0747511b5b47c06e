"""Run: assembles the threads and queues of a run, and shuts them down."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from coordinator import messages as m
from coordinator.config import ApplyPolicy, AverageBackend, part_of
from coordinator.machine import Coordinator
from coordinator.messages import SaveCheckpoint, SaveFailed
from coordinator.metrics import EpochMetrics, StepMetrics
from coordinator.service import Service
from coordinator.splitting import LONG
from runtime.callbacks import MetricReader
from runtime.checkpoint.content import CheckpointData, SavedSettings
from runtime.checkpoint.format import digest
from runtime.checkpoint.resume import ResumePoint
from runtime.checkpoint_service import CheckpointService
from runtime.cluster.cluster_run import ClusterHooks
from runtime.collective import (
    Collective,
    create_collectives,
    resolve_backend,
    set_timeout_remedy,
)
from runtime.core.capabilities import thread_end_fault
from runtime.core.context import announce, current_worker
from runtime.core.errors import (
    CollectiveAborted,
    CollectiveTimeout,
    WorkerFailed,
    error_of_run,
    text_of,
)
from runtime.core.group_gate import GroupGate
from runtime.core.process_state import CompileLimits, ProcessState, import_dynamo
from runtime.core.rng import install_thread_generators
from runtime.core.shared_objects import SharedObjects
from runtime.core.signals import INTERRUPTS
from runtime.core.threads import IntraOpThreads, prepare_threads
from runtime.core.tracebacks import fold_tracebacks
from runtime.data.data_path import DataPath
from runtime.data.dataset import DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.shared_reads import reading_alone
from runtime.data.stream import StreamAdapter
from runtime.device import host_allocator as allocator
from runtime.device.cuda import open_device
from runtime.device.launch_load import LaunchLoad
from runtime.evaluation.shared_evaluation import SharedEvaluations
from runtime.loggers.metrics_thread import MetricsThread
from runtime.loggers.progress import make_display
from runtime.replica.build import BuildOrder, CopyingFactory
from runtime.results import RunFactory, TrainedState, assemble_state, load_given
from runtime.run_report import RunReport
from runtime.settings import RunSettings
from runtime.worker.collective_groups import CollectiveGroups
from runtime.worker.meetings import LoopPeers, Meetings
from runtime.worker.operations import check_eval_values
from runtime.worker.recorder import RunRecorder
from runtime.worker.run_peers import RunPeers
from runtime.worker.worker import GpuWorker
from runtime.worker.worker_config import WAKE, EvalFn, UserFunctions, WorkerEndpoints
from runtime.worker.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)

UNSEEDED = (
    "seed(n) is not set: the order of samples and the workers' generators use 0, and initial "
    "weights are drawn from PyTorch's process generator; torch.manual_seed(%d) at the start of the "
    "program repeats them"
)


class Run:
    """The parts of one run: queues, coordinator, collectives, workers.

    Args:
        settings: All settings.
        adapter: The data set.
        hooks: Callbacks of the cluster, if the run is one machine's part of it.

    Attributes:
        devices: The device of each rank.
        total_batches: Batches of the whole run.
        machine: The coordinator.
        report: Its facts, throughput and lost time.
        resumed: The checkpoint to resume from; ``None``: start from the beginning.
        model_digest: Hash of the names, shapes, dtypes and formats of the weights; empty until the
            model is built.

    Raises:
        ValueError: Settings are incompatible.
    """

    def __init__(
        self, settings: RunSettings, adapter: DatasetAdapter, hooks: ClusterHooks | None = None
    ) -> None:
        self._cluster_hooks = hooks
        self.model_digest = ""
        self._settings = settings
        self.devices = settings.resolved_devices()
        self._stream = stream = adapter if isinstance(adapter, StreamAdapter) else None
        index = EpochIndex(
            adapter.num_samples,
            settings.batches(len(self.devices)).unit,
            settings.seed or 0,
            settings.sampler,
            of_stream=stream is not None,
            current_length=adapter.current_length,
        )
        num_samples = index.num_samples
        settings.check(num_samples, self.devices)
        self._recording = RunRecorder(settings.timeline, len(self.devices))
        backend, reason = resolve_backend(settings.backend, self.devices, settings.policy)
        config = settings.resolve(self.devices, num_samples, backend, reason)
        # Raises for an unsupported device, before any thread starts.
        self._contexts = [open_device(d, config.worker.num_cpu_workers) for d in self.devices]
        validation = settings.validation_data(self._contexts)
        if validation is not None:
            num_batches = validation.num_batches
            coordinator = replace(config.coordinator, val_batches=num_batches)
            config = replace(config, coordinator=coordinator)
        self.config = config
        self._data_path = DataPath(config.data, adapter, index, self._contexts)
        self._inbox: queue.SimpleQueue[m.Event] = queue.SimpleQueue()
        self._outboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.devices]
        self._collectives: dict[int, Collective] = {}
        self.resumed = self._read_resume()
        if self.resumed is not None:
            index.restore(self.resumed.data.orders, self.resumed.data.sampler)
        if self.resumed is not None and stream is not None:
            stream.restore(self.resumed.stream)
        self._gate = GroupGate()
        self._groups = CollectiveGroups(self._make_group)
        self._peers = RunPeers(
            order=_build_order(settings, len(self.devices)),
            groups=self._groups,
            first_batch=self._data_path.first_batch,
            resume=self.resumed,
            launch_load=LaunchLoad.of(self.devices),
            evaluations=SharedEvaluations(self._gate),
            validation=validation,
            loop=self._make_loop_peers(),
        )
        self._saves = CheckpointService(
            settings, self._saved_settings(), index, stream, on_refused=self.fail
        )
        self._threads = self._make_threads()
        self.machine, self._service = self._make_coordinator()
        self._num_resumed = self.machine.run_state.num_trained
        if stream is not None:
            self._follow(stream)
        self.total_batches = config.coordinator.planned_steps
        self._metrics = self._make_metrics_thread()
        self._built: list[int] = []
        self._error: BaseException | None = None  # raised by join(); the state is kept
        statistics, seconds = self._service.statistics, self._recording.seconds
        self.report = RunReport(settings, config, self.devices, self.machine, statistics, seconds)
        self._listener: Listener | None = None
        # Joined before user code: imports of two threads that form a cycle fail.
        self._importer = threading.Thread(target=import_dynamo, name="import-dynamo", daemon=True)
        self._holds_threads = False
        self._keeps_memory = False

    def _make_threads(self) -> WorkerThreads:
        return WorkerThreads(
            self.config.worker,
            self._contexts,
            self._inbox,
            self._outboxes,
            self._peers,
            self._recording,
            self._build_worker,
            self._data_path.explain,
            pin=self._settings.pin_threads,
        )

    def _make_loop_peers(self) -> LoopPeers | None:
        if self._settings.loop is None:
            return None
        request_save = partial(self._inbox.put, m.SaveRequested(ticket=m.LOOP_TICKET))
        return LoopPeers(
            len(self.devices),
            Meetings(self._settings.collective_timeout_s, self._gate),
            None if self._settings.checkpoint_dir is None else request_save,
            is_member=self._cluster_hooks is not None,
        )

    def _make_metrics_thread(self) -> MetricsThread:
        settings, metric = self._settings, self._settings.scheduler_metric
        reader = None if metric is None else MetricReader(f"scheduler(metric={metric!r})", metric)
        return MetricsThread(
            metrics_fn=settings.metrics_fn,
            on_stop=self.stop,
            on_error=self.fail,
            make_display=lambda: make_display(
                settings.progress,
                self._service.statistics,
                self.total_batches,
                settings.num_epochs,
            ),
            check=None if reader is None else reader.read,
        )

    def _follow(self, stream: StreamAdapter) -> None:
        """Release items of the stream after each event, once no rank can require them again."""

        def release(*_: object) -> None:
            stream.release_before(*self.machine.first_needed())

        release()
        self._service.observe(release)

    def _make_coordinator(self) -> tuple[Coordinator, Service]:
        config = self.config.coordinator
        machine = Coordinator(config, None if self.resumed is None else self.resumed.data.run)
        service = Service(
            machine,
            self._inbox,
            self._outboxes,
            abort_collective=self._abort,
            on_metrics=self._on_metrics,
            on_end=self._on_end,
            on_save=self._on_save,
        )
        hooks = self._cluster_hooks
        if hooks is not None:
            service.observe(lambda event, *_: hooks.on_event(machine, event))
        return machine, service

    def _on_save(self, command: SaveCheckpoint | SaveFailed) -> None:
        if self._cluster_hooks is not None and m.CLUSTER_TICKET in command.tickets:
            self._cluster_hooks.on_capture(command)
        error = error_of_run(self.machine.outcome.failure, ()) or self._error
        self._saves.take(command, "" if error is None else text_of(error))

    def checkpoint(self, command: SaveCheckpoint) -> CheckpointData:
        """Return the content of a checkpoint that the coordinator has taken."""
        return self._saves.data(command)

    def post(self, event: m.Event) -> None:
        """Put an event into the coordinator's inbox; thread-safe."""
        self._inbox.put(event)

    def _saved_settings(self) -> SavedSettings:
        """Settings that a resumed run must share with the checkpoint."""
        c = self.config.coordinator
        is_shuffled = self._settings.sampler is None and self._stream is None
        return SavedSettings(
            global_batch_size=c.global_batch_size,
            batch_size=c.batch_size,
            num_samples=c.num_samples,
            drop_last=c.drop_last,
            seed=self.config.worker.seed,
            accumulate=c.accumulate,
            sync=c.policy is ApplyPolicy.SYNC,
            sampler=self._settings.sampler is not None,
            stream=self._stream is not None,
            shuffle="by function" if is_shuffled and c.num_samples >= LONG else "as a whole",
        )

    @property
    def past_metrics(self) -> tuple[EpochMetrics, ...]:
        """Metrics of the epochs closed before the resume; empty once the workers are built."""
        resumed = self.resumed  # once: the workers' threads drop it
        return () if resumed is None else resumed.data.run.metrics

    def _read_resume(self) -> ResumePoint | None:
        s = self._settings
        if self._cluster_hooks is not None and self._cluster_hooks.resume is not None:
            return self._cluster_hooks.resume
        if s.resume is None:
            return None
        return ResumePoint.read(
            s.resume, self._saved_settings(), s.num_epochs, missing_ok=s.resume_missing_ok
        )

    def start(self, listener: Listener) -> None:
        """Start all threads.

        On failure, the threads already started are shut down and the error is raised.
        """
        prepare_threads()
        install_thread_generators()
        CompileLimits.extend(len(self.devices))
        self._importer.start()
        self._listener = listener
        s, c = self._settings, self.config.coordinator
        announce(logger, self.report.first_line(), silent=s.progress is False)
        fault = thread_end_fault()
        if fault is not None:
            announce(logger, fault, level=logging.WARNING)
        hooks = self._cluster_hooks
        if self.resumed is not None and (hooks is None or hooks.resume is None):
            announce(logger, self.resumed.summary, silent=s.progress is False)
        dropped = c.num_samples % c.batch_size if c.drop_last else 0
        if dropped:
            logger.info("drop_last omits %d samples of each epoch", dropped)
        if s.cuda_graphs and not all(context.has_graphs for context in self._contexts):
            logger.warning("cuda_graphs(True) has no effect on cpu: its steps run eagerly")
        if s.metrics_every and s.metrics_fn is None:
            logger.warning(
                "metrics_every(n) has no effect without metrics_fn or callbacks: set one"
            )
        if s.val_every_steps and s.metrics_fn is None:
            logger.warning(
                "val_dataset(every_steps=n): means within epochs go to metrics_fn and callbacks "
                "alone: set one, or leave every_steps out"
            )
        if s.tune_allocator and self.config.worker.num_cpu_workers:
            allocator.acquire()
            self._keeps_memory = True
        self._recording.begin(self.report.facts, self.devices, self.machine, self._service)
        started = False
        if self._cluster_hooks is None:  # else the ClusterRun handles signals
            INTERRUPTS.add(self)
        try:
            self._saves.claim()
            for context in self._contexts:
                context.follow_caller()
            if self._peers.validation is not None:
                self._peers.validation.start()
            self._data_path.start(lambda rank: partial(self._outboxes[rank].put, WAKE))
            self._connect()
            IntraOpThreads.acquire()
            ProcessState.acquire()
            self._holds_threads = True
            self._metrics.start()
            self._service.start()
            started = True
            self._threads.start()
            self._importer.join()
        except BaseException:
            if started:
                # A thread could not be started: end as if that worker had died.
                self._threads.end_missing()
                self._service.join()
            else:
                self._saves.release()
                self._take_down()
                self._recording.finish(stopped=False, error=sys.exception())
            raise

    def _connect(self) -> None:
        """Connect the ranks' collectives; a transport that fails is replaced by an alternative.

        Raises:
            CollectiveAborted, CollectiveTimeout: The connection failed without an alternative.
        """
        run = self.machine.run_state
        needs_collectives = self.config.coordinator.uses_collectives
        while needs_collectives and (backend := run.collective) is not None:
            ranks = range(len(self.devices))
            try:
                for rank in ranks:
                    self._collectives[rank] = self._groups.connect(0, ranks, rank, backend)
                return
            except (CollectiveAborted, CollectiveTimeout) as error:
                if len(run.backend_choice.usable) == 1:
                    raise
                self._service.handle_first(
                    m.ConnectFailed(rank=0, generation=0, backend=backend, error=str(error))
                )

    def _make_group(self, ranks: Sequence[int], backend: AverageBackend) -> Sequence[Collective]:
        # The last rank alive under lockstep forms a group of one.
        kind = backend.collective if len(ranks) > 1 else "thread"
        devices = [self.devices[rank] for rank in ranks]
        timeout_s = self.config.coordinator.collective_timeout_s
        ends = create_collectives(len(ranks), kind, devices, timeout_s)
        set_timeout_remedy(ends, "raise collective_timeout(s) if a step can take that long")
        return ends

    def _build_worker(self, rank: int) -> GpuWorker:
        """Build the worker of a rank, in its thread."""
        self._importer.join()
        functions = UserFunctions(**part_of(self._settings, UserFunctions))
        if functions.eval_fn is not None:
            functions = replace(functions, eval_fn=partial(self._evaluate, functions.eval_fn))
        worker = GpuWorker(
            replace(self.config.worker, rank=rank, device=self.devices[rank]),
            functions,
            WorkerEndpoints(self._outboxes[rank], self._inbox),
            make_loader=self._data_path.make_loader,
            collective=self._collectives.get(rank),
            device=self._contexts[rank],
            recorder=self._recording.recorder(rank),
            peers=self._peers,
        )
        self._built.append(rank)
        if len(self._built) == len(self.devices):
            self._peers.resume = self.resumed = None  # frees its tensors
        if rank == 0:
            self._saves.bind_model(worker.model, worker.flat_state)
            self.model_digest = digest(worker.model)
        return worker

    def stop(self, reason: str = "stopped") -> None:
        """Request the end of the run at a step boundary; returns immediately."""
        self._inbox.put(m.StopRequested(reason=reason))

    def fail(self, error: BaseException) -> None:
        """Request the end of the run at a step boundary with this error; returns immediately.

        The trained state is kept, and checkpoints are written as by :meth:`stop`.
        """
        self._error = self._error or error
        self.stop("failed")

    def _evaluate(self, eval_fn: EvalFn, model: nn.Module, epoch: int) -> dict[str, float]:
        """Call the evaluation function; a result of a wrong type ends the run."""
        with reading_alone(eval_fn, self._settings.dataset_lock):
            values = eval_fn(model, epoch)
        try:
            return dict(check_eval_values(values))
        except TypeError as error:
            worker = current_worker()
            fold_tracebacks(error, with_note=False)
            failed = WorkerFailed(worker.rank, epoch, worker.local_step, error)
            failed.__cause__ = error
            self.fail(failed)
            return {}

    def save(self, timeout_s: float) -> CheckpointData:
        """Block until the next step boundary and return the state there, or the final state.

        Raises:
            RuntimeError: Called in a worker's thread.
            TimeoutError: No boundary was reached in time.
            CheckpointError: The run ended without a full state.
        """
        if threading.current_thread() in self._threads:
            raise RuntimeError(
                "save() waits for a boundary, which a worker's own thread would never reach: call "
                "it from another thread"
            )
        number, ticket = self._saves.ticket()
        if number is None:
            return ticket.wait(0.0)
        self._inbox.put(m.SaveRequested(ticket=number))
        try:
            return ticket.wait(timeout_s)
        except (TimeoutError, KeyboardInterrupt):
            self._inbox.put(m.SaveRequested(ticket=number, withdrawn=True))
            raise

    @property
    def newest_checkpoint(self) -> Path | None:
        """Directory of the last checkpoint written by this run."""
        return self._saves.newest

    def abort(self) -> None:
        """Request the end of the run at once; like :meth:`stop`, acquires no lock."""
        self._inbox.put(m.AbortRequested())
        self._metrics.abandon()
        self._saves.abandon()

    def owns_current_thread(self) -> bool:
        """True in a thread of this run that calls user code."""
        current = threading.current_thread()
        return current in self._threads or self._metrics.owns(current)

    def wait_threads(self, timeout_s: float | None = None) -> None:
        """Wait until the coordinator's thread has ended, which is after ``listener.finish``."""
        if self._service.started:
            self._service.join(timeout_s)

    def _on_metrics(self, metrics: EpochMetrics | StepMetrics) -> None:
        assert self._listener is not None
        if isinstance(metrics, EpochMetrics):
            self._listener.publish(metrics)
        self._metrics.put(metrics)

    def _abort(self, generation: int | None) -> None:
        self._groups.abort(generation)
        self._gate.abort(generation)

    def _on_end(self) -> None:
        """Finish the run; called on the coordinator's thread when the outcome is final."""
        assert self._listener is not None
        state: TrainedState | None = None
        error: BaseException | None = None
        try:
            # The grace of ranks that did not exit in time after a failure is over.
            grace_s = 0.1 if self.machine.outcome.missing else self._settings.grace_s
            stuck = self._threads.join(grace_s)
            error = error_of_run(self.machine.outcome.failure, stuck)
            # A cluster may still take a checkpoint of this run's final state.
            errors = self._saves.close(error or self._error, forget=self._cluster_hooks is None)
            if error is None:
                whole = None if self._cluster_hooks is None else self._cluster_hooks.result()
                if whole is not None:
                    self.machine.outcome.payload = whole
                state = self._state(errors)
                load_given(state)
            else:
                state = self._state_after(errors)
        except BaseException as caught:
            error = error or caught
        stopped = self.machine.outcome.stopped
        has_trained = self.machine.run_state.num_trained > self._num_resumed
        try:
            failed = error is not None or self._error is not None
            ended = "failed" if failed else "stopped" if stopped else "finished"
            self.report.end(ended)
            self._take_down()
            if not failed and not INTERRUPTS.interrupted:  # else it is not to continue
                for text in self.report.last_lines():
                    announce(logger, text, silent=self._settings.progress is False)
        except BaseException as caught:
            error = error or caught
        finally:
            error = error or self._error
            self._recording.finish(stopped=stopped, error=error)
            note = ""
            if has_trained and self._cluster_hooks is None:
                note = self._saves.note(has_state=state is not None)
            if error is not None and note:
                error.add_note(note)
            self._listener.finish(state, error, note)

    def _state_after(self, errors: tuple[BaseException, ...]) -> TrainedState | None:
        """The state that a failed run left, if any."""
        if self.machine.outcome.payload is None:
            return None
        try:
            return self._state(errors)
        except Exception:
            logger.warning("the state that the failed run left is lost", exc_info=True)
            return None

    def _state(self, errors: tuple[BaseException, ...]) -> TrainedState:
        workers, outcome = self._threads.ended_workers(), self.machine.outcome
        lead = workers[0]
        return assemble_state(
            lead.model,
            lead.flat_state,
            outcome,
            errors,
            RunFactory(self._settings.model_factory, self._peers.order.draws),
            None if outcome.payload is None else final_ema(workers, outcome.payload),
        )

    def _take_down(self) -> None:
        """Free the run's resources; a stuck thread keeps only what its frames hold."""
        self._peers.order.forget()
        is_failed = self.machine.outcome.failure is not None
        self._metrics.close(self._settings.grace_s if is_failed else None)
        self._groups.close()
        for context in self._contexts:
            context.abandon()
        self._peers.replicas.clear()
        self._collectives = {}
        self._data_path.close()
        if self._peers.validation is not None:
            self._peers.validation.close()
        self._threads.forget()
        self._peers.resume = self.resumed = None
        # The run object lives until garbage collection; free its tensors now.
        self.machine.outcome.release()
        INTERRUPTS.remove(self)
        if self._holds_threads:
            self._holds_threads = False
            IntraOpThreads.release()
            ProcessState.release()
        if self._keeps_memory:
            self._keeps_memory = False
            allocator.release()


def _build_order(settings: RunSettings, num_ranks: int) -> BuildOrder:
    shared: SharedObjects | None = None
    if num_ranks > 1:
        factory = settings.model_factory
        shared = SharedObjects(factory.module if isinstance(factory, CopyingFactory) else None)
    if settings.seed is None:
        logger.info(UNSEEDED, torch.initial_seed())
    return BuildOrder(settings.seed, shared=shared)


def final_ema(workers: Sequence[GpuWorker], average: m.Payload) -> dict[str, Tensor] | None:
    """The moving average at the end of a run, by name, on the CPU; ``None``: there is none.

    Args:
        workers: The workers, which have exited.
        average: The final average.
    """
    # After a death under lockstep some ranks may have made one step more than others.
    last = max(workers, key=lambda worker: worker.replica.lockstep.step)
    ema = last.replica.ema
    if ema is None:
        return None
    due = [w.replica.ema.batches_due for w in workers if w.replica.ema is not None]
    return ema.final_values(average.params, sum(due) / len(due))


class Listener(Protocol):
    """Receives a run's metrics and end, on the coordinator's thread; implemented by the handle."""

    def publish(self, metrics: EpochMetrics) -> None:
        """Receive the metrics of an epoch that has closed."""

    def finish(
        self, state: TrainedState | None, error: BaseException | None, note: str = ""
    ) -> None:
        """Receive the trained state, the error or both, when the run is over.

        Args:
            state: The trained state; of a failed run, the last consistent one, if any.
            error: The error that ``join()`` raises.
            note: Location of the saved state, for errors of an ended run.
        """
