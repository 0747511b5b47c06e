"""Groups over NCCL with a fake backend: creation, monitoring and end."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed

from runtime.collective import NcclCollective, ReduceOp, create_collectives
from runtime.collective import nccl as nccl_module
from runtime.collective.base import Group
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, GpuWorkerError
from runtime.device import capture_gate
from tests.support.fake_cuda import CPU, FakeCuda, standing_in
from tests.support.posing import PosingBackend
from tests.unit.collective.test_collectives import (
    TIMEOUT_S,
    errors_of,
    on_ranks,
    start_ranks,
    until,
)

GPUS = [torch.device("cuda", i) for i in range(3)]
SOON_S = 5.0


class Scene:
    """Groups of ranks with fake GPUs, each with tensors of its own GPU.

    Attributes:
        fake: The stand-in for CUDA.
        calls: Calls of all backends, in order.
        backends: Backends, in the order in which they were made.
    """

    def __init__(self, monkeypatch):
        self.fake = FakeCuda(patience=0, prompt=True)
        self.calls, self.backends = [], []
        self.kind = PosingBackend
        self.groups = []
        monkeypatch.setattr(nccl_module, "new_backend", self._new)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    def _new(self, store, rank, world_size, timeout_s):
        backend = self.kind(store, rank, world_size, timeout_s, self.calls)
        self.backends.append(backend)
        return backend

    def group(self, world_size=2, timeout_s=TIMEOUT_S):
        ends = create_collectives(world_size, "nccl", GPUS[:world_size], timeout_s)
        self.groups.append(ends)
        return ends

    def tensor(self, end, value, size=3):
        return self.fake.place(torch.full((size,), float(value)), GPUS[end.rank])

    def on_stream(self, work):
        """Run a rank's work on a stream of its GPU."""

        def run(end):
            device = GPUS[end.rank]
            with self.fake.on_device(device), self.fake.stream(self.fake.new_stream(device)):
                return work(end)

        return run

    def reduce(self, ends):
        tensors = [self.tensor(end, end.rank + 1) for end in ends]
        on_ranks(ends, self.on_stream(lambda end: end.all_reduce_(tensors[end.rank])))
        return [t[0].item() for t in tensors]

    def names(self):
        return [name for name, _ in self.calls]


@pytest.fixture
def scene(monkeypatch):
    scene = Scene(monkeypatch)
    with standing_in(scene.fake):
        yield scene
        for ends in scene.groups:
            for end in ends:
                end.close()


# -- creation -------------------------------------------------------------------------


def test_the_environment_is_set_before_the_first_backend_and_keeps_the_users_values(
    scene, monkeypatch
):
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    found = []

    class Looking(PosingBackend):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(dict(os.environ))

    scene.kind = Looking
    scene.group()
    for environment in found:
        assert environment == {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
            "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
            "NCCL_RUNTIME_CONNECT": "0",
            "TORCH_FR_BUFFER_SIZE": "0",
        }
    assert len(found) == 2


def test_no_rank_connects_before_every_rank_has_its_backend(scene):
    """D29: a connection that a peer does not join cannot be cancelled."""
    scene.group(3)
    assert scene.names()[:3] == ["new"] * 3
    assert sorted(scene.names()[3:6]) == ["connect"] * 3


def test_every_group_has_its_own_store_prefix(scene, monkeypatch):
    prefixes = []
    real = torch.distributed.PrefixStore

    def prefix_store(prefix, store):
        prefixes.append(prefix)
        return real(prefix, store)

    monkeypatch.setattr(torch.distributed, "PrefixStore", prefix_store)
    for _ in range(3):
        scene.group()
    assert [prefixes.count(prefix) for prefix in set(prefixes)] == [2, 2, 2]


