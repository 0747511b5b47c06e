"""Data sets that become resident after the first steps if they fit."""

from __future__ import annotations

import torch
from torch.utils.data import Subset, TensorDataset

from runtime.data.budget import DeviceBudget
from runtime.data.dataset import adapt_dataset
from runtime.data.resident import ResidentData
from runtime.device.base import Device
from tests.support.fake_streams import GIB, DelayedCopies
from tests.support.loading import ALL, INDEX
from tests.support.prefetching import CALIBRATION, EPOCHS, TENSORS, Rig


def resident_total(data_bytes):
    """Total memory of a device with exactly this much free after the first steps."""
    return 2 * (2 * GIB + data_bytes)


def test_a_data_set_that_fits_becomes_resident_after_the_first_steps():
    data_bytes = ResidentData(adapt_dataset(TENSORS)).num_bytes
    assert data_bytes == 512  # 23 samples of 20 bytes, padded
    for spare, fits in ((0, True), (-1, False)):
        context = DelayedCopies()
        context.total_bytes = resident_total(data_bytes + spare)
        with Rig(TENSORS, context=context) as rig:
            rig.loader.submit(EPOCHS[0])
            for _ in range(CALIBRATION):
                rig.use_next()
                assert rig.stage.resident is None
            for _ in range(6 - CALIBRATION):
                rig.use_next()
            assert (rig.stage.resident is not None) is fits
            for plan in EPOCHS[1:]:
                rig.use(plan)
        assert context.num_used == 24


def test_resident_batches_are_in_order_and_need_no_thread():
    with Rig(TENSORS) as rig:
        rig.use(EPOCHS[0])
        assert rig.stage.resident is not None
        for plan in EPOCHS[1:]:
            rig.loader.submit(plan)
        before = len(rig.loader._ready)
        for plan in EPOCHS[1:]:
            for batch in range(6):
                loaded = rig.loader.try_next()
                assert (loaded.epoch, loaded.batch) == (plan.epoch, batch)
                indices = INDEX.indices(plan.epoch, batch)
                assert torch.equal(loaded.data[1], TENSORS[1][indices])
        assert before == len(rig.loader._ready) == 0
        assert rig.loader.try_next() is None
        rig.loader.submit(ALL)
        rig.loader.cancel()
        assert rig.loader.try_next() is None


def test_a_data_set_is_streamed_with_resident_false():
    with Rig(TENSORS, resident=False) as rig:
        rig.use(ALL)
        assert rig.stage.resident is None
        assert rig.stage.depth == 6


def test_workers_on_a_device_share_resident_data():
    data = ResidentData(adapt_dataset(TENSORS))
    context = DelayedCopies()
    budget = DeviceBudget(0.5, 2, margin=0)
    columns = []
    for _ in range(2):
        with Rig(TENSORS, context=context, resident=data, budget=budget) as rig:
            rig.use(ALL)
            assert rig.stage.resident is data
            columns.append(rig.loader._reader._columns)
            used = context.allocated_bytes
    assert columns[0] is columns[1]
    assert context.allocated_bytes == used == 2 * 512


def test_a_subset_copies_its_own_rows_only():
    rows = [3, 1, 4, 15, 9, 2, 6, 5]
    data = ResidentData(adapt_dataset(Subset(TensorDataset(*TENSORS), rows)))
    (numbers, _) = data.load(Device())
    assert numbers.tolist() == rows
    assert data.num_bytes == 512
