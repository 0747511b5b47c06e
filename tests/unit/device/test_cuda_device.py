"""A worker's CUDA device on a fake API: stream order, pinned copies, run-ahead."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import nn

from runtime.device.base import Device
from runtime.device.cuda import CudaDevice, open_device
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState
from runtime.replica.reducer import GradientReducer
from tests.support.fake_cuda import GPU, FakeCuda
from tests.support.fake_streams import DelayedCopies

ORDERS = list(permutations(range(3)))
any_order = pytest.mark.parametrize("order", ORDERS, ids=lambda o: "".join(map(str, o)))


class Model(nn.Module):
    """A parameter, a float and an integer buffer."""

    def __init__(self, value=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((5,), value))
        self.register_buffer("mean", torch.full((3,), value))
        self.register_buffer("count", torch.tensor(int(value)))


def run_in(fake, order):
    fake.run(*(fake.streams[i] for i in order))


def fail(fake, name):
    fake.mark(name)
    raise KeyError(name)


def averager_on(fake, model):
    return ReplicaAverager(FlatState(model), CudaDevice(GPU, api=fake), None)


@pytest.fixture
def fake():
    return FakeCuda(patience=None)


@pytest.fixture
def device(fake):
    device = CudaDevice(GPU, api=fake)
    with device.activate():
        yield device


# -- both directions ---------------------------------------------------------------


@any_order
def test_the_comm_stream_is_ordered_both_ways_whichever_stream_runs_first(fake, device, order):
    """S4, S5: the optimizer's step, then copies of state, then the next forward."""
    for step in range(3):
        fake.mark(f"step {step}")
        with device.comm():
            fake.mark(f"average {step}")
    run_in(fake, order)
    assert fake.done == [f"{what} {step}" for step in range(3) for what in ("step", "average")]


@any_order
def test_a_failure_in_the_comm_stream_keeps_the_order(fake, device, order):
    fake.mark("step")
    with pytest.raises(KeyError), device.comm():
        fail(fake, "half")
    fake.mark("forward")
    run_in(fake, order)
    assert fake.done == ["step", "half", "forward"]


def test_events_are_recorded_before_streams_wait_for_them(fake, device):
    fake.log.clear()
    with device.comm():
        pass
    compute, comm = device.compute.name, device.comm_stream.name
    assert [(what, rest[-1]) for what, *rest in fake.log] == [
        ("record", compute),
        ("wait", comm),
        ("enter", comm),
        ("leave", comm),
        ("record", comm),
        ("wait", compute),
    ]


@any_order
def test_gradients_are_reduced_between_backward_and_the_optimizer(fake, device, order):
    class Marking:
        host_runs_ahead = False
        world_size = 1
        tally = 0.0

        def weighted_mean_(self, tensors, weight):
            assert fake.current is device.comm_stream
            fake.mark("reduce")

    model = Model()
    state = FlatState(model)
    reducer = GradientReducer(state.params, Marking(), None, device.comm)
    model.w.sum().backward()
    fake.mark("backward")
    reducer.pack(2)
    reducer.exchange(2)
    reducer.unpack()
    fake.mark("optimizer")
    run_in(fake, order)
    assert fake.done == ["backward", "reduce", "optimizer"]


@any_order
def test_buckets_travel_beside_the_backward_pass_and_before_the_optimizer(fake, device, order):
    class Mean:
        def __init__(self, *_, **__):
            self.parts = 0

        def add(self, tensors):
            assert fake.current is device.comm_stream
            for _ in tensors:
                fake.mark(f"bucket {self.parts}")
                self.parts += 1

        def end(self):
            return 2.0

    class Marking:
        host_runs_ahead = False
        world_size = 1
        tally = 0.0
        bucketed_mean = Mean

        def agree(self, subject, **properties):
            return True

        def all_gather_into(self, output, input):
            output.copy_(input)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.late = torch.nn.Parameter(torch.zeros(3))
            self.early = torch.nn.Parameter(torch.zeros(3))

    model = Two()
    state = FlatState(model)
    reducer = GradientReducer(state.params, Marking(), None, device.comm, bucket_bytes=1)
    for step in range(2):
        for p in (model.late, model.early):
            p.grad = None
        reducer.reset()
        fake.run_all()
        fake.done.clear()
        reducer.arm(2, None)
        (model.early.sum() + 0 * model.early.sum()).backward()
        fake.mark("rest of the backward pass")
        model.late.sum().backward()
        if step:  # no later work waits for the first bucket
            fake.run(device.compute)
            assert fake.done == ["rest of the backward pass"]
        reducer.disarm()
        reducer.pack(2)
        reducer.exchange(2)
        reducer.unpack()
        fake.mark("optimizer")
    run_in(fake, order)
    assert fake.done == ["rest of the backward pass", "bucket 0", "bucket 1", "optimizer"]


