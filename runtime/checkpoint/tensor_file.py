"""Reads and writes safetensors files, also where the ``safetensors`` package has no wheel.

The package has none for free-threaded CPython. There the format is read and written by
:func:`decode` and :func:`encode`: eight bytes with the length of a JSON header, the header with
each tensor's dtype, shape and byte range, then the bytes of all tensors without gaps. Bytes are
little-endian, as the machines for which PyTorch has such wheels.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from coordinator.codec import parse_json

try:
    import safetensors
    import safetensors.torch
except ImportError:
    HAS_WHEEL = False
else:
    HAS_WHEEL = True

MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LIMIT = 2**64

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorFileError(ValueError):
    """A file or its bytes are no valid safetensors, or tensors cannot be written as such."""


def save(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file.

    Raises:
        TensorFileError: The format does not support a tensor or the metadata.
    """
    if not HAS_WHEEL:
        return encode(tensors, metadata)
    try:
        return safetensors.torch.save(dict(tensors), None if metadata is None else dict(metadata))
    except Exception as error:
        _refuse(error)


def save_file(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, without flushing.

    Raises:
        OSError: The file could not be written.
        TensorFileError: As for :func:`save`; the package's own error of writing, too.
    """
    if not HAS_WHEEL:
        path.write_bytes(encode(tensors, metadata))
        return
    try:
        safetensors.torch.save_file(
            dict(tensors), path, None if metadata is None else dict(metadata)
        )
    except Exception as error:
        _refuse(error)


def load(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file's bytes, on the CPU, each in its own memory.

    Raises:
        TensorFileError: The content is malformed.
    """
    if not HAS_WHEEL:
        return decode(content)
    try:
        return safetensors.torch.load(content)
    except Exception as error:
        _refuse(error)


def load_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        OSError: The file cannot be read.
        TensorFileError: The content is malformed.
    """
    if not HAS_WHEEL:
        return decode(Path(path).read_bytes())
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:
        _refuse(error)


def read_each(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of a safetensors file, read one after another.

    Raises:
        OSError: The file cannot be read.
        TensorFileError: The content is malformed.
    """
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        end = _header_end(file.read(8), num_bytes)
        for entry in _parse(file.read(end - 8), num_bytes - end)[1]:
            content = bytearray(entry.end - entry.start)
            file.readinto(content)
            yield entry.name, _tensor(entry, content)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; reads no tensor.

    Raises:
        OSError: The file cannot be read.
        TensorFileError: The header is malformed.
    """
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        end = _header_end(file.read(8), num_bytes)
        return _parse(file.read(end - 8), num_bytes - end)[0]


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Like :func:`save`, without the package."""
    header: dict[str, Any] = {}
    if metadata is not None:
        if not all(type(text) is str for item in metadata.items() for text in item):
            raise TensorFileError("metadata has names or values that are not str")
        header[_METADATA] = dict(metadata)
    parts: list[bytes] = []
    start = 0
    # The largest elements first, so that each tensor is aligned to its elements.
    for name, t in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if name == _METADATA or t.dtype not in _NAMES or t.layout is not torch.strided:
            raise TensorFileError(f"{name!r} of {t.dtype} and {t.layout} cannot be written")
        flat = t.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1)
        parts.append(flat.view(torch.uint8).numpy().tobytes())
        end = start + len(parts[-1])
        offsets = [start, end]
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
        start = end
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise TensorFileError(f"a name is not valid Unicode: {error}") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise TensorFileError(f"the header has {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def decode(content: bytes) -> dict[str, Tensor]:
    """Like :func:`load`, without the package."""
    view = memoryview(content)
    end = _header_end(view[:8], len(view))
    entries = _parse(bytes(view[8:end]), len(view) - end)[1]
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        tensors[entry.name] = _tensor(entry, bytearray(view[end + entry.start : end + entry.end]))
    return tensors


def _tensor(entry: _Entry, content: bytearray) -> Tensor:
    try:
        if not content:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(content, dtype=entry.dtype).reshape(entry.shape)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TensorFileError(f"{entry.name!r} of shape {entry.shape}: {error}") from error


class _Entry(NamedTuple):
    """A tensor's place in a file; ``start`` and ``end`` are bytes after the header."""

    start: int
    end: int
    name: str
    dtype: torch.dtype
    shape: list[int]


def _header_end(length: bytes | memoryview, num_bytes: int) -> int:
    """Position of the first byte after the header of a file of ``num_bytes``."""
    if len(length) < 8:
        raise TensorFileError(f"{len(length)} bytes, no header")
    end = 8 + int.from_bytes(length, "little")
    if end - 8 > MAX_HEADER_BYTES or end > num_bytes:
        raise TensorFileError(f"a header of {end - 8} bytes in a file of {num_bytes}")
    return end


def _parse(header: bytes, num_data_bytes: int) -> tuple[dict[str, str], list[_Entry]]:
    """Metadata and tensors of a header whose tensors fill ``num_data_bytes`` without gaps."""
    try:
        fields = parse_json(
            header.decode(),
            object_pairs_hook=_distinct,
            parse_int=_natural,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
        metadata = fields.pop(_METADATA, None) or {}
        if not all(type(text) is str for item in metadata.items() for text in item):
            raise TensorFileError("metadata that is not str")
        entries = sorted((_entry(*item) for item in fields.items()), key=lambda e: e[:2])
        for text in (*fields, *metadata, *metadata.values()):
            text.encode()  # refuses half a surrogate pair
    except (ValueError, TypeError, AttributeError) as error:
        raise TensorFileError(f"the header is malformed: {error}") from error
    filled = 0
    for entry in entries:
        if entry.start != filled:
            raise TensorFileError(f"{entry.name!r} starts at byte {entry.start}, not at {filled}")
        filled = entry.end
    if filled != num_data_bytes:
        raise TensorFileError(f"{num_data_bytes} bytes of tensors instead of {filled}")
    return metadata, entries


def _entry(name: str, fields: Any) -> _Entry:
    if type(fields) is not dict or fields.keys() != _FIELDS:
        raise TensorFileError(f"{name!r} has other fields than {sorted(_FIELDS)}")
    dtype, shape, offsets = DTYPES.get(fields["dtype"]), fields["shape"], fields["data_offsets"]
    if dtype is None:
        raise TensorFileError(f"{name!r} has the unknown dtype {fields['dtype']!r}")
    lists = type(shape) is list and type(offsets) is list and len(offsets) == 2
    if not lists or not all(type(n) is int for n in [*shape, *offsets]):
        raise TensorFileError(f"{name!r}: shape or data_offsets are no lists of integers")
    # Each product, in this order: the package refuses one that overflows, also before a 0.
    num_bits = [math.prod(shape[:i]) for i in range(len(shape) + 1)]
    num_bits.append(num_bits[-1] * 8 * dtype.itemsize)
    start, end = offsets
    if max(num_bits) >= _LIMIT or num_bits[-1] != 8 * (end - start):
        raise TensorFileError(f"{name!r}: {end - start} bytes for shape {shape} of {dtype}")
    return _Entry(start, end, name, dtype, shape)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise TensorFileError("a name occurs twice")
    return result


def _natural(text: str) -> int:
    if not text.isdigit() or (value := int(text)) >= _LIMIT:
        raise TensorFileError(f"{text[:30]} is no size or offset")
    return value


def _no_number(text: str) -> NoReturn:
    raise TensorFileError(f"{text[:30]} is no size or offset")


def _refuse(error: Exception) -> NoReturn:
    """Raise an error of the package as this module's; those of the system pass."""
    if isinstance(error, (OSError, MemoryError)):
        raise error
    raise TensorFileError(f"{type(error).__name__}: {error}") from error
