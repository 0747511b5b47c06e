"""TrainedState: the result of a run."""

from __future__ import annotations

import inspect
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, overload

import torch
from torch import Tensor, nn

from coordinator.messages import WorkerFailure
from coordinator.metrics import EpochMetrics
from coordinator.run_state import Outcome
from runtime.checkpoint.files import save_weights
from runtime.checkpoint.format import plain, plain_key, resize_buffers
from runtime.checkpoint.subclasses import restore_subclasses
from runtime.core.checks import (
    check_callable,
    check_devices,
    check_flag,
    check_int,
    check_path,
    default_devices,
)
from runtime.core.errors import CheckpointError
from runtime.evaluation.pending_means import EvaluationFn
from runtime.evaluation.predict import evaluate_means, predict_outputs
from runtime.loop import ReplicatedModule
from runtime.replica.build import CopyingFactory, FactoryDraws, ModelFactory, ModelT, ModelT_co
from runtime.replica.copying import copy_module
from runtime.replica.flat import (
    EXTRA_STATE,
    FlatState,
    extra_key,
    modules_with_extra_state,
)

logger = logging.getLogger(__name__)

Devices = Sequence[str | torch.device] | str | torch.device | int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainedState(Generic[ModelT_co]):
    """The averaged model at the end of a run.

    Attributes:
        params: All parameters, trained or frozen, on the CPU, under the bare module's names, in
            its order.
        buffers: All buffers, persistent or not, likewise.
        metrics: One entry for each closed epoch.
        failures: Workers that died during the run.
        stopped: True if the run was stopped before its end.
        reason: Why the run ended: ``"finished"``; ``"stopped"`` by :meth:`TrainerHandle.stop`, a
            callback or ``metrics_fn``; ``"signalled"`` by Ctrl-C or a signal; ``"out_of_time"``
            by :class:`~gpuworker.TimeLimit`.
        checkpoint_errors: The last error of writing checkpoints, if any; all are logged.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    metrics: tuple[EpochMetrics, ...] = ()
    failures: tuple[WorkerFailure, ...] = ()
    stopped: bool = False
    reason: str = "finished"
    checkpoint_errors: tuple[BaseException, ...] = ()
    _keys: tuple[str, ...] = ()
    _extra: dict[str, Any] = field(default_factory=dict)
    _ema: dict[str, Tensor] | None = None
    _factory: RunFactory = field(default_factory=lambda: RunFactory(None), compare=False)

    def __repr__(self) -> str:
        parts = [self.reason, _count(len(self.metrics), "epoch")]
        if self.metrics:
            parts.append(f"avg_loss {self.metrics[-1].avg_loss:.4g}")
        own = {id(p): p.numel() for p in self.params.values()}
        parts.append(f"{sum(own.values()):,} parameters in {_count(len(own), 'tensor')}")
        if self.failures:
            parts.append(_count(len(self.failures), "failed worker"))
        return f"TrainedState({', '.join(parts)})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as a safetensors file, which a bare module loads:
        ``Net().load_state_dict(safetensors.torch.load_file(path))``.

        Blocks until the file is on disk. If this raises or the process dies, ``path`` keeps its
        old content. Tied tensors are written under each of their names. Extra state of modules
        (``get_extra_state``) is omitted: a model that has some loads the file with
        ``strict=False``.

        Raises:
            OSError, CheckpointError: The file could not be written, or safetensors does not
                support a tensor's type.
        """
        weights = {k: v for k, v in self.state_dict().items() if k not in self._extra}
        save_weights(check_path("save", path), weights)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state dict of the bare module, in its order, for ``Net().load_state_dict(...)``.

        Contains tensors, and the extra state of modules that have some.
        """
        every = {**self.params, **self.buffers, **self._extra}
        return OrderedDict((key, every[key]) for key in self._keys)

    def ema_state_dict(self) -> OrderedDict[str, Any]:
        """:meth:`state_dict` with the moving averages of the trained parameters, of
        :meth:`TrainerBuilder.ema`; buffers and frozen parameters are the last ones.

        Raises:
            ValueError: The run had no moving average.
        """
        if self._ema is None:
            raise ValueError(
                "the run had no moving average: call .ema(decay) on the builder, or fit(ema=decay)"
            )
        return OrderedDict((key, self._ema.get(key, v)) for key, v in self.state_dict().items())

    @overload
    def model(self, factory: None = None, device: str | torch.device = "cpu") -> ModelT_co: ...

    @overload
    def model(
        self, factory: Callable[..., ModelT], device: str | torch.device = "cpu"
    ) -> ModelT: ...

    def model(
        self,
        factory: Callable[..., nn.Module] | None = None,
        device: str | torch.device = "cpu",
    ) -> nn.Module:
        """A new module that holds the trained values, in the modes that the factory sets.

        Args:
            factory: ``f(device) -> nn.Module``, or a module's class without required arguments;
                ``None``: that of the run.
            device: The module's device.

        Raises:
            ValueError: No factory is given, and the state is not that of a run of this process.
            TypeError: The factory does not return a module.
            RuntimeError: The module has other names or shapes.
        """
        return self.load_into(self._factory.build(factory, torch.device(device)))

    def with_values(self, values: Mapping[str, Any]) -> TrainedState[ModelT_co]:
        """This state with other values, by name; names that ``values`` lacks keep theirs."""
        return replace(
            self,
            params={name: values.get(name, t) for name, t in self.params.items()},
            buffers={name: values.get(name, t) for name, t in self.buffers.items()},
            _extra={name: values.get(name, value) for name, value in self._extra.items()},
        )

    def load_into(self, module: ModelT) -> ModelT:
        """Copy the trained values, buffers that are not in ``state_dict()`` included, into a module
        of the same structure, on its devices. Returns the module.

        Raises:
            TypeError: Not a module.
            RuntimeError: The module has other names or shapes, which are listed.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"load_into({module!r:.80}): pass a module; model(factory) takes its factory"
            )
        resize_buffers(module, self.buffers)
        keys = {plain_key(key): key for key in module.state_dict()}
        module.load_state_dict({keys.get(k, k): v for k, v in self.state_dict().items()})
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                saved = self.buffers.get(plain_key(name))
                if saved is not None and plain_key(name) not in self._keys:
                    buffer.copy_(saved)
        return module

    def evaluate(
        self,
        ds: Any,
        fn: Callable[[ModelT_co, Any], Any],
        devices: Devices = None,
        model_factory: ModelFactory | None = None,
        *,
        batch_size: int | None = None,
        dataset_lock: bool | None = None,
    ) -> dict[str, float]:
        """Evaluate the trained model on a data set, on all devices. Blocks.

        Each sample is evaluated once, in evaluation mode without gradients, by a thread for each
        device; the next batch goes to the device that is free.

        Args:
            ds: Any data set that can be trained on, a ``DataLoader`` included.
            fn: ``f(model, batch)``; returns a dict of means over the batch, alone or as ``(dict,
                weight)``, or a loss in the forms of a ``train_fn``. Values of
                :func:`~gpuworker.record_scalar` are included.
            devices: As for :meth:`TrainerBuilder.devices`; ``None``: every CUDA device, else the
                CPU.
            model_factory: ``f(device) -> nn.Module``, for a state that is not from a run of this
                process.
            batch_size: Samples in a batch (default: the ``DataLoader``'s, else 64).
            dataset_lock: See :meth:`TrainerBuilder.dataset_lock`.

        Returns:
            The mean of each value over all samples, exactly weighted by the samples of each batch
            or by the weights that ``fn`` returns.

        Raises:
            EvaluationFailed: ``fn``, the model or the data set raised; names the samples.
            ValueError: There is no model factory.
        """
        check_callable("fn", fn, "(model, batch) -> dict of means")
        found = _devices(devices)
        models = [self.model(model_factory, device) for device in found]
        return evaluate_means(
            models, found, ds, fn, batch_size=_batch_size(batch_size), lock=_lock(dataset_lock)
        )


