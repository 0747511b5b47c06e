"""Resuming from a checkpoint: reading, validation, and the state of each rank."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.coordinator_checkpoint import check_run
from coordinator.schema import fail, integer, items, mapping, number, of_type, optional, record
from coordinator.splitting import count_batches
from runtime.checkpoint.format import (
    WEIGHTS,
    CheckpointData,
    named_weights,
    numpy_state,
    plain_key,
    resize_buffers,
)
from runtime.checkpoint.optimizer_shards import (
    SHARD_FACTS,
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

_COMPATIBLE = record(
    {
        "batch_size": integer(1),
        "num_samples": integer(1),
        "drop_last": of_type(bool),
        "seed": integer(),
        "accumulate": integer(1),
        "sync": of_type(bool),
    },
    may={
        "sampler": of_type(bool),
        "stream": of_type(bool),
        "shuffle": of_type(str),
        "global_batch_size": optional(integer(1)),
    },
)

_TENSORS = mapping(of_type(str), of_type(Tensor))


def _anything(value: Any, where: str) -> None:
    return


_mapping = mapping(_anything, _anything)

_MAX = 1 << 53
"""Upper limit of all counts."""


class ResumePoint:
    """A checkpoint from which a run resumes. Immutable, read by all threads."""

    def __init__(self, data: CheckpointData, name: str) -> None:
        self._data = data
        self._num_epochs: int | None = None  # of the run, once that is checked
        self._name = name
        self._joined: dict[str, Any] | None = None  # the optimizer's state of all shards
        self._lock = threading.Lock()

    @property
    def summary(self) -> str:
        """Path and progress of the checkpoint, as one line."""
        data = self._data
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
        cls, path: Path, compatible: Mapping[str, Any], num_epochs: int, *, missing_ok: bool
    ) -> ResumePoint | None:
        """Read the newest complete checkpoint; blocks.

        Args:
            path: A checkpoint, or a directory of them.
            compatible: Settings that must match; see :class:`CheckpointData`.
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
        point.check(compatible, num_epochs)
        if loaded.data.failed:
            logger.warning(
                "%s is the state that a failed run left (%s): %s",
                loaded.path,
                loaded.data.reason,
                loaded.data.error,
            )
        return point

    def check(self, compatible: Mapping[str, Any], num_epochs: int) -> None:
        """Raise ``CheckpointError`` unless the run matches the checkpoint."""
        self._num_epochs = num_epochs
        saved = {
            "sampler": False,
            "stream": False,
            "shuffle": "as a whole",
            "global_batch_size": None,
            **self._data.compatible,
        }
        if saved["global_batch_size"] is None and self._steps_by(compatible):
            saved["global_batch_size"] = compatible["global_batch_size"]
        if saved["sync"] != compatible["sync"]:
            one, other = "SYNC", "CADENCE or ASYNC"
            was, now = (one, other) if saved["sync"] else (other, one)
            remedy = " or ".join(f"policy({word.lower()!r})" for word in was.split(" or "))
            raise CheckpointError(
                f"{self._name} was written under the policy {was}, this run has {now}, which "
                f"counts steps and batches differently: call {remedy} on the builder, or start a "
                f"new run from its weights, in {WEIGHTS}, without resume(path)"
            )
        for name, value in compatible.items():
            if saved.get(name) != value:
                if name == "global_batch_size" and saved[name] is None:
                    raise CheckpointError(
                        f"{self._name} was written with batch_size({saved['batch_size']}) on "
                        f"{self._per_global} devices, and this run has global_batch_size({value}), "
                        "which counts steps differently: use the same, or start over without "
                        "resume(path)"
                    )
                raise CheckpointError(
                    f"{self._name} was written with {_SETTING_NAMES[name]} {saved.get(name)!r}, "
                    f"this run has {value!r}: use the same, or start over without resume(path)"
                )
        started = [e["epoch"] + 1 for e in self._data.run["epochs"] if e["consumed"]]
        done = max([len(self._data.run["metrics"]), *started])
        if num_epochs < done:
            raise CheckpointError(
                f"{self._name} is in its epoch number {done}, this run has num_epochs("
                f"{num_epochs}): set at least {done}"
            )
        per_epoch = count_batches(
            compatible["num_samples"], compatible["batch_size"], drop_last=compatible["drop_last"]
        )
        assert self._data.global_step <= per_epoch * num_epochs  # ensured by check_content

    def _steps_by(self, compatible: Mapping[str, Any]) -> bool:
        """True if each batch of the checkpoint was a step of the run's global batch size."""
        saved = self._data.compatible
        step = saved["batch_size"], self._per_global, saved["accumulate"]
        return bool(saved["sync"]) and step == (compatible["global_batch_size"], 1, 1)

    @property
    def _per_global(self) -> int:
        """Batches of the checkpoint's global batch."""
        return int(self._data.run.get("per_global", self._data.run["world_size"]))

    @property
    def num_closed(self) -> int:
        """Number of closed epochs."""
        return self._data.epoch

    @property
    def run(self) -> Mapping[str, Any]:
        """The coordinator's state."""
        return self._data.run

    @property
    def sampler(self) -> Mapping[str, Any] | None:
        """The state of a sampler's own generator, before the draws of a later epoch."""
        return self._data.sampler

    @property
    def stream(self) -> Mapping[str, Any] | None:
        """The saved state of a stream, if any."""
        state: Mapping[str, Any] | None = restore_subclasses(self._data.stream)
        return state

    @property
    def orders(self) -> Mapping[int, Tensor]:
        """A sampler's orders of the open epochs."""
        return self._data.orders

    def rank(self, rank: int) -> Mapping[str, Any]:
        """A rank's own state; with another world size, that of rank ``rank % saved_world_size``.

        The state of an additional rank has no generators, so that its random numbers differ.
        """
        saved = self._data.ranks
        state = saved[rank % len(saved)]
        if "shards" in state:
            with self._lock:
                self._joined = self._joined or join_shards(saved)
            state = {**state, "optimizer": with_states(state, self._joined)}
        return state if rank < len(saved) else {**state, "generators": None}

    def load_weights(self, model: nn.Module) -> None:
        """Load the checkpoint's weights into a model.

        Raises:
            CheckpointError: The model differs; the message has the first difference.
        """
        saved = {plain_key(key): tensor for key, tensor in self._data.weights.items()}
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