def test_a_rank_that_cannot_create_its_backend_aborts_the_others(scene):
    class Failing(PosingBackend):
        def __init__(self, store, rank, *rest):
            super().__init__(store, rank, *rest)
            if rank == 1:
                raise OSError("planted")

    scene.kind = Failing
    begin = time.monotonic()
    with pytest.raises(CollectiveAborted, match="rank 1 could not connect") as caught:
        scene.group(3)
    assert time.monotonic() - begin < SOON_S
    assert isinstance(caught.value.__cause__, OSError)
    until(lambda: scene.names().count("abort") == 2)
    assert "connect" not in scene.names()


def test_a_rank_that_does_not_connect_is_named(scene):
    released = threading.Event()

    class Slow(PosingBackend):
        def __init__(self, store, rank, *rest):
            super().__init__(store, rank, *rest)
            assert rank != 1 or released.wait(TIMEOUT_S)

        def abort(self):
            super().abort()
            released.set()

    scene.kind = Slow
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        scene.group(2, timeout_s=0.3)


def test_the_context_of_the_device_is_current_where_the_kernel_is_loaded(scene, caplog):
    """A new thread has no current device; selecting the current one again changes nothing."""
    ends = scene.group()
    assert [end.host_runs_ahead for end in ends] == [True, True]
    assert not caplog.records


def test_the_host_runs_ahead_on_every_rank_or_on_none(scene, monkeypatch):
    """A waiting rank makes one exchange, another rank several."""
    host_reader = scene.fake.host_reader

    def failing_on_rank_1():
        if threading.current_thread().name.endswith("-1"):
            raise OSError("planted")
        return host_reader()

    monkeypatch.setattr(scene.fake, "host_reader", failing_on_rank_1)
    ends = scene.group(3)
    assert [end.host_runs_ahead for end in ends] == [False] * 3


def test_ranks_with_different_arguments_are_named(scene):
    ends = scene.group()

    def work(end):
        with pytest.raises(
            ValueError, match=r"rank 1 passed 'joins size=1', rank 0 passed .*size=0"
        ):
            end.agree("joins", size=end.rank)
        return end.agree("joins", capable=end.rank == 0, size=3)

    assert on_ranks(ends, work) == [False, False]


# -- collectives --------------------------------------------------------------------------


def test_an_exchange_is_ordered_with_earlier_and_later_work_of_the_current_stream(scene):
    (end,) = scene.group(1)
    stream = scene.fake.new_stream(GPUS[0])
    with scene.fake.stream(stream):
        scene.fake.mark("backward")
        end.all_reduce_(scene.tensor(end, 1.0))
        assert scene.fake.done == ["backward"]
    in_front, behind = scene.fake.calls("record")
    assert in_front[-1] == behind[-1] == stream.name


def test_a_second_incarnation_works_after_the_first_was_aborted(scene):
    ends = scene.group()
    assert scene.reduce(ends) == [3.0, 3.0]
    ends[0].abort()
    for end in ends:
        end.close()
    assert scene.reduce(scene.group()) == [3.0, 3.0]


