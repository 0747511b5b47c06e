"""A run with checkpoints carries a state that can be resumed, or refuses it at its first step."""

import enum
import io
import threading
from collections import Counter, OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import SequentialSampler

from runtime import CheckpointError, ShardingStrategy, Trainer, record_scalar
from runtime.checkpoint import store
from runtime.checkpoint.store import entries, load_newest, write_checkpoint
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Trace,
    builder,
    counter,
    numbers,
    until,
)

WAYS = {
    "SYNC": ((SYNC, THREAD), 2),
    "one rank": ((SYNC, THREAD), 1),
    "CADENCE": ((CADENCE, OVER_CPU), 2),
    "ASYNC": ((ASYNC, OVER_CPU), 2),
}
ways = pytest.mark.parametrize("way", WAYS)


# -- optimizers --------------------------------------------------------------------------------


def optimizer(of_state, *, load=None, **methods):
    """A factory of SGD with other methods; ``of_state`` changes its state dict."""

    def state_dict(self):
        return of_state(self, torch.optim.SGD.state_dict(self))

    methods = {"state_dict": state_dict, **methods}
    if load is not None:
        methods["load_state_dict"] = load
    return lambda params: type("Own", (torch.optim.SGD,), methods)(params, 0.1, momentum=0.5)


def step_with(change):
    def step(self, closure=None):
        torch.optim.SGD.step(self)
        change(self)

    return step


def grow(self):
    group = self.param_groups[0]
    group["history"] = (*group.get("history", ()), 1.0)


class Growing(torch.optim.SGD):
    """A setting has another length after each step."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        self.param_groups[0]["history"] = ()

    step = step_with(grow)


def unable(self, state):
    raise NotImplementedError("planted")


OPTIMIZERS = {
    "a form of its own": (
        optimizer(lambda self, state: {"fast": state, "count": 1}),
        r"state_dict\(\) of Own has \['fast', 'count'\], not 'state' and 'param_groups'",
        0,
    ),
    "no dict": (optimizer(lambda self, state: None), r"state_dict\(\) of Own is None", 0),
    "parameters as keys": (
        optimizer(lambda self, state: {**state, "state": dict(self.state)}),
        r"\['optimizer'\]\['state'\] has a tensor as a key",
        1,
    ),
    "parameters in groups": (
        optimizer(lambda self, state: {**state, "param_groups": self.param_groups}),
        r"\['param_groups'\]\[0\]\['params'\]\[0\] is tensor",
        0,
    ),
    "an array": (
        optimizer(lambda self, state: {**state, "counts": np.zeros(2)}),
        r"\['counts'\] is of type ndarray",
        0,
    ),
    "no way to load": (
        optimizer(lambda self, state: state, load=unable),
        "could be resumed: NotImplementedError: planted",
        1,
    ),
    "a state that is not loaded": (
        optimizer(lambda self, state: {**state, "state": {7: {}}}),
        r"a key of rank \d\['stepper'\]\['optimizer'\]\['state'\] is 7",
        0,
    ),
    "a setting that grows": (
        Growing,
        r"could not be loaded by a new optimizer: 'history' of its group 0 is \(1.0,\), not like",
        1,
    ),
}


def expect_refused(b, path, message, steps, trace):
    with pytest.raises(CheckpointError, match=message):
        b.checkpoint_dir(path).run().join(WAIT_S)
    assert max(trace.steps.values(), default=0) == steps
    assert steps or not list(path.iterdir())


@ways
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_whose_state_could_not_be_resumed_is_refused(kind, way, tmp_path):
    optim, message, steps = OPTIMIZERS[kind]
    (policy, ranks), trace = WAYS[way], Trace()
    b = builder(optim=optim, train=trace, way=policy, ranks=ranks, epochs=2)
    expect_refused(b, tmp_path, message, steps, trace)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_an_own_loop_is_refused_before_its_first_step(policy, several, tmp_path):
    taken = []

    def body(worker):
        taken.extend(worker.batches())

    def optim(model):
        made = OPTIMIZERS["a form of its own"][0](model.parameters())
        return {"all": made} if several else made

    b = Trainer.loop(counter, optim, body).dataset(numbers(20)).batch_size(2).devices(["cpu"] * 2)
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of Own has \['fast', 'count'\]"):
        b.policy(policy).num_epochs(1).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert not taken


def test_tensors_beside_the_states_of_shards_are_refused(tmp_path):
    trace = Trace(lambda model, batch: model(batch[0][:, None]).square().mean())
    optim = optimizer(lambda self, state: {**state, "mean": torch.zeros(3)})
    b = builder(model=lambda device: nn.Linear(1, 4).double(), optim=optim, train=trace)
    b.policy("sync").backend(THREAD).sharded(ShardingStrategy.FULL_SHARD)
    expect_refused(b, tmp_path, r"has tensors in 'mean', which sharded\(...\) cannot", 0, trace)


# -- schedulers --------------------------------------------------------------------------------


class Halving:
    """A scheduler that is no subclass of PyTorch's; halves the rate at its fourth step."""

    def __init__(self, target):
        self.target, self.count = target, 0

    def step(self):
        self.count += 1
        if self.count == 4:
            for group in self.target.param_groups:
                group["lr"] /= 2


