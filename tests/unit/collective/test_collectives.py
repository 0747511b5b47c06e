"""Tests that every kind of collective passes, and tests of single kinds."""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.collective import (
    AbortableBarrier,
    Collective,
    ReduceOp,
    close_collectives,
    create_collectives,
)
from runtime.collective import process_group as process_group_module
from runtime.collective import thread as thread_module
from runtime.collective.base import RegisteredTensors
from runtime.collective.process_group import FLIGHT_RECORDER
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from tests.support import programs
from tests.support.pairs import SCALE, pairwise
from tests.support.posing import POSING, posing_group


@contextmanager
def created(world_size: int, kind: str, timeout_s: float) -> Iterator[list[Collective]]:
    ends = create_collectives(world_size, kind, timeout_s=timeout_s)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


GROUPS = {"thread": created, "gloo": created, **dict.fromkeys(POSING, posing_group)}
"""The tested kinds, each with a function that opens a group of it."""
KINDS = tuple(GROUPS)
WORLD_SIZES = (1, 2, 3, 4)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SIZES = {"_SMALL": thread_module._SMALL, "_BLOCK": thread_module._BLOCK}
# Here ranks share the work and cut it into blocks; odd, so that shares are unequal. The second
# with the sizes that there are, the first with those of the tests.
LARGE = 6_011
TRULY_LARGE = 600_011
TIMEOUT_S = 20.0
WAKE_S = 10.0
"""Half of the time for which a rank that is not woken waits for its peers."""

each_kind = pytest.mark.parametrize("kind", KINDS)
each_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)
each_size = pytest.mark.parametrize("size", [7, LARGE])


@pytest.fixture(autouse=True)
def _a_hundredth_is_large(monkeypatch):
    for name, size in SIZES.items():
        monkeypatch.setattr(thread_module, name, size >> 7)


def group_of(
    world_size: int, kind: str, timeout_s: float = TIMEOUT_S
) -> AbstractContextManager[list[Collective]]:
    return GROUPS[kind](world_size, kind, timeout_s)


