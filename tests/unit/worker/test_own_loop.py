"""Loops of the user: parity with train_fn and one device, and the ways to leave a body."""

import copy
import threading
from collections import Counter as Tally
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coordinator.splitting import permutation
from runtime import LoopWorker, ReplicaMismatch, Trainer, WorkerFailed, current_worker
from runtime.worker.meetings import Act, Meetings, Post
from tests.support.looping import NUM_SAMPLES, Marks, loop_builder, marked, plain
from tests.support.running import WAIT_S

POLICIES = ("sync", "cadence", "async")
every_policy = pytest.mark.parametrize("policy", POLICIES)


def points(n=24, seed=1):
    x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def net(device):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double().to(device)


def smooth_net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device)


def square_loss(model, batch):
    return F.mse_loss(model(batch[0]).double(), batch[1])


def adam(params):
    return torch.optim.Adam(params, 1e-2)


def square_loop(worker):
    for batch in worker.batches():
        worker.step(square_loss(worker.model, batch))


def adam_of(model):
    return adam(model.parameters())


def run(builder, data=None, ranks=2, policy="sync", **settings):
    builder = builder.dataset(points(23) if data is None else data).batch_size(4).num_epochs(2)
    builder = builder.devices(["cpu"] * ranks).policy(policy).seed(0).collective_timeout(WAIT_S)
    for name, value in settings.items():
        getattr(builder, name)(value)
    return builder.run().join(WAIT_S)


def weights(state):
    return torch.cat([t.flatten() for t in state.state_dict().values()])


def one_device(body, *, data, batch, epochs=2, model=smooth_net):
    """Train a plain loop on global batches in the order of the runs' seed."""
    replica = model(torch.device("cpu"))
    step = body(replica)
    for epoch in range(epochs):
        order = order_of(len(data[0]), epoch)
        for part in order.split(batch):
            step(tuple(t[part] for t in data))
    return torch.cat([t.flatten() for t in replica.state_dict().values()])


def order_of(n, epoch):
    return torch.as_tensor(permutation(n, epoch, 0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"max_grad_norm": 0.5},
        {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3)},
        {"on_non_finite": "skip"},
        {"max_steps": 7},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_a_loop_equals_the_train_fn_form_to_the_bit(ranks, settings):
    model = net if "fp16" not in settings.values() else smooth_net
    formed = run(Trainer.builder(model, adam, square_loss), ranks=ranks, **settings)
    looped = run(Trainer.loop(model, adam_of, square_loop), ranks=ranks, **settings)
    assert torch.equal(weights(looped), weights(formed))
    assert [m.avg_loss for m in looped.metrics] == [m.avg_loss for m in formed.metrics]
    assert [m.num_samples for m in looped.metrics] == [m.num_samples for m in formed.metrics]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_by_backward_equals_one_device(ranks):
    """As on one device, the body divides each loss by the number of batches."""

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            loss = square_loss(worker.model, batch) / 3
            worker.step(loss) if number % 3 == 2 else worker.backward(loss)

    def body(model):
        optimizer, count = adam_of(model), [0]

        def step(batch):
            (square_loss(model, batch) / 3).backward()
            count[0] += 1
            if count[0] % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

        return step

    data = points(12 * ranks)
    state = run(Trainer.loop(smooth_net, adam_of, loop), data, ranks)
    expected = one_device(body, data=data, batch=4 * ranks)
    torch.testing.assert_close(weights(state), expected, rtol=1e-8, atol=1e-10)
    assert [m.num_samples for m in state.metrics] == [12 * ranks] * 2


@pytest.mark.parametrize("by_hand", [False, True])
def test_parts_of_a_loss_equal_their_sum(by_hand):
    def loop(worker):
        for batch in worker.batches():
            out = worker.model(batch[0])
            data, size = F.mse_loss(out, batch[1]), out.square().mean()
            if by_hand:
                (data + size).backward()
                worker.step()
            else:
                worker.backward(data, retain_graph=True)
                worker.step(size)

    def whole(worker):
        for batch in worker.batches():
            out = worker.model(batch[0])
            worker.step(F.mse_loss(out, batch[1]) + out.square().mean())

    parts = run(Trainer.loop(smooth_net, adam_of, loop))
    summed = run(Trainer.loop(smooth_net, adam_of, whole))
    torch.testing.assert_close(weights(parts), weights(summed), rtol=1e-8, atol=1e-10)
    if not by_hand:
        assert parts.metrics[-1].avg_loss == pytest.approx(summed.metrics[-1].avg_loss)


