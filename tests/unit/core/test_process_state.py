"""State of PyTorch that belongs to the process, used by several threads at once."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import cached

from runtime import current_worker
from runtime.core import process_state
from runtime.core.threads import prepare_threads
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder

prepare_threads()

# The first use of forward-mode AD compiles decompositions with it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def slope_by_jvp(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def slope_by_dual_level(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            torch.sin(forward_ad.make_dual(x, torch.ones_like(x)))
        ).tangent.clone()


def slope_by_jacfwd(x):
    return torch.func.jacfwd(torch.sin)(x).diagonal()


WAYS = [slope_by_jvp, slope_by_dual_level, slope_by_jacfwd]


@pytest.mark.parametrize("way", WAYS)
def test_forward_ad_of_one_thread_waits_for_that_of_another(way):
    x = torch.linspace(0, 1, 5)
    inside, done = threading.Event(), threading.Event()

    def holds():
        with forward_ad.dual_level():
            inside.set()
            assert not done.wait(0.05)  # the other thread cannot have completed
        assert done.wait(WAIT_S)

    def follows():
        assert inside.wait(WAIT_S)
        slope = way(x)
        done.set()
        return slope

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(holds), pool.submit(follows)
        torch.testing.assert_close(second.result(WAIT_S), x.cos())
        first.result(WAIT_S)


def test_forward_ad_nests_within_a_thread():
    x = torch.linspace(0, 1, 5)
    ones = torch.ones_like(x)
    second = torch.func.jvp(slope_by_jvp, (x,), (ones,))[1]
    torch.testing.assert_close(second, -x.sin())


def test_forward_ad_that_another_thread_never_leaves_is_named(monkeypatch):
    monkeypatch.setattr(process_state, "FORWARD_AD_TIMEOUT_S", 0.01)
    with (
        forward_ad.dual_level(),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="forward-mode AD"),
    ):
        pool.submit(slope_by_jvp, torch.ones(2)).result(WAIT_S)


def test_cached_parametrizations_are_those_of_the_thread():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    with ExitStack() as outer, ThreadPoolExecutor(1) as pool:
        outer.enter_context(cached())
        mine = layer.weight
        assert layer.weight is mine

        def other():
            plain = layer.weight
            with cached():
                first, again = layer.weight, layer.weight
            return plain, first, again, layer.weight

        plain, first, again, after = pool.submit(other).result(WAIT_S)
        assert first is again
        assert len({id(value) for value in (mine, plain, first, after)}) == 4
        assert layer.weight is mine  # that another thread has left the context changes nothing
    assert layer.weight is not mine
    assert not parametrize._cache_enabled


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["sync", "cadence"])
def test_weight_norm_within_cached_trains_as_on_one_device(way):
    def train(model, batch):
        with cached():
            return ((model(batch[0]) + model(batch[0]) - batch[1]) ** 2).mean()

    def net(device):
        torch.manual_seed(0)
        return torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)).double()

    x = torch.randn(32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = (x, x[:, :1])

    def final(ranks):
        b = builder(
            model=net,
            optim=lambda params: torch.optim.SGD(params, 0.05),
            train=train,
            dataset=data,
            batch_size=4 * (3 - ranks),
            epochs=2,
            ranks=ranks,
            way=way,
        )
        return b.seed(0).run().join(WAIT_S)

    together, alone = final(2), final(1)
    if way[0] is SYNC:
        for name, value in alone.params.items():
            torch.testing.assert_close(together.params[name], value, rtol=0, atol=1e-12)
    assert together.metrics[-1].avg_loss < together.metrics[0].avg_loss


def test_anomaly_detection_that_overlaps_in_two_ranks_is_off_after_the_run(caplog):
    meeting = threading.Barrier(2)

    def train(model, batch):
        first = current_worker().rank == 0
        if not first:
            meeting.wait(WAIT_S)  # rank 0 is inside
        with torch.autograd.set_detect_anomaly(True):
            if first:
                meeting.wait(WAIT_S)
            meeting.wait(WAIT_S)  # both are
            if not first:
                meeting.wait(WAIT_S)  # rank 0 has left
        if first:
            meeting.wait(WAIT_S)
        return model(batch[0]).square().mean()

    b = builder(
        model=lambda device: nn.Linear(2, 1),
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train,
        dataset=(torch.randn(4, 2),),
        batch_size=2,
        epochs=1,
        ranks=2,
        way=(SYNC, THREAD),
    )
    with caplog.at_level(logging.WARNING):
        b.run().join(WAIT_S)
    assert not torch.is_anomaly_enabled()
    assert any("anomaly detection was on" in r.getMessage() for r in caplog.records)


def test_a_default_dtype_that_a_worker_sets_is_restored(caplog):
    def train(model, batch):
        torch.set_default_dtype(torch.float64)
        return model(batch[0]).square().mean()

    b = builder(
        model=lambda device: nn.Linear(2, 1),
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train,
        dataset=(torch.randn(4, 2, dtype=torch.float32),),
        batch_size=2,
        epochs=1,
        ranks=1,
        way=(SYNC, THREAD),
    )
    try:
        b.run().join(WAIT_S)
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert any("default dtype" in r.getMessage() for r in caplog.records)