def start(work: Callable[[], Any]) -> Future[Any]:
    """Runs a function in a separate daemon thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def start_ranks(ends: list[Collective], work: Callable[[Collective], Any]) -> list[Future[Any]]:
    return [start(lambda end=end: work(end)) for end in ends]


def on_ranks(ends: list[Collective], work: Callable[[Collective], Any]) -> list[Any]:
    """Run every rank in a thread; returns the results in order of rank."""
    return [future.result(TIMEOUT_S * 2) for future in start_ranks(ends, work)]


def errors_of(ends: list[Collective], work: Callable[[Collective], Any]) -> list[Any]:
    return [future.exception(TIMEOUT_S * 2) for future in start_ranks(ends, work)]


def spin(times: int) -> None:
    """Spin for a moment without yielding to other processes, which would prolong it."""
    for _ in range(50 * times):
        pass


def values_of(
    world_size: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(size, generator=generator).to(dtype) for _ in range(world_size)]
    high = 2 if dtype is torch.bool else 30
    return [
        torch.randint(0, high, (size,), generator=generator).to(dtype) for _ in range(world_size)
    ]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(tensors: list[Tensor]) -> None:
    for tensor in tensors[1:]:
        assert torch.equal(bits(tensor), bits(tensors[0]))


def reduced(values: list[Tensor], op: ReduceOp) -> Tensor:
    """The reference, by plain PyTorch in double precision."""
    stack = torch.stack(values)
    if op is ReduceOp.MAX:
        return stack.amax(0)
    if op is ReduceOp.MIN:
        return stack.amin(0)
    if not stack.is_floating_point():
        return stack.sum(0, dtype=stack.dtype)
    total = stack.double().sum(0)
    return (total / len(values) if op is ReduceOp.AVG else total).to(stack.dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    if actual.dtype in (torch.float16, torch.bfloat16):
        # One rounding from float32: within one unit in the last place.
        eps = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=eps, atol=eps * 0.01)
    elif actual.dtype is torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


# --- results ---------------------------------------------------------------


def assert_all_reduced(ends, size, op, dtype):
    values = values_of(len(ends), size, dtype)
    tensors = [value.clone() for value in values]
    on_ranks(ends, lambda end: end.all_reduce_(tensors[end.rank], op))
    assert_close(tensors[0], reduced(values, op))
    assert_same_bits(tensors)


@pairwise(kind=KINDS, world_size=WORLD_SIZES, op=list(ReduceOp))
def test_all_reduce_equals_the_reference(kind, world_size, op):
    with group_of(world_size, kind) as ends:
        for dtype in FLOATS if op is ReduceOp.AVG else (*FLOATS, *INTEGERS):
            assert_all_reduced(ends, 97, op, dtype)


@each_kind
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_of_many_elements_equals_the_reference(kind, world_size):
    with group_of(world_size, kind) as ends:
        for op in ReduceOp:
            for dtype in (torch.bfloat16, torch.float32):
                assert_all_reduced(ends, LARGE, op, dtype)


@each_kind
def test_work_of_any_size_equals_the_reference(kind, monkeypatch):
    for name, size in SIZES.items():
        monkeypatch.setattr(thread_module, name, size)
    with group_of(2, kind) as ends:
        assert_all_reduced(ends, TRULY_LARGE, ReduceOp.SUM, torch.float32)
        assert_weighted_mean(ends, TRULY_LARGE, torch.bfloat16)
        assert_broadcast(ends, TRULY_LARGE, torch.float32)
        assert_gathered(ends, TRULY_LARGE, torch.float32, in_place=True)
        assert_scattered(ends, TRULY_LARGE // 2, ReduceOp.MAX, torch.float32, in_place=False)


@each_kind
@each_size
def test_nan_wins_in_max_and_min(kind, size):
    with group_of(2, kind) as ends:
        for op in (ReduceOp.MAX, ReduceOp.MIN):
            for rank_of_nan in range(2):
                values = values_of(2, size)
                values[rank_of_nan][3] = float("nan")
                on_ranks(ends, lambda end: end.all_reduce_(values[end.rank], op))  # noqa: B023
                for tensor in values:
                    assert tensor.isnan().nonzero().flatten().tolist() == [3]


@pairwise(kind=KINDS, world_size=WORLD_SIZES, size=[7, LARGE])
def test_weighted_mean_equals_the_reference(kind, world_size, size):
    with group_of(world_size, kind) as ends:
        for dtype in FLOATS:
            assert_weighted_mean(ends, size, dtype)


def assert_weighted_mean(ends, size, dtype):
    world_size = len(ends)
    values = values_of(world_size, size, dtype)
    others = values_of(world_size, 5, torch.float64, seed=1)
    weights = [3, 0.5, 32, 1][:world_size]
    tensors = [(values[r].clone(), others[r].clone().view(5, 1)) for r in range(world_size)]
    totals = on_ranks(ends, lambda end: end.weighted_mean_(tensors[end.rank], weights[end.rank]))
    assert totals == [sum(weights)] * world_size
    parts = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    for index, inputs in enumerate((values, others)):
        expected = torch.stack(inputs).double().mul(parts[:, None]).sum(0).to(inputs[0].dtype)
        assert_close(tensors[0][index].view(-1), expected)
        assert_same_bits([pair[index] for pair in tensors])


@each_kind
@each_size
def test_the_values_of_a_rank_with_weight_0_are_not_used(kind, size):
    with group_of(3, kind) as ends:
        for dtype in FLOATS:
            assert_not_used(ends, size, dtype)


def assert_not_used(ends, size, dtype):
    values = values_of(3, size, dtype)
    poison = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
    for rank, weight_0 in ((0, True), (1, False), (2, True)):
        if weight_0:
            values[rank][:3] = poison
    tensors = [value.clone() for value in values]
    totals = on_ranks(
        ends, lambda end: end.weighted_mean_([tensors[end.rank]], 5 * (end.rank == 1))
    )
    assert totals == [5.0] * 3
    assert_same_bits([values[1], *tensors])


@each_kind
@each_world_size
def test_with_all_weights_0_nothing_changes(kind, world_size):
    values = values_of(world_size, 33)
    values[0][1] = float("nan")
    tensors = [value.clone() for value in values]
    with group_of(world_size, kind) as ends:
        totals = on_ranks(ends, lambda end: end.weighted_mean_([tensors[end.rank]], 0))
    assert totals == [0.0] * world_size
    for value, tensor in zip(values, tensors, strict=True):
        assert_same_bits([value, tensor])


@each_kind
@each_world_size
def test_a_bucketed_mean_equals_the_reference(kind, world_size):
    """Parts of any dtype, empty ones, and a rank with weight 0 whose values are not used."""
    weights = [3, 0.5, 0, 1][:world_size]
    values = [[v[:2_000], v[2_000:5_000], v[:0], v[5_000:]] for v in values_of(world_size, LARGE)]
    low = values_of(world_size, 33, torch.bfloat16)
    if world_size > 2:
        values[2][1] = torch.full_like(values[2][1], float("nan"))
    tensors = [[t.clone() for t in own] + [low[r].clone()] for r, own in enumerate(values)]

    def work(end):
        totals = []
        for _ in range(2):  # the second time the reduced values, which are kept
            mean = end.bucketed_mean(weights[end.rank], tally=end.rank + 1)
            for part in tensors[end.rank]:
                mean.add([part])
            totals.append(mean.end())
            assert end.tally == world_size * (world_size + 1) / 2
        return totals

    with group_of(world_size, kind) as ends:
        assert on_ranks(ends, work) == [[sum(weights)] * 2] * world_size
    factors = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    for index in range(5):
        inputs = [*zip(*values, strict=True), low][index]
        stacked = torch.stack(list(inputs)).double().nan_to_num()
        expected = stacked.mul(factors[:, None]).sum(0).to(inputs[0].dtype)
        assert_close(tensors[0][index], expected)
        assert_same_bits([own[index] for own in tensors])


def test_removed_names_of_collectives_name_the_present_ones():
    (end,) = create_collectives(1, "thread")
    with closing(end):
        with pytest.raises(AttributeError, match=r"tell was removed: use all_gather_number$"):
            end.tell(3.0)
        with pytest.raises(AttributeError, match=r"mean_in_parts was removed: use bucketed_mean$"):
            end.mean_in_parts(2.0, tally=1.0)


@each_kind
def test_a_bucketed_mean_with_all_weights_0_changes_nothing(kind):
    values = values_of(2, 33)
    tensors = [value.clone() for value in values]

    def work(end):
        mean = end.bucketed_mean(0)
        mean.add([tensors[end.rank]])
        return mean.end()

    with group_of(2, kind) as ends:
        assert on_ranks(ends, work) == [0.0, 0.0]
    for value, tensor in zip(values, tensors, strict=True):
        assert_same_bits([value, tensor])


@pytest.mark.parametrize(
    ("kind", "given"),
    [(kind, given) for kind in KINDS for given in (0, 1) if (kind, given) != ("nccl", 1)],
)
def test_a_bucketed_mean_that_a_rank_breaks_off_wakes_the_others(kind, given):
    """The NCCL stand-in exchanges each part as soon as it is added."""
    with group_of(2, kind, timeout_s=10 * WAKE_S) as ends:
        ready = threading.Event()

        def work(end):
            mean = end.bucketed_mean(1)
            for k in range(given if end.rank else 3):
                mean.add([torch.ones(7) * k])
            if end.rank:
                ready.wait(TIMEOUT_S)
                end.abort()
                return
            ready.set()
            mean.end()

        if not given:  # the first part waits for the other rank
            ready.set()
        begin = time.monotonic()
        errors = errors_of(ends, work)
        assert time.monotonic() - begin < WAKE_S
        assert isinstance(errors[0], CollectiveAborted)
        assert not errors[0].failed
        assert errors[1] is None


def test_no_thread_of_a_broken_group_is_left_once_all_ranks_are_closed():
    """Rank 0 has sent parts that rank 1 never receives."""
    ends = create_collectives(2, "gloo", timeout_s=TIMEOUT_S)

    def work(end):
        mean = end.bucketed_mean(1)
        for k in range(1 if end.rank else 3):
            mean.add([torch.ones(7) * k])

    errors_of(ends, work)
    close_collectives(ends)
    assert [t.name for t in threading.enumerate() if t.name.startswith("collective-")] == []


@each_kind
def test_infinite_and_huge_values_keep_their_place_in_a_mean(kind):
    mask = torch.tensor([-float("inf"), torch.finfo(torch.float32).min, 1.0])
    tensors = [mask.clone() for _ in range(2)]
    with group_of(2, kind) as ends:
        on_ranks(ends, lambda end: end.weighted_mean_([tensors[end.rank]], 1000))
    assert_same_bits([mask, *tensors])


@pairwise(kind=KINDS, world_size=WORLD_SIZES, size=[7, LARGE])
def test_broadcast_copies_the_source_of_any_dtype(kind, world_size, size):
    with group_of(world_size, kind) as ends:
        for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64):
            assert_broadcast(ends, size, dtype)


def assert_broadcast(ends, size, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 2, (size,), generator=generator).to(dtype) for _ in ends]
    src = len(ends) - 1
    expected = tensors[src].clone()
    on_ranks(ends, lambda end: end.broadcast_(tensors[end.rank], src))
    assert_same_bits([expected, *tensors])


@each_kind
def test_a_tensor_without_dimensions_is_served(kind):
    tensors = [torch.tensor(float(rank)) for rank in range(2)]
    flags = [torch.tensor(rank == 0) for rank in range(2)]
    with group_of(2, kind) as ends:
        on_ranks(ends, lambda end: end.all_reduce_(tensors[end.rank]))
        on_ranks(ends, lambda end: end.broadcast_(flags[end.rank]))
    assert [t.item() for t in tensors] == [1.0, 1.0]
    assert [f.item() for f in flags] == [True, True]


@pairwise(kind=KINDS, world_size=WORLD_SIZES, size=[7, LARGE])
def test_all_gather_puts_inputs_in_order_of_rank(kind, world_size, size):
    with group_of(world_size, kind) as ends:
        for dtype in (torch.bool, torch.float32, torch.int16):
            for in_place in (False, True):
                assert_gathered(ends, size, dtype, in_place)


def assert_gathered(ends, size, dtype, in_place):
    world_size = len(ends)
    inputs = values_of(world_size, size, dtype)
    outputs = [torch.zeros(world_size * size, dtype=dtype) for _ in range(world_size)]

    def gather(end: Collective) -> None:
        own = inputs[end.rank]
        if in_place:
            part = outputs[end.rank][end.rank * size : (end.rank + 1) * size]
            own = part.copy_(own)
        end.all_gather_into(outputs[end.rank], own)

    on_ranks(ends, gather)
    assert_same_bits([torch.cat(inputs), *outputs])


@pairwise(kind=KINDS, world_size=WORLD_SIZES, size=[7, LARGE // 2])
def test_reduce_scatter_gives_each_rank_its_part(kind, world_size, size):
    ways = (
        (ReduceOp.SUM, torch.float64),
        (ReduceOp.AVG, torch.bfloat16),
        (ReduceOp.MAX, torch.float32),
    )
    with group_of(world_size, kind) as ends:
        for op, dtype in ways:
            for in_place in (False, True):
                assert_scattered(ends, size, op, dtype, in_place)


def assert_scattered(ends, size, op, dtype, in_place):
    world_size = len(ends)
    inputs = values_of(world_size, world_size * size, dtype)
    originals = [input.clone() for input in inputs]
    outputs = [torch.empty(size, dtype=dtype) for _ in range(world_size)]

    def scatter(end: Collective) -> None:
        if in_place:
            own = inputs[end.rank]
            outputs[end.rank] = own[end.rank * size : (end.rank + 1) * size]
        end.reduce_scatter_into(outputs[end.rank], inputs[end.rank], op)

    on_ranks(ends, scatter)
    assert_close(torch.cat(outputs), reduced(originals, op))
    if not in_place:
        for original, input in zip(originals, inputs, strict=True):
            assert_same_bits([original, input])


@each_kind
@each_world_size
def test_empty_tensors_and_empty_lists_are_no_work(kind, world_size):
    def work(end: Collective) -> float:
        empty = torch.empty(0)
        end.all_reduce_(empty)
        end.broadcast_(empty)
        end.all_gather_into(empty, empty)
        end.reduce_scatter_into(empty, empty)
        return end.weighted_mean_([empty], 2) + end.weighted_mean_([], 1)

    with group_of(world_size, kind) as ends:
        assert on_ranks(ends, work) == [3.0 * world_size] * world_size


@each_kind
def test_leaf_parameters_are_reduced_in_place(kind):
    params = [torch.nn.Parameter(torch.full((4,), float(rank))) for rank in range(2)]
    with group_of(2, kind) as ends:
        on_ranks(ends, lambda end: end.weighted_mean_([params[end.rank]], 1))
    assert [p.tolist() for p in params] == [[0.5] * 4] * 2


@each_size
def test_thread_returns_the_same_bits_in_any_order_of_arrival(size):
    values = values_of(3, size)
    seen = []
    with group_of(3, "thread") as ends:
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            tensors = [value.clone() for value in values]
            futures = []
            for number, rank in enumerate(order, 1):
                end = ends[rank]
                futures.append(
                    start(lambda e=end, t=tensors[rank]: e.weighted_mean_([t], e.rank + 1))
                )
                if number < 3:
                    until(lambda n=number: len(ends[0]._group.barrier._waiting) == n)
            assert [future.result(TIMEOUT_S) for future in futures] == [6.0] * 3
            seen.extend(tensors)
    assert_same_bits(seen)


class _Arithmetic(TorchDispatchMode):
    """Records the memory that operators other than copies write to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = (kwargs or {}).get("out")
        if out is None and func._schema.name.endswith("_"):
            out = args[0]
        if out is not None and "copy_" not in func._schema.name:
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                self.written.add(tensor.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


@each_size
def test_a_weighted_mean_is_computed_in_no_memory_of_a_peer(size):
    tensors = values_of(3, size)
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]

    def work(end: Collective) -> set[int]:
        with _Arithmetic() as arithmetic:
            end.weighted_mean_([tensors[end.rank]], end.rank + 1)
        return arithmetic.written & set(memory)

    with group_of(3, "thread") as ends:
        written = on_ranks(ends, work)
    assert any(written)
    for rank, addresses in enumerate(written):
        assert addresses <= {memory[rank]}