def test_weights_make_the_mean_over_the_units_of_all_ranks():
    data = (*points(24), torch.arange(24) % 3)

    def weighted(model, batch):
        per = (model(batch[0]) - batch[1]).square().squeeze(1)
        return (per * batch[2]).sum() / batch[2].sum().clamp(min=1), batch[2].sum()

    def loop(worker):
        for batch in worker.batches():
            loss, weight = weighted(worker.model, batch)
            worker.step(loss, weight=weight)

    formed = run(Trainer.builder(smooth_net, adam, weighted), data)
    looped = run(Trainer.loop(smooth_net, adam_of, loop), data)
    assert torch.equal(weights(looped), weights(formed))

    def accumulated(worker):
        for number, batch in enumerate(worker.batches()):
            loss, weight = weighted(worker.model, batch)
            call = worker.step if number % 3 == 2 else worker.backward
            call(loss, weight=weight)

    formed = run(Trainer.builder(smooth_net, adam, weighted), data, accumulate=3)
    looped = run(Trainer.loop(smooth_net, adam_of, accumulated), data)
    torch.testing.assert_close(weights(looped), weights(formed), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("split", [False, True])
def test_the_loss_of_a_batch_of_weight_0_may_be_a_constant(policy, split):
    x, y = points(32)
    data = (x, y, (torch.arange(32) % 8 == 0) * 1.0)  # most batches have no unit

    def loss_of(worker, batch, constant):
        units = batch[2].sum()
        if constant and units == 0:
            return torch.zeros(()), units
        per = (worker.model(batch[0]) - batch[1]).square().squeeze(1)
        return (per * batch[2]).sum() / units.clamp(min=1), units

    def loop(worker, constant):
        for number, batch in enumerate(worker.batches()):
            loss, weight = loss_of(worker, batch, constant)
            call = worker.backward if split and number % 2 == 0 else worker.step
            call(loss, weight=weight)

    ways = [partial(loop, constant=constant) for constant in (False, True)]
    ranks = 2 if policy == "sync" else 1
    graphs, constants = (
        run(Trainer.loop(smooth_net, adam_of, way), data, ranks, policy) for way in ways
    )
    assert torch.equal(weights(graphs), weights(constants))


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.maker = nn.Linear(2, 4)


def gan(device):
    torch.manual_seed(0)
    return Gan().double().to(device)


def gan_optimizers(model):
    judge = torch.optim.Adam(model.judge.parameters(), 1e-2)
    return {"judge": judge, "maker": torch.optim.SGD(model.maker.parameters(), 1e-1)}


def judge_loss(model, batch):
    made = model.maker(batch[0][:, :2])
    return F.softplus(-model.judge(batch[0])).mean() + F.softplus(model.judge(made)).mean()


def maker_loss(model, batch):
    return F.softplus(-model.judge(model.maker(batch[0][:, :2]))).mean()


def gan_loop(worker):
    for batch in worker.batches():
        worker.step(judge_loss(worker.model, batch), optimizer="judge")
        worker.step(maker_loss(worker.model, batch), optimizer="maker")


def gan_schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_optimizers_equal_one_device_and_the_train_fn_form(ranks):
    def body(model):
        optimizers = gan_optimizers(model)

        def step(batch):
            for name, loss_fn in (("judge", judge_loss), ("maker", maker_loss)):
                model.zero_grad()
                loss_fn(model, batch).backward()
                nn.utils.clip_grad_norm_(getattr(model, name).parameters(), 0.4)
                optimizers[name].step()

        return step

    data = points(12 * ranks)
    looped = run(Trainer.loop(gan, gan_optimizers, gan_loop), data, ranks, max_grad_norm=0.4)
    expected = one_device(body, data=data, batch=4 * ranks, model=gan)
    torch.testing.assert_close(weights(looped), expected, rtol=1e-8, atol=1e-10)
    factories = {
        "judge": lambda params: torch.optim.Adam(params, 1e-2),
        "maker": lambda params: torch.optim.SGD(params, 1e-1),
    }
    formed = run(
        Trainer.builder(gan, factories, {"judge": judge_loss, "maker": maker_loss}),
        data,
        ranks,
        max_grad_norm=0.4,
    )
    assert torch.equal(weights(looped), weights(formed))
    for mine, theirs in zip(looped.metrics, formed.metrics, strict=True):
        assert mine.avg_loss == theirs.avg_loss
        assert mine.scalars == theirs.scalars


@pytest.mark.parametrize("steps", [(1, 3), (2, 1)])
def test_the_number_of_steps_may_vary_from_batch_to_batch(steps):
    def loop(worker):
        for batch in worker.batches():
            for _ in range(steps[worker.global_step % 5 // 3]):
                worker.step(square_loss(worker.model, batch))

    def body(model):
        optimizer, count = adam_of(model), [0]

        def step(batch):
            for _ in range(steps[count[0] % 2]):
                model.zero_grad()
                square_loss(model, batch).backward()
                optimizer.step()
            count[0] += 1

        return step

    data = points(20)  # the last global batch has samples for two of the three ranks
    state = run(Trainer.loop(smooth_net, adam_of, loop), data, 3)
    expected = one_device(body, data=data, batch=12)
    torch.testing.assert_close(weights(state), expected, rtol=1e-8, atol=1e-10)
    assert [m.num_samples for m in state.metrics] == [20, 20]


@every_policy
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_is_trained_once(policy, ranks):
    state = loop_builder(plain, ranks=ranks, policy=policy).run().join(WAIT_S)
    assert marked(state) == [NUM_SAMPLES] * 2
    assert [m.num_samples for m in state.metrics] == [NUM_SAMPLES] * 2


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_rank_that_dies_leaves_its_batches_to_the_others(policy):
    dies = threading.Event()

    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            if worker.rank == 1 and number == 1:
                dies.set()
                raise ValueError("planted")
            if number == 1 and policy == "cadence":  # else they may take all other batches
                assert dies.wait(WAIT_S)
            worker.step(worker.model.loss(worker.epoch, batch))
        assert worker.rank != 1
        assert worker.is_first == (worker.rank == 0)

    builder = loop_builder(loop, ranks=3, policy=policy).on_worker_failure("continue")
    state = builder.run().join(WAIT_S)
    assert [f.rank for f in state.failures] == [1]
    assert marked(state) == [NUM_SAMPLES] * 2


def test_a_loop_resumes_to_the_bit_within_an_epoch(tmp_path):
    def builder(loop=gan_loop):
        made = Trainer.loop(gan, gan_optimizers, loop).dataset(points(60)).batch_size(4)
        made = made.num_epochs(3).devices(["cpu"] * 2).policy("sync").seed(0)
        return made.scheduler({"judge": gan_schedule, "maker": gan_schedule})

    stops = threading.Event()

    def until_stopped(worker):
        for batch in worker.batches():
            worker.step(judge_loss(worker.model, batch), optimizer="judge")
            worker.step(maker_loss(worker.model, batch), optimizer="maker")
            if worker.epoch == 1 and worker.is_first and not stops.is_set():
                stops.set()
                worker.stop()

    whole = builder().run().join(WAIT_S)
    state = builder(until_stopped).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert state.reason == "stopped"
    assert len(state.metrics) < 3
    resumed = builder().resume(tmp_path).run().join(WAIT_S)
    assert torch.equal(weights(resumed), weights(whole))


@every_policy
def test_continue_skips_a_batch(policy):
    def loop(worker):
        for batch in worker.batches():
            if 3 in batch[0]:
                continue
            worker.step(worker.model.loss(worker.epoch, batch))

    state = loop_builder(loop, policy=policy).metrics_every(1).run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [NUM_SAMPLES] * 2
    for number, metrics in enumerate(state.metrics):
        trained = marked(state)[number]
        # Under SYNC both ranks discard the batch; the last one of an epoch has a single sample.
        skipped = NUM_SAMPLES - trained
        assert skipped in ((3, 4) if policy == "sync" else (1, 2))
        assert metrics.num_skipped == NUM_SAMPLES - trained


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_that_all_ranks_skip_is_skipped(ranks):
    def loop(worker):
        for batch in worker.batches():
            if worker.global_step < ranks:
                continue
            worker.step(worker.model.loss(worker.epoch, batch))

    state = loop_builder(loop, ranks=ranks).run().join(WAIT_S)
    assert [m.num_skipped for m in state.metrics] == [2 * ranks, 0]
    assert marked(state) == [NUM_SAMPLES - 2 * ranks, NUM_SAMPLES]


def test_a_step_that_another_rank_skips_has_no_values():
    def loop(worker):
        for batch in worker.batches():
            is_skipped = worker.epoch == worker.global_step == 0
            if is_skipped and worker.rank:
                continue
            worker.log(seen=float(is_skipped))
            loss = worker.model.loss(worker.epoch, batch)
            worker.step(loss + 100.0 if is_skipped else loss)

    state = loop_builder(loop).run().join(WAIT_S)
    first = state.metrics[0]
    assert first.num_skipped == 4
    assert first.avg_loss == 0.0
    assert first.scalars["seen"] == 0.0


@pytest.mark.parametrize("end", ["skipped", "no samples"])
def test_a_rank_that_reads_late_sees_that_all_have_skipped_the_batch(end):
    meetings = Meetings(WAIT_S)
    act = Act.SKIP if end == "skipped" else Act.FOLLOW
    meetings.post(0, range(2), 0, 0, Post(act, 0))
    meetings.post(0, range(2), 1, 0, Post(Act.SKIP, 0))
    assert meetings.follow(0, range(2), 0, 0) is None
    meetings.end_batch(0, range(2), 1, 1, Post(Act.NEXT, 0))
    assert meetings.follow(0, range(2), 0, 0) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_global_step_is_the_number_of_batches_before_this_one_in_its_whole_body(ranks):
    seen = [[] for _ in range(ranks)]

    def loop(worker):
        for batch in worker.batches():
            before = worker.global_step
            worker.step(worker.model.loss(worker.epoch, batch))
            seen[worker.rank].append((before, worker.global_step))

    handle = loop_builder(loop, ranks=ranks, dataset=(torch.arange(20),)).run()
    handle.join(WAIT_S)
    assert seen == [[(n, n) for n in range(0, handle.total_batches, ranks)]] * ranks


SHORT = points(11)
"""Three batches of four, so that the second of two ranks has no sample in an epoch's last step."""


@pytest.mark.parametrize("loops", [False, True])
def test_global_step_counts_steps_in_which_a_rank_has_no_samples(loops):
    seen = {0: [], 1: []}

    def train(model, batch):
        seen[current_worker().rank].append(current_worker().global_step)
        return square_loss(model, batch)

    def loop(worker):
        for batch in worker.batches():
            worker.step(train(worker.model, batch))

    if loops:
        run(Trainer.loop(smooth_net, adam_of, loop), SHORT)
    else:
        run(Trainer.builder(smooth_net, adam, train), SHORT)
    assert seen == {0: [0, 2, 3, 5], 1: [0, 3]}


@pytest.mark.parametrize("loops", [False, True])
def test_a_hook_of_the_optimizer_follows_the_weights_on_a_rank_without_samples(loops):
    teachers = {}

    def begin(worker, model):
        teacher = teachers[worker.rank] = copy.deepcopy(model)

        @torch.no_grad()
        def follow(*_):
            for mine, p in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.1)

        worker.optimizer.register_step_post_hook(follow)

    def train(model, batch):
        if current_worker().rank not in teachers:
            begin(current_worker(), model)
        return square_loss(model, batch)

    def loop(worker):
        begin(worker, worker.model)
        square_loop(worker)

    if loops:
        run(Trainer.loop(smooth_net, adam_of, loop), SHORT)
    else:
        run(Trainer.builder(smooth_net, adam, train), SHORT)
    first, second = (teachers[rank].state_dict() for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("way", ["accumulate", "backward", "step"])
def test_every_counts_optimizer_steps_after_a_resume(way, tmp_path):
    def builder(seen, stop_at=None):
        def loop(worker):
            for number, batch in enumerate(worker.batches()):
                worker.backward(worker.model.loss(worker.epoch, batch))
                if way != "backward" or number % 2:
                    worker.step()
                if worker.every(2):
                    seen.append((worker.epoch, worker.global_step))
                if (worker.epoch, number) == (0, stop_at):
                    worker.stop()

        made = loop_builder(loop, ranks=1, dataset=(torch.arange(20),)).seed(0)
        return made.accumulate(2) if way == "accumulate" else made

    whole, parts = [], []
    builder(whole).run().join(WAIT_S)
    builder(parts, stop_at=3).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert len(parts) < len(whole)
    builder(parts).resume(tmp_path).run().join(WAIT_S)
    assert parts == whole


@every_policy
@pytest.mark.parametrize("way", ["break", "return"])
def test_a_rank_that_leaves_an_epoch_gives_its_batches_to_the_others(policy, way):
    left = threading.Event()
    calls = Tally()

    def loop(worker):
        calls[worker.rank] += 1
        for batch in worker.batches():
            if worker.rank == 1 and worker.epoch == 0:
                left.set()
                if way == "return":
                    return
                break
            if worker.rank == 0 and worker.epoch == 0:
                assert left.wait(WAIT_S)
            worker.step(worker.model.loss(worker.epoch, batch))

    if policy == "sync":  # rank 0 has joined a step by then
        left.set()
    state = loop_builder(loop, policy=policy).run().join(WAIT_S)
    assert marked(state) == [NUM_SAMPLES] * 2
    assert [m.num_samples for m in state.metrics] == [NUM_SAMPLES] * 2
    assert calls == {0: 1, 1: 2}


@every_policy
def test_an_epoch_that_all_ranks_leave_ends_short(policy, caplog):
    def loop(worker):
        for batch in worker.batches():
            if worker.epoch == 0:
                break
            worker.step(worker.model.loss(worker.epoch, batch))

    state = loop_builder(loop, policy=policy).run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [0, NUM_SAMPLES]
    assert f"epoch 0 ends short: all workers have left it, and {NUM_SAMPLES}" in caplog.text


def test_ranks_whose_bodies_differ_get_an_error_that_names_both():
    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank == 1:
                worker.step(worker.model.loss(worker.epoch, batch))

    with pytest.raises(ReplicaMismatch, match=r"rank 0 made .*rank 1 made step\(\), step\(\)"):
        loop_builder(loop).run().join(WAIT_S)


def test_optimizers_in_another_order_get_an_error_that_names_both():
    def loop(worker):
        order = ("judge", "maker") if worker.rank else ("maker", "judge")
        for batch in worker.batches():
            for name in order:
                loss = {"judge": judge_loss, "maker": maker_loss}[name]
                worker.step(loss(worker.model, batch), optimizer=name)

    with pytest.raises(ReplicaMismatch, match=r"step.optimizer='maker'.*step.optimizer='judge'"):
        run(Trainer.loop(gan, gan_optimizers, loop))


def plain_backward(worker, loss):
    loss.backward()


def step_of_the_optimizer(worker, loss):
    loss.backward()
    worker.optimizer.step()
    worker.optimizer.zero_grad()


@every_policy
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda worker, loss: worker.backward(loss), "left gradients without"),
        (plain_backward, "while a plain loss"),
        (step_of_the_optimizer, r"step 0: .*call worker\.step\(loss\)"),
    ],
)
def test_gradients_without_a_step_of_the_worker_are_an_error(policy, ranks, train, message):
    def loop(worker):
        for batch in worker.batches():
            train(worker, worker.model.loss(worker.epoch, batch))

    with pytest.raises(WorkerFailed, match=message):
        loop_builder(loop, policy=policy, ranks=ranks).run().join(WAIT_S)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_step_that_the_end_of_an_epoch_cuts_names_a_remedy_that_works(policy):
    """Of three batches one rank gets an odd number."""

    def loop(worker):
        held = False
        for batch in worker.batches():
            loss = worker.model.loss(worker.epoch, batch)
            worker.step(loss) if held else worker.backward(loss)
            held = not held

    data = (torch.arange(6),)
    with pytest.raises(WorkerFailed, match=r"accumulate\(n\) on the builder, and worker"):
        loop_builder(loop, policy=policy, ranks=2, dataset=data).run().join(WAIT_S)
    builder = loop_builder(plain, policy=policy, ranks=2, dataset=data)
    assert marked(builder.accumulate(2).run().join(WAIT_S)) == [6] * 2


