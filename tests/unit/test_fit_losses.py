"""``fit`` with losses that are not a mean over samples: those of one device, or refused by name."""

from __future__ import annotations

import copy
import functools
import itertools
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import TrainerHandle, WorkerFailed, fit
from runtime.core import loss_weights
from runtime.core.loss_weights import CountedLoss, Weighted
from tests.support.running import ASYNC, CADENCE, SYNC, WAIT_S

N, NUM_CLASSES, BATCH = 64, 3, 16
DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=DRAWS, dtype=torch.float64)
LABELS = torch.randint(NUM_CLASSES, (N,), generator=DRAWS)
IGNORED = torch.where(torch.rand(N, generator=DRAWS) < 0.5, -100, LABELS)
ONE_PART_IGNORED = torch.where(torch.arange(N) % BATCH < BATCH // 2, -100, LABELS)
PIXELS = torch.randint(NUM_CLASSES, (N, 2, 3), generator=DRAWS)
IGNORED_PIXELS = torch.where(torch.rand(N, 2, 3, generator=DRAWS) < 0.6, -100, PIXELS)
PROBABILITIES = torch.rand(N, NUM_CLASSES, generator=DRAWS, dtype=torch.float64).softmax(1)
WEIGHTS = torch.tensor([1.0, 10.0, 30.0], dtype=torch.float64)


class PerPixel(nn.Module):
    """Scores of each class for 2 x 3 pixels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, NUM_CLASSES * 6, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x).view(-1, NUM_CLASSES, 2, 3)


class LogProbabilities(nn.Linear):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


def linear(kind=nn.Linear):
    torch.manual_seed(1)
    return kind(6, NUM_CLASSES, dtype=torch.float64)


class Subclass(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return super().forward(output, target.long())


class Wrapper(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**settings)
        self.num_calls = 0

    def forward(self, output, target):
        self.num_calls += 1
        return self.inner(output, target)


class Called:
    def __call__(self, output, target):
        return F.cross_entropy(output, target, WEIGHTS)


def negative_log_likelihood(output, target):
    return F.nll_loss(output.log_softmax(1), target, weight=WEIGHTS, ignore_index=1)


def with_a_figure(output, target):
    """Computes another mean beside the loss."""
    with torch.no_grad():
        F.cross_entropy(output, target)
    return F.cross_entropy(output, target, weight=WEIGHTS)


SAME_AS_ONE_DEVICE = {
    "plain": (nn.CrossEntropyLoss(), LABELS),
    "weight": (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS),
    "a zero class weight": (nn.CrossEntropyLoss(torch.tensor([0.0, 0, 1]).double()), LABELS),
    "ignored labels": (nn.CrossEntropyLoss(), IGNORED),
    "a part without a label": (nn.CrossEntropyLoss(), ONE_PART_IGNORED),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=2), LABELS),
    "weight and ignore_index": (nn.CrossEntropyLoss(WEIGHTS, ignore_index=1), LABELS),
    "weight and ignored labels": (nn.CrossEntropyLoss(WEIGHTS), IGNORED),
    "label_smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), IGNORED),
    "weight and label_smoothing": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), IGNORED),
    "probabilities": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), PROBABILITIES),
    "a function": (F.cross_entropy, IGNORED),
    "functools.partial": (functools.partial(F.cross_entropy, weight=WEIGHTS), LABELS),
    "a subclass": (Subclass(WEIGHTS), LABELS),
    "a wrapper": (Wrapper(weight=WEIGHTS, ignore_index=0), LABELS),
    "a wrapper of ignored labels": (Wrapper(), IGNORED),
    "an object": (Called(), IGNORED),
    "a lambda": (lambda output, target: F.cross_entropy(output, target, WEIGHTS), IGNORED),
    "log-likelihood in a function": (negative_log_likelihood, LABELS),
    "a mean beside the loss": (with_a_figure, IGNORED),
    "an equal mixture": (
        lambda o, t: (F.cross_entropy(o, t) + F.cross_entropy(o, 2 - t)) / 2,
        LABELS,
    ),
    "a penalty": (lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().mean(), LABELS),
    "its own weight": (
        lambda o, t: (3 * F.cross_entropy(o, t, WEIGHTS), WEIGHTS[t].sum()),
        LABELS,
    ),
    "each sample": (lambda o, t: F.cross_entropy(o, t, WEIGHTS, reduction="none").mean(), LABELS),
    "a sum": (nn.CrossEntropyLoss(WEIGHTS, reduction="sum"), IGNORED),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS + 1), PROBABILITIES),
    "KLDivLoss, mean": (nn.KLDivLoss(reduction="mean"), PROBABILITIES),
    "KLDivLoss, batchmean": (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES),
    "MultiMarginLoss": (nn.MultiMarginLoss(weight=WEIGHTS), LABELS),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(WEIGHTS), PROBABILITIES.round()),
    "SmoothL1Loss": (nn.SmoothL1Loss(), PROBABILITIES),
}
OF_OTHER_MODELS = {
    "NLLLoss": (nn.NLLLoss(WEIGHTS), LABELS, lambda: linear(LogProbabilities)),
    "NLLLoss, ignored labels": (nn.NLLLoss(), IGNORED, lambda: linear(LogProbabilities)),
    "pixels": (nn.CrossEntropyLoss(), PIXELS, PerPixel),
    "ignored pixels": (nn.CrossEntropyLoss(), IGNORED_PIXELS, PerPixel),
    "ignored pixels by weights": (nn.CrossEntropyLoss(WEIGHTS), IGNORED_PIXELS, PerPixel),
    "probabilities of pixels": (
        nn.CrossEntropyLoss(WEIGHTS),
        F.one_hot(PIXELS, NUM_CLASSES).movedim(-1, 1).double(),
        PerPixel,
    ),
}
CASES = [
    *((name, *case, linear) for name, case in SAME_AS_ONE_DEVICE.items()),
    *((name, *case) for name, case in OF_OTHER_MODELS.items()),
]


def loss_alone(loss, output, target):
    found = loss(output, target)
    return found[0] if isinstance(found, tuple) else found


def on_one_device(model, loss, target):
    """A plain loop of PyTorch; a batch without a label makes no step."""
    optimizer = sgd(model.parameters())
    for x, y in zip(X.split(BATCH), target.split(BATCH), strict=True):
        optimizer.zero_grad()
        loss_alone(loss, model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def sgd(params):
    return torch.optim.SGD(params, 0.01)


def fitted(model, loss, target, num_workers=2, **settings):
    sizes = {} if "batch_size" in settings else {"global_batch_size": BATCH}
    state = fit(
        model,
        (X, target),
        loss=loss,
        optimizer=sgd,
        sampler=range(N),
        devices=["cpu"] * num_workers,
        progress=False,
        **sizes,
        **settings,
    )
    return state, model.state_dict()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(("name", "loss", "target", "make"), CASES, ids=[case[0] for case in CASES])
def test_losses_of_pytorch_train_as_on_one_device(name, loss, target, make, num_workers):
    torch.manual_seed(0)
    model = make()
    wanted = on_one_device(copy.deepcopy(model), copy.deepcopy(loss), target)
    _, found = fitted(model, loss, target, num_workers)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(WEIGHTS), nn.CrossEntropyLoss()])
def test_micro_batches_and_unequal_workers_train_as_on_one_device(loss):
    model = linear()
    wanted = on_one_device(copy.deepcopy(model), loss, IGNORED)
    _, found = fitted(model, loss, IGNORED, accumulate=2, batch_size=[5, 3])
    torch.testing.assert_close(found["weight"], wanted["weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", [SYNC, CADENCE, ASYNC])
def test_losses_of_metrics_and_validations_are_means_over_labels(policy):
    model = linear()
    loss = nn.CrossEntropyLoss(WEIGHTS)
    state, _ = fitted(model, loss, IGNORED, policy=policy, val_dataset=(X, IGNORED))
    with torch.no_grad():
        wanted = float(loss(model(X), IGNORED))
    assert state.metrics[0].scalars["val/loss"] == pytest.approx(wanted, rel=1e-9)


def twice_the_mean(output, target):
    return F.cross_entropy(output, target, weight=WEIGHTS) * 2


class Smoothed(Wrapper):
    def forward(self, output, target):
        return super().forward(output, target) + 0.1 * output.square().mean()


def mixture(output, target):
    return (F.cross_entropy(output, target) + F.cross_entropy(output, target.flip(0))) / 2


REMEDY = (
    r"use Trainer.builder with train_fn\(model, batch\), which returns \(loss, weight\) .*"
    r"class_weights\[labels\].sum\(\) or \(labels != ignore_index\).sum\(\)"
)


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        (twice_the_mean, LABELS, r"fit\(loss=twice_the_mean\): .* a mean by class weights"),
        (Smoothed(weight=WEIGHTS), LABELS, r"fit\(loss=Smoothed\): .* a mean by class weights"),
        (Smoothed(), IGNORED, r"loss=Smoothed\): .* a mean over the labels that are not ignored"),
        (mixture, IGNORED, r"loss=mixture\): .* a mean over the labels that are not ignored"),
        (
            functools.partial(twice_the_mean),
            LABELS,
            r"fit\(loss=twice_the_mean\): .* a mean by class weights",
        ),
    ],
)
def test_values_made_of_such_a_mean_are_refused_by_name(loss, target, message):
    model = linear()
    before = model.weight.clone()
    with pytest.raises(WorkerFailed, match=f"{message}, and whose weight .*: {REMEDY}"):
        fitted(model, loss, target)
    assert torch.equal(model.weight, before)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_the_old_names_of_reductions_are_read():
    scores = torch.zeros(N, NUM_CLASSES, requires_grad=True)
    for settings, is_mean in (({"reduce": True}, True), ({"size_average": False}, False)):
        loss = CountedLoss(functools.partial(F.cross_entropy, weight=WEIGHTS.float(), **settings))
        assert isinstance(loss(scores, LABELS), Weighted) == is_mean


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_a_scripted_loss_is_refused_before_the_run():
    loss = torch.jit.script(nn.CrossEntropyLoss(WEIGHTS))
    with pytest.raises(TypeError, match=r"fit\(loss=CrossEntropyLoss\): .* pass the module itself"):
        fitted(linear(), loss, LABELS)


class OnDevice:
    """Labels that lie on a GPU, and how often the host reads whether one is ignored."""

    def __init__(self, monkeypatch):
        self.num_reads = 0
        monkeypatch.setattr(loss_weights, "_lies_on_host", lambda tensor: False)
        monkeypatch.setattr(loss_weights, "_read", self.read)

    def read(self, flag):
        self.num_reads += 1
        return bool(flag)


def units_of(loss, target):
    found = loss(torch.zeros(len(target), NUM_CLASSES, requires_grad=True), target)
    return found.weight


def test_labels_on_a_gpu_are_read_in_few_calls(monkeypatch, caplog):
    device, loss = OnDevice(monkeypatch), CountedLoss(nn.CrossEntropyLoss())
    for _ in range(100):
        assert units_of(loss, LABELS) == N
    assert device.num_reads == 7  # calls 1, 2, 4, ..., 64
    for _ in range(27):
        assert units_of(loss, IGNORED) == N  # not known yet
    assert caplog.records == []
    units = units_of(loss, LABELS)  # call 128
    assert isinstance(units, torch.Tensor)
    assert device.num_reads == 8
    (warning,) = caplog.messages
    assert warning.startswith("fit(loss=CrossEntropyLoss): labels are ignored, and were not in the")
    assert int(units_of(loss, IGNORED)) == int((IGNORED != -100).sum())
    assert device.num_reads == 8


def test_ignored_labels_in_the_first_batch_are_counted_by_a_gpu_without_a_warning(
    monkeypatch, caplog
):
    device, loss = OnDevice(monkeypatch), CountedLoss(nn.CrossEntropyLoss())
    for _ in range(10):
        assert int(units_of(loss, IGNORED)) == int((IGNORED != -100).sum())
    assert device.num_reads == 1
    assert caplog.records == []


@pytest.mark.parametrize("target", [LABELS, IGNORED])
def test_in_graphs_of_a_gpu_the_host_reads_nothing(monkeypatch, target):
    device, loss = OnDevice(monkeypatch), CountedLoss(nn.CrossEntropyLoss(), in_graphs=True)
    for _ in range(10):
        units = units_of(loss, target)
        assert isinstance(units, torch.Tensor)
        assert int(units) == int((target != -100).sum())
    assert device.num_reads == 0


def test_a_value_made_of_a_mean_is_refused_on_a_gpu_in_the_first_call(monkeypatch):
    OnDevice(monkeypatch)
    for in_graphs in (False, True):
        loss = CountedLoss(mixture, in_graphs=in_graphs)
        with pytest.raises(ValueError, match="over the labels that are not ignored"):
            units_of(loss, IGNORED)


def test_other_losses_are_observed_in_their_first_call_only():
    loss, modes = CountedLoss(F.mse_loss), []
    x = torch.ones(3, requires_grad=True)

    def noted(output, target):
        modes.append(torch.overrides._len_torch_function_stack())
        return F.mse_loss(output, target)

    loss._function = noted
    for _ in range(3):
        assert not isinstance(loss(x, x.detach()), Weighted)
    assert modes == [1, 0, 0]


# -- exceptions while fit waits -----------------------------------------------------------


class TimeIsOver(Exception):
    pass


class Out(BaseException):
    pass


@pytest.mark.parametrize("kind", [TimeIsOver, SystemExit, Out, KeyboardInterrupt])
@pytest.mark.parametrize("policy", [SYNC, CADENCE])
def test_an_exception_while_fit_waits_ends_its_run(kind, policy, monkeypatch):
    """As a time limit by ``signal.setitimer`` raises it, whose handler is the user's."""
    join, is_waiting = TrainerHandle.join, threading.Event()
    steps = itertools.count()

    def waiting(handle):
        is_waiting.set()
        return join(handle)

    def raise_it(*_):
        raise kind("planted")

    def loss(output, target):
        if next(steps) == 20:  # both workers have stepped, or averaged
            assert is_waiting.wait(WAIT_S)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return F.mse_loss(output, target)

    monkeypatch.setattr(TrainerHandle, "join", waiting)

    before = signal.signal(signal.SIGUSR1, raise_it)
    model, threads = linear(), threading.active_count()
    weight = model.weight.clone()
    try:
        with pytest.raises(kind, match="planted") as caught:
            fitted(model, loss, PROBABILITIES, epochs=10**6, policy=policy)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert threading.active_count() == threads
    assert not torch.equal(model.weight, weight)  # the module has the weights at its end
    assert len(getattr(caught.value, "__notes__", ())) <= 1
