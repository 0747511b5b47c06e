"""Construction of replicas: one at a time, rank 0 first, all with rank 0's weights."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from runtime.checkpoint.format import plain_key, resize_buffers, set_buffer
from runtime.core.errors import CollectiveAborted, ReplicaMismatch
from runtime.core.rng import GlobalGenerators
from runtime.core.shared_objects import SharedObjects
from runtime.device import cuda_api
from runtime.replica.copying import check_copyable, check_unshared, copy_module, effect_of_train
from runtime.replica.flat import (
    FlatState,
    collapsed,
    dense_stride,
    is_expanded,
    memory_order,
)
from runtime.replica.optimizers import Optimizers, copy_tensor_settings
from runtime.replica.scaled_rates import ScaledRates
from runtime.replica.schedule import Schedule, SchedulerFactories

logger = logging.getLogger(__name__)

TRAIN_NOT_CALLED = (
    "the model overrides train(), which is not called before training and would set %s: call "
    "model.train() before the run, or in the factory, to train as a loop that begins with it"
)
ModelT = TypeVar("ModelT", bound=nn.Module)
ModelT_co = TypeVar("ModelT_co", bound=nn.Module, default=nn.Module, covariant=True)
"""The model's type, in the types of builder, handle and state."""
ModelFactory = Callable[[torch.device], nn.Module]
OptimFactory = Callable[[Any], torch.optim.Optimizer]
OptimFactories = OptimFactory | Mapping[str, OptimFactory]
"""One factory, or several by the name of the submodule whose parameters each receives."""
LoopOptimFactory = Callable[[ModelT], torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]]
"""Of a loop of the user: receives the model, and returns one optimizer or several by name."""
ParamGroups = Callable[[Any], list[dict[str, Any]]]
TrainFn = Callable[[Any, Any], Any]
"""Returns a batch's mean loss over its samples, or ``(loss, weight)``: its mean over ``weight``
units, such as the tokens that are not ignored, or the sum of the samples' class weights; or the
output of a model, with a field ``loss``."""
TrainFns = TrainFn | Mapping[str, TrainFn]
"""One function, or one for each of several optimizers by name, in the order of their steps."""
_PROCESS_LOCK = threading.Lock()
"""Held while a model is built: factories draw from the process's random generators, which rank 0 of
another run may have seeded."""
BUILD_LOCK_TIMEOUT_S = 30.0
"""Longest wait for the process's lock: a factory may itself wait for another run."""
_POLL_S = 0.1
"""Interval at which a waiting rank checks for the end of its run."""
_thread = threading.local()


def build_replica(
    order: BuildOrder,
    rank: int,
    device: torch.device,
    model_factory: ModelFactory,
    optim_factory: OptimFactories,
    *,
    param_groups: ParamGroups | None = None,
    scheduler: SchedulerFactories | None = None,
    total_steps: int | None = None,
    schedule_every: int = 1,
    scheduler_steps: int | None = None,
    by_model: bool = False,
    auto_lr: bool = False,
    finish: Callable[[], None] = lambda: None,
    load: Callable[[nn.Module], None] | None = None,
    first_pass: Callable[[nn.Module], None] | None = None,
) -> Replica:
    """Build a rank's replica in its turn, with rank 0's weights.

    Parameters are moved into flat tensors before the optimizer is built, so that its state refers
    to them. With ``by_model`` ``optim_factory`` receives the model. With ``auto_lr`` the optimizer
    is probed for :class:`ScaledRates`. ``finish`` waits for the
    device: other ranks copy rank 0's weights on their own streams, and rank 0 starts training once
    they are ready. ``load`` loads a checkpoint's weights into rank 0's model. ``first_pass`` runs a
    forward pass of a copy of it, for buffers that are sized there.
    """
    try:
        with order.turn(rank) as template:
            with order.seeded(rank, device):
                model = build_model(model_factory, device)
            given = dict(model.named_buffers())
            if template is not None:
                copy_template(model, template, rank)
                template.check_order(model, rank)
            elif load is not None:
                load(model)
            elif first_pass is not None:
                _size_buffers(model, first_pass)
            resized = {n: b for n, b in given.items() if model.get_buffer(n) is not b}
            if load is None:
                _begin_with(model, resized)
            if rank == 0:
                _warn_of_modes(model, tries_train=not by_model and load is None)
            state = FlatState(model)
            optimizer: torch.optim.Optimizer
            if by_model:
                optimizer = build_optimizers_of_loop(optim_factory, model)
            elif isinstance(optim_factory, Mapping):
                optimizer = build_optimizers(optim_factory, model)
            else:
                optimizer = build_optimizer(optim_factory, model, param_groups)
            copy_tensor_settings(optimizer)
            rates = ScaledRates(optimizer, warns=rank == 0) if auto_lr else None
            schedule = Schedule(optimizer, scheduler, total_steps, schedule_every, scheduler_steps)
            finish()
        if rank == 0:
            order.publish(replace(Template.of(model), resized=frozenset(resized)))
    except BaseException:
        if rank == 0:
            order.fail()
        raise
    return Replica(model, state, optimizer, schedule, rates)