def test_low_precision_is_summed_in_float32(scene):
    ends = scene.group()
    tensors = [scene.tensor(end, 1.0).to(torch.bfloat16) for end in ends]
    for end in ends:
        scene.fake.place(tensors[end.rank], GPUS[end.rank])
    sent = []
    real = PosingBackend.allreduce

    def allreduce(backend, wires, options):
        sent.append(wires[0].dtype)
        return real(backend, wires, options)

    for backend in scene.backends:
        backend.allreduce = allreduce.__get__(backend)
    on_ranks(ends, scene.on_stream(lambda end: end.weighted_mean_([tensors[end.rank]], 1)))
    assert sent == [torch.float32] * 2


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, torch.float32),
        (ReduceOp.AVG, torch.float32),
        (ReduceOp.SUM, torch.bfloat16),
        (ReduceOp.AVG, torch.bfloat16),
        (ReduceOp.SUM, torch.int16),
    ],
    ids=str,
)
def test_a_reduce_scatter_sends_each_rank_its_part_alone(scene, op, dtype):
    ends = scene.group()
    wholes = [torch.arange(6.0).add(end.rank).to(dtype) for end in ends]
    parts = [torch.zeros(3, dtype=dtype) for _ in ends]
    for end in ends:
        scene.fake.place(wholes[end.rank], GPUS[end.rank])
        scene.fake.place(parts[end.rank], GPUS[end.rank])
    sent = []
    real = PosingBackend._reduce_scatter_base

    def reduce_scatter(backend, output, input, options):
        own = input.data_ptr() == wholes[backend.rank].data_ptr()
        sent.append((input.dtype, own, options.reduceOp == torch.distributed.ReduceOp.SUM))
        return real(backend, output, input, options)

    for backend in scene.backends:
        backend._reduce_scatter_base = reduce_scatter.__get__(backend)
    del scene.calls[:]
    on_ranks(
        ends,
        scene.on_stream(lambda end: end.reduce_scatter_into(parts[end.rank], wholes[end.rank], op)),
    )
    assert scene.names() == ["_reduce_scatter_base"] * 2
    wire = {torch.bfloat16: torch.float32, torch.int16: torch.int32}.get(dtype, dtype)
    assert sent == [(wire, wire is dtype, True)] * 2
    divisor = 2 if op is ReduceOp.AVG else 1
    expected = [(2 * i + 1) / divisor for i in range(6)]
    assert [part.tolist() for part in parts] == [expected[:3], expected[3:]]
    assert wholes[0].tolist() == list(range(6))


def test_small_decisions_of_the_host_are_taken_at_the_gate(scene):
    """Weights and flags are on the CPU: no kernel, and no wait for the device."""
    ends = scene.group()
    del scene.calls[:]
    gathered = [scene.fake.place(torch.zeros(2, dtype=torch.int64), CPU) for _ in ends]
    mine = [scene.fake.place(torch.tensor([end.rank + 5]), CPU) for end in ends]
    on_ranks(ends, lambda end: end.all_gather_into(gathered[end.rank], mine[end.rank]))
    means = [scene.fake.place(torch.full((2,), float(end.rank)), CPU) for end in ends]
    totals = on_ranks(ends, lambda end: end.weighted_mean_([means[end.rank]], 1 + end.rank))
    assert [t.tolist() for t in gathered] == [[5, 6]] * 2
    assert [t[0].item() for t in means] == [pytest.approx(2 / 3)] * 2
    assert totals == [3.0, 3.0]
    assert scene.calls == []


@pytest.mark.parametrize(
    ("place", "why"),
    [(CPU, "some tensors are on the CPU"), (GPUS[2], "rank 1 passed a tensor on cuda:2, not its")],
)
def test_tensors_on_another_device_are_refused_on_every_rank(scene, place, why):
    ends = scene.group()
    tensors = [scene.tensor(ends[0], 1.0), scene.fake.place(torch.ones(3), place)]

    def work(end):
        with pytest.raises(ValueError, match=why):
            end.all_reduce_(tensors[end.rank])

    on_ranks(ends, scene.on_stream(work))
    assert scene.reduce(ends) == [3.0, 3.0]


def test_no_rank_is_launched_before_every_rank_has_added_the_part(scene):
    """A kernel that runs before its peer is launched can block the peer's launch."""
    ends = scene.group()
    held, added = threading.Event(), threading.Event()

    def work(end):
        mean = end.bucketed_mean(1.0)
        mean.add([scene.tensor(end, end.rank + 1.0)])
        if end.rank == 1:
            assert held.wait(TIMEOUT_S)
        else:
            added.set()
        mean.add([scene.tensor(end, end.rank + 3.0)])
        return mean.end()

    del scene.calls[:]
    futures = start_ranks(ends, scene.on_stream(work))
    assert added.wait(TIMEOUT_S)
    barrier = ends[0]._group.barrier
    until(lambda: barrier._waiting == [0])
    assert scene.names() == ["allreduce"] * 2
    held.set()
    assert [future.result(TIMEOUT_S) for future in futures] == [2.0, 2.0]
    assert scene.names() == ["allreduce"] * 4


