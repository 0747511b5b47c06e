"""Parameters and buffers as views of flat tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from runtime.replica.flat import ALIGNMENT_BYTES, FlatState, norm
from tests.support.running import LOCAL_WAYS, WAIT_S, builder, local_ways


class Mixed(nn.Module):
    """Dtypes, strides, ties, a frozen and an empty parameter, buffers of every sort."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(5, 5, bias=False)
        self.same = self.linear
        self.wide = nn.Parameter(torch.arange(7, dtype=torch.float64))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
        self.norm = nn.BatchNorm2d(5)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("shared", self.norm.running_mean)
        self.register_buffer("none", None)


@pytest.fixture
def mixed():
    return Mixed()


def test_flat_parameters_keep_values_objects_and_strides(mixed):
    before = {n: (p, p.detach().clone(), p.stride()) for n, p in mixed.named_parameters()}
    state = FlatState(mixed)
    for name, p in mixed.named_parameters():
        same, value, stride = before[name]
        assert p is same
        assert torch.equal(p, value), name
        if name != "turned":
            assert p.stride() == stride, name
    assert mixed.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert mixed.turned.stride() == (1, 3)  # dense, so kept as it was
    assert mixed.same.weight is mixed.linear.weight
    assert "frozen" not in state.params.names


def test_parameters_are_aligned_views_of_one_tensor_a_dtype(mixed):
    state = FlatState(mixed)
    assert {f.dtype for f in state.params.flats} == {torch.float32, torch.float64, torch.bfloat16}
    for p in state.params.params:
        (flat,) = (f for f in state.params.flats if f.dtype == p.dtype)
        assert p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert p.storage_offset() * p.element_size() % ALIGNMENT_BYTES == 0
    spans = sorted(
        (p.storage_offset(), p.storage_offset() + p.numel())
        for p in state.params.params
        if p.dtype == torch.float32 and p.numel()
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    flat = next(f for f in state.params.flats if f.dtype == torch.float64)
    with torch.no_grad():
        flat.zero_()
    assert mixed.wide.tolist() == [0.0] * 7


def test_frozen_parameters_keep_their_memory(mixed):
    pointer = mixed.frozen.data_ptr()
    FlatState(mixed)
    assert mixed.frozen.data_ptr() == pointer


def test_a_loaded_snapshot_restores_the_state_and_shares_no_memory(mixed):
    state = FlatState(mixed)
    wanted = {k: v.clone() for k, v in mixed.state_dict().items()}
    payload = state.new_payload()
    state.snapshot_into(payload)
    with torch.no_grad():
        for t in (*state.params.params, *mixed.buffers()):
            t.zero_()
    state.load(payload)
    for key, value in mixed.state_dict().items():
        assert torch.equal(value, wanted[key]), key
    assert mixed.mask.tolist() == [True, False]
    live = {t.untyped_storage().data_ptr() for t in (*mixed.parameters(), *mixed.buffers())}
    tensors = (*payload.params, *payload.buffers, *payload.other_buffers)
    assert not live & {t.untyped_storage().data_ptr() for t in tensors}
    assert payload.num_bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_a_measured_snapshot_returns_the_norm_of_each_flat_tensor(mixed):
    state = FlatState(mixed)
    plain, measured = state.new_payload(), state.new_payload()
    state.snapshot_into(plain)
    squares = state.snapshot_with_norms(measured)
    for one, other in zip(
        (*plain.params, *plain.buffers, *plain.other_buffers),
        (*measured.params, *measured.buffers, *measured.other_buffers),
        strict=True,
    ):
        assert torch.equal(one, other)
    assert squares == pytest.approx([float(f.double().square().sum()) for f in state.params.flats])


@pytest.mark.parametrize("at_once", [False, True])
def test_progress_is_kept_exactly(mixed, at_once):
    state = FlatState(mixed)
    base, scratch = state.new_payload(), state.new_payload()
    state.snapshot_into(base)
    average = state.new_payload()
    state.snapshot_into(average)
    for t in (*average.params, *average.buffers):
        t.add_(10.0)
    with torch.no_grad():
        mixed.wide += 1.0
        mixed.norm.num_batches_tracked += 4
        mixed.norm.running_var += 2.0
        mixed.mask.fill_(True)
    if at_once:
        state.add_progress(average, base, scratch)
    else:
        state.compute_progress(base, scratch)
        state.load_with_progress(average, base, scratch)
    assert mixed.wide.tolist() == [i + 11.0 for i in range(7)]
    assert mixed.scalar.item() == 12.0
    assert int(mixed.norm.num_batches_tracked) == 4
    assert mixed.norm.running_var.tolist() == [13.0] * 5
    assert mixed.mask.tolist() == [True, True]


def test_a_replaced_buffer_is_read_from_its_new_tensor(mixed):
    state = FlatState(mixed)
    mixed.norm.running_var = torch.full((5,), 6.0)
    payload = state.new_payload()
    state.snapshot_into(payload)
    with torch.no_grad():
        mixed.norm.running_var.zero_()
    state.load(payload)
    assert mixed.norm.running_var.tolist() == [6.0] * 5


def test_buffers_with_graphs_or_rare_dtypes_are_copied(monkeypatch):
    together = torch._foreach_copy_

    def as_on_a_gpu(targets, sources, **options):
        assert {t.dtype for t in (*targets, *sources)} == {torch.float32}, "no kernel"
        together(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", as_on_a_gpu)
    module = torch.nn.Module()
    for name, dtype in (("a", torch.float32), ("b", torch.uint16), ("c", torch.complex64)):
        module.register_buffer(name, torch.ones(2, dtype=dtype))
    module.register_buffer("d", torch.ones(2))
    state = FlatState(module)
    # Outside no_grad, as under lockstep before a step that may be undone.
    module.a = 3.0 * torch.ones(2, requires_grad=True)
    module.d = torch.full((2,), 4.0, dtype=torch.float64)
    kept = state.buffers.empty()
    state.buffers.read_into(*kept)
    for buffer in module.buffers():
        buffer.detach().zero_()
    module.a = torch.zeros(2, requires_grad=True)  # not writable under autograd
    state.buffers.write_from(*kept)
    assert [b.tolist() for b in module.buffers()] == [[3, 3], [1, 1], [1, 1], [4, 4]]
    assert not any(flat.requires_grad for flat in (*kept[0], *kept[1]))


def test_a_model_without_buffers_has_none():
    state = FlatState(nn.Linear(2, 2))
    assert not state.buffers
    assert not state.buffers


def test_norm_is_taken_over_all_tensors():
    assert float(norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)])) == 5.0