@each_size
def test_registered_tensors_are_reduced_as_others_in_every_call(size):
    values = values_of(3, size)
    weights = [(1, 2, 5), (3, 0, 1), (0, 0, 0), (0, 0, 7)]
    means = []
    for kind in (tuple, RegisteredTensors):
        tensors = [kind([value.clone()]) for value in values]

        def work(end: Collective, tensors: Any = tensors) -> Tensor:
            own, seen = tensors[end.rank], []
            for each in weights:
                own[0].copy_(values[end.rank])
                end.barrier()
                assert end.weighted_mean_(own, each[end.rank]) == sum(each)
                seen.append(own[0].clone())
            return torch.stack(seen)

        with group_of(3, "thread") as ends:
            means.append(on_ranks(ends, work))
    for rank in range(3):
        assert_same_bits([means[0][rank], means[1][rank]])


def test_invalid_requests_with_registered_tensors_raise_on_every_rank():
    tensors = [RegisteredTensors([torch.full((7,), float(rank))]) for rank in range(2)]
    other = torch.ones(8)
    with group_of(2, "thread") as ends:
        on_ranks(ends, lambda end: end.weighted_mean_(tensors[end.rank], 1))
        for invalid in (
            lambda end: end.weighted_mean_(tensors[end.rank], -end.rank),
            lambda end: end.weighted_mean_([other] if end.rank else tensors[0], 1),
            lambda end: end.barrier() if end.rank else end.weighted_mean_(tensors[0], 1),
        ):
            assert [type(error) for error in errors_of(ends, invalid)] == [ValueError] * 2
        assert on_ranks(ends, lambda end: end.weighted_mean_(tensors[end.rank], 1)) == [2.0] * 2
    assert_same_bits([torch.full((7,), 0.5), tensors[0][0], tensors[1][0]])


