"""Refused calls of loops, and the settings of one device that several devices have as well."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from runtime import (
    DataParallelCoordinator,
    DdpConfig,
    ReplicaFailed,
    ReplicaMismatch,
    Trainer,
    Weighted,
)
from runtime.loop import mirror, scatter, threaded
from runtime.loop.balance import Balancer
from runtime.loop.loop_engine import WEIGHTED_TWICE
from tests.support.own_loop import (
    NUM_CLASSES,
    NUM_FEATURES,
    OneDevice,
    assert_close,
    loss_fn,
    make_batch,
    make_net,
    on_cpus,
    sgd,
    train_step,
)
from tests.support.wrapping import fill, nets, wrap

one_or_two = pytest.mark.parametrize("num_devices", [1, 2])


# -- Trainer.setup -------------------------------------------------------------------


@one_or_two
def test_a_weight_for_accumulated_batches_is_refused(num_devices):
    with on_cpus(make_net(), num_devices) as model:
        model.accumulate(loss_fn, [make_batch(4)])
        with pytest.raises(ValueError, match=re.escape(WEIGHTED_TWICE)):
            model.step(2.0)
        model.step()


@one_or_two
def test_accumulated_batches_of_weight_0_make_no_step(num_devices):
    net = make_net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with on_cpus(net, num_devices) as model:
        model.accumulate(lambda m, b: (loss_fn(m, b), 0), [make_batch(4), make_batch(4)])
        model.step()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        train_step(model, *make_batch(4))
        assert not all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_model_that_calls_itself_is_refused():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    with on_cpus(Inner(), 2) as model:
        engine = model._engine
        with engine._exclusive(), pytest.raises(RuntimeError, match="inside one of its own calls"):
            model(torch.ones(8, 2))
        assert tuple(model(torch.ones(8, 2)).shape) == (8, 2)


def test_a_scheduler_after_removed_parameter_groups_starts_from_their_rates():
    net = make_net()

    def groups(params):
        first, *others = params
        return torch.optim.SGD([{"params": [first]}, {"params": others}], 0.5)

    with on_cpus(net, 1, optim=groups) as model:
        model.set_lr_scale(0.5)
        train_step(model, *make_batch(4))
        del model.optimizer.param_groups[1]
        with pytest.raises(RuntimeError, match="has 1 parameter groups"):
            train_step(model, *make_batch(4))
        model.set_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.1))
        assert model.current_lr == 0.25
        model.zero_grad()
        train_step(model, *make_batch(4))
        assert model.current_lr == pytest.approx(0.025)


class Bank(nn.Module):
    """Relates each sample to all rows of an input that belongs to no sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, bank):
        return self.linear(x) @ bank.mean(0)


def test_an_output_that_depends_on_the_split_of_the_batch_is_refused():
    x, bank = torch.randn(8, 3), torch.randn(8, 3)
    with on_cpus(Bank(), 2) as model:
        for _ in range(2):  # not checked off by the first refusal
            with pytest.raises(Exception, match=r"is not that for 2 and 2 of them put together"):
                model(x, bank)
    config = DdpConfig(whole=["bank"])
    net = Bank()
    with on_cpus(net, 2, config=config) as model:
        torch.testing.assert_close(model(x, bank), net(x, bank))


RELATIONS = {
    "softmax": lambda z: z.softmax(0),
    "centred": lambda z: z - z.mean(0),
    "normalized": lambda z: z / z.norm(),
    "mixed": lambda z: 0.5 * z + 0.5 * z.roll(1, 0),
    "reversed": lambda z: z.flip(0),
    "divided by the size of the batch": lambda z: z / len(z),
    "twice": lambda z: torch.cat([z, 2 * z]),
}


