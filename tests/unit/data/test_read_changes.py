"""Changes of files, memory and attributes that the first reads of a data set show."""

from __future__ import annotations

import functools
import io
import mmap
import os
import random
import socket
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from runtime.data.dataset import adapt_dataset
from tests.support.running import WAIT_S

N, SIZE = 60, 4
BATCHES = list(torch.arange(N).split(SIZE))
LOCAL = threading.local()


def pause():
    """In a thread that has set ``LOCAL.during``: call it once, within the read of a sample."""
    during = vars(LOCAL).pop("during", None)
    if during is not None:
        during()


class Source(Dataset):
    """Calls ``read(self, index)`` for each sample."""

    def __init__(self, read, **attributes):
        self.read = read
        vars(self).update(attributes)

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.read(self, index)
        pause()
        return torch.tensor(index)


def end_together(reading, other, limit_s):
    """True if ``other`` reads a batch while ``reading`` is in its data set."""
    done = threading.Event()

    def read():
        other.load(torch.tensor([0]))
        done.set()

    def during():
        threads.append(threading.Thread(target=read))
        threads[-1].start()
        found.append(done.wait(limit_s))

    threads: list[threading.Thread] = []
    found: list[bool] = []
    LOCAL.during = during
    reading.load(BATCHES[3])
    threads[0].join(WAIT_S)
    assert done.is_set()
    return found[0]


def take_turns(reading, other=None):
    return not end_together(reading, other or reading, 0.1)


def are_free(reading, other=None):
    return end_together(reading, other or reading, WAIT_S)


def observed(dataset, batches=BATCHES[:3]):
    """An adapter that has read a few batches."""
    adapter = adapt_dataset(dataset)
    for indices in batches:
        adapter.load(indices)
    return adapter


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(bytes(N + 1))
    with path.open("rb+", buffering=0) as file:
        yield file


def seek(file, index):
    file.seek(index + 1)


class Slots:
    """An attribute without a ``__dict__``."""

    __slots__ = ("file",)

    def __init__(self, file):
        self.file = file


@dataclass
class Store:
    file: object


class OfClass(Source):
    handle: object = None


OPEN = []
"""Files that a data set finds as a global."""


def read_global(self, index):
    OPEN[0].seek(index + 1)


def read_global_within(self, index):
    return (lambda: [each.seek(index + 1) for each in OPEN])()


def in_closure(file):
    return lambda self, index: file.seek(index + 1)


def draw(bound):
    return random.randrange(bound)


def keep_in_slot(self, index):
    self.inner.file = draw(1000)


def keep_in_class(self, index):
    OfClass.handle = draw(1000)


def in_cell():
    kept = 0

    def read(self, index):
        nonlocal kept
        kept = draw(1000)

    return read


def set_flag(self, index):
    self.flag = draw(2) == 1


def set_index(self, index):
    self.current = index


def set_offset(self, index):
    self.offset = 8 * index


def set_key(self, index):
    self.state["crop"] = draw(1000)


def set_nested(self, index):
    self.transform.params = (index,)


def write_all(self, index):
    self.scratch[0] = (index + 1) % 250


class Transform(nn.Module):
    """Keeps parameters as augmentations of some libraries do."""


def pair():
    return socket.socketpair()


TURNS = {
    "a file": lambda f: Source(lambda self, i: seek(self.file, i), file=f),
    "a file in a dict": lambda f: Source(lambda self, i: seek(self.by["a"], i), by={"a": f}),
    "a file in a long list": lambda f: Source(
        lambda self, i: seek(self.all[-1], i), all=[*range(500), f]
    ),
    "a file in nested containers": lambda f: Source(
        lambda self, i: seek(self.all["a"][1][0], i), all={"a": (0, [f])}
    ),
    "a file of another object": lambda f: Source(
        lambda self, i: seek(self.inner.file, i), inner=Store(f)
    ),
    "a file in a slot": lambda f: Source(lambda self, i: seek(self.inner.file, i), inner=Slots(f)),
    "a file of the class": lambda f: type("Of", (OfClass,), {"handle": f})(
        lambda self, i: seek(self.handle, i)
    ),
    "a file in a closure": lambda f: Source(in_closure(f)),
    "a file of a partial function": lambda f: Source(
        lambda self, i: self.call(i), call=functools.partial(seek, f)
    ),
    "a file of a bound method": lambda f: Source(lambda self, i: self.call(i), call=f.seek),
    "a file that is opened in the first read": lambda f: Source(
        lambda self, i: seek(vars(self).setdefault("file", f), i)
    ),
    "a file in memory": lambda f: Source(
        lambda self, i: seek(self.file, i), file=io.BytesIO(bytes(N))
    ),
    "a buffered file": lambda f: Source(
        lambda self, i: seek(self.file, i), file=io.BufferedReader(io.BytesIO(bytes(N)))
    ),
    "a socket": lambda f: Source(lambda self, i: None, link=LINKS[0]),
    "a tensor": lambda f: Source(write_all, scratch=torch.zeros(2)),
    "an array": lambda f: Source(write_all, scratch=np.zeros(2)),
    "a bytearray": lambda f: Source(write_all, scratch=bytearray(2)),
    "an attribute": lambda f: Source(set_nested, transform=Store(None)),
    "an attribute of a module": lambda f: Source(set_nested, transform=Transform()),
    "an attribute in a slot": lambda f: Source(keep_in_slot, inner=Slots(0)),
    "an attribute of the class": lambda f: OfClass(keep_in_class),
    "a variable of a closure": lambda f: Source(in_cell()),
    "a key": lambda f: Source(set_key, state={}),
    "a flag": lambda f: Source(set_flag),
    "the index": lambda f: Source(set_index),
    "the offset": lambda f: Source(set_offset),
    "a flag under a Subset": lambda f: Subset(Source(set_flag), range(N)),
}


