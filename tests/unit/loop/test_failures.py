"""Failures of replicas, and the end of their threads."""

import _thread
import copy
import gc
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import DdpConfig, GpuWorkerError, ReplicaFailed, Trainer
from runtime.core.errors import text_of
from runtime.loop import runner as runner_file
from runtime.loop import threaded as threaded_file
from runtime.loop.rank_threads import Job
from tests.support import programs
from tests.support.own_loop import (
    NUM_FEATURES,
    WAIT_S,
    OneDevice,
    adamw,
    assert_close,
    assert_identical,
    exchanging_gradients,
    make_batch,
    make_net,
    on_cpus,
    sgd,
    train_both,
    train_step,
)

FAST_S = 5.0
"""Bound within which a failure is raised, far below any timeout."""


@pytest.fixture(autouse=True, scope="module", params=["directly", "meeting", "copies"])
def way(request):
    with exchanging_gradients(request.param):
        yield request.param


def on_rank(rank):
    return threading.current_thread().name.endswith(f"-{rank}")


class Bomb(nn.Module):
    """A net that raises on given ranks, in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.forward_ranks = self.backward_ranks = ()

    def forward(self, x):
        if any(on_rank(rank) for rank in self.forward_ranks):
            raise ZeroDivisionError("forward went wrong")
        out = self.net(x)
        if out.requires_grad:
            out.register_hook(self._check)
        return out

    def _check(self, grad):
        if any(on_rank(rank) for rank in self.backward_ranks):
            raise ZeroDivisionError("backward went wrong")


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_in_forward_names_the_rank_and_the_module_stays_usable(rank):
    net = Bomb()
    alone = OneDevice(net)
    with on_cpus(net, 3) as model:
        train_both(model, alone, [7])
        model.forward_ranks = (rank,)
        with pytest.raises(ReplicaFailed, match=f"rank {rank} on cpu failed in forward") as found:
            model(make_batch(6)[0])
        assert isinstance(found.value.__cause__, ZeroDivisionError)
        assert (found.value.rank, found.value.what) == (rank, "forward")
        model.forward_ranks = ()
        train_both(model, alone, [7])


class BadBatch(LookupError):
    """An exception with an attribute, and a constructor of its own."""

    def __init__(self, *, number):
        super().__init__(f"batch {number}")
        self.number = number


class Unbuildable(RuntimeError):
    """An exception that other arguments cannot make."""

    def __new__(cls, only):
        return super().__new__(cls, only)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadBatch(number=3), BadBatch),
        (KeyError("missing"), KeyError),
        (FileNotFoundError(2, "gone", "data"), OSError),
        (torch.OutOfMemoryError("planted"), torch.OutOfMemoryError),
        (RuntimeError("planted"), RuntimeError),
    ],
)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loop_catches_errors_by_their_class_on_any_number_of_devices(error, kind, num_devices):
    class Raising(Bomb):
        def forward(self, x):
            if self.forward_ranks:
                raise error
            return super().forward(x)

    net = Raising()
    with on_cpus(net, num_devices) as model:
        model.module.forward_ranks = (0,)
        with pytest.raises(kind) as caught:
            model(make_batch(6)[0])
        assert getattr(caught.value, "number", 3) == 3
        assert str(error) in str(caught.value)
        model.module.forward_ranks = ()
        train_both(model, OneDevice(net), [7])


@pytest.mark.parametrize("error", [StopIteration(1), Unbuildable(1), KeyboardInterrupt()])
def test_a_failure_of_a_class_that_it_cannot_have_is_a_plain_one(error):
    failed = ReplicaFailed.of(1, "cpu", "forward", error)
    assert type(failed) is ReplicaFailed
    assert str(failed) == f"rank 1 on cpu failed in forward: {text_of(error)}"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_backward_names_the_rank_and_clears_the_gradients(rank):
    net = Bomb()
    alone = OneDevice(net)
    with on_cpus(net, 3) as model:
        model.backward_ranks = (rank,)
        out = model(make_batch(6)[0])
        start = time.monotonic()
        with pytest.raises(ReplicaFailed, match=f"rank {rank} on cpu failed in backward"):
            out.sum().backward()
        assert time.monotonic() - start < FAST_S
        assert all(p.grad is None for r in model.replicas for p in r.parameters())
        model.backward_ranks = ()
        train_both(model, alone, [7])


def test_errors_of_several_ranks_are_all_reported():
    net = Bomb()
    net.forward_ranks = (1, 2)
    with on_cpus(net, 3) as model:
        with pytest.raises(ReplicaFailed, match="rank 1") as found:
            model(make_batch(6)[0])
        assert any("rank 2 failed too" in note for note in found.value.__notes__)


class Grenade(torch.optim.SGD):
    """Raises in its step."""

    armed = False

    def step(self, closure=None):
        if self.armed:
            raise ZeroDivisionError("step went wrong")
        super().step()


def test_an_error_in_a_step_is_that_of_the_optimizer_and_clears_the_gradients(monkeypatch):
    net = make_net()
    momentum = {"lr": 0.1, "momentum": 0.9}
    alone = OneDevice(net, lambda params: torch.optim.SGD(params, **momentum))
    with on_cpus(net, 3, lambda params: Grenade(params, **momentum)) as model:
        train_both(model, alone, [7])
        monkeypatch.setattr(Grenade, "armed", True)
        with pytest.raises(ZeroDivisionError, match="step went wrong"):
            train_step(model, *make_batch(5))
        monkeypatch.setattr(Grenade, "armed", False)
        assert all(p.grad is None for p in net.parameters())
        train_both(model, alone, [7])


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_an_interrupted_caller_can_continue(what, monkeypatch):
    """Ctrl-C occurs while the replicas work; their remaining work does no harm."""
    net = make_net()
    x, y = make_batch(6)
    wait = Job.wait

    def interrupted(job, *args):
        monkeypatch.setattr(Job, "wait", wait)
        raise KeyboardInterrupt

    def interrupt():
        monkeypatch.setattr(Job, "wait", interrupted)

    with on_cpus(net, 2, adamw) as model:
        train_step(model, x, y)
        alone = twin(model)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            if what == "forward":
                interrupt()
            loss = F.cross_entropy(model(x), y)
            if what == "backward":
                interrupt()
            loss.backward()
        for _ in range(2):
            train_step(model, x, y)
            train_step(alone, x, y)
            assert_identical(model)
            assert_close(model, alone.model)


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("call", ["forward", "accumulate"])
def test_ctrl_c_lets_tasks_that_have_started_end(call, in_time, monkeypatch):
    """Then no thread works on the model. After a timeout the next call waits for that."""
    if not in_time:
        monkeypatch.setattr(runner_file, "INTERRUPT_TIMEOUT_S", 0.01)
    is_armed, go, ended = threading.Event(), threading.Event(), []

    class Slow(nn.Module):
        """On rank 1 Ctrl-C arrives in its forward pass, which takes some more time."""

        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            if is_armed.is_set() and on_rank(1):
                is_armed.clear()
                _thread.interrupt_main()
                threading.Timer(0.3, go.set).start()
                assert go.wait(WAIT_S)
                ended.append(1)
            return self.net(x)

    net, (x, y) = Slow(), make_batch(6)
    with on_cpus(net, 2, adamw) as model:
        train_step(model, x, y)
        is_armed.set()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            if call == "forward":
                model(x)
            else:
                model.accumulate(lambda m, b: F.cross_entropy(m(b[0]), b[1]), [(x, y)] * 2)
        assert ended == [1] * in_time
        assert all(p.grad is None for p in net.parameters())
        alone = twin(model)
        model.accumulate(lambda m, b: F.cross_entropy(m(b[0]), b[1]), [(x, y)] * 2)
        model.step()
        train_step(alone, x, y)
        assert ended == [1]
        assert_identical(model)
        assert_close(model, alone.model)


def test_ctrl_c_while_tasks_are_posted_ends_the_waits_of_ranks_for_each_other():
    """Only a part of the ranks has received a task, which waits in a collective for the others."""
    x, y = make_batch(6)
    at, fired = 0, True
    with on_cpus(make_net(), 3) as model:
        inboxes = model._engine._runner._threads._inboxes
        own = inboxes[1]

        class Interrupted:
            """An inbox of which one put is interrupted."""

            left = 0

            def put(self, job):
                self.left -= 1
                if self.left == -1:
                    raise KeyboardInterrupt
                own.put(job)

        while fired:
            inboxes[1] = fake = Interrupted()
            fake.left = at
            with suppress(KeyboardInterrupt):
                train_step(model, x, y)
            fired, at = fake.left < 0, at + 1
            inboxes[1] = own
            train_step(model, x, y)
            assert_identical(model)
    assert at > 2


def twin(model):
    """A plain loop that continues from a model's current state."""
    alone = OneDevice(model.module, adamw)
    alone.optimizer.load_state_dict(copy.deepcopy(model.optimizer_state_dict()))
    return alone


