"""Durable and atomic file operations, and safe reading.

A file is durable once it and its directory are flushed. A rename is atomic, but durable only after
its directory is flushed (fsync(2), rename(2)).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch
from torch import Tensor

from runtime.checkpoint.tensor_file import DTYPES, TensorFileError, save_file
from runtime.core.capabilities import HAS_DIRECTORY_DESCRIPTORS, missing_in_system
from runtime.core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = HAS_DIRECTORY_DESCRIPTORS

_CHUNK_BYTES = 1 << 20
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)

# Without those that older versions of safetensors lack.
_SAFE_DTYPES = frozenset(DTYPES.values()) - {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_REGULAR = os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def locks_fault(feature: str) -> str | None:
    """The reason why a feature that locks directories is not available here, with the remedy."""
    if HAS_LOCKS:
        return None
    missing = missing_in_system(feature, "locks of directories (fcntl.flock)")
    return f"{missing}: leave it out, and save the weights by state.save(path) or KeepBest(path)"


def flush_directory(path: Path) -> None:
    """Flush a directory, which makes the names in it durable.

    No effect on Windows, where directories cannot be flushed.
    """
    if not HAS_DIRECTORY_DESCRIPTORS:
        return
    fd = os.open(path, _DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not supported by some network file systems
            raise
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory and its parents durably; no effect if it exists."""
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
    flush_directory(path.parent)


def flush_and_digest(path: Path) -> tuple[int, str]:
    """Flush a file; return its size in bytes and its SHA-256.

    Hashing overlaps with the system's writing, which :meth:`os.fsync` then waits for.
    """
    # Windows flushes only what is open for writing.
    mode: Literal["rb", "r+b"] = "rb" if HAS_DIRECTORY_DESCRIPTORS else "r+b"
    with open(path, mode, buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return file.tell(), digest


def write_durably(path: Path, content: bytes) -> None:
    """Create a file with this content and flush it."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class _Output:
    """A file that records its write error, which ``torch.save`` hides."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_pickle(path: Path, value: Any) -> None:
    """Write a value with ``torch.save``, without flushing it to the disk.

    Raises:
        OSError: The file could not be written.
        CheckpointError: The value cannot be pickled.
    """
    with open(path, "xb") as file:
        output = _Output(file)
        try:
            torch.save(value, cast("BinaryIO", output))
        except Exception as error:
            if output.error is not None:
                raise output.error from None
            if isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"{path.name} could not be written: {type(error).__name__}: {error}"
            ) from error


def write_weights(
    path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as safetensors, without flushing.

    Tensors that share memory are written under each of their names, so that a bare module loads
    the file strictly.

    Raises:
        CheckpointError: The format does not support a tensor's type, or the file could
            not be written.
    """
    ready: dict[str, Tensor] = {}
    for name, t in weights.items():
        if not fits_safetensors(t):
            raise CheckpointError(f"safetensors cannot hold {name!r} of {t.dtype} and {t.layout}")
        # The file stores bytes in memory, without lazy conjugation or negation.
        ready[name] = t.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    end = 0
    for name, t in sorted(ready.items(), key=lambda item: item[1].data_ptr()):
        if t.data_ptr() < end:  # safetensors refuses shared memory
            ready[name] = t.clone()
        end = max(end, t.data_ptr() + t.nbytes)
    # The library writes a file that only its owner can read, and puts it in the place of this one.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(ready, path, metadata={"format": "pt", **(metadata or {})})
        path.chmod(mode)
    except TensorFileError as error:
        raise CheckpointError(f"{path.name} could not be written: {error}") from error


def fits_safetensors(t: Tensor) -> bool:
    """True if safetensors supports the tensor's dtype and layout."""
    return t.dtype in _SAFE_DTYPES and t.layout is torch.strided


def save_weights(
    path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically: afterwards ``path`` is the new one or, after an
    error or a crash, what it was before. Blocks until it is on the disk.

    Raises:
        OSError, CheckpointError: The file could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        write_weights(temporary, weights, metadata)
        flush_and_digest(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def read_regular(path: Path, limit_bytes: int | None = None) -> bytes:
    """Return the content of a regular file. Does not block on a pipe or device.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: A link, not a regular file, or longer than ``limit_bytes``.
    """
    if not _NO_FOLLOW and path.is_symlink():
        raise CheckpointError("a link, which is not followed")
    try:
        fd = os.open(path, _REGULAR)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError("a link, which is not followed") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("not a regular file")
        if limit_bytes is not None and status.st_size > limit_bytes:
            raise CheckpointError(f"{status.st_size} bytes instead of at most {limit_bytes}")
        return file.read()


@contextmanager
def claimed_directory(name: Callable[[], Path]) -> Iterator[Path]:
    """A new directory that :func:`remove_leftovers` in other processes does not remove.

    Holds a lock on it, which the system releases when the process ends, also after a crash.

    Args:
        name: Returns a path that does not exist.

    Raises:
        CheckpointError: The system has no locks of directories.
    """
    _require_locks()
    while True:
        path = name()
        path.mkdir()
        # Until it is locked, another process may remove it as a leftover.
        try:
            fd = os.open(path, _DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            _lock(fd, wait=True)
            if not _is_still(path, fd):
                continue
            yield path
            return
        finally:
            os.close(fd)


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


class DirectoryLock:
    """Exclusive lock of a running run on a directory, released by the system with the process.

    An advisory lock on the directory itself (flock(2)), without a lock file. Has no effect on file
    systems that do not support it, such as some network file systems.

    Args:
        path: The directory, created if needed.

    Raises:
        CheckpointError: Another run holds it, in this process or another, or the system has no
            locks of directories.
        OSError: The directory cannot be created or opened.
    """

    def __init__(self, path: Path) -> None:
        _require_locks()
        make_directory(path)
        fd = os.open(path, _DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(fd)
                raise CheckpointError(
                    f"{path} is the checkpoint_dir of another run that is still active, in this "
                    "process or another: each would remove the other's checkpoints. Use another "
                    "directory, or wait for that run to end"
                ) from None
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        # Also releases it if the run is garbage-collected before it starts.
        self._release = weakref.finalize(self, _unlock, fd)

    def release(self) -> None:
        """Release the directory. Idempotent; may be called from any thread."""
        self._release()


def _require_locks() -> None:
    fault = locks_fault("a checkpoint")
    if fault is not None:
        raise CheckpointError(fault)


def _unlock(fd: int) -> None:
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
    os.close(fd)


def _lock(fd: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (*_NO_LOCKS, errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def remove_leftovers(directory: Path, prefix: str) -> None:
    """Remove directories with this prefix whose process has ended; none on a file system without
    locks. Errors are ignored.
    """
    if not HAS_LOCKS:
        return
    with suppress(OSError):
        for path in list(directory.iterdir()):
            if path.name.startswith(prefix):
                _remove_leftover(path)


def _remove_leftover(path: Path) -> None:
    with suppress(OSError):
        fd = os.open(path, _DIRECTORY | _NO_FOLLOW)
        try:
            if _lock(fd, wait=False):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
