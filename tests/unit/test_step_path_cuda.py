"""The step blocks no device: forbidden calls, and the single module of CUDA calls."""

from __future__ import annotations

import ast
from functools import cache

from tests.house import ROOT, House, called, imported_modules, parse, relative, sources

ENTRIES = (
    "worker/worker.py",
    "data/loader.py",
    "device/cuda.py",
    "collective/__init__.py",
)

BOUNDARY = ("runtime/device/cuda_api.py", "runtime/device/memory.py")
"""Modules that call CUDA; tests replace them with stand-ins."""

PAUSES = (
    "runtime/worker/task_evaluation.py",
    "runtime/evaluation/shared_evaluation.py",
    "runtime/evaluation/predict.py",
    "runtime/evaluation/validation_data.py",
)
"""Modules that run between steps, while training pauses."""

HARMLESS = {"is_available", "device_count", "get_device_properties"}
"""Calls made before a run, on no stream."""

FORBIDDEN = {
    "synchronize": "waits for the whole device",
    "current_stream": "may be the default stream: take the worker's own",
    "default_stream": "is ordered with nothing",
    "record_stream": "lets memory grow: order streams by events",
    "wait_stream": "makes an event each time: record one of a pool",
    "empty_cache": "frees memory while a collective may be in flight",
    "ipc_collect": "frees memory while a collective may be in flight",
    "set_per_process_memory_fraction": "may free memory",
    "collect": "may free device memory at any time",
    "item": "waits for the device",
    "tolist": "waits for the device",
    "cpu": "waits for the device",
    "numpy": "waits for the device",
    "nonzero": "waits for the device",
    "masked_select": "waits for the device",
}

ALLOWED = {
    ("runtime/replica/flat.py", "_square_of_narrow", "item"): "of a snapshot on a CPU",
    ("runtime/core/loss_weights.py", "add", "item"): "a weight of the CPU",
    ("runtime/core/loss_weights.py", "check_weight", "item"): "a weight of the CPU",
    ("runtime/core/loss_weights.py", "check_meant_as_weight", "item"): "a weight of the CPU",
    ("runtime/core/loss_weights.py", "num_ignored", "numpy"): "labels on the CPU",
    ("runtime/replica/reducer.py", "_agree_on_order", "tolist"): "a tensor of the CPU",
    (
        "runtime/replica/reducer.py",
        "unpack",
        "tolist",
    ): "flags of parameters that this rank has not used",
    ("runtime/checkpoint/format.py", "_unpacked", "numpy"): "a tensor of a file, on the CPU",
    ("runtime/device/metering.py", "_read", "tolist"): "the log of a device without streams",
    ("runtime/device/metering.py", "_read", "cpu"): "the log of a device without streams",
    (
        "runtime/device/accelerator.py",
        "finish",
        "synchronize",
    ): "a device without streams of its own",
    (
        "runtime/collective/nccl.py",
        "__init__",
        "current_stream",
    ): "the stream of an exchange, which its rank has made current",
    ("runtime/checkpoint/tensor_file.py", "encode", "numpy"): "tensors of the CPU",
    ("runtime/data/columns.py", "index_select", "numpy"): "indices, of the CPU",
    ("runtime/data/dataset.py", "content", "numpy"): "indices, of the CPU",
    ("runtime/data/dataset.py", "_load", "tolist"): "indices, of the CPU",
    ("runtime/data/dataset.py", "load", "tolist"): "indices, of the CPU",
    ("runtime/data/epoch_order.py", "__iter__", "tolist"): "positions, of the CPU",
    ("runtime/data/epoch_order.py", "_compute", "numpy"): "positions, of the CPU",
    ("runtime/data/epoch_order.py", "computed_order", "item"): "a seed, of the CPU",
    ("runtime/core/rng.py", "state_of", "numpy"): "the state of a generator of the CPU",
    ("runtime/core/shared_objects.py", "_facts", "numpy"): "the state of a generator, on the CPU",
    ("runtime/core/shared_objects.py", "_tensor_fact", "numpy"): "of a tensor of the CPU",
    ("runtime/device/metering.py", "_land", "tolist"): "pinned memory, behind its event",
}
"""Reads of no device, and documented ones."""


@cache
def step_path():
    """Files that run in a step: the entries and the runtime modules that they import."""
    below = House().below(*(f"runtime/{name}" for name in ENTRIES), without=PAUSES)
    return [ROOT / file for file in below if file not in BOUNDARY]


def forbidden_calls(path):
    """``(path, function, name)`` of every forbidden call, with its line."""
    for function in ast.walk(parse(path)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                name = called(node).split(".")[-1] if isinstance(node, ast.Call) else None
                if name in FORBIDDEN:
                    yield (relative(path), function.name, name), node.lineno


def test_the_step_path_neither_syncs_a_device_nor_frees_its_memory():
    """D9: such a call stalls the step, or deadlocks with a peer's collective."""
    found = [
        f"{name} in line {line} of {function}() in {where} {FORBIDDEN[name]}"
        for path in step_path()
        for (where, function, name), line in forbidden_calls(path)
        if (where, function, name) not in ALLOWED
    ]
    assert found == []


def test_every_exception_is_needed():
    found = {call for path in step_path() for call, _ in forbidden_calls(path)}
    assert set(ALLOWED) <= found


def test_the_step_path_contains_the_modules_of_a_step():
    found = {path.name for path in step_path()}
    assert found >= {
        "flow.py",
        "stepper.py",
        "averager.py",
        "flat.py",
        "reporter.py",
        "operations.py",
    }
    assert found >= {"cuda.py", "metering.py", "timing.py", "thread.py", "nccl.py"}


def cuda_names(path):
    """``name`` of every ``torch.cuda.name`` in a file, with its line."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            inner = node.value
            if isinstance(inner.value, ast.Name) and (inner.value.id, inner.attr) == (
                "torch",
                "cuda",
            ):
                yield node.attr, node.lineno


def test_cuda_is_reached_through_one_place():
    """A stand-in then receives every call."""
    found = []
    for path in sources("runtime", "coordinator"):
        names = [f"{relative(path)}:{line} {n}" for n, line in cuda_names(path)]
        if relative(path) in BOUNDARY:
            assert names
            continue
        found += [name for name in names if name.split()[-1] not in HARMLESS]
        found += [name for name in imported_modules(path) if name.startswith("torch.cuda")]
    assert found == []


def test_streams_wait_for_streams_in_one_place():
    """The device, its helper for all other users, and slots, which call their device."""
    found = {
        relative(path)
        for path in sources("runtime")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and called(node).split(".")[-1] == "wait_event"
    }
    assert found == {
        "runtime/device/cuda.py",
        "runtime/device/cuda_api.py",
        "runtime/data/slots.py",
    }


def test_a_planted_call_is_found(tmp_path):
    source = tmp_path / "planted.py"
    source.write_text("def step(loss):\n    import torch\n    torch.cuda.synchronize()\n", "utf-8")
    node = next(n for n in ast.walk(parse(source)) if isinstance(n, ast.Call))
    assert called(node).split(".")[-1] in FORBIDDEN
    assert list(cuda_names(source)) == [("synchronize", 3)]