def predict(
    model_or_state: nn.Module | TrainedState,
    ds: Any,
    fn: EvaluationFn | None = None,
    devices: Devices = None,
    out: Any = None,
    model_factory: ModelFactory | None = None,
    *,
    batch_size: int | None = None,
    dataset_lock: bool | None = None,
) -> Any:
    """Compute a model's outputs for a data set, on all devices. Blocks.

    Each sample is evaluated once, in evaluation mode without gradients, by a thread for each
    device; the next batch goes to the device that is free. A batch for which a device has no memory
    is halved. The modes of a module that is passed are restored.

    Args:
        model_or_state: A module, or the result of a run. A module on one of the devices is used
            there, and copied to the others.
        ds: Any data set that can be trained on, a ``DataLoader`` included.
        fn: ``f(model, batch)``; returns the outputs, with one row for each sample. Default: the
            model's output for the batch, or for its first element if it is a tuple or list.
        devices: As for :meth:`TrainerBuilder.devices`; ``None``: every CUDA device, else the CPU.
        out: Tensor or memory map to fill, for outputs of one tensor. A memory map, such as
            ``numpy.lib.format.open_memmap(path, "w+", "float32", (len(ds), 10))``, holds outputs
            of any size.
        model_factory: ``f(device) -> nn.Module``, for a state that is not from a run of this
            process, or for a module that cannot be copied.
        batch_size: Samples in a batch (default: the ``DataLoader``'s, else 64).
        dataset_lock: See :meth:`TrainerBuilder.dataset_lock`.

    Returns:
        The outputs in the data's order, on the CPU, in the form of the output of a batch: a tensor,
        or a tuple, list or dict of tensors. A tensor whose samples have unequal shapes becomes a
        list with one tensor for each sample, and a list with one item for each sample stays one.

    Raises:
        EvaluationFailed: ``fn``, the model or the data set raised; names the samples.
        ValueError: A state has no model factory.
        TypeError: The module cannot be copied.
    """
    if fn is not None:
        check_callable("fn", fn, "(model, batch) -> outputs")
    found = _devices(devices)
    if isinstance(model_or_state, TrainedState):
        models = [model_or_state.model(model_factory, device) for device in found]
    elif isinstance(model_or_state, nn.Module):
        models = _copies(model_or_state, found, model_factory)
    else:
        raise TypeError(f"predict({model_or_state!r:.80}, ...): pass a module or a TrainedState")
    return predict_outputs(
        models,
        found,
        ds,
        fn,
        out=out,
        batch_size=_batch_size(batch_size),
        lock=_lock(dataset_lock),
    )


