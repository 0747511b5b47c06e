"""ReplicatedModule: the model of the user's own loop, on one or many devices."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Generic, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from runtime.checkpoint.format import plain_key
from runtime.core.checks import check_callable, check_float
from runtime.core.loss_weights import check_weight
from runtime.core.module_wrapper import ModuleWrapper, is_own_method
from runtime.core.nested import flatten
from runtime.core.threads import Closeable
from runtime.core.tracebacks import folds_tracebacks
from runtime.loop.accumulation import rounds
from runtime.loop.loop_engine import LoopEngine
from runtime.loop.one_device import SingleDeviceEngine
from runtime.loop.rank_replica import FollowingOptimizer
from runtime.loop.scatter import to_replica
from runtime.replica.build import ModelT_co
from runtime.replica.optimizers import take_memory_formats
from runtime.replica.schedule import SchedulerFactory

logger = logging.getLogger(__name__)


class ReplicatedModule(Closeable, ModuleWrapper, Generic[ModelT_co]):
    """A model on one or many devices, trained by the same loop in both cases.

    :meth:`Trainer.setup <gpuworker.Trainer.setup>` returns it::

        model = Trainer.setup(Net(), lambda params: torch.optim.AdamW(params, 3e-4))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)     # y on devices[0], where outputs are
            loss.backward()
            model.step()

    **There is one model**, :attr:`module`, with one optimizer. Each rank computes in its own
    thread: rank 0 with the model, the others with copies that share its parameters, or on other
    devices follow them. Gradients of all ranks are summed and become those of the model, so
    everything that acts on the model or the optimizer acts as on one device: hooks of parameters
    and of the optimizer, optimizers that step in backward, several optimizers, gradients that
    the caller writes, ``torch.autograd.grad(loss, parameters)``, ``loss.backward(inputs=...)``.

    **Forward** cuts every tensor of its nested inputs along dimension 0 by ``chunk_ratios``,
    runs the ranks at the same time, and concatenates their outputs on ``devices[0]``. Inputs
    and outputs have the batch first; ``DdpConfig(batch_dim=1)`` names another dimension. A list
    that has one entry for each sample of the first batch is cut too (texts, images of several
    sizes), and so are objects whose class makes pieces of itself, by slices, ``split`` or its
    constructor; others are refused. Tensors without dimensions, inputs that
    ``DdpConfig(whole=[...])`` names, and other values go to every rank unchanged; what is cut is
    logged once. The first batch is checked on a copy of the model in eval mode (with parameters of
    more than 256 MiB only for several inputs, or sequences): if the output for two to four samples
    is not that of two parts of them, other than by rounding or as much as by repetition, the call
    is refused, unless ``whole`` is set. A batch smaller than the number of devices runs on the
    first devices, and no rank gets a single sample while batch normalization is in train mode. If
    forward fails for pieces, and not for the whole batch on one device, the error says so.
    An opaque object that may contain tensors (the cache of a generative model) is ``None`` in
    the gathered output. An output that relates the samples of a shard to each other
    (``z @ z.T``) is refused, by the second call at the latest: return ``z`` and compute it in
    the loop.

    **A loss that the model computes itself**, a floating-point output without dimensions (alone,
    or in a dict, a dataclass or a named tuple), is gathered as the weighted mean over the
    shards. The weight of a shard is the first of these: the value of
    ``DdpConfig(loss_weight=f)``; a scalar tensor in the output called ``loss_weight`` or
    ``weight`` (the gathered output holds their sum); the number of labels that are not -100, if an
    input is called ``labels``; the number of its samples, with one warning in the log. Labels
    of two dimensions with ``logits`` of the same length count as those of a causal language
    model, which ignores the first label of each sequence; without ``logits``, and for other
    kinds of models of the Transformers library, all labels count. Class weights inside the model
    need a ``loss_weight``. A shard with weight 0 adds nothing, even if its loss is NaN.

    **Backward** from the outputs runs each rank's backward in its own thread, then adds the
    gradients up on ``devices[0]``. The gradients of ``parameters()`` are those of the whole
    batch; a parameter that no rank used keeps ``None``. Several forward passes before a
    backward, and several backward passes before a step, add up as on one device. Gradients of
    gradients do not pass through the ranks.

    **step()** clips, steps the optimizer, advances the schedule and clears the gradients. The
    optimizer may also be stepped directly, or by a ``GradScaler``; that clips and advances the
    schedule too, and leaves the gradients. After ``accumulate``, and with ``max_anchor``, only
    :meth:`step` reduces the gradients, and direct steps are refused.

    **Several batches for each device between two reductions** (useful if devices differ or
    reductions are expensive) are passed in lists, and the loss is computed on the model's
    device, so that no device waits for another::

        def loss_fn(module, batch):                  # in the replica's thread, on its device
            x, y = batch
            return F.cross_entropy(module(x), y)     # the batch's mean loss

        for batches in model.rounds(loader):         # lists of sum(model.batch_counts) batches
            losses = model.accumulate(loss_fn, batches)
            model.step()

    Each device trains as many batches as its entry in ``batch_counts``; its accumulated gradient
    is clipped, divided by that count, and averaged with the count as weight.

    **Names** that this object lacks are those of the model: they are read, set and deleted as on
    :attr:`module`. Attributes of the model that it hides (``step``, ``devices``) are logged at
    setup and are reached through :attr:`module`; setting them here is an ``AttributeError``.

    **Changes of the model between two calls** reach every rank at the next forward: modes, frozen
    parameters, weights (through ``.data``, too), buffers, attributes, hooks, and modules and
    parameters that are added or replaced. Parameters that are added have to be added to the
    optimizer, as on one device. Not seen are writes in place to tensors that are neither
    parameters nor buffers and to objects implemented in C; between two steps, writes through
    ``.data`` to large buffers and to parameters while devices differ: :meth:`sync_params` copies
    these. Other methods of the model run on rank 0's, in the caller's thread; the first call of
    one with tensors is logged.

    Use it from one thread at a time. Autocast, gradient and inference mode of the caller apply
    to the replicas. In each call a rank draws random numbers on the CPU from a generator of its
    own, seeded from that of the caller's thread. Batch normalization uses only each rank's shard,
    and its statistics are rank 0's; without gradients, as in ``torch.optim.swa_utils.update_bn``,
    rank 0 runs the whole batch. On GPUs all work is ordered with the caller's current streams in
    both directions, and the host does not wait for it; do not overwrite an input in pinned memory
    before its copy is done.

    If a replica raises, the call that ran it raises :class:`~gpuworker.ReplicaFailed`, with the
    rank; it is of the exception's class, too. The gradients since the last step are dropped, and
    the module stays usable. Threads end with :meth:`close`, at the end of a ``with`` block, when
    the module and its outputs are garbage-collected, or with the interpreter. On one device there
    are no threads, and the model is called directly.

    Attributes:
        head: The object with a ``.module`` that was passed, or the factory's first. Without one,
            the model's own attribute.
    """

    VARIABLE = "model"
    OWNER = "the object that Trainer.setup returns"

    def __init__(self, engine: LoopEngine, head: Any = None) -> None:
        super().__init__()
        if head is not None:
            self.__dict__["head"] = head
        self._reported: set[str] = set()
        self._engine = engine
        # torch.compile() of the caller's loop would trace the engine.
        self._engine_forward = torch.compiler.disable(engine.forward)  # type: ignore[no-untyped-call]
        self._followers = [FollowingOptimizer(engine.optimizer) for _ in engine.devices[1:]]
        if isinstance(engine, SingleDeviceEngine):
            # Not as an attribute of nn.Module, which would make it a submodule.
            self.__dict__["forward"] = engine.plain_forward
        self._seal()

    @folds_tracebacks
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch. Blocks until every replica has run it (on a GPU: enqueued it).

        Raises:
            TypeError: An input cannot be cut, or an output cannot be concatenated.
            ValueError: Inputs have no batch, or different sizes along dimension 0.
            ReplicaFailed: The model raised.
        """
        return self._engine_forward(*args, **kwargs)

    @folds_tracebacks
    def step(self, weight: float | Tensor | None = None, *, reduce: bool | None = None) -> None:
        """Clip and step with the gradients of the whole batch, and clear them.

        With ``DdpConfig(max_anchor=n)``, ``n`` above 1, only every ``min(batch_counts)``-th call
        after ``loss.backward()`` does so, with the mean gradient of all of them. The other calls
        stash each device's gradients, where ``zero_grad()`` does not clear them, and advance the
        schedule. In between ``.grad`` holds the gradients of ``devices[0]`` only.

        Args:
            weight: Sum of the weights by which the losses of the backward passes since the last
                step were multiplied; gradients are divided by it. For the mean over several
                batches of unequal weight::

                    for batch, weight in micro_batches:      # tokens, say
                        (loss_of(batch) * weight).backward()
                    model.step(weight=total_weight)

                A number or a scalar tensor; the host does not read one on a GPU. With 0 the
                optimizers do not step, while the schedule advances; with a 0 in a tensor on a
                GPU they step with gradients of zero.

            reduce: Reduce at this call, overriding the schedule: ``True`` for the last
                batch of a loop. ``None``: by the schedule. Without ``max_anchor``, and after
                ``accumulate``, every call reduces.

        Raises:
            ReplicaFailed: A reduction failed.
            TypeError: The weight is neither a number nor a tensor.
            ValueError: The weight is negative, NaN or not a scalar, or was passed after
                ``accumulate``.
            RuntimeError: The scheduler was made for other parameter groups.
            Exception: The optimizer raised.
        """
        checked = None if weight is None else check_weight("weight", weight)
        self._engine.step(checked, reduce=reduce)

    @folds_tracebacks
    def accumulate(
        self,
        loss_fn: Callable[[ModelT_co, Any], Tensor | tuple[Tensor, float | Tensor]],
        batches: Sequence[Any],
    ) -> Tensor:
        """Compute the gradients of several batches, each batch as a whole on one device.

        Blocks until all are trained. Batches are distributed in proportion to
        :attr:`batch_counts`, in order of rank. May be called again before :meth:`step`; the
        gradients add up. Cannot share a step with ``loss.backward()``. Backward runs outside
        autocast. If the call fails, all gradients since the last step are dropped.

        Args:
            loss_fn: ``f(module, batch) -> Tensor``, the batch's mean loss, or ``(loss,
                weight)`` if it is a mean over tokens or a sum of class weights: then the step
                uses the mean over all of them. Called in the threads of all replicas at the
                same time.
            batches: Nested tensors; moved to the device that trains them.

        Returns:
            The batches' losses, of shape ``(len(batches),)``, in order, on ``devices[0]``.

        Raises:
            ReplicaFailed: The model or ``loss_fn`` raised (on one device its own exception is
                raised).
            RuntimeError: There are gradients of ``loss.backward()``, or gradients are disabled.
        """
        check_callable("loss_fn", loss_fn, "f(module, batch) -> Tensor")
        if not isinstance(batches, Sequence):
            raise TypeError(f"batches: pass a list of batches, not a {type(batches).__name__}")
        if not torch.is_grad_enabled():
            raise RuntimeError("accumulate(...) trains: call it outside torch.no_grad()")
        return self._engine.accumulate(loss_fn, batches)

    def rounds(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield lists for :meth:`accumulate`: the batches until the next step."""
        return rounds(batches, lambda: self._engine.batch_counts)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch to this L2 norm, between backward and step.

        Returns:
            The norm before clipping, a scalar on ``devices[0]``.
        """
        return self._engine.clip_grad_norm_(check_float("max_norm", max_norm, 0.0))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; they always become ``None``."""
        self._engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context leave the reduction to the next one outside it.

        As in DDP, for several backward passes before a step::

            for i, (x, y) in enumerate(micro_batches):
                with model.no_sync() if i < last else nullcontext():
                    (F.cross_entropy(model(x), y) / len(micro_batches)).backward()
            model.step()

        In between ``.grad`` holds the gradients of ``devices[0]`` only; the next backward pass
        outside, :meth:`step` and :meth:`clip_grad_norm_` add those of the other devices. Without
        it each pass reduces, to the same gradients.
        """
        return self._engine.no_sync()

    def set_scheduler(self, factory: SchedulerFactory) -> None:
        """Set the learning rate by the scheduler ``factory(optimizer)``, stepped at each step.

        To resume after ``n`` steps of an earlier run, pass the scheduler ``last_epoch=n - 1``.
        """
        check_callable("factory", factory, "f(optimizer) -> LRScheduler")
        self._engine.rate.set_scheduler(factory)

    def set_lr_scale(self, scale: float) -> None:
        """Multiply the scheduler's learning rates by this factor, at every step from here on.

        Without a scheduler the current learning rates are multiplied.
        """
        self._engine.rate.set_scale(check_float("scale", scale, 0.0))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state; its tensors are not copied."""
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state, of a model in any memory format."""
        self.optimizer.load_state_dict(state)
        take_memory_formats(self.optimizer)

    def sync_params(self) -> None:
        """Copy the model's parameters and buffers to every device now, however they changed."""
        self._engine.sync_params()

    @property
    def module(self) -> ModelT_co:
        """The model of rank 0: the one that was passed, or the factory's first."""
        return cast("ModelT_co", self._engine.model)

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """Each rank's model, up to date, to read: the model, and copies of it.

        Change :attr:`module`; the copies follow it, and may be replaced by others.
        """
        return self._engine.models

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The model's optimizer."""
        return self._engine.optimizer

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The model's optimizer, and for each further device one that follows it, to read.

        There is one model, so only the first one steps; the others have its settings and state,
        and stepping them has no effect.
        """
        for follower in self._followers:
            follower.follow()
        return (self.optimizer, *self._followers)

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
        """Each device's share of a batch; they sum to 1."""
        return self._engine.chunk_ratios

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Number of batches of each device between two reductions."""
        return self._engine.batch_counts

    @property
    def current_lr(self) -> float:
        """Learning rate of the first parameter group."""
        return self._engine.rate.current

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict under its plain keys, even if submodules are compiled."""
        state = self.module.state_dict(*args, **kwargs)
        if any(plain_key(key) != key for key in state):
            plain = [(plain_key(key), value) for key, value in state.items()]
            state.clear()
            state.update(plain)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the model's state on every replica.

        Raises:
            ValueError: ``assign=True``: the optimizers hold the existing parameters.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace parameters that the optimizers hold: "
                "leave it out, or load the state before Trainer.setup"
            )
        compiled = {plain_key(k): k for k in self.module.state_dict() if plain_key(k) != k}
        if compiled:
            state_dict = {compiled.get(key, key): value for key, value in state_dict.items()}
        found = self.module.load_state_dict(state_dict, strict)
        self.sync_params()
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Named parameters of :attr:`module`."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Named buffers of :attr:`module`."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Named modules of :attr:`module`, itself included."""
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Named children of :attr:`module`."""
        return self.module.named_children()

    def apply(self, fn: Any) -> Self:
        """Apply a function to the model and its submodules."""
        self.module.apply(fn)
        self.sync_params()
        return self

    def train(self, mode: bool = True) -> Self:
        """Set train or eval mode on every replica."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set eval mode on every replica."""
        self.module.eval()
        return self

    def _wrapped(self) -> nn.Module:
        return self._engine.model

    def _adopted(self, value: Any) -> Any:
        self._engine.check_caller()
        if isinstance(value, (nn.Module, nn.Parameter)):
            return value
        return to_replica(value, self.devices[0])

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if is_own_method(value) and len(self.devices) > 1 and name not in self._reported:
            return self._reporting(name, value)
        return value

    def _reporting(self, name: str, method: MethodType) -> MethodType:
        """The method; a call with tensors, or that returns some, logs once where it ran."""

        @functools.wraps(method.__func__)
        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            tensors: list[Tensor] = []
            flatten((args, kwargs, result), tensors, strict=False)
            if tensors and name not in self._reported:
                self._reported.add(name)
                logger.warning(
                    "model.%s(...) ran on %s alone, in the caller's thread; only calls of the "
                    "model itself are divided among its %d devices: call it in the model's "
                    "forward to use all of them",
                    name,
                    self.devices[0],
                    len(self.devices),
                )
            return result

        return MethodType(call, method.__self__)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise RuntimeError(
            "the model cannot be moved after Trainer.setup: choose devices there, and the dtype "
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

    def close(self) -> None:
        """End the replicas' threads; ``module`` stays usable. Idempotent, blocks for some seconds.

        Raises:
            GpuWorkerError: A thread does not return from user code.
        """
        self._engine.close()