def scheduler(of_state, load=lambda self, state: None):
    methods = {"state_dict": of_state, "load_state_dict": load}
    return type("Own", (Halving,), methods)


class Wrapping(lrs.LRScheduler):
    """Has another scheduler in an attribute, and PyTorch's state_dict()."""

    def __init__(self, target):
        self.after = lrs.ExponentialLR(target, 0.5)
        super().__init__(target)

    def get_lr(self):
        return self.base_lrs


def take(self, state):
    self.count = state["count"]


SCHEDULERS = {
    "no state": (Halving, "of type Halving, cannot be saved"),
    "no dict": (scheduler(lambda self: None), "of type Own, cannot be saved"),
    "a list": (scheduler(lambda self: [self.count]), "of type Own, cannot be saved"),
    "an array": (
        scheduler(lambda self: {"count": np.array([self.count])}),
        r"scheduler's state.*\['count'\] is of type ndarray",
    ),
    "an object": (
        scheduler(lambda self: {"of": object()}),
        r"scheduler's state.*\['of'\] is of type object",
    ),
    "a scheduler within": (Wrapping, r"scheduler's state.*\['after'\] is of type ExponentialLR"),
    "a function that it needs": (
        scheduler(lambda self: {"count": max}, take),
        "could be resumed: KeyError: 'count'",
    ),
}


@ways
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_whose_state_could_not_be_resumed_is_refused(kind, way, tmp_path):
    kind_of, message = SCHEDULERS[kind]
    (policy, ranks), trace = WAYS[way], Trace()
    b = builder(train=trace, way=policy, ranks=ranks, epochs=2).scheduler(lambda o: kind_of(o))
    expect_refused(b, tmp_path, message, 0, trace)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_of_one_of_several_optimizers_is_refused(kind, tmp_path):
    kind_of, message = SCHEDULERS[kind]
    b = of_pair(partial(torch.optim.SGD, lr=0.1)).scheduler({"b": lambda o: kind_of(o)})
    with pytest.raises(CheckpointError, match=message):
        b.num_epochs(1).checkpoint_dir(tmp_path).run().join(WAIT_S)


def test_a_scheduler_that_epoch_fn_attaches_is_checked(tmp_path):
    trace = Trace()
    b = builder(train=trace).epoch_fn(lambda epoch, worker: worker.set_scheduler(Halving))
    expect_refused(b, tmp_path, "of type Halving, cannot be saved", 0, trace)


def test_schedulers_are_not_changed_by_the_check(tmp_path):
    rates = []
    for path in (None, tmp_path):
        b = builder(ranks=1, epochs=2).scheduler(
            lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.LinearLR(o, 0.5)], o)
        )
        state = (b if path is None else b.checkpoint_dir(path)).run().join(WAIT_S)
        rates.append([m.learning_rate for m in state.metrics])
    assert rates[0] == rates[1]


# -- extra state -------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


class Extra(nn.Module):
    """A module with extra state."""

    state = None

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.restored = []

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.restored.append(state)


