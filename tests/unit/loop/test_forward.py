"""Forward over several replicas: inputs, outputs and threads."""

from __future__ import annotations

import gc
import inspect
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from coordinator.splitting import split_by_ratio
from runtime import DdpConfig, ReplicaFailed, Trainer
from runtime.core.nested import _warn_once
from runtime.loop.scatter import Scatter
from tests.support.own_loop import (
    NUM_FEATURES,
    WAIT_S,
    assert_identical,
    make_net,
    on_cpus,
    sgd,
)

CPU = torch.device("cpu")
UNCHECKED = DdpConfig(whole=[])
"""Without the calls that check a first batch."""


class Pair(NamedTuple):
    left: object
    right: object


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    extra: object = None


class Echo(nn.Module):
    """Returns a function of its inputs, times a parameter."""

    def __init__(self, make):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.make = make

    def forward(self, *args, **kwargs):
        return self.make(self, *args, **kwargs)


def numbers(n, width=1):
    return torch.arange(n * width, dtype=torch.float64).view(n, width)


@given(st.integers(1, 60), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7))
def test_shards_of_inputs_are_complete_and_disjoint(num_samples, weights):
    x = numbers(num_samples)
    scatter = Scatter((x,), {"twice": [x * 2]})
    start, found, twice = 0, [], []
    for size in split_by_ratio(num_samples, weights):
        piece = scatter.shard(start, start + size, CPU)
        found += piece.args[0].flatten().tolist()
        twice += piece.kwargs["twice"][0].flatten().tolist()
        start += size
    assert found == x.flatten().tolist()
    assert twice == (x * 2).flatten().tolist()


def nested(model, x, *, more, flag):
    assert flag == "on"
    left, (right, scale) = more["left"], more["right"]
    return (x * model.w + left) * scale + right


def test_nested_positional_and_keyword_inputs_are_cut_at_the_same_places():
    x, left, right = numbers(7), numbers(7) * 10, numbers(7) * 100
    more = {"left": left, "right": Pair(right, torch.tensor(3.0, dtype=torch.float64))}
    with on_cpus(Echo(nested), 3) as model:
        out = model(x, more=more, flag="on")
        assert torch.equal(out, (x + left) * 3 + right)
        out.sum().backward()
        assert model.w.grad == (x * 3).sum()


def several(model, x):
    y = x * model.w
    inner = OrderedDict(b=y[:, 0], a=(y, [y * 2, None]))
    table = defaultdict(list)
    table["rows"] = y
    return Pair(inner, [Output(logits=y, extra=("text", 3, CPU)), table, y.argmax(1), y.mean()])


def test_nested_outputs_equal_those_of_one_device():
    x = torch.randn(7, 2, dtype=torch.float64)
    echo = Echo(several)
    expected = echo(x)
    with on_cpus(echo, 3) as model:
        out = model(x)
    assert type(out) is Pair
    assert type(out.left) is OrderedDict
    assert list(out.left) == ["b", "a"]
    assert torch.equal(out.left["b"], expected.left["b"])
    assert type(out.left["a"]) is tuple
    assert torch.equal(out.left["a"][1][0], expected.left["a"][1][0])
    assert out.left["a"][1][1] is None
    output, table, indices, mean = out.right
    assert type(output) is Output
    assert output.extra == ("text", 3, CPU)
    assert torch.equal(output.logits, expected.right[0].logits)
    assert type(table) is defaultdict
    assert table.default_factory is list
    assert torch.equal(indices, expected.right[2])
    assert not indices.requires_grad
    assert mean.shape == ()
    assert torch.allclose(mean, expected.right[3], rtol=1e-12)


def test_an_output_of_several_rows_for_each_sample_keeps_their_order():
    x = numbers(5, 4)
    with on_cpus(Echo(lambda m, x: (x * m.w).view(-1, 2)), 2) as model:
        assert torch.equal(model(x), x.view(-1, 2))


def test_a_mean_loss_as_output_is_weighted_by_samples():
    """With unequal shards the mean of means would differ."""
    x = torch.randn(7, 1, dtype=torch.float64)
    with on_cpus(Echo(lambda m, x: (x * m.w).square().mean()), 2) as model:
        loss = model(x)
        assert torch.allclose(loss, x.square().mean(), rtol=1e-12)
        loss.backward()
        assert torch.allclose(model.w.grad, 2 * x.square().mean(), rtol=1e-12)


