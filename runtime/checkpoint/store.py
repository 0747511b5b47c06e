"""A directory of checkpoints: background writing, retention, and reading the newest."""

from __future__ import annotations

import atexit
import errno
import hashlib
import io
import logging
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from coordinator.codec import decode, encode
from runtime.checkpoint import tensor_file
from runtime.checkpoint.content import CheckpointData, SavedRank
from runtime.checkpoint.files import (
    DirectoryLock,
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
    MAX_MANIFEST_BYTES,
    STATE,
    WEIGHTS,
    Manifest,
    plain,
    rank_file,
)
from runtime.core.errors import CheckpointError, without_tracebacks
from runtime.core.live_registry import LiveRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAME = re.compile(r"step-(\d{1,18})-(?:(epoch|within|failed)-(\d{1,18})-)?(\d{1,18})")
"""Earlier versions had no epoch in the name, and wrote only at the end of an epoch."""
_TEMPORARY = ".unfinished-"


@dataclass(frozen=True, slots=True, order=True)
class CheckpointEntry:
    """A checkpoint's directory; newer ones compare as larger.

    Attributes:
        serial: Number of the checkpoint in the directory.
        step: Batches trained by all ranks together.
        within: True if it was taken within an epoch.
        failed: True if it was saved when the run failed.
    """

    serial: int
    step: int
    path: Path
    within: bool = False
    failed: bool = False


def is_checkpoint_name(name: str) -> bool:
    """True if ``name`` is a valid name of a checkpoint's directory."""
    return _NAME.fullmatch(name) is not None


def entries(directory: Path) -> list[CheckpointEntry]:
    """Checkpoints in a directory, complete or not, newest first.

    Raises:
        OSError: The directory cannot be read.
    """
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            kind = match[2]
            entry = CheckpointEntry(
                int(match[4]), int(match[1]), path, kind != "epoch" and bool(kind), kind == "failed"
            )
            found.append(entry)
    return sorted(found, reverse=True)


def write_checkpoint(directory: Path, data: CheckpointData) -> Path:
    """Write a checkpoint into a directory, which is created if needed.

    Files are written under a temporary name, flushed and then renamed, so a directory with a
    checkpoint's name is always complete, even after a crash. Blocks until it is on disk. Several
    threads and processes may write into one directory.

    Returns:
        The checkpoint's own directory, ``step-<batches>-epoch-<closed epochs>-<serial>``; one
        taken within an epoch has ``within`` instead of ``epoch``, and one of a failed run
        ``failed``.

    Raises:
        OSError, CheckpointError: It could not be written, its content is not supported, or
            ``directory`` is itself a checkpoint; no incomplete checkpoint is left.
    """
    make_directory(directory)
    if (directory / MANIFEST).exists():
        raise CheckpointError(
            f"{directory} is itself a checkpoint; pass a directory for checkpoints"
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
    others = {n: t for n, t in data.weights.items() if n not in weights}
    state = encode(replace(data, weights=others, ranks=()))
    for name, content in (
        (STATE, plain({**state, "names": list(data.weights)}, STATE)),
        *((rank_file(rank), encode(content)) for rank, content in enumerate(data.ranks)),
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
            **({"reason": data.reason} if data.reason else {}),
        },
    )
    write_durably(temporary / MANIFEST, manifest.to_bytes())
    flush_directory(temporary)


def _compact(value: Any) -> Any:
    """Copy tensors to the CPU, and views to their own memory, since a view would be written with
    its whole storage.
    """
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
    kind = "failed" if data.failed else "within" if data.within else "epoch"
    where = f"{kind}-{data.epoch:04d}"
    serial = max((entry.serial for entry in entries(directory)), default=0)
    while True:
        serial += 1
        path = directory / f"step-{data.global_step:010d}-{where}-{serial:06d}"
        if path.exists():
            continue
        try:
            os.rename(temporary, path)
        except OSError:
            # Another process was faster: a non-empty directory is never replaced.
            if not path.exists():
                raise
            continue
        return path


