"""Steps of a body over several batches that are in progress at the end of a plan."""

import threading

import pytest
import torch

from runtime import WorkerFailed
from tests.support.looping import Marks, loop_builder, marked
from tests.support.running import WAIT_S

SIZE = 24  # samples: twelve batches of two
MESSAGE = r"the epoch has ended, and worker\.backward\(\) has left gradients"


def over(num, ranks):
    """A loop whose steps are over ``num`` batches of each rank."""

    def loop(worker):
        for batch in worker.batches():
            loss = worker.model.loss(worker.epoch, batch)
            is_last = worker.global_step // ranks % num == num - 1
            worker.step(loss) if is_last else worker.backward(loss)

    return loop


def builder(loop, ranks, policy, **settings):
    made = loop_builder(
        loop,
        model=lambda device: Marks(2, SIZE).to(device),
        dataset=(torch.arange(SIZE),),
        ranks=ranks,
        policy=policy,
    ).seed(0)
    for name, value in settings.items():
        getattr(made, name)(value)
    return made


alone_or_together = pytest.mark.parametrize(
    ("ranks", "policy"), [(1, "sync"), (2, "sync"), (1, "cadence"), (1, "async")]
)


@alone_or_together
def test_an_evaluation_within_an_epoch_waits_for_the_end_of_the_step(ranks, policy):
    """A plan ends after three batches of each rank, within a step over two."""
    seen = []

    def evaluate(model, epoch):
        assert all(p.grad is None for p in model.parameters())
        seen.append((epoch, int((model.w[epoch] > 0).sum())))
        return {}

    made = builder(over(2, ranks), ranks, policy).eval_fn(evaluate).eval_every(3 * ranks)
    state = made.run().join(WAIT_S)
    last = 12 // ranks
    ends = [number + number % 2 for number in range(3, last, 3)]  # of steps over two batches
    assert [num for epoch, num in seen if epoch == 0] == [2 * ranks * n for n in (*ends, last)]
    assert marked(state) == [SIZE] * 2


@alone_or_together
def test_metrics_count_a_step_once_wherever_its_plan_ends(ranks, policy):
    def metrics(**settings):
        made = builder(over(2, ranks), ranks, policy, **settings)
        found = made.eval_fn(lambda model, epoch: {}).run().join(WAIT_S).metrics
        return [(m.avg_loss, m.num_samples, [r.num_batches for r in m.per_rank]) for m in found]

    assert metrics(eval_every=3 * ranks) == metrics()


@alone_or_together
def test_a_checkpoint_within_a_step_is_taken_after_it(ranks, policy, tmp_path):
    """Requested in the last batch of a plan, and resumed: each sample has one effect."""

    def loop(worker):
        for batch in worker.batches():
            loss, number = worker.model.loss(worker.epoch, batch), worker.global_step // ranks
            if worker.epoch == 0 and number == 2:
                worker.save()
            worker.step(loss) if number % 2 else worker.backward(loss)

    made = builder(loop, ranks, policy).eval_fn(lambda model, epoch: {}).eval_every(3 * ranks)
    made.checkpoint_dir(tmp_path, every=10).run().join(WAIT_S)
    (within,) = [path for path in tmp_path.iterdir() if "within" in path.name]
    assert within.name.startswith(f"step-{4 * ranks:0>10}"[:5])
    resumed = builder(over(2, ranks), ranks, policy).resume(within).run().join(WAIT_S)
    assert marked(resumed) == [SIZE] * 2
    assert resumed.state_dict()["w"].max() == resumed.state_dict()["w"].min()


