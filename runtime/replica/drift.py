"""Comparison of the replicas of a lockstep run, which are equal by construction."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.collective.base import Collective
from runtime.replica.flat import FlatState, checksum
from runtime.replica.optimizers import settings_of

logger = logging.getLogger(__name__)

INTERVAL = 1000
"""Steps between two comparisons within an epoch."""
_TOLERANCE_EPS = 8.0
"""Relative difference of a tensor that counts as rounding, in units of its dtype's precision."""
_MIXED_TOLERANCE = 0.02
"""The same between devices of different kinds, whose kernels round differently."""
_MASK = (1 << 52) - 1  # exact as a float, which is what ranks exchange on the host

DIFFERENT_FLAGS = (
    "%s differs between the ranks of SYNC: %s. Unless it is set before each step, a step mixes "
    "gradients of samples that were trained in different ways: set it in epoch_fn, by the epoch, "
    "or by worker.global_step, which are the same on all ranks. Batches that a rank counts itself "
    "are not, as one without samples in a short last batch does not see it"
)


class Drift(NamedTuple):
    """A difference between replicas.

    Attributes:
        tensor: Description of the first tensor that differs.
        ranks: Ranks in the collective that differ from its first.
        distance: Largest relative distance; ``None``: not measured.
        is_frozen: True if the trained state is equal, and frozen parameters differ, as those of a
            teacher that train_fn updates: a rank without samples does not call it in that step.
    """

    tensor: str
    ranks: tuple[int, ...]
    distance: float | None
    is_frozen: bool = False