def _devices(devices: Devices) -> tuple[torch.device, ...]:
    return default_devices() if devices is None else check_devices(devices)


def _batch_size(batch_size: int | None) -> int | None:
    return None if batch_size is None else check_int("batch_size", batch_size, 1)


def _lock(dataset_lock: bool | None) -> bool | None:
    return None if dataset_lock is None else check_flag("dataset_lock", dataset_lock)


def _copies(
    module: nn.Module, devices: Sequence[torch.device], factory: ModelFactory | None
) -> list[nn.Module]:
    """The module on each device: itself on its own device, else a copy."""
    if isinstance(module, _WRAPPERS):
        module = module.module
    own = {t.device for t in (*module.parameters(), *module.buffers())} or {devices[0]}
    models: list[nn.Module] = []
    for device in devices:
        if own == {device} and module not in models:
            models.append(module)
        elif factory is None:
            models.append(copy_module(module, device))
        else:
            made = RunFactory(factory).build(None, device)
            made.load_state_dict(module.state_dict())
            models.append(made)
    return models


_WRAPPERS = (
    ReplicatedModule,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
)


class RunFactory:
    """The model factory of a run, kept by its state in this process: copies of the state refer to
    the same one, pickled states have none.

    Args:
        factory: The factory; ``None``: there is none.
        draws: The random numbers with which it built rank 0's model.
    """

    def __init__(self, factory: ModelFactory | None, draws: FactoryDraws | None = None) -> None:
        self._factory = factory
        self._draws = draws

    @property
    def given(self) -> nn.Module | None:
        """The module that was passed in place of the factory, if any."""
        return self._factory.module if isinstance(self._factory, CopyingFactory) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFactory, (None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> RunFactory:
        return self

    def build(self, factory: ModelFactory | None, device: torch.device) -> nn.Module:
        """Build a module on a device, by ``factory`` if given, else like rank 0's model.

        Raises:
            ValueError: There is no factory.
            TypeError: The factory does not return a module.
        """
        draws = self._draws if factory is None else None
        with nullcontext() if draws is None else draws.repeated(device):
            return self._build(factory or self._factory, device)

    def _build(self, factory: ModelFactory | None, device: torch.device) -> nn.Module:
        if factory is None:
            raise ValueError(
                "the state was loaded or copied from another process and has no model factory: "
                "pass one, f(device) -> nn.Module, as model_factory="
            )
        if isinstance(factory, nn.Module):
            raise TypeError("model(factory) takes a factory; load_into(module) takes a module")
        takes_device = not callable(factory) or _takes_device(factory)
        if takes_device:
            check_callable("model_factory", factory, "(device) -> nn.Module")
        made: Any = factory(device) if takes_device else factory()  # type: ignore[call-arg]
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"model_factory returned a {type(made).__name__}: return a torch.nn.Module"
            )
        return made.to(device)