def is_complete(path: Path) -> bool:
    """True if a checkpoint's files exist with the sizes in its manifest; reads no content."""
    try:
        manifest = Manifest.from_bytes(read_regular(path / MANIFEST, MAX_MANIFEST_BYTES))
        return all((path / n).stat().st_size == size for n, (size, _) in manifest.files.items())
    except (OSError, CheckpointError):
        return False


def remove_old_checkpoints(directory: Path, keep: int) -> None:
    """Remove all checkpoints older than the newest ``keep`` complete ones.

    Those taken within an epoch and at its end are counted separately, and those of failed runs
    are not counted: one is removed once there are ``keep`` newer ones of either kind. A
    checkpoint is renamed before its files are removed, so that it is never visible incomplete.
    Failed removals are logged.
    """
    num_kept = {False: 0, True: 0}
    for entry in entries(directory):
        most = max(num_kept.values()) if entry.failed else num_kept[entry.within]
        if most >= keep:
            _remove(directory, entry.path)
        elif not entry.failed and is_complete(entry.path):
            num_kept[entry.within] += 1
    remove_leftovers(directory, _TEMPORARY)


def _remove(directory: Path, path: Path) -> None:
    doomed = directory / f"{_TEMPORARY}{path.name}-{os.urandom(4).hex()}"
    with suppress(FileNotFoundError):  # removed by another process
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("old checkpoint %s could not be removed: %s", path, error)


_MAX_SEARCHES = 100

Check = Callable[[CheckpointData], None]
"""Raises ``ValueError`` if a run cannot resume from the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint that was read.

    Attributes:
        data: Its content, in its own memory.
        refused: Newer checkpoints that were refused, each with its file and the reason.
    """

    data: CheckpointData
    path: Path
    refused: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the directory's path."""
        return self.path.name