# -- snapshots and updates -------------------------------------------------------------


@any_order
def test_a_snapshot_holds_the_state_of_its_step_and_completes_later(fake, order):
    """S6: it follows the step before it, and training continues before it is complete."""
    model = Model()
    averager = averager_on(fake, model)
    device = averager._device
    with device.activate():
        fake.mark("step")
        payload, arrival, squares = averager.start_snapshot()
        assert squares is None  # no wait for the device
        fake.mark("forward")
        with torch.no_grad():
            model.w.add_(1)
            model.mean.add_(1)
        assert not arrival.done
        assert not bool((payload.params[0][:5] == 1.0).any())
        fake.run(device.compute)
        assert fake.done == ["step", "forward"]
        assert not arrival.done  # compute waits for the copy on the device, not for this one
        run_in(fake, order)
        assert arrival.done
    assert bool((payload.params[0][:5] == 1.0).all())
    assert payload.buffers[0].tolist() == [1.0] * 3
    assert payload.other_buffers[0].tolist() == [1]


@pytest.mark.parametrize("take", ["snapshot", "own", "last"])
def test_a_synchronous_snapshot_is_complete_when_it_is_returned(fake, take):
    averager = averager_on(fake, Model(3.0))
    with averager._device.activate():
        if take == "last":
            payload = averager.last_snapshot()
            assert averager._base is None  # no more device memory
        else:
            payload = averager.snapshot(reuse=take == "snapshot")
        assert bool((payload.params[0][:5] == 3.0).all())
        assert payload.other_buffers[0].tolist() == [3]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_an_update_keeps_the_training_since_the_snapshot(fake, meanwhile):
    model, seen = Model(), []
    averager = averager_on(fake, model)
    with averager._device.activate():
        payload, arrival, _ = averager.start_snapshot()
        arrival.wait()
        with torch.no_grad():
            model.w.add_(10)
            model.mean.add_(10)
        average = FlatState(Model(5.0)).live()
        look = (
            (lambda: seen.append((model.w[0].item(), model.mean[0].item()))) if meanwhile else None
        )
        arrival = averager.apply(average, look)
        for tensor in (*average.params, *average.buffers, *average.other_buffers):
            tensor.fill_(77)  # the coordinator may reuse it
        assert not arrival.done
        fake.run_all()
        assert arrival.done
    assert seen == ([(5.0, 5.0)] if meanwhile else [])
    assert model.w.tolist() == [15.0] * 5
    assert model.mean.tolist() == [15.0] * 3
    assert model.count.item() == 5
    assert payload.params[0] is averager._host_copy.params[0]


def test_pinned_memory_is_written_only_after_its_copies_are_complete(fake):
    averager = averager_on(fake, Model())
    with averager._device.activate():
        _, first, _ = averager.start_snapshot()
        assert not first.done
        averager.replace(FlatState(Model(2.0)).live())
        assert first.done
        fake.log.clear()
        averager.replace(FlatState(Model(3.0)).live())
        assert fake.calls("wait_host")


def test_snapshots_use_the_same_memory_again_and_again(fake):
    averager = averager_on(fake, Model())
    with averager._device.activate():
        averager.snapshot(reuse=True)
        num_pinned, num_events = len(fake.calls("pin")), len(fake.events)
        for _ in range(20):
            averager.snapshot(reuse=True)
            averager.apply(FlatState(Model(2.0)).live()).wait()
        assert len(fake.calls("pin")) == num_pinned
        assert len(fake.events) <= num_events + 1


# -- steps ------------------------------------------------------------------------------


def test_no_more_than_three_steps_are_outstanding(fake, device):
    timer = device.new_timer()
    for step in range(10):
        timer.start()
        finished = [name for name in fake.done if name.startswith("step")]
        assert len(finished) == max(0, step - 2)  # it waits for the third step back only
        fake.mark(f"step {step}")
        timer.stop(1)
    assert timer.take(wait=False) == (pytest.approx(0.007), 7)
    assert timer.take(wait=True) == (pytest.approx(0.003), 3)


