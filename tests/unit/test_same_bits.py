"""The same seed gives the same bits under ``SYNC``, with dropout and random transforms."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from runtime import current_worker
from tests.support.running import GLOO, LOCAL_WAYS, SYNC, THREAD, WAIT_S, builder, local_ways

N, EPOCHS = 24, 2


class Noisy(Dataset):
    """Samples with random transforms: PyTorch's draws, and Python's and NumPy's on request."""

    def __init__(self, *, others=False):
        self.x = torch.linspace(-1, 1, N * 6).view(N, 6)
        self.others = others

    def __len__(self):
        return N

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(6)
        if torch.rand(()) < 0.5:
            x = x.flip(0)
        if self.others:
            x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        return x[torch.randperm(6)], x.sum()


class Turns:
    """Runs the ranks of each step one after the other, in a given order."""

    def __init__(self, order):
        self._order = order
        self._changed = threading.Condition()
        self._done = {}

    def wait(self, worker):
        step = worker.local_step
        with self._changed:
            done = self._done.setdefault(step, [])
            assert self._changed.wait_for(
                lambda: len(done) == self._order.index(worker.rank), WAIT_S
            )

    def over(self, worker):
        with self._changed:
            self._done[worker.local_step].append(worker.rank)
            self._changed.notify_all()


class Net(nn.Module):
    def __init__(self, *, recomputed=False):
        super().__init__()
        self.recomputed = recomputed
        self.first = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3))
        self.rest = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.RReLU(), nn.Linear(8, 1))

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False) if self.recomputed else self.first(x)
        return self.rest(x)


def train(
    ranks,
    *,
    order=None,
    backend=THREAD,
    dataset=None,
    recomputed=False,
    configure=lambda b: b,
    seed=5,
    weights=None,
):
    turns = Turns(order or list(range(ranks)))

    def fit(model, batch):
        x, y = batch
        worker = current_worker()
        turns.wait(worker)
        loss = (model(x + 0.1 * torch.randn(x.shape)).squeeze(1) - y).square().mean()
        turns.over(worker)
        return loss

    def make(device):
        net = Net(recomputed=recomputed)
        if weights is not None:
            net.load_state_dict(weights)
        return net

    made = builder(
        model=make,
        optim=lambda params: torch.optim.AdamW(params, 0.01),
        train=fit,
        dataset=dataset or Noisy(),
        batch_size=2,
        epochs=EPOCHS,
        ranks=ranks,
        way=(SYNC, backend),
    )
    if seed is not None:
        made.seed(seed)
    return configure(made).run().join(WAIT_S).params


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_without_a_seed_repeats_after_manual_seed_and_logs_it(caplog):
    def unseeded(torch_seed, **settings):
        torch.manual_seed(torch_seed)
        return train(2, seed=None, **settings)

    with caplog.at_level("INFO", "runtime"):
        first = unseeded(7)
    assert same(first, unseeded(7))
    assert "torch.manual_seed(7) at the start of the program" in caplog.text
    other = unseeded(8)
    assert not same(first, other)
    # Order and workers' generators are those of seed 0.
    torch.manual_seed(7)
    weights = Net().state_dict()

    assert same(first, train(2, seed=0, weights=weights))


class Projected(nn.Module):
    """Attributes that are neither parameters nor buffers, of each generator of the process."""

    def __init__(self):
        super().__init__()
        self.features = torch.randn(6, 3)
        self.order = np.random.permutation(6)
        self.scale = random.random()
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.scale * x[:, self.order] @ self.features)


@local_ways
@pytest.mark.parametrize("seed", [None, 5])
def test_attributes_that_a_factory_draws_are_those_of_rank_0_on_every_rank(way, seed):
    made = []

    def make(device):
        made.append(Projected())
        return made[-1]

    def fit(model, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    b = builder(model=make, train=fit, dataset=Noisy(), epochs=1, ranks=3, way=way)
    if seed is not None:
        b.seed(seed)
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    state = b.run().join(WAIT_S)
    after = torch.rand(()), np.random.rand(), random.random()
    state.model()
    for net in made[1:]:
        assert torch.equal(net.features, made[0].features)
        assert (net.order == made[0].order).all()
        assert net.scale == made[0].scale
    # The process's generators are where one call of the factory leaves them.
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    if seed is None:
        Projected()
    else:
        np.random.permutation(6), random.random()
    assert (torch.rand(()), np.random.rand(), random.random()) == after


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("ranks", [1, 2])
def test_script_modules_of_a_factory_train_like_the_modules_that_they_are_made_of(ranks):
    def run(make):
        def fit(model, batch):
            return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

        b = builder(
            model=make,
            optim=lambda params: torch.optim.SGD(params, 0.01),
            train=fit,
            dataset=Noisy(),
            epochs=1,
            ranks=ranks,
            way=(SYNC, THREAD),
        )
        return b.seed(1).run().join(WAIT_S).params

    def bare(device):
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    wanted, scripted = run(bare), run(lambda device: torch.jit.script(bare(device)))
    for name, value in wanted.items():
        torch.testing.assert_close(scripted[name], value)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_bits_do_not_depend_on_the_order_of_ranks(ranks):
    order = list(range(ranks))
    wanted = train(ranks, order=order)
    torch.rand(7)  # where the process's generator stands does not matter
    assert same(wanted, train(ranks, order=order[::-1]))
    assert not same(wanted, train(ranks, order=order, configure=lambda b: b.seed(6)))


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_bits_do_not_depend_on_the_loader(ranks):
    wanted = train(ranks, configure=lambda b: b.prefetch(0))
    assert same(wanted, train(ranks, configure=lambda b: b.prefetch(3)))


def test_loader_threads_and_processes_give_the_same_bits():
    data = Noisy(others=True)
    wanted = train(2, dataset=data, configure=lambda b: b.dataset_lock(True))
    random.random(), np.random.rand()
    again = train(2, dataset=data, order=[1, 0], configure=lambda b: b.dataset_lock(True))
    assert same(wanted, again)
    assert same(wanted, train(2, dataset=data, configure=lambda b: b.loader_workers(1)))


def test_the_bits_repeat_over_gloo():
    assert same(train(2, order=[0, 1], backend=GLOO), train(2, order=[1, 0], backend=GLOO))


@pytest.mark.parametrize("ranks", [1, 2])
def test_recomputed_layers_change_nothing(ranks):
    wanted = train(ranks)
    assert same(wanted, train(ranks, order=list(range(ranks))[::-1], recomputed=True))


@pytest.mark.parametrize("way", LOCAL_WAYS)
def test_an_evaluation_takes_none_of_the_workers_draws(way):
    def draws_elsewhere(model, epoch):
        return {
            "elsewhere": torch.equal(torch.get_rng_state(), torch.default_generator.get_state())
        }

    b = builder(dataset=40, epochs=4, way=way).eval_fn(draws_elsewhere)
    state = b.run().join(WAIT_S)
    assert [m.scalars["eval/elsewhere"] for m in state.metrics] == [1.0] * 4
