"""One optimizer step: forward, backward, reduction under lockstep, clip, step.

Nothing here waits for the device: losses stay tensors, and the only host reads are those
of fp16's gradient scaler, of :mod:`runtime.replica.non_finite` and of :mod:`runtime.replica.step`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.collective.base import LOW_PRECISION
from runtime.core.weight import Mask, Weight, WindowWeight, check_read_weight, split_loss
from runtime.device.timing import HostTimer, StepTimer
from runtime.replica.batch_norm import BatchStatistics
from runtime.replica.flat import FlatParams
from runtime.replica.non_finite import StepJudge

_OWN = ("capturable", "fused", "foreach")
"""Settings that say how an optimizer works where it is, and not what it computes."""
_MAX = float(1 << 53)
"""Above every setting and count."""


def _check_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuse settings that torch would take, and fail on in a step or train nonsense with."""
    groups = zip(optimizer.param_groups, state["param_groups"], strict=False)
    for number, (own, given) in enumerate(groups):
        for name, value in own.items():
            if name != "params" and not _alike(value, given[name]):
                raise ValueError(
                    f"{name!r} of its group {number} is {given[name]!r:.60}, not like {value!r:.60}"
                )
        rate = float(given.get("lr", 0.0))
        if not rate >= 0.0:
            raise ValueError(f"the learning rate of its group {number} is {rate}")


def _alike(own: Any, given: Any) -> bool:
    """Whether a setting may take another's place."""
    if own is None or given is None:
        return own is None
    if isinstance(own, (bool, str)):
        return type(given) is type(own)
    if isinstance(own, (tuple, list)):
        is_row = isinstance(given, (tuple, list)) and len(given) == len(own)
        return is_row and all(map(_alike, own, given))
    if isinstance(own, (int, float)) or (isinstance(own, Tensor) and own.numel() == 1):
        if isinstance(given, Tensor):
            return given.numel() == 1 and abs(float(given)) <= _MAX
        return type(given) in (int, float) and (given == own or abs(given) <= _MAX)
    return True