def test_times_are_read_late_from_reused_events(fake, device):
    timer = device.new_timer()
    for _ in range(50):
        timer.start()
        timer.pause()
        timer.resume()
        timer.stop(2)
    assert len([e for e in fake.events if e.timing]) <= 4 * 4
    seconds, batches = timer.take(wait=False)
    rest, others = timer.take(wait=True)
    assert batches + others == 100
    assert seconds + rest == pytest.approx(50 * 0.002)  # a pause is one tick, not counted
    assert timer.take(wait=True) == (0.0, 0)


def test_the_time_of_one_step_can_be_read_at_any_later_time(fake, device):
    timer = device.new_timer()
    steps = []
    for _ in range(8):
        timer.start()
        steps.append(timer.stop(1))
    assert [step.seconds for step in steps] == [pytest.approx(0.001)] * 8
    assert timer.take(wait=False)[1] == 8


def test_a_step_that_was_never_stopped_is_forgotten(fake, device):
    timer = device.new_timer()
    for _ in range(20):
        timer.start()
        timer.pause()
    timer.resume()
    timer.stop(1)
    assert timer.take(wait=True) == (pytest.approx(0.002), 1)
    assert len([e for e in fake.events if e.timing]) <= 4


def test_a_run_ahead_can_be_chosen(fake):
    device = CudaDevice(GPU, max_run_ahead=1, api=fake)
    with device.activate():
        timer = device.new_timer()
        for step in range(3):
            timer.start()
            assert len(fake.done) == step
            fake.mark("step")
            timer.stop(1)


# -- the worker's thread -------------------------------------------------------------------


def test_activate_makes_the_compute_stream_current_and_runs_backward_in_its_thread(fake, device):
    assert fake.current is device.compute
    assert len({device.compute, device.comm_stream, device.copy_stream}) == 3
    assert not torch.autograd.is_multithreading_enabled()


def test_the_end_of_activate_waits_for_issued_work(fake):
    device = CudaDevice(GPU, api=fake)
    with device.activate():
        fake.mark("compute")
        with fake.stream(device.comm_stream):
            fake.mark("comm")
    assert sorted(fake.done) == ["comm", "compute"]
    assert torch.autograd.is_multithreading_enabled()


def test_leaving_by_an_exception_waits_for_nothing(fake):
    device = CudaDevice(GPU, api=fake)
    with pytest.raises(KeyError), device.activate():
        fail(fake, "compute")
    assert fake.done == []


def test_accumulators_are_made_under_the_compute_stream_and_kept(fake, monkeypatch):
    """D30: a node belongs to the stream under which it was created."""
    device, streams = CudaDevice(GPU, api=fake), []
    real = torch.autograd.graph.get_gradient_edge

    def edge(tensor):
        streams.append(fake.current)
        return real(tensor)

    monkeypatch.setattr(torch.autograd.graph, "get_gradient_edge", edge)
    params = list(Model().parameters())
    with device.activate():
        device.pin_accumulators(params)
        assert streams == [device.compute] * len(params)
        kept = device._accumulators
        monkeypatch.undo()
        assert [torch.autograd.graph.get_gradient_edge(p).node for p in params] == kept
    assert device._accumulators == []


def test_streams_are_there_only_while_the_device_is_active(fake):
    device = CudaDevice(GPU, api=fake)
    with pytest.raises(RuntimeError, match=r"with device\.activate\(\)"), device.comm():
        pass


def test_a_cuda_device_opens_without_cuda():
    assert isinstance(open_device(GPU, 0), CudaDevice)
    assert not torch.cuda.is_initialized()


def test_a_device_with_streams_overrides_every_method_of_the_cpu_that_differs():
    """The base class's methods do nothing; an inherited one would be a missing wait."""
    methods = {name for name, value in vars(Device).items() if callable(value)} - {"now"}
    inherited = methods - {"__init__", "empty"}  # which reads self.device
    assert inherited <= set(vars(CudaDevice))
    carrying = set(vars(DelayedCopies)) & methods
    assert carrying >= {"copying", "new_event", "record", "wait_event", "wait_host", "is_complete"}
    assert carrying >= {"copy", "empty", "empty_pinned", "pin", "to_device", "memory", "reset_peak"}