def test_an_error_that_the_body_hides_ends_the_run():
    def loop(worker):
        for batch in worker.batches():
            try:
                worker.step(worker.model.loss(worker.epoch, batch) * float("nan"))
            except ArithmeticError:
                continue

    with pytest.raises(WorkerFailed, match="not finite"):
        loop_builder(loop).run().join(WAIT_S)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w, loss: w.step(1.0), TypeError, "pass the loss, a scalar tensor"),
        (lambda w, loss: w.step(loss.detach()), ValueError, "has no gradient"),
        (lambda w, loss: w.step(loss * torch.ones(2)), ValueError, r"shape \(2,\)"),
        (lambda w, loss: w.step(loss, optimizer="d"), ValueError, "one optimizer"),
        (lambda w, loss: w.step(loss, weight=-1), ValueError, "worker.step: weight"),
        (lambda w, loss: w.step(weight=2), ValueError, "without a loss"),
        (lambda w, loss: w.step(), RuntimeError, "without a gradient"),
        (lambda w, loss: w.step(loss, optimizer="x"), ValueError, "as there is one optimizer"),
        (lambda w, loss: w.every(0), ValueError, "at least 1"),
        (lambda w, loss: w.save(), RuntimeError, "checkpoint_dir"),
    ],
)
def test_invalid_calls_name_the_remedy(call, error, message):
    def loop(worker):
        for batch in worker.batches():
            call(worker, worker.model.loss(worker.epoch, batch))

    with pytest.raises(WorkerFailed, match=message) as caught:
        loop_builder(loop, ranks=1).run().join(WAIT_S)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("name", [None, "critic"])
