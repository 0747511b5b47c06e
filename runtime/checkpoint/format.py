"""The list of a checkpoint's files, written last and checked first."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.core.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointData:
    """The whole state of a run between two steps.

    Nobody may write to it or to its tensors once it is handed over: it is written from
    another thread, later.

    Attributes:
        weights: Full state dict of the bare module on the CPU, in the module's order. Tied
            tensors stand under each of their names and may share memory.
        ranks: One state for each rank: optimizer, schedule, scaler, generators, own
            buffers, counters; values as :func:`plain` gives them.
        run: The coordinator's state, likewise.
        compatible: What must agree for the run to be continued, likewise.
        epoch: Closed epochs, for names and logs.
        global_step: Batches trained by all ranks together.
        within: Whether it was made in the middle of an epoch.
        orders: Of a sampler, by epoch: the samples of each that is under way, in order.
        sampler: Of a sampler with a generator of its own: an epoch, and the generator's state
            before it was drawn.
        stream: Of a stream that can be set to a state: an item that is not yet trained, or one
            before, its state there, and that of its generator.
    """

    weights: dict[str, Tensor]
    ranks: tuple[dict[str, Any], ...]
    run: dict[str, Any]
    compatible: dict[str, Any]
    epoch: int
    global_step: int
    within: bool = False
    orders: dict[int, Tensor] = field(default_factory=dict)
    sampler: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None


def plain(value: Any, where: str, *, copy: bool = False, drop: bool = False) -> Any:
    """The value in types that ``torch.load(weights_only=True)`` gives back unchanged.

    Containers are rebuilt, so that later changes do not show; numbers and strings of
    other types (NumPy's scalars) become Python's own. Blocks while tensors are copied from
    a device.

    Args:
        value: Tensors, numbers, strings, bytes, ``None``, lists, tuples, sets and mappings of
            them.
        where: What it is, for the error.
        copy: Copy tensors to new CPU memory; otherwise they are taken as they are.
        drop: Leave out of mappings what a checkpoint cannot hold.

    Raises:
        CheckpointError: Something else is in it; names the place.
    """
    if value is None or isinstance(value, (bool, torch.dtype, torch.device, torch.Size)):
        return value
    if type(value) in (bytes, complex):
        return value
    if isinstance(value, Tensor) and _comes_back(value):
        return value.detach().to("cpu", copy=True) if copy else value.detach()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = {}
        if isinstance(value, (Counter, OrderedDict)):  # schedulers rely on them
            kept = Counter() if isinstance(value, Counter) else OrderedDict()
        for key, item in value.items():
            with suppress(CheckpointError) if drop else nullcontext():
                found = plain(item, f"{where}[{key!r}]", copy=copy, drop=drop)
                kept[plain(key, f"a key of {where}")] = found
        return kept
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{i}]", copy=copy, drop=drop) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is set:
        return {plain(item, f"an item of {where}", copy=copy) for item in value}
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold: keep tensors, "
        "numbers, strings, lists, tuples and dicts in state dicts"
    )


def _comes_back(t: Tensor) -> bool:
    """Whether the safe reader knows the tensor's type: a subclass only if it was told of it."""
    kind = type(t)
    return kind in (Tensor, nn.Parameter) or kind in torch.serialization.get_safe_globals()


def plain_key(key: str) -> str:
    """A key of a state dict as the bare module has it, where parts were compiled."""
    return key.replace("_orig_mod.", "")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers under the keys of ``state_dict()``, in its order,
    as modules have them that are not compiled.

    Of a state dict that hooks have changed, what they made anew is left out; a parameter
    that they took away stands under its own name.
    """
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    state = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {key: value for key, value in state.items() if id(value) in own}
    there = {id(value) for value in found.values()}
    found.update((name, p) for name, p in model.named_parameters() if id(p) not in there)
    return {plain_key(key): value for key, value in found.items()}


def digest(model: nn.Module) -> str:
    """The names, shapes and dtypes of a model's weights, as a hash."""
    described = [
        [key, list(value.shape), str(value.dtype)] for key, value in named_weights(model).items()
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


FORMAT = "gpuworker checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
WEIGHTS = "weights.safetensors"
STATE = "state.pt"
_RANK = re.compile(r"ranks-(\d{5})\.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def rank_file(rank: int) -> str:
    """Name of the file of one rank's state."""
    return f"ranks-{rank:05d}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What belongs to a checkpoint.

    Attributes:
        epoch: Closed epochs.
        global_step: Batches trained by all ranks together.
        files: Size in bytes and SHA-256 of each file but the manifest.
        about: Where it comes from, for people.
    """

    epoch: int
    global_step: int
    files: dict[str, tuple[int, str]]
    about: dict[str, str]

    @property
    def world_size(self) -> int:
        """How many ranks' states it holds."""
        return sum(_RANK.fullmatch(name) is not None for name in self.files)

    def to_bytes(self) -> bytes:
        """The file's content, which carries the SHA-256 of itself."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "epoch": self.epoch,
            "global_step": self.global_step,
            "files": {n: {"bytes": b, "sha256": s} for n, (b, s) in sorted(self.files.items())},
            "about": self.about,
        }
        return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read a file's content; every byte must be as it was written.

        Raises:
            CheckpointError: It is altered, or of another version.
        """
        try:
            body = json.loads(content)
            if body["format"] != FORMAT:
                raise CheckpointError(f"its format is {body['format']!r}, not {FORMAT!r}")
            if body["version"] != VERSION:
                raise CheckpointError(
                    f"its format version is {body['version']}, this program reads {VERSION}; "
                    "resume with the version of the program that wrote it"
                )
            digest = body.pop("sha256")
            if (
                hashlib.sha256(_dump(body)).hexdigest() != digest
                or _dump({**body, "sha256": digest}) != content
            ):
                raise CheckpointError("its SHA-256 does not agree")
            files = {n: (_count(f["bytes"]), str(f["sha256"])) for n, f in body["files"].items()}
            found = cls(
                epoch=_count(body["epoch"]),
                global_step=_count(body["global_step"]),
                files=files,
                about=dict(body["about"]),
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"not readable: {type(error).__name__}: {error}") from error
        found._check_names()
        return found

    def _check_names(self) -> None:
        """No other names, so that nothing outside the directory is read."""
        expected = {WEIGHTS, STATE, *map(rank_file, range(self.world_size))}
        if set(self.files) != expected or self.world_size == 0:
            raise CheckpointError(f"it lists {sorted(self.files)}, not {sorted(expected)}")
        for name, (size, digest) in self.files.items():
            if size < 0 or not _SHA256.fullmatch(digest):
                raise CheckpointError(f"its entry of {name} is no size and SHA-256")


def _count(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.80} in place of a whole number")
    return value


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()


def numpy_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What NumPy takes, of the state of its global generator in a checkpoint."""
    numbers: dict[str, Any] = _unpacked(saved)
    if numbers["bit_generator"] == "MT19937":
        numbers["state"]["key"] = numbers["state"]["key"].astype(np.uint32)
    return numbers


def packed_arrays(value: Any) -> Any:
    """The state of a NumPy generator, of whichever kind, with tensors in place of arrays."""
    if isinstance(value, dict):
        return {name: packed_arrays(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.uint64).view(np.int64))
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unpacked(item) for name, item in value.items()}
    return value.numpy().view(np.uint64) if isinstance(value, Tensor) else value
