"""Prefetching to a GPU: correct batches under delay kernels, without synchronisation."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import loading
from tests.gpu.delays import GPU
from tests.gpu.loading import PLANS, SCENARIOS, DeviceRows, Rows, rig_on, tensors
from tests.gpu.no_sync import no_sync

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dataset", [Rows, tensors], ids=["read", "gathered"])
@pytest.mark.parametrize("slow", ["compute", "copy", "both"])
def test_streamed_batches_are_exact_under_delay_kernels(dataset, slow):
    assert loading.exact(GPU, dataset(), slow=slow, depth=2) == 2


@pytest.mark.parametrize("slow", ["compute", "both"])
def test_batches_created_on_the_device_by_the_data_set_are_exact(slow):
    loading.exact(GPU, DeviceRows(GPU), slow=slow)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_batches_are_exact_in_every_scenario(scenario):
    scenario(GPU)


@pytest.mark.parametrize("resident", [True, False])
def test_the_loop_never_synchronises_after_calibration(resident):
    with rig_on(GPU, tensors(), resident=resident) as rig:
        rig.use_plan(PLANS[0], late=False)
        assert (rig.stage.resident is not None) is resident
        with no_sync():
            rig.use_plan(PLANS[1], late=False)
        rig.check()


def test_resident_batches_equal_streamed_batches():
    taken = []
    for resident in (True, False):
        with rig_on(GPU, tensors(), resident=resident) as rig:
            taken.append([])
            for plan in PLANS:
                rig.loader.submit(plan)
                taken[-1] += [rig.next().data[1][:, 0].clone() for _ in range(plan.num_batches)]
            torch.cuda.synchronize(GPU)
    assert torch.equal(torch.cat(taken[0]), torch.cat(taken[1]))


def test_slots_are_allocated_once():
    with rig_on(GPU, Rows()) as rig:
        for _ in range(2):
            rig.loader.submit(PLANS[0])
            for _ in range(PLANS[0].num_batches):
                rig.next()
        allocated = torch.cuda.memory_stats(GPU)["allocation.all.allocated"]
        rig.loader.submit(PLANS[1])
        for _ in range(PLANS[1].num_batches):
            rig.next()
        assert torch.cuda.memory_stats(GPU)["allocation.all.allocated"] == allocated