def _size_buffers(model: nn.Module, first_pass: Callable[[nn.Module], None]) -> None:
    """Give buffers that are sized in the first forward pass the shapes and values that they have
    after one of a copy, since the layout of averages is fixed.
    """
    if all(buffer.numel() for buffer in model.buffers()):
        return
    try:
        tried = copy_module(model)
        first_pass(tried)
    except Exception:  # the first step has the same, and raises it
        logger.debug("the first forward pass failed, so no buffers were resized", exc_info=True)
        return
    sized = {plain_key(name): buffer for name, buffer in tried.named_buffers()}
    for name in resize_buffers(model, sized):
        model.get_buffer(name).copy_(sized[plain_key(name)])


def _begin_with(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Let the first forward pass in training find buffers as they were made, unless an average has
    been written to them: it sizes them again, and its values are those of a new model.
    """
    versions = {name: model.get_buffer(name)._version for name in buffers}

    def begin(module: nn.Module, _: Any) -> None:
        if module.training:
            handle.remove()
            for name, buffer in buffers.items():
                if module.get_buffer(name)._version == versions[name]:
                    set_buffer(module, name, buffer)

    if buffers:
        handle = model.register_forward_pre_hook(begin, prepend=True)


def _warn_of_modes(model: nn.Module, *, tries_train: bool) -> None:
    """Log that modes at the start are other than those of a loop that calls ``model.train()``.

    Args:
        tries_train: False if the body of a user's loop or a checkpoint decides the modes.
    """
    if not model.training:
        logger.warning(
            "the model is in eval mode, which training keeps (no dropout, no batch statistics): "
            "call model.train() before the run, or in the factory, to change it"
        )
    elif tries_train and (effect := effect_of_train(model)):
        logger.warning(TRAIN_NOT_CALLED, effect)


@dataclass(frozen=True, slots=True)
class Replica:
    """A model in the modes of its factory, with its flat state, optimizer and schedule."""

    model: nn.Module
    state: FlatState
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    rates: ScaledRates | None = None


class BuildOrder:
    """Serialises the construction of models, rank 0 first, and passes its tensors to the others.

    Ranks of other runs wait too, for ``BUILD_LOCK_TIMEOUT_S`` at most; those of a run that a model
    factory has started do not.

    Args:
        seed: Seed of the process's generators around rank 0's factory; ``None``: do not seed.
        standalone: A single worker, of any rank, that does not wait for rank 0.
        shared: Objects that the workers share; ``None``: there is one worker.

    Attributes:
        draws: Of rank 0's factory, once it is called.
    """

    def __init__(
        self,
        seed: int | None = None,
        *,
        standalone: bool = False,
        shared: SharedObjects | None = None,
    ) -> None:
        self._seed = seed
        self.shared = shared
        self._standalone = standalone
        self._is_nested = getattr(_thread, "builds", False)
        self.draws: FactoryDraws | None = None
        self._condition = threading.Condition()
        self._template: Template | None = None
        self._failed = False
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, rank: int) -> Iterator[Template | None]:
        """Hold the build lock; yields rank 0's template, or ``None`` on rank 0.

        Raises:
            CollectiveAborted: Rank 0 failed to build, or the run has ended.
        """
        if rank != 0 and not self._standalone:
            with self._condition:
                self._condition.wait_for(lambda: self._template is not None or self._failed)
                if self._failed:
                    raise CollectiveAborted("rank 0 could not build its model")
        with self._lock, self._process_lock():
            template = self._template
            if template is None and rank != 0 and not self._standalone:  # forgotten meanwhile
                raise CollectiveAborted("the run ended before the model was built")
            yield template

    @contextmanager
    def _process_lock(self) -> Iterator[None]:
        locked = not self._is_nested and self._acquire()
        before, _thread.builds = getattr(_thread, "builds", False), True
        try:
            yield
        finally:
            _thread.builds = before
            if locked:
                _PROCESS_LOCK.release()

    def _acquire(self) -> bool:
        """Acquire the process's lock; returns False after the timeout."""
        until = time.monotonic() + BUILD_LOCK_TIMEOUT_S
        while not _PROCESS_LOCK.acquire(timeout=_POLL_S):
            with self._condition:
                if self._failed:
                    raise CollectiveAborted("the run ended before the model was built")
            if time.monotonic() > until:
                logger.warning(
                    "another run has been building its model for %g s; this model is built "
                    "concurrently, so with a seed the weights of either may not be reproducible",
                    BUILD_LOCK_TIMEOUT_S,
                )
                return False
        return True

    @contextmanager
    def seeded(self, rank: int, device: torch.device) -> Iterator[None]:
        """Draw what rank 0's factory draws, so that attributes that are not copied are equal, too.

        With a seed the CPU's and the device's generators are seeded, and restored after; without
        one rank 0's factory advances those of the process.
        """
        with nullcontext() if self._seed is None else _seeded(self._seed, device):
            if self.draws is not None:
                with self.draws.repeated(device):
                    yield
                return
            if rank == 0:
                self.draws = FactoryDraws(device)
            yield

    def publish(self, template: Template) -> None:
        """Publish rank 0's model for the other ranks."""
        with self._condition:
            if not self._failed:  # else nothing would free it
                self._template = template
            self._condition.notify_all()

    def fail(self) -> None:
        """Release all waiting ranks: rank 0 failed, or the run has ended."""
        with self._condition:
            self._failed = True
            self._condition.notify_all()

    def forget(self) -> None:
        """Drop the references to rank 0's tensors."""
        with self._condition:
            self._template = None
            self._failed = True


class FactoryDraws:
    """States of the generators from which a model factory draws, to call it again with the same
    random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = GlobalGenerators.current()
        self._cuda = _cuda_state(device)

    @contextmanager
    def repeated(self, device: torch.device) -> Iterator[None]:
        """Set the generators, those of a device included, to these states; restore them after."""
        before = FactoryDraws(device)
        self._restore(device)
        try:
            yield
        finally:
            before._restore(device)

    def _restore(self, device: torch.device) -> None:
        self._host.restore()
        if self._cuda is not None and device.type == "cuda":
            cuda_api.API.set_generator_state(device, self._cuda)


def _cuda_state(device: torch.device) -> Tensor | None:
    return cuda_api.API.generator_state(device) if device.type == "cuda" else None


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    kind = None if device.type == "cpu" else device.type
    # Up to PyTorch 2.12 the type must not be None; without devices it has no effect.
    devices = [] if kind is None else [device]
    with torch.random.fork_rng(devices, device_type=kind or "cuda"):
        # torch.manual_seed would also seed the generators of all other devices.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            cuda_api.API.seed(device, seed)
        elif kind is not None:
            torch.get_device_module(device).manual_seed(seed)
        yield


@dataclass(frozen=True, slots=True)
class Template:
    """Tensors of rank 0's model, to compare with and to copy from.

    Attributes:
        tensors: Parameters and buffers, by name.
        kinds: What each is.
        resized: Names of buffers that have another shape than in a new model.
    """

    tensors: dict[str, Tensor]
    kinds: dict[str, str]
    resized: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> Template:
        """The template of a model."""
        tensors: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}
        for name, p in model.named_parameters():
            tensors[name], kinds[name] = p, "trainable" if p.requires_grad else "frozen"
        for name, b in model.named_buffers():
            tensors[name], kinds[name] = b, "buffer"
        return cls(tensors, kinds)

    def first_difference(self, other: Template) -> str | None:
        """Description of the first difference to another rank's model, if any."""
        for name, mine in self.tensors.items():
            if name not in other.tensors:
                return f"rank 0 has {self.kinds[name]} tensor {name!r}, which it lacks"
            theirs = other.tensors[name]
            for what, a, b in (
                ("shape", tuple(mine.shape), tuple(theirs.shape)),
                ("dtype", mine.dtype, theirs.dtype),
                ("kind", self.kinds[name], other.kinds[name]),
            ):
                if a != b:
                    return f"the {what} of {name!r} is {b}, on rank 0 it is {a}"
        extra = next((n for n in other.tensors if n not in self.tensors), None)
        return None if extra is None else f"it has a tensor {extra!r} that rank 0 lacks"

    def check_order(self, model: nn.Module, rank: int) -> None:
        """Check that a replica's tensors have the order of rank 0's, as in flat tensors.

        Raises:
            ReplicaMismatch: They do not; the message has the first difference.
        """
        for mine, theirs in zip(self.tensors, Template.of(model).tensors, strict=True):
            if mine != theirs:
                raise ReplicaMismatch(
                    f"model_factory registers the modules and parameters of rank {rank} in another "
                    f"order than those of rank 0: {theirs!r} is in the place of {mine!r}; register "
                    "them in one order, not in that of a set"
                )


def copy_template(model: nn.Module, template: Template, rank: int) -> None:
    """Copy rank 0's weights and buffers into a replica.

    Trainable parameters get rank 0's memory format, with a warning if it is another one: flat
    tensors of the ranks are exchanged element by element.

    Raises:
        ReplicaMismatch: The models differ; the message has the first difference.
        ValueError: A parameter is the same object as rank 0's.
    """
    resize_buffers(model, {plain_key(name): template.tensors[name] for name in template.resized})
    own = Template.of(model)
    difference = template.first_difference(own)
    if difference is not None:
        raise ReplicaMismatch(
            f"model_factory returned another model on rank {rank} than on rank 0: {difference}; "
            "it must build the same architecture each time"
        )
    for name, tensor in own.tensors.items():
        if own.kinds[name] == "trainable" and tensor is template.tensors[name]:
            raise ValueError(
                f"model_factory returned rank 0's own parameter {name!r} on rank {rank}: "
                "return a new module at each call, for instance copy.deepcopy(model)"
            )
    # Strides of dimensions of size 1 order no elements, but select kernels, whose bits differ.
    restrided = [
        name
        for name, tensor in own.tensors.items()
        if own.kinds[name] == "trainable"
        and dense_stride(tensor) != dense_stride(template.tensors[name])
    ]
    moved = [
        name
        for name in restrided
        if memory_order(own.tensors[name]) != memory_order(template.tensors[name])
    ]
    if moved:
        logger.warning(
            "rank %d: %s has another memory format than on rank 0, and takes rank 0's: use one "
            "format on all devices, for instance model.to(memory_format=torch.channels_last)",
            rank,
            moved[0] if len(moved) == 1 else f"{moved[0]} and {len(moved) - 1} more",
        )
    with torch.no_grad():
        for name in restrided:
            tensor, source = own.tensors[name], template.tensors[name]
            tensor.data = tensor.new_empty_strided(source.size(), dense_stride(source))
        for name, tensor in own.tensors.items():
            if not is_expanded(tensor):
                tensor.copy_(template.tensors[name])
            else:
                collapsed(tensor).copy_(collapsed(template.tensors[name]))


def build_model(factory: ModelFactory, device: torch.device) -> nn.Module:
    """Call the model factory and check the model.

    Raises:
        TypeError: Not a module, or one in memory shared between processes.
        ValueError: Lazy parameters, no trainable parameter, another device.
    """
    model = factory(device)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model_factory(device) returned {type(model).__name__}: return a torch.nn.Module"
        )
    check_model(model, "model_factory")
    check_unshared(model, "training moves parameters into memory of each replica's own")
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.device != device:
            raise ValueError(
                f"model_factory: {name!r} is on {t.device}, not on {device}; "
                "end the factory with .to(device)"
            )
    return model


