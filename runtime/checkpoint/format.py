"""Format of a checkpoint: its manifest and plain values."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from coordinator.codec import parse_json
from runtime.checkpoint.subclasses import flatten_subclass
from runtime.core.errors import CheckpointError


def plain(value: Any, where: str, *, copy: bool = False, drop: bool = False) -> Any:
    """Convert a value to types that ``torch.load(weights_only=True)`` restores unchanged.

    Containers are copied; numbers and strings of other types (NumPy's scalars) become Python's.
    Blocks while tensors are copied from a device.

    Args:
        value: Tensors, numbers, strings, bytes, ``None``, lists, tuples, sets and mappings of
            them.
        copy: Copy tensors to new CPU memory; otherwise they are detached only.
        drop: Omit functions, other callables and optimizers from mappings.

    Raises:
        CheckpointError: Contains an unsupported type; the message has its path.
    """
    if value is None or isinstance(value, (bool, torch.dtype, torch.device, torch.Size)):
        return value
    if type(value) in (bytes, complex):
        return value
    if isinstance(value, Tensor):
        if _is_loadable(value):
            return value.detach().to("cpu", copy=True) if copy else value.detach()
        return _plain_subclass(value, where, copy=copy)
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration, its value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = {}
        if isinstance(value, (Counter, OrderedDict)):  # required by schedulers
            kept = Counter() if isinstance(value, Counter) else OrderedDict()
        for key, item in value.items():
            if isinstance(key, Tensor):  # compared by identity, which no file keeps
                raise CheckpointError(
                    f"{where} has a tensor as a key, such as a parameter, and the tensors of a "
                    "later run are others: use names or numbers as keys"
                )
            with suppress(_LeftOut) if drop else nullcontext():
                found = plain(item, f"{where}[{key!r}]", copy=copy, drop=drop)
                kept[plain(key, f"a key of {where}")] = found
        return kept
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{i}]", copy=copy, drop=drop) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is set:
        return {plain(item, f"an item of {where}", copy=copy) for item in value}
    kind = _LeftOut if callable(value) or isinstance(value, Optimizer) else CheckpointError
    raise kind(
        f"{where} is of type {type(value).__name__}, which checkpoints do not support: use "
        "tensors, numbers, strings, lists, tuples and dicts in state dicts"
    )


class _LeftOut(CheckpointError):
    """A value that the factory of a resumed run creates again."""


def _plain_subclass(t: Tensor, where: str, *, copy: bool) -> dict[str, Any]:
    """Convert a tensor subclass to a value that :func:`restore_subclasses` restores."""
    kind = type(t).__name__
    remedy = (
        "define __tensor_flatten__ and __tensor_unflatten__, keep plain tensors in the state, or "
        "train without checkpoint_dir(path)"
    )
    flattened = flatten_subclass(t)
    if flattened is None:
        raise CheckpointError(
            f"{where} is of type {kind}, a tensor subclass, which checkpoints do not support: "
            f"{remedy}"
        )
    found: dict[str, Any] = plain(flattened, where, copy=copy)
    context = flattened.get("context")
    if repr(found.get("context")) != repr(context):
        raise CheckpointError(
            f"{where} is of type {kind}, a tensor subclass, whose context is of type "
            f"{type(context).__name__}, which checkpoints do not support: {remedy}"
        )
    return found


def _is_loadable(t: Tensor) -> bool:
    """True if the safe reader accepts the type; subclasses must be registered with PyTorch."""
    kind = type(t)
    return kind in (Tensor, nn.Parameter) or kind in torch.serialization.get_safe_globals()


def plain_key(key: str) -> str:
    """The key of a state dict without the prefixes of compiled submodules."""
    return key.replace("_orig_mod.", "")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the keys of ``state_dict()``, in its order, without
    the prefixes of compiled submodules.

    Tensors that state-dict hooks create are omitted; parameters that they remove appear under
    their own names.
    """
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    state = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {key: value for key, value in state.items() if id(value) in own}
    there = {id(value) for value in found.values()}
    found.update((name, p) for name, p in model.named_parameters() if id(p) not in there)
    return {plain_key(key): value for key, value in found.items()}


def resize_buffers(model: nn.Module, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace buffers by ones of other shapes, if the model has some that are sized in its first
    forward pass: at least one has no elements.

    Args:
        like: Tensors of the new shapes, by name; others keep theirs.

    Returns:
        The buffers that were replaced, by name.
    """
    replaced: dict[str, Tensor] = {}
    buffers = dict(model.named_buffers())
    if all(buffer.numel() for buffer in buffers.values()):
        return replaced
    for name, buffer in buffers.items():
        shape = like[plain_key(name)].shape if plain_key(name) in like else buffer.shape
        if shape != buffer.shape:
            replaced[name] = buffer
            set_buffer(model, name, buffer.new_zeros(shape))
    return replaced


def set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace a buffer of a part of a model."""
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._buffers[key] = buffer


def digest(model: nn.Module) -> str:
    """SHA-256 of the names, shapes and dtypes of a model's weights, and of the memory formats of
    its trainable parameters, if they are not contiguous.
    """
    described: list[list[Any]] = []
    for key, value in named_weights(model).items():
        described.append([key, list(value.shape), str(value.dtype)])
        if value.requires_grad and not value.is_contiguous():
            strides = zip(value.size(), value.stride(), strict=True)
            described[-1].append([stride for size, stride in strides if size != 1])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


FORMAT = "gpuworker checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
WEIGHTS = "weights.safetensors"
STATE = "state.pt"
_RANK = re.compile(r"ranks-(\d{5})\.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def rank_file(rank: int) -> str:
    """File name of a rank's state."""
    return f"ranks-{rank:05d}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint; written last and read first.

    Attributes:
        global_step: Batches trained by all ranks together.
        files: Size in bytes and SHA-256 of each file but the manifest.
    """

    epoch: int
    global_step: int
    files: dict[str, tuple[int, str]]
    about: dict[str, str]

    @property
    def world_size(self) -> int:
        """Number of ranks in the checkpoint."""
        return sum(_RANK.fullmatch(name) is not None for name in self.files)

    def to_bytes(self) -> bytes:
        """Serialise, with a SHA-256 of the content."""
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
        """Parse a file's content.

        Raises:
            CheckpointError: It was altered, or has another version.
        """
        try:
            body = parse_json(content)
            if body["format"] != FORMAT:
                raise CheckpointError(f"its format is {body['format']!r}, not {FORMAT!r}")
            if body["version"] != VERSION:
                raise CheckpointError(
                    f"its format version is {body['version']}, this version reads {VERSION}; "
                    "resume with the version that wrote it, or start from its weights, in "
                    f"{WEIGHTS}, without resume(path)"
                )
            digest = body.pop("sha256")
            if (
                hashlib.sha256(_dump(body)).hexdigest() != digest
                or _dump({**body, "sha256": digest}) != content
            ):
                raise CheckpointError("its SHA-256 does not match")
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
        ) as error:
            raise CheckpointError(f"not readable: {type(error).__name__}: {error}") from error
        found._check_names()
        return found

    def _check_names(self) -> None:
        """Allow only expected names, so that nothing outside the directory is read."""
        expected = {WEIGHTS, STATE, *map(rank_file, range(self.world_size))}
        if set(self.files) != expected or self.world_size == 0:
            raise CheckpointError(f"it lists {sorted(self.files)}, not {sorted(expected)}")
        for name, (size, digest) in self.files.items():
            if size < 0 or not _SHA256.fullmatch(digest):
                raise CheckpointError(f"its entry for {name} is not a size and a SHA-256")


def _count(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.80} instead of an integer")
    return value


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()


def numpy_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of NumPy's global generator from a checkpoint, for ``set_state``."""
    numbers: dict[str, Any] = _unpacked(saved)
    if numbers["bit_generator"] == "MT19937":
        numbers["state"]["key"] = numbers["state"]["key"].astype(np.uint32)
    return numbers


def packed_arrays(value: Any) -> Any:
    """The state of a NumPy generator with tensors in place of arrays."""
    if isinstance(value, dict):
        return {name: packed_arrays(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.uint64).view(np.int64))
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unpacked(item) for name, item in value.items()}
    return value.numpy().view(np.uint64) if isinstance(value, Tensor) else value
