"""Averages of gradients: exact, weighted, with non-finite values kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime import DataParallelCoordinator, average_gradients, has_non_finite
from runtime.replica.gradients import gradient_norm

NAN, INF = float("nan"), float("inf")
numbers = st.floats(-1e6, 1e6)


def test_a_mean_is_computed_element_by_element():
    grads = [[2.0, 4.0, 6.0], [4.0, 6.0, 8.0], [6.0, 8.0, 10.0]]
    assert average_gradients(grads) == pytest.approx([4.0, 6.0, 8.0])
    assert average_gradients(grads[:1]) == grads[0]
    assert DataParallelCoordinator.average_gradients(grads, [1, 0, 1]) == [4.0, 6.0, 8.0]


def test_the_mean_of_no_gradients_is_empty():
    assert average_gradients([]) == []
    assert average_gradients([], []) == []
    assert average_gradients([[], []]) == []


@given(data=st.data(), world_size=st.integers(1, 5), length=st.integers(0, 6))
def test_a_mean_is_the_weighted_sum_over_the_weights(data, world_size, length):
    column = st.lists(numbers, min_size=length, max_size=length)
    grads = data.draw(st.lists(column, min_size=world_size, max_size=world_size))
    weights = data.draw(
        st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size).filter(any)
    )
    before = [list(grad) for grad in grads]
    expected = [
        math.fsum(w * g[j] for w, g in zip(weights, grads, strict=True)) / sum(weights)
        for j in range(length)
    ]
    assert average_gradients(grads, weights) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    tensors = [torch.tensor(grad, dtype=torch.float64) for grad in grads]
    mean = average_gradients(tensors, weights)
    assert mean.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert grads == before
    assert [t.tolist() for t in tensors] == before
    assert all(mean.data_ptr() != t.data_ptr() for t in tensors if t.numel())


@given(
    bad=st.sampled_from([NAN, INF, -INF]),
    at=st.integers(0, 3),
    others=st.lists(numbers, min_size=3, max_size=3),
)
def test_non_finite_gradients_stay_visible_at_their_positions(bad, at, others):
    values = [*others[: min(at, 3)], bad, *others[min(at, 3) :]]
    mean = average_gradients([[value, 1.0] for value in values])
    assert not math.isfinite(mean[0])
    assert math.isnan(mean[0]) is math.isnan(bad)
    assert mean[1] == 1.0
    assert has_non_finite(mean)


def test_nan_and_infinity_together_are_nan():
    mean = average_gradients([[NAN, 1.0], [INF, 2.0]])
    assert math.isnan(mean[0])
    assert mean[1] == 1.5
    assert math.isnan(average_gradients([[INF], [-INF]])[0])


def test_gradients_with_weight_zero_are_not_used():
    assert average_gradients([[NAN], [3.0]], [0, 2]) == [3.0]
    assert average_gradients([torch.tensor([INF]), torch.tensor([3.0])], [0, 2]).tolist() == [3.0]


def test_gradients_of_a_model_keep_their_shape_and_layout():
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    grads = [[weight, None, torch.ones(2)], [weight * 3, None, None]]
    first, second, third = average_gradients(grads)
    torch.testing.assert_close(first, weight * 2)
    assert first.stride() == weight.stride()
    assert second is None
    assert third.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32(dtype):
    grads = [torch.tensor([value], dtype=dtype) for value in (2048.0, 1.0, 1.0, 1.0)]
    mean = average_gradients(grads)
    assert mean.dtype == dtype
    assert mean.item() == torch.tensor(2051 / 4).to(dtype).item()


def test_the_mean_of_integers_may_be_fractional():
    assert average_gradients([torch.tensor([1, 2]), torch.tensor([2, 2])]).tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    ("grads", "weights", "error", "match"),
    [
        ([[1.0], [1.0, 2.0]], None, ValueError, "the gradient has different lengths"),
        ([[1.0], 2.0], None, ValueError, "different lengths on the replicas"),
        ([torch.zeros(2), torch.zeros(3)], None, ValueError, "replica 1 has another shape"),
        ([torch.zeros(2), torch.zeros(2).double()], None, ValueError, "shape or dtype"),
        ([[torch.zeros(2)], [3.0]], None, ValueError, r"the gradient\[0\] of replica 1"),
        ([[1.0], [2.0]], [1], ValueError, "1 weights for the gradients of 2 replicas"),
        ([[1.0], [2.0]], [0, 0], ValueError, "none negative and not all 0"),
        ([[1.0], [2.0]], [2, -1], ValueError, "none negative"),
        ([[1.0], [2.0]], [2, NAN], ValueError, "finite numbers"),
        ([[1.0], [2.0]], [2, INF], ValueError, "finite numbers"),
        (3.0, None, TypeError, "pass a list with the gradients of each replica"),
    ],
)
def test_gradients_that_have_no_mean_are_named(grads, weights, error, match):
    with pytest.raises(error, match=match):
        average_gradients(grads, weights)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_any_non_finite_gradient_is_detected(bad):
    assert has_non_finite(bad)
    assert has_non_finite([1.0, bad, 3.0])
    assert has_non_finite(torch.tensor([1.0, bad]))
    assert has_non_finite({"a": torch.ones(2), "b": [None, (torch.tensor(bad),)]})
    assert DataParallelCoordinator.has_non_finite([bad])


@pytest.mark.parametrize(
    "fine", [1.0, None, [], torch.zeros(0), [1.0, 2, None], torch.tensor([1e38]), torch.arange(3)]
)
def test_finite_gradients_are_finite(fine):
    assert not has_non_finite(fine)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_norm_is_not_finite_if_one_element_is_not(bad, at):
    """max() would drop a NaN after a number."""
    grads = [torch.full((3,), 1e30), torch.full((2,), 1e30), torch.zeros(0), torch.ones(4)]
    grads[at if at < 2 else 3][0] = bad
    assert not math.isfinite(gradient_norm(grads))


def test_a_norm_whose_squares_overflow_is_finite():
    assert gradient_norm([torch.full((4,), 1e30), torch.zeros(0)]) == pytest.approx(2e30)
    huge = torch.full((9,), 1e308, dtype=torch.float64)
    assert math.isfinite(gradient_norm([huge]))