@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_a_batch_smaller_than_the_number_of_devices_runs_on_the_first_devices(num_samples):
    ran = []
    lock = threading.Lock()

    def note(model, x):
        with lock:
            ran.append(len(x))
        return x * model.w

    with on_cpus(Echo(note), 4, config=UNCHECKED) as model:
        x = numbers(num_samples)
        out = model(x)
        assert torch.equal(out, x)
        assert ran == [1] * num_samples
        out.sum().backward()
        assert model.w.grad == x.sum()
        model.step()
        assert_identical(model)


def test_a_batch_without_samples_runs_on_the_first_device():
    with on_cpus(make_net(), 2) as model:
        assert model(torch.empty(0, NUM_FEATURES, dtype=torch.float64)).shape == (0, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_has_no_graph(mode):
    net = make_net()
    x = torch.randn(5, NUM_FEATURES, dtype=torch.float64)
    expected = net(x)
    with on_cpus(net, 2) as model:
        model.eval()
        with mode():
            out = model(x)
    assert not out.requires_grad
    assert torch.allclose(out, expected, rtol=1e-12)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_applies_to_the_replicas(mode):
    found = []

    def note(model, x):
        found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x * model.w

    with on_cpus(Echo(note), 2, config=DdpConfig(whole=[])) as model, mode():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        model(numbers(4))
    assert found == [expected] * 2


def test_autocast_of_the_caller_applies_to_the_replicas():
    with on_cpus(make_net(torch.float32), 2) as model:
        x = torch.randn(4, NUM_FEATURES)
        assert model(x).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype is torch.bfloat16


class Meeting(torch.autograd.Function):
    """Waits in forward and in backward until all replicas arrive."""

    barrier = None
    threads = None

    @staticmethod
    def forward(ctx, x):
        Meeting.barrier.wait(WAIT_S)
        Meeting.threads["forward"].add(threading.current_thread().name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Meeting.barrier.wait(WAIT_S)
        Meeting.threads["backward"].add(threading.current_thread().name)
        return grad


def test_replicas_run_forward_and_backward_concurrently_in_their_own_threads():
    Meeting.barrier, Meeting.threads = threading.Barrier(3), {"forward": set(), "backward": set()}
    config = DdpConfig(whole=[])
    with on_cpus(Echo(lambda m, x: Meeting.apply(x * m.w)), 3, config=config) as model:
        model(numbers(6)).sum().backward()
        model.step()
    assert len(Meeting.threads["forward"]) == 3
    assert Meeting.threads["forward"] == Meeting.threads["backward"]
    assert threading.current_thread().name not in Meeting.threads["forward"]


@pytest.fixture
def num_threads():
    """More than one intra-op thread on any machine; restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_cpu_replicas_and_the_caller_share_the_cores_until_the_end(num_threads):
    found = []

    def note(model, x):
        found.append(torch.get_num_threads())
        return x * model.w

    both = [on_cpus(Echo(note), 2, config=UNCHECKED) for _ in range(2)]
    with both[0] as model, both[1] as other:
        model(numbers(2))
        other(numbers(2))
        assert torch.get_num_threads() == 1
    assert found == [1] * 4
    assert torch.get_num_threads() == num_threads


def test_intra_op_threads_are_restored_if_the_caller_never_closes(num_threads):
    model = Trainer.setup(make_net(), sgd, ["cpu", "cpu"])
    assert torch.get_num_threads() == 1
    threads = [t for t in threading.enumerate() if t.name.startswith("replica-")]
    del model
    gc.collect()
    assert torch.get_num_threads() == num_threads
    for thread in threads:
        thread.join(WAIT_S)


def test_closing_a_model_from_another_thread_restores_the_intra_op_threads(num_threads):
    model = Trainer.setup(make_net(), sgd, ["cpu", "cpu"])
    closer = threading.Thread(target=model.close)
    closer.start()
    closer.join(WAIT_S)
    assert torch.get_num_threads() == 1
    with on_cpus(make_net(), 2):
        pass
    assert torch.get_num_threads() == num_threads


def test_intra_op_threads_set_meanwhile_stay(num_threads):
    with on_cpus(make_net(), 3):
        torch.set_num_threads(7)
    assert torch.get_num_threads() == 7


def test_batches_are_divided_by_measured_throughput():
    calibrated = []

    def slow_in_one_thread(model, x):
        if threading.current_thread().name.endswith("-1"):
            threading.Event().wait(0.002 * len(x))
        return x * model.w

    with on_cpus(Echo(slow_in_one_thread), 2) as model:
        assert model.chunk_ratios == (0.5, 0.5)
        for _ in range(10):
            calibrated.append(model.chunk_ratios)
            model(numbers(4)).sum().backward()
            model.step()
        assert set(calibrated) == {(0.5, 0.5)}
        assert model.chunk_ratios[0] > 0.6
        assert sum(model.chunk_ratios) == pytest.approx(1.0)


def test_a_speed_hint_gives_the_first_ratios():
    config = DdpConfig(speed_hint=(0, 3.0), max_anchor=0, whole=[])
    sizes = []
    lock = threading.Lock()

    def note(model, x):
        with lock:
            sizes.append((threading.current_thread().name[-1], len(x)))
        threading.Event().wait(0.005 * len(x))  # equal speeds, contrary to the hint
        return x * model.w

    with on_cpus(Echo(note), 2, config=config) as model:
        assert model.chunk_ratios == (0.25, 0.75)
        for _ in range(10):
            model(numbers(8)).sum().backward()
            model.step()
        assert sorted(sizes[:2]) == [("0", 2), ("1", 6)]
        assert model.chunk_ratios[0] > 0.3


# -- errors ------------------------------------------------------------------------


def refused(make, *args, error, match, **kwargs):
    with on_cpus(Echo(make), 2, sgd, config=UNCHECKED) as model:
        with pytest.raises(error, match=match):
            model(*args, **kwargs)
        model.make = lambda m, x: x * m.w
        assert torch.equal(model(numbers(3)), numbers(3))  # stays usable


def test_inputs_without_a_batch_are_refused():
    refused(lambda m, *a: m.w, 3, torch.tensor(1.0), error=ValueError, match="dimension to divide")


def test_inputs_of_different_sizes_are_refused():
    refused(
        lambda m, *a: m.w,
        numbers(3),
        numbers(4),
        error=ValueError,
        match=r"\(3, 1\), input 1 \(4, 1\)",
    )


def test_numpy_inputs_are_refused():
    refused(lambda m, *a: m.w, np.zeros(3), error=TypeError, match="as_tensor")


def test_sparse_inputs_are_refused():
    sparse = torch.eye(3).to_sparse()
    refused(lambda m, *a: m.w, sparse, error=TypeError, match="dense")


def test_packed_sequences_are_refused():
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 2]))
    refused(lambda m, *a: m.w, packed, error=TypeError, match="padded")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda m, x: x.sum(0), ValueError, "batch first"),
        (lambda m, x: (x * m.w).T, ValueError, "batch first"),
        (lambda m, x: torch.tensor(len(x)), ValueError, "one value for each sample"),
        (lambda m, x: {"n": len(x)}, ValueError, "rank 1 returned another output"),
        (lambda m, x: (x,) * len(x), ValueError, "rank 1 returned another output"),
        (lambda m, x: x if len(x) > 1 else [x], ValueError, "rank 1 returned another output"),
        (lambda m, x: {x, m.w}, RuntimeError, "rank 0.*TypeError.*a set"),
    ],
)
def test_outputs_that_cannot_be_gathered_are_refused(make, error, match):
    refused(make, numbers(3), error=error, match=match)


# Outputs that cannot be gathered.


class Cache:
    """An opaque object with tensors, like the cache of a generative model."""

    def __init__(self, keys):
        self.keys = keys


@pytest.mark.parametrize("num_devices", [2, 3])
def test_an_opaque_object_in_the_output_is_none_and_logged_once(num_devices, caplog):
    _warn_once.cache_clear()
    net = Echo(lambda model, x: Output(x * model.w, extra=Cache(x)))
    with on_cpus(net, num_devices) as model:
        for _ in range(2):
            output = model(numbers(6))
            assert output.extra is None
            output.logits.sum().backward()
            model.step()
    warnings = [r.getMessage() for r in caplog.records if "replaced by None" in r.getMessage()]
    assert len(warnings) == 1
    assert "a Cache in 'extra' of a Output" in warnings[0]


@dataclass
class ModelOutput(OrderedDict):
    """An output of generative models: fields that are not ``None`` are items too."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: object = None

    def __post_init__(self):
        for name in ("loss", "logits", "past_key_values"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class BothCaches:
    """A decoder output with an encoder output."""

    def __init__(self, keys):
        self.self_attention_cache, self.cross_attention_cache = Cache(keys), Cache(keys)


class Generative(nn.Module):
    """Returns its cache with each loss, the default of generative models."""

    def __init__(self, cache):
        super().__init__()
        self.table = nn.Embedding(7, 7, dtype=torch.float64)
        self.cache = cache

    def forward(self, ids, labels):
        logits = self.table(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return ModelOutput(loss, logits, self.cache(self.table.weight[ids]))


@pytest.mark.parametrize("cache", [Cache, BothCaches, lambda keys: ((keys, keys),)])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_generative_model_trains_as_on_one_device(num_devices, cache):
    """Texts of one length, so that losses weigh the same; a cache of tensors is gathered."""

    def trained(num_devices):
        torch.manual_seed(0)
        net = Generative(cache)
        with on_cpus(net, num_devices) as model:
            for _ in range(3):
                ids = torch.randint(7, (7, 5))
                output = model(ids=ids, labels=ids)
                assert output.logits.shape == (7, 5, 7)
                output["loss"].backward()
                model.step()
            if num_devices > 1 and not isinstance(cache, type):
                assert torch.equal(output.past_key_values[0][1], output.past_key_values[0][0])
                assert output.past_key_values[0][0].shape == (7, 5, 7)
            assert list(model.state_dict()) == ["table.weight"]
        return net.table.weight.detach().clone()

    assert torch.allclose(trained(num_devices), trained(1), rtol=0, atol=1e-12)


def test_an_object_that_is_the_whole_output_is_refused():
    with (
        on_cpus(Echo(lambda model, x: Cache(x * model.w))) as model,
        pytest.raises(ReplicaFailed) as caught,
    ):
        model(numbers(6))
    assert "forward returned a Cache" in str(caught.value.__cause__)


def similar(model, x):
    """Similarity of each two samples of a shard."""
    z = x * model.w
    return z @ z.T


def contrast(model, x):
    """The similarity with a loss over the shard, like CLIP's output."""
    logits = similar(model, x)
    loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)))
    return {"loss": loss, "logits_per_image": logits, "logits_per_text": logits.T, "embeds": x}


@pytest.mark.parametrize("is_tried", [True, False])
@pytest.mark.parametrize("hint", [None, (0, 2.0)])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("make", [similar, contrast])
def test_outputs_that_relate_samples_to_each_other_are_refused(num_devices, hint, make, is_tried):
    config = DdpConfig(speed_hint=hint, whole=None if is_tried else [])
    with on_cpus(Echo(make), num_devices, config=config) as model:
        if hint is None and not is_tried:
            model(numbers(6))  # with equal shards the result could agree by chance
        way = r"relate them .* in the loop.* gpuworker\.all_gather\(z\)"
        with pytest.raises(ValueError, match=way):
            model(numbers(6))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_relations_between_samples_can_be_computed_in_the_loop_with_gradients(num_devices):
    def trained(num_devices):
        torch.manual_seed(0)
        net = nn.Linear(4, 3, dtype=torch.float64)
        with on_cpus(net, num_devices) as model:
            for _ in range(3):
                z = model(torch.randn(6, 4, dtype=torch.float64))
                (z @ z.T).square().mean().backward()
                model.step()
        return net.weight.detach().clone()

    assert torch.allclose(trained(num_devices), trained(1), rtol=0, atol=1e-12)


def test_a_dimension_equal_to_the_shard_size_by_coincidence_is_accepted():
    with on_cpus(Echo(lambda model, x: x * model.w)) as model:
        for n in (6, 6, 4, 6):
            x = numbers(n, 3)
            assert torch.equal(model(x), x)


def boxes(model, x, targets):
    """Features with the sum of each sample's own boxes, as detection models receive them."""
    sums = torch.stack([target["boxes"].sum() + target["label"] for target in targets])
    return x[:, 0] * model.w + sums


def test_a_list_with_an_entry_for_each_sample_is_cut_with_the_batch():
    x = numbers(7)
    targets = [
        {"boxes": torch.ones(n, 4, dtype=torch.float64), "label": torch.tensor(n)} for n in range(7)
    ]
    echo = Echo(boxes)
    expected = echo(x, targets)
    with on_cpus(echo, 3) as model:
        found = model(x, targets)
        assert torch.equal(found, expected)
        found.sum().backward()
        assert model.w.grad == x.sum()


IMAGES = [
    torch.randn(3, 4, 4 + k % 3, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    for k in range(8)
]
TARGETS = [
    {"boxes": torch.full((1 + k % 3, 4), float(k), dtype=torch.float64), "name": str(k)}
    for k in range(8)
]


def means(model, images, targets=None):
    found = torch.stack([image.mean((1, 2)) for image in images]) * model.w
    if targets is None:
        return found
    return found + torch.stack([t["boxes"].sum() + int(t["name"]) for t in targets])[:, None]


def joined(images, targets):
    return [{"image": image, **target} for image, target in zip(images, targets, strict=True)]


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize(
    "inputs",
    [
        (IMAGES,),
        (IMAGES, TARGETS),
        (tuple(IMAGES), tuple(TARGETS)),
        ({"images": IMAGES, "targets": TARGETS},),
        (joined(IMAGES, TARGETS),),
        ([image.flatten(1).T for image in IMAGES],),  # sequences of several lengths
        ([image[:, :, :4] for image in IMAGES],),
        ([image[:, :, :4] for image in IMAGES], TARGETS),
    ],
    ids=["images", "targets", "tuples", "dict", "dicts", "sequences", "one size", "one size too"],
)
def test_lists_of_images_and_targets_are_cut_by_samples(num_devices, inputs):
    def forward(model, batch, targets=None):
        if isinstance(batch, dict):
            return means(model, **batch)
        if isinstance(batch[0], dict):
            return means(model, [sample["image"] for sample in batch], batch)
        assert type(batch) is type(inputs[0])
        return means(model, [x if x.dim() == 3 else x.T[:, None] for x in batch], targets)

    echo = Echo(forward)
    expected = echo(*inputs)
    with on_cpus(echo, num_devices) as model:
        for _ in range(2):
            found = model(*inputs)
            assert torch.equal(found, expected)
        found.sum().backward()
        assert torch.allclose(model.w.grad, torch.autograd.grad(expected.sum(), echo.w)[0])


def test_a_tuple_of_texts_as_a_loader_makes_it_is_cut_with_the_batch():
    texts = tuple("abcdefg")

    def forward(model, x, texts):
        return x * model.w + torch.tensor([[ord(text)] for text in texts])

    echo = Echo(forward)
    with on_cpus(echo, 2) as model:
        assert torch.equal(model(numbers(7), texts), echo(numbers(7), texts))


@pytest.mark.parametrize("num_samples", [6, 3])
def test_a_list_of_columns_is_cut_along_each(num_samples):
    """Also if the last batch looks like images."""
    columns = [torch.randn(6, 4, width, dtype=torch.float64) for width in (5, 6, 5, 6, 5)]

    def forward(model, columns):
        assert len(columns) == 5
        return sum(x.mean((1, 2)) for x in columns)[:, None] * model.w

    echo = Echo(forward)
    with on_cpus(echo, 2) as model:
        for num in (6, num_samples):
            batch = [x[:num] for x in columns]
            assert torch.allclose(model(batch), echo(batch))


def test_a_list_that_is_as_long_as_a_later_batch_by_coincidence_is_not_cut():
    names = ["a", "b", "c", "d"]
    echo = Echo(lambda model, x, names: x * model.w * len(names))
    with on_cpus(echo, 2) as model:
        for num in (6, 4):
            assert torch.equal(model(numbers(num), names), 4 * numbers(num))


def test_a_list_that_has_no_longer_an_entry_for_each_sample_is_refused():
    echo = Echo(lambda model, x, names: x * model.w)
    with on_cpus(echo, 2) as model:
        model(numbers(4), list("abcd"))
        with pytest.raises(ValueError, match=r"the list 'input 1' had an entry.*has 4 for 6"):
            model(numbers(6), list("abcd"))


def test_a_module_whose_forward_has_no_signature_is_cut_by_position():
    class NoSignature:
        __signature__ = "none"

        def __call__(self, x):
            return x * 2

    echo = Echo(None)
    echo.forward = NoSignature()
    with pytest.raises((TypeError, ValueError)):
        inspect.signature(echo.forward)
    with on_cpus(echo, 2) as model:
        assert torch.equal(model(numbers(5)), numbers(5) * 2)