@each_kind
def test_no_rank_runs_ahead_of_a_barrier(kind):
    arrived: list[int] = []

    def work(end: Collective) -> None:
        for step in range(50):
            arrived.append(step)
            end.barrier()
            assert arrived.count(step) == 3
            end.barrier()

    with group_of(3, kind) as ends:
        on_ranks(ends, work)


@each_kind
def test_many_calls_by_ranks_out_of_step_stay_right(kind):
    world_size, num_calls = 3, 1000 if SCALE > 1 else 250
    sizes = (1, 300, 5000)

    def work(end: Collective) -> None:
        delays = random.Random(end.rank)
        for call in range(num_calls):
            spin(delays.choice((0, 0, 1, 5, 40)))
            tensor = torch.full((sizes[call % 3],), float(call + end.rank))
            match call % 4:
                case 0:
                    end.all_reduce_(tensor)
                    expected = 3.0 * call + 3
                case 1:
                    assert end.weighted_mean_([tensor], end.rank) == 3.0
                    expected = call + 5 / 3
                case 2:
                    end.broadcast_(tensor, call % 3)
                    expected = float(call + call % 3)
                case _:
                    end.all_reduce_(tensor, ReduceOp.MAX)
                    expected = call + 2.0
            assert torch.allclose(tensor, torch.full_like(tensor, expected), 1.3e-6, 1e-5)
            tensor.fill_(float("nan"))  # the result would show a peer that still reads it

    with group_of(world_size, kind) as ends:
        on_ranks(ends, work)