def test_a_step_of_an_unknown_optimizer_names_the_optimizers(name):
    def loop(worker):
        for batch in worker.batches():
            worker.step(judge_loss(worker.model, batch), optimizer=name)

    message = rf"optimizer={name!r}\): pass one of 'judge', 'maker'"
    with pytest.raises(WorkerFailed, match=message):
        run(Trainer.loop(gan, gan_optimizers, loop), ranks=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, loss: (w.step(loss), w.step()), "call worker.step once for each batch"),
        (lambda w, loss: w.backward(loss), r"end each batch with worker.step\(loss\)"),
    ],
)
def test_accumulated_batches_without_one_step_each_are_refused(call, message):
    def loop(worker):
        for batch in worker.batches():
            call(worker, worker.model.loss(worker.epoch, batch))

    with pytest.raises(WorkerFailed, match=message):
        loop_builder(loop, ranks=1).accumulate(2).run().join(WAIT_S)


@every_policy
def test_a_step_with_a_skipped_batch_is_dropped_with_the_losses_of_its_other_batches(policy):
    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            loss = worker.model.loss(worker.epoch, batch)
            if number != 1:  # the second batch of the first step
                worker.step(loss + (100.0 if number == 0 else 1.0) - loss.detach())

    state = loop_builder(loop, policy=policy, ranks=1).accumulate(2).run().join(WAIT_S)
    assert marked(state) == [NUM_SAMPLES - 4, NUM_SAMPLES]
    assert [m.avg_loss for m in state.metrics] == [1.0, 1.0]


