"""Frozen parameters, extra state and unusual tensors of modules in checkpoints."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from runtime import current_worker
from runtime.checkpoint import tensor_file
from runtime.checkpoint.files import save_weights
from runtime.checkpoint.format import named_weights
from runtime.checkpoint.store import load_newest
from runtime.replica import flat as flat_file
from runtime.replica.flat import checksum
from tests.support.running import SYNC, THREAD, WAIT_S, builder

N = 16
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))


def start(model, train, *, stop_at=None, configure=lambda b: b):
    """Train two epochs; the first rank stops the run after ``stop_at`` of its steps."""
    handles, started = [], threading.Event()

    def train_fn(module, batch):
        worker = current_worker()
        if worker.rank == 0 and stop_at is not None and worker.local_step >= stop_at:
            assert started.wait(WAIT_S)
            handles[0].stop()
        return train(module, batch[0])

    b = builder(
        model=model,
        optim=lambda params: torch.optim.SGD(params, 0.1),
        train=train_fn,
        dataset=(X,),
        epochs=2,
        way=(SYNC, THREAD),
    )
    handle = configure(b.seed(1)).run()
    handles.append(handle)
    started.set()
    return handle


def in_two_parts(model, train, path, *, stop_at=2):
    """States of an uninterrupted run, of a stopped run, and of its resumed rest."""
    straight = start(model, train).join(WAIT_S)
    stopped = start(model, train, stop_at=stop_at, configure=lambda b: b.checkpoint_dir(path))
    half = stopped.join(WAIT_S)
    assert half.stopped
    rest = start(model, train, configure=lambda b: b.resume(path).checkpoint_dir(path))
    return straight, half, rest.join(WAIT_S)


def assert_same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]


# -- frozen parameters -----------------------------------------------------------------


class StudentTeacher(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)


def follow(teacher, student):
    teacher.lerp_(student, 0.25)


def follow_by_data(teacher, student):
    teacher.data.mul_(0.75).add_(student.data, alpha=0.25)  # does not bump the version counter


def follow_by_replacement(teacher, student):
    teacher.data = teacher.data * 0.75 + student.data * 0.25


@pytest.mark.parametrize("follow", [follow, follow_by_data, follow_by_replacement])
def test_frozen_parameters_changed_in_training_are_resumed(follow, tmp_path):
    def train(model, x):
        loss = (model.student(x) - model.teacher(x) - 1).square().mean()
        with torch.no_grad():
            for teacher, student in zip(
                model.teacher.parameters(), model.student.parameters(), strict=True
            ):
                follow(teacher, student)
        return loss

    straight, half, rest = in_two_parts(lambda device: StudentTeacher(), train, tmp_path / "ck")
    assert not torch.equal(half.params["teacher.weight"], rest.params["teacher.weight"])
    assert_same(straight, rest)
    found = load_newest(tmp_path / "ck").data
    assert torch.equal(found.weights["teacher.weight"], rest.params["teacher.weight"])


def test_unchanged_frozen_parameters_are_copied_once(tmp_path):
    def train(model, x):
        return (model.student(x) - model.teacher(x)).square().mean()

    start(
        lambda device: StudentTeacher(), train, configure=lambda b: b.checkpoint_dir(tmp_path)
    ).join(WAIT_S)
    data = load_newest(tmp_path).data
    assert [rank.module.frozen for rank in data.ranks] == [{}, {}]
    assert list(data.weights) == list(StudentTeacher().state_dict())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.complex128]
)
def test_a_checksum_detects_the_smallest_change(dtype, monkeypatch):
    monkeypatch.setattr(flat_file, "_CHUNK_WORDS", 64)
    whole = torch.ones(3, 1000, dtype=torch.float32).to(dtype)
    t = whole.t()
    before = checksum(t)
    assert torch.equal(checksum(t.clone()), before)
    whole.view(torch.uint8)[2, 5] ^= 1
    assert not torch.equal(checksum(t), before)
    odd = torch.ones(7, dtype=torch.float32).to(dtype)[
        1:
    ]  # neither aligned nor a multiple of the word size
    before = checksum(odd)
    odd.view(torch.uint8)[-1] ^= 1
    assert not torch.equal(checksum(odd), before)
    assert int(checksum(torch.empty(0, 2, dtype=dtype))) == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_words", [1, 4, 256, 300])
@pytest.mark.parametrize("places", [(0, 8), (3, 259), (256, 512), (0, 768), (20, 700)], ids=str)
def test_a_checksum_detects_exchanged_words(dtype, num_words, places):
    """Within a row of the sum, a column, and across both, and of any number of words."""
    one, two = places
    per_word = 8 // dtype.itemsize
    t = torch.zeros(1100 * per_word, dtype=dtype)
    num_words = min(num_words, two - one)
    first, second = (t[p * per_word : (p + num_words) * per_word] for p in places)
    first.fill_(1)
    before = checksum(t)
    second.fill_(1)
    first.fill_(0)
    assert not torch.equal(checksum(t), before)


# -- extra state -----------------------------------------------------------------------


class WithExtraState(nn.Module):
    """A module whose loss depends on its extra state."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.seen, self.scale = 0, torch.ones(())

    def get_extra_state(self):
        return {"seen": self.seen, "scale": self.scale, "kind": b"\x00\xff", "names": {"a"}}

    def set_extra_state(self, state):
        assert (state["kind"], state["names"]) == (b"\x00\xff", {"a"})
        self.seen, self.scale = state["seen"], state["scale"]

    def forward(self, x):
        self.seen += 1
        self.scale.mul_(0.9)
        return self.inner(x) * self.scale - self.seen