def test_shared_work_is_right_when_ranks_reuse_their_tensors_at_once(monkeypatch):
    monkeypatch.setattr(thread_module, "_SMALL", 0)
    monkeypatch.setattr(thread_module, "_BLOCK", 64)

    def work(end: Collective) -> None:
        delays = random.Random(end.rank)
        tensor = torch.empty(500)
        for call in range(300):
            tensor.fill_(float(call + end.rank))
            end.all_reduce_(tensor)
            assert bool((tensor == 3.0 * call + 3).all())
            tensor.fill_(float("nan"))
            spin(delays.choice((0, 0, 1, 20)))

    with group_of(3, "thread") as ends:
        on_ranks(ends, work)


def test_a_rank_returns_only_once_no_peer_reads_its_tensor(monkeypatch):
    """Rank 1 is blocked inside its share until rank 0 could have left."""
    monkeypatch.setattr(thread_module, "_SMALL", 0)
    tensors = [torch.full((256,), float(rank)) for rank in range(2)]
    with group_of(2, "thread") as ends:
        held, free = threading.Event(), threading.Event()
        reduce = ends[1]._take_part

        def hold(*args: Any) -> None:
            held.set()
            assert free.wait(TIMEOUT_S)
            reduce(*args)

        monkeypatch.setattr(ends[1], "_take_part", hold)
        futures = start_ranks(ends, lambda end: end.all_reduce_(tensors[end.rank]))
        assert held.wait(TIMEOUT_S)
        until(lambda: ends[0]._group.barrier._waiting == [0] or futures[0].done())
        assert not futures[0].done()
        free.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert [bool((t == 1.0).all()) for t in tensors] == [True, True]


# --- wrong arguments -------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Collective], Any], str]] = {
    "shapes": (lambda end: end.all_reduce_(torch.ones(3 + end.rank)), r"rank 1 .*\(4,\).*\(3,\)"),
    "dtypes": (
        lambda end: end.all_reduce_(torch.ones(3, dtype=FLOATS[2 + end.rank])),
        "rank 1 .*float64.*float32",
    ),
    "ops": (lambda end: end.all_reduce_(torch.ones(3), list(ReduceOp)[end.rank]), "rank 1 .*AVG"),
    "methods": (
        lambda end: end.barrier() if end.rank else end.all_reduce_(torch.ones(3)),
        "rank 1 called barrier, rank 0 called all_reduce_",
    ),
    "counts": (
        lambda end: end.weighted_mean_([torch.ones(3)] * (1 + end.rank), 1),
        "rank 1 passed 2 tensors, rank 0 passed 1",
    ),
    "sources": (lambda end: end.broadcast_(torch.ones(3), end.rank), "rank 1 passed 1"),
    "source range": (lambda end: end.broadcast_(torch.ones(3), 2), "rank 0 passed src=2"),
    "strides": (
        lambda end: end.all_reduce_(torch.ones(4, 4)[:, : 4 - end.rank]),
        r"rank 1 .*not contiguous; pass tensor\.contiguous\(\)",
    ),
    "device": (
        lambda end: end.all_reduce_(torch.ones(3, device="meta" if end.rank else "cpu")),
        "rank 1 passed a tensor on meta",
    ),
    "no tensor": (lambda end: end.all_reduce_([1.0]), "rank 0 passed a list instead of a tensor"),
    "no list": (lambda end: end.weighted_mean_(torch.ones(3), 1), "pass a list of tensors"),
    "no op": (lambda end: end.all_reduce_(torch.ones(3), "sum"), "pass a ReduceOp"),
    "integer average": (
        lambda end: end.all_reduce_(torch.ones(3, dtype=torch.int64), ReduceOp.AVG),
        "int64 .*ReduceOp.AVG does not support",
    ),
    "integer mean": (
        lambda end: end.weighted_mean_([torch.ones(3, dtype=torch.int64)], 1),
        "int64 .*weighted mean does not support",
    ),
    "boolean sum": (
        lambda end: end.all_reduce_(torch.ones(3, dtype=torch.bool)),
        "bool .*does not support",
    ),
    "negative weight": (
        lambda end: end.weighted_mean_([torch.ones(3)], -end.rank),
        "rank 1 passed the weight -1",
    ),
    "weight NaN": (
        lambda end: end.weighted_mean_([torch.ones(3)], float("nan")),
        "rank 0 passed the weight nan",
    ),
    "gather size": (
        lambda end: end.all_gather_into(torch.ones(5), torch.ones(2)),
        "the output must hold 2 times",
    ),
    "scatter size": (
        lambda end: end.reduce_scatter_into(torch.ones(2), torch.ones(5)),
        "the input must hold 2 times",
    ),
    "output dtype": (
        lambda end: end.all_gather_into(torch.ones(4), torch.ones(2, dtype=torch.float64)),
        "pass one dtype",
    ),
}


