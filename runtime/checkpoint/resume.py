"""Resuming from a checkpoint: reading, validation, and the state of each rank."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.codec import Count, decode, fail
from coordinator.saved_run import check_run
from runtime.checkpoint.content import (
    CheckpointData,
    SavedGenerators,
    SavedRank,
    SavedSampler,
    SavedSettings,
    SavedStream,
)
from runtime.checkpoint.format import (
    WEIGHTS,
    named_weights,
    numpy_state,
    plain_key,
    resize_buffers,
)
from runtime.checkpoint.optimizer_shards import (
    check_divisible,
    check_shards,
    join_shards,
    with_states,
)
from runtime.checkpoint.store import load_newest
from runtime.checkpoint.subclasses import is_flattened, restore_subclasses
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_SETTING_NAMES = {
    "global_batch_size": "global_batch_size",
    "batch_size": "batch_size",
    "num_samples": "length of the data set",
    "drop_last": "drop_last",
    "seed": "seed",
    "accumulate": "accumulate",
    "sampler": "a sampler:",
    "stream": "a stream:",
    "shuffle": "a shuffle",
}


class ResumePoint:
    """A checkpoint from which a run resumes. Immutable, read by all threads.

    Attributes:
        data: Its content.
    """

    def __init__(self, data: CheckpointData, name: str) -> None:
        self.data = data
        self._num_epochs: int | None = None  # of the run, once that is checked
        self._name = name
        self._joined: dict[str, Any] | None = None  # the optimizer's state of all shards
        self._lock = threading.Lock()

    @property
    def summary(self) -> str:
        """Path and progress of the checkpoint, as one line."""
        data = self.data
        epochs, reason = data.epoch, data.reason
        text = (
            f"resuming from {self._name}: {epochs} epoch{'s' * (epochs != 1)} closed, "
            f"{data.global_step:,} batches trained"
        )
        if epochs == self._num_epochs:
            text += "; nothing is left to train: raise num_epochs, or use another directory"
        elif reason and reason != "finished" and not data.failed:
            text += f"; the run that wrote it ended early ({reason}), and this one trains on"
        return text

    @classmethod
    def read(
        cls, path: Path, settings: SavedSettings, num_epochs: int, *, missing_ok: bool
    ) -> ResumePoint | None:
        """Read the newest complete checkpoint; blocks.

        Args:
            path: A checkpoint, or a directory of them.
            settings: Settings of the run that must match.
            missing_ok: Return ``None`` if there is no checkpoint.

        Returns:
            ``None`` if the run starts from the beginning.

        Raises:
            CheckpointError: There is no complete checkpoint, or it does not match the run.
        """
        loaded = load_newest(path, missing_ok=missing_ok, check=check_content)
        if loaded is None:
            logger.info("no checkpoint in %s: the run starts from the beginning", path)
            return None
        point = cls(loaded.data, str(loaded.path))
        point.check(settings, num_epochs)
        if loaded.data.failed:
            logger.warning(
                "%s is the state that a failed run left (%s): %s",
                loaded.path,
                loaded.data.reason,
                loaded.data.error,
            )
        return point

    def check(self, settings: SavedSettings, num_epochs: int) -> None:
        """Raise ``CheckpointError`` unless the run matches the checkpoint."""
        self._num_epochs = num_epochs
        saved, run = self.data.settings, self.data.run
        if saved.global_batch_size is None and self._steps_by(settings):
            saved = replace(saved, global_batch_size=settings.global_batch_size)
        if saved.sync != settings.sync:
            one, other = "SYNC", "CADENCE or ASYNC"
            was, now = (one, other) if saved.sync else (other, one)
            remedy = " or ".join(f"policy({word.lower()!r})" for word in was.split(" or "))
            raise CheckpointError(
                f"{self._name} was written under the policy {was}, this run has {now}, which "
                f"counts steps and batches differently: call {remedy} on the builder, or start a "
                f"new run from its weights, in {WEIGHTS}, without resume(path)"
            )
        for name, value in asdict(settings).items():
            theirs = getattr(saved, name)
            if theirs != value:
                if name == "global_batch_size" and theirs is None:
                    raise CheckpointError(
                        f"{self._name} was written with batch_size({saved.batch_size}) on "
                        f"{run.per_global} devices, and this run has global_batch_size({value}), "
                        "which counts steps differently: use the same, or start over without "
                        "resume(path)"
                    )
                raise CheckpointError(
                    f"{self._name} was written with {_SETTING_NAMES[name]} {theirs!r}, "
                    f"this run has {value!r}: use the same, or start over without resume(path)"
                )
        started = [epoch.epoch + 1 for epoch in run.epochs if epoch.consumed]
        done = max([run.num_closed, *started])
        if num_epochs < done:
            raise CheckpointError(
                f"{self._name} is in its epoch number {done}, this run has num_epochs("
                f"{num_epochs}): set at least {done}"
            )

    def _steps_by(self, settings: SavedSettings) -> bool:
        """True if each batch of the checkpoint was a step of the run's global batch size."""
        saved = self.data.settings
        step = saved.batch_size, self.data.run.per_global, saved.accumulate
        return saved.sync and step == (settings.global_batch_size, 1, 1)

    @property
    def stream(self) -> SavedStream | None:
        """The saved state of a stream, if any."""
        saved = self.data.stream
        return None if saved is None else replace(saved, stream=restore_subclasses(saved.stream))

    def rank(self, rank: int) -> SavedRank:
        """A rank's own state; with another world size, that of rank ``rank % saved_world_size``.

        The state of an additional rank has no generators, so that its random numbers differ.
        """
        saved = self.data.ranks
        state = saved[rank % len(saved)]
        if state.shards is not None:
            with self._lock:
                self._joined = self._joined or join_shards(saved)
            state = replace(state, stepper=with_states(state, self._joined))
        return state if rank < len(saved) else replace(state, generators=None)

    def load_weights(self, model: nn.Module) -> None:
        """Load the checkpoint's weights into a model.

        Raises:
            CheckpointError: The model differs; the message has the first difference.
        """
        saved = {plain_key(key): tensor for key, tensor in self.data.weights.items()}
        resize_buffers(model, saved)
        own = named_weights(model)
        difference = _first_difference(saved, own)
        if difference is not None:
            raise CheckpointError(
                f"{self._name} contains another model than model_factory builds: {difference}; "
                "build the same architecture, or start over without resume(path)"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])