def _refuse_lazy(model: nn.Module, where: str) -> None:
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(t):
            raise ValueError(
                f"{where}: {name!r} is lazy, without a shape before the first forward; "
                "give the module its sizes, or run one forward before"
            )


def check_model(model: nn.Module, where: str) -> None:
    """Check that a model can be trained.

    Raises:
        ValueError: It has lazy parameters, or no trainable parameter.
    """
    _refuse_lazy(model, where)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{where}: no parameter requires a gradient, so nothing can be trained")


def build_optimizer(
    factory: OptimFactory, model: nn.Module, groups: ParamGroups | None = None
) -> torch.optim.Optimizer:
    """Call the optimizer factory with the trainable parameters, or their groups, and check it.

    Raises:
        TypeError: Not an optimizer.
        ValueError: Its step requires a closure, or it holds a parameter that is not the model's.
    """
    params = _trainable(model)
    given = list(params) if groups is None else groups(model)
    if not isinstance(given, Iterable):
        raise TypeError(
            f"param_groups(f): f(model) returned {type(given).__name__}: return a list of "
            'parameter groups, such as [{"params": list(model.parameters()), "lr": 0.1}]'
        )
    optimizer = _call_factory(
        factory,
        given,
        "it receives a list of parameters or groups, not the model: pass that to the optimizer",
    )
    return check_optimizer(optimizer, params, "optim_factory(params)")


