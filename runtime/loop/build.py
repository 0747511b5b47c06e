"""From a model, or what makes one, to the module that a loop trains."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from coordinator.policy import ApplyPolicy, AverageBackend, choose_backend
from runtime.collective import create_collectives
from runtime.config import check_callable, check_devices
from runtime.core.errors import ReplicaMismatch
from runtime.device.base import DeviceContext
from runtime.device.summary import device_summary
from runtime.loop.balance import Balancer
from runtime.loop.cadence import Cadence, unequal_gpus
from runtime.loop.config import DdpConfig
from runtime.loop.crossing import Crossing
from runtime.loop.journal import Journal
from runtime.loop.loop_threads import kind_of
from runtime.loop.module import ReplicatedModule
from runtime.loop.replica import LoopReplica
from runtime.loop.replicas import ReplicaThreads, Task
from runtime.loop.runner import Ends, Runner
from runtime.loop.solo import Solo
from runtime.loop.team import Team
from runtime.replica.build import OptimFactory, Template, adopt, build_model

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0
"""How long a replica waits for a slower one; one that fails wakes its peers at once."""


def set_up(
    model_or_factory: Any,
    optim_factory: OptimFactory,
    devices: Sequence[torch.device | str] | None,
    config: DdpConfig,
    *,
    spaced: bool | None,
) -> ReplicatedModule:
    """Build all replicas; see :meth:`Trainer.setup <runtime.Trainer.setup>`.

    Args:
        model_or_factory: A module, an object with a ``.module``, or a factory of either.
        optim_factory: Makes each replica's optimizer.
        devices: ``None``: every visible CUDA device, else one CPU.
        config: The settings.
        spaced: Whether ElChe is on; ``None``: where there are GPUs of different models.
    """
    if not isinstance(config, DdpConfig):
        raise TypeError(f"config must be a DdpConfig, got {type(config).__name__}")
    places = _visible() if devices is None else check_devices(devices)
    config.check(len(places))
    check_callable("optim_factory", optim_factory, "f(params) -> Optimizer")
    source = Source(model_or_factory, len(places))
    journal = Journal(config.timeline)
    logger.info("your own loop: %s", device_summary(places))
    if len(places) == 1:
        model = source.make(0, places[0])
        engine = Solo(
            model, places[0], optim_factory, max_grad_norm=config.max_grad_norm, journal=journal
        )
        return source.finish(ReplicatedModule(engine, source.head))
    if spaced is None:
        spaced = unequal_gpus(places)
    cadence = Cadence.of(len(places), config, spaced=spaced)
    ends = Ends(_group_maker(places))
    threads = ReplicaThreads(places, ends.close)
    try:
        replicas = _build_replicas(threads, source, optim_factory)
        ends.get()
        runner = Runner(threads, places, ends, journal)
        balancer = Balancer(len(places), config.speed_hint, fixed=not config.balance)
        drifting = len({kind_of(place) for place in places}) > 1
        team = Team(
            replicas,
            runner,
            balancer,
            cadence,
            journal,
            config.max_grad_norm,
            drifting=drifting,
        )
        return source.finish(ReplicatedModule(team, source.head))
    except BaseException:
        threads.close()
        raise


class Source:
    """Where the models come from.

    Args:
        given: A module, an object with a ``.module``, or a factory of either.
        world_size: How many are needed; copies of a module are made at once.

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
        _check_module(model)
        try:
            twins = [copy.deepcopy(model) for _ in range(world_size - 1)]
        except Exception as error:
            raise ValueError(
                f"the model cannot be copied for the other devices ({error}); pass a factory "
                "f(device) -> nn.Module instead"
            ) from error
        self._models = [model, *twins]

    def make(self, rank: int, device: torch.device, first: nn.Module | None = None) -> nn.Module:
        """A rank's model on its device, with the weights of rank 0's."""
        if self._factory is None:
            return self._models[rank].to(device)
        made = self._factory(device)
        model = made
        if not isinstance(made, nn.Module) and isinstance(getattr(made, "module", None), nn.Module):
            model = made.module
            self.head = made if rank == 0 else self.head
        model = build_model(lambda _: model, device)
        if first is not None:
            adopt(model, Template.of(first), rank)
            if len(list(model.modules())) != len(list(first.modules())):
                raise ReplicaMismatch(
                    f"model_factory gave rank {rank} another number of modules than rank 0; it "
                    "must build the same architecture each time"
                )
        return model

    def tensors(self) -> list[Tensor]:
        """What the models that are there already consist of."""
        return [t for m in self._models for t in (*m.parameters(), *m.buffers())]

    def finish(self, model: ReplicatedModule) -> ReplicatedModule:
        """Let the head use the replicas."""
        if self.head is not None:
            try:
                self.head.module = model
            except AttributeError as error:
                raise TypeError(
                    f"{type(self.head).__name__}.module cannot be set: pass the module itself"
                ) from error
        return model


def _check_module(model: nn.Module) -> None:
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(t):
            raise ValueError(
                f"{name!r} is lazy, its shape is not known before the first forward; run one "
                "forward before Trainer.setup"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient, nothing can be trained")


def _build_replicas(
    threads: ReplicaThreads, source: Source, optim_factory: OptimFactory
) -> list[LoopReplica]:
    """One after the other, each in its own thread, rank 0 first."""
    replicas: list[LoopReplica] = []
    used: list[list[bool]] = [[] for _ in threads.contexts]
    crossing = Crossing([context.device for context in threads.contexts])
    # A model that is on a GPU may still be on its way there.
    events = crossing.depart(source.tensors())
    for rank, context in enumerate(threads.contexts):
        first = replicas[0].model if replicas else None
        build = partial(_build, rank, context, source, optim_factory, first, used)
        tasks: list[Task | None] = [None] * len(threads.contexts)
        tasks[rank] = partial(_after, partial(crossing.arrive, context.device, events), build)
        outcome = threads.run(tasks)[rank]
        if outcome.error is not None:
            outcome.error.add_note(f"while rank {rank} was built on {context.device}")
            raise outcome.error
        replicas.append(outcome.value)
    return replicas


def _after(first: Callable[[], object], then: Callable[[], Any]) -> Any:
    first()
    return then()


def _build(
    rank: int,
    context: DeviceContext,
    source: Source,
    optim_factory: OptimFactory,
    first: nn.Module | None,
    used: list[list[bool]],
) -> LoopReplica:
    model = source.make(rank, context.device, first)
    for name, p in model.named_parameters():
        if p.requires_grad and not p.is_floating_point():
            raise ValueError(
                f"parameter {name!r} is {p.dtype}: gradients of several devices can be added up "
                "for floating-point parameters only; hold its real and imaginary part apart"
            )
    replica = LoopReplica(rank, context, model, optim_factory, used)
    context.finish()  # others copy its weights on streams of their own
    return replica


def _visible() -> tuple[torch.device, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.device("cuda", i) for i in range(count)) or (torch.device("cpu"),)


def _group_maker(devices: Sequence[torch.device]) -> Callable[[], Any]:
    """How the ranks' group is made, over NCCL where that serves these devices."""
    names = [str(device) for device in devices]
    backend, reason = choose_backend(
        AverageBackend.AUTO,
        ApplyPolicy.SYNC,
        names,
        nccl_available=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
    )
    kind = "nccl" if backend is AverageBackend.NCCL else "thread"
    logger.info("gradients go over %s: %s", kind, reason)
    return partial(create_collectives, len(devices), kind, devices, COLLECTIVE_TIMEOUT_S)
