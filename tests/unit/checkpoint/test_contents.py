"""Types that checkpoints support."""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from runtime.checkpoint.format import plain
from runtime.core.errors import CheckpointError
from tests.support.checkpointing import same


class Colour(enum.IntEnum):
    RED = 3


def test_plain_values_are_restored_unchanged_by_the_safe_reader():
    value = {
        "numbers": [1, 2.5, 2**90, -0.0, float("inf"), True, None],
        "tuple": (1, ("a",)),
        3: torch.ones(2, dtype=torch.float16),
        "counter": Counter({5: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "dtype": torch.float64,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "bytes": b"\x00\xff",
        "complex": 1 - 2j,
        "set": {1, "a"},
    }
    file = io.BytesIO()
    torch.save(plain(value, "state"), file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), value)


def test_numpy_scalars_and_enums_become_python_numbers():
    value = {"a": np.float64(0.5), "b": np.int64(3), "c": np.bool_(True), "d": Colour.RED}
    found = plain({**value, "e": np.str_("x"), "f": defaultdict(list, {1: []})}, "state")
    assert same(found, {"a": 0.5, "b": 3, "c": True, "d": 3, "e": "x", "f": {1: []}})


def test_plain_copies_containers():
    weight = torch.zeros(2)
    value = {"list": [1], "tensor": weight}
    found = plain(value, "state", copy=True)
    value["list"].append(2)
    weight.add_(1)
    assert same(found, {"list": [1], "tensor": torch.zeros(2)})


@pytest.mark.parametrize(
    "bad",
    [lambda: 0, object(), np.zeros(2), frozenset({1}), io.BytesIO()],
    ids=lambda b: type(b).__name__,
)
def test_other_types_are_refused_with_their_path(bad):
    with pytest.raises(CheckpointError, match=r"rank 1\['schedule'\]\['lambdas'\]\[1\] is of type"):
        plain({"schedule": {"lambdas": [None, bad]}}, "rank 1")
