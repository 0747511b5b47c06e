"""Batches on their way to a real GPU: exact under delays, and without a wait."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import loading
from tests.gpu.delays import GPU
from tests.gpu.loading import PLANS, TROUBLES, MadeThere, Rows, rig_on, tensors
from tests.gpu.no_sync import no_sync

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dataset", [Rows, tensors], ids=["read", "gathered"])
@pytest.mark.parametrize("slow", ["compute", "copy", "both"])
def test_streamed_batches_are_exact_under_delay_kernels(dataset, slow):
    assert loading.exact(GPU, dataset(), slow=slow, depth=2) == 2


@pytest.mark.parametrize("slow", ["compute", "both"])
def test_batches_that_the_data_set_makes_on_the_device_are_exact(slow):
    loading.exact(GPU, MadeThere(GPU), slow=slow)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_troubled_data_set_does_no_harm(trouble):
    trouble(GPU)


@pytest.mark.parametrize("resident", [True, False])
def test_the_loop_waits_for_no_stream_once_it_is_calibrated(resident):
    with rig_on(GPU, tensors(), resident=resident) as rig:
        rig.use_plan(PLANS[0], late=False)
        assert (rig.stage.resident is not None) is resident
        with no_sync():
            rig.use_plan(PLANS[1], late=False)
        rig.check()


def test_resident_batches_are_those_that_are_streamed():
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
