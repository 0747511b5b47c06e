"""Sets up a ReplicatedModule: the model, its copies, their threads and their process group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from coordinator.config import AverageBackend
from runtime.collective import resolve_backend
from runtime.core.checks import check_callable, check_devices, default_devices
from runtime.core.context import announce
from runtime.core.launchers import refuse_launcher
from runtime.core.tracebacks import folds_tracebacks
from runtime.device.base import device_summary
from runtime.device.cuda import devices_differ
from runtime.loop.accumulation import AccumulationSchedule
from runtime.loop.balance import Balancer
from runtime.loop.ddp_config import DdpConfig
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.mirror import ModelMaker
from runtime.loop.module import ReplicatedModule
from runtime.loop.one_device import SingleDeviceEngine
from runtime.loop.rank_group import NewOptimizer, RankGroup, train_mode
from runtime.loop.scatter import InputRules
from runtime.loop.threaded import ThreadedEngine
from runtime.replica.build import (
    FactoryDraws,
    OptimFactory,
    ParamGroups,
    build_model,
    build_optimizer,
    check_model,
)
from runtime.replica.max_norm import MaxNorm

logger = logging.getLogger(__name__)

_SETUP_REMEDY = (
    "the limit of Trainer.setup is fixed: give the slower device fewer samples, with "
    "Trainer.setup_with(..., config=DdpConfig(speed_hint=(rank, ratio))), or leave it out of "
    "devices"
)


@folds_tracebacks
def set_up(
    model_or_factory: Any,
    optim_factory: OptimFactory,
    devices: Sequence[torch.device | str] | None,
    config: DdpConfig,
    *,
    use_el_che: bool | None,
    param_groups: ParamGroups | None = None,
) -> ReplicatedModule:
    """Set the model up on all devices; see :meth:`Trainer.setup <gpuworker.Trainer.setup>`.

    Args:
        model_or_factory: A module, an object with a ``.module``, or a factory of either.
        devices: One per replica; ``None``: every visible CUDA device, else one CPU.
        use_el_che: True if ElChe is enabled; ``None``: with GPUs of different models.
        param_groups: ``f(model)`` returns the groups for ``optim_factory``; ``None``: it
            receives the trainable parameters.
    """
    refuse_launcher("Trainer.setup")
    if not isinstance(config, DdpConfig):
        raise TypeError(f"config must be a DdpConfig, got {type(config).__name__}")
    resolved = default_devices() if devices is None else check_devices(devices)
    config.check(len(resolved))
    check_callable("optim_factory", optim_factory, "f(params) -> Optimizer")
    if param_groups is not None:
        check_callable("param_groups", param_groups, "f(model) -> list of parameter groups")
    source = ModelSource(model_or_factory)
    recorder = LoopRecorder(config.timeline)
    new_optimizer = partial(build_optimizer, optim_factory, groups=param_groups)
    if len(resolved) == 1:
        return _on_one_device(source, new_optimizer, resolved[0], config, recorder)
    if use_el_che is None:
        use_el_che = devices_differ([device for device in resolved if device.type == "cuda"])
    accumulation = AccumulationSchedule.of(len(resolved), config, use_el_che=use_el_che)
    return _on_threads(source, new_optimizer, resolved, config, recorder, accumulation)


def _on_one_device(
    source: ModelSource,
    new_optimizer: NewOptimizer,
    device: torch.device,
    config: DdpConfig,
    recorder: LoopRecorder,
) -> ReplicatedModule:
    announce(logger, f"your own loop: {device_summary([device])}; nothing is reduced")
    recorder.begin([device], "none", "one device: nothing is reduced")
    try:
        model = source.first(device)
        train_mode(model)
        optimizer = new_optimizer(model)
        max_norm = MaxNorm(config.max_grad_norm)
        single = SingleDeviceEngine(model, device, optimizer, max_norm, recorder)
        recorder.built(model)
        return source.attach(ReplicatedModule(single, source.head))
    except BaseException as error:
        recorder.finish(error)
        raise


def _on_threads(
    source: ModelSource,
    new_optimizer: NewOptimizer,
    devices: Sequence[torch.device],
    config: DdpConfig,
    recorder: LoopRecorder,
    accumulation: AccumulationSchedule,
) -> ReplicatedModule:
    backend, reason = resolve_backend(AverageBackend.AUTO, devices)
    kinds = "unequal devices" if devices_differ(devices) else "equal devices"
    announce(
        logger,
        f"your own loop: {device_summary(devices)}; {kinds}; gradients go over {backend.name}: "
        f"{reason}",
    )
    recorder.begin(devices, backend.collective, reason)
    ranks = RankGroup.start(
        devices,
        backend,
        recorder,
        source.first,
        source.maker,
        new_optimizer,
        timeout_remedy=_SETUP_REMEDY,
        loss_weight=config.loss_weight,
    )
    try:
        engine = ThreadedEngine(
            ranks,
            Balancer(len(devices), config.speed_hint, fixed=not config.balance),
            accumulation,
            recorder,
            MaxNorm(config.max_grad_norm),
            InputRules(config.batch_dim, config.whole, config.loss_weight),
        )
        recorder.built(engine.model)
        return source.attach(ReplicatedModule(engine, source.head))
    except BaseException as error:
        recorder.finish(error)
        ranks.runner.close()
        raise


class ModelSource:
    """Makes models from the user's model or factory.

    Args:
        given: A module, an object with a ``.module``, or a factory of either.

    Attributes:
        head: The object with a ``.module``, given or made first.
        maker: Makes a further model; ``None`` without a factory.
    """

    def __init__(self, given: Any) -> None:
        self.head: Any = None
        self.maker: ModelMaker | None = None
        self._model: nn.Module | None = None
        self._draws: FactoryDraws | None = None
        model = given if isinstance(given, nn.Module) else getattr(given, "module", None)
        if isinstance(given, type) or not isinstance(model, nn.Module):
            if not callable(given):
                raise TypeError(
                    f"pass a torch.nn.Module, an object whose .module is one, or a factory "
                    f"f(device) -> nn.Module, not a {type(given).__name__}"
                )
            check_callable("model_factory", given, "f(device) -> nn.Module")
            self._factory: Callable[[torch.device], Any] = given
            self.maker = self._make
            return
        if isinstance(model, ReplicatedModule):
            raise ValueError("the model was set up before; set up its .module, or keep using it")
        if model is not given:
            self.head = given
        check_model(model, "Trainer.setup")
        self._model = model

    def first(self, device: torch.device) -> nn.Module:
        """The model that is trained, on its device and without gradients."""
        model = self._make(device) if self._model is None else self._model.to(device)
        model.zero_grad(set_to_none=True)
        return model

    def _make(self, device: torch.device) -> nn.Module:
        with nullcontext() if self._draws is None else self._draws.repeated(device):
            if self._draws is None:
                self._draws = FactoryDraws(device)
            made = self._factory(device)
        inner = getattr(made, "module", None)
        if not isinstance(made, nn.Module) and isinstance(inner, nn.Module):
            self.head = made if self.head is None else self.head
            made = inner
        return build_model(lambda _: made, device)

    def attach(self, model: ReplicatedModule) -> ReplicatedModule:
        """Set the head's ``.module`` to ``model``, and return it."""
        if self.head is not None:
            try:
                self.head.module = model
            except AttributeError as error:
                raise TypeError(
                    f"{type(self.head).__name__}.module cannot be set: pass the module itself"
                ) from error
        return model