def load_newest(
    path: str | Path,
    *,
    missing_ok: bool = False,
    check: Check | None = None,
) -> LoadedCheckpoint | None:
    """Read the newest complete checkpoint. Blocks; needs memory for it and for a second copy
    of its largest file.

    A checkpoint that is incomplete or altered, or that ``check`` refuses, is skipped with a
    warning that names the file, and the previous one is tried. A file is parsed only after its
    SHA-256 matched, and pickles only with ``weights_only=True``, which executes no code. Links in
    the directory are not followed; ``path`` itself may be one.

    Args:
        path: A directory of checkpoints, or a checkpoint's own directory.
        missing_ok: Return ``None`` if there is no checkpoint at all, complete or not.
        check: Raises ``ValueError`` if a run cannot resume from the content.

    Raises:
        CheckpointError: There is none, or all were refused; the message lists them.
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
                data = _checked(candidate, check)
            except CheckpointError as error:
                if candidate is not directory and not os.path.lexists(candidate):
                    continue  # removed by another process, which has written a newer one
                refused[candidate.name] = str(error)
                logger.warning("checkpoint refused: %s", error)
            else:
                return LoadedCheckpoint(data=data, path=candidate, refused=tuple(refused.values()))
        if all(candidate.exists() for candidate in found):
            break
    if not refused:
        if missing_ok:
            return None
        raise CheckpointError(
            f"there is no checkpoint in {directory}; pass another directory, or start from the "
            "beginning with resume(path, missing_ok=True)"
        )
    raise CheckpointError(
        f"every checkpoint in {directory} was refused: {'; '.join(refused.values())}. Restore one "
        "of them from a copy, or pass another directory"
    )


def _candidates(directory: Path) -> list[Path]:
    try:
        if (directory / MANIFEST).exists() or (
            is_checkpoint_name(directory.name) and directory.is_dir()
        ):
            return [directory]
        return [entry.path for entry in entries(directory)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def read_back(path: Path, check: Check | None = None) -> None:
    """Read a checkpoint as :func:`load_newest` does, in memory for its largest weight.

    Args:
        path: The checkpoint's own directory.
        check: See :func:`load_newest`.

    Raises:
        CheckpointError: It would be refused; the message has the file and the reason.
    """
    try:
        _checked(path, check, keep=False)
    except CheckpointError:
        _checked(path, check)  # the file system may not map files


def _checked(path: Path, check: Check | None, *, keep: bool = True) -> CheckpointData:
    data = _read(path, keep=keep)
    try:
        if check is not None:
            check(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return data


def _read(path: Path, *, keep: bool = True) -> CheckpointData:
    """Read one checkpoint; error messages start with the file's path.

    Without ``keep`` its tensors are mapped into memory, or meta tensors.
    """
    manifest = _manifest(path)
    for name, (size, _) in manifest.files.items():  # the cheap check first
        _check_size(path / name, size)
    files = manifest.files
    state = _unpickle(path / STATE, *files[STATE], keep=keep)
    ranks = []
    for rank in range(manifest.world_size):
        file = path / rank_file(rank)
        content = _unpickle(file, *files[file.name], keep=keep)
        ranks.append(_decoded(SavedRank, content, f"rank {rank}", file))
    weights = _weights(path / WEIGHTS, *files[WEIGHTS], keep=keep)
    names = _decoded(tuple[str, ...], state.pop("names", None), "names", path / STATE)
    data = _decoded(CheckpointData, state, "", path / STATE)
    every = {**weights, **data.weights}
    if set(names) != set(every):
        raise CheckpointError(f"{path / STATE}: it lists the weights {names}, not {list(every)}")
    data = replace(data, weights={name: every[name] for name in names}, ranks=tuple(ranks))
    if (data.epoch, data.global_step) != (manifest.epoch, manifest.global_step):
        raise CheckpointError(f"{path / STATE}: its step differs from the manifest's")
    return data


def _decoded(kind: type[T], content: Any, where: str, file: Path) -> T:
    try:
        return decode(kind, content, where)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        return Manifest.from_bytes(read_regular(file, MAX_MANIFEST_BYTES))
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
        raise CheckpointError(f"{file}: {found} bytes instead of {size_bytes}")


def _content(file: Path, size_bytes: int, digest: str) -> bytes:
    """A file's bytes, read once, so that the verified bytes are those used."""
    try:
        content = read_regular(file, size_bytes)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{file}: {_reason(error)}") from error
    if len(content) != size_bytes or hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{file}: its SHA-256 does not match")
    return content


def _verified(file: Path, digest: str) -> Path:
    """A file, whose content was read part by part."""
    with open(file, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
            raise CheckpointError(f"{file}: its SHA-256 does not match")
    return file


def _weights(file: Path, size_bytes: int, digest: str, *, keep: bool) -> dict[str, Tensor]:
    try:
        if keep:
            return tensor_file.load(_content(file, size_bytes, digest))
        every = tensor_file.read_each(_verified(file, digest))
        return {name: t.to("meta") for name, t in every}
    except Exception as error:  # of any type
        raise CheckpointError(f"{file}: not readable: {error}") from error


def _unpickle(file: Path, size_bytes: int, digest: str, *, keep: bool) -> dict[str, Any]:
    source = io.BytesIO(_content(file, size_bytes, digest)) if keep else _verified(file, digest)
    try:
        _refuse_compressed(source, size_bytes)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        value = torch.load(source, map_location="cpu", weights_only=True, mmap=not keep)
        _refuse_repeated(value, size_bytes)
    except Exception as error:  # of any type
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file}: refused by the safe reader: {reason}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: contains a {type(value).__name__}, not a dict")
    return value


_MAX_DEPTH = 100
_ITEM_BYTES = 64


