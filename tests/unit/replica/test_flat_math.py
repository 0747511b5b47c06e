"""Passes over flat tensors equal plain operations, in one piece or in blocks."""

from __future__ import annotations

import pytest
import torch

from runtime.replica import flat as flat_math
from tests.support.pairs import pairwise

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.fixture(params=["whole", "in blocks"], autouse=True)
def blocks(request, monkeypatch):
    """Blocks of a few elements, so that small tensors are split like large ones."""
    if request.param == "in blocks":
        monkeypatch.setattr(flat_math, "block_length", lambda *_: 16)


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 64, 1003])
def test_a_copy_equals_its_source_and_returns_the_squared_norm(dtype, numel):
    source = (torch.randn(numel) + 1).to(dtype)
    out = torch.empty_like(source)
    square = flat_math.copy_with_norm(out, source)
    assert bits(out) == bits(source)
    wide = source.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert square == pytest.approx(float(wide.abs().square().sum()), rel=1e-5)


@pairwise(where=[0, 500, 1002], bad=[float("nan"), float("inf"), float("-inf")], dtype=DTYPES)
def test_a_value_that_is_not_finite_shows_in_the_norm(dtype, bad, where):
    source = torch.ones(1003, dtype=dtype)
    source[where] = bad
    square = flat_math.copy_with_norm(torch.empty_like(source), source)
    assert not 0 <= square < float("inf")


def test_a_norm_of_many_equal_values_keeps_its_precision():
    """A single sum in float32 would be wrong in its third."""
    source = torch.full((2 * 2**20,), 1e-3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads sum a part each
    try:
        square = flat_math.copy_with_norm(torch.empty_like(source), source)
    finally:
        torch.set_num_threads(before)
    assert square == pytest.approx(float(source[0].double() ** 2) * source.numel(), rel=1e-3)


def test_large_values_whose_squares_overflow_are_finite():
    source = torch.full((1003,), 1e30)
    square = flat_math.copy_with_norm(torch.empty_like(source), source)
    assert square == pytest.approx(1003e60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 64, 1003])
def test_progress_is_added_as_by_two_passes(dtype, numel):
    live, average, base = (torch.randn(numel).to(dtype) for _ in range(3))
    expected = average + (live - base)
    flat_math.add_progress(live, average, base)
    assert bits(live) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_progress_the_result_is_exactly_the_average(dtype):
    live, average = (torch.randn(1003).to(dtype) for _ in range(2))
    flat_math.add_progress(live, average, live.clone())
    assert bits(live) == bits(average)