def test_an_optimizer_factory_for_parameters_names_the_remedy():
    builder = loop_builder(plain, optim=lambda params: torch.optim.SGD(params, 1.0))
    with pytest.raises(WorkerFailed, match=r"receives the model: pass model.parameters\(\)"):
        builder.run().join(WAIT_S)


def test_an_optimizer_factory_for_the_model_names_the_remedy():
    def optim(model):
        return torch.optim.SGD(model.parameters(), 1.0)

    remedy = "a list of parameters or groups, not the model"
    with pytest.raises(AttributeError, match=remedy):
        Trainer.setup(nn.Linear(2, 1), optim, ["cpu"])
    run = Trainer.builder(nn.Linear(2, 1), optim, lambda model, batch: model(batch[0]).mean())
    run.dataset((torch.zeros(4, 2),)).batch_size(2).num_epochs(1).devices(["cpu"])
    with pytest.raises(WorkerFailed, match=remedy):
        run.run().join(WAIT_S)


def test_calls_outside_the_body_are_refused():
    def loop(worker):
        worker.step(torch.zeros((), requires_grad=True))

    with pytest.raises(WorkerFailed, match="in the body of for batch"):
        loop_builder(loop, ranks=1).run().join(WAIT_S)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cuda_graphs", True),
        ("sync_batchnorm", True),
        ("all_gather", True),
        ("bucket_cap_mb", 1.0),
        ("loss_reduction", "sum"),
        ("val_dataset", (torch.arange(2),)),
        ("param_groups", lambda model: []),
    ],
)
def test_settings_of_train_fn_are_refused(setting, value):
    builder = loop_builder(plain)
    getattr(builder, setting)(value)
    with pytest.raises(ValueError, match=setting):
        builder.run()


