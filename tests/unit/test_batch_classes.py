"""Batches of classes of their own: pieces and copies keep the class, or it is refused by name."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from runtime import DataParallelCoordinator, DdpConfig, Trainer, predict
from runtime.core.nested import num_rows
from runtime.evaluation.batch_source import HeldBatch
from runtime.loop.shard_samples import shard_samples
from tests.support.running import WAIT_S

N, D = 12, 4
X = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Record(Mapping):
    """Of the kind of a TensorDict: it keeps the size of its batch, and its rows can be sliced."""

    def __init__(self, fields, batch_size):
        self.fields, self.batch_size = fields, torch.Size(batch_size)

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.fields[key]
        num = len(range(self.batch_size[0])[key])
        return Record({name: value[key] for name, value in self.fields.items()}, [num])

    def __iter__(self):
        return iter(self.fields)

    def __len__(self):
        return len(self.fields)

    def to(self, device, non_blocking=False):
        moved = {name: value.to(device) for name, value in self.fields.items()}
        return Record(moved, self.batch_size)


class Frozen(Mapping):
    """Immutable; its constructor counts the rows."""

    def __init__(self, fields):
        self.fields, self.batch_size = dict(fields), len(fields["x"])

    def __getitem__(self, key):
        return self.fields[key]

    def __iter__(self):
        return iter(self.fields)

    def __len__(self):
        return len(self.fields)


class Encoding(UserDict):
    """Of the kind of a tokenizer's: it keeps an entry for each sample beside its items."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self.encodings = encodings
        self.name = "of a tokenizer"


@dataclasses.dataclass
class Points:
    x: torch.Tensor
    batch_size: int
    num: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.num = len(self.x)


class Pair(namedtuple("Pair", "x twice")):
    __slots__ = ()

    def __new__(cls, x):
        return super().__new__(cls, x, 2 * x)

    @property
    def sum(self):
        return self.x + self.twice


class Rows:
    """No mapping: it has a length, slices and ``to``."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, rows):
        return Rows(self.x[rows])

    def to(self, device):
        return Rows(self.x.to(device))


class Chunks(Rows):
    """It has ``split``, as a tensor has, and no slices."""

    __getitem__ = None

    @property
    def batch_size(self):
        return len(self.x)

    def split(self, sizes):
        return [Chunks(x) for x in self.x.split(sizes)]

    def to(self, device):
        return Chunks(self.x.to(device))


class Image(torch.Tensor):
    """Its operations return plain tensors, as those of other libraries do."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def image(x):
    found = x.as_subclass(Image)
    found.layout_name = "HWC"
    return found


MAKERS = {
    "Record": lambda x: Record({"x": x}, [len(x)]),
    "Frozen": lambda x: Frozen({"x": x}),
    "Encoding": lambda x: Encoding({"x": x}, list(range(len(x)))),
    "Points": lambda x: Points(x, len(x)),
    "Pair": Pair,
    "Rows": Rows,
    "Chunks": Chunks,
    "Image": image,
}


def rows_of(batch):
    """The tensor of a batch; asserts that everything else that it keeps is that of its rows."""
    if isinstance(batch, Image):
        assert batch.layout_name == "HWC"
        return batch.as_subclass(torch.Tensor)
    x = batch.x if hasattr(batch, "x") else batch["x"]
    size = getattr(batch, "batch_size", len(x))
    assert (size if isinstance(size, int) else size[0]) == len(x)
    if isinstance(batch, Encoding):
        assert (len(batch.encodings), batch.name) == (len(x), "of a tokenizer")
    if isinstance(batch, Points):
        assert batch.num == len(x)
    if isinstance(batch, Pair):
        assert torch.equal(batch.sum, 3 * x)
    return x


class Net(nn.Linear):
    def __init__(self):
        super().__init__(D, 1, dtype=torch.float64)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.seen = set()  # shared by the replicas' threads

    def forward(self, batch):
        self.seen.add(type(batch).__name__)
        return super().forward(rows_of(batch))


def loss_of(model, batch):
    return model(batch).square().mean()


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def one_device(num_steps=1):
    net = Net()
    optimizer = sgd(net.parameters())
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(net, {"x": X}).backward()
        optimizer.step()
    return net.weight.detach()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index]


@dataclasses.dataclass
class Collate:
    kind: str

    def __call__(self, items):
        return MAKERS[self.kind](torch.stack(items))


