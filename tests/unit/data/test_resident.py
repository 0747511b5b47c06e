"""Data sets kept on a device with ``resident(True)``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from runtime.data import data_path, resident
from runtime.data.batches import Position
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import LoaderSpec
from runtime.data.resident import ResidentData, ResidentLoader, ResidentReader, can_be_resident
from runtime.device.base import Device
from runtime.device.memory import MemoryReading
from tests.support.fake_streams import DelayedCopies
from tests.support.loading import ALL, INDEX, PLANS, SEED, SIZE, N, Noisy, assert_is_plan
from tests.support.running import WAIT_S, Trace, builder

COLUMNS = (torch.arange(N), torch.arange(N * 2.0).reshape(N, 2))


def mapped(tmp_path, values):
    path = tmp_path / "values.npy"
    np.save(path, values)
    return np.load(path, mmap_mode="r")


def loader_of(dataset, context=None):
    adapter = adapt_dataset(dataset)
    context = Device() if context is None else context
    index = EpochIndex(N, SIZE, SEED)
    spec = LoaderSpec(adapter=adapter, index=index, device=context.device, seed=SEED, rank=0)
    return ResidentLoader(spec, data=ResidentData(adapter), context=context)


def test_only_tabular_data_can_be_resident():
    assert can_be_resident(adapt_dataset(COLUMNS))
    assert can_be_resident(adapt_dataset(Subset(TensorDataset(*COLUMNS), [1])))
    assert not can_be_resident(adapt_dataset(Noisy()))
    assert not can_be_resident(adapt_dataset([1.0, 2.0]))


@pytest.mark.parametrize("kind", ["tensors", "mapped"])
def test_resident_plans_are_gathered_exactly_and_in_order(kind, tmp_path):
    dataset = COLUMNS if kind == "tensors" else (mapped(tmp_path, np.arange(N)), COLUMNS[1])
    loader = loader_of(dataset)
    for plan in PLANS:
        loader.submit(plan)
    for plan in PLANS:
        assert_is_plan([loader.try_next() for _ in range(plan.num_batches)], plan)
    assert loader.try_next() is None
    assert loader.close()


def test_the_size_includes_all_columns_with_their_dtypes(tmp_path):
    adapter = adapt_dataset((mapped(tmp_path, np.zeros((N, 5), np.float16)), *COLUMNS))
    assert adapter.sample_bytes == 5 * 2 + 8 + 2 * 4
    assert ResidentData(adapter).num_bytes == 1024  # 26 bytes times 23, padded


def test_data_is_copied_in_chunks(monkeypatch):
    monkeypatch.setattr(resident, "_CHUNK_BYTES", 5 * 16)
    lengths = []

    class Counts(DelayedCopies):
        def copy(self, target, source):
            lengths.append(len(source))
            super().copy(target, source)

    context = Counts()
    columns = ResidentData(adapt_dataset(COLUMNS)).load(context)
    assert lengths == [5, 5] * 4 + [3, 3]
    # Other workers may read immediately, in any stream.
    assert torch.equal(columns[1], COLUMNS[1])


def test_permutations_of_old_epochs_are_freed():
    reader = ResidentReader(ResidentData(adapt_dataset(COLUMNS)), INDEX, Device())
    for epoch in range(6):
        assert reader.read(Position(epoch, 0)).data[0].tolist() == INDEX.indices(epoch, 0).tolist()
    assert list(reader._orders) == [3, 4, 5]


def test_data_larger_than_the_devices_free_memory_is_refused_with_both_sizes():
    class Full(DelayedCopies):
        def memory(self):
            return MemoryReading(
                total_bytes=4096, free_bytes=100, reserved_bytes=500, active_bytes=400, peak_bytes=0
            )

    loader = loader_of(COLUMNS, Full())
    with pytest.raises(ValueError, match=r"needs 512 bytes and cpu has 200 free; use resident\(F"):
        loader.submit(ALL)


def test_a_closed_loader_holds_no_data():
    loader = loader_of(COLUMNS)
    loader.submit(ALL)
    assert loader.close()
    assert loader._reader is None
    assert loader.try_next() is None
    with pytest.raises(RuntimeError, match="closed"):
        loader.submit(ALL)


# -- whole runs ------------------------------------------------------------------------


def test_a_run_loads_memory_maps_into_memory_with_resident_true(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        data_path, "ResidentLoader", lambda *a, **k: made.append(1) or ResidentLoader(*a, **k)
    )
    trace = Trace()
    b = builder(dataset=(mapped(tmp_path, np.arange(20)),), train=trace, epochs=2)
    state = b.resident(True).run().join(WAIT_S)
    assert len(made) == 2
    assert [m.num_samples for m in state.metrics] == [20, 20]
    for epoch in range(2):
        seen = [index for _, indices in trace.of_epoch(epoch) for index in indices]
        assert sorted(seen) == list(range(20))


def test_run_refuses_resident_data_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(data_path, "available_host_bytes", lambda: 100)
    b = builder(dataset=(mapped(tmp_path, np.arange(200)),)).resident(True)
    with pytest.raises(ValueError, match=r"needs 2,048 bytes and the host has 100 available"):
        b.run()


@pytest.mark.parametrize("flag", [True, False])
def test_tensors_in_memory_are_not_copied_for_cpu_devices(flag, monkeypatch):
    monkeypatch.setattr(data_path, "available_host_bytes", lambda: 0)
    assert builder(dataset=8).resident(flag).run().join(WAIT_S).metrics[0].num_samples == 8