def test_accumulate_is_refused_with_several_optimizers():
    with pytest.raises(WorkerFailed, match=r"accumulate\(2\) cannot be combined"):
        run(Trainer.loop(gan, gan_optimizers, gan_loop), accumulate=2)


def test_the_worker_describes_the_run():
    seen = []

    def loop(worker):
        assert isinstance(worker, LoopWorker)
        assert (worker.world_size, worker.device.type) == (2, "cpu")
        assert worker.is_first == (worker.rank == 0)
        assert worker.optimizers == {"": worker.optimizer}
        for batch in worker.batches():
            worker.log(size=len(batch[0]))
            worker.set_lr(0.5)
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.is_first:
                seen.append((worker.epoch, worker.global_step, worker.every(5), worker.every(5)))

    state = loop_builder(loop).run().join(WAIT_S)
    assert [step for _, step, *_ in seen] == [2 * i for i in range(12)]
    assert [number + 1 for number, (*_, is_due, _) in enumerate(seen) if is_due] == [5, 10]
    assert all(first == second for *_, first, second in seen)  # within one batch
    assert state.metrics[0].scalars["size"] == pytest.approx((11 * 2 * 2 + 1) / NUM_SAMPLES)


def test_save_writes_one_checkpoint_for_all_ranks(tmp_path):
    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            worker.step(worker.model.loss(worker.epoch, batch))
            if number == 2:
                worker.save()

    builder = loop_builder(loop).checkpoint_dir(tmp_path, every=10)
    builder.run().join(WAIT_S)
    names = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert len([name for name in names if "within" in name]) == 1
    resumed = loop_builder(plain, epochs=2).resume(tmp_path).run().join(WAIT_S)
    assert marked(resumed) == [NUM_SAMPLES] * 2


