"""MKL loads its kernels before two threads can call it at once."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import Trainer
from runtime.collective import create_collectives
from runtime.core import threads as vector_math

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"


class Calls(TorchDispatchMode):
    """Records the operations of this thread, with the dtypes of their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].is_contiguous():
            self.seen.add((func.overloadpacket.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_each_function_is_called_in_both_precisions():
    with Calls() as calls:
        vector_math._resolve_vector_math.__wrapped__()
    dtypes = (torch.float32, torch.float64)
    expected = {(name, dtype) for name in vector_math.FUNCTIONS for dtype in dtypes}
    assert expected <= calls.seen


def test_the_functions_are_those_that_pytorch_hands_to_mkl():
    active = [line for line in HEADER.read_text().splitlines() if not line.startswith("//")]
    handed = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", "\n".join(active), re.MULTILINE)
    assert "sqrt" in handed
    assert set(handed) <= set(vector_math.FUNCTIONS)


def test_the_functions_are_called_once_in_a_process():
    vector_math.prepare_threads()
    with Calls() as calls:
        vector_math.prepare_threads()
    assert calls.seen == set()


@pytest.fixture
def threads_then(monkeypatch):
    """Names of the threads alive at each call of the functions."""
    found = []
    before = set(threading.enumerate())

    def resolve():
        found.append({thread.name for thread in threading.enumerate() if thread not in before})

    monkeypatch.setattr(vector_math, "_resolve_vector_math", resolve)
    return found


def test_the_functions_are_called_for_ranks_started_by_the_user(threads_then):
    for end in create_collectives(2):
        end.close()
    assert len(threads_then) == 1


def loss_of(model, batch):
    return model(batch[0]).square().mean()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_the_functions_are_called_before_a_run_has_threads(threads_then):
    builder = Trainer.builder(lambda device: torch.nn.Linear(2, 1), sgd, loss_of)
    builder.dataset((torch.zeros(8, 2),)).batch_size(2).num_epochs(1)
    builder.devices(["cpu", "cpu"]).progress(False).run().join()
    assert threads_then[0] <= {"run-control"}  # nothing is computed


def test_the_functions_are_called_before_a_loop_has_threads(threads_then):
    with Trainer.setup(torch.nn.Linear(2, 1), sgd, ["cpu", "cpu"]) as model:
        model(torch.zeros(4, 2))
    assert threads_then[0] == set()