def train_extra_state(model, x):
    return model(x).square().mean()


def test_extra_state_of_modules_is_resumed(tmp_path):
    straight, half, rest = in_two_parts(
        lambda device: nn.Sequential(WithExtraState()), train_extra_state, tmp_path / "ck"
    )
    assert 0 < half.state_dict()["0._extra_state"]["seen"] < 8
    assert rest.state_dict()["0._extra_state"]["seen"] == 8
    assert_same(straight, rest)
    bare = nn.Sequential(WithExtraState())
    bare.load_state_dict(rest.state_dict())  # strict
    assert bare[0].seen == 8
    rest.save(tmp_path / "weights")
    assert set(tensor_file.load_file(tmp_path / "weights")) == set(rest.params)


def test_state_dict_hooks_lose_no_weight():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def hook(module, state, prefix, metadata):
        state["merged"] = state["0.weight"] + state["1.weight"]
        state["renamed"] = state.pop("0.weight")
        del state["1.bias"]

    model.register_state_dict_post_hook(hook)
    found = named_weights(model)
    assert list(found) == ["0.bias", "1.weight", "renamed", "1.bias"]
    assert found["renamed"] is model[0].weight
    assert found["1.bias"] is model[1].bias


# -- tensors of every dtype --------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.rounded = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        turned = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj()
        self.frozen = nn.Parameter(turned, requires_grad=False)
        self.register_buffer("no_buffer", torch.zeros(2, 0, dtype=torch.int32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([[True, False], [True, True]]).t())
        self.register_buffer("average", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.wide = nn.Parameter(turned.to(torch.complex128), requires_grad=False)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.average.mul_(0.5).add_(x.mean())
        self.phase += 1j * x.mean()
        self.hidden += x.mean()
        y = self.tied(self.first(x)) + self.frozen.imag.sum() + self.hidden.sum()
        return y + self.rounded.sum() + self.conv.weight.sum() * self.none.sum()


def test_tensors_of_every_dtype_are_resumed(tmp_path):
    straight, _, rest = in_two_parts(lambda device: Mixed(), train_extra_state, tmp_path)
    assert_same(straight, rest)
    newest = load_newest(tmp_path)
    weights = tensor_file.load_file(newest.path / "weights.safetensors")
    state = rest.state_dict()
    assert set(state) - set(weights) == {"wide"}  # complex128 is in another file
    for name, tensor in newest.data.weights.items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(weights["frozen"].imag, torch.tensor([-2.0, 1.0]))
    assert torch.equal(weights["tied.weight"], weights["first.weight"])


def test_a_conjugated_view_is_written_with_its_values(tmp_path):
    turned = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj()
    save_weights(tmp_path / "file", {"turned": turned, "sign": turned.imag})
    found = tensor_file.load_file(tmp_path / "file")
    assert torch.equal(found["turned"], turned)
    assert torch.equal(found["sign"], turned.imag)