def _call_factory(factory: Callable[[Any], Any], argument: Any, remedy: str) -> Any:
    """Call an optimizer factory, and name the remedy if it is written for another argument."""
    try:
        return factory(argument)
    except (TypeError, AttributeError) as error:
        if f"{type(argument).__name__!r} object" not in str(error):
            raise
        raise type(error)(f"optim_factory: {error}; {remedy}") from error


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_optimizer(
    optimizer: object, params: Sequence[nn.Parameter], where: str
) -> torch.optim.Optimizer:
    """Check that an object is an optimizer of these parameters, and return it.

    Raises:
        TypeError, ValueError: As :func:`build_optimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{where} returned {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    step = inspect.signature(type(optimizer).step)
    closure = step.parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optim_factory: {type(optimizer).__name__}.step needs a closure that evaluates the "
            "model again; use an optimizer that steps from gradients, such as AdamW or SGD"
        )
    own = {id(p) for p in params}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not given <= own:
        raise ValueError(
            "optim_factory: the optimizer holds a parameter that is not a trainable parameter of "
            "this worker's model; build it from the parameters passed to the factory"
        )
    return optimizer


def build_optimizers_of_loop(factory: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Call the optimizer factory of an own loop with the model and check the result.

    Raises:
        TypeError, ValueError: As :func:`build_optimizer`; or two optimizers share a parameter.
    """
    found = _call_factory(
        factory, model, "that of Trainer.loop receives the model: pass model.parameters()"
    )
    params = _trainable(model)
    if not isinstance(found, Mapping):
        return check_optimizer(found, params, "optim_factory(model)")
    if not found or not all(isinstance(name, str) and name for name in found):
        raise ValueError(
            f"optim_factory(model) returned a dict with the names {list(found)}: name each "
            "optimizer by a string"
        )
    members = {
        name: check_optimizer(optimizer, params, f"optim_factory(model)[{name!r}]")
        for name, optimizer in found.items()
    }
    _check_disjoint(
        {
            name: [p for group in optimizer.param_groups for p in group["params"]]
            for name, optimizer in members.items()
        }
    )
    return Optimizers(members)


