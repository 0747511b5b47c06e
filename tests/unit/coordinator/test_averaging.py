"""The weighted average of the replicas and its distances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import averaging as mixing
from coordinator.averaging import Averager, empty_like
from coordinator.messages import Payload
from tests.support.pairs import pairwise

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
TOLERANCES = {
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.complex64: 1e-6,
}
weight_lists = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


@pytest.fixture
def small_blocks(monkeypatch):
    """Use blocks of a few elements, so that small tensors have several."""
    monkeypatch.setattr(mixing, "BLOCK_BYTES", 64)


def params(*tensors):
    return Payload(params=tensors)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


def wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def reference(tensors, weights):
    return sum(wide(t) * w for t, w in zip(tensors, weights, strict=True)) / sum(weights)


def distances(tensors, average):
    norm = wide(average).norm()
    return [float((wide(t) - wide(average)).norm() / norm) for t in tensors]


# -- values ----------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pairwise(
    weights=[[3], [3, 5], [1, 1], [1, 0], [0, 2], [5, 1, 7], [0, 3, 0, 4]],
    dtype=DTYPES,
    numel=[0, 1, 16, 103],
)
def test_average_and_divergences_match_their_definitions(dtype, weights, numel):
    tensors = [torch.randn(numel).to(dtype) + 1 for _ in weights]
    result = Averager().average([params(t) for t in tensors], weights)
    (average,) = result.average.params
    assert average.dtype == dtype
    assert result.num_samples == sum(weights)
    torch.testing.assert_close(
        wide(average), reference(tensors, weights), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )
    expected = distances(tensors, average) if numel else [0.0] * len(weights)
    assert result.divergences == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_divergence_spans_all_parameters_and_no_buffer():
    payloads = [
        Payload(
            params=(torch.full((4,), 1.0 + r), torch.full((2,), 2.0 - r, dtype=torch.float64)),
            buffers=(torch.full((3,), 100.0 * r),),
        )
        for r in (0, 1)
    ]
    result = Averager().average(payloads, [1, 1])
    average = [1.5] * 4 + [1.5] * 2
    expected = math.sqrt(6 * 0.5**2) / math.sqrt(sum(x * x for x in average))
    assert result.divergences == pytest.approx((expected, expected))
    assert result.average.buffers[0].tolist() == [50.0] * 3


def test_the_divergence_from_an_average_near_zero_is_zero():
    one, other = torch.full((5,), 2.0), torch.full((5,), -2.0)
    result = Averager().average([params(one), params(other)], [1, 1])
    assert result.average.params[0].tolist() == [0.0] * 5
    assert result.divergences == (0.0, 0.0)


@settings(max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    weight_lists,
    st.sampled_from(DTYPES),
)
def test_equal_values_on_all_ranks_average_to_exactly_themselves(values, weights, dtype):
    tensor = torch.tensor(values).to(dtype)
    payload = Payload(params=(tensor,), buffers=(tensor,))
    result = Averager().average([payload] * len(weights), weights)
    for average in (*result.average.params, *result.average.buffers):
        assert bits(average) == bits(tensor)
    if tensor.isfinite().all():
        assert result.divergences == (0.0,) * len(weights)


@pytest.mark.parametrize("values", [(1e8, 1.0), (1.0, 1e8)])
def test_a_distant_rank_of_small_weight_costs_no_precision(values):
    weights = [1, 10**9] if values[0] > 1.0 else [10**9, 1]
    tensors = [torch.full((5,), value) for value in values]
    result = Averager().average([params(t) for t in tensors], weights)
    torch.testing.assert_close(result.average.params[0], torch.full((5,), 1.1))


# -- values that are not finite ---------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weights", [[0, 2], [2, 0], [1, 0, 3]])
def test_values_of_a_rank_of_weight_zero_are_not_averaged(bad, weights):
    tensors = [torch.ones(40) if w else torch.full((40,), bad) for w in weights]
    payloads = [Payload(params=(t,), buffers=(t,)) for t in tensors]
    result = Averager().average(payloads, weights)
    for average in (*result.average.params, *result.average.buffers):
        assert average.tolist() == [1.0] * 40
    for divergence, weight in zip(result.divergences, weights, strict=True):
        assert divergence == 0.0 if weight else not math.isfinite(divergence)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_stays_in_the_average(bad):
    one, other = torch.ones(40), torch.ones(40)
    other[7] = bad
    result = Averager().average([params(one), params(other)], [3, 1])
    (average,) = result.average.params
    assert average[7].item() == pytest.approx(bad, nan_ok=True)
    assert average[torch.arange(40) != 7].tolist() == [1.0] * 39
    assert not any(math.isfinite(d) for d in result.divergences)


def test_opposite_infinities_are_nan():
    one, other = torch.tensor([math.inf]), torch.tensor([-math.inf])
    (average,) = Averager().average([params(one), params(other)], [1, 1]).average.params
    assert average.isnan().all()


@pytest.mark.parametrize("weights", [[4], [1, 0, 0], [1, 2, 3]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mask_of_infinities_kept_as_a_buffer_survives(dtype, weights):
    mask = torch.full((6, 6), -math.inf).triu(1).flatten().to(dtype)
    payload = Payload(params=(torch.ones(3),), buffers=(mask,))
    result = Averager().average([payload] * len(weights), weights)
    assert torch.equal(result.average.buffers[0], mask)
    assert result.divergences == (0.0,) * len(weights)


def test_a_difference_that_overflows_does_not_lose_the_mean():
    one, other = torch.full((5,), 3e38), torch.full((5,), -3e38)
    result = Averager().average([params(one), params(other)], [3, 1])
    assert result.average.params[0].tolist() == pytest.approx([1.5e38] * 5)


def test_squares_that_overflow_float64_do_not_change_the_average():
    tensor = torch.full((5,), -1e200, dtype=torch.float64)
    for weights in ([1], [1, 2]):
        result = Averager().average([params(tensor)] * len(weights), weights)
        assert torch.equal(result.average.params[0], tensor)


def test_squares_that_overflow_float32_do_not_lose_the_divergence():
    one, other = torch.full((5,), 1e30), torch.full((5,), 3e30)
    result = Averager().average([params(one), params(other)], [1, 1])
    assert result.divergences == pytest.approx((0.5, 0.5))


# -- norms reported by the ranks ------------------------------------------------


def squares_of(*tensors):
    return tuple(float(t.double().square().sum()) for t in tensors)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weights", [[3, 5], [1, 1], [2, 0], [1, 2, 3]])
def test_reported_norms_avoid_measuring_and_change_no_result(dtype, weights, monkeypatch):
    payloads = [params(torch.randn(103).to(dtype) + 1, torch.randn(7) - 1) for _ in weights]
    reported = [squares_of(*payload.params) for payload in payloads]
    measured = []
    norm_of = mixing.sum_squares
    monkeypatch.setattr(mixing, "sum_squares", lambda *a: measured.append(a) or norm_of(*a))
    plain = Averager().average(payloads, weights)
    num_plain = len(measured)
    result = Averager().average(payloads, weights, reported)
    for average, expected in zip(result.average.params, plain.average.params, strict=True):
        assert bits(average) == bits(expected)
    assert result.divergences == pytest.approx(plain.divergences, rel=1e-5)
    is_pair = 0 not in weights and len(weights) == 2
    assert (len(measured) - num_plain < num_plain) == is_pair


@pytest.mark.parametrize("gap", [0.0, 1e-3])
def test_a_norm_that_cancels_is_measured(gap):
    """The mean of nearly opposite vectors cannot be computed from their norms."""
    one = torch.randn(1000)
    other = gap - one
    payloads = [params(one), params(other)]
    measured = [squares_of(one), squares_of(other)]
    result = Averager().average(payloads, [1, 1], measured)
    expected = Averager().average(payloads, [1, 1])
    assert result.divergences == pytest.approx(expected.divergences, rel=1e-6)
    assert (max(result.divergences) == 0.0) == (gap == 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_reported_norms_are_measured_again(bad):
    one, other = torch.ones(5), torch.full((5,), 3.0)
    result = Averager().average([params(one), params(other)], [1, 1], [(5.0,), (bad,)])
    assert result.divergences == pytest.approx((0.5, 0.5))


def test_norms_are_measured_if_one_rank_reports_none():
    one, other = torch.ones(5), torch.full((5,), 3.0)
    result = Averager().average([params(one), params(other)], [1, 1], [(1e9,), None])
    assert result.divergences == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("squares", "message"),
    [
        ([(5.0, 1.0)], "2 payloads but the squared norms of 1"),
        ([(5.0, 1.0), (5.0,)], "payload 1 has 2 parameter tensors but 1 squared norms"),
        ([None, (5.0, 1.0, 1.0)], "payload 1 has 2 parameter tensors but 3 squared norms"),
    ],
)
def test_norms_of_another_number_of_tensors_are_rejected(squares, message):
    averager = Averager()
    payload = params(torch.ones(5), torch.ones(1))
    first = averager.average([payload] * 2, [1, 1]).average
    for _ in range(3):
        with pytest.raises(ValueError, match=message):
            averager.average([params(torch.zeros(5), torch.zeros(1))] * 2, [1, 1], squares)
    assert first.params[0].tolist() == [1.0] * 5


def test_the_norm_of_a_rank_of_weight_zero_is_not_used():
    payloads = [params(torch.full((5,), v)) for v in (1.0, 3.0, math.nan)]
    measured = [(5.0,), (45.0,), (math.nan,)]
    result = Averager().average(payloads, [1, 1, 0], measured)
    assert result.average.params[0].tolist() == [2.0] * 5
    assert result.divergences[:2] == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("serial_bytes", [0, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_opposite_replicas_have_a_measured_norm(dtype, serial_bytes, monkeypatch):
    """Under cancellation the digits of reported norms do not suffice."""
    one = torch.full((3_000_000,), 1e-3, dtype=dtype)
    measured = [squares_of(one.abs())] * 2
    measured[0] = (measured[0][0] * 1.001,)  # as a long sum in float32 may be
    monkeypatch.setattr(mixing, "SERIAL_BYTES", serial_bytes)
    averager = Averager()
    assert averager.average([params(one), params(-one)], [1, 1], measured).divergences == (0.0, 0.0)


@pytest.mark.parametrize(("num_bytes", "is_serial"), [(1 << 22, True), ((1 << 22) + 8, False)])
def test_only_a_small_state_is_averaged_without_intra_op_threads(num_bytes, is_serial, monkeypatch):
    found = []

    class Noted(mixing.WeightedMean):
        def __init__(self, weights, num_threads):
            found.append(num_threads)
            super().__init__(weights, num_threads)

    monkeypatch.setattr(mixing, "WeightedMean", Noted)
    Averager().average([params(torch.ones(num_bytes // 8))] * 2, [1, 1])  # bytes of both together
    assert found == [0 if is_serial else torch.get_num_threads()]


# -- weights -----------------------------------------------------------------


def test_without_samples_the_first_payload_is_copied():
    payloads = [
        Payload(params=(torch.full((3,), float(r)),), other_buffers=(torch.tensor([r]),))
        for r in (4, 5)
    ]
    result = Averager().average(payloads, [0, 0])
    assert result.num_samples == 0
    assert result.average.params[0].tolist() == [4.0] * 3
    assert result.average.other_buffers[0].tolist() == [4]
    assert result.average.params[0] is not payloads[0].params[0]
    assert result.divergences == (0.0, 0.0)


@pytest.mark.parametrize(("weights", "rank"), [([1, 5, 2], 1), ([4, 1, 4], 0), ([0, 3, 3], 1)])
def test_other_buffers_come_from_the_largest_weight_and_the_lowest_rank(weights, rank):
    payloads = [
        Payload(params=(), other_buffers=(torch.tensor([r, 2**40 + r]), torch.tensor([r == rank])))
        for r in range(3)
    ]
    result = Averager().average(payloads, weights)
    assert result.average.other_buffers[0].tolist() == [rank, 2**40 + rank]
    assert result.average.other_buffers[1].tolist() == [True]


# -- memory ------------------------------------------------------------------


def pointer(result):
    return result.average.params[0].data_ptr()


def test_a_result_is_valid_until_the_second_call_after_it():
    averager = Averager()
    first = averager.average([params(torch.full((9,), 1.0))], [1])
    second = averager.average([params(torch.full((9,), 2.0))], [1])
    assert first.average.params[0].tolist() == [1.0] * 9
    third = averager.average([params(torch.full((9,), 3.0))], [1])
    assert second.average.params[0].tolist() == [2.0] * 9
    fourth = averager.average([params(torch.full((9,), 4.0))], [1])
    assert third.average.params[0].tolist() == [3.0] * 9
    assert pointer(first) == pointer(third) != pointer(second) == pointer(fourth)


def test_payloads_are_not_modified():
    one, other = torch.full((9,), 1.0), torch.full((9,), 3.0)
    result = Averager().average([params(one), params(other)], [1, 1])
    assert (one.tolist(), other.tolist()) == ([1.0] * 9, [3.0] * 9)
    assert pointer(result) not in (one.data_ptr(), other.data_ptr())


def test_payloads_of_another_layout_get_new_result_buffers():
    averager = Averager()
    first = averager.average([params(torch.ones(9))], [1])
    averager.average([params(torch.zeros(4, dtype=torch.float64))], [1])
    averager.average([params(torch.zeros(4, dtype=torch.float64))], [1])
    assert first.average.params[0].tolist() == [1.0] * 9


def test_a_cloned_payload_has_the_same_shapes_and_dtypes():
    payload = Payload(
        params=(torch.zeros(3, dtype=torch.bfloat16),),
        buffers=(torch.zeros(2, requires_grad=True),),
        other_buffers=(torch.zeros(4, dtype=torch.int32),),
    )
    alike = payload.map(empty_like)
    assert alike.num_bytes == payload.num_bytes
    assert alike.params[0].dtype == torch.bfloat16
    assert alike.other_buffers[0].dtype == torch.int32
    assert not alike.buffers[0].requires_grad
    assert alike.params[0].data_ptr() != payload.params[0].data_ptr()


# -- bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (params(torch.ones(4)), "shape or dtype"),
        (params(torch.ones(3, dtype=torch.float64)), "shape or dtype"),
        (params(torch.ones(3), torch.ones(3)), "shape or dtype"),
        (Payload(params=(), buffers=(torch.ones(3),)), "shape or dtype"),
    ],
)
def test_payloads_of_unequal_layout_are_rejected_without_side_effects(other, message):
    averager = Averager()
    before = averager.average([params(torch.ones(3))], [1])
    averager.average([params(torch.ones(3))], [1])
    with pytest.raises(ValueError, match=message):
        averager.average([params(torch.zeros(3)), other], [1, 1])
    assert before.average.params[0].tolist() == [1.0] * 3


def test_tensors_on_other_devices_are_rejected():
    payload = params(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="send CPU tensors"):
        Averager().average([payload], [1])


@pytest.mark.parametrize(
    ("payloads", "weights", "message"),
    [
        ([], [], "at least one"),
        ([params(torch.ones(3))], [1, 2], "1 payloads but 2 weights"),
        ([params(torch.ones(3))], [-1], "cannot be negative"),
    ],
)
def test_invalid_payloads_and_weights_are_rejected(payloads, weights, message):
    with pytest.raises(ValueError, match=message):
        Averager().average(payloads, weights)
