"""Tracebacks show the user's frames; those of this project are left out."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runtime import DataParallelCoordinator, ReplicaFailed, Trainer, WorkerFailed, fit
from runtime.checkpoint.store import entries
from runtime.core import tracebacks
from runtime.core.tracebacks import VARIABLE, fold_tracebacks
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder, plain_sgd

ROOT = os.path.dirname(tracebacks.__file__).removesuffix("/runtime/core")
OWN = (f"{ROOT}/runtime/", f"{ROOT}/coordinator/")
TORCH = os.path.dirname(torch.__file__)
each_way = pytest.mark.parametrize(
    "way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=lambda way: way[0].name
)


def frames(error):
    return traceback.extract_tb(error.__traceback__)


def own_frames(error):
    """The frames of this project in the tracebacks of an error and its causes."""
    chain = tracebacks.chain_of(error)
    return [frame for each in chain for frame in frames(each) if frame.filename.startswith(OWN)]


def mistake():
    raise ValueError("my own mistake")


def train_fn(model, batch):
    mistake()


class Broken(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        mistake()


def error_of(b):
    with pytest.raises(WorkerFailed) as caught:
        b.run().join(WAIT_S)
    return caught.value


@each_way
@pytest.mark.parametrize("place", ["train_fn", "data set", "eval_fn", "model_factory"])
def test_an_error_of_a_run_shows_the_users_frames_alone(way, place):
    b = {
        "train_fn": lambda: builder(way=way, train=train_fn),
        "data set": lambda: builder(way=way, dataset=Broken()),
        "eval_fn": lambda: builder(way=way).eval_fn(lambda model, epoch: mistake()),
        "model_factory": lambda: builder(way=way, model=lambda device: mistake()),
    }[place]()
    error = error_of(b)
    assert [frame.name for frame in own_frames(error)] == ["join"]
    cause = frames(error.__cause__)
    assert cause[0].filename == __file__
    assert cause[-1].name == "mistake"
    notes = error.__cause__.__notes__
    assert [VARIABLE in note for note in notes].count(True) == 1
    assert VARIABLE not in str(error)


def test_joining_again_raises_with_the_same_frames():
    handle = builder(train=train_fn).run()
    counts = []
    for _ in range(3):
        with pytest.raises(WorkerFailed) as caught:
            handle.join(WAIT_S)
        counts.append(len(frames(caught.value)))
    assert counts == [2, 2, 2]


def test_full_tracebacks_have_all_frames(monkeypatch):
    monkeypatch.setenv(VARIABLE, "full")
    error = error_of(builder(train=train_fn))
    assert len(own_frames(error)) > 5
    assert not hasattr(error.__cause__, "__notes__")


def test_errors_of_settings_show_the_call_alone():
    with pytest.raises(ValueError, match="batch_size is not set") as caught:
        Trainer.builder(nn.Linear(1, 1), plain_sgd, train_fn).dataset([0]).num_epochs(1).run()
    assert own_frames(caught.value) == []
    assert not hasattr(caught.value, "__notes__")


def test_fit_shows_two_frames_of_this_project_at_most():
    with pytest.raises(WorkerFailed) as caught:
        fit(nn.Linear(1, 1), Broken(), optimizer=plain_sgd, batch_size=2, devices="cpu")
    assert [frame.name for frame in own_frames(caught.value)] == ["fit", "join"]


class Net(nn.Linear):
    def forward(self, x):
        mistake()


def through_setup():
    with Trainer.setup(Net(1, 1), plain_sgd, ["cpu", "cpu"]) as model:
        model(torch.zeros(4, 1))


def through_accumulate():
    with Trainer.setup(Net(1, 1), plain_sgd, ["cpu", "cpu"]) as model:
        model.accumulate(lambda model, batch: model(batch).sum(), [torch.zeros(4, 1)] * 2)


def through_coordinator():
    make = lambda device: Net(1, 1)  # noqa: E731
    with DataParallelCoordinator(make, plain_sgd, train_fn, ["cpu", "cpu"]) as coordinator:
        coordinator.train_batch(torch.zeros(4, 1))


@pytest.mark.parametrize("door", [through_setup, through_accumulate, through_coordinator])
def test_an_error_of_an_own_loop_shows_the_users_frames_alone(door):
    with pytest.raises(ReplicaFailed) as caught:
        door()
    assert own_frames(caught.value) == []
    assert frames(caught.value.__cause__)[0].filename == __file__
    assert frames(caught.value.__cause__)[-1].name == "mistake"


def test_an_error_of_a_factory_of_an_own_loop_shows_setup_alone():
    with pytest.raises(ValueError, match="my own") as caught:
        Trainer.setup(lambda device: mistake(), plain_sgd, ["cpu", "cpu"])
    assert [frame.name for frame in own_frames(caught.value)] == ["setup"]


def raised_in(file, error):
    """An error that code of this file has raised."""
    code = compile("def function(error): raise error", file, "exec")
    namespace = {}
    exec(code, namespace)
    try:
        namespace["function"](error)
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("kind", "is_kept"), [(KeyError, True), (AssertionError, True), (ValueError, False)]
)
def test_tracebacks_of_faults_of_this_project_are_kept(kind, is_kept):
    error = raised_in(f"{OWN[0]}planted.py", kind("planted"))
    fold_tracebacks(error)
    assert bool(own_frames(error)) is is_kept


def test_frames_of_libraries_are_kept_where_the_user_has_none():
    error = raised_in(f"{TORCH}/planted.py", RuntimeError("planted"))
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this file
    fold_tracebacks(error)
    assert [frame.filename for frame in frames(error)] == [f"{TORCH}/planted.py"]


def test_errors_that_are_each_others_cause_are_folded():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert fold_tracebacks(first) is first


# -- Ctrl-C --------------------------------------------------------------------


@pytest.fixture
def excepthook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def interrupted(b, wait=lambda handle: handle.join(WAIT_S)):
    """The interrupt of a run that receives SIGINT in its third step."""
    steps = threading.Semaphore(0)

    def train(model, batch):
        steps.release()
        return -model.w.sum()

    b._set(train_fn=train)
    handle = b.run()
    for _ in range(3):
        assert steps.acquire(timeout=WAIT_S)
    main = threading.main_thread()
    # The handler is installed once the main thread waits.
    ready = threading.Thread(target=lambda: _interrupt_once_waiting(main))
    ready.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        wait(handle)
    ready.join(WAIT_S)
    return handle, caught.value


def _interrupt_once_waiting(main):
    pause = threading.Event()
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        pause.wait(0.001)
    signal.pthread_kill(main.ident, signal.SIGINT)


def in_a_block(handle):
    with handle:
        handle.join(WAIT_S)


@pytest.mark.parametrize("wait", [lambda handle: handle.join(WAIT_S), in_a_block])
def test_an_interrupt_prints_where_the_state_was_saved(excepthook, capsys, tmp_path, wait):
    b = builder(dataset=4000, epochs=400).checkpoint_dir(tmp_path).progress(False)
    handle, error = interrupted(b, wait)
    capsys.readouterr()
    sys.excepthook(type(error), error, error.__traceback__)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("KeyboardInterrupt: the run was stopped after ")
    num = handle.statistics().global_step
    (saved,) = [entry.path for entry in entries(tmp_path)]
    text = " ".join(line.strip() for line in lines)
    assert text.endswith(
        f" after {num:,} of {handle.total_batches:,} batches; handle.state has the trained state "
        f"The state after {num} batches was saved to {saved}; resume({str(tmp_path)!r}) continues "
        "from it"
    )
    # A path is not broken.
    assert [line for line in lines if len(line) > 79 and str(tmp_path) not in line] == []


def test_other_errors_are_printed_as_ever(excepthook, capsys):
    interrupted(builder(dataset=4000, epochs=400))
    capsys.readouterr()
    error = raised_in("user.py", ValueError("planted"))
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.splitlines()[0] == "Traceback (most recent call last):"


def test_a_hook_of_the_program_is_kept(monkeypatch):
    def hook(kind, error, tb):
        raise NotImplementedError

    monkeypatch.setattr(sys, "excepthook", hook)
    interrupted(builder(dataset=4000, epochs=400))
    assert sys.excepthook is hook


def test_full_tracebacks_include_that_of_an_interrupt(excepthook, monkeypatch):
    monkeypatch.setenv(VARIABLE, "full")
    interrupted(builder(dataset=4000, epochs=400))
    assert sys.excepthook is sys.__excepthook__
