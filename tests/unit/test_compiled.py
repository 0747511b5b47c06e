"""Compiled models keep the keys of the bare module."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import config

from runtime import (
    FSDP,
    DataParallelCoordinator,
    Ddp,
    KeepBest,
    Trainer,
    create_collectives,
    predict,
)
from runtime.checkpoint.tensor_file import load_file
from runtime.core.process_state import CompileLimits
from tests.support.own_loop import on_cpus
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, at_once, builder


def bare():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    net[2].weight.requires_grad_(False)
    return net


def whole():
    return torch.compile(bare(), backend="eager")


def in_part():
    net = bare()
    net[0] = torch.compile(net[0], backend="eager")
    return net


compiled = pytest.mark.parametrize("make", [whole, in_part])


def train(model, batch):
    return model(batch[0].double()[:, None]).square().mean()


def run(tmp_path, make, **settings):
    b = builder(model=lambda device: make(), train=train, way=(SYNC, THREAD), **settings)
    return b.checkpoint_dir(tmp_path / "run")


@compiled
def test_state_files_and_checkpoints_of_a_run_load_into_the_bare_module(make, tmp_path):
    keep = KeepBest(tmp_path / "best.safetensors")
    state = run(tmp_path, make).callbacks(keep).run().join(WAIT_S)
    state.save(tmp_path / "state.safetensors")
    bare().load_state_dict(state.state_dict())
    assert list(state.state_dict()) == list(bare().state_dict())
    assert set(state.params) == {name for name, _ in bare().named_parameters()}
    for file in ("best.safetensors", "state.safetensors", *tmp_path.glob("run/*/weights.*")):
        bare().load_state_dict(load_file(tmp_path / file))


@pytest.mark.parametrize(("first", "then"), [(whole, bare), (bare, whole), (whole, in_part)])
def test_a_run_is_resumed_with_or_without_compiling(first, then, tmp_path):
    run(tmp_path, first).run().join(WAIT_S)
    state = run(tmp_path, then, epochs=2).resume(tmp_path / "run").run().join(WAIT_S)
    assert [m.epoch for m in state.metrics] == [0, 1]
    straight = run(tmp_path / "straight", bare, epochs=2).run().join(WAIT_S)
    torch.testing.assert_close(state.state_dict(), straight.state_dict())


@compiled
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loops_state_goes_to_the_bare_module_and_back(make, num_devices):
    with on_cpus(make(), num_devices) as model:
        model(torch.randn(6, 1, dtype=torch.float64)).sum().backward()
        model.step()
        state = model.state_dict()
        net = bare()
        net.load_state_dict(state)
        assert list(state) == list(net.state_dict())
        for value in net.state_dict().values():
            value.zero_()
        model.load_state_dict(net.state_dict())
        assert not model.state_dict()["0.weight"].any()


def test_a_state_with_other_keys_is_still_refused():
    with on_cpus(whole()) as model, pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.weight": torch.zeros(4, 1)})


NUM_RANKS = 8
"""More than two, whose entries exceed the limit of one device."""
BATCH = 4 * NUM_RANKS
SHORT = BATCH - NUM_RANKS // 2
"""Samples of a short last batch; some ranks have a smaller piece."""


class Frames:
    """Counts calls of a compiled function, and those of its calls that ran compiled.

    Attributes:
        num_calls: Calls of the function.
        num_compiled: Calls that ran what was compiled.
        num_entries: Graphs that were compiled.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self.num_calls = self.num_compiled = self.num_entries = 0

    def add(self, name):
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def __call__(self, graph, inputs):
        """Compile, as a backend of ``torch.compile``."""
        self.add("num_entries")

        def run(*args):
            self.add("num_compiled")
            return graph(*args)

        return run

    def __deepcopy__(self, memo):
        return self


class OnItsDevice(nn.Module):
    """A compiled model whose guards differ on each rank, as those of distinct GPUs do.

    In place of the index of a device they contain the number of intra-op threads.
    """

    def __init__(self, frames, rank=None):
        super().__init__()
        torch.manual_seed(0)
        self.frames, self.rank = frames, rank
        self.inner = torch.compile(nn.Linear(2, 1, dtype=torch.float64), backend=frames)

    def forward(self, x):
        rank = self.rank
        if rank is None:
            rank = int(threading.current_thread().name.rpartition("-")[2])
        before = torch.get_num_threads()
        torch.set_num_threads(rank + 1)
        try:
            self.frames.add("num_calls")
            return self.inner(x)
        finally:
            torch.set_num_threads(before)


def square(model, batch):
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    return model(x).square().mean()


def plain(params):
    return torch.optim.SGD(params, 0.01)