@alone_or_together
def test_a_stop_within_a_step_gives_its_batches_back(ranks, policy, tmp_path):
    """The body stops in the last batch of a plan, from where no other one follows."""

    def loop(worker):
        for batch in worker.batches():
            loss, number = worker.model.loss(worker.epoch, batch), worker.global_step // ranks
            if worker.epoch == 0 and number == 2:
                worker.stop()
            worker.step(loss) if number % 2 else worker.backward(loss)

    made = builder(loop, ranks, policy).eval_fn(lambda model, epoch: {}).eval_every(3 * ranks)
    state = made.checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert state.stopped
    assert marked(state)[0] in (4 * ranks, 8 * ranks)  # of whole steps
    resumed = builder(over(2, ranks), ranks, policy).resume(tmp_path).run().join(WAIT_S)
    assert marked(resumed) == [SIZE] * 2


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_no_batch_of_the_epoch_ends_is_an_error(policy, ranks):
    def loop(worker):
        for batch in worker.batches():
            worker.backward(worker.model.loss(worker.epoch, batch))

    with pytest.raises(WorkerFailed, match=MESSAGE) as caught:
        builder(loop, ranks, policy).run().join(WAIT_S)
    assert caught.value.epoch == 0


@pytest.mark.parametrize("asked", ["eval_fn", "checkpoint_dir", "val_dataset"])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_left_after_the_last_step_of_an_epoch_are_an_error(
    policy, ranks, asked, tmp_path
):
    """All samples are trained, so that what follows the epoch is due, and waits for the step."""

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            worker.backward(worker.model.loss(worker.epoch, batch))

    made = builder(loop, ranks, policy).stall_timeout(10.0)
    if asked == "eval_fn":
        made.eval_fn(lambda model, epoch: {})
    elif asked == "val_dataset":
        made.val_dataset((torch.arange(4),), fn=lambda model, batch: {"size": len(batch[0])})
    else:
        made.checkpoint_dir(tmp_path)
    with pytest.raises(WorkerFailed, match=MESSAGE) as caught:
        made.run().join(WAIT_S)
    assert caught.value.epoch == 0


def test_a_plan_ends_within_a_step_on_all_ranks_if_on_one():
    """Rank 1 alone begins another step on the last batch of the first plan."""
    seen = []

    def loop(worker):
        for batch in worker.batches():
            worker.step(worker.model.loss(worker.epoch, batch))
            if worker.rank == 1 and worker.global_step == 4:
                worker.backward(worker.model.loss(worker.epoch, batch))

    def evaluate(model, epoch):
        seen.append(int((model.w[epoch] > 0).sum()))
        return {}

    made = builder(loop, 2, "sync").eval_fn(evaluate).eval_every(6)
    state = made.stall_timeout(WAIT_S / 2).run().join(WAIT_S)
    assert seen == [16, SIZE, 12, SIZE]  # samples before each evaluation
    assert marked(state) == [SIZE] * 2


def test_a_death_within_a_step_gives_its_batches_to_the_others():
    """Rank 1 dies in the second batch of a step; rank 0 has ended its plan within the step."""
    died = threading.Event()

    def loop(worker):
        for batch in worker.batches():
            loss, number = worker.model.loss(worker.epoch, batch), worker.global_step // 2
            if number == 3 and not died.is_set():
                if worker.rank == 1:
                    died.set()
                    raise ValueError("planted")
                assert died.wait(WAIT_S)
            worker.step(loss) if number % 2 else worker.backward(loss)

    made = builder(loop, 2, "sync").eval_fn(lambda model, epoch: {}).eval_every(6)
    state = made.on_worker_failure("continue").run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [1]
    assert marked(state) == [SIZE] * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_without_a_backward_pass_within_a_step_is_no_skip_on_any_rank(ranks):
    """The first batch of each epoch's step has no sample for the last rank."""
    data = (torch.arange(4 * ranks - 2),)

    def loop(worker):
        for batch in worker.batches():
            first = worker.global_step % (2 * ranks - 1) < ranks
            loss = worker.model.loss(worker.epoch, batch)
            worker.backward(loss) if first else worker.step(loss)

    state = loop_builder(loop, ranks=ranks, dataset=data).run().join(WAIT_S)
    assert marked(state) == [4 * ranks - 2] * 2