_factor = number(0.0, _MAX)


def _positive(value: Any, where: str) -> None:
    _factor(value, where)
    if value == 0:
        fail(where, value, "a number above 0")


def _number(value: Any, where: str) -> None:
    if type(value) is not bool:
        number()(value, where)


_SCALER = {
    "scale": _positive,
    "growth_factor": _positive,
    "backoff_factor": _positive,
    "growth_interval": integer(1, _MAX),
    "_growth_tracker": integer(high=_MAX),
}

_FLAGS = mapping(of_type(str), of_type(bool))
_RANK_STATE = record(
    {
        "optimizer": lambda value, where: _check_optimizer(value, where),
        "kind": of_type(str),
        # Empty: disabled.
        "scaler": lambda value, where: (
            None if value in (None, {}) else record(_SCALER)(value, where)
        ),
        "schedule": record(
            {
                "position": integer(high=_MAX),
                "scale": _factor,
                "base": items(number(-_MAX, _MAX)),
                "scheduler": optional(_mapping),
            },
            may={"every": integer(high=_MAX), "settings": mapping(of_type(str), of_type(str))},
        ),
        "lr_scale": _positive,
        "generators": lambda value, where: _check_generators(value, where),
        "version": integer(high=_MAX),
        "local_step": integer(high=_MAX),
        "epoch": integer(
            -1, _MAX
        ),  # a rank may have the plan of an epoch that the run has not started
        "begun_epoch": integer(-1, _MAX),
        "buffers": mapping(of_type(str), lambda value, where: _check_tensor(value, where)),
        "together": items(integer(high=_MAX), 3),
        "frozen": _TENSORS,
        "extra_state": of_type(dict),
    },
    may={
        "modes": _FLAGS,
        "requires_grad": _FLAGS,
        "numbers": items(mapping(of_type(str), lambda value, where: _number(value, where))),
        "groups": items(items(of_type(str))),
        "train_point": items(of_type(Tensor)),
        "strides": items(items(integer())),
        "body_steps": integer(high=_MAX),
        "shards": SHARD_FACTS,
    },
)


def _check_tensor(value: Any, where: str) -> None:
    if not is_flattened(value):
        of_type(Tensor)(value, where)