def extra(value, **methods):
    return type("Extra", (Extra,), {"state": value, **methods})


EXTRA = {
    "an object": (extra(object()), "extra state of module '0' is of type object"),
    "an array": (extra(np.zeros(2)), "extra state of module '0' is of type ndarray"),
    "a stream of bytes": (extra(io.BytesIO()), "extra state of module '0' is of type BytesIO"),
    "no way to restore": (
        extra(1, set_extra_state=nn.Module.set_extra_state),
        "module '0' cannot be restored .* NotImplementedError: the module does not define it",
    ),
    "a class that a file does not keep": (
        extra(Pair(1, 2), set_extra_state=lambda self, state: state.a),
        "module '0' cannot be restored by .* AttributeError: 'tuple' object has no attribute 'a'",
    ),
}


@ways
@pytest.mark.parametrize("kind", EXTRA)
def test_extra_state_that_could_not_be_resumed_is_refused(kind, way, tmp_path):
    made, message = EXTRA[kind]
    (policy, ranks), trace = WAYS[way], Trace(lambda model, batch: model[0].w.sum())
    b = builder(
        model=lambda device: nn.Sequential(made()), train=trace, way=policy, ranks=ranks, epochs=2
    )
    expect_refused(b, tmp_path, message, 0, trace)


def test_the_check_of_extra_state_restores_a_copy(tmp_path):
    models = []

    def make(device):
        models.append(Extra())
        models[-1].state = 5
        return models[-1]

    b = builder(model=make, ranks=1, train=lambda model, batch: model.w.sum())
    b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert models[0].state == 5
    (restored,) = {tuple(model.restored) for model in models[:1]}
    assert restored == (5,)  # the list is shared by the copy and the module


def test_a_checkpoint_without_extra_state_is_resumed_with_a_warning(tmp_path, caplog):
    def run(epochs):
        b = builder(model=lambda device: Extra(), train=lambda model, batch: model.w.sum())
        return b.num_epochs(epochs)

    run(1).checkpoint_dir(tmp_path / "a").run().join(WAIT_S)
    data = load_newest(tmp_path / "a").data
    for rank in data.ranks:
        rank.module.extra_state.clear()
    write_checkpoint(tmp_path / "b", data)
    run(2).resume(tmp_path / "b").run().join(WAIT_S)
    assert "the extra state of module '' is not in the checkpoint" in caplog.text


# -- settings and samplers ---------------------------------------------------------------------


class OfAnotherDevice(SequentialSampler):
    """A sampler whose generator has a state that a CPU generator refuses."""

    def __init__(self, size):
        super().__init__(range(size))

        class Short(torch.Generator):
            def get_state(self):
                return torch.zeros(16, dtype=torch.uint8)

        self.generator = Short()


def test_a_sampler_whose_generator_could_not_be_resumed_is_refused_before_the_start(tmp_path):
    b = builder().sampler(OfAnotherDevice(20))
    with pytest.raises(CheckpointError, match=r"sampler\['state'\] is not a generator's state"):
        b.checkpoint_dir(tmp_path).run()
    assert not list(tmp_path.iterdir())


# -- what is carried ---------------------------------------------------------------------------


class Mode(str, enum.Enum):  # noqa: UP042
    FAST = "fast"
    SLOW = "slow"


class WithModes(torch.optim.SGD):
    """Its rate depends on a setting that is of an enumeration, which a step changes."""

    def __init__(self, params):
        super().__init__(params, 0.1, momentum=0.5)
        self.param_groups[0].update(
            mode=Mode.FAST, limit=float("nan"), most=torch.tensor(torch.inf)
        )

    def step(self, closure=None):
        group = self.param_groups[0]
        group["lr"] = 0.1 if group["mode"] is Mode.FAST else 0.05
        super().step(closure)
        group["mode"] = Mode.SLOW