def test_every_rank_is_launched_by_one_thread_within_one_group(scene):
    launched = []

    class Noting(PosingBackend):
        def _group_start(self):
            super()._group_start()
            launched.append([])

        def _run(self, name, options, *tensors):
            launched[-1].append(
                (self.rank, threading.current_thread().name, scene.fake.current.name)
            )
            super()._run(name, options, *tensors)

    scene.kind = Noting
    ends = scene.group(3)
    assert scene.reduce(ends) == [6.0] * 3
    (launch,) = launched
    assert sorted(rank for rank, _, _ in launch) == [0, 1, 2]
    assert len({thread for _, thread, _ in launch}) == 1
    assert len({stream for _, _, stream in launch}) == 3


def held_launch(scene):
    """Ranks within a launch, their futures, and the event that lets it end."""
    inside, free = threading.Event(), threading.Event()

    class Slow(PosingBackend):
        def _group_end(self):
            inside.set()
            assert free.wait(TIMEOUT_S)
            super()._group_end()
            self._note("launched")

    scene.kind = Slow
    ends = scene.group()
    tensors = [scene.tensor(end, 1.0) for end in ends]
    futures = start_ranks(ends, scene.on_stream(lambda end: end.all_reduce_(tensors[end.rank])))
    assert inside.wait(TIMEOUT_S)
    return ends, futures, free


def test_a_call_that_may_wait_for_a_device_waits_for_the_launch(scene):
    _, futures, free = held_launch(scene)
    launched = []

    def call():
        with capture_gate.GATE.driver_call():
            launched.append("launched" in scene.names())

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: capture_gate.GATE._launches._waiters)
    free.set()
    thread.join(TIMEOUT_S)
    for future in futures:
        future.result(TIMEOUT_S)
    assert launched == [True]


def test_an_abort_waits_for_a_launch_in_progress(scene):
    """NCCL would use a freed communicator."""
    ends, futures, free = held_launch(scene)
    ends[0].abort()
    free.set()
    until(lambda: scene.names().count("abort") == 2)
    assert [type(future.exception(TIMEOUT_S)) for future in futures] == [CollectiveAborted] * 2
    assert scene.names().index("launched") < scene.names().index("abort")


# -- failures -----------------------------------------------------------------------


class Stuck(PosingBackend):
    """The kernels run until they are aborted, and then end without an error.

    Attributes:
        fake: The device, which begins each kernel at its launch; ``None``: a test lets it.
    """

    fake = None

    def _run(self, name, options, *tensors):
        if self.fake is not None:
            self.fake.run(self.fake.current)
        self._note(name)


@pytest.fixture
def stuck(scene):
    """A scene whose kernels end only by an abort of every rank."""
    scene.kind = Stuck
    scene.fake.patience = None
    Stuck.fake = scene.fake
    real, aborted = Stuck.abort, []

    def abort(backend):
        real(backend)
        aborted.append(backend.rank)
        if len(aborted) >= 2:
            scene.fake.run_all()
            scene.fake.patience = 0  # and events recorded from now on complete

    Stuck.abort = abort
    yield scene
    Stuck.abort, Stuck.fake = real, None


def test_an_exchange_that_does_not_end_is_aborted_on_every_rank_at_the_deadline(stuck):
    ends = stuck.group(2, timeout_s=0.3)
    tensors = [stuck.tensor(end, 1.0) for end in ends]
    begin = time.monotonic()
    errors = errors_of(ends, stuck.on_stream(lambda end: end.all_reduce_(tensors[end.rank])))
    assert 0.25 < time.monotonic() - begin < 0.3 + SOON_S
    kinds = {type(error) for error in errors}
    assert CollectiveTimeout in kinds
    assert kinds <= {CollectiveTimeout, CollectiveAborted}
    assert sorted(rank for name, rank in stuck.calls if name == "abort") == [0, 1]
    for end in ends:
        with pytest.raises(CollectiveAborted):
            end.check()


