"""Losses over tokens and class weights equal one device through every API."""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple

import pytest
import torch

from runtime import (
    FSDP,
    DataParallelCoordinator,
    Ddp,
    DdpConfig,
    ShardingStrategy,
    Trainer,
    Weighted,
)
from runtime.core import loss_weights as weights
from tests.support.fsdp_ranks import node_size, on_ranks
from tests.support.own_loop import exchanging_gradients
from tests.support.pairs import pairwise
from tests.support.weighing import (
    CLASS_WEIGHTS,
    TinyGpt,
    adamw,
    assert_same,
    make_tokens,
    one_device,
    token_loss,
    token_weight,
    twins,
)

CLASSES = [None, CLASS_WEIGHTS]
READING = ["read", "unread"]
TRAVELLING = ["directly", "meeting"]
classes = pytest.mark.parametrize("class_weights", CLASSES, ids=["tokens", "classes"])
BATCH = 10


def cut(batch, world_size):
    """Unequal pieces, the first with ignored labels only."""
    ids, labels = batch
    sizes = [2, *[1] * (world_size - 2), BATCH - world_size] if world_size > 1 else [BATCH]
    return list(zip(ids.split(sizes), labels.split(sizes), strict=True))


@pytest.mark.usefixtures("reading")
@pairwise(
    indirect=["reading"],
    reading=READING,
    class_weights=CLASSES,
    how=["numbers", "scalars", "one tensor"],
    world_size=[2, 3, 4],
)
def test_ddp_wrap_averages_by_weight(world_size, how, class_weights):
    batch = make_tokens(BATCH)
    models = twins(world_size)
    optimizers = [adamw(model.parameters()) for model in models]
    with Ddp.wrap(models, ["cpu"] * world_size) as ddp:
        for _ in range(2):
            weights = []
            for model, (ids, labels) in zip(models, cut(batch, world_size), strict=True):
                model.zero_grad()
                token_loss(model.logits(ids), labels, class_weights).backward()
                weights.append(token_weight(labels, class_weights))
            if how == "numbers":
                weights = [weight.item() for weight in weights]
            elif how == "one tensor":
                weights = torch.stack(weights)
            ddp.weighted_all_reduce_gradients(weights)
            for optimizer in optimizers:
                optimizer.step()
    assert_same(models[-1], one_device([batch], class_weights))