@pytest.mark.parametrize("num_samples", [2, 3, 8])
@pytest.mark.parametrize("relate", RELATIONS.values(), ids=RELATIONS)
def test_a_model_of_one_input_that_relates_samples_is_refused_unless_that_is_accepted(
    relate, num_samples
):
    class Relating(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return relate(self.net(x))

    x, _ = make_batch(num_samples)
    counts = {2: "2 samples is not that for 1 and 1", 3: "3 samples is not that for 1 and 2"}
    match = counts.get(num_samples, "4 samples is not that for 2 and 2")
    with on_cpus(Relating()) as model:
        for _ in range(2):
            with pytest.raises(ValueError, match=match) as caught:
                model(x)
            assert "return what it relates" in str(caught.value)
            assert "DdpConfig(whole=[]) accepts the difference" in str(caught.value)
    with on_cpus(Relating(), config=DdpConfig(whole=[])) as model:
        model(x).sum().backward()


def standardized(z):
    return z + 0.01 * z.std(0, correction=0).mean()  # minibatch deviation


def attentive(strength):
    return lambda z: z + strength * ((z @ z.T).softmax(1) @ z)


def in_float32(z):
    return (z.float() + 1e-4 * z.float().mean(0)).to(z.dtype)


WEAK = {
    "deviation": standardized,
    "attention": attentive(1e-2),
    "weak attention": attentive(1e-5),
    "weak mean": lambda z: z + 1e-5 * z.mean(0),
    "in float32": in_float32,
    "number of samples": lambda z: z * (1 + 1e-3 * len(z)),
    "with noise": lambda z: z.softmax(0) + 1e-3 * torch.randn_like(z),
    "below noise": lambda z: standardized(z) + 0.1 * torch.randn_like(z),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relate", WEAK.values(), ids=WEAK)
def test_a_weak_relation_of_samples_is_refused(relate, dtype):
    class Relating(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net(dtype)

        def forward(self, x):
            return relate(self.net(x))

    for num_samples in (2, 8):
        with (
            on_cpus(Relating()) as model,
            pytest.raises(ValueError, match=r"is not that for . and . of them put together"),
        ):
            model(make_batch(num_samples, dtype)[0])


def rms_norm(z):
    """As in language models: in float32 whatever the dtype of the rest."""
    norm = z.float().square().mean(-1, keepdim=True)
    return (z.float() * torch.rsqrt(norm + 1e-6)).to(z.dtype)


ROUNDED = {
    "plain": lambda z: z,
    "float32 inside": rms_norm,
    "bfloat16 inside": lambda z: z.bfloat16().matmul(torch.ones(3, 3).bfloat16()).to(z.dtype),
    "constant of float32": lambda z: z.float() @ torch.full((3, 3), 0.3),
    "index of the maximum": lambda z: (z, z.argmax(1)),
    "infinite": lambda z: z.masked_fill(z > 0, -torch.inf),
    "random": lambda z: z + 1e-3 * torch.randn_like(z),
    "dropout in eval mode": lambda z: F.dropout(z, 0.5, training=True),
    "drawn classes": lambda z: F.gumbel_softmax(z.float()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", ROUNDED.values(), ids=ROUNDED)
def test_rounding_and_random_numbers_are_no_relation(make, dtype):
    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(NUM_FEATURES, 300)
            self.net = nn.Sequential(self.wide, nn.Tanh(), nn.Linear(300, 3)).to(dtype)

        def forward(self, x):
            return make(self.net(x))

    torch.manual_seed(0)
    for num_samples in (2, 3, 8):
        with torch.no_grad(), on_cpus(Rounding()) as model:
            model(make_batch(num_samples, dtype)[0])


class Remembering(nn.Module):
    """Adds what its last call of as many samples left, or numbers of a generator of its own."""

    def __init__(self, relate=lambda z: z, *, draws=False):
        super().__init__()
        self.net, self.relate, self.last = make_net(torch.float32), relate, None
        self.generator = torch.Generator().manual_seed(0) if draws else None

    def forward(self, x):
        z = self.net(x)
        if self.generator is not None:
            return self.relate(z) + torch.randn(z.shape, generator=self.generator)
        fits = self.last is not None and len(self.last) == len(z)
        found = self.relate(z) + (self.last if fits else 0)
        self.last = z.detach()
        return found


@pytest.mark.parametrize("small_bytes", [0, 1 << 28])
@pytest.mark.parametrize("draws", [False, True])
def test_a_state_that_a_call_leaves_to_the_next_is_no_relation(monkeypatch, small_bytes, draws):
    monkeypatch.setattr(mirror, "SMALL_MODEL_BYTES", small_bytes)
    monkeypatch.setattr(threaded, "needs_check", lambda scatter: True)
    for num_samples in (2, 3, 8):
        with torch.no_grad(), on_cpus(Remembering(draws=draws)) as model:
            model(make_batch(num_samples, torch.float32)[0])


@pytest.mark.parametrize("relate", [standardized, attentive(1e-2)])
def test_a_weak_relation_beside_a_state_is_refused(relate):
    with on_cpus(Remembering(relate)) as model, pytest.raises(ValueError, match="put together"):
        model(make_batch(8, torch.float32)[0])


def test_a_model_with_little_noise_in_eval_mode_is_not_judged():
    class Noisy(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):  # equal calls are up to 8 % apart
            Noisy.calls += 1
            noise = {1: 0.0, 2: 0.03}.get(Noisy.calls, 0.08)
            return self.net(x) * (1 + noise)

    with on_cpus(Noisy()) as model:
        model(make_batch(8)[0]).sum().backward()


def test_sequences_of_the_longest_sample_of_each_rank_are_refused_with_the_remedy():
    class Trimming(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x, lengths):
            return self.net(x)[:, : int(lengths.max())]

    x = make_batch(72)[0].view(8, 9, -1)
    with on_cpus(Trimming()) as model, pytest.raises(ValueError, match=r"total_length=x.size\(1\)"):
        model(x, torch.arange(1, 9))


@pytest.mark.parametrize("track", [True, False])
def test_statistics_of_batch_normalization_are_no_reason_to_refuse_a_model(track):
    net = make_net()
    norm = nn.BatchNorm1d(NUM_CLASSES, track_running_stats=track, dtype=torch.float64)
    with on_cpus(nn.Sequential(net, norm)) as model:
        model(make_batch(8)[0]).sum().backward()


class Returning(nn.Module):
    """Returns a function of its linear layer's output."""

    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)
        self.make = make

    def forward(self, x, **kwargs):
        return self.make(self, self.linear(x), **kwargs)


COUNTING = {
    "list of rows": lambda _, z: list(z.repeat(1, 4)),
    "dicts of rows": lambda _, z: [{"row": row} for row in z.repeat(1, 4)],
    "number": lambda _, z: (z, len(z)),
    "shape": lambda _, z: {"logits": z, "shape": z.shape},
}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_an_output_whose_structure_depends_on_the_number_of_samples_is_refused(make):
    x, _ = make_batch(8)
    with on_cpus(Returning(make)) as model:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"depends on the number of samples.*torch\.stack"):
                model(x)
    with on_cpus(Returning(make), config=DdpConfig(whole=[])) as model:
        model(x)  # the lists have the same length
        with pytest.raises(ValueError, match="another output than rank 0"):
            model(x)


@pytest.mark.parametrize(
    "make", [lambda z: torch.arange(len(z)), lambda z: z[:, 0].argsort(0), lambda _: torch.eye(4)]
)
def test_indices_and_constants_that_depend_on_the_split_are_refused(make):
    x, _ = make_batch(8)
    with torch.no_grad(), on_cpus(Returning(lambda _, z: (z, make(z)))) as model:
        model.module.linear.weight.fill_(1.0)
        with pytest.raises(ValueError, match=r"is not that for 2 and 2|relates the samples"):
            model(x.sort(0, descending=True).values)


def top(num):
    return lambda z: z + z.topk(num, 0).values.mean()


PIECES = {
    "more than a piece has": top(5),
    "of the whole batch": lambda z: z.view(2, 4, -1).flatten(0, 1),
    "rows of the whole batch": lambda z: z + torch.ones(8, 1),
}


@pytest.mark.parametrize("relate", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("given", ["input", "whole"])
def test_an_error_that_only_pieces_cause_names_the_split_and_the_remedies(relate, given):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return relate(self.net(x))

    config = DdpConfig(whole=[]) if given == "whole" else DdpConfig()
    with on_cpus(Whole(), config=config) as model:
        for _ in range(2):
            with pytest.raises(ReplicaFailed) as caught:
                model(make_batch(8)[0])
            text = str(caught.value)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert "pieces of this batch, of 4, 4 samples, and works for all 8 on one" in text
            assert "Split along dimension 0: x." in text
            assert "DdpConfig(whole=['x'])" in text
            assert "DdpConfig(batch_dim=1)" in text
            assert "model.accumulate(loss_fn, batches)" in text


@pytest.mark.parametrize("also", ["whole", "memory", "one device"])
def test_an_error_that_the_whole_batch_has_too_stays_as_it_is(also):
    """Also if there is no memory for the whole batch on one device."""

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            if also == "memory" and len(x) == 8:
                raise torch.OutOfMemoryError("planted: out of memory")
            raise RuntimeError("planted")

    num_devices = 1 if also == "one device" else 2
    with on_cpus(Failing(), num_devices) as model, pytest.raises(RuntimeError) as caught:
        model(make_batch(8)[0])
    assert "planted" in str(caught.value)
    assert "pieces" not in str(caught.value)
    assert "out of memory" not in str(caught.value)


def test_no_memory_for_a_piece_is_not_tried_on_the_whole_batch():
    calls = []

    class Full(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            calls.append(len(x))
            raise torch.OutOfMemoryError("planted")

    with (
        on_cpus(Full(), config=DdpConfig(whole=[])) as model,
        pytest.raises(torch.OutOfMemoryError, match="planted"),
    ):
        model(make_batch(8)[0])
    assert calls == [4, 4]


def test_a_loss_that_relates_the_samples_is_refused():
    def contrast(_, z, labels):
        return F.cross_entropy(5 * z @ z.T, torch.arange(len(labels)))

    x, y = make_batch(8)
    with (
        on_cpus(Returning(contrast)) as model,
        pytest.raises(ValueError, match=r"loss_weight=f.*contrastive losses.*in the loop"),
    ):
        model(x, labels=y)


def test_relations_in_train_mode_only_are_logged_once(caplog):
    def centred(model, z):
        return z - z.mean(0) if model.training else z

    x, _ = make_batch(8)
    net = nn.Sequential(Returning(centred), nn.Dropout(0.5), nn.BatchNorm1d(3).double())
    for mode, num_logged in ((True, 1), (False, 0)):
        with on_cpus(copy.deepcopy(net)) as model:
            caplog.clear()
            model.train(mode)
            for _ in range(3):
                model(x).sum().backward()
            found = [r for r in caplog.records if "in train mode the model's output" in r.message]
            assert len(found) == num_logged


def test_a_number_that_all_devices_compute_alike_is_no_loss_of_unknown_weight(caplog):
    def make(model, z):
        return z, model.linear.weight.exp().sum()

    x, _ = make_batch(8)
    net = Returning(make)
    alone = OneDevice(net)
    with on_cpus(net) as model:
        for each in (model, alone):
            z, scale = each(x)
            (z.logsumexp(1).mean() * scale).backward()
            each.step()
        assert_close(model, alone.model)
    assert "the count that it is a mean over is unknown" not in caplog.text


def test_modes_that_do_not_reach_the_ranks_are_reported_once(caplog):
    x, _ = make_batch(8)
    with on_cpus(make_net()) as model:
        with torch.device("cpu"):
            model(x)
        assert "has no effect" not in caplog.text
        for _ in range(2):
            with FlopCounterMode(display=False):
                model(x)
        assert caplog.text.count("FlopCounterMode, which has no effect") == 1
        with FlopCounterMode(display=False) as counter:
            model.module(x)
        assert counter.get_total_flops() > 0


class Routed(nn.Module):
    """Leaves an auxiliary loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.gate = nn.Linear(NUM_FEATURES, 2, dtype=torch.float64)

    def forward(self, x):
        self.aux = self.gate(x).softmax(1).mean(0).square().sum()
        return self.net(x)


@pytest.mark.parametrize("order", ["sum", "before", "after", "alone"])
@pytest.mark.parametrize("steps", ["model", "optimizer"])
def test_a_backward_pass_from_an_attribute_set_by_forward_is_refused(order, steps):
    x, y = make_batch(8)
    with on_cpus(Routed()) as model:
        loss, aux = F.cross_entropy(model(x), y), model.module.aux
        passes = {"sum": [loss + aux], "before": [aux, loss], "after": [loss, aux], "alone": [aux]}

        def train():
            for each in passes[order]:
                each.backward()
            model.step() if steps == "model" else model.optimizer.step()

        with pytest.raises(RuntimeError, match=r"one device only.*out, aux = model\(x\)"):
            train()
        model.module.aux = None
        alone = OneDevice(model.module)
        train_step(model, x, y)
        train_step(alone, x, y)
        assert_close(model, alone.model)


def test_a_part_of_the_model_may_be_called_in_the_loop():
    net = Routed()
    alone = OneDevice(net)
    with on_cpus(net) as model:
        for _ in range(2):
            x, y = make_batch(8)
            loss = F.cross_entropy(model(x), y) + model.module.gate(x).square().mean()
            loss.backward()
            model.step()
            (F.cross_entropy(alone(x), y) + alone.model.gate(x).square().mean()).backward()
            alone.step()
        assert_close(model, alone.model)


# -- forward passes that write to their inputs ----------------------------------------


class InPlace(nn.Module):
    """Normalizes its input in place."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x, scale=None):
        x.sub_(0.5).div_(2.0)
        return self.net(x if scale is None else x * scale.mul_(2.0))


@pytest.mark.parametrize("moves", [False, True], ids=["shared", "moved"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_forward_that_writes_to_its_input_equals_one_device(num_devices, moves, monkeypatch):
    if moves:  # as from a CPU tensor to GPUs
        monkeypatch.setattr(scatter, "to_device", lambda tensor, device: tensor.clone())
        monkeypatch.setattr(scatter, "_is_on", lambda part, tensor: False)
    net = InPlace()
    alone = OneDevice(net)
    with on_cpus(net, num_devices) as model:
        for size in (7, 8):
            x, y = make_batch(size)
            mine, theirs = x.clone(), x.clone()
            train_step(model, mine, y)
            train_step(alone, theirs, y)
            assert torch.equal(mine, theirs)
            assert mine._version > 0
        assert_close(model, alone.model)
        with torch.no_grad():
            torch.testing.assert_close(model(x.clone()), alone(x.clone()))


def test_an_input_that_every_device_writes_to_is_refused():
    x, _ = make_batch(8)
    with (
        on_cpus(InPlace(), config=DdpConfig(whole=["scale"])) as model,
        pytest.raises(RuntimeError, match=r"each of 2 devices.*scale = scale\.clone\(\)"),
    ):
        model(x, torch.ones((), dtype=torch.float64))


@one_or_two
def test_an_input_that_changes_before_backward_is_refused_if_it_was_saved(num_devices):
    x, y = make_batch(8)
    with on_cpus(make_net(), num_devices) as model:
        loss = F.cross_entropy(model(x), y)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = F.cross_entropy(model(x).detach() + model(x.clone()), y)
        x.zero_()  # no graph has saved it
        loss.backward()


class Summed(nn.Module):
    """Returns a loss that is a sum over the samples, or a mean."""

    def __init__(self, reduction):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.reduction = reduction

    def forward(self, x, y):
        return {"loss": F.mse_loss(self.linear(x), y, reduction=self.reduction)}


def test_a_number_that_is_a_sum_over_the_samples_is_refused():
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    with on_cpus(Summed("sum"), 2) as model:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"a sum over the samples: .*return the mean"):
                model(x, y)
    net = Summed("mean")
    with on_cpus(net, 2) as model:
        torch.testing.assert_close(model(x, y)["loss"], net(x, y)["loss"])


def test_the_kept_sizes_of_batches_are_bounded():
    balancer = Balancer(2)
    for num_samples in range(1, 200):
        assert sum(balancer.sizes(num_samples)) == num_samples
    assert len(balancer._sizes) <= 66


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_transforms_of_functions_are_refused_on_replicas(transform):
    with on_cpus(make_net()) as model:
        x, _ = make_batch(8)
        with pytest.raises(RuntimeError, match=r"transform of torch\.func.*model\.module"):
            transform(lambda x: model(x).sum())(x)
        transform(lambda x: model.module(x).sum())(x)
        model(x).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by Dynamo
@pytest.mark.parametrize("what", ["model", "loss"])
def test_a_compiled_loop_runs_the_replicas_as_they_are(what):
    net = make_net()
    alone = OneDevice(copy.deepcopy(net), sgd)
    with on_cpus(net) as model:
        compiled = torch.compile(model, backend="eager") if what == "model" else model

        def loss_of(x, y):
            return F.cross_entropy(compiled(x), y)

        if what == "loss":
            loss_of = torch.compile(loss_of, backend="eager")
        for _ in range(2):
            x, y = make_batch(8)
            loss_of(x, y).backward()
            model.step()
            train_step(alone, x, y)
        assert_close(model, alone.model)


@one_or_two
def test_another_optimizer_of_the_model_steps_before_model_step_or_is_refused(num_devices):
    def first(params):
        return torch.optim.SGD(list(params)[:2], 0.1)

    net = make_net()
    alone = copy.deepcopy(net)
    pair = [torch.optim.SGD(p, 0.1) for p in (list(alone.parameters())[:2], alone[3].parameters())]
    with on_cpus(net, num_devices, first) as model:
        other = torch.optim.SGD(model.module[3].parameters(), 0.1)
        for _ in range(3):
            x, y = make_batch(8)
            for way in (model, alone):
                F.cross_entropy(way(x), y).backward()
            other.step()
            model.step()
            for optimizer in pair:
                optimizer.step()
            alone.zero_grad()
        assert_close(model, alone)
        other.step()  # without an effect, as on one device
        F.cross_entropy(model(x), y).backward()
        model.step()
        with pytest.raises(RuntimeError, match=r"step it before model\.step\(\)"):
            other.step()


@one_or_two
def test_another_optimizer_may_begin_late_and_have_parameters_without_gradients(num_devices):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = make_net()
            self.a, self.b = (nn.Linear(NUM_CLASSES, 1, dtype=torch.float64) for _ in range(2))

        def forward(self, x, uses_b):
            features = self.trunk(x)
            return self.a(features) + (self.b(features) if uses_b else 0)

    net = Heads()
    alone = copy.deepcopy(net)
    first, second = (sgd(p) for p in (alone.trunk.parameters(), [*alone.a.parameters()]))
    with on_cpus(net, num_devices, lambda _: sgd(net.trunk.parameters())) as model:
        heads = sgd([*net.a.parameters(), *net.b.parameters()])
        for step in range(3):
            x, _ = make_batch(8)
            for way in (model, alone):
                way(x, step == 0).square().mean().backward()
            if step:
                heads.step()
                second.step()
            model.step()
            first.step()
            alone.zero_grad()
        assert_close(model, alone)


@one_or_two
@pytest.mark.parametrize(
    "group",
    [
        lambda params: [{"params": params, "weight_decay": 0.1}],
        lambda params: [{"params": params}, {"params": [], "weight_decay": 0.0}],
    ],
    ids=["weight decay", "an empty group"],
)
def test_groups_of_whole_parameters_are_not_taken_for_shards(group, num_devices, caplog):
    with on_cpus(make_net(), num_devices, lambda params: sgd(group(list(params)))) as model:
        model(make_batch(8)[0]).sum().backward()
        model.step()
    assert "Shards" not in caplog.text


def test_an_optimizer_without_hooks_is_refused():
    class Plain:
        """The interface of an optimizer alone."""

        def __init__(self, params):
            self.param_groups = [{"params": list(params), "lr": 0.1}]
            self.state, self.defaults = {}, {}

        def step(self):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= 0.1 * p.grad

    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        Trainer.setup(make_net(), Plain, ["cpu"])


# -- Ddp -----------------------------------------------------------------------------


def test_gradients_of_another_dtype_on_one_model_are_refused():
    models = nets(2)
    fill(models)
    first = next(models[1].parameters())
    with wrap(models) as ddp:
        first.grad = None
        first.data = first.data.double()
        first.grad = torch.ones_like(first)
        with pytest.raises(
            ReplicaMismatch,
            match=r"'first\.weight' is torch\.float64 on model 1, torch\.float32 on",
        ):
            ddp.all_reduce_gradients()


# -- DataParallelCoordinator ---------------------------------------------------------


def coordinator(loss, model=None, **settings):
    return DataParallelCoordinator(
        lambda device: (model or nn.Linear(2, 1)).to(device), sgd, loss, ["cpu"] * 2, **settings
    )


def test_a_model_in_eval_mode_is_trained_by_a_coordinator():
    made = coordinator(lambda m, b: m(b[0]).sum(), nn.Linear(2, 1).eval())
    with made:
        assert made.primary.training
        assert made.devices == (torch.device("cpu"),) * 2


def test_a_weight_on_some_replicas_only_is_refused():
    def loss(model, batch):
        value = model(batch).mean()
        return Weighted(value, 3.0) if batch[0, 0] == 0 else value

    with coordinator(loss) as made, pytest.raises(ValueError, match="on some replicas only"):
        made.train_batch(torch.arange(4.0).repeat(2, 1).T)