def test_an_aborted_exchange_that_ends_without_an_error_is_not_used(stuck):
    """The kernel ends, the tensors hold garbage, and NCCL raises no error."""
    ends = stuck.group()
    tensors = [stuck.tensor(end, 1.0) for end in ends]
    work = stuck.on_stream(lambda end: end.all_reduce_(tensors[end.rank]))
    futures = start_ranks(ends, work)
    until(lambda: stuck.names().count("allreduce") == 2)
    begin = time.monotonic()
    ends[1].abort()
    assert [type(future.exception(TIMEOUT_S)) for future in futures] == [CollectiveAborted] * 2
    assert time.monotonic() - begin < SOON_S
    assert all(event.reached == event.recorded for event in stuck.fake.events)


def test_a_rank_is_aborted_once_its_exchange_has_begun(stuck, monkeypatch):
    """NCCL frees the memory of a kernel still behind other work, which then cannot run."""
    monkeypatch.setattr(Stuck, "fake", None)
    ends = stuck.group()
    tensors = [stuck.tensor(end, 1.0) for end in ends]
    streams = {}

    def work(end):
        streams[end.rank] = stuck.fake.current
        end.all_reduce_(tensors[end.rank])

    futures = start_ranks(ends, stuck.on_stream(work))
    until(lambda: stuck.names().count("allreduce") == 2)
    stuck.fake.wait_host(*ends[0]._begun.values())
    ends[0].abort()
    until(lambda: ("abort", 0) in stuck.calls)
    polled = ends[1]._begun[streams[1]].num_questions
    until(lambda: ends[1]._begun[streams[1]].num_questions > polled + 3)
    assert ("abort", 1) not in stuck.calls
    stuck.fake.wait_host(*ends[1]._begun.values())
    assert {type(future.exception(TIMEOUT_S)) for future in futures} == {CollectiveAborted}
    assert ("abort", 1) in stuck.calls


def test_a_device_that_never_completes_does_not_block_ranks_for_ever(scene, monkeypatch):
    monkeypatch.setattr(nccl_module, "ABORT_GRACE_S", 0.1)
    scene.kind = Stuck
    monkeypatch.setattr(Stuck, "fake", scene.fake)
    scene.fake.patience = None
    (end,) = scene.group(1, timeout_s=0.1)

    begin = time.monotonic()
    (error,) = errors_of([end], scene.on_stream(lambda e: e.all_reduce_(scene.tensor(e, 1.0))))
    assert isinstance(error, CollectiveTimeout)
    assert "all_reduce_ did not end within 0.1 s" in str(error)
    assert time.monotonic() - begin < SOON_S


def test_an_abort_does_not_block_and_occurs_once(scene):
    released = threading.Event()

    class Slow(PosingBackend):
        def abort(self):
            super().abort()
            assert released.wait(TIMEOUT_S)

    scene.kind = Slow
    ends = scene.group(3)
    begin = time.monotonic()
    for end in ends:
        end.abort()
    assert time.monotonic() - begin < SOON_S
    until(lambda: scene.names().count("abort") == 3)
    released.set()
    for end in ends:
        end.close()
    assert sorted(rank for name, rank in scene.calls if name == "abort") == [0, 1, 2]
    assert "shutdown" not in scene.names()


def test_a_backend_that_fails_to_abort_is_logged_and_stops_nothing(scene, caplog):
    class Failing(PosingBackend):
        def abort(self):
            super().abort()
            raise RuntimeError("planted")

    scene.kind = Failing
    ends = scene.group()
    ends[0].abort()
    for end in ends:
        end.close()
    assert scene.names().count("abort") == 2
    assert "NCCL abort failed" in caplog.text


def test_an_error_that_the_backend_has_noticed_is_seen_before_the_result_is_trusted(scene):
    class Noticing(PosingBackend):
        def get_error(self):
            return torch._C._distributed_c10d.ErrorType.COMM_ERROR

    scene.kind = Noticing
    ends = scene.group()
    tensors = [scene.tensor(end, 1.0) for end in ends]
    work = scene.on_stream(lambda end: end.all_reduce_(tensors[end.rank]))
    errors = errors_of(ends, work)
    assert [type(error) for error in errors] == [CollectiveAborted] * 2
    assert any("NCCL has failed: COMM_ERROR" in str(error) for error in errors)


