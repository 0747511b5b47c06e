"""Workers whose device runs late: their messages, the order of these, and pending copies."""

from __future__ import annotations

import pytest
import torch

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from runtime import run as run_module
from runtime.collective import StagedThreadCollective, create_collectives
from runtime.data.data_path import DataPath
from runtime.device.base import Device
from runtime.device.cuda import CudaDevice, open_device
from runtime.replica import build as replica
from tests.support.fake_cuda import GPU, FakeCuda, standing_in
from tests.support.graphing import Boundless
from tests.support.running import (
    ASYNC,
    CADENCE,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    local_ways,
    train,
)
from tests.unit.worker.test_worker import BATCH, Alone


@pytest.fixture
def fake():
    return FakeCuda(patience=None)


@pytest.fixture
def device(fake):
    device = CudaDevice(GPU, api=fake)
    with device.activate():
        yield device


@pytest.fixture
def alone(device):
    alone = Alone(world_size=2, device=device)
    yield alone
    alone.worker.close()


def kinds(reports):
    return [type(report) for report in reports]


def test_a_snapshot_is_sent_once_its_copy_completes_and_messages_keep_their_order(fake, alone):
    alone.worker.train_step(BATCH)
    alone.send(m.RequestParams(round=1))
    alone.worker.handle_control()
    alone.worker.train_step(BATCH)
    alone.worker.report_timing()
    alone.worker.handle_control()
    assert alone.take() == []
    fake.run_all()
    alone.worker.handle_control()
    snapshot, report = alone.take()
    assert (type(snapshot), type(report)) == (m.ParamSnapshot, m.BatchReport)
    assert snapshot.payload.params[0][0].item() == 1.0
    assert (snapshot.num_batches, snapshot.report.stats.num_batches) == (1, 1)
    assert report.stats.num_batches == 1


def test_an_average_is_acknowledged_once_its_copy_completes(fake, alone):
    alone.worker.train_step(BATCH)
    alone.send(m.RequestParams(round=1))
    alone.worker.handle_control()
    fake.run_all()
    alone.worker.handle_control()
    (snapshot,) = alone.take()
    average = m.Payload(params=tuple(t.clone() + 4 for t in snapshot.payload.params))
    alone.worker.train_step(BATCH)
    alone.send(m.Update(round=1, average=average))
    alone.worker.handle_control()
    assert alone.take() == []
    assert alone.w == 6.0  # 1 + 4, and the step since
    alone.worker.handle_control()
    assert alone.take() == []
    fake.run_all()
    alone.worker.handle_control()
    assert kinds(alone.take()) == [m.SyncAck]


def test_a_worker_sends_held_messages_before_it_waits(fake, alone):
    """The coordinator may wait for one of them."""
    alone.worker.train_step(BATCH)
    alone.send(m.RequestParams(round=1))
    alone.worker.handle_control()
    assert alone.take() == []
    alone.send(m.Shutdown(snapshot=True))
    assert alone.worker.wait_for_epoch_plan() is None
    alone.worker.send_final_snapshot()
    alone.worker.report_exiting()
    assert kinds(alone.take()) == [m.ParamSnapshot, m.FinalSnapshot, m.Exiting]


def test_a_new_round_first_sends_the_reply_to_the_old_one(fake, alone):
    """Both use the same memory."""
    alone.worker.train_step(BATCH)
    alone.send(m.RequestParams(round=1), m.RequestParams(round=2))
    alone.worker.handle_control()
    (first,) = alone.take()
    assert first.round == 1
    fake.run_all()
    alone.worker.handle_control()
    (second,) = alone.take()
    assert second.round == 2


def test_a_step_waits_only_for_the_event_of_the_run_ahead(fake, alone):
    for _ in range(10):
        alone.worker.train_step(BATCH)
    waits = [number for _, number in fake.calls("wait_host")]
    fake.log.clear()
    for _ in range(10):
        alone.worker.train_step(BATCH)
        alone.worker.handle_control()
    assert waits
    assert len(fake.calls("wait_host")) == 10
    assert fake.calls("copy") == []


def test_the_time_of_a_step_is_a_handle(alone):
    result = alone.worker.train_step(BATCH)
    assert result.compute_s == pytest.approx(0.001)