@every_policy
def test_steps_count_without_a_data_set(policy):
    def loop(worker):
        for step in worker.steps():
            assert step == worker._owner.local_step
            worker.step(-worker.model.w.sum())

    made = Trainer.loop(
        lambda device: Marks(1, 1).to(device),
        lambda model: torch.optim.SGD(model.parameters(), 1.0),
        loop,
    ).steps_per_epoch(5)
    made = made.num_epochs(2).devices(["cpu"] * 2).policy(policy).collective_timeout(WAIT_S)
    state = made.run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [10, 10]
    if policy == "sync":
        assert state.state_dict()["w"].item() == 10


def test_steps_per_epoch_takes_the_place_of_a_data_set():
    with pytest.raises(ValueError, match="takes the place"):
        loop_builder(plain).steps_per_epoch(2).run()
    with pytest.raises(ValueError, match="whose body makes its own data"):
        Trainer.builder(net, adam, square_loss).steps_per_epoch(2).num_epochs(1).run()


@every_policy
def test_another_iteration_over_the_batches_leaves_the_epoch(policy):
    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            break
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))

    state = loop_builder(loop, policy=policy, ranks=1).run().join(WAIT_S)
    assert marked(state) == [2, NUM_SAMPLES]


@every_policy
def test_an_iterator_that_was_left_yields_no_further_batch(policy):
    seen = []

    def loop(worker):
        first = worker.batches()
        worker.step(worker.model.loss(worker.epoch, next(first)))
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
        seen.append(list(first))

    state = loop_builder(loop, policy=policy, ranks=1).run().join(WAIT_S)
    assert marked(state) == [2, NUM_SAMPLES]
    assert seen == [[]]


def test_parts_of_a_loss_of_one_of_several_optimizers_equal_their_sum():
    def parts(worker):
        for batch in worker.batches():
            loss = judge_loss(worker.model, batch)
            worker.backward(0.25 * loss, optimizer="judge", retain_graph=True)
            worker.backward(0.75 * loss, optimizer="judge")
            worker.step(optimizer="judge")
            worker.step(maker_loss(worker.model, batch), optimizer="maker")

    found, expected = (
        run(Trainer.loop(gan, gan_optimizers, loop), ranks=1) for loop in (parts, gan_loop)
    )
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-8, atol=1e-10)
    for mine, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert mine.scalars == pytest.approx(theirs.scalars)


def test_gradients_of_a_plain_backward_are_not_scaled_for_fp16():
    def loop(worker):
        for batch in worker.batches():
            judge = square_loss(worker.model, batch)
            judge.backward()
            worker.step(square_loss(worker.model, batch))

    with pytest.raises(WorkerFailed, match=r"not scaled, as fp16 requires: call worker\.backward"):
        run(Trainer.loop(smooth_net, adam_of, loop), ranks=1, precision="fp16")


@pytest.mark.parametrize("bad", [0, 1])
def test_a_batch_of_which_a_step_is_dropped_counts_as_skipped_once(bad):
    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            for step in range(3):
                loss = worker.model.loss(worker.epoch, batch)
                is_bad = number == 1 and step >= bad
                worker.step(loss * float("nan") if is_bad else loss - loss.detach() + 1.0)

    b = loop_builder(loop, ranks=1, policy="sync").on_non_finite("skip")
    state = b.run().join(WAIT_S)
    assert [m.num_skipped for m in state.metrics] == [2, 0]
    assert marked(state) == [NUM_SAMPLES - (2 if bad == 0 else 0), NUM_SAMPLES]


def test_a_further_step_on_a_batch_is_dropped_for_its_loss_alone(caplog):
    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            loss = worker.model.loss(worker.epoch, batch)
            worker.step(loss + float("nan") if worker.global_step == 1 else loss)

    state = loop_builder(loop, ranks=1, epochs=1).on_non_finite("skip").run().join(WAIT_S)
    assert state.metrics[0].num_skipped == 2
    assert state.state_dict()["w"].sum() == 2 * 12 - 1  # each step adds 1
    assert "the loss is not finite" in caplog.text


def test_the_error_of_a_further_step_names_its_loss():
    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            worker.step(worker.model.loss(worker.epoch, batch) + float("inf"))

    with pytest.raises(WorkerFailed, match="a loss is not finite"):
        loop_builder(loop).run().join(WAIT_S)


def test_a_step_of_one_optimizer_leaves_the_gradients_of_another_in_progress():
    def loop(worker):
        for batch in worker.batches():
            worker.backward(maker_loss(worker.model, batch), optimizer="maker")
            worker.step(judge_loss(worker.model, batch), optimizer="judge")

    with pytest.raises(WorkerFailed, match=r"worker.backward\(\) has left gradients"):
        run(Trainer.loop(gan, gan_optimizers, loop), ranks=1)