@each_kind
def test_wrong_arguments_raise_on_every_rank_and_leave_the_group_usable(kind):
    with group_of(2, kind) as ends:
        for case, (call, message) in WRONG.items():
            errors = errors_of(ends, call)
            assert [type(error) for error in errors] == [ValueError, ValueError], case
            for error in errors:
                assert re.search(message, str(error)), (case, error)
            tensors = [torch.ones(2), torch.ones(2)]
            on_ranks(ends, lambda end: end.all_reduce_(tensors[end.rank]))  # noqa: B023
            assert [t.tolist() for t in tensors] == [[2.0, 2.0]] * 2, case
            for end in ends:
                end.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "at least 1"),
        ({"world_size": 2, "kind": "carrier pigeon"}, "pass one of thread, gloo, nccl"),
        ({"world_size": 2, "timeout_s": 0.0}, "positive"),
        ({"world_size": 2, "devices": ["cpu"]}, "1 devices for 2 ranks"),
        ({"world_size": 2, "kind": "gloo", "devices": ["cuda:0", "cuda:1"]}, "CPU devices"),
        ({"world_size": 2, "kind": "nccl"}, "distinct CUDA device"),
        ({"world_size": 2, "kind": "nccl", "devices": ["cuda:0", "cuda:0"]}, "distinct CUDA"),
        ({"world_size": 2, "kind": "nccl", "devices": ["cuda:0", "cpu"]}, "distinct CUDA"),
        ({"world_size": 2, "kind": "nccl", "devices": ["cuda:0", "cuda:1"]}, "no NCCL"),
    ],
)
def test_a_group_that_cannot_be_is_refused(monkeypatch, arguments, message):
    # A build for CUDA has it, with a driver or without.
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        create_collectives(**arguments)


# --- abort, timeout, death -------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the state waited for never came"
        time.sleep(0.001)


@each_kind
@pytest.mark.parametrize("aborted_by", [0, 1])
def test_abort_wakes_a_waiting_rank_at_once_and_for_good(kind, aborted_by):
    with group_of(2, kind) as ends:
        future = start(lambda: ends[0].all_reduce_(torch.ones(3)))
        until(lambda: ends[0]._group.barrier._waiting == [0])
        begin = time.monotonic()
        ends[aborted_by].abort()
        ends[aborted_by].abort()
        assert isinstance(future.exception(TIMEOUT_S), CollectiveAborted)
        assert time.monotonic() - begin < WAKE_S
        for end in ends:
            with pytest.raises(CollectiveAborted):
                end.check()
            with pytest.raises(CollectiveAborted):
                end.barrier()


@each_kind
def test_a_missing_rank_is_named_when_the_others_time_out(kind):
    with group_of(3, kind, timeout_s=0.3) as ends:
        begin = time.monotonic()
        errors = errors_of([ends[0], ends[2]], lambda end: end.all_reduce_(torch.ones(3)))
        assert 0.25 < time.monotonic() - begin < 0.3 + WAKE_S
        kinds = {type(error) for error in errors}
        assert CollectiveTimeout in kinds
        assert kinds <= {CollectiveTimeout, CollectiveAborted}
        for error in errors:
            assert "rank 1" in str(error)
        for end in ends:
            with pytest.raises(CollectiveAborted):
                end.check()


@each_kind
@pytest.mark.parametrize("error", [KeyError, RuntimeError])
def test_a_rank_that_dies_during_its_share_aborts_its_peers(kind, error, monkeypatch):
    monkeypatch.setattr(thread_module, "_SMALL", 0)
    died = []

    def die(*_: Any) -> None:
        died.append(True)
        raise error("planted")

    timeout_s = 0.3  # for which the peer of a rank that dies in the exchange waits
    with group_of(2, kind, timeout_s=timeout_s) as ends:
        monkeypatch.setattr(ends[1], "_stage" if hasattr(ends[1], "_stage") else "_take_part", die)
        begin = time.monotonic()
        errors = errors_of(ends, lambda end: end.all_reduce_(torch.ones(300)))
        assert time.monotonic() - begin < timeout_s + WAKE_S
        assert died
        assert isinstance(errors[0], CollectiveAborted)
        if kind in ("gloo", "nccl") and error is RuntimeError:  # as the backend's own errors
            assert isinstance(errors[1], CollectiveAborted)
            assert isinstance(errors[1].__cause__, RuntimeError)
        else:
            assert type(errors[1]) is error
        with pytest.raises(CollectiveAborted):
            ends[0].check()


@each_kind
def test_a_rank_that_is_late_for_an_aborted_exchange_does_not_delay_its_peers(kind, monkeypatch):
    """All ranks have met: the peers must not wait for the timeout, whatever the late rank does."""
    monkeypatch.setattr(thread_module, "_SMALL", 0)
    begun, held = threading.Event(), threading.Event()
    with group_of(3, kind) as ends:
        of_0, of_1 = ends[0]._take_part, ends[1]._take_part

        def late(*args: Any) -> None:
            assert held.wait(TIMEOUT_S)
            of_1(*args)

        def first(*args: Any) -> None:
            begun.set()
            of_0(*args)

        monkeypatch.setattr(ends[1], "_take_part", late)
        monkeypatch.setattr(ends[0], "_take_part", first)
        futures = start_ranks(ends, lambda end: end.all_reduce_(torch.ones(300)))
        assert begun.wait(TIMEOUT_S)
        ends[2].abort()
        held.set()
        begin = time.monotonic()
        errors = [future.exception(TIMEOUT_S * 2) for future in futures]
        assert time.monotonic() - begin < WAKE_S
        assert all(error is None or isinstance(error, CollectiveAborted) for error in errors)