def samples(n):
    return torch.randn(n, 2, dtype=torch.float64)


def of_builder(make, frames, **way):
    return builder(
        model=lambda device: make(),
        optim=plain,
        train=square,
        dataset=(samples(2 * BATCH + SHORT),),
        batch_size=4,
        epochs=2,
        ranks=NUM_RANKS,
        **way,
    ).val_dataset((samples(BATCH + SHORT),))


def through_the_builder(make, frames):
    of_builder(make, frames, way=(SYNC, THREAD)).run().join(WAIT_S)


def under_cadence(make, frames):
    of_builder(make, frames, way=(CADENCE, OVER_CPU)).run().join(WAIT_S)


def through_a_loop_body(make, frames):
    def body(worker):
        for batch in worker.batches():
            worker.step(square(worker.model, batch))

    trainer = Trainer.loop(lambda device: make(), lambda m: plain(m.parameters()), body)
    trainer.dataset((samples(BATCH + SHORT),)).global_batch_size(BATCH).num_epochs(2)
    trainer.val_dataset((samples(BATCH),), fn=lambda m, batch: {"loss": square(m, batch)})
    trainer.devices(["cpu"] * NUM_RANKS).run().join(WAIT_S)


def through_setup(make, frames):
    with Trainer.setup(make(), plain, ["cpu"] * NUM_RANKS) as model:
        for size in (BATCH, BATCH, SHORT):
            square(model, samples(size)).backward()
            model.step()
        model.eval()
        with torch.no_grad():
            for size in (BATCH, SHORT):
                model(samples(size))


def through_accumulate(make, frames):
    with Trainer.setup(make(), plain, ["cpu"] * NUM_RANKS) as model:
        for size in (BATCH, SHORT):
            model.accumulate(square, [samples(size)] * NUM_RANKS)
            model.step()
        model.eval()
        with torch.no_grad():
            model(samples(BATCH))


def through_the_coordinator(make, frames):
    with DataParallelCoordinator(make(), plain, square, ["cpu"] * NUM_RANKS) as replicas:
        for size in (BATCH, BATCH, SHORT):
            replicas.train_batch(samples(size))


def through_ddp(make, frames):
    models = [make(rank) for rank in range(NUM_RANKS)]
    with Ddp.wrap(models, ["cpu"] * NUM_RANKS) as ddp:
        ddp.sync_params()
        for size in (4, 3):
            for model in models:
                square(model, samples(size)).backward()
            ddp.all_reduce_gradients()
        with torch.no_grad():
            for model in models:
                model.eval()(samples(4))


def through_fsdp(make, frames):
    collectives = create_collectives(NUM_RANKS)

    def train(rank):
        fsdp = FSDP(make(rank), collectives[rank])
        with closing(collectives[rank]):
            optimizer = plain(fsdp.parameters())
            for size in (4, 3):
                square(fsdp, samples(size)).backward()
                fsdp.sync_gradients()
                optimizer.step()
            with torch.no_grad():
                fsdp.eval()(samples(4))

    at_once(train, range(NUM_RANKS))


def through_predict(make, frames):
    for size in (4, 3):
        data = (samples(BATCH),)
        predict(make(), data, batch_size=size, devices=["cpu"] * NUM_RANKS)


@pytest.fixture
def empty_cache(monkeypatch):
    monkeypatch.setattr(CompileLimits, "num_replicas", 1)
    num_threads = torch.get_num_threads()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(num_threads)  # of new threads, which the last rank's call has set


DOORS = [
    through_the_builder,
    under_cadence,
    through_a_loop_body,
    through_setup,
    through_accumulate,
    through_the_coordinator,
    through_ddp,
    through_fsdp,
    through_predict,
]


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("door", DOORS)
def test_no_call_of_a_compiled_model_on_eight_devices_falls_back(door):
    frames = Frames()
    limits = config.recompile_limit, config.accumulated_recompile_limit
    door(lambda rank=None: OnItsDevice(frames, rank), frames)
    assert frames.num_compiled == frames.num_calls
    assert frames.num_entries > limits[0]  # else the limit of one device has not been reached
    assert (config.recompile_limit, config.accumulated_recompile_limit) == limits


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_each_replica_keeps_the_limit_of_a_model_on_one_device(num_devices):
    frames = Frames()
    net = nn.Linear(2, 1)

    def change(mode):
        """A guard for each mode."""
        return net(torch.ones(1, 2)) * len(mode)

    compiled = torch.compile(change, backend=frames)
    predict(net, (torch.randn(4, 2),), batch_size=2, devices=["cpu"] * num_devices)
    for n in range(3 * config.recompile_limit):
        compiled(str(n))
    assert frames.num_entries == num_devices * config.recompile_limit
