"""The module that a loop of the user's own trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from runtime.config import check_callable, check_float
from runtime.loop.cadence import rounds
from runtime.loop.engine import Engine
from runtime.loop.replica import LossFn
from runtime.loop.solo import Solo
from runtime.replica.schedule import SchedulerFactory


class ReplicatedModule(nn.Module):
    """A model on one device or many, trained by a loop that is the same for both.

    Made by :meth:`Trainer.setup <runtime.Trainer.setup>`::

        model = Trainer.setup(Net(), lambda params: torch.optim.AdamW(params, 3e-4))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)     # y on devices[0], where outputs are
            loss.backward()
            model.step()

    **Forward** cuts every tensor of its nested inputs along dimension 0 by ``chunk_ratios``,
    copies the pieces to the devices, runs the replicas at the same time in threads of their
    own, and lays their outputs end to end on ``devices[0]``. A floating-point output without
    dimensions is taken for a mean over the samples. Inputs and outputs have the batch first;
    tensors without dimensions, and what is no tensor, go to every replica as they are. A batch
    smaller than the number of devices runs on the first of them.

    **Backward** of what is computed from the outputs runs each replica's backward in its own
    thread, then adds the gradients up on ``devices[0]``: between ``loss.backward()`` and
    :meth:`step` the gradients of ``parameters()`` are those of the whole batch, to be looked
    at, clipped or changed in place as on one device. Several forward passes before a backward,
    and several backward passes before a step, add up as on one device. Gradients of gradients
    do not pass through replicas. Gradients of parameters come through ``loss.backward()``
    only: ``torch.autograd.grad(loss, parameters)`` and ``loss.backward(inputs=parameters)``
    end at the outputs, and find parameters that "have not been used", or give ``None`` or
    zeros where that is allowed; gradients of the inputs come both ways. A gradient is written
    over by the next backward after a step: clone what is to be kept.

    **step()** gives the gradients to all replicas, copies rank 0's buffers, and steps every
    optimizer with the settings of rank 0's, so that all replicas keep the same bits: those of
    rank 0's parameters are copied after each step where devices are not all of one kind. An
    optimizer that draws random numbers draws others on each device. Parameter groups that are
    added to :attr:`optimizer` reach all; what they hold must have required a gradient in
    ``Trainer.setup``. So does a state that is loaded into it, but not one changed in place.

    **Several batches for each device between two reductions** (of use where devices differ,
    or reductions cost much) are supplied in lists, and the loss is computed where the model
    is, so that no device waits for another::

        def loss_fn(module, batch):                  # in the replica's thread, on its device
            x, y = batch
            return F.cross_entropy(module(x), y)     # the batch's mean loss

        for batches in model.rounds(loader):         # lists of sum(model.batch_counts) batches
            losses = model.accumulate(loss_fn, batches)
            model.step()

    Each device trains ``batch_counts`` of them; its accumulated gradient is clipped, divided
    by its count, and averaged with the count as weight.

    What is done to the model from outside holds for every replica from the next forward on:
    train and eval mode, frozen parameters, ``load_state_dict``, weights changed in place
    under ``torch.no_grad()``, buffers changed in place or replaced by others of the same
    shape, and attributes set on this module, with tensors moved to each device. Changes
    through ``.data`` need :meth:`sync_params`. Anything else on the model (methods, attributes)
    is rank 0's, and runs in the caller's thread. So an attribute of a part, or a hook, is to be
    set on every replica, on one device as on many::

        for replica in model.replicas:
            replica.dropout.p = 0.3

    Parameters and parts cannot be added or replaced: build the model before. Buffers can be
    added with :meth:`register_buffer`.

    Use it from one thread at a time. Autocast, gradient and inference mode of the caller hold
    in the replicas; fp16 gradient scalers are not supported. Dropout on CPU replicas draws
    from the generator of the process, in no fixed order; batch normalisation sees each
    replica's piece alone. With GPUs all work is in order with the caller's current streams
    in both directions, and the host waits for none of it; do not overwrite an input in
    pinned memory before its copy is done.

    An exception in a replica comes out of the call that ran it as
    :class:`~runtime.ReplicaFailed`, with the rank; the gradients since the last step are
    dropped, and the module can be used on. After a step that failed the replicas go on from
    rank 0's state. Threads end with :meth:`close`, at the end of a ``with`` block, when the
    module and its outputs are collected, or with the interpreter. On one device there are
    none, and the model is called straight.
    """

    def __init__(self, engine: Engine, head: Any = None) -> None:
        super().__init__()
        self._head = head
        self._engine = engine
        if isinstance(engine, Solo):
            # Not as an attribute of nn.Module, which would make it a submodule.
            self.__dict__["forward"] = engine.direct

    # -- training ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch. Blocks until every replica has run it (on a GPU: begun).

        Raises:
            TypeError: An input that cannot be cut, or an output that cannot be put together.
            ValueError: Inputs without a batch, or of different sizes along dimension 0.
            ReplicaFailed: The model raised.
        """
        return self._engine.forward(*args, **kwargs)

    def step(self) -> None:
        """Reduce gradients, copy buffers, step every optimizer, forget the gradients.

        Raises:
            ReplicaFailed: An optimizer raised.
            ValueError: The optimizer was given a parameter that cannot be trained here, which
                was taken from it again.
            RuntimeError: Parts of the model were replaced, or a scheduler is for other groups.
        """
        self._engine.step()

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Train several batches up to their gradients, each as a whole on one device.

        Blocks until all are trained. Batches are dealt out in proportion to
        :attr:`batch_counts`, in order of rank. May be called again before :meth:`step`; their
        gradients add up. Cannot share a step with ``loss.backward()``. Backward runs outside
        autocast. If it fails, all gradients since the last step are dropped.

        Args:
            loss_fn: ``f(module, batch) -> Tensor``, the batch's mean loss; called in the
                threads of all replicas at the same time.
            batches: Nested tensors; moved to the device that trains them.

        Returns:
            Their losses, of shape ``(len(batches),)``, in order, on ``devices[0]``.

        Raises:
            ReplicaFailed: The model or ``loss_fn`` raised (one device: as it is).
            RuntimeError: There are gradients of ``loss.backward()``, or gradient mode is off.
        """
        check_callable("loss_fn", loss_fn, "f(module, batch) -> Tensor")
        if not isinstance(batches, Sequence):
            raise TypeError(f"batches: pass a list of batches, not a {type(batches).__name__}")
        if not torch.is_grad_enabled():
            raise RuntimeError("accumulate(...) trains: call it outside torch.no_grad()")
        return self._engine.accumulate(loss_fn, batches)

    def rounds(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        """Lists for :meth:`accumulate`: as many batches as are due until the next step."""
        return rounds(batches, lambda: self._engine.batch_counts)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch to this L2 norm, between backward and step.

        Returns:
            The norm they had, a scalar on ``devices[0]``.
        """
        return self._engine.clip_grad_norm_(check_float("max_norm", max_norm, 0.0))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of every replica; they become ``None`` in any case."""
        self._engine.zero_grad()

    def set_scheduler(self, factory: SchedulerFactory) -> None:
        """Drive the learning rate by ``factory(optimizer)``, one step of it for each step. After
        loading what an earlier run of ``n`` steps left, pass the scheduler ``last_epoch=n - 1``."""
        check_callable("factory", factory, "f(optimizer) -> LRScheduler")
        self._engine.rate.set_scheduler(factory)

    def set_lr_scale(self, scale: float) -> None:
        """Multiply what the scheduler gives, at every step from here on.

        Without a scheduler the rates as they are now are multiplied.
        """
        self._engine.rate.set_scale(check_float("scale", scale, 0.0))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, the same on every device; tensors are live."""
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every device."""
        self._engine.load_optimizer(state)

    def sync_params(self) -> None:
        """Give rank 0's parameters and buffers to every replica, now."""
        self._engine.sync_params()

    # -- what there is -------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model of rank 0, which is the one that was passed or the factory's first."""
        return self._engine.models[0]

    @property
    def head(self) -> Any:
        """The object with a ``.module`` that was passed, or the factory's first.

        Where none was, the model's own attribute of that name.
        """
        return self.module.head if self._head is None else self._head

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The model on each device; to look at, and to set attributes of parts on all of them.

        Weights and buffers are changed on the first one, :attr:`module`, and reach the others.
        """
        return self._engine.models

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Rank 0's optimizer, whose settings all others follow. Never step it by hand."""
        return self._engine.optimizers[0]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer of each device; to look at."""
        return self._engine.optimizers

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, in order of rank."""
        return self._engine.devices

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return len(self._engine.devices)

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's part of a batch; they sum to 1."""
        return self._engine.chunk_ratios

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Each device's batches between two reductions."""
        return self._engine.batch_counts

    @property
    def current_lr(self) -> float:
        """Learning rate of the first parameter group."""
        return self._engine.rate.current

    # -- the model's own face ------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state, under its own plain keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the model's state on every replica.

        Raises:
            ValueError: ``assign=True``: the optimizers hold the parameters that are there.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace parameters that the optimizers hold: "
                "leave it out, or load the state before Trainer.setup"
            )
        found = self.module.load_state_dict(state_dict, strict)
        self.sync_params()
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model and its parts."""
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's."""
        return self.module.named_children()

    def apply(self, fn: Any) -> ReplicatedModule:
        """Apply a function to the model and its parts.

        What it does to parameters and buffers reaches every replica; other attributes that it
        sets are rank 0's.
        """
        self.module.apply(fn)
        self.sync_params()
        return self

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the model, on every replica; each has its own copy.

        Raises:
            KeyError: A name that is taken, or none.
            TypeError: No tensor.
            ValueError: A tensor that requires a gradient.
        """
        self._engine.register_buffer(name, tensor, persistent)

    def train(self, mode: bool = True) -> ReplicatedModule:
        """Train or eval mode, for every replica."""
        self.training = mode
        self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        engine = self.__dict__.get("_engine")
        if engine is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(engine.models[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        elif isinstance(value, (nn.Module, nn.Parameter)):
            self._refuse_part(name)
        else:
            self._engine.set_attribute(name, value)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is of this module itself, and not of the model."""
        if "_engine" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            return True
        return name.startswith("_") and not hasattr(self._engine.models[0], name)

    def _refuse_part(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{name!r} would be no part of the replicas and their optimizers: build the whole "
            "model before Trainer.setup"
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        """Refused: build the whole model before."""
        self._refuse_part(name)

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Refused: build the whole model before."""
        self._refuse_part(name)

    register_module = add_module

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> NoReturn:
        """Refused: build the whole model before."""
        self._refuse_part(target)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise RuntimeError(
            "the model stays where Trainer.setup has put it: choose devices there, and the dtype "
            "(.half(), .double()) before it"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a model on replicas cannot be copied: copy.deepcopy(model.module)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model on replicas cannot be pickled: save model.state_dict(), or model.module"
        )

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.devices))
        return f"{type(self).__name__}(devices=[{names}])\n{self.module!r}"

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """End the replicas' threads; ``module`` stays. Idempotent, blocks for some seconds.

        Raises:
            GpuWorkerError: A thread is stuck in the model; it is named.
        """
        self._engine.close()

    def __enter__(self) -> ReplicatedModule:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
