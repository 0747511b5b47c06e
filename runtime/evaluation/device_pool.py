"""DevicePool: evaluates the batches of a data set on several devices, a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from runtime.core.context import worker_context
from runtime.core.process_state import CompileLimits, ProcessState
from runtime.core.rng import install_thread_generators
from runtime.core.shared_objects import IN_EVALUATIONS, shared_by
from runtime.core.threads import IntraOpThreads, in_own_context, prepare_threads
from runtime.data.batches import copy_batch_to_device, pin_batch
from runtime.device.base import Device
from runtime.device.cuda import open_device
from runtime.device.memory import is_out_of_memory
from runtime.evaluation.batch_source import BatchSource, SampleRange
from runtime.evaluation.pending_means import (
    EvaluationFn,
    EvaluationView,
    drawing,
    evaluating,
    failed,
)


class Receiver(Protocol):
    """Receives results in the threads that computed them."""

    def __call__(self, samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
        """Receive the result of a batch, or of a part of one; may wait for the device."""


class DevicePool:
    """Evaluates batches in evaluation mode, without gradients. Each device takes the next batch
    when it has completed its last one, so that faster devices evaluate more.

    Args:
        models: A model for each device, on that device.
        fn: ``f(model, batch)``, called in the device's thread.
        receive: Receives the results.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device],
        fn: EvaluationFn,
        receive: Receiver,
    ) -> None:
        self._models = models
        self._devices = devices
        self._fn = fn
        self._receive = receive
        self._stopped = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, source: BatchSource) -> None:
        """Evaluate all batches; blocks until all threads have ended.

        Raises:
            EvaluationFailed: The function, the model or the data set raised.
        """
        shared = shared_by(self._models, self._fn, IN_EVALUATIONS)
        self._run(source)
        shared.compare()

    def _run(self, source: BatchSource) -> None:
        prepare_threads()
        install_thread_generators()
        num_cpus = sum(device.type == "cpu" for device in self._devices)
        contexts = [open_device(device, num_cpus) for device in self._devices]
        CompileLimits.extend(len(self._devices))
        IntraOpThreads.acquire()
        ProcessState.acquire()
        threads = []
        try:
            for rank, context in enumerate(contexts):
                context.follow_caller()
                thread = threading.Thread(
                    target=in_own_context(lambda r=rank, c=context: self._main(r, c, source)),
                    name=f"evaluation-{rank}",
                    daemon=True,
                )
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()
        except BaseException:
            self._stopped.set()
            for thread in threads:
                thread.join()
            raise
        finally:
            IntraOpThreads.release()
            ProcessState.release()
        if self._errors:
            raise self._errors[0]

    def _main(self, rank: int, context: Device, source: BatchSource) -> None:
        try:
            with context.activate():
                DeviceLoop(
                    self._models[rank],
                    context,
                    self._fn,
                    self._receive,
                    rank=rank,
                    world_size=len(self._devices),
                    is_stopped=self._stopped.is_set,
                ).run(source)
        except BaseException as error:
            self._stopped.set()
            self._errors.append(error)


class DeviceLoop:
    """Evaluates batches on one device, in the calling thread.

    Args:
        fn: ``f(model, batch)``.
        receive: Receives the results.
        rank: The rank of the thread.
        world_size: Number of threads.
        is_stopped: Called before each batch; True: evaluate no more.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Device,
        fn: EvaluationFn,
        receive: Receiver,
        *,
        rank: int,
        world_size: int,
        is_stopped: Callable[[], bool],
        worker: object = None,
    ) -> None:
        self._model = model
        self._context = context
        self._fn = fn
        self._receive = receive
        self._rank = rank
        self._world_size = world_size
        self._is_stopped = is_stopped
        self._worker = worker
        self._limit: int | None = None  # samples for which there is memory
        self._pending: tuple[SampleRange, Any, Any, EvaluationView] | None = None

    def run(self, source: BatchSource) -> None:
        """Evaluate batches until none is left. Leaves modes and generators as they were.

        Raises:
            EvaluationFailed: The function, the model or the data set raised.
        """
        state = self._context.generator_state()
        torch.clear_autocast_cache()  # casts of weights that a step or an average has changed
        try:
            with evaluating(self._model):
                while not self._is_stopped() and (samples := source.take()) is not None:
                    self._evaluate(samples)
                self._receive_pending()
        finally:
            torch.clear_autocast_cache()  # casts of weights that the caller changes next
            if state is not None:
                self._context.set_generator_state(state)

    def _evaluate(self, samples: SampleRange) -> None:
        start = samples.start
        while start < samples.stop:
            stop = samples.stop if self._limit is None else min(samples.stop, start + self._limit)
            if self._try(SampleRange(samples.batch, start, stop, samples.load)):
                start = stop
            else:
                self._limit = (stop - start) // 2

    def _try(self, part: SampleRange) -> bool:
        """Evaluate a batch or a part of one; returns False if there is no memory for it."""
        device = self._context.device
        try:
            data = part.load(part.start, part.stop)
            if device.type != "cpu":
                data = copy_batch_to_device(pin_batch(data, self._context), self._context)
            with drawing(device, part.start) as generator:
                view = EvaluationView(
                    self._model, device, generator, self._rank, self._world_size, self._worker
                )
                with worker_context(view):
                    result = self._fn(self._model, data)
        except Exception as error:
            if part.stop - part.start == 1 or not is_out_of_memory(error):
                raise failed(part.start, part.stop, device, error) from error
            error.__traceback__ = None  # its frames hold tensors
            self._receive_pending()
            return False
        self._receive_pending()
        self._pending = part, data, result, view
        if self._context.is_prompt:
            self._receive_pending()
        # Elsewhere the next batch is read before the host waits for this result.
        return True

    def _receive_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._receive(*pending)
        except Exception as error:
            part = pending[0]
            raise failed(part.start, part.stop, self._context.device, error) from error