def replica_threads():
    return [t for t in threading.enumerate() if t.name.startswith("replica-")]


def test_close_ends_the_threads_and_keeps_the_module():
    model = Trainer.setup(make_net(), sgd, ["cpu"] * 3)
    threads = replica_threads()
    assert len(threads) == 3
    assert all(thread.daemon for thread in threads)
    model.close()
    model.close()
    assert replica_threads() == []
    x, _ = make_batch(4)
    with pytest.raises(RuntimeError, match="was closed"):
        model(x)
    assert model.module(x).shape == (4, 3)
    assert len(model.state_dict()) == 6


def test_threads_end_when_the_module_and_its_outputs_are_collected():
    model = Trainer.setup(make_net(), sgd, ["cpu"] * 2)
    out = model(make_batch(4)[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    threads = replica_threads()
    assert len(threads) == 2  # the graph still needs them
    out.sum().backward()
    del out
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
    assert replica_threads() == []


def test_replicas_are_freed_with_the_module():
    model = Trainer.setup(make_net(), adamw, ["cpu"] * 2)
    train_step(model, *make_batch(4))
    refs = [weakref.ref(replica) for replica in model.replicas]
    threads = replica_threads()
    del model
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
    assert [ref() for ref in refs] == [None, None]


def test_activations_are_freed_by_backward():
    held = []

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            hidden = x * self.w
            out = hidden.square() * 2
            held.extend((weakref.ref(hidden), weakref.ref(out)))
            return out

    with on_cpus(Held(), 2, config=DdpConfig(whole=[])) as model:
        out = model(torch.ones(4, 3))
        loss = out.sum()
        loss.backward()
        assert out.shape == (4, 3)  # still referenced by the caller, as in a loop
        assert [ref() for ref in held] == [None] * 4


def test_setup_that_fails_leaves_no_thread():
    def factory(device):
        raise ZeroDivisionError("no model")

    with pytest.raises(ZeroDivisionError, match="no model"):
        Trainer.setup(factory, sgd, ["cpu"] * 2)
    assert replica_threads() == []


def test_a_thread_stuck_in_the_model_is_named_by_close(monkeypatch):
    monkeypatch.setattr(runner_file, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(threaded_file, "STOP_TIMEOUT_S", 0.1)
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            if on_rank(1):
                entered.set()
                assert go_on.wait(WAIT_S)
            return x * self.w

    model = Trainer.setup(Stuck(), sgd, ["cpu"] * 2)
    caller = threading.Thread(target=lambda: model(torch.ones(2)))
    caller.start()
    assert entered.wait(WAIT_S)
    try:
        with pytest.raises(GpuWorkerError, match="-1;"):
            model.close()
    finally:
        go_on.set()
        caller.join(WAIT_S)


def test_a_program_that_never_closes_its_model_exits_without_output():
    code = (
        "import logging\n"
        "import torch\n"
        "from torch import nn\n"
        "from runtime import Trainer\n"
        "logging.getLogger('runtime').setLevel(logging.WARNING)\n"
        f"net = nn.Linear({NUM_FEATURES}, 2)\n"
        "model = Trainer.setup(net, lambda p: torch.optim.SGD(p, 0.1), ['cpu', 'cpu'])\n"
        f"out = model(torch.ones(4, {NUM_FEATURES}))\n"
        "out.sum().backward()\n"
        "model.step()\n"
    )
    done = programs.run([sys.executable, "-W", "error", "-c", code], timeout=50, whole_end=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("how", ["by hand", "by a scaler", "by a disabled scaler"])
def test_a_step_of_the_optimizer_itself_equals_one_device_and_advances_the_schedule(
    num_devices, how
):
    net = make_net(torch.float32)
    alone = OneDevice(net, adamw)
    with on_cpus(net, num_devices, adamw) as model:
        model.set_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
        scheduler = torch.optim.lr_scheduler.StepLR(alone.optimizer, 1, 0.5)
        for _ in range(3):
            x, y = make_batch(4, torch.float32)
            for loop, optimizer in ((model, model.optimizer), (alone, alone.optimizer)):
                scaler = torch.amp.GradScaler("cpu", enabled=how == "by a scaler")
                scaler.scale(F.cross_entropy(loop(x), y)).backward()
                optimizer.step() if how == "by hand" else scaler.step(optimizer)
                optimizer.zero_grad()
            scheduler.step()
        assert model.current_lr == alone.optimizer.param_groups[0]["lr"]
        assert_identical(model)
        assert_close(model, alone.model, 1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_of_the_optimizer_itself_is_refused_between_accumulate_and_step(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        batches = [make_batch(4)] * 2
        model.accumulate(lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches)
        with pytest.raises(RuntimeError, match=r"call model\.step\(\) instead"):
            model.optimizer.step()
        model.step()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_optimizer_of_a_closed_model_may_be_stepped_directly(num_devices):
    net = make_net()
    with on_cpus(net, num_devices) as model:
        train_step(model, *make_batch(4))
    alone = OneDevice(net)
    x, y = make_batch(4)
    for module, optimizer in ((net, model.optimizer), (alone.model, alone.optimizer)):
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert_close(net, alone.model)