def errors_soon(stuck, ends):
    """The error of each rank, long before the timeout."""
    tensors = [stuck.tensor(end, 1.0) for end in ends]
    begin = time.monotonic()
    errors = errors_of(ends, stuck.on_stream(lambda end: end.all_reduce_(tensors[end.rank])))
    assert time.monotonic() - begin < SOON_S
    return errors


def test_an_exchange_that_raises_aborts_the_peers(stuck, monkeypatch):
    ends = stuck.group()

    def raising(*_):
        stuck.fake.run(stuck.fake.current)
        raise RuntimeError("planted: out of memory")

    monkeypatch.setattr(stuck.backends[0], "_run", raising)
    errors = errors_soon(stuck, ends)
    assert [type(error) for error in errors] == [CollectiveAborted] * 2
    assert any("planted" in str(error.__cause__) for error in errors)


def test_a_rank_without_memory_for_an_exchange_raises_its_own_error(stuck, monkeypatch):
    """As an abort of the group it would name another rank, and no rank would report it."""
    ends = stuck.group()

    def raising(*_):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(ends[0], "_stage", raising)
    assert [type(error) for error in errors_soon(stuck, ends)] == [
        torch.OutOfMemoryError,
        CollectiveAborted,
    ]


def late_mean(scene, end):
    """Start a mean in parts without waiting; returns its outcome and its flag."""
    abort_flag = scene.tensor(end, 7.0, 1).reshape(())
    mean = end.bucketed_mean(1.0)
    mean.add([scene.tensor(end, end.rank + 1.0)])
    total, outcome = mean.end_async(abort_flag)
    assert total == end.world_size
    return outcome, abort_flag


def test_the_device_reads_the_abort_flag_after_an_exchange(scene):
    ends = scene.group()
    found = on_ranks(ends, scene.on_stream(lambda end: late_mean(scene, end)))
    for outcome, abort_flag in found:
        outcome.wait()
        assert abort_flag.item() == 0.0
    ends[0].abort()
    for outcome, _ in found:  # it had ended by then
        outcome.wait()


def test_an_exchange_without_a_waiting_host_is_aborted_on_every_rank_at_the_deadline(
    stuck, monkeypatch
):
    """The timeout begins when the device reaches the exchange, which may be some steps late."""
    stuck.fake.prompt = False
    monkeypatch.setattr(Stuck, "fake", None)
    ends = stuck.group(2, timeout_s=0.3)
    is_complete, looks = stuck.fake.is_complete, []
    looked = threading.Event()  # twice after the timeout, had it begun earlier

    def watched(event):
        if threading.current_thread().name == "collective-probe":
            looks.append(time.monotonic())
            if len(looks) > 4 and looks[-5] - looks[0] > 0.3:
                looked.set()
        return is_complete(event)

    monkeypatch.setattr(stuck.fake, "is_complete", watched)
    found = on_ranks(ends, stuck.on_stream(lambda end: late_mean(stuck, end)))
    assert looked.wait(TIMEOUT_S)
    assert "abort" not in stuck.names()
    begin = time.monotonic()
    for outcome, _ in found:
        assert not outcome.done
        for event in (outcome._begun, *outcome._end._begun.values()):
            stuck.fake.wait_host(event)
    kinds = []
    for outcome, abort_flag in found:
        with pytest.raises((CollectiveAborted, CollectiveTimeout)) as caught:
            outcome.wait()
        kinds.append(type(caught.value))
        assert abort_flag.item() == 1.0
    assert 0.25 < time.monotonic() - begin < 0.3 + SOON_S
    assert CollectiveTimeout in kinds
    assert sorted(rank for name, rank in stuck.calls if name == "abort") == [0, 1]