def _takes_device(factory: ModelFactory) -> bool:
    """False for a function without parameters, or a class that needs none."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    return bool(required) if isinstance(factory, type) else bool(parameters)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def assemble_state(
    model: nn.Module,
    flat: FlatState,
    outcome: Outcome,
    checkpoint_errors: tuple[BaseException, ...] = (),
    factory: RunFactory | None = None,
    ema: Mapping[str, Tensor] | None = None,
) -> TrainedState:
    """Load the final average into the model and copy its state to the CPU.

    Args:
        model: A replica whose worker has exited.
        flat: Its flat state.
        outcome: The outcome of a run that did not fail.
        checkpoint_errors: Errors of writing checkpoints.
        factory: The run's model factory.
        ema: Moving averages of parameters, by name.
    """
    assert outcome.payload is not None, "a run without a failure has a final state"
    with torch.no_grad():
        flat.load(outcome.payload)
        copies: dict[int, Tensor] = {}

        def copy(t: Tensor) -> Tensor:
            if id(t) not in copies:
                copies[id(t)] = t.detach().to("cpu", copy=True)
            return copies[id(t)]

        params = {plain_key(n): copy(p) for n, p in model.named_parameters()}
        buffers = {plain_key(n): copy(b) for n, b in model.named_buffers()}
        state = {plain_key(k): v for k, v in model.state_dict(keep_vars=True).items()}
        extra = {k: _copied(v) for k, v in state.items() if k.rpartition(".")[2] == EXTRA_STATE}
        keys = []
        for key, value in state.items():
            if key in extra:
                keys.append(key)
                continue
            if not isinstance(value, Tensor):
                continue
            keys.append(key)
            if key not in params and key not in buffers:
                # The second name of a tied tensor.
                (params if isinstance(value, nn.Parameter) else buffers)[key] = copy(value)
        named = dict(model.named_parameters())
        by_id = {id(named[name]): average for name, average in (ema or {}).items()}
        averages = {key: by_id[id(value)] for key, value in state.items() if id(value) in by_id}
    return TrainedState(
        params=params,
        buffers=buffers,
        metrics=tuple(outcome.metrics),
        failures=tuple(outcome.failures),
        stopped=outcome.stopped,
        reason=outcome.reason,
        checkpoint_errors=checkpoint_errors,
        _keys=tuple(keys),
        _extra=extra,
        _ema=None if ema is None else averages,
        _factory=factory or RunFactory(None),
    )


def load_given(state: TrainedState[Any]) -> None:
    """Load a trained state into the module that was passed in place of the run's factory, if
    any; failures are logged.
    """
    module = state._factory.given
    if module is None:
        return
    try:
        load_trained(module, state)
    except Exception:
        logger.exception(
            "the trained weights were not loaded into the module that was passed; they are in the "
            "state that join() returns"
        )


@torch.no_grad()
def load_trained(module: nn.Module, state: TrainedState) -> None:
    """Copy the trained values into a module of the same structure, on its devices."""
    values = {**state.params, **state.buffers}
    resize_buffers(module, values)
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        t.copy_(values[plain_key(name)])
    for name, sub in modules_with_extra_state(module).items():
        sub.set_extra_state(state._extra[plain_key(extra_key(name))])


def _copied(value: Any) -> Any:
    """Extra state, copied to the CPU if its types are supported."""
    try:
        return restore_subclasses(plain(value, EXTRA_STATE, copy=True))
    except CheckpointError:
        return value