def test_a_backend_that_times_out_is_a_timeout_with_its_cause(monkeypatch):
    """Rank 1 has met rank 0 but never starts the exchange, nor fails."""
    released = threading.Event()
    with group_of(2, "gloo", timeout_s=0.5) as ends:
        monkeypatch.setattr(ends[1], "_stage", lambda *_: released.wait(TIMEOUT_S))
        futures = start_ranks(ends, lambda end: end.all_reduce_(torch.ones(3)))
        error = futures[0].exception(TIMEOUT_S)
        released.set()
        futures[1].exception(TIMEOUT_S)
        assert isinstance(error, CollectiveTimeout)
        assert isinstance(error.__cause__, RuntimeError)
        with pytest.raises(CollectiveAborted):
            ends[1].check()


def test_an_aborted_rank_returns_only_once_no_peer_writes_to_its_tensor(monkeypatch):
    monkeypatch.setattr(thread_module, "_SMALL", 0)
    tensors = [torch.full((256,), float(rank)) for rank in range(2)]
    with group_of(2, "thread") as ends:
        inside, free = threading.Event(), threading.Event()
        reduce = thread_module._reduce

        def hold(step: Any, op: Any, factors: Any) -> Tensor:
            if threading.current_thread() is slow.thread:
                inside.set()
                assert free.wait(TIMEOUT_S)
            return reduce(step, op, factors)

        slow = threading.local()
        slow = _Named()
        monkeypatch.setattr(thread_module, "_reduce", hold)
        fast = start(lambda: ends[0].all_reduce_(tensors[0]))

        def run_slow() -> None:
            slow.thread = threading.current_thread()
            ends[1].all_reduce_(tensors[1])

        late = start(run_slow)
        assert inside.wait(TIMEOUT_S)
        until(lambda: ends[0]._group.barrier._waiting == [0])
        ends[0].abort()
        until(lambda: not ends[0]._group.barrier._waiting)
        for _ in range(200):  # it could have left too early
            os.sched_yield()
        assert not fast.done()
        free.set()
        assert isinstance(fast.exception(TIMEOUT_S), CollectiveAborted)
        assert isinstance(late.exception(TIMEOUT_S), CollectiveAborted)


class _Named:
    thread: threading.Thread | None = None


# --- close -----------------------------------------------------------------


@each_kind
def test_a_second_close_has_no_effect_and_a_late_peer_raises(kind):
    with group_of(2, kind) as ends:
        future = start(lambda: ends[0].barrier())
        until(lambda: ends[0]._group.barrier._waiting == [0])
        ends[1].close()
        ends[1].close()
        assert isinstance(future.exception(TIMEOUT_S), CollectiveAborted)
        with pytest.raises(CollectiveAborted, match="rank 1 has left"):
            ends[0].barrier()
        with pytest.raises(CollectiveAborted, match="rank 1 has left"):
            ends[1].barrier()
        ends[0].check()  # closing is no abort


@each_kind
def test_a_rank_may_close_as_soon_as_its_last_call_returns(kind):
    def work(end: Collective, size: int) -> Tensor:
        tensor = torch.full((size,), float(end.rank))
        end.all_reduce_(tensor)
        end.close()
        return tensor

    for number in range(12 if kind in ("gloo", "nccl") else 30):
        size = (1000, 50_000)[number % 2]  # done by one rank or by all
        with group_of(3, kind) as ends:
            results = on_ranks(ends, lambda end: work(end, size))  # noqa: B023
        assert all(bool((result == 3.0).all()) for result in results)


@each_kind
def test_close_releases_all_resources(kind):
    def once() -> list[Collective]:
        with group_of(3, kind) as ends:
            on_ranks(ends, lambda end: end.all_reduce_(torch.ones(TRULY_LARGE)))
        return ends

    once()  # initialised by PyTorch once
    process = psutil.Process()
    num_fds, num_threads = process.num_fds(), process.num_threads()
    kept = [once() for _ in range(5)]  # closed, though still referred to
    until(lambda: process.num_threads() <= num_threads)
    assert process.num_fds() <= num_fds
    assert len(kept) == 5


@each_kind
@each_size
def test_no_tensor_is_kept_after_a_call(kind, size):
    with group_of(2, kind) as ends:
        tensors = [torch.ones(size) for _ in range(2)]
        references = [weakref.ref(tensor) for tensor in tensors]
        on_ranks(ends, lambda end: end.all_reduce_(tensors[end.rank]))
        group = ends[0]._group
        assert group.slots == [None, None]
        assert group._plans == [None, None]
        tensors.clear()
        until(lambda: all(reference() is None for reference in references))


@pytest.mark.parametrize("asked", FLIGHT_RECORDER)
def test_the_flight_recorder_keeps_a_size_set_by_either_name(asked, monkeypatch):
    for name in FLIGHT_RECORDER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(asked, "16")
    with group_of(1, "gloo"):
        assert [os.environ.get(name) for name in FLIGHT_RECORDER] == [
            "16" if name == asked else None for name in FLIGHT_RECORDER
        ]


