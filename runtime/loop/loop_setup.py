"""Builds a ReplicatedModule: its replicas, their threads and their process group."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coordinator.config import AverageBackend
from runtime.collective import create_collectives
from runtime.core.checks import check_callable, check_devices, default_devices
from runtime.core.context import announce
from runtime.core.errors import ReplicaMismatch
from runtime.core.loss_weights import LossWeightFn
from runtime.device.base import Device, device_summary
from runtime.device.cuda_api import StreamSync
from runtime.loop.accumulation import AccumulationSchedule
from runtime.loop.balance import Balancer, unequal_devices, unequal_gpus
from runtime.loop.collective_group import CollectiveGroup, resolve_backend
from runtime.loop.ddp_config import DdpConfig
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.loop_replica import LoopReplica
from runtime.loop.module import ReplicatedModule
from runtime.loop.one_device import SingleDeviceEngine
from runtime.loop.rank_threads import Task
from runtime.loop.runner import Runner
from runtime.loop.threaded import ThreadedEngine
from runtime.replica.build import OptimFactory, Template, build_model, check_model, copy_template

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0
"""Seconds that a replica waits for a slower one; a failed replica aborts its peers at once."""


def set_up(
    model_or_factory: Any,
    optim_factory: OptimFactory,
    devices: Sequence[torch.device | str] | None,
    config: DdpConfig,
    *,
    use_el_che: bool | None,
) -> ReplicatedModule:
    """Build all replicas; see :meth:`Trainer.setup <gpuworker.Trainer.setup>`.

    Args:
        model_or_factory: A module, an object with a ``.module``, or a factory of either.
        optim_factory: Makes each replica's optimizer.
        devices: One per replica; ``None``: every visible CUDA device, else one CPU.
        config: The settings.
        use_el_che: Whether ElChe is enabled; ``None``: with GPUs of different models.
    """
    if not isinstance(config, DdpConfig):
        raise TypeError(f"config must be a DdpConfig, got {type(config).__name__}")
    resolved = default_devices() if devices is None else check_devices(devices)
    config.check(len(resolved))
    check_callable("optim_factory", optim_factory, "f(params) -> Optimizer")
    source = ModelSource(model_or_factory, len(resolved))
    recorder = LoopRecorder(config.timeline)
    if len(resolved) == 1:
        announce(logger, f"your own loop: {device_summary(resolved)}; nothing is reduced")
        recorder.begin(resolved, "none", "one device: nothing is reduced")
        try:
            model = source.make(0, resolved[0])
            single = SingleDeviceEngine(
                model, resolved[0], optim_factory, config.max_grad_norm, recorder
            )
            recorder.built(model)
            return source.attach(ReplicatedModule(single, source.head))
        except BaseException as error:
            recorder.finish(error)
            raise
    if use_el_che is None:
        use_el_che = unequal_gpus(resolved)
    accumulation = AccumulationSchedule.of(len(resolved), config, use_el_che=use_el_che)
    backend, reason = resolve_backend(AverageBackend.AUTO, resolved)
    devices_differ = unequal_devices(resolved)
    kinds = "unequal devices" if devices_differ else "equal devices"
    announce(
        logger,
        f"your own loop: {device_summary(resolved)}; {kinds}; gradients go over {backend.name}: "
        f"{reason}",
    )
    make_collectives = partial(
        create_collectives, len(resolved), backend.collective, resolved, COLLECTIVE_TIMEOUT_S
    )
    group = CollectiveGroup(make_collectives)

    recorder.begin(resolved, backend.collective, reason)
    try:
        runner = Runner(resolved, group, recorder)
    except BaseException as error:
        recorder.finish(error)
        raise
    try:
        replicas = build_replicas(
            runner, source.make, optim_factory, config.loss_weight, tensors=source.tensors()
        )
        group.get()
        balancer = Balancer(len(resolved), config.speed_hint, fixed=not config.balance)
        engine = ThreadedEngine(
            replicas,
            runner,
            balancer,
            accumulation,
            recorder,
            config.max_grad_norm,
            devices_differ=devices_differ,
        )
        recorder.built(replicas[0].model)
        return source.attach(ReplicatedModule(engine, source.head))
    except BaseException as error:
        recorder.finish(error)
        runner.close()
        raise


RankModelFactory = Callable[[int, torch.device, nn.Module | None], nn.Module]
"""``f(rank, device, first)`` returns a rank's model on its device, with the weights of ``first``,
which is rank 0's model (``None`` for rank 0 itself)."""