def _refuse_compressed(source: Any, size_bytes: int) -> None:
    """Refuse a file of ``torch.save`` whose parts are compressed or overlap; none is written so."""
    with zipfile.ZipFile(source) as archive:
        parts = archive.infolist()
    is_compressed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    if is_compressed or sum(part.file_size for part in parts) > size_bytes:
        raise CheckpointError("its parts are larger than the file")


def _refuse_repeated(value: Any, size_bytes: int) -> None:
    """Refuse a value whose parts refer to each other so that a copy of it is far larger than its
    file, endless, or nested too deeply for recursive functions.
    """
    known: dict[int, tuple[int, int]] = {}

    def extent(part: Any, depth: int) -> tuple[int, int]:
        """Bytes of a copy, and levels below."""
        if isinstance(part, Tensor) and part.layout is torch.strided:
            return _ITEM_BYTES + part.numel() * part.element_size(), 0
        if not isinstance(part, dict | list | tuple | set):
            return _ITEM_BYTES, 0
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"it is nested more than {_MAX_DEPTH} levels deep")
        found = known.get(id(part))
        if found is None:
            items = chain(part, part.values()) if isinstance(part, dict) else part
            extents = [extent(item, depth + 1) for item in items]
            found = (
                _ITEM_BYTES + sum(num_bytes for num_bytes, _ in extents),
                1 + max((levels for _, levels in extents), default=0),
            )
            known[id(part)] = found
        return found

    num_bytes, num_levels = extent(value, 0)
    if num_levels > _MAX_DEPTH:
        raise CheckpointError(f"it is nested more than {_MAX_DEPTH} levels deep")
    most = 2 * _ITEM_BYTES * size_bytes + (64 << 20)  # an item without references takes a byte
    if num_bytes > most:
        raise CheckpointError(f"{size_bytes} bytes hold {num_bytes}, as parts are repeated")


EXIT_GRACE_S = 10.0
"""Seconds that interpreter exit waits for checkpoints being written."""


