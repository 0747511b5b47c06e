"""Losses and scalars of a CUDA device: kept on it, copied in one transfer, read late."""

from __future__ import annotations

import pytest
import torch

from runtime.device.cuda import CudaDevice
from runtime.device.metering import CAPACITY, NUM_BUFFERS, StepMeter, ValueLog
from tests.support.fake_cuda import GPU, FakeCuda

NOTHING = (0.0, 0, {})


@pytest.fixture
def fake():
    return FakeCuda(patience=None)


@pytest.fixture
def device(fake):
    device = CudaDevice(GPU, api=fake)
    with device.activate():
        yield device


@pytest.fixture
def log(device):
    return device.new_log()


def tensor(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def test_a_harvest_returns_complete_values_and_a_later_one_the_rest(fake, log):
    log.push_loss(tensor(2.0), 3)
    assert log.harvest(wait=False) == NOTHING
    log.push_loss(tensor(5.0), 1)
    assert log.harvest(wait=False) == NOTHING
    fake.run_all()
    log.push_loss(tensor(7.0), 1)
    assert log.harvest(wait=False) == (11.0, 4, {})
    assert log.harvest() == (7.0, 1, {})
    assert log.harvest() == NOTHING


def test_waiting_is_one_wait(fake, log):
    for _ in range(3):
        log.push_loss(tensor(1.0), 1)
        log.harvest(wait=False)
    fake.log.clear()
    assert log.harvest() == (3.0, 3, {})
    assert len(fake.calls("wait_host")) == 1


def test_a_harvest_of_many_is_one_copy(fake, log):
    for _ in range(100):
        log.push_loss(tensor(1.0), 2)
        log.push_scalar("norm", tensor(3.0), 2)
    fake.log.clear()
    log.harvest(wait=False)
    assert len(fake.calls("copy")) == len(fake.calls("record")) == 1
    assert log.harvest() == (200.0, 200, {"norm": (600.0, 200)})


def test_the_log_of_a_gpu_returns_the_values_of_a_cpu_log(log):
    generator = torch.Generator().manual_seed(0)
    logs = (log, ValueLog())
    for step in range(50):
        loss = torch.randn((), generator=generator)
        for each in logs:
            each.push_loss(loss, step + 1)
            each.push_scalar("number", 0.5 * step, step)
            each.push_scalar("one", tensor([step], torch.int64), 2)
            each.push_scalar("half", tensor(step, torch.bfloat16), 2)
            each.push_scalar("double", tensor(step / 3, torch.float64), 2)
    assert logs[0].harvest() == logs[1].harvest()


@pytest.mark.parametrize("late", [0, 1])
def test_weights_on_the_device_are_copied_with_their_losses(log, late):
    logs = (log, ValueLog())
    for step in range(1500):  # more than the capacity of a buffer
        for each in logs:
            each.push_scalar("norm", tensor(3.0), tensor(0.5 * step, torch.float64))
            each.push_loss(tensor(float(step)), tensor(float(step % 7)) if step % 2 else 3)
    if late:
        log.harvest(wait=False)
    given = log.harvest()
    assert given == logs[1].harvest()
    assert given[1] == sum(step % 7 if step % 2 else 3 for step in range(1500))


def test_a_bad_loss_is_named_by_its_batch_however_late(fake, log):
    named = []
    log.on_bad_loss = named.append
    for value in (1.0, float("nan"), 2.0, float("inf")):
        log.push_loss(tensor(value), 1)
        log.harvest(wait=False)
    assert named == []
    fake.run_all()
    log.harvest(wait=False)
    assert named == [1, 3]


def test_more_than_a_buffer_holds_travels_in_several(log):
    for value in range(2 * CAPACITY + 5):
        log.push_loss(tensor(float(value)), 1)
    total = sum(range(2 * CAPACITY + 5))
    assert log.harvest() == (total, 2 * CAPACITY + 5, {})


def test_buffers_and_events_are_used_again_and_no_more_are_made(fake, log):
    num_pinned = len(fake.calls("pin"))
    total = 0.0
    for _ in range(5 * NUM_BUFFERS):
        log.push_loss(tensor(1.0), 1)
        total += log.harvest(wait=False)[0]
    assert len(fake.calls("pin")) == num_pinned
    assert len(fake.events) <= NUM_BUFFERS + 1
    assert total + log.harvest()[0] == 5.0 * NUM_BUFFERS


def test_losses_may_lag_the_samples_of_a_report_but_not_of_the_last(fake, device):
    meter = StepMeter(device.new_log(), device.new_timer())
    for _ in range(2):
        meter.timer.start()
        meter.log.push_loss(tensor(4.0), 10)
        meter.timer.stop(1)
        meter.add(1, 10)
    early, last = meter.take(wait=False), meter.take()
    assert (early.num_samples, early.loss_samples, early.compute_s) == (20, 0, 0.0)
    assert (early.num_batches, early.num_timed) == (2, 0)
    assert (last.num_samples, last.loss_samples, last.loss_sum) == (0, 20, 80.0)
    assert (last.num_batches, last.num_timed) == (0, 2)
    assert last.compute_s == pytest.approx(0.002)