class Counting(torch.optim.SGD):
    """Its rate depends on entries beside the states, and on a state under a name."""

    def __init__(self, params):
        super().__init__(params, 0.1, momentum=0.5)
        self.sums = torch.zeros(2)

    def step(self, closure=None):
        self.sums += 1
        own = self.state.setdefault("all", {"count": 0})
        own["count"] += 1
        self.param_groups[0]["lr"] = 0.1 / (1 + float(self.sums.sum()) + own["count"])
        super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "sums": self.sums}

    def load_state_dict(self, state):
        self.sums = state["sums"].clone()
        super().load_state_dict({k: v for k, v in state.items() if k != "sums"})


def in_order(params):
    return optimizer(lambda self, state: {**state, "state": OrderedDict(state["state"])})(params)


class Lookahead(torch.optim.Optimizer):
    """Every third step is halfway between its weights and the slow ones, as the message advises."""

    def __init__(self, params):
        self.inner, self.state, self.count = torch.optim.AdamW(params, 0.05), {}, 0
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.zero_grad = self.inner.zero_grad

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return {**self.inner.state_dict(), "count": self.count, "slow": self.slow}

    def load_state_dict(self, state):
        self.inner.load_state_dict({k: state[k] for k in ("state", "param_groups")})
        self.count, self.slow = state["count"], [t.clone() for t in state["slow"]]


CARRIED = {"modes": WithModes, "beside": Counting, "in order": in_order, "advised": Lookahead}


def in_two_parts(make, path):
    """The weights of a whole run, and of one that was resumed in the middle."""
    whole = make().num_epochs(4).run().join(WAIT_S)
    make().num_epochs(2).checkpoint_dir(path).run().join(WAIT_S)
    return whole.params, make().num_epochs(4).resume(path).run().join(WAIT_S).params


def assert_equal(whole, rest):
    for name, value in whole.items():
        assert torch.equal(value, rest[name]), name


def square(model, batch):
    x = batch[0].double()[:, None]
    return (model(x) - x / 3).square().mean()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", CARRIED)
def test_an_optimizer_is_resumed_with_all_that_its_state_dict_has(kind, ranks, tmp_path):
    def make():
        b = builder(model=line, optim=CARRIED[kind], train=square, ranks=ranks, way=(SYNC, THREAD))
        return b.seed(0)

    assert_equal(*in_two_parts(make, tmp_path))


def line(device):
    model = nn.Linear(1, 2).double()
    nn.init.constant_(model.weight, 0.5)
    return model


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = line(None), line(None)


def of_pair(optim):
    def of(name):
        return lambda model, batch: square(getattr(model, name), batch)

    both = {"a": optim, "b": partial(torch.optim.SGD, lr=0.1, momentum=0.5)}
    b = Trainer.builder(lambda device: Two(), both, {"a": of("a"), "b": of("b")})
    return b.dataset(numbers(20)).batch_size(2).devices(["cpu"] * 2).policy("sync").seed(0)


@pytest.mark.parametrize("kind", CARRIED)
def test_each_of_several_optimizers_is_resumed_with_all_that_its_state_dict_has(kind, tmp_path):
    assert_equal(*in_two_parts(lambda: of_pair(CARRIED[kind]), tmp_path))


SCHEDULERS_CARRIED = {
    "an ordered dict": scheduler(lambda self: OrderedDict(count=self.count), take),
    "a counter": scheduler(lambda self: Counter(count=self.count), take),
    "a function beside": scheduler(lambda self: {"count": self.count, "of": max}, take),
    "an optimizer beside": scheduler(lambda self: {"count": self.count, "o": self.target}, take),
}


@pytest.mark.parametrize("kind", SCHEDULERS_CARRIED)
def test_a_scheduler_is_resumed_with_what_a_file_holds(kind, tmp_path):
    def make():
        b = builder(model=line, optim=partial(torch.optim.SGD, lr=0.1), train=square, ranks=1)
        return b.seed(0).scheduler(lambda o: SCHEDULERS_CARRIED[kind](o))

    assert_equal(*in_two_parts(make, tmp_path))


def test_rates_below_zero_are_resumed(tmp_path):
    def make():
        b = builder(model=line, optim=partial(torch.optim.SGD, lr=0.1), train=square, ranks=1)
        return b.seed(0).scheduler(lambda o: lrs.LambdaLR(o, lambda step: 1 - step / 15))

    assert_equal(*in_two_parts(make, tmp_path))