def _check_optimizer(value: Any, where: str) -> None:
    """Raise unless each parameter is in one group and each state belongs to a parameter.

    The contents of groups and states are validated by the optimizer that loads them.
    """
    record({"state": _mapping, "param_groups": items(record({"params": items(integer())}))})(
        value, where
    )
    named = [i for group in value["param_groups"] for i in group["params"]]
    if not named or sorted(named) != list(range(len(named))):
        fail(f"the parameters of {where}['param_groups']", named, "each number from 0 once")
    for i, state in value["state"].items():
        if type(i) is int:  # other keys are the optimizer's own
            integer(high=len(named) - 1)(i, f"a key of {where}['state']")
            mapping(of_type(str), _anything)(state, f"{where}['state'][{i}]")


def _check_generators(value: Any, where: str) -> None:
    """Raise unless each generator's state can be loaded, tried on new generators of its type."""
    tries: dict[str, Callable[[Any], object]] = {
        "torch": lambda state: torch.Generator().set_state(state),
        "python": lambda state: random.Random().setstate(state),
        "numpy": lambda state: np.random.RandomState().set_state(numpy_state(state)),
    }
    fields = {**dict.fromkeys(tries, _anything), "worker": _bytes}
    record(fields, may={"device": _bytes})(value, where)
    record({"bit_generator": of_type(str)})(value["numpy"], f"{where}['numpy']")
    if value["worker"].shape == torch.Generator().get_state().shape:  # else a GPU's generator
        tries["worker"] = tries["torch"]
    if value["numpy"]["bit_generator"] != "MT19937":
        del tries["numpy"]  # another bit generator, which may not be available here
    for name, set_state in tries.items():
        try:
            set_state(value[name])
        except Exception as error:  # of any type
            raise ValueError(f"{where}[{name!r}] is not a generator's state: {error}") from error


def _bytes(value: Any, where: str) -> None:
    of_type(Tensor)(value, where)
    if value.dtype != torch.uint8 or value.dim() != 1:
        raise ValueError(f"{where} is a tensor of {value.dtype} instead of bytes")


def _generator(value: Any, where: str) -> None:
    _bytes(value, where)
    try:
        torch.Generator().set_state(value)
    except RuntimeError as error:
        raise ValueError(f"{where} is not a generator's state: {error}") from error


_SAMPLER = record({"epoch": integer(high=_MAX), "state": _generator})
_STREAM = record({"item": integer(high=_MAX), "generator": _generator, "stream": _anything})


def check_rank(state: Mapping[str, Any], rank: int) -> None:
    """Validate a rank's own state.

    Raises:
        ValueError: A field has a value that no run writes; the message has its name.
    """
    _RANK_STATE(state, f"rank {rank}")
    check_divisible(state, rank)


def check_start(compatible: Mapping[str, Any], sampler: Mapping[str, Any] | None) -> None:
    """Validate the parts of a checkpoint that exist before the run starts.

    Raises:
        ValueError: A field has a value that no run writes; the message has its name.
    """
    _COMPATIBLE(compatible, "compatible")
    optional(_SAMPLER)(sampler, "sampler")


def check_content(data: CheckpointData) -> None:
    """Validate the content of an intact checkpoint.

    Raises:
        ValueError: A field has a value that no run writes; the message has its name.
    """
    check_start(data.compatible, data.sampler)
    c = data.compatible
    check_run(
        data.run,
        num_samples=c["num_samples"],
        batch_size=c["batch_size"],
        drop_last=c["drop_last"],
        num_rank_states=len(data.ranks),
    )
    mapping(integer(), of_type(Tensor))(data.orders, "orders")
    for epoch, order in data.orders.items():
        if order.dtype != torch.int64 or order.shape != (c["num_samples"],):
            raise ValueError(f"orders[{epoch}] is not a list of {c['num_samples']} samples")
    optional(_STREAM)(data.stream, "stream")
    for rank, state in enumerate(data.ranks):
        check_rank(state, rank)
        position, first = state["together"][:2], data.ranks[0]["together"][:2]
        if c["sync"] and position != first:  # ranks in lockstep would deadlock
            fail(f"rank {rank}['together']", state["together"], f"{list(first)}, as for rank 0,")
    check_shards(data.ranks)
    if data.run["global_step"] != data.global_step or len(data.run["metrics"]) != data.epoch:
        raise ValueError(
            f"its step and epoch are {data.global_step} and {data.epoch}, those of run are "
            f"{data.run['global_step']} and {len(data.run['metrics'])}"
        )
