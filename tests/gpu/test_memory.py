"""GPU memory of a run: within the budget, named in out-of-memory errors, freed at the end."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from runtime import Trainer
from runtime.device.memory import CAPS, MEMORY
from tests.gpu import runs
from tests.gpu.delays import GPU
from tests.gpu.loading import WIDTH, Rows
from tests.gpu.loading import N as NUM_ROWS
from tests.gpu.runs import BUDGET_GIB, CADENCE, OVER_CPU, SYNC, THREAD, WAYS, learn, name_of

pytestmark = pytest.mark.gpu

GIB = 2**30
WAIT_S = 60.0


def reserved(what):
    return torch.cuda.memory_stats(GPU)[f"reserved_bytes.all.{what}"]


@pytest.fixture(autouse=True)
def _empty_cache():
    """Free what earlier tests left in the caching allocator."""
    gc.collect()
    torch.cuda.synchronize(GPU)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)


def fraction_of(budget_gib):
    total = MEMORY.total_bytes(GPU)
    if total < budget_gib * GIB:
        pytest.skip(f"needs a device with {budget_gib} GiB")
    return budget_gib * GIB / total


def train(dataset, *, budget_gib, ranks=1, batch_size=8, hidden=1024):
    def train_fn(model, batch):
        return model(batch[1]).square().mean()

    def model(device):
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, 1)).to(device)

    handle = (
        Trainer.builder(model, lambda p: torch.optim.SGD(p, 1e-9, fused=True), train_fn)
        .dataset(dataset)
        .batch_size(batch_size)
        .num_epochs(1)
        .devices([GPU] * ranks)
        .policy("cadence")
        .vram_fraction(fraction_of(budget_gib))
        .run()
    )
    return handle.join(WAIT_S)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget_gib", [2, 8, 32])
def test_memory_stays_within_the_budget(budget_gib, ranks):
    # Larger than the small budget, so streamed there; resident with the others.
    rows = 2 * GIB // (WIDTH * 4) + 10_000
    data = (torch.arange(rows), torch.zeros(1, WIDTH).expand(rows, -1))
    before = MEMORY.fraction(GPU)
    state = train(data, budget_gib=budget_gib, ranks=ranks, batch_size=4096)
    assert state.metrics[0].num_samples == rows
    assert reserved("peak") <= budget_gib * GIB
    assert (reserved("peak") > 2 * GIB) is (budget_gib > 2)
    assert MEMORY.fraction(GPU) == pytest.approx(before, abs=1e-6)
    assert not CAPS._wanted[GPU]


def test_a_model_larger_than_the_budget_raises_an_error_that_names_the_budget():
    with pytest.raises(RuntimeError, match=r"budget of 1\.00 GiB.*smaller batch_size"):
        train(Rows(), budget_gib=1, hidden=100_000)


def grab():
    torch.empty(2 * BUDGET_GIB * GIB, dtype=torch.uint8, device=GPU)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_out_of_memory_in_one_of_two_workers_ends_the_run_and_names_the_budget(way):
    runs.exhaust([GPU] * 2, way, grab, rf"budget of {BUDGET_GIB}\.00 GiB.*larger vram_fraction")
    # The device is usable by the next run.
    state = learn([GPU, GPU], way, epochs=1).join(WAIT_S)
    assert state.metrics[0].num_samples == runs.N


def test_every_sample_is_trained_once_through_slots():
    assert train(Rows(), budget_gib=2).metrics[0].num_samples == NUM_ROWS


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=name_of)
def test_repeated_runs_use_no_more_memory(way):
    """Caches and workspaces belong to streams, which later runs reuse.

    New streams in each run would add 20 of cuBLAS's workspaces of 32 MiB in ten runs. A
    thread that uses another stream than before may allocate one workspace.
    """
    taken = []
    for _ in range(15):
        learn([GPU, GPU], way, model=runs.Norm, train=runs.adam_like, epochs=1).join(WAIT_S)
        taken.append(reserved("current"))
    assert taken[-1] - taken[4] < 256 * 2**20
