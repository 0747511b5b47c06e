"""A directory of checkpoints: writing one, keeping the last ones."""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.files import (
    claimed_directory,
    fits_safetensors,
    flush_and_digest,
    flush_directory,
    make_directory,
    read_regular,
    remove_leftovers,
    write_durably,
    write_pickle,
    write_weights,
)
from runtime.checkpoint.format import (
    MANIFEST,
    MAX_BYTES,
    STATE,
    WEIGHTS,
    CheckpointData,
    Manifest,
    rank_file,
)
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{1,18})-(?:(epoch|within)-(\d{1,18})-)?(\d{1,18})")
"""Earlier versions named no epoch, and wrote where one ended alone."""
_TEMPORARY = ".unfinished-"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A checkpoint's directory; the newest is the largest.

    Attributes:
        serial: Grows by one with each checkpoint in the directory, whatever its step.
        step: Batches trained by all ranks together.
        path: The directory.
        within: Whether it was made in the middle of an epoch.
    """

    serial: int
    step: int
    path: Path
    within: bool = False


def is_name(name: str) -> bool:
    """Whether a checkpoint's directory may be called so."""
    return _NAME.fullmatch(name) is not None


def entries(directory: Path) -> list[Entry]:
    """Checkpoints in a directory, complete or not, the newest first.

    Raises:
        OSError: The directory cannot be read.
    """
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            within = match[2] == "within"
            found.append(Entry(int(match[4]), int(match[1]), path, within))
    return sorted(found, reverse=True)


def write_checkpoint(directory: Path, data: CheckpointData) -> Path:
    """Write a checkpoint into a directory, which is made if needed.

    Files are written under a temporary name, flushed and then renamed: whatever happens at
    whatever moment, a directory under a checkpoint's name is complete. Blocks until it is on
    the disk. Several threads and processes may write into one directory.

    Returns:
        The checkpoint's own directory, ``step-<batches>-epoch-<closed epochs>-<serial>``; one
        made in the middle of an epoch has ``within`` in the place of ``epoch``.

    Raises:
        OSError, CheckpointError: It could not be written, or holds what a checkpoint cannot
            hold, or ``directory`` is a checkpoint itself; nothing torn is left of it.
    """
    make_directory(directory)
    if (directory / MANIFEST).exists():
        raise CheckpointError(
            f"{directory} is a checkpoint itself; name a directory to put checkpoints into"
        )
    remove_leftovers(directory, _TEMPORARY)
    with claimed_directory(lambda: directory / f"{_TEMPORARY}{os.urandom(8).hex()}") as temporary:
        try:
            _fill(temporary, data)
            path = _publish(directory, temporary, data)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        flush_directory(directory)
    return path


def _fill(temporary: Path, data: CheckpointData) -> None:
    weights = {n: t for n, t in data.weights.items() if fits_safetensors(t)}
    write_weights(temporary / WEIGHTS, weights)
    state = {
        "names": list(data.weights),
        "others": {n: t for n, t in data.weights.items() if n not in weights},
        "run": data.run,
        "compatible": data.compatible,
        "epoch": data.epoch,
        "global_step": data.global_step,
        "orders": data.orders,
        "stream": data.stream,
    }
    for name, content in (
        (STATE, state),
        *((rank_file(rank), content) for rank, content in enumerate(data.ranks)),
    ):
        write_pickle(temporary / name, _compact(content))
    files = {p.name: flush_and_digest(p) for p in sorted(temporary.iterdir())}
    manifest = Manifest(
        epoch=data.epoch,
        global_step=data.global_step,
        files=files,
        about={
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": str(torch.__version__),
        },
    )
    write_durably(temporary / MANIFEST, manifest.to_bytes())
    flush_directory(temporary)


def _compact(value: Any) -> Any:
    """The same with each tensor on the CPU and in memory of its own size, since a view would
    be written with all that it is a view of."""
    if isinstance(value, Tensor):
        t = value.detach().to("cpu")
        if t.layout is torch.strided and t.untyped_storage().nbytes() > t.nbytes:
            return t.clone(memory_format=torch.contiguous_format)
        return t
    if isinstance(value, dict):
        kept = type(value)()
        kept.update({key: _compact(item) for key, item in value.items()})
        return kept
    if isinstance(value, list):
        return [_compact(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_compact(item) for item in value)
    return value


def _publish(directory: Path, temporary: Path, data: CheckpointData) -> Path:
    where = f"{'within' if data.within else 'epoch'}-{data.epoch:04d}"
    serial = max((entry.serial for entry in entries(directory)), default=0)
    while True:
        serial += 1
        path = directory / f"step-{data.global_step:010d}-{where}-{serial:06d}"
        if path.exists():
            continue
        try:
            os.rename(temporary, path)
        except OSError:
            # Another process was faster: a directory that is not empty is never replaced.
            if not path.exists():
                raise
            continue
        return path


def looks_complete(path: Path) -> bool:
    """Whether a checkpoint's files are there in the sizes that its manifest names; their
    content is not read."""
    try:
        manifest = Manifest.from_bytes(read_regular(path / MANIFEST, MAX_BYTES))
        return all((path / n).stat().st_size == size for n, (size, _) in manifest.files.items())
    except (OSError, CheckpointError):
        return False


def remove_old(directory: Path, keep: int) -> None:
    """Remove what is older than the newest ``keep`` complete checkpoints.

    Those made in the middle of an epoch and those made at an end are counted apart. A
    checkpoint loses its name before its files, so that none is ever half there. What cannot be
    removed is logged and stays.
    """
    num_kept = {False: 0, True: 0}
    for entry in entries(directory):
        if num_kept[entry.within] >= keep:
            _remove(directory, entry.path)
        elif looks_complete(entry.path):
            num_kept[entry.within] += 1
    remove_leftovers(directory, _TEMPORARY)


def _remove(directory: Path, path: Path) -> None:
    doomed = directory / f"{_TEMPORARY}{path.name}-{os.urandom(4).hex()}"
    with suppress(FileNotFoundError):  # another process removes it too
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("old checkpoint %s could not be removed: %s", path, error)