@pytest.fixture(scope="module", autouse=True)
def _links():
    LINKS[:] = socket.socketpair()
    yield
    for link in LINKS:
        link.close()


LINKS: list[socket.socket] = []


@pytest.mark.parametrize("kind", TURNS)
def test_reads_take_turns_that_change(kind, file):
    assert take_turns(observed(TURNS[kind](file)))


@pytest.mark.parametrize("read", [read_global, read_global_within])
def test_reads_take_turns_that_change_a_global_file(read, file, monkeypatch):
    monkeypatch.setattr("tests.unit.data.test_read_changes.OPEN", [file])
    assert take_turns(observed(Source(read)))


def fill(self, index):
    self.cache[index] = torch.tensor(index)


def count(self, index):
    self.num_reads += 1
    self.by_kind["all"] += 1


def load_once(self, index):
    if self.table is None:
        self.table = torch.arange(N)


def open_own(self, index):
    with open(self.path, "rb") as file:
        file.seek(index)


OWN = threading.local()


def open_for_thread(self, index):
    if not hasattr(self.own, "file"):
        self.own.file = io.BytesIO(bytes(N))
    self.own.file.seek(index)


FREE = {
    "read a tensor": lambda f: Source(lambda self, i: self.x[i].clone(), x=torch.arange(N)),
    "read an array": lambda f: Source(lambda self, i: self.x[i].copy(), x=np.arange(N)),
    "read a memory map": lambda f: Source(
        lambda self, i: self.x[i].copy(), x=np.memmap(f, np.uint8, "r+")
    ),
    "read a mapped file": lambda f: Source(
        lambda self, i: self.map[i : i + 1], file=f, map=mmap.mmap(f.fileno(), N)
    ),
    "read at an offset": lambda f: Source(
        lambda self, i: os.pread(self.file.fileno(), 1, i), file=f
    ),
    "open a file for each read": lambda f: Source(open_own, path=f.name),
    "have a file for each thread": lambda f: Source(open_for_thread, own=OWN),
    "hold a closed file": lambda f: Source(lambda self, i: None, file=closed()),
    "count": lambda f: Source(count, num_reads=0, by_kind={"all": 0}),
    "fill a cache": lambda f: Source(fill, cache={}),
    "load once": lambda f: Source(load_once, table=None),
    "append": lambda f: Source(lambda self, i: self.seen.append(i), seen=[]),
}


def closed():
    file = io.BytesIO()
    file.close()
    return file


@pytest.mark.parametrize("order", [range(3), (2, 0, 1)], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", FREE)
def test_reads_are_made_at_once_that_only(kind, order, file):
    assert are_free(observed(FREE[kind](file), [BATCHES[i] for i in order]))


class Study:
    """Has a method ``tell`` that is not that of a file, and an attribute that grows."""

    def __init__(self):
        self.results = {}

    def tell(self, trial, value):
        self.results[trial] = value


def test_a_method_tell_of_another_meaning_is_no_position():
    assert are_free(observed(Source(lambda self, i: self.study.tell(i, i), study=Study())))


SHARED = {
    "one Subset": lambda data: (Subset(data, range(30)), data),
    "several": lambda data: (ConcatDataset([data, data]), Subset(Subset(data, range(N)), range(N))),
    "a list": lambda data: (Source(lambda self, i: self.held[0][i], held=[data]), data),
    "a dict": lambda data: (Source(lambda self, i: self.held["a"][i], held={"a": data}), data),
    "a function": lambda data: (Source(lambda self, i: data[i]), data),
}


@pytest.mark.parametrize("way", SHARED)
def test_data_sets_take_turns_that_reach_one_object_through(way, file):
    reading, other = SHARED[way](TURNS["a file"](file))
    assert take_turns(observed(reading), observed(other))


def test_an_object_that_another_data_set_finds_changed_is_guarded_in_all(file):
    data = Source(lambda self, i: self.file.seek(i) if i >= 30 else None, file=file)
    first = observed(Subset(data, range(30)))
    assert are_free(first)
    rest = observed(data, BATCHES[8:11])
    assert take_turns(rest, first)


def load_shard(self, index):
    if index // 20 != self.shard:
        self.shard, self.rows = index // 20, torch.arange(index // 20 * 20, N)


def test_an_attribute_that_a_later_read_sets_again_is_named_and_read_in_turns(caplog):
    adapter = observed(Source(load_shard, shard=None, rows=None))
    assert are_free(adapter, observed(Source(count, num_reads=0, by_kind={"all": 0})))
    adapter.load(BATCHES[0])
    adapter.load(BATCHES[7])
    assert len(caplog.messages) == 1
    assert "Source sets its 'rows', and did not in its first reads" in caplog.text
    assert "dataset_lock(True)" in caplog.text
    assert take_turns(adapter)


def test_a_file_that_a_later_read_moves_is_named_and_read_in_turns(file, caplog):
    data = Source(lambda self, i: self.file.seek(i) if i >= 30 else None, file=file)
    adapter = observed(data)
    adapter.load(BATCHES[8])
    assert "Source changes its 'file', and did not in its first reads" in caplog.text
    assert take_turns(adapter)


def test_changes_that_the_user_makes_between_reads_are_none(caplog):
    data = Source(lambda self, i: None, level=0)
    adapter = adapt_dataset(data)
    for indices in BATCHES[:8]:
        data.level = draw(1000)
        adapter.load(indices)
    assert are_free(adapter)
    assert not caplog.messages