def test_an_exchange_on_a_device_that_fails_is_aborted_on_every_rank(stuck, monkeypatch):
    """The thread that inspects it would end, and the peers would wait for ever."""
    stuck.fake.prompt = False
    ends = stuck.group()
    is_complete = stuck.fake.is_complete

    def failing(event):
        if threading.current_thread().name == "collective-probe":
            raise RuntimeError("planted")
        return is_complete(event)

    monkeypatch.setattr(stuck.fake, "is_complete", failing)
    found = on_ranks(ends, stuck.on_stream(lambda end: late_mean(stuck, end)))
    for outcome, _ in found:
        with pytest.raises(CollectiveAborted):
            outcome.wait()
    with pytest.raises(CollectiveAborted):
        ends[0].check()


@pytest.mark.parametrize("found", [None, RuntimeError("planted")])
def test_without_the_kernel_that_sees_an_abort_the_host_waits(scene, monkeypatch, caplog, found):
    def host_reader():
        if found is not None:
            raise found

    monkeypatch.setattr(scene.fake, "host_reader", host_reader)
    caplog.set_level("INFO")
    (end,) = scene.group(1)
    assert not end.host_runs_ahead
    ((outcome, _),) = on_ranks([end], scene.on_stream(lambda end: late_mean(scene, end)))
    assert outcome is None
    assert ("planted" in caplog.text) is (found is not None)
    assert "the host waits for each reduction" in caplog.text
    assert ("ROCm" in caplog.text) is (found is None)


def test_an_error_that_the_backend_notices_behind_the_step_ends_the_run(scene):
    """The step used its result: no other rank has a state to continue from."""

    class Noticing(PosingBackend):
        def get_error(self):
            return torch._C._distributed_c10d.ErrorType.COMM_ERROR

    scene.kind = Noticing
    (end,) = scene.group(1)
    ((outcome, _),) = on_ranks([end], scene.on_stream(lambda end: late_mean(scene, end)))
    with pytest.raises(RuntimeError, match="NCCL has failed during"):
        outcome.wait()


def test_the_time_limit_holds_while_a_query_of_the_device_blocks(stuck, monkeypatch):
    """The driver may not answer a query, or only after the exchange."""
    stuck.fake.prompt = False
    ends = stuck.group(2, timeout_s=0.3)
    is_complete, released = stuck.fake.is_complete, threading.Event()

    def blocking(event):
        if threading.current_thread().name.startswith("collective-"):
            assert released.wait(TIMEOUT_S)
        return is_complete(event)

    monkeypatch.setattr(stuck.fake, "is_complete", blocking)
    begin = time.monotonic()
    found = on_ranks(ends, stuck.on_stream(lambda end: late_mean(stuck, end)))
    until(lambda: stuck.names().count("abort") == 2)
    assert 0.25 < time.monotonic() - begin < 0.3 + SOON_S
    released.set()
    for outcome, _ in found:
        with pytest.raises(CollectiveAborted):
            outcome.wait()


def is_idle(communicators):
    return communicators._num_idle > nccl_module._IDLE_LOOKS


def test_a_late_result_is_probed_while_another_rank_waits_on_the_host(monkeypatch):
    """Both threads of the group have been idle before."""
    monkeypatch.setattr(nccl_module, "_IDLE_LOOKS", 2)
    probed = threading.Event()

    class Late:
        def probe(self):
            probed.set()

        def overdue(self, now, timeout_s):
            return None

    communicators = nccl_module.Communicators(Group(1, TIMEOUT_S))
    communicators.watch(Late())
    assert probed.wait(TIMEOUT_S)
    communicators._late_results.clear()
    until(lambda: is_idle(communicators) and len(communicators._changed._waiters) == 2)
    wait = nccl_module.HostWait("a reduction", time.monotonic() + TIMEOUT_S)
    communicators.expect(wait)
    until(lambda: not is_idle(communicators) and len(communicators._changed._waiters) == 2)
    probed.clear()
    communicators.watch(Late())
    assert probed.wait(TIMEOUT_S / 2)
    communicators.abort()
    assert communicators.settle(TIMEOUT_S) == []