def test_a_halted_rank_has_no_pending_work_on_its_device(fake, device):
    """A peer may copy its replica as soon as it has reported its position."""
    (end,) = create_collectives(1)
    alone = Alone(policy=ApplyPolicy.SYNC, survives=True, collective=end, device=device)
    alone.send(m.Halt(generation=0), m.Shutdown(snapshot=False))
    fake.mark("step")
    alone.worker.run()
    assert fake.done == ["step"]
    assert kinds(alone.take()) == [m.Ready, m.Halted, m.Exiting]
    alone.worker.close()
    end.close()


def test_rank_0_is_built_before_its_weights_are_copied(fake, device, monkeypatch):
    """Other ranks copy them on their own streams."""

    def model(where):
        fake.mark("initialised")
        return torch.nn.Linear(2, 2)

    published = []
    publish = replica.BuildOrder.publish
    monkeypatch.setattr(
        replica.BuildOrder, "publish", lambda *a: (published.append(list(fake.done)), publish(*a))
    )
    Alone(model=model, device=device).worker.close()
    assert published == [["initialised"]]


def test_a_worker_keeps_its_accumulators_and_reduces_in_the_comm_stream(fake, device):
    (end,), streams = create_collectives(1), []
    alone = Alone(device=device, policy=SYNC, collective=end)
    assert len(device._accumulators) == 1
    end.weighted_mean_ = lambda *_: streams.append(fake.current)
    alone.worker.train_step(BATCH)
    assert streams == [device.comm_stream]
    alone.worker.close()
    end.close()


# -- whole runs --------------------------------------------------------------------------


def pose(monkeypatch, make_fake=lambda: FakeCuda(patience=2)):
    """Make CPU devices pose as GPUs in runs, except for loading; yields the stand-ins."""
    fakes = []

    def open_posing(device, num_cpu_workers):
        fakes.append(make_fake())
        return CudaDevice(GPU, api=fakes[-1], memory=Boundless())

    def data_path(config, adapter, index, contexts):
        return DataPath(config, adapter, index, [Device(1) for _ in contexts])

    monkeypatch.setattr(run_module, "open_device", open_posing)
    monkeypatch.setattr(run_module, "DataPath", data_path)
    return fakes


@pytest.fixture
def posing(monkeypatch):
    fakes = pose(monkeypatch)
    yield fakes
    assert [fake.violations for fake in fakes] == [[] for _ in fakes]


@local_ways
def test_a_run_trains_every_sample_once(way, posing):
    state = train(way=way, dataset=41, epochs=3)
    steps = state.params["w"].item()
    assert len(posing) == 2
    assert [e.num_samples for e in state.metrics] == [41] * 3
    assert all(e.avg_loss <= 0 for e in state.metrics)
    if way[0] is SYNC:
        assert steps == 3 * 11  # 21 batches an epoch, two a step


def test_a_lockstep_run_on_devices_equals_one_on_cpus(monkeypatch):
    def linear(device):
        layers = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        return torch.nn.Sequential(*layers).to(device, torch.float64)

    def loss(model, batch):
        return (model(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()

    def state():
        settings = {"model": linear, "train": loss, "dataset": (data,), "batch_size": 4}
        optim = {"optim": lambda params: torch.optim.Adam(params, 0.01)}
        b = builder(**settings, **optim, way=(SYNC, THREAD), epochs=2).seed(3)
        return b.run().join(WAIT_S)

    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = state()
    pose(monkeypatch)
    actual = state()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], tensor)
    losses = [[e.avg_loss for e in state.metrics] for state in (actual, expected)]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)
def test_two_workers_on_one_gpu_exchange_through_pinned_memory(policy, monkeypatch):
    """Each rank's tensors pose as GPU tensors, for the collective too."""
    fake = FakeCuda(patience=2)
    pose(monkeypatch, lambda: fake)
    real, ends = run_module.create_collectives, []

    def create(world_size, kind, devices, timeout_s):
        made = real(world_size, kind, [GPU] * world_size, timeout_s)
        ends.extend(made)
        return made

    monkeypatch.setattr(run_module, "create_collectives", create)
    with standing_in(fake):
        state = train(way=(policy, THREAD), dataset=80)
    assert [type(end) for end in ends] == [StagedThreadCollective] * 2
    assert state.metrics[0].num_samples == 80
    assert state.metrics[0].num_averagings > 0
    assert fake.violations == []


def test_the_host_twin_of_a_cpu_payload_is_the_payload():
    device = open_device(torch.device("cpu"), 1)
    payload = m.Payload(params=(torch.ones(2),))
    assert device.host_twin(payload) is payload
    assert device.fetch(payload, payload) is None
    assert device.stage(payload, payload) is payload
    assert device.arrival() is None