@pytest.mark.parametrize("kind", MAKERS)
def test_pieces_of_an_own_loops_batch_keep_their_class(kind):
    net = Net()
    with Trainer.setup(net, sgd, ["cpu"] * 3) as model:
        for _ in range(2):
            loss_of(model, MAKERS[kind](X)).backward()
            model.step()
    assert net.seen == {kind}
    assert torch.allclose(net.weight, one_device(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [*MAKERS, "packed"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_whole_batches_of_an_own_loop_are_passed_as_they_are(kind, num_devices):
    def loss_fn(module, batch):
        assert batch is given or type(batch) is type(given)
        return module(batch if kind != "packed" else {"x": batch.data}).square().mean()

    lengths = torch.full((N,), D)
    given = (
        pack_padded_sequence(X.unsqueeze(2).expand(-1, -1, D), lengths, batch_first=True)
        if kind == "packed"
        else MAKERS[kind](X)
    )
    with Trainer.setup(Net(), sgd, ["cpu"] * num_devices) as model:
        losses = model.accumulate(loss_fn, [given] * num_devices)
    assert losses.isfinite().all()


@pytest.mark.parametrize("kind", MAKERS)
def test_pieces_of_a_coordinators_batch_keep_their_class(kind):
    with DataParallelCoordinator(Net(), sgd, loss_of, ["cpu"] * 3) as coordinator:
        coordinator.train_batch(MAKERS[kind](X))
        assert coordinator.primary.seen == {kind}
        assert torch.allclose(coordinator.primary.weight, one_device(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("own_loop", [False, True])
def test_batches_that_collate_fn_makes_reach_the_workers_as_they_are(kind, own_loop):
    def body(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))

    if own_loop:
        b = Trainer.loop(lambda device: Net(), lambda model: sgd(model.parameters()), body)
    else:
        b = Trainer.builder(lambda device: Net(), sgd, loss_of)
    b.dataset(Data()).collate_fn(Collate(kind)).batch_size(N // 2).num_epochs(1).seed(0)
    state = b.devices(["cpu"] * 2).policy("sync").progress(False).run().join(WAIT_S)
    assert torch.allclose(state.model().weight, one_device(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MAKERS)
def test_batches_of_a_prediction_keep_their_class(kind):
    seen = set()

    def fn(model, batch):
        seen.add(type(batch).__name__)
        return model(batch)

    loader = DataLoader(Data(), batch_size=5, collate_fn=Collate(kind))
    found = predict(Net(), loader, fn=fn, devices=["cpu"] * 2)
    assert seen == {kind}
    with torch.no_grad():
        assert torch.allclose(found, Net()({"x": X}), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_that_is_divided_for_lack_of_memory_keeps_its_class(kind):
    held = HeldBatch(lambda: MAKERS[kind](X), 4, 4 + N)
    piece = held.load(7, 12)
    assert type(piece).__name__ == kind
    assert torch.equal(rows_of(piece), X[3:8])


class Stale(UserDict):
    """Neither slices nor its constructor make a piece with the size of the piece."""

    def __init__(self, data):
        super().__init__(data)
        self.batch_size = N


class Graphs:
    """Several graphs in one; slices are lists of graphs."""

    def __init__(self, x, batch_size):
        self.x, self.batch_size = x, batch_size

    def __getitem__(self, rows):
        return [self.x[rows]]

    def to(self, device):
        return Graphs(self.x.to(device), self.batch_size)


class Plain:
    def __init__(self, x):
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@dataclasses.dataclass
class Needs:
    x: torch.Tensor
    extra: dataclasses.InitVar[int]


class Triple(tuple):
    def __new__(cls, x, y, z):
        return super().__new__(cls, (x, y, z))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (Stale({"x": X}), "a Stale of 12 samples cannot be divided"),
        (Graphs(X, N), r"a Graphs of 12 samples cannot be divided: neither Graphs\[0:6\]"),
        (Graphs(X, 4), r"a Graphs of 4 samples( cannot|\) have different sizes)"),
        (Plain(X), "a Plain of 12 samples.*model.accumulate"),
        (Slots(X), "a Slots of 12 samples"),
        (Needs(X, 3), "a Needs cannot be made from its parts"),
        (Triple(X, X, X), "a Triple cannot be made from its parts"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("beside", [False, True])
def test_a_class_that_an_own_loop_cannot_divide_is_refused_by_name(batch, match, beside):
    """Also beside a tensor, which shows the size of the batch."""
    net = nn.Identity()
    net.w = nn.Parameter(torch.zeros(1))
    with Trainer.setup(net, sgd, ["cpu"] * 2) as model:
        net.forward = lambda *inputs: X * net.w
        with pytest.raises((TypeError, ValueError), match=match):
            model(X, batch) if beside else model(batch)


def test_a_class_that_a_coordinator_cannot_divide_is_refused_by_name():
    packed = pack_padded_sequence(X.unsqueeze(2), torch.full((N,), D), batch_first=True)
    with pytest.raises(TypeError, match="a Stale of 12 samples cannot be divided"):
        shard_samples(Stale({"x": X}), 2)
    with pytest.raises(TypeError, match="a PackedSequence cannot be split"):
        shard_samples(packed, 2)


def test_an_object_that_belongs_to_no_sample_reaches_every_device_as_it_is():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x, settings, bank):
            return x * self.w * settings.scale + bank.x.sum()

    settings = Plain(None)
    settings.scale = torch.tensor([3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    config = DdpConfig(whole=["bank"])
    with Trainer.setup_with(Scale(), sgd, ["cpu"] * 2, config=config) as model:
        found = model(X, settings, Plain(X)).detach()
    assert torch.allclose(found, X * settings.scale + X.sum())


def test_a_tensor_with_a_gradient_in_an_object_is_refused():
    x = X.clone().requires_grad_()
    with (
        Trainer.setup(Net(), sgd, ["cpu"] * 2) as model,
        pytest.raises(TypeError, match="a tensor in a Rows requires a gradient"),
    ):
        model(Rows(x))


def test_the_size_of_a_batch_is_that_which_it_keeps_or_of_its_first_tensor():
    assert [num_rows(make(X)) for make in MAKERS.values()] == [N] * len(MAKERS)
    assert num_rows({"text": "ab", "x": X[:3]}) == 3
    assert num_rows(torch.tensor(1.0)) is None