def test_the_time_limit_holds_for_the_first_exchange_after_an_idle_time(monkeypatch):
    monkeypatch.setattr(nccl_module, "_IDLE_LOOKS", 2)
    communicators = nccl_module.Communicators(Group(1, 0.1))
    soon = nccl_module.HostWait("a reduction", time.monotonic() + TIMEOUT_S)
    communicators.expect(soon)
    communicators.forget(soon)
    until(lambda: is_idle(communicators))
    communicators.expect(nccl_module.HostWait("a reduction", time.monotonic() - TIMEOUT_S))
    assert communicators.settle(TIMEOUT_S) == []
    assert communicators._aborted


def test_the_time_limit_holds_for_a_rank_whose_own_query_blocks(stuck, monkeypatch):
    monkeypatch.setattr(nccl_module, "_MARGIN_S", 0.1)
    ends = stuck.group(2, timeout_s=0.3)
    is_complete, released = stuck.fake.is_complete, threading.Event()

    def blocking(event):
        assert released.wait(TIMEOUT_S)
        return is_complete(event)

    monkeypatch.setattr(stuck.fake, "is_complete", blocking)
    tensors = [stuck.tensor(end, 1.0) for end in ends]
    futures = start_ranks(ends, stuck.on_stream(lambda end: end.all_reduce_(tensors[end.rank])))
    until(lambda: stuck.names().count("abort") == 2)
    released.set()
    kinds = [type(future.exception(TIMEOUT_S)) for future in futures]
    assert CollectiveTimeout in kinds
    assert set(kinds) <= {CollectiveTimeout, CollectiveAborted}


# -- closing -----------------------------------------------------------------------


def test_backends_are_shut_down_together_once_the_last_rank_has_left(scene):
    """NCCL destroys a communicator only together with its peers."""
    meeting = threading.Barrier(3)

    class Meeting(PosingBackend):
        def shutdown(self):
            meeting.wait(TIMEOUT_S)
            super().shutdown()

    scene.kind = Meeting
    ends = scene.group(3)
    for end in ends[:2]:
        end.close()
        end.close()
    assert "shutdown" not in scene.names()
    ends[2].close()
    assert scene.names().count("shutdown") == 3
    assert "abort" not in scene.names()
    assert not [t for t in threading.enumerate() if t.name.startswith("collective-")]


def test_a_collective_names_the_rank_that_has_left(scene):
    ends = scene.group()
    ends[0].close()
    with pytest.raises(CollectiveAborted, match="rank 0 has left"):
        ends[1].barrier()
    assert isinstance(ends[0], NcclCollective)


class Lingering(PosingBackend):
    """An abort that blocks until it is released."""

    released = threading.Event()

    def abort(self):
        super().abort()
        assert self.released.wait(TIMEOUT_S)


@pytest.fixture
def lingering(scene, monkeypatch):
    monkeypatch.setattr(Lingering, "released", threading.Event())
    scene.kind = Lingering
    yield scene
    Lingering.released.set()


def test_a_group_is_made_only_when_the_communicators_of_the_last_one_have_ended(lingering):
    for end in lingering.group():
        end.abort()
    until(lambda: lingering.names().count("abort") == 2)
    lingering.kind = PosingBackend
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(lingering.group)
        until(lambda: second.running())
        with pytest.raises(TimeoutError):
            second.result(0.05)
        assert lingering.names().count("new") == 2
        Lingering.released.set()
        assert lingering.reduce(second.result(TIMEOUT_S)) == [3.0, 3.0]


def test_a_group_is_refused_where_the_last_one_does_not_end(lingering, monkeypatch):
    """The whole run fails: over another backend the stuck communicators would remain."""
    for end in lingering.group():
        end.abort()
    monkeypatch.setattr(nccl_module, "END_S", 0.1)
    with pytest.raises(
        GpuWorkerError, match=r"did not end within 0.1 s \(collective-abort"
    ) as caught:
        lingering.group()
    assert not isinstance(caught.value, (CollectiveAborted, CollectiveTimeout))
    assert lingering.names().count("new") == 2
    Lingering.released.set()