@pytest.mark.parametrize("shape", ["two", "three", "named", "constant"])
@classes
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_data_parallel_coordinator_averages_by_weight(world_size, class_weights, shape):
    def loss_fn(model, samples):
        ids, labels = samples
        weight = token_weight(labels, class_weights)
        if shape == "constant" and weight == 0:
            return Weighted(torch.zeros(()), weight, 1)
        loss = token_loss(model.logits(ids), labels, class_weights)
        if shape == "two":
            return loss, weight
        return (loss, 1, weight) if shape == "three" else Weighted(loss, weight, 1)

    batch = make_tokens(BATCH, blank=BATCH // world_size if world_size > 1 else 2)
    places = ["cpu"] * world_size
    with DataParallelCoordinator(lambda device: TinyGpt(), adamw, loss_fn, places) as coordinator:
        first = coordinator.train_batch(batch)
        coordinator.train_batch(batch)
        assert first.avg_loss == pytest.approx(
            token_loss(TinyGpt().logits(batch[0]), batch[1], class_weights).item(), rel=1e-12
        )
        assert first.correct == (0 if shape == "two" else world_size)
        assert_same(coordinator.models[-1], one_device([batch], class_weights))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_batch_of_weight_0_changes_nothing_in_a_data_parallel_coordinator(world_size):
    def loss_fn(model, samples):
        ids, labels = samples
        return Weighted(token_loss(model.logits(ids), labels), token_weight(labels))

    places = ["cpu"] * world_size
    with DataParallelCoordinator(lambda device: TinyGpt(), adamw, loss_fn, places) as coordinator:
        result = coordinator.train_batch(make_tokens(6, blank=6))
        assert (result.avg_loss, result.grad_norm, result.total) == (0.0, 0.0, 6)
        assert_same(coordinator.primary, TinyGpt(), 1e-300)
        coordinator.train_batch(make_tokens(6))


def test_a_second_value_that_turns_from_a_count_into_a_weight_is_refused():
    numbers = iter([1, 1, 9, 9])

    def loss_fn(model, samples):
        return model.logits(samples[0]).square().mean(), next(numbers)

    with DataParallelCoordinator(lambda device: TinyGpt(), adamw, loss_fn, ["cpu"]) as coordinator:
        assert coordinator.train_batch(make_tokens(4)).correct == 1
        assert coordinator.train_batch(make_tokens(4)).correct == 1
        with pytest.raises(ValueError, match=r"return gpuworker\.Weighted"):
            coordinator.train_batch(make_tokens(4))


@pytest.mark.parametrize("weight", [-1.0, math.nan, torch.ones(2)])
def test_an_invalid_weight_of_data_parallel_is_refused(weight):
    def loss_fn(model, samples):
        return Weighted(model.logits(samples[0]).square().mean(), weight)

    with DataParallelCoordinator(lambda device: TinyGpt(), adamw, loss_fn, ["cpu"]) as coordinator:
        with pytest.raises(RuntimeError) as failed:
            coordinator.train_batch(make_tokens(4))
        assert isinstance(failed.value.__cause__, ValueError)
        assert "weight" in str(failed.value.__cause__)


@pairwise(
    class_weights=CLASSES,
    as_tensor=[False, True],
    strategy=list(ShardingStrategy),
    world_size=[1, 2, 3, 4],
)
def test_fsdp_averages_by_weight(world_size, strategy, as_tensor, class_weights):
    batch = make_tokens(BATCH)
    micro = make_tokens(BATCH, seed=5)

    models = [Whole(class_weights) for _ in range(world_size)]  # here: all share a generator

    def work(end):
        fsdp = FSDP(models[end.rank], end, strategy, node_size(strategy, world_size))
        optimizer = adamw(fsdp.parameters())
        pieces = [cut(part, world_size)[end.rank] for part in (batch, micro)]
        weights = [token_weight(labels, class_weights) for _, labels in pieces]
        for _ in range(2):
            optimizer.zero_grad()
            total = sum(weights)
            for piece, weight in zip(pieces, weights, strict=True):
                (fsdp(*piece) * (weight / total)).backward()
            fsdp.sync_gradients(weight=total if as_tensor else total.item())
            optimizer.step()
            fsdp.broadcast_updated_params()
        return fsdp.full_state_dict()

    states = on_ranks(world_size, work)
    model = Whole(None)
    model.load_state_dict(states[-1])
    assert_same(model.model, one_device([batch, micro], class_weights))


class Whole(torch.nn.Module):
    """The model with its loss."""

    def __init__(self, class_weights):
        super().__init__()
        self.model = TinyGpt()
        self._class_weights = class_weights

    def forward(self, ids, labels):
        return token_loss(self.model.logits(ids), labels, self._class_weights)


# -- Trainer.setup ---------------------------------------------------------------------------

Output = namedtuple("Output", ["loss", "logits"])


@dataclasses.dataclass
class Fields:
    """An output with a weight field."""

    loss: torch.Tensor
    weight: torch.Tensor


class OutputForm(torch.nn.Module):
    """The model with its loss, in one of the forms that models return."""

    def __init__(self, form, class_weights=None):
        super().__init__()
        self.model = TinyGpt()
        self._form = form
        if class_weights is not None:
            class_weights = class_weights.clone()
        self.register_buffer("class_weights", class_weights)

    def forward(self, input_ids, labels):
        logits = self.model.logits(input_ids)
        loss = token_loss(logits, labels, self.class_weights)
        if self._form == "dict":
            return {"loss": loss, "logits": logits}
        if self._form == "named tuple":
            return Output(loss, logits)
        if self._form == "field":
            return Fields(loss, token_weight(labels, self.class_weights))
        return loss

    def loss_of(self, output):
        if self._form == "dict":
            return output["loss"]
        return output if self._form == "scalar" else output.loss


def by_class(inputs, output):
    labels = inputs["labels"] if isinstance(inputs, dict) else inputs[1]
    return token_weight(labels, CLASS_WEIGHTS)


def by_token(inputs, output):
    return token_weight(inputs["labels"] if isinstance(inputs, dict) else inputs[1])


SUPPORTED_DATASETS = [
    ("dict", None, None),
    ("named tuple", None, None),
    ("scalar", None, by_token),
    ("field", None, None),
    ("field", CLASS_WEIGHTS, None),
    ("dict", CLASS_WEIGHTS, by_class),
    ("scalar", CLASS_WEIGHTS, by_class),
]


@pytest.fixture(params=READING)
def reading(request, monkeypatch):
    """Weights that the host reads from the CPU, and that it must not read from a GPU."""
    if request.param == "unread":
        monkeypatch.setattr(weights, "_may_be_read", lambda weight: False)
    return request.param


@pytest.fixture(params=TRAVELLING)
def travelling(request):
    with exchanging_gradients(request.param):
        yield


def on_devices(model, world_size, loss_weight=None):
    """Devices with unequal shares."""
    hint = (0, 2.0) if world_size > 1 else None
    config = DdpConfig(loss_weight=loss_weight, speed_hint=hint, balance=False)
    return Trainer.setup_with(model, adamw, ["cpu"] * world_size, config=config)


@pytest.mark.usefixtures("travelling", "reading")
@pairwise(
    indirect=["travelling", "reading"],
    travelling=TRAVELLING,
    reading=READING,
    way=SUPPORTED_DATASETS,
    world_size=[1, 2, 3, 4],
)
def test_trainer_setup_averages_by_weight(world_size, way):
    form, class_weights, loss_weight = way
    ids, labels = make_tokens(BATCH, blank=4)
    wrapper = OutputForm(form, class_weights)
    with on_devices(wrapper, world_size, loss_weight) as model:
        for step in range(2):
            output = model(ids, labels) if step else model(input_ids=ids, labels=labels)
            loss = wrapper.loss_of(output)
            if form == "field":
                assert output.weight.item() == pytest.approx(
                    token_weight(labels, class_weights).item(), rel=1e-12
                )
            loss.backward()
            model.step()
        assert_same(model.replicas[-1].model, one_device([(ids, labels)], class_weights))
        assert math.isfinite(loss.item())


@pytest.mark.usefixtures("travelling", "reading")
@pairwise(
    indirect=["travelling", "reading"],
    travelling=TRAVELLING,
    reading=READING,
    class_weights=CLASSES,
    world_size=[1, 2, 3, 4],
)
def test_accumulation_in_trainer_setup_averages_by_weight(world_size, class_weights):
    batches = [make_tokens(BATCH, blank=4), make_tokens(5, seed=7, blank=1)]
    loss_weight = by_token if class_weights is None else by_class
    wrapper = OutputForm("dict", class_weights)
    with on_devices(wrapper, world_size, loss_weight) as model:
        for _ in range(2):
            weights = [token_weight(labels, class_weights) for _, labels in batches]
            for (ids, labels), weight in zip(batches, weights, strict=True):
                (model(input_ids=ids, labels=labels)["loss"] * weight).backward()
            model.step(weight=sum(weights))
        assert_same(model.replicas[-1].model, one_device(batches, class_weights))


@pytest.mark.usefixtures("travelling", "reading")
@pairwise(
    indirect=["travelling", "reading"],
    travelling=TRAVELLING,
    reading=READING,
    class_weights=CLASSES,
    world_size=[1, 2, 3, 4],
)
@pytest.mark.parametrize("constant", [False, True])
def test_whole_batches_in_trainer_setup_are_averaged_by_weight(world_size, class_weights, constant):
    batches = [make_tokens(4, blank=4), *(make_tokens(n, seed=n, blank=1) for n in (3, 6, 5))]

    def loss_fn(module, batch):
        ids, labels = batch
        weight = token_weight(labels, class_weights)
        if constant and weight == 0:
            return torch.zeros(()), weight
        return token_loss(module.logits(ids), labels, class_weights), weight

    with on_devices(TinyGpt(), world_size) as model:
        for _ in range(2):
            assert model.accumulate(loss_fn, batches).isfinite().all()
            model.step()
        assert_same(model.replicas[-1], one_device(batches, class_weights))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_of_weight_0_does_not_step_trainer_setup(world_size):
    ids, labels = make_tokens(6, blank=6)
    with on_devices(OutputForm("dict"), world_size) as model:
        loss = model(input_ids=ids, labels=labels)["loss"]
        assert loss.item() == 0
        loss.backward()
        model.step()
        assert_same(model.module.model, TinyGpt(), 1e-300)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_weight_0_changes_nothing(world_size):
    ids, labels = make_tokens(6)
    with on_devices(OutputForm("dict"), world_size) as model:
        model(input_ids=ids, labels=labels)["loss"].backward()
        model.step(weight=0)
        assert_same(model.module.model, TinyGpt(), 1e-300)
        assert all(p.grad is None for p in model.parameters())


def test_a_loss_without_a_weight_warns_once(caplog):
    class Plain(OutputForm):
        def forward(self, ids, targets):
            return super().forward(ids, targets)

    with on_devices(Plain("scalar"), 2) as model:
        for _ in range(3):
            model(*make_tokens(6, blank=0)).backward()
            model.step()
    assert caplog.text.count("pass DdpConfig(loss_weight=") == 1


def test_wrong_weights_in_trainer_setup_are_refused():
    ids, labels = make_tokens(6)
    with on_devices(OutputForm("dict"), 2, lambda inputs, output: torch.ones(2)) as model:
        with pytest.raises(RuntimeError, match=r"loss_weight\(inputs, output\)"):
            model(input_ids=ids, labels=labels)
        for wrong in (-1, math.nan, torch.ones(2)):
            with pytest.raises(ValueError, match="weight is"):
                model.step(weight=wrong)
    with pytest.raises(TypeError, match="loss_weight"):
        DdpConfig(loss_weight=3)
    with on_devices(TinyGpt(), 2) as model:

        def partly(module, batch):
            loss = module.logits(batch[0]).square().mean()
            return (loss, 2) if len(batch[0]) > 3 else loss

        with pytest.raises(ValueError, match="for some batches of this step only"):
            model.accumulate(partly, [make_tokens(3), make_tokens(4)])
        model.accumulate(partly, [make_tokens(4)] * 2)
        with pytest.raises(ValueError, match="divides the gradients"):
            model.step(weight=2)


def test_all_labels_of_a_masked_language_model_count():
    class TinyForMaskedLM(TinyGpt):
        def forward(self, input_ids, labels):
            logits = self.logits(input_ids)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    ids, labels = make_tokens(6, blank=0)
    with on_devices(TinyForMaskedLM(), 3) as model:
        loss = model(input_ids=ids, labels=labels)["loss"]
    wanted = TinyForMaskedLM()(ids, labels)["loss"]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