def _check_disjoint(params: Mapping[str, Iterable[Tensor]]) -> None:
    owners: dict[int, str] = {}
    for name, own in params.items():
        for p in own:
            owner = owners.setdefault(id(p), name)
            if owner != name:
                raise ValueError(
                    f"the optimizers {owner!r} and {name!r} share a parameter: each parameter "
                    "belongs to one optimizer"
                )


def build_optimizers(factories: Mapping[str, OptimFactory], model: nn.Module) -> Optimizers:
    """Call the factory of each submodule's optimizer and check the optimizers.

    Raises:
        TypeError: Not an optimizer.
        ValueError: No such submodule, a parameter in two optimizers, or as
            :func:`build_optimizer`.
    """
    modules: dict[str, nn.Module] = {}
    for name in factories:
        try:
            modules[name] = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"the model has no submodule {name!r} for the optimizer of that name: name the "
                "optimizers after the submodules that they train"
            ) from error
        if not _trainable(modules[name]):
            raise ValueError(f"the submodule {name!r} has no parameter that requires a gradient")
    _check_disjoint({name: _trainable(module) for name, module in modules.items()})
    return Optimizers(
        {name: build_optimizer(factory, modules[name]) for name, factory in factories.items()}
    )


class CopyingFactory:
    """A model factory that copies a module, which it does not modify.

    Raises:
        TypeError: It cannot be copied, see :func:`copy_module`; also in a call.
        ValueError: It has lazy parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        _refuse_lazy(module, type(module).__name__)
        check_copyable(module)
        self.module = module

    def __call__(self, device: torch.device) -> nn.Module:
        """Return a copy on a device."""
        return copy_module(self.module, device)