def _first_difference(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    for name, theirs in saved.items():
        mine = own.get(name)
        if mine is None:
            return f"the checkpoint has {name!r}, the model does not"
        if mine.shape != theirs.shape:
            return (
                f"the shape of {name!r} is {tuple(theirs.shape)} in the checkpoint and "
                f"{tuple(mine.shape)} in the model"
            )
        if mine.dtype != theirs.dtype:
            return (
                f"the dtype of {name!r} is {theirs.dtype} in the checkpoint and {mine.dtype} in "
                "the model"
            )
    extra = next((name for name in own if name not in saved), None)
    return None if extra is None else f"the model has {extra!r}, the checkpoint does not"


def check_rank(state: SavedRank, rank: int) -> None:
    """Check that the parts of a rank's own state agree, and that its generators can be loaded.

    Raises:
        ValueError: They do not; the message has the name of the field.
    """
    _check_optimizer(state.stepper.optimizer, f"rank {rank}['stepper']['optimizer']")
    if state.generators is not None:
        _check_generators(state.generators, f"rank {rank}['generators']")
    for name, value in state.buffers.items():
        if not (isinstance(value, Tensor) or is_flattened(value)):
            fail(f"rank {rank}['buffers'][{name!r}]", value, "a tensor")
    check_divisible(state, rank)


def _check_optimizer(value: dict[str, Any], where: str) -> None:
    """Raise unless each parameter is in one group and each state belongs to a parameter.

    The contents of groups and states are validated by the optimizer that loads them.
    """
    groups = decode(_Groups, {k: value.get(k) for k in ("state", "param_groups")}, where)
    place = f"{where}['param_groups']"
    named: list[int] = []
    for i, group in enumerate(groups.param_groups):
        named += decode(tuple[Count, ...], group.get("params"), f"{place}[{i}]['params']")
    if not named or sorted(named) != list(range(len(named))):
        fail(f"the parameters of {place}", named, "each number from 0 once")
    for i, state in groups.state.items():
        if type(i) is int:  # other keys are the optimizer's own
            if not 0 <= i < len(named):
                fail(f"a key of {where}['state']", i, "the number of a parameter")
            decode(dict[str, Any], state, f"{where}['state'][{i}]")


@dataclass(frozen=True)
class _Groups:
    """The form of an optimizer's state dict."""

    state: dict[Any, Any]
    param_groups: tuple[dict[str, Any], ...]


def _check_generators(value: SavedGenerators, where: str) -> None:
    """Raise unless each generator's state can be loaded, tried on new generators of its type."""
    tries: dict[str, Callable[[Any], object]] = {
        "torch": lambda state: torch.Generator().set_state(state),
        "python": lambda state: random.Random().setstate(state),
        "numpy": lambda state: np.random.RandomState().set_state(numpy_state(state)),
        "worker": _check_bytes,
        "device": lambda state: None if state is None else _check_bytes(state),
    }
    if value.worker.shape == torch.Generator().get_state().shape:  # else a GPU's generator
        tries["worker"] = tries["torch"]
    if value.numpy.get("bit_generator") != "MT19937":
        tries["numpy"] = lambda state: decode(str, state.get("bit_generator"), "bit_generator")
    for name, set_state in tries.items():
        try:
            set_state(getattr(value, name))
        except Exception as error:  # of any type
            raise ValueError(f"{where}[{name!r}] is not a generator's state: {error}") from error


def _check_bytes(state: Tensor) -> None:
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise ValueError(f"a tensor of {state.dtype} instead of bytes")


def check_sampler(sampler: SavedSampler | None) -> None:
    """Check that the state of a sampler's generator can be loaded.

    Raises:
        ValueError: It cannot.
    """
    if sampler is not None:
        _check_generator(sampler.state, "sampler['state']")


def _check_generator(state: Tensor, where: str) -> None:
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{where} is not a generator's state: {error}") from error


def check_content(data: CheckpointData) -> None:
    """Check that the parts of an intact checkpoint agree, and that a run can load them.

    Raises:
        ValueError: They do not; the message has the name of the field.
    """
    settings = data.settings
    check_sampler(data.sampler)
    check_run(
        data.run,
        num_samples=settings.num_samples,
        batch_size=settings.batch_size,
        drop_last=settings.drop_last,
        num_rank_states=len(data.ranks),
    )
    for epoch, order in data.orders.items():
        if order.dtype != torch.int64 or order.shape != (settings.num_samples,):
            raise ValueError(f"orders[{epoch}] is not a list of {settings.num_samples} samples")
    if data.stream is not None:
        _check_generator(data.stream.generator, "stream['generator']")
    for rank, state in enumerate(data.ranks):
        check_rank(state, rank)
        first = data.ranks[0].together
        if settings.sync and state.together[:2] != first[:2]:  # ranks in lockstep would deadlock
            expected = f"{list(first[:2])}, as for rank 0,"
            fail(f"rank {rank}['together']", state.together, expected)
    check_shards(data.ranks)
