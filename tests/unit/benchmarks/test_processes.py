"""Child processes of the benchmarks, and the training measured in them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import environment, models, processes
from benchmarks.harness.processes import Child, GlooGroup
from tests.support import programs

pytestmark = pytest.mark.slow

ECHO = """
from benchmarks.harness.processes import serve
def work(n):
    if n < 0:
        raise ValueError(n)
    return n + 1
serve(work, "ready")
"""


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    programs.fork_from(monkeypatch, processes)


def test_a_child_answers_until_it_dies_and_its_death_is_reported():
    with Child("the echo", ["-c", ECHO], {**environment(), "PYTHONWARNINGS": ""}) as child:
        assert child.answer() == "ready"
        assert [child.ask(n=n) for n in (1, 2)] == [2, 3]
        with pytest.raises(RuntimeError, match="the echo gave no answer"):
            child.ask(n=-1)
        child._process.wait(10)  # whose end makes the next request fail
        with pytest.raises(RuntimeError, match="the echo gave no answer"):
            child.ask(n=1)


def test_peers_train_in_one_group_and_a_slowed_rank_holds_all_of_them_up():
    pause_s, num_steps = 0.02, 5
    with GlooGroup(2) as group:
        for system in ("ddp", "averager"):
            request = {"system": system, "name": "tiny", "num_samples": 64, "num_warmup": 8}
            fast = group.ask(**request, num_steps=num_steps, pauses_s=[0.0, 0.0])
            slowed = group.ask(**request, num_steps=num_steps, pauses_s=[0.0, pause_s])
            assert min(fast, slowed) > 0  # on a busy machine the fast one may be held up, too
            assert slowed <= 2 * models.BATCH_SIZE / pause_s


def test_a_slowed_rank_sleeps_in_proportion_to_its_batch(monkeypatch):
    slept = []
    monkeypatch.setattr(models.time, "sleep", slept.append)
    workload = models.tiny()
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    x, y = workload.make_data(workload.batch_size)
    for size in (workload.batch_size, workload.batch_size // 4):
        models.train_step(workload, model, optimizer, (x[:size], y[:size]), pause_s=0.4)
    models.train_step(workload, model, optimizer, (x, y))
    assert slept == [0.4, 0.1]


def test_a_bare_loop_accepts_another_batch_size_and_restores_one_thread():
    before = torch.get_num_threads()
    try:
        workload = models.tiny()
        data = workload.make_data(64)
        sizes = set()
        plain = workload.loss

        def loss(model, batch):
            sizes.add(len(batch[0]))
            return plain(model, batch)

        object.__setattr__(workload, "loss", loss)
        rate = models.solo_rate(
            workload, data, warmup_s=0.01, measure_s=0.02, num_threads=2, batch_size=32
        )
        assert rate > 0
        assert sizes == {32}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