class ModelSource:
    """Makes each rank's model from the user's model or factory.

    Args:
        given: A module, an object with a ``.module``, or a factory of either.
        world_size: Number of models; a module is copied at once.

    Attributes:
        head: The object with a ``.module``, given or made for rank 0.
    """

    def __init__(self, given: Any, world_size: int) -> None:
        self.head: Any = None
        self._factory: Callable[[torch.device], Any] | None = None
        self._models: list[nn.Module] = []
        model = given if isinstance(given, nn.Module) else getattr(given, "module", None)
        if isinstance(given, type) or not isinstance(model, nn.Module):
            if not callable(given):
                raise TypeError(
                    f"pass a torch.nn.Module, an object whose .module is one, or a factory "
                    f"f(device) -> nn.Module, not a {type(given).__name__}"
                )
            self._factory = given
            return
        if isinstance(model, ReplicatedModule):
            raise ValueError("the model was set up before; set up its .module, or keep using it")
        if model is not given:
            self.head = given
        check_model(model, "Trainer.setup")
        try:
            copies = [copy.deepcopy(model) for _ in range(world_size - 1)]
        except Exception as error:
            raise ValueError(
                f"the model cannot be copied for the other devices ({error}); pass a factory "
                "f(device) -> nn.Module instead"
            ) from error
        self._models = [model, *copies]

    def make(self, rank: int, device: torch.device, first: nn.Module | None = None) -> nn.Module:
        """Make a rank's model on its device, with the weights of ``first``."""
        if self._factory is None:
            return self._models[rank].to(device)
        made = self._factory(device)
        model = made
        if not isinstance(made, nn.Module) and isinstance(getattr(made, "module", None), nn.Module):
            model = made.module
            self.head = made if rank == 0 else self.head
        model = build_model(lambda _: model, device)
        if first is not None:
            copy_template(model, Template.of(first), rank)
            if len(list(model.modules())) != len(list(first.modules())):
                raise ReplicaMismatch(
                    f"model_factory gave rank {rank} a different number of modules than rank 0; "
                    "it must build the same architecture each time"
                )
        return model

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of the models that exist already."""
        return [t for m in self._models for t in (*m.parameters(), *m.buffers())]

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


def build_replicas(
    runner: Runner,
    make: RankModelFactory,
    optim_factory: OptimFactory,
    loss_weight: LossWeightFn | None = None,
    *,
    tensors: Sequence[Tensor] = (),
) -> list[LoopReplica]:
    """Build the replicas one at a time, each in its own thread, rank 0 first.

    Args:
        runner: Runs tasks in the replicas' threads.
        make: Makes a rank's model.
        optim_factory: Makes each replica's optimizer.
        loss_weight: See :class:`~gpuworker.DdpConfig`.
        tensors: Parameters and buffers of models that exist already.
    """
    replicas: list[LoopReplica] = []
    num_ranks = len(runner.contexts)
    has_grad: list[list[bool]] = [[] for _ in runner.contexts]
    sync = StreamSync([context.device for context in runner.contexts])
    # Copies of an existing model to its GPU may still be pending.
    events = sync.marks(tensors)

    def build(rank: int, context: Device) -> LoopReplica:
        sync.wait(context.device, events)
        model = make(rank, context.device, replicas[0].model if replicas else None)
        replica = LoopReplica(rank, context, model, optim_factory, has_grad, loss_weight)
        context.finish()  # the other replicas copy its weights on their own streams
        return replica

    for rank, context in enumerate(runner.contexts):
        tasks: list[Task | None] = [None] * num_ranks
        tasks[rank] = partial(build, rank, context)
        outcome = runner.execute(tasks)[rank]
        if outcome.error is not None:
            outcome.error.add_note(f"while replica {rank} was built on {context.device}")
            raise outcome.error
        replicas.append(outcome.value)
    return replicas
