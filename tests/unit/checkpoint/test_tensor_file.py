"""Safetensors without the package: written and read files equal those of the package."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.checkpoint import tensor_file
from runtime.checkpoint.tensor_file import (
    DTYPES,
    HAS_WHEEL,
    TensorFileError,
    decode,
    encode,
    read_metadata,
)

needs_wheel = pytest.mark.skipif(not HAS_WHEEL, reason="needs the safetensors package")
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
metadata = st.none() | st.dictionaries(names, names, max_size=3)


@st.composite
def tensors(draw) -> dict[str, Tensor]:
    result = {}
    for name in draw(st.lists(names, unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPES.values(), key=str)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        num_bytes = math.prod(shape) * dtype.itemsize
        limit = 1 if dtype is torch.bool else 255
        content = draw(st.lists(st.integers(0, limit), min_size=num_bytes, max_size=num_bytes))
        flat = torch.tensor(content, dtype=torch.uint8).view(dtype)
        result[name] = flat.reshape(shape)
    return result


def as_bytes(t: Tensor) -> list[int]:
    return t.contiguous().view(-1).view(torch.uint8).tolist()


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert (found[name].dtype, found[name].shape) == (t.dtype, t.shape)
        assert as_bytes(found[name]) == as_bytes(t)


def header_of(content: bytes) -> dict:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def with_header(text: bytes | str, data: bytes = b"") -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def wheel_load(content: bytes) -> dict[str, Tensor]:
    import safetensors.torch

    return safetensors.torch.load(content)


@given(tensors(), metadata)
def test_tensors_written_are_read_with_their_bits(values, texts):
    content = encode(values, texts)
    check_equal(decode(content), values)
    assert header_of(content).get("__metadata__") == texts


@needs_wheel
@given(tensors(), metadata)
def test_the_package_reads_files_written_without_it(values, texts):
    check_equal(wheel_load(encode(values, texts)), values)


@needs_wheel
@given(tensors(), metadata)
def test_files_of_the_package_are_read_without_it(values, texts):
    import safetensors.torch

    texts = texts or None  # for {} the package writes a header that it does not read
    # Each in its own memory, as the package requires.
    content = safetensors.torch.save({n: t.clone() for n, t in values.items()}, texts)
    check_equal(decode(content), values)


BROKEN = {
    "nothing": b"",
    "seven bytes": b"\x01" * 7,
    "a header longer than the file": (3).to_bytes(8, "little") + b"{}",
    "a header longer than the limit": (100_000_001).to_bytes(8, "little") + b"{}",
    "no JSON": with_header("{"),
    "a list": with_header("[]"),
    "null": with_header("null"),
    "no Unicode": with_header(b'{"\xff": 1}'),
    "UTF-16": with_header("{}".encode("utf-16")),
    "a byte order mark": with_header(b"\xef\xbb\xbf{}"),
    "text after the header's object": with_header("{} x"),
    "bytes of no tensor": with_header("{}", b"\0"),
    "half a surrogate pair": with_header(json.dumps({"\ud800": entry()}), b"\0" * 4),
    "metadata of numbers": with_header('{"__metadata__": {"a": 1}}'),
    "metadata as a list": with_header('{"__metadata__": ["a"]}'),
    "metadata twice": with_header('{"__metadata__": {}, "__metadata__": {}}'),
    "half a surrogate pair in metadata": with_header('{"__metadata__": {"a": "\\udc00"}}'),
    "a field twice": with_header(
        '{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4
    ),
    "deep nesting": with_header('{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    **{
        name: with_header(json.dumps(header), b"\0" * num_bytes)
        for name, header, num_bytes in [
            ("a tensor as a number", {"a": 1}, 0),
            ("a field missing", {"a": {"dtype": "F32", "shape": [1]}}, 4),
            ("an unknown dtype", {"a": entry("F31")}, 4),
            ("a dtype of PyTorch", {"a": entry("float32")}, 4),
            ("a dtype that is no text", {"a": entry(32)}, 4),
            ("a dtype that is a list", {"a": entry([])}, 4),
            ("fewer bytes than the shape", {"a": entry(shape=(2,))}, 4),
            ("more bytes than the shape", {"a": entry(offsets=(0, 8))}, 8),
            ("a negative size", {"a": entry(shape=(-1, -1))}, 4),
            ("a fraction", {"a": entry(shape=(1.0,))}, 4),
            ("a flag as a size", {"a": entry(shape=(True,))}, 4),
            ("a size as text", {"a": entry(shape=("1",))}, 4),
            ("infinity", {"a": entry(shape=(math.inf,))}, 4),
            ("no number", {"a": entry(shape=(math.nan,))}, 4),
            ("a size over 64 bits", {"a": entry(shape=(2**64, 0), offsets=(0, 0))}, 0),
            ("a product over 64 bits", {"a": entry(shape=(2**32, 2**32, 0), offsets=(0, 0))}, 0),
            ("a size that PyTorch cannot hold", {"a": entry(shape=(0, 2**63), offsets=(0, 0))}, 0),
            ("one offset", {"a": entry(offsets=(0,))}, 4),
            ("three offsets", {"a": entry(offsets=(0, 4, 4))}, 4),
            ("offsets in the wrong order", {"a": entry(offsets=(4, 0))}, 4),
            ("an end beyond the file", {"a": entry(offsets=(0, 4))}, 3),
            ("bytes before the first tensor", {"a": entry(offsets=(4, 8))}, 8),
            ("bytes after the last tensor", {"a": entry()}, 5),
            ("a gap", {"a": entry(), "b": entry(offsets=(8, 12))}, 12),
            ("an overlap", {"a": entry(), "b": entry(offsets=(2, 6))}, 6),
            ("two tensors in one place", {"a": entry(), "b": entry()}, 4),
        ]
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_one_type_of_error(name, tmp_path):
    with pytest.raises(TensorFileError):
        decode(BROKEN[name])
    with pytest.raises(TensorFileError):
        tensor_file.load(BROKEN[name])
    path = tmp_path / "file"
    path.write_bytes(BROKEN[name])
    with pytest.raises(TensorFileError):
        tensor_file.load_file(path)


VALID = encode(
    {"a": torch.ones(2, 3), "b": torch.zeros(0, 5, dtype=torch.int8), "": torch.tensor(True)},
    {"key": "value"},
)
_HEADER = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")]
_TOKENS = [b"[", b"]", b"{", b"}", b",", b":", b'"', b"0", b"-0", b"1e0", b"null", b" ", b"\\u0000"]


@needs_wheel
@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(_HEADER)),
            st.integers(0, 3),
            st.sampled_from(_TOKENS) | st.binary(max_size=2),
        ),
        max_size=3,
    ),
    st.integers(-3, 3),
)
@example([(_HEADER.index(b"[2,3]") + 1, 0, b"-0")], 0)
def test_files_refused_by_the_package_are_refused_without_it(changes, more_bytes):
    header = _HEADER
    for at, removed, added in changes:
        header = header[:at] + added + header[at + removed :]
    data = VALID[8 + len(_HEADER) :]
    content = with_header(header, data[: len(data) + more_bytes] + b"\0" * max(more_bytes, 0))
    try:
        expected = wheel_load(content)
    except Exception:
        with pytest.raises(TensorFileError):
            decode(content)
        return
    try:
        found = decode(content)
    except TensorFileError:
        return  # stricter: no other fields, no name twice
    check_equal(found, expected)


@given(st.binary(max_size=64))
@example(b"\2" + bytes(7) + b"{}")
def test_bytes_that_are_no_file_raise_no_other_error(content):
    try:
        decode(content)
    except TensorFileError:
        return
    assert header_of(content) in ({}, {"__metadata__": {}}, {"__metadata__": None})


def test_tensors_read_are_writable_and_share_no_memory():
    a, b = (decode(VALID)["a"] for _ in range(2))
    a.add_(1)
    assert b.tolist() == [[1.0] * 3] * 2
    assert len({t.untyped_storage().data_ptr() for t in (a, b)}) == 2


def test_a_view_of_other_strides_is_written_in_order():
    t = torch.arange(6.0).view(2, 3).t()
    check_equal(decode(encode({"t": t})), {"t": t})


@pytest.mark.parametrize(
    ("values", "texts", "words"),
    [
        ({"a": torch.ones(1, dtype=torch.complex128)}, None, r"'a' of torch\.complex128"),
        ({"a": torch.ones(1).to_sparse()}, None, r"'a' of .* torch\.sparse_coo"),
        ({"__metadata__": torch.ones(1)}, None, "'__metadata__' of"),
        ({"\ud800": torch.ones(1)}, None, "not valid Unicode"),
        ({}, {"a": 1}, "not str"),
        ({}, {1: "a"}, "not str"),
        ({}, {"a": "\udc00"}, "not valid Unicode"),
    ],
)
def test_values_without_a_representation_in_the_format_are_refused(values, texts, words):
    with pytest.raises(TensorFileError, match=words):
        encode(values, texts)


def test_tensors_are_read_one_after_another(tmp_path):
    values = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES.values()}
    values["empty"] = torch.zeros(0, 4)
    tensor_file.save_file(values, tmp_path / "file")
    each = tensor_file.read_each(tmp_path / "file")
    assert next(each)[0] in values
    check_equal(dict(tensor_file.read_each(tmp_path / "file")), values)
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])
    with pytest.raises(TensorFileError, match="bytes of tensors instead of"):
        next(tensor_file.read_each(tmp_path / "file"))


def test_metadata_is_read_without_the_tensors(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(encode({"a": torch.ones(3)}, {"key": "välue"}))
    assert read_metadata(path) == {"key": "välue"}
    path.write_bytes(encode({"a": torch.ones(3)}))
    assert read_metadata(path) == {}
    path.write_bytes(VALID[:-1])
    with pytest.raises(TensorFileError, match="bytes of tensors"):
        read_metadata(path)
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / "none")


def test_without_the_package_files_are_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "HAS_WHEEL", False)
    values, path = {"a": torch.arange(3.0)}, tmp_path / "file"
    tensor_file.save_file(values, path, {"format": "pt"})
    check_equal(tensor_file.load_file(path), values)
    check_equal(tensor_file.load(tensor_file.save(values)), values)
    assert read_metadata(path) == {"format": "pt"}


@needs_wheel
def test_the_package_refusals_have_the_same_type(tmp_path):
    shared = torch.ones(2)
    with pytest.raises(TensorFileError, match="share memory"):
        tensor_file.save({"a": shared, "b": shared})
    with pytest.raises(TensorFileError, match="KeyError"):
        tensor_file.save_file({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        tensor_file.load_file(tmp_path / "none")