def train_mixed(model, batch):
    loss = model.wide.sum() + model.low.sum().double() + model.turned.sum() + model.scalar
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    out = model.norm(model.conv(image)).mean(dim=(2, 3))
    return loss + model.same(model.linear(out)).double().sum()


@local_ways
def test_the_state_of_a_run_loads_strictly_into_the_bare_module(way):
    layouts = []

    def layout(epoch, worker):
        layouts.append(worker.model.conv.weight.stride())
        assert worker.model.same is worker.model.linear

    b = builder(
        model=lambda device: Mixed().to(device),
        optim=lambda p: torch.optim.SGD(p, 0.01),
        train=train_mixed,
        dataset=9,
        way=way,
    )
    state = b.epoch_fn(layout).run().join(WAIT_S)
    assert layouts == [(27, 1, 9, 3)] * 2
    bare = Mixed()
    assert list(state.state_dict()) == list(bare.state_dict())
    bare.load_state_dict(state.state_dict(), strict=True)
    assert torch.equal(bare.same.weight, state.params["linear.weight"])
    assert torch.equal(state.params["same.weight"], state.params["linear.weight"])
    assert state.params["frozen"].tolist() == [3.0] * 4
    assert state.params["low"].dtype is torch.bfloat16
    assert state.buffers["mask"].tolist() == [True, False]  # not persistent, but known
    assert "mask" not in state.state_dict()
    assert int(state.buffers["norm.num_batches_tracked"]) >= 1
    for tensor in (*state.params.values(), *state.buffers.values()):
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"


def test_the_state_owns_its_memory():
    built = []

    def model(device):
        built.append(Mixed())
        return built[-1]

    b = builder(
        model=model,
        optim=lambda p: torch.optim.SGD(p, 0.01),
        train=train_mixed,
        dataset=4,
        way=LOCAL_WAYS[0],
    )
    state = b.run().join(WAIT_S)
    kept = state.params["wide"].clone()
    with torch.no_grad():
        for module in built:
            module.wide.zero_()
    assert torch.equal(state.params["wide"], kept)