def _check_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuse states without what a step of this optimizer looks for, as far as that is known:
    an optimizer of torch says it by a step of its own with a number in place of the parameter."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return
    known: dict[tuple[int, int], Mapping[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            found = optimizer.state.get(p)
            if not found:
                continue
            key = number, p.dim()
            if key not in known:
                known[key] = _example(kind, group, p.dim())
            for name, value in known[key].items():
                _check_value(f"{name!r} in its state of a parameter", found, name, value, p)


def _check_value(where: str, found: Mapping[str, Any], name: str, example: Any, p: Tensor) -> None:
    if name not in found:
        raise ValueError(f"{where} of shape {tuple(p.shape)} is missing")
    if not isinstance(example, Tensor):
        return
    value = found[name]
    if value is None and name == "momentum_buffer":  # before the first gradient
        return
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is {value!r:.80}, where a tensor belongs")
    if name == "step" and not (value.numel() == 1 and 0 <= float(value) <= _MAX):
        raise ValueError(f"{where} is {value!r:.80}, where a count belongs")
    shape = p.shape if example.dim() else example.shape
    if "row" not in name and "col" not in name and value.shape != shape:
        raise ValueError(f"{where} is of shape {tuple(value.shape)}, where {tuple(shape)} belongs")


def _example(kind: type[Any], group: dict[str, Any], num_dims: int) -> Mapping[str, Any]:
    """The state that such an optimizer makes in a step; nothing where one cannot be made."""
    p = torch.nn.Parameter(torch.ones([1] * num_dims))
    p.grad = torch.ones_like(p)
    settings = {k: v for k, v in group.items() if k not in ("params", "initial_lr", *_OWN)}
    try:
        probe = kind([{**settings, "params": [p]}])
        probe.step()
    except Exception:  # it needs a closure, sparse gradients, or something else
        return {}
    state: Mapping[str, Any] = probe.state[p]
    return state if num_dims else {}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As ``optimizer.load_state_dict(state)``, but for how the optimizer works.

    Whether it counts its steps on the device, for one, stays as it is here, and the counts
    go where they are looked for.

    Args:
        optimizer: On any device.
        state: Of an optimizer of the same kind and parameters; its containers are changed.

    Raises:
        ValueError: It has other groups, or settings and states that none of this kind can have.
    """
    for own, given in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for name in _OWN:
            given.pop(name, None)
        for name, value in own.items():
            if name != "params":
                given.setdefault(name, value)  # also what another version of PyTorch lacks
    _check_settings(optimizer, state)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            step = optimizer.state.get(p, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[p]["step"] = step.to(p.device if on_device else "cpu")
    _check_states(optimizer)


# The host reads the device only for the flags that say which parameters got a gradient, and
# only where this rank alone cannot know.


class Packed(NamedTuple):
    """What a rank gives to a reduction.

    Attributes:
        grads: Its own gradients, one for each parameter.
        complete: Whether every parameter has one.
        weighed: Whether the step's loss has a weight other than its samples.
    """

    grads: Sequence[Tensor | None]
    complete: bool
    weighed: bool = False


NOTHING = Packed([], complete=False)


class GradientReducer:
    """Averages gradients over the ranks through one flat tensor.

    They are weighted by samples, or by what :class:`~runtime.core.weight.WindowWeight` says: as
    soon as one rank's loss has a weight, each such rank multiplies its gradients by its weight for
    each sample, which lies in one more element, and the reduced gradients are divided by what that
    element became. The ranks agree on it as they meet, and nothing else changes without weights.

    Behind the gradients of the first dtype lies a flag for each parameter: a parameter
    that got no gradient on any rank keeps ``.grad is None`` for the optimizer. Where steps
    are judged, a last element tells every rank whether all losses are finite.

    Args:
        params: The replica's parameters.
        collective: Where the ranks meet.
        judge: Judges what was reduced.
        comm: The context for collectives, see :meth:`Device.comm`.

    Attributes:
        collective: Where the ranks meet; replaced when one of them is gone.
        packed: What :meth:`pack` has found.
        is_empty: Whether the weights of the last exchange sum to 0: there is nothing to step by.
    """

    def __init__(
        self,
        params: FlatParams,
        collective: Collective,
        judge: StepJudge | None = None,
        comm: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._params = params.params
        self.collective = collective
        self._judge = judge
        self._comm = comm
        num = len(self._params)
        sizes = [flat.numel() for flat in params.flats]
        room = [0] * len(sizes)
        room[0] = num if judge is None else num + 1
        # Where a total has most digits; 16 bits would round it to three of them.
        widest = max(range(len(sizes)), key=lambda i: (params.flats[i].element_size(), -i))
        self._weight_apart = params.flats[widest].dtype in LOW_PRECISION
        if not self._weight_apart:
            room[widest] += 1
        self._flats = [
            flat.new_zeros(flat.numel() + more)
            for flat, more in zip(params.flats, room, strict=True)
        ]
        self._grads = [flat[:size] for flat, size in zip(self._flats, sizes, strict=True)]
        self._flags = self._flats[0][sizes[0] : sizes[0] + num]
        end = sizes[0] + num
        self._loss_flag = self._flats[0][end : end + int(judge is not None)]
        # 0 wherever no weight was told.
        self._weight = self._flats[widest][-1:]
        if self._weight_apart:
            self._weight = self._weight.new_zeros(1, dtype=torch.float32)
        self._views = params.views(self._grads)
        self.packed = NOTHING
        self.is_empty = False

    def pack(
        self, num_samples: int, losses: Sequence[Tensor] = (), weight: WindowWeight | None = None
    ) -> None:
        """Write this rank's gradients, flags and losses into the flat tensors.

        Does not wait for the device, and where every parameter has a gradient it issues
        nothing but work on the device, so that it may be captured.

        Args:
            num_samples: Samples behind this rank's gradients; 0: it only receives.
            losses: Of the step.
            weight: Of the step; ``None``: its samples.
        """
        grads = [p.grad for p in self._params]
        complete = num_samples > 0 and not any(g is None for g in grads)
        if complete:
            torch._foreach_copy_(self._views, grads)  # type: ignore[arg-type]
            # Each time: a peer that lacks a parameter halves its flag, which would end at 0.
            self._flags.fill_(1)
        elif num_samples > 0:
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
            told = torch.tensor([g is not None for g in grads])
            self._flags.copy_(told, non_blocking=True)
        if self._judge is not None:
            self._judge.write_flag(self._loss_flag, losses)
        if weight is not None:
            factor = weight.unit / num_samples
            for flat in self._grads:
                flat.mul_(factor)
            value = weight.units * factor
            if isinstance(value, Tensor):
                self._weight.copy_(value)
            else:
                self._weight.fill_(value)
        self.packed = Packed(grads, complete=complete, weighed=weight is not None)

    def exchange(self, num_samples: int) -> bool:
        """Replace what was packed by the weighted mean over the ranks.

        Args:
            num_samples: As :meth:`pack` was told.

        Returns:
            Whether the step may be made; if not, it is taken back. Whether there is anything
            to step by is in :attr:`is_empty`.

        Raises:
            NonFiniteError, CollectiveAborted: See :meth:`StepJudge.accept_reduced`.
        """
        self.is_empty = False
        told = {"tally": num_samples} if self.packed.weighed else {}
        try:
            with self._comm():
                total = self.collective.weighted_mean_(self._flats, num_samples, **told)
        except BaseException:
            self._weight.zero_()
            raise
        # The same on every rank: they have said it as they met.
        num_weighed = self.collective.tally
        mean = self._mean_weight(total, num_weighed, num_samples) if num_weighed else 1.0
        if self._judge is not None and not self._judge.accept_reduced(
            self._flats, self._loss_flag, self.packed.grads, self.collective
        ):
            return False
        if num_weighed:
            self.is_empty = not mean > 0
            if not self.is_empty:
                for flat in self._grads:
                    flat.div_(mean)
        return True

    def _mean_weight(self, total: float, num_weighed: float, num_samples: int) -> float:
        """The reduced weight for each sample; reads one number of the device.

        Args:
            total: Samples of all ranks.
            num_weighed: Those of the ranks whose loss has a weight.
            num_samples: Those of this rank.
        """
        if self._weight_apart:
            with self._comm():
                self.collective.weighted_mean_([self._weight], num_samples)
        mean = float(self._weight) + (total - num_weighed) / total
        self._weight.zero_()  # a rank without a weight writes nothing
        return mean

    def unpack(self) -> None:
        """Make what was reduced the parameters' ``.grad``."""
        used = None if self.packed.complete else (self._flags > 0).tolist()
        for i, (p, view) in enumerate(zip(self._params, self._views, strict=True)):
            p.grad = view if used is None or used[i] else None
        self.packed = Packed([], complete=self.packed.complete)  # the memory of the others


TrainFn = Callable[[nn.Module, Any], Any]
"""Gives a batch's mean loss over its samples, or ``(loss, weight)``: its mean over ``weight``
units, such as the tokens that are not ignored, or the sum of the samples' class weights; or what
a model returns, with a field ``loss``."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepEnd(NamedTuple):
    """How a step ended.

    Attributes:
        dropped: Whether it was dropped because of a value that is not finite.
    """

    dropped: bool


MADE, DROPPED = StepEnd(False), StepEnd(True)
EMPTY = MADE
"""The weights sum to 0: the batches are trained, and nothing follows from them."""


class Stepper:
    """Makes steps of a replica.

    Args:
        model: The replica.
        params: Its flat parameters.
        optimizer: Its optimizer.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        max_grad_norm: Clip the gradients' norm to this, after the reduction.
        reducer: Averages gradients over the ranks; ``None``: each rank keeps its own.
        judge: Judges each step before it is made; ``None``: nothing is judged.
        timer: Times the steps; what the reduction takes is left out.
        rates: Context around the optimizer's step, which puts its learning rates in place.
        is_prompt: Whether values of the device can be read at no cost.

    Attributes:
        weight: Of the last micro-batch, as it is logged; ``None``: its samples.
        window: Weight of the step in progress; ``None``: its samples.
        statistics: Where batch normalisation meets the other ranks; ``None``: it does not.
    """

    def __init__(
        self,
        model: nn.Module,
        params: FlatParams,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        precision: str = "fp32",
        max_grad_norm: float | None = None,
        reducer: GradientReducer | None = None,
        judge: StepJudge | None = None,
        timer: StepTimer | None = None,
        rates: Callable[[], AbstractContextManager[None]] | None = None,
        is_prompt: bool = True,
    ) -> None:
        self.weight: Weight | None = None
        self.window: WindowWeight | None = None
        self.statistics: BatchStatistics | None = None
        self._units = 0.0  # of the step's micro-batches before the first that has a weight
        self._is_prompt = is_prompt
        self._weighs_late = False
        self._is_scaled = False  # whether the step's losses were scaled for their weights
        self._mask: Mask | None = None
        self._model = model
        self._params = params.params
        self._names = params.names
        self._optimizer = optimizer
        self._device_type = device.type
        self._dtype = _AUTOCAST.get(precision)
        self._max_grad_norm = max_grad_norm
        self._reducer = reducer
        self._judge = judge
        self._timer = timer or HostTimer()
        self._rates = rates or nullcontext
        # Nothing comes with the optimizer's step: with steps of 1 ms each call counts.
        self._is_bare = rates is None and max_grad_norm is None and precision != "fp16"
        self._losses: list[Tensor] = []
        self._checked = False
        self._scaler: torch.amp.GradScaler | None = None
        if precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
            # Creates the scale now: a rank without a batch unscales before it ever scales.
            self._scaler.scale(torch.zeros((), device=device))

    def copy_from(self, other: Stepper) -> None:
        """Take over the optimizer's state and the scaler of another rank's replica."""
        # load_state_dict keeps tensors of the right dtype and device, which are the other's.
        load_optimizer_state(self._optimizer, copy.deepcopy(other._optimizer.state_dict()))
        if self._scaler is not None and other._scaler is not None:
            self._scaler.load_state_dict(other._scaler.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and, if there is one, of the scaler; no copies."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        kind = type(self._optimizer).__name__
        return {"optimizer": self._optimizer.state_dict(), "kind": kind, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        How the optimizer computes (``foreach``, ``fused``, ``capturable``) stays as built.

        Raises:
            ValueError: It is of another optimizer.
        """
        kind = type(self._optimizer).__name__
        if state["kind"] != kind:  # torch would load it, and fail in the first step
            raise ValueError(f"it holds the state of {state['kind']}, not of {kind}")
        # A copy: ranks may share it, and torch keeps its containers.
        load_optimizer_state(self._optimizer, copy.deepcopy(state["optimizer"]))
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def begin(self) -> None:
        """A step begins: what follows can be taken back, and has no gradients yet."""
        self.open()
        self.clear_gradients()

    def open(self) -> None:
        """A step begins: what follows can be taken back."""
        if self._judge is not None:
            self._judge.begin()

    def clear_gradients(self) -> None:
        """Forget the gradients, losses and weights of the last step."""
        self._losses.clear()
        self.window, self._units = None, 0.0
        if self._reducer is not None:
            self._reducer.packed = NOTHING
        for p in self._params:
            p.grad = None

    def pause(self) -> None:
        """What follows is no work of the step: its time is not counted."""
        self._timer.pause()

    def resume(self) -> None:
        """The step goes on."""
        self._timer.resume()

    def gradients(self) -> list[Tensor | None]:
        """The gradients as they are now, in the order of the parameters."""
        return [p.grad for p in self._params]

    def packed(self) -> Packed | None:
        """What was packed for the reduction; ``None`` where there is none."""
        return None if self._reducer is None else self._reducer.packed

    def give_gradients(self, grads: Sequence[Tensor | None], packed: Packed | None) -> None:
        """Put gradients in place that were computed elsewhere.

        Args:
            grads: One for each parameter.
            packed: What was packed of them already; ``None``: nothing.
        """
        if packed is not None and self._reducer is not None:
            self._reducer.packed = packed
            return
        for p, grad in zip(self._params, grads, strict=True):
            p.grad = grad

    @property
    def is_split(self) -> bool:
        """Whether something comes between the gradients and the optimizer's step."""
        if self._reducer is not None or (self._judge is not None and self._judge.skips):
            return True
        return self._weighs_late and not self._skips_by_itself

    @property
    def _skips_by_itself(self) -> bool:
        """Whether the optimizer's kernels leave a step out that the device calls off."""
        supports = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        return bool(supports) and self._scaler is None

    def _autocast(self) -> AbstractContextManager[object]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def micro_step(
        self, train_fn: TrainFn, batch: Any, fraction: float = 1.0, num_samples: int = 1
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            train_fn: Gives the batch's mean loss, and its weight.
            batch: What the data set gave, on the device.
            fraction: The micro-batch's part of the samples of the step.
            num_samples: Its samples: its weight, where it gives none.

        Returns:
            The loss, detached, still on the device; 0 where its weight is.
        """
        statistics = self.statistics
        if statistics is not None:
            statistics.next_batch()
        if self._dtype is None:
            result = train_fn(self._model, batch)
        else:
            with self._autocast():
                result = train_fn(self._model, batch)
        loss, weight = split_loss(result, self._model, batch)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"train_fn returned {type(loss).__name__}: return the batch's mean loss as a tensor"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"train_fn returned a loss of shape {tuple(loss.shape)}: return a scalar, the "
                "batch's mean loss, for instance loss.mean()"
            )
        if not loss.requires_grad:
            raise ValueError(
                "train_fn returned a loss without a gradient: compute it from the model's output "
                "outside torch.no_grad(), and do not detach it"
            )
        live: Tensor | bool = True
        if weight is None and self.window is None:
            self.weight = None
            self._units += fraction
            target = loss if fraction == 1.0 else loss * fraction
        else:
            live, scale = self._weigh(loss, weight, fraction, num_samples)
            target = loss if fraction == 1.0 else loss * scale
        if self._scaler is not None:
            target = self._scaler.scale(target)
        if statistics is not None:
            window = self.window
            statistics.weight = num_samples / fraction if window is None else window.unit
            statistics.live = live
        if live is True:
            target.backward()  # type: ignore[no-untyped-call]
        else:
            self._masked_backward(target, live)
        if not self._checked:
            self._check_gradients()
        # Unlike detach(), .data does not give up the interpreter: with 1 ms steps each
        # hand-over to another worker counts.
        loss = loss.data
        if live is not True:
            loss = (
                torch.where(live, loss, 0) if isinstance(live, Tensor) else torch.zeros_like(loss)
            )
        if self._reducer is not None:
            self._losses.append(loss)
        return loss

    def _weigh(
        self, loss: Tensor, weight: Weight | None, fraction: float, num_samples: int
    ) -> tuple[Tensor | bool, Weight]:
        """Take a micro-batch's weight into that of the step.

        Returns:
            Whether it is above 0, and what the loss is scaled by.
        """
        plain = num_samples / fraction  # the unit of micro-batches without a weight
        live: Tensor | bool
        first: Weight
        if isinstance(weight, Tensor):
            if self._is_prompt or weight.device.type != loss.device.type:
                weight = weight.item()  # it lies on the CPU
            elif weight.device != loss.device:
                raise ValueError(
                    f"train_fn returned a loss on {loss.device} with a weight on {weight.device}: "
                    "return the weight on the loss's device, or as a number"
                )
        if isinstance(weight, Tensor):
            # Judged when it is read; until then what is no weight counts as 0.
            told = weight.detach().to(torch.float64, copy=True).reshape(())
            self.weight = told
            self._weighs_late = True
            live = told > 0
            weight = torch.where(live, told, 0)
            first = torch.where(live, weight / fraction, plain)
        else:
            self.weight = None if weight is None else check_read_weight(weight)
            weight = num_samples if weight is None else float(weight)
            live = weight > 0
            first = weight / fraction if live else plain
        if self.window is not None:
            unit, units = self.window
        elif self._units:
            unit, units = plain, self._units
        else:
            unit, units = first, 0.0
        self._is_scaled = fraction != 1.0
        scale = weight / unit
        self.window = WindowWeight(unit, units + scale)
        return live, scale.to(loss.dtype) if isinstance(scale, Tensor) else scale

    def _masked_backward(self, target: Tensor, live: Tensor | bool) -> None:
        """Backward of a micro-batch whose gradients count only if it is live."""
        if self._mask is None:
            self._mask = Mask(self._params)
        self._mask.live = live
        try:
            target.backward()  # type: ignore[no-untyped-call]
        finally:
            self._mask.live = None

    def _check_gradients(self) -> None:
        self._checked = True
        grads = [(n, p.grad) for n, p in zip(self._names, self._params, strict=True)]
        if all(g is None for _, g in grads):
            raise ValueError(
                "train_fn's loss reaches no trainable parameter: every gradient is None after "
                "backward; compute the loss with the model that train_fn is given"
            )
        for name, g in grads:
            if g is not None and g.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which replicas cannot average: "
                    "build the embedding with sparse=False"
                )

    def finish(self, num_samples: int) -> StepEnd:
        """Reduce, judge, clip and step.

        Args:
            num_samples: Samples behind this rank's gradients; 0 only under lockstep.
        """
        if self._reducer is None and self.window is None:
            if self._judge is not None and not self._judge.accept():
                return DROPPED
            if self._is_bare:
                self._optimizer.step()
            else:
                self.apply()
            return MADE
        self.pack(num_samples)
        end = self.settle(num_samples)
        if end is not None:
            return end
        self.unpack()
        self.apply()
        return MADE

    def pack(self, num_samples: int) -> None:
        """Make this rank's part of the reduction ready; without one, divide by the weights."""
        if self._reducer is not None:
            self._reducer.pack(num_samples, self._losses, self.window)
        elif self.window is not None and self._is_scaled:
            self._divide(self.window.units)

    def _divide(self, units: Weight) -> None:
        """Turn the sum of weighted gradients into their mean."""
        grads = [p.grad for p in self._params if p.grad is not None]
        if isinstance(units, Tensor):
            factor = torch.where(units > 0, 1 / units, 0)
            if not any(g.dtype is torch.float64 for g in grads):
                factor = factor.float()
            torch._foreach_mul_(grads, factor)
        elif units > 0 and units != 1.0:
            torch._foreach_div_(grads, units)

    def settle(self, num_samples: int) -> StepEnd | None:
        """Reduce what was packed, and judge.

        Returns:
            How the step has ended; ``None``: it may be made.
        """
        if self._reducer is not None:
            self._timer.pause()
            accepted = self._reducer.exchange(num_samples)
            self._timer.resume()
            if not accepted:
                return DROPPED
            return EMPTY if self._reducer.is_empty else None
        if self._judge is not None and not self._judge.accept():
            return DROPPED
        if self.window is None:
            return None
        units = self.window.units
        if isinstance(units, Tensor) and self._skips_by_itself:
            return None
        # On a device, one number read in each step.
        return None if units > 0 else EMPTY

    def unpack(self) -> None:
        """Put the reduced gradients in place; nothing where none are reduced."""
        if self._reducer is not None:
            self._reducer.unpack()

    def apply(self) -> None:
        """Clip and step."""
        # A dropped step never comes here: the scaler neither unscales nor counts it.
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._max_grad_norm)
        with self._rates():
            if self._scaler is not None:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            elif self._is_called_off_late:
                self._step_unless_empty()
            else:
                self._optimizer.step()

    @property
    def _is_called_off_late(self) -> bool:
        """Whether the device decides whether the step's weights leave anything to do."""
        if self._reducer is not None or self.window is None or not self._skips_by_itself:
            return False
        return isinstance(self.window.units, Tensor)

    def _step_unless_empty(self) -> None:
        """Step with kernels that do nothing where the weights sum to 0; nothing is read."""
        assert self.window is not None
        optimizer: Any = self._optimizer
        optimizer.found_inf = 1.0 - torch.as_tensor(self.window.units > 0).float()
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
