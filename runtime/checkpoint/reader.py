"""Finding the newest complete checkpoint, and refusing the others by name."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor

from runtime.checkpoint.files import read_regular
from runtime.checkpoint.format import (
    MANIFEST,
    MAX_BYTES,
    STATE,
    WEIGHTS,
    CheckpointData,
    Manifest,
    rank_file,
)
from runtime.checkpoint.store import entries, is_name
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_MAX_SEARCHES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that was read.

    Attributes:
        data: Its content, in memory of its own.
        path: Its directory.
        refused: Newer ones that were torn or altered, each with its file and the reason.
    """

    data: CheckpointData
    path: Path
    refused: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.name


def load_newest(
    path: str | Path,
    *,
    missing_ok: bool = False,
    check: Callable[[CheckpointData], None] | None = None,
) -> Loaded | None:
    """Read the newest complete checkpoint. Blocks; needs memory for it and for its largest
    file once more.

    A checkpoint that is torn or altered anywhere, or whose content ``check`` refuses, is
    refused with a warning that names the file, and the one before it is taken. A file is
    parsed only after its SHA-256 agreed, and pickles only with ``weights_only=True``: nothing in
    them is ever called. Links in the directory are not followed; ``path`` itself may be one.

    Args:
        path: A directory of checkpoints, or one checkpoint's own.
        missing_ok: Give ``None`` where there is no checkpoint, whole or torn.
        check: Raises ``ValueError`` where the content cannot be gone on from.

    Raises:
        CheckpointError: There is none, or every one was refused; each is named.
    """
    directory = Path(path).absolute()
    refused: dict[str, str] = {}
    for _ in range(_MAX_SEARCHES):
        found = _candidates(directory)
        for candidate in found:
            if candidate.name in refused:
                continue
            try:
                if candidate is not directory and candidate.is_symlink():
                    raise CheckpointError(f"{candidate}: a link, which is not followed")
                data = _read(candidate)
                if check is not None:
                    check(data)
            except (CheckpointError, ValueError) as error:
                if candidate is not directory and not os.path.lexists(candidate):
                    continue  # another process has removed it, and written a newer one
                reason = str(error)
                if not isinstance(error, CheckpointError):
                    reason = f"{candidate}: {error}"
                refused[candidate.name] = reason
                logger.warning("checkpoint refused: %s", reason)
            else:
                return Loaded(data=data, path=candidate, refused=tuple(refused.values()))
        if all(candidate.exists() for candidate in found):
            break
    if not refused:
        if missing_ok:
            return None
        raise CheckpointError(
            f"there is no checkpoint in {directory}; name another directory, or start afresh "
            "with resume(path, missing_ok=True)"
        )
    raise CheckpointError(
        f"every checkpoint in {directory} was refused: {'; '.join(refused.values())}. Restore one "
        "of them from a copy, or name another directory"
    )


def _candidates(directory: Path) -> list[Path]:
    try:
        if (directory / MANIFEST).exists() or (is_name(directory.name) and directory.is_dir()):
            return [directory]
        return [entry.path for entry in entries(directory)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def _read(path: Path) -> CheckpointData:
    """Read one checkpoint; errors begin with the file's path."""
    manifest = _manifest(path)
    for name, (size, _) in manifest.files.items():  # the cheap test of all files first
        _check_size(path / name, size)
    files = manifest.files
    state = _unpickle(path / STATE, *files[STATE])
    ranks = tuple(
        _unpickle(path / name, *files[name]) for name in map(rank_file, range(manifest.world_size))
    )
    weights = _weights(path / WEIGHTS, *files[WEIGHTS])
    try:
        if (state["epoch"], state["global_step"]) != (manifest.epoch, manifest.global_step):
            raise CheckpointError(f"{path / STATE}: its step is not the manifest's")
        every = {**weights, **state["others"]}
        if not all(isinstance(t, Tensor) for t in every.values()):
            raise TypeError("a weight is no tensor")
        return CheckpointData(
            weights={name: every.pop(name) for name in state["names"]},
            ranks=ranks,
            run=_dict(state["run"]),
            compatible=_dict(state["compatible"]),
            epoch=manifest.epoch,
            global_step=manifest.global_step,
            orders=cast(dict[int, Tensor], _dict(state.get("orders", {}))),
            stream=state.get("stream"),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path / STATE}: {error!r} in what it holds") from error


def _manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        return Manifest.from_bytes(read_regular(file, MAX_BYTES))
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{file}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _check_size(file: Path, size_bytes: int) -> None:
    try:
        found = file.lstat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {_reason(error)}") from error
    if found != size_bytes:
        raise CheckpointError(f"{file}: {found} bytes where {size_bytes} belong")


def _content(file: Path, size_bytes: int, digest: str) -> bytes:
    """A file's bytes, read once, so that what was checked is what is used."""
    try:
        content = read_regular(file, size_bytes)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{file}: {_reason(error)}") from error
    if len(content) != size_bytes or hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{file}: its SHA-256 does not agree")
    return content


def _weights(file: Path, size_bytes: int, digest: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(_content(file, size_bytes, digest))
    except Exception as error:  # it raises many kinds on what it does not know
        raise CheckpointError(f"{file}: not readable: {error}") from error


def _unpickle(file: Path, size_bytes: int, digest: str) -> dict[str, Any]:
    content = _content(file, size_bytes, digest)
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # the safe reader raises many kinds on what it does not know
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file}: refused by the safe reader: {reason}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a {type(value).__name__}, not a dict")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in place of a dict")
    return value