class CheckpointWriter:
    """Writes checkpoints one at a time in a thread, which ends when none is waiting.

    Thread-safe. A failure is logged and counted, and does not affect later checkpoints. The first
    checkpoint is read back; if it would be refused, it is removed and none is written any more.

    Args:
        directory: Directory of the checkpoints, created with the first.
        check: Called before each is written, and when the first is read back; see
            :func:`load_newest`.
        on_refused: Called in the writer's thread if the first would be refused.

    Attributes:
        num_failed: Checkpoints that could not be written.
        num_superseded: Checkpoints replaced by a newer one while they waited.
        last_error: The last failure, if any.
        newest: Directory of the last checkpoint written.
        last_failed: True if the last checkpoint could not be written.
        refusal: The reason why the first would be refused; ``None``: it would not.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int,
        *,
        check: Check | None = None,
        on_refused: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._check = check
        self._on_refused = on_refused
        self._lock: DirectoryLock | None = None
        self._keep = keep
        self._condition = threading.Condition()
        self._waiting: dict[tuple[bool, bool], CheckpointData] = {}  # by ``within``, ``failed``
        self._busy = False
        self._closed = False
        self.num_written = 0
        self.num_failed = 0
        self.num_superseded = 0
        self.last_error: BaseException | None = None
        self.newest: Path | None = None
        self.last_failed = False
        self.refusal: CheckpointError | None = None
        _LIVE.add(self)

    def claim(self) -> None:
        """Lock the directory against other runs until this writer is closed and done.

        Raises:
            CheckpointError: Another run holds it, or it is not writable.
        """
        try:
            self._lock = DirectoryLock(self.directory)
            if not os.access(self.directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.directory))
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.directory}: {error}; pass a directory that "
                "this process can create and write to"
            ) from error

    def submit(self, data: CheckpointData) -> None:
        """Queue a checkpoint. Returns immediately.

        Replaces a waiting checkpoint of the same kind (within an epoch, at its end, or of a
        failed run). After :meth:`close` it counts as failed.
        """
        with self._condition:
            if self._closed:
                self._failed(data, RuntimeError("the run is over"))
                return
            if self.refusal is not None:
                self.num_failed += 1
                return
            kind = data.within, data.failed
            superseded = self._waiting.pop(kind, None)
            if superseded is not None:
                self.num_superseded += 1
                logger.warning(
                    "checkpoint of step %d is skipped: the disk is too slow for the interval",
                    superseded.global_step,
                )
            self._waiting[kind] = data
            if self._busy:
                return
            self._busy = True
        thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            with self._condition:
                self._busy = False
                self._waiting.clear()
                self._failed(data, error)
                self._unlock_if_over()
                self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                data = self._waiting.pop(next(iter(self._waiting), (False, False)), None)
                if data is None:
                    self._busy = False
                    self._unlock_if_over()
                    self._condition.notify_all()
                    return
            self._write(data)

    def _write(self, data: CheckpointData) -> None:
        began = time.monotonic()
        try:
            if self._check is not None:
                with self._refusing(data):
                    self._check(data)
            path = write_checkpoint(self.directory, data)
            if not self.num_written:
                self._read_back(data, path)
        except BaseException as error:
            with self._condition:
                self._failed(data, error)
            if self.refusal is not None and self._on_refused is not None:
                self._on_refused(self.refusal)
            return
        with self._condition:
            self.num_written += 1
            self.newest, self.last_failed = path, False
        logger.info("checkpoint %s written in %.1f s", path, time.monotonic() - began)
        try:
            remove_old_checkpoints(self.directory, self._keep)
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.directory, error)

    def _read_back(self, data: CheckpointData, path: Path) -> None:
        try:
            with self._refusing(data):
                read_back(path, self._check)
        except CheckpointError:
            _remove(self.directory, path)
            raise

    @contextmanager
    def _refusing(self, data: CheckpointData) -> Iterator[None]:
        """Context in which the reader's errors are those of a checkpoint that cannot be resumed,
        unless the disk fails.

        Raises:
            CheckpointError: It cannot be.
        """
        try:
            yield
        except (ValueError, CheckpointError) as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise cause from None
                cause = cause.__cause__
            refusal = CheckpointError(
                f"no run could resume from the checkpoint of step {data.global_step}: "
                f"{str(error).rstrip(' .')}. Correct what it names, or train without "
                "checkpoint_dir(path)"
            )
            if not self.num_written:
                with self._condition:
                    self.refusal = refusal
                    self._waiting.clear()
            raise refusal from error

    def _failed(self, data: CheckpointData, error: BaseException) -> None:
        self.num_failed += 1
        self.last_failed = True
        logger.error(
            "checkpoint of step %d could not be written to %s: %s: %s; training %s",
            data.global_step,
            self.directory,
            type(error).__name__,
            error,
            "continues" if self.refusal is None else "ends",
            exc_info=None if isinstance(error, (OSError, CheckpointError)) else error,
        )
        self.last_error = without_tracebacks(error)

    def _unlock_if_over(self) -> None:
        """Unlock the directory once the writer is closed and idle."""
        if self._closed and not self._busy and self._lock is not None:
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all checkpoints are written or have failed; ``False`` on timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._busy, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no more checkpoints, and wait for those queued. Idempotent.

        Returns:
            ``False`` on timeout; the thread then ends by itself.
        """
        with self._condition:
            self._closed = True
            self._unlock_if_over()
        done = self.wait(timeout_s)
        if not done:
            logger.error("a checkpoint to %s is still not written", self.directory)
        return done


_LIVE: LiveRegistry[CheckpointWriter] = LiveRegistry()


def _wait_at_exit() -> None:
    # The thread is a daemon, so that a dead disk cannot block the interpreter forever.
    deadline = time.monotonic() + EXIT_GRACE_S
    for writer in _LIVE.all():
        writer.wait(max(0.0, deadline - time.monotonic()))


atexit.register(_wait_at_exit)
