"""The learning rate: a torch scheduler driven by the global step, and a scale on top."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from runtime.checkpoint.format import plain
from runtime.replica.optimizers import Schedulers, make_scheduler, members_of

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
SchedulerFactories = SchedulerFactory | Mapping[str, SchedulerFactory]
"""One for each optimizer, or those of some of several, by name."""


class Schedule:
    """Keeps an optimizer's learning rates at a position of the run.

    Args:
        optimizer: The worker's optimizer.
        factory: Makes the scheduler, or ``None``.
        total: Positions past this one count as this one.
        every: Positions to a step of the scheduler; 0: it is stepped by :meth:`tell`, with the
            metric of an epoch, which is then what a position is.

    Attributes:
        scheduler: Moves the rates from step to step; ``None``: nobody does.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factory: SchedulerFactories | None = None,
        total: int | None = None,
        every: int = 1,
    ) -> None:
        self._optimizer = optimizer
        self._total = total
        self._every = every
        self._position = 0
        self._scale = 1.0
        self._told: float | None = None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | Schedulers | None = None
        self._base: list[float] = []
        if isinstance(rate := optimizer.param_groups[0].get("lr"), torch.Tensor):
            self._told = float(rate)
        if factory is not None:
            self.attach(factory)

    def attach(self, factory: SchedulerFactories) -> None:
        """Drive the learning rate by ``factory(optimizer)`` from here on."""
        scheduler = make_scheduler(self._optimizer, factory)
        if not hasattr(scheduler, "step"):
            raise TypeError(
                f"scheduler(f): f(optimizer) returned {type(scheduler).__name__}, "
                "not a torch.optim.lr_scheduler.LRScheduler"
            )
        if isinstance(scheduler, Schedulers):
            by_metric = scheduler.by_metric
        else:
            by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if by_metric and self._every:
            raise TypeError(
                "ReduceLROnPlateau is stepped by a metric of each epoch: name it in the builder's "
                "scheduler(f, metric='eval/loss'); elsewhere use a scheduler that follows steps, "
                "such as OneCycleLR"
            )
        if not by_metric and not self._every:
            raise TypeError(
                "scheduler(f, metric=...) is for ReduceLROnPlateau, and "
                f"{type(scheduler).__name__} follows steps or epochs: leave metric out"
            )
        # A rank may have to catch up with the others before its own first step, which
        # torch would take for a mistake.
        for optimizer in members_of(self._optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self.scheduler = scheduler
        self._position = 0
        self._base = self._read()
        if self._scale != 1.0:
            self._write([rate * self._scale for rate in self._base])

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _write(self, rates: list[float]) -> None:
        self._told = rates[0]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @property
    def known(self) -> float | None:
        """Learning rate of the first group as far as the host knows it, without a wait: where it
        lies on a device, what was written there last. ``None``: it has none, or nobody knows."""
        rate = self._optimizer.param_groups[0].get("lr")
        if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
            return self._told
        return None if rate is None else float(rate)

    @property
    def current(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set every group's rate; a scheduler overwrites it with its next step."""
        self._write([lr] * len(self._optimizer.param_groups))

    def scale_lr(self, factor: float) -> None:
        """Multiply every group's rate once; a scheduler overwrites it."""
        self._write([rate * factor for rate in self._read()])

    def set_scale(self, scale: float) -> None:
        """Multiply what the scheduler gives, at every step from here on.

        Without a scheduler it changes nothing until one is attached.
        """
        self._scale = scale
        if self.scheduler is not None:
            self._write([rate * scale for rate in self._base])

    def copy_from(self, other: Schedule) -> None:
        """Stand where another rank's schedule of the same kind stands."""
        self._position, self._scale = other._position, other._scale
        self._base = list(other._base)
        if self.scheduler is not None and other.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))
        self._write(other._read())

    def state_dict(self) -> dict[str, Any]:
        """Position, scale, unscaled rates and the scheduler's own state.

        Of that, what is no plain value (a function) is left out: the factory makes it anew.
        """
        scheduler = None
        if self.scheduler is not None:
            state = self.scheduler.state_dict()
            scheduler = plain(state, "the scheduler's state", copy=True, drop=True)
        return {
            "position": self._position,
            "every": self._every,
            "scale": self._scale,
            "base": list(self._base),
            "scheduler": scheduler,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; the rates stay, they are the optimizer's.

        Raises:
            ValueError: The scheduler was stepped at another interval.
        """
        every = state.get("every", 1)
        if self.scheduler is not None and every != self._every:
            raise ValueError(
                f"the scheduler was stepped {_how(every)}, and is {_how(self._every)} now: pass "
                "scheduler(f, interval=..., metric=...) as before"
            )
        self._position = int(state["position"])
        self._scale = float(state["scale"])
        self._base = [float(rate) for rate in state["base"]] or self._read()
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(copy.deepcopy(dict(state["scheduler"])))

    def mark(self) -> ScheduleMark | None:
        """Where it stands, for :meth:`go_back`; ``None``: no step moves it."""
        if self.scheduler is None or not self._every:
            return None
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return ScheduleMark(
            self._position,
            self._scale,
            list(self._base),
            [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates],
            copy.deepcopy(self.scheduler.state_dict()),
        )

    def go_back(self, mark: ScheduleMark) -> None:
        """Stand where it stood; what a scheduler moves beside the rates stays."""
        assert self.scheduler is not None
        self._position, self._scale, self._base = mark.position, mark.scale, mark.base
        self.scheduler.load_state_dict(mark.scheduler)
        for group, rate in zip(self._optimizer.param_groups, mark.rates, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def rescale(self, factor: float) -> None:
        """Multiply the rates and, where there is a scheduler, the scale on top of it."""
        self._write([rate * factor for rate in self._read()])
        self._scale = self._scale * factor if self.scheduler is not None else self._scale

    def advance(self, position: int) -> None:
        """Bring the rate to a position: batches trained by all ranks before this step."""
        if self.scheduler is None or not self._every:
            return
        if self._total is not None:
            position = min(position, self._total)
        steps = position // self._every - self._position
        if steps > 0:
            self._step([()] * steps)

    def tell(self, values: Sequence[float | None]) -> None:
        """Step by the metrics of epochs, each of them once.

        Args:
            values: Of all epochs that have closed.

        Raises:
            ValueError: An epoch has none.
        """
        new = [(value,) for value in values[self._position :]]
        if self.scheduler is None or self._every or not new:
            return
        if (None,) in new:
            epoch = self._position + new.index((None,))
            raise ValueError(
                f"epoch {epoch} has no metric of the name in scheduler(f, metric=...): record it "
                "in train_fn by record_scalar(), or let eval_fn return it, under eval/<name>"
            )
        self._step(new)

    def _step(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        assert self.scheduler is not None
        if self._scale != 1.0:
            self._write(self._base)
        for given in arguments:
            self.scheduler.step(*given)
            self._position += 1
        if self._scale != 1.0:
            # Chainable schedulers compute from the rate they find: never the scaled one.
            self._base = self._read()
            self._write([rate * self._scale for rate in self._base])


class ScheduleMark(NamedTuple):
    """Where a schedule stood; see its attributes."""

    position: int
    scale: float
    base: list[float]
    rates: list[float | torch.Tensor]
    scheduler: dict[str, Any]


def _how(every: int) -> str:
    return f"every {every} batches" if every else "by a metric"