def test_scalars_between_two_steps_count_while_another_optimizer_accumulates():
    def loop(worker):
        for batch in worker.batches():
            worker.backward(maker_loss(worker.model, batch), optimizer="maker")
            worker.step(judge_loss(worker.model, batch), optimizer="judge")
            worker.log(first=3.0)
            worker.step(judge_loss(worker.model, batch), optimizer="judge")
            worker.log(further=2.0)
            worker.step(optimizer="maker")

    scalars = run(Trainer.loop(gan, gan_optimizers, loop), ranks=1).metrics[0].scalars
    assert (scalars["first"], scalars["further"]) == (3.0, 2.0)


def test_the_losses_of_several_optimizers_exclude_a_batch_whose_step_was_dropped():
    def loop(worker):
        for number, batch in enumerate(worker.batches()):
            scale = float("nan") if number == 1 else 1.0
            worker.step(scale * judge_loss(worker.model, batch), optimizer="judge")
            worker.step(maker_loss(worker.model, batch), optimizer="maker")

    b = Trainer.loop(gan, gan_optimizers, loop).on_non_finite("skip")
    state = run(b, ranks=1)
    assert all(torch.isfinite(torch.tensor(m.avg_loss)) for m in state.metrics)
    assert [m.num_skipped > 0 for m in state.metrics] == [True, False]


# -- gradients that the body changes ------------------------------------------------------------


def clipping(backward, *steps):
    def loop(worker):
        for batch in worker.batches():
            backward(worker, square_loss(worker.model, batch))
            for step in steps:
                step(worker)
            worker.step()

    return loop


def by_worker(worker, loss):
    worker.backward(loss)


def by_parts(worker, loss):
    worker.backward(loss * 0.5, retain_graph=True)
    worker.backward(loss * 0.5)


def by_hand(worker, loss):
    loss.backward()


def clip(worker):
    nn.utils.clip_grad_norm_(worker.model.parameters(), 0.1)


every_backward = pytest.mark.parametrize("backward", [by_worker, by_parts, by_hand])


@every_backward
def test_a_body_that_clips_gradients_before_their_reduction_is_warned_of(backward, caplog):
    run(Trainer.loop(smooth_net, adam_of, clipping(backward, clip)), ranks=2)
    (record,) = [each for each in caplog.records if "clip by max_grad_norm" in each.message]
    assert "before worker.step()" in record.message


@every_backward
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.1}, {"precision": "bf16"}])
def test_a_body_that_leaves_gradients_alone_is_not_warned_of(backward, settings, caplog):
    run(Trainer.loop(smooth_net, adam_of, clipping(backward)), ranks=2, **settings)
    assert "before worker.step()" not in caplog.text


@torch.no_grad()
def perturb(worker, sign=1.0):
    for p in worker.model.parameters():
        p.add_(0.1 * sign)


def sharpness_aware(worker, loss):
    loss.backward()
    perturb(worker)
    worker.optimizer.zero_grad()
    by_worker(worker, square_loss(worker.model, points(4)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backward", [by_worker, sharpness_aware])
def test_a_body_that_changes_weights_before_the_reduction_is_warned_of(backward, ranks, caplog):
    steps = [partial(perturb, sign=-1.0)]
    if backward is by_worker:
        steps.insert(0, perturb)
    run(Trainer.loop(smooth_net, adam_of, clipping(backward, *steps)), ranks=ranks)
    found = [each for each in caplog.records if "changes weights between" in each.message]
    assert len(found) == ranks - 1


def test_a_body_that_steps_and_changes_weights_in_turn_is_not_warned_of(caplog):
    def loop(worker):
        for batch in worker.batches():
            perturb(worker)
            for _ in range(2):
                worker.step(square_loss(worker.model, batch))
                perturb(worker)

    run(Trainer.loop(smooth_net, adam_of, loop), ranks=2)
    assert "changes weights" not in caplog.text


@pytest.mark.parametrize(("ranks", "policy"), [(1, "sync"), (2, "cadence")])
def test_local_gradients_may_be_clipped_where_they_are_not_reduced(ranks, policy, caplog):
    loop = clipping(by_worker, clip)
    run(Trainer.loop(smooth_net, adam_of, loop), ranks=ranks, policy=policy)
    assert "before worker.step()" not in caplog.text


def test_a_hook_of_the_optimizer_clips_reduced_gradients():
    data = points(24)

    def loop(worker):
        worker.optimizer.register_step_pre_hook(lambda *_: clip(worker))
        square_loop(worker)

    def body(model):
        optimizer = adam(model.parameters())

        def step(batch):
            optimizer.zero_grad()
            square_loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

        return step

    state = run(Trainer.loop(smooth_net, adam_of, loop), data, ranks=2)
    expected = one_device(body, data=data, batch=8)
    torch.testing.assert_close(weights(state), expected)
