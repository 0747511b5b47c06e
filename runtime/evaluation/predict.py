"""Predictions and means over a data set, on several devices."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runtime.data.dataset import empty_text
from runtime.evaluation.batch_means import BatchMeans, weighted_means
from runtime.evaluation.batch_source import SampleRange, open_source
from runtime.evaluation.device_pool import DevicePool
from runtime.evaluation.output_collector import OutputCollector
from runtime.evaluation.pending_means import EvaluationFn, EvaluationView, read_means


def predict_outputs(
    models: Sequence[nn.Module],
    devices: Sequence[torch.device],
    dataset: Any,
    fn: EvaluationFn | None,
    *,
    out: Any = None,
    batch_size: int | None = None,
    lock: bool | None = None,
) -> Any:
    """The outputs for all samples, in the data's order; see :func:`gpuworker.predict`."""
    source = open_source(dataset, batch_size, len(devices), lock, call="predict(model, ds)")
    collector = OutputCollector(source.num_samples, out)

    def receive(samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
        collector.add(samples.start, samples.stop, result)

    DevicePool(models, devices, fn or call_for_output, receive).run(source)
    return collector.result()


def evaluate_means(
    models: Sequence[nn.Module],
    devices: Sequence[torch.device],
    dataset: Any,
    fn: EvaluationFn,
    *,
    batch_size: int | None = None,
    lock: bool | None = None,
) -> dict[str, float]:
    """The means over all samples; see :meth:`gpuworker.TrainedState.evaluate`."""
    call = "evaluate(ds, fn)"
    source = open_source(dataset, batch_size, len(devices), lock, call=call)
    collector = MeansCollector()
    DevicePool(models, devices, fn, collector).run(source)
    if not collector.found:
        raise ValueError(empty_text(call))  # a stream
    return means_in_order(collector.found)


class MeansCollector:
    """Collects the means of batches. Thread-safe.

    Attributes:
        found: The means, in no order.
    """

    def __init__(self) -> None:
        self.found: list[BatchMeans] = []
        self._lock = threading.Lock()

    def __call__(self, samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
        """Add the result of a batch; waits for the device."""
        means = read_means(samples.start, samples.stop, data, result, view)
        with self._lock:
            self.found.append(means)


def means_in_order(found: Iterable[BatchMeans]) -> dict[str, float]:
    """The weighted means of batches, added up in the data's order."""
    return weighted_means(sorted(found, key=lambda means: means.position))


def call_for_output(model: nn.Module, batch: Any) -> Any:
    """Call a model with the first element of a tuple or list, with a mapping by name if its
    parameters have these names, and with any other batch itself.
    """
    if isinstance(batch, (tuple, list)):
        return model(batch[0])
    if isinstance(batch, Mapping) and _takes_names(model, batch):
        return model(**batch)
    return model(batch)


def _takes_names(model: nn.Module, batch: Mapping[Any, Any]) -> bool:
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**batch)
    except (TypeError, ValueError):
        return False
    return any(name in signature.parameters for name in batch)