class DriftCheck:
    """Compares parameters and optimizer state with those of the other ranks."""

    def __init__(
        self, model: nn.Module, state: FlatState, optimizer: torch.optim.Optimizer
    ) -> None:
        self._state = state
        self._optimizer = optimizer
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._model = model
        self._has_warned = False

    @torch.no_grad()
    def compare(self, collective: Collective, *, frozen: bool) -> Drift | None:
        """Compare the replicas. Collective: every rank calls it between the same two steps.

        Waits for the device, once if the replicas are equal.

        Returns:
            The first difference that is more than rounding; the same on every rank.
        """
        digests = collective.all_gather_number(self._digest(frozen=frozen))
        if len(set(digests)) == 1:
            return None
        drift = self._first_difference(collective)
        if drift is None:
            self._warn_of_flags(collective)
        return drift

    def _flags(self) -> list[tuple[str, bool]]:
        """Flags that determine how parameters and modules are trained, by description."""
        named = self._model.named_parameters()
        modules = self._model.named_modules()
        return [
            *((f"requires_grad of parameter {name!r}", p.requires_grad) for name, p in named),
            *(
                (f"training of {f'module {name!r}' if name else 'the model'}", module.training)
                for name, module in modules
            ),
        ]

    def _warn_of_flags(self, collective: Collective) -> None:
        """Warn once if flags differ, which makes no difference between replicas. Collective."""
        flags = self._flags()
        if self._has_warned or len(set(collective.all_gather_number(len(flags)))) > 1:
            return
        for name, flag in flags:
            values = collective.all_gather_number(float(flag))
            if len(set(values)) > 1:
                self._has_warned = True
                if collective.rank == 0:
                    logger.warning(DIFFERENT_FLAGS, name, [bool(value) for value in values])
                return

    def _digest(self, *, frozen: bool) -> float:
        """A checksum of the parameters, and of the norms of all other tensors."""
        device = self._state.params.flats[0].device
        total = torch.zeros((), dtype=torch.int64, device=device)
        for flat in self._state.params.flats:
            total = total * 31 + checksum(flat)
        tensors = [t for _, t in self._optimizer_state() if isinstance(t, Tensor)]
        if frozen:
            tensors += [p for _, p in self._frozen]
        for kind in {t.device for t in tensors}:
            floats = [t for t in tensors if t.device == kind and t.is_floating_point()]
            floats = [t for t in floats if t.dtype.itemsize > 1 and t.numel()]
            if floats:
                norms = torch.stack([n.double() for n in torch._foreach_norm(floats)])
                # Bits rather than values: NaN differs from itself.
                words = norms.view(torch.int64)
                factors = torch.arange(1, 2 * len(floats), 2, device=kind)
                total = total * 31 + (words * factors).sum().to(device)
        numbers = [v for _, v in self._optimizer_state() if not isinstance(v, Tensor)]
        return _mixed(int(total), *numbers, *(flag for _, flag in self._flags()))

    def _optimizer_state(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each tensor and number of the optimizer's state."""
        state = self._optimizer.state
        for name, p in zip(self._state.params.names, self._state.params.params, strict=True):
            for key, value in state.get(p, {}).items():
                if type(value) is Tensor or type(value) in (int, float, bool):
                    yield f"{key!r} of the optimizer's state of {name!r}", value
        params = self._state.params
        if params.trained is not params.params:
            yield from self._settings()

    def _settings(self) -> Iterator[tuple[str, Any]]:
        """A number for the settings with which each parameter is trained.

        Where each rank trains a part, other settings leave the whole parameters equal.
        """
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        params = self._state.params
        for name, p in zip(params.names, params.trained, strict=True):
            found = settings_of(groups.get(id(p), {}))
            keys = sorted(found.keys() & self._optimizer.defaults.keys())
            values = [(key, _setting(found[key])) for key in keys]
            yield f"the optimizer's setting for {name!r}", _mixed(*values)

    def _tensors(self) -> list[tuple[str, Any]]:
        params = zip(self._state.params.names, self._state.params.params, strict=True)
        return [
            *((f"parameter {name!r}", p) for name, p in params),
            *self._optimizer_state(),
            *((f"frozen parameter {name!r}", p) for name, p in self._frozen),
        ]

    def _first_difference(self, collective: Collective) -> Drift | None:
        """Compare tensor by tensor. Collective."""
        tensors = self._tensors()
        counts = collective.all_gather_number(len(tensors))
        if len(set(counts)) > 1:
            return Drift("the number of tensors of the optimizer's state", _unlike(counts), None)
        kinds = collective.all_gather_number(_mixed(self._device_kind()))
        is_mixed = len(set(kinds)) > 1
        for name, value in tensors:
            ranks = _unlike(collective.all_gather_number(_fingerprint(value)))
            if not ranks:
                continue
            is_frozen = any(value is p for _, p in self._frozen)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return Drift(name, ranks, None, is_frozen)
            distance = max(collective.all_gather_number(self._distance(collective, value)))
            rounding = _MIXED_TOLERANCE if is_mixed else _TOLERANCE_EPS * _eps(value.dtype)
            if not distance <= rounding:
                return Drift(name, ranks, distance, is_frozen)
        return None

    def _device_kind(self) -> str:
        device = self._state.params.flats[0].device
        is_cuda = device.type == "cuda"
        return torch.cuda.get_device_properties(device).name if is_cuda else device.type

    def _distance(self, collective: Collective, value: Tensor) -> float:
        """Relative distance from the first rank's tensor."""
        device = self._state.params.flats[0].device
        own = value.detach().to(device, torch.float64, copy=True).reshape(-1)
        first = own.clone()
        collective.broadcast_(first, src=0)
        norm = float(torch.linalg.vector_norm(first))
        return float(torch.linalg.vector_norm(own - first)) / (norm or 1.0)


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _unlike(values: Sequence[float]) -> tuple[int, ...]:
    """Indices of the values that differ from the first."""
    return tuple(i for i, value in enumerate(values) if value != values[0])


def _fingerprint(value: Any) -> float:
    return _mixed(int(checksum(value)) if isinstance(value, Tensor) else value)


def _mixed(*values: Any) -> float:
    """A hash of which all bits depend on all bits of the values, such as exponents of floats."""
    return float(hash(values) & _MASK)


def _setting(value: Any) -> Any:
    """A setting of an optimizer, to be hashed; only numbers, words and tuples are compared."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return repr(value) if isinstance(value, (int, float, str, tuple)) else None