@pytest.mark.parametrize("asked", [None, FLIGHT_RECORDER[1]])
def test_the_flight_recorder_of_the_process_is_off_unless_requested(asked):
    """PyTorch 2.11's recorder adds groups without a lock, which crashes with several threads."""
    environment = {k: v for k, v in os.environ.items() if k not in FLIGHT_RECORDER}
    environment |= {} if asked is None else {asked: "16"}
    program = """
import torch
from torch._C import _distributed_c10d
from runtime.collective import create_collectives
[end] = create_collectives(1, "gloo", timeout_s=30.0)
end.all_reduce_(torch.ones(3))
print("all_reduce" in str(_distributed_c10d._dump_fr_trace_json()))
"""
    ran = programs.run([sys.executable, "-c", program], env=environment, check=True)
    assert ran.stdout.split() == [str(asked is not None)]


def test_a_rank_that_cannot_connect_is_reported_with_its_cause(monkeypatch):
    connect = process_group_module._connect_gloo

    def fail_on_rank_1(rank: int, *rest: Any) -> Any:
        if rank == 1:
            raise OSError("planted")
        return connect(rank, *rest)

    monkeypatch.setattr(process_group_module, "_connect_gloo", fail_on_rank_1)
    begin = time.monotonic()
    with pytest.raises(CollectiveAborted, match="rank 1 could not connect") as caught:
        create_collectives(3, "gloo", timeout_s=0.5)
    assert time.monotonic() - begin < 5.0  # without waiting for the margin
    assert isinstance(caught.value.__cause__, OSError)


# --- the barrier -----------------------------------------------------------


def test_the_action_runs_once_while_all_others_wait():
    barrier = AbortableBarrier(3)
    counts: list[int] = []

    def work(rank: int) -> None:
        for step in range(100):
            barrier.wait(rank, TIMEOUT_S, lambda: counts.append(len(barrier._waiting)))
            assert len(counts) >= step + 1

    for future in [start(lambda rank=rank: work(rank)) for rank in range(3)]:
        future.result(TIMEOUT_S)
    assert counts == [2] * 100


def test_an_action_that_fails_breaks_the_barrier():
    barrier = AbortableBarrier(2)
    first = start(lambda: barrier.wait(0, TIMEOUT_S))
    until(lambda: barrier._waiting == [0])

    def fail() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        barrier.wait(1, TIMEOUT_S, fail)
    assert isinstance(first.exception(TIMEOUT_S), CollectiveAborted)
    assert barrier.aborted


def test_an_abort_during_the_action_reaches_every_rank():
    barrier = AbortableBarrier(2)
    first = start(lambda: barrier.wait(0, TIMEOUT_S))
    until(lambda: barrier._waiting == [0])
    with pytest.raises(CollectiveAborted):
        barrier.wait(1, TIMEOUT_S, barrier.abort)
    assert isinstance(first.exception(TIMEOUT_S), CollectiveAborted)


def test_a_complete_meeting_is_not_undone_by_a_later_abort():
    for _ in range(200):
        barrier = AbortableBarrier(2)
        first = start(lambda barrier=barrier: barrier.wait(0, TIMEOUT_S))
        until(lambda barrier=barrier: barrier._waiting == [0])
        barrier.wait(1, TIMEOUT_S)
        barrier.abort()
        assert first.exception(TIMEOUT_S) is None


def test_only_one_rank_times_out_and_the_rest_are_aborted():
    barrier = AbortableBarrier(3)
    patient = start(lambda: barrier.wait(0, TIMEOUT_S))
    until(lambda: barrier._waiting == [0])
    with pytest.raises(CollectiveTimeout, match="for rank 1;"):
        barrier.wait(2, 0.05)
    with pytest.raises(CollectiveAborted, match="rank 1 did not join"):
        raise patient.exception(TIMEOUT_S)


class _ClosedTooLong:
    """A turnstile whose timeout passes just before ``meanwhile`` acts on the barrier."""

    def __init__(self, turnstile: Any, meanwhile: Callable[[], object]) -> None:
        self._turnstile = turnstile
        self._meanwhile = meanwhile
        self.num_timeouts = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking:
            return self._turnstile.acquire(blocking=False)
        self.num_timeouts += 1
        self._meanwhile()
        return False

    def release(self) -> None:
        self._turnstile.release()


@pytest.mark.parametrize("late", [0, 1])
def test_a_meeting_completed_at_the_timeout_takes_place(late):
    barrier = AbortableBarrier(2)
    last = _ClosedTooLong(barrier._turnstiles[late], lambda: barrier.wait(1 - late, TIMEOUT_S))
    plain, barrier._turnstiles[late] = barrier._turnstiles[late], last
    barrier.wait(late, TIMEOUT_S)
    assert last.num_timeouts == 1
    assert not barrier.aborted
    # And the turnstile is closed again, for the next meeting.
    barrier._turnstiles[late] = plain
    first = start(lambda: barrier.wait(late, TIMEOUT_S))
    until(lambda: barrier._waiting == [late])
    assert not first.done()
    barrier.wait(1 - late, TIMEOUT_S)
    assert first.exception(TIMEOUT_S) is None


def test_a_break_at_the_time_limit_is_raised_with_its_own_reason():
    barrier = AbortableBarrier(2)
    barrier._turnstiles[0] = _ClosedTooLong(
        barrier._turnstiles[0], lambda: barrier.abort("planted")
    )
    with pytest.raises(CollectiveAborted, match="planted"):
        barrier.wait(0, TIMEOUT_S)


def test_a_barrier_without_ranks_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        AbortableBarrier(0)