class Text(str):
    pass


def test_names_and_flags_of_other_types_are_resumed(tmp_path):
    class Flagged(nn.Linear):
        def __init__(self):
            super().__init__(1, 2, dtype=torch.float64)
            self.training = 1

    def train(model, batch):
        record_scalar(Text("a"), 1.0)
        record_scalar(Mode.SLOW, 2.0)
        return square(model, batch)

    def make(epochs):
        b = builder(model=lambda device: nn.Sequential(Flagged()), train=train, epochs=epochs)
        return b.checkpoint_dir(tmp_path).resume(tmp_path, True)

    make(1).run().join(WAIT_S)
    state = make(2).run().join(WAIT_S)
    assert state.metrics[0].scalars == {"a": 1.0, "slow": 2.0}


# -- a state that changes after the first step -------------------------------------------------


def test_a_first_checkpoint_that_cannot_be_taken_ends_the_run(tmp_path):
    count = []

    def train(model, batch):
        count.append(0)
        return square(model, batch)

    optim = optimizer(lambda self, state: {**state, "n": object() if len(count) > 5 else 1})
    b = builder(model=line, optim=optim, train=train, ranks=1, epochs=10_000)
    handle = b.checkpoint_dir(tmp_path).run()
    with pytest.raises(CheckpointError, match=r"\['n'\] is of type object"):
        handle.join(WAIT_S)
    assert len(count) < 10_000
    assert handle.state is not None


def test_a_later_checkpoint_that_cannot_be_taken_does_not(tmp_path, caplog):
    refuses = threading.Event()

    def train(model, batch):
        return 0.0 * square(model, batch)

    optim = optimizer(lambda self, state: {**state, "n": object() if refuses.is_set() else 1})
    b = builder(model=line, optim=optim, train=train, ranks=1, epochs=100_000)
    with b.checkpoint_dir(tmp_path).run() as handle:
        until(lambda: entries(tmp_path))
        refuses.set()
        until(lambda: "of type object" in caplog.text)
        handle.stop()
        state = handle.join(WAIT_S)
    assert state.stopped
    assert "of type object" in str(state.checkpoint_errors[0])


# -- reading back ------------------------------------------------------------------------------


@ways
def test_a_first_checkpoint_that_would_not_load_ends_the_run_and_is_removed(
    way, tmp_path, monkeypatch, caplog
):
    """As if a value had passed all checks that the safe reader does not know."""
    real = store.write_pickle

    def write(path, value):
        real(path, {**value, "odd": Odd()})

    monkeypatch.setattr(store, "write_pickle", write)
    (policy, ranks), trace = WAYS[way], Trace()
    b = builder(train=trace, way=policy, ranks=ranks, epochs=10_000).checkpoint_dir(tmp_path)
    handle = b.run()
    with pytest.raises(
        CheckpointError, match=r"ranks-00000.pt|state.pt: refused by the safe reader"
    ):
        handle.join(WAIT_S)
    assert len(trace.batches) < 10_000
    assert not list(tmp_path.iterdir())
    assert handle.state is not None
    assert caplog.text.count("could not be written") == 1


class Odd:
    pass


def test_the_only_checkpoint_of_a_run_is_read_back_before_it_ends(tmp_path, monkeypatch):
    real = store.write_pickle
    monkeypatch.setattr(store, "write_pickle", lambda path, v: real(path, {**v, "odd": Odd()}))
    with pytest.raises(CheckpointError, match="no run could resume from the checkpoint of step 10"):
        builder().checkpoint_dir(tmp_path).run().join(WAIT_S)


def test_a_saved_state_that_no_run_could_resume_is_refused(tmp_path):
    optim = optimizer(lambda self, state: {**state, "state": {7: {}}})
    with builder(optim=optim, epochs=10_000).run() as handle:
        with pytest.raises(
            CheckpointError, match=r"a key of rank 0\['stepper'\]\['optimizer'\]\['state'\] is 7"
        ):
            handle.save(tmp_path)
        handle.stop()
        handle.join(WAIT_S)
    assert not list(tmp_path.iterdir())
