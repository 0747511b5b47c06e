"""Stream order between a loop and its replicas, on a fake CUDA."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from runtime.collective import create_collectives
from runtime.device.cuda import CudaDevice
from runtime.device.cuda_api import StreamSync
from runtime.loop import runner as runner_file
from runtime.loop.accumulation import AccumulationSchedule
from runtime.loop.balance import Balancer
from runtime.loop.collective_group import CollectiveGroup
from runtime.loop.ddp_config import DdpConfig
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.mirror import ModelMirror
from runtime.loop.module import ReplicatedModule
from runtime.loop.rank_group import RankGroup
from runtime.loop.rank_replica import GradientReduction, RankReplica
from runtime.loop.rank_threads import Job
from runtime.loop.runner import Runner
from runtime.loop.scatter import InputRules
from runtime.loop.threaded import ThreadedEngine
from runtime.replica.max_norm import MaxNorm
from tests.support.fake_cuda import CPU, GPU, FakeCuda
from tests.support.own_loop import (
    WAIT_S,
    OneDevice,
    adamw,
    assert_close,
    assert_identical,
    loss_fn,
    make_batch,
)

OTHER = torch.device("cuda", 1)
NUM_REPLICAS = 2


def wait_both_ways(fake, sync):
    """The caller on one stream and a replica on another; returns both."""
    mine, theirs = fake.new_stream(GPU), fake.new_stream(GPU)
    with fake.stream(mine):
        fake.mark("input")
        events = sync.marks()
    with fake.stream(theirs):
        sync.wait(GPU, events)
        fake.mark("replica")
        done = sync.mark(GPU)
    with fake.stream(mine):
        sync.join([done, None])
        fake.mark("after")
    return mine, theirs


@pytest.mark.parametrize("first", [0, 1])
def test_replicas_streams_wait_for_the_callers_and_vice_versa(first):
    fake = FakeCuda(patience=None)
    streams = wait_both_ways(fake, StreamSync([GPU], fake))
    fake.run(streams[first], streams[1 - first])
    assert fake.done == ["input", "replica", "after"]
    assert fake.calls("wait_host") == []  # the host does not wait


def test_inputs_on_a_gpu_without_a_replica_are_waited_for_too():
    fake = FakeCuda(patience=None, allow_default=True)
    sync = StreamSync([CPU], fake)
    x = fake.place(torch.ones(1), OTHER)
    assert sync.marks([fake.place(torch.ones(1), CPU)]) == []
    assert len(sync.marks([x])) == 1
    assert len(StreamSync([GPU, GPU], fake).marks([x])) == 2


def test_a_replica_on_the_cpu_waits_with_the_host():
    fake = FakeCuda(patience=None, allow_default=True)
    sync = StreamSync([CPU, GPU], fake)
    sync.wait(CPU, sync.marks())
    assert len(fake.calls("wait_host")) == 1
    assert sync.mark(CPU) is None


class PosingSync(StreamSync):
    """Treats replicas with CPU tensors as replicas on a GPU."""

    def __init__(self, api):
        super().__init__([GPU], api)

    def wait(self, device, marks):
        super().wait(GPU, marks)

    def mark(self, device, event=None):
        return super().mark(GPU, event)


class Marking(nn.Module):
    """A net that records its stream in forward and in backward."""

    fake = None  # not an attribute of the net, which is copied

    def __init__(self, fake):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        Marking.fake = fake

    def forward(self, x):
        self.fake.mark("forward")
        out = self.net(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.fake.mark("backward"))
        return out


class MarkingAdamW(torch.optim.AdamW):
    fake = None

    def step(self, closure=None):
        self.fake.mark("step")
        return super().step(closure)


@pytest.fixture
def fake(monkeypatch):
    found = FakeCuda(patience=1, allow_default=True, prompt=True)
    monkeypatch.setattr(
        runner_file, "open_device", lambda device, n: CudaDevice(CPU, api=found, max_run_ahead=9)
    )
    monkeypatch.setattr(MarkingAdamW, "fake", found)
    return found


def posing_module(fake, net, config=None):
    """Replicas whose threads work on streams of the fake CUDA."""
    config = config or DdpConfig()
    devices = (CPU,) * NUM_REPLICAS
    group = CollectiveGroup(partial(create_collectives, NUM_REPLICAS))
    recorder = LoopRecorder(None)
    runner = Runner(devices, group, recorder, PosingSync(fake))
    mirror = ModelMirror(net, devices)
    replicas = [RankReplica(rank, context, mirror) for rank, context in enumerate(runner.contexts)]
    accumulation = AccumulationSchedule.of(NUM_REPLICAS, config, use_el_che=True)
    balancer = Balancer(NUM_REPLICAS)
    optimizer = optim(net.parameters())
    reduction = GradientReduction(mirror, replicas, runner, recorder)
    engine = ThreadedEngine(
        RankGroup(runner, mirror, optimizer, replicas, reduction),
        balancer,
        accumulation,
        recorder,
        MaxNorm(None),
        InputRules(whole=()),
    )
    return ReplicatedModule(engine)


def test_replicas_are_built_after_their_threads_have_entered_their_contexts(fake, monkeypatch):
    waited = threading.Event()
    activate, wait = CudaDevice.activate, Job.wait

    @contextmanager
    def late(device):
        assert waited.wait(WAIT_S)
        with activate(device):
            yield

    def waiting(job, *args, **kwargs):
        waited.set()
        return wait(job, *args, **kwargs)

    monkeypatch.setattr(CudaDevice, "activate", late)
    monkeypatch.setattr(Job, "wait", waiting)
    with posing_module(fake, Marking(fake)):
        assert waited.is_set()


def optim(params):
    return MarkingAdamW(params, 1e-2)


@pytest.mark.parametrize("replicas_first", [False, True])
def test_a_step_is_in_order_in_both_directions(fake, replicas_first):
    caller = fake.new_stream(GPU)
    with posing_module(fake, Marking(fake)) as model, fake.stream(caller):
        for _ in range(3):
            fake.done.clear()
            fake.mark("input")
            out = model(make_batch(6)[0])
            fake.mark("loss")
            out.sum().backward()
            fake.mark("clip")
            model.step()
            fake.mark("after")
            if replicas_first:  # as far as possible
                fake.run(*(stream for stream in fake.streams if stream is not caller))
            fake.run(caller)
            assert fake.done == [
                "input",
                *["forward"] * NUM_REPLICAS,
                "loss",
                *["backward"] * NUM_REPLICAS,
                "clip",
                "step",
                "after",
            ]
    assert fake.violations == []


@pytest.mark.parametrize("num_presses", [1, 2])
def test_after_ctrl_c_the_callers_stream_waits_for_the_replicas_remaining_work(
    fake, monkeypatch, num_presses
):
    """A second one interrupts the wait for them, too; the next call then waits."""
    wait, left = Job.wait, [1] * num_presses

    def interrupted(job, *args):
        done = wait(job, *args)
        if left:
            left.pop()
            raise KeyboardInterrupt
        return done

    caller = fake.new_stream(GPU)
    with posing_module(fake, Marking(fake)) as model, fake.stream(caller):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr(Job, "wait", interrupted)
            model(make_batch(6)[0])
        fake.done.clear()
        assert left == []
        model.zero_grad()  # any call drains the replicas
        fake.mark("after")
        fake.run(caller)
        assert fake.done == [*["forward"] * NUM_REPLICAS, "after"]


def test_a_replica_never_works_on_the_callers_stream(fake):
    names = {}

    class Noting(Marking):
        def forward(self, x):
            names[threading.current_thread().name] = fake.current.name
            return super().forward(x)

    caller = fake.new_stream(GPU)
    with posing_module(fake, Noting(fake)) as model, fake.stream(caller):
        model(make_batch(6)[0])
    assert caller.name not in names.values()
    assert len(names) == NUM_REPLICAS


def test_training_over_streams_equals_one_device(fake):
    net = Marking(fake)
    net.net[1].eval()  # its statistics depend on the shards
    with posing_module(fake, net) as model:
        alone = OneDevice(net.net, adamw)
        alone.optimizer = torch.optim.AdamW(alone.model.parameters(), 1e-2)
        for loop in (model, alone):
            loop.module.net[1].eval() if loop is model else loop.model[1].eval()
        for _ in range(4):
            x, y = make_batch(7)
            for loop in (model, alone):
                nn.functional.cross_entropy(loop(x), y).backward()
                loop.step()
            assert_identical(model)
            assert_close(model.module.net, alone.model)


def test_rounds_are_timed_by_events(fake):
    with posing_module(fake, Marking(fake), DdpConfig(max_anchor=2)) as model:
        assert model.batch_counts == (2, 2)
        for _ in range(4):
            model.accumulate(loss_fn, [make_batch(4) for _ in range(4)])
            model.step()
            assert_identical(model)
        fake.run_all()
        assert sum(model.chunk_ratios) == pytest.approx(1.0)


def test_no_accumulator_of_a_replicas_stream_is_left_for_the_callers(fake):
    """PyTorch warns where a gradient comes from another stream than its accumulator was made on.

    Rank 0's model is the user's too, who may train it on a stream of its own.
    """

    def accumulators():
        edges = map(torch.autograd.graph.get_gradient_edge, model.module.parameters())
        return [edge.node.metadata for edge in edges]

    with posing_module(fake, Marking(fake)) as model:
        for _ in range(2):
            x, y = make_batch(8)
            nn.functional.cross_entropy(model(x), y).backward()
            for metadata in accumulators():
                assert "seen" not in metadata
                metadata["seen"] = True
            model.step()


class PerDevice(FakeCuda):
    """Records on which device each stream waits."""

    def __init__(self):
        super().__init__(patience=None, allow_default=True)
        self.waiting = []

    def wait_event(self, event, stream=None):
        self.waiting.append(getattr(self._local, "device", GPU))
        super().wait_event(event, stream)


def test_the_stream_of_a_source_on_another_gpu_waits_for_its_owner_as_the_targets_does():
    """pytorch#196257: a copy between GPUs reads on the source's current stream of this thread."""
    fake = PerDevice()
    target, source = torch.device("cuda", 1), fake.place(torch.ones(1), GPU)
    sync = StreamSync([target], fake)
    marks = sync.marks([source])
    sync.receive(target, marks, [source])
    assert set(fake.waiting) == {target, GPU}
    assert [device for device in fake.waiting if device == GPU] == [GPU] * len(marks)


def test_a_caller_waits_for_copies_from_a_gpu_without_a_replica():
    fake = PerDevice()
    source = fake.place(torch.ones(1), OTHER)
    sync = StreamSync([GPU], fake)
    sync.join(sync.marks([source]), [source])
    assert set(fake.waiting) == {GPU, OTHER}
