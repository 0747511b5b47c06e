"""The batch ledger: every batch is dealt once, settled once, and reopened after a death."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger import CHUNK_S, BatchLedger, RankLedger
from tests.support.pairs import few_examples


def ledger_of(num_batches=10, world_size=2, *, num_epochs=1, **settings):
    return BatchLedger(
        num_samples=num_batches, batch_size=1, num_epochs=num_epochs, world_size=world_size,
        **settings,
    )  # fmt: skip


def assign(ledger, rank, seconds=None, shares=None):
    world = len(ledger.by_rank)
    return ledger.assign_chunk(
        rank, shares=shares or (1 / world,) * world, seconds_per_batch=seconds
    )


def size(chunk):
    return 0 if chunk is None else sum(len(span) for span in chunk[1])


def train_all(ledger, rank):
    ledger.record_trained(rank, ledger.by_rank[rank].num_assigned)


def settle_all(ledger):
    for rank in range(len(ledger.by_rank)):
        train_all(ledger, rank)
        ledger.freeze(rank)
        ledger.settle(rank)


# -- assigning ----------------------------------------------------------------------------


def test_before_the_first_measurement_chunks_are_single_batches():
    assert assign(ledger_of(100), 0) == (0, (range(1),))


def test_a_chunk_takes_about_a_fifth_of_a_second():
    ledger = ledger_of(10_000)
    for rank, seconds in ((0, 0.002), (1, 0.010)):
        count = size(assign(ledger, rank, (0.002, 0.010), (5 / 6, 1 / 6)))
        assert count * seconds == pytest.approx(CHUNK_S)


def test_chunks_shrink_towards_the_end_of_an_epoch():
    ledger = ledger_of(64)
    sizes = [size(assign(ledger, i % 2, (1e-2, 1e-2), (0.5, 0.5))) for i in range(20)]
    sizes = [n for n in sizes if n]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:4] == [16, 12, 9, 6]
    assert sizes[-1] == 1


def test_a_slow_rank_receives_no_batch_that_the_others_would_finish_first():
    ledger = ledger_of(20, num_epochs=2)
    ledger.open_epoch((0.9, 0.1)).open.take(17)
    assert assign(ledger, 1, (0.01, 0.1), (0.9, 0.1))[0] == 1
    assert assign(ledger, 0, (0.01, 0.1), (0.9, 0.1))[0] == 0


def test_a_chunk_is_a_multiple_of_the_window_except_at_the_end():
    ledger = ledger_of(7, granularity=3)
    sizes = [size(assign(ledger, rank)) for rank in (0, 1, 0)]
    assert sizes == [3, 3, 1]


def test_the_next_epoch_opens_before_the_oldest_closes_but_not_the_one_after():
    ledger = ledger_of(1, num_epochs=3)
    assert [assign(ledger, 0)[0], assign(ledger, 1)[0]] == [0, 1]
    assert assign(ledger, 0) is None
    settle_all(ledger)
    assert ledger.epochs.popleft().epoch == 0
    assert assign(ledger, 0)[0] == 2


def test_max_batches_is_spent_on_the_oldest_epoch_first():
    """Quotas of the next epoch must not take batches that an open one still needs."""
    ledger = ledger_of(4, num_epochs=3, ratios=(1.0, 1.0), max_batches=5)
    own = [assign(ledger, 0) for _ in range(4)]
    assert own == [(0, (range(1),)), (0, (range(1, 2),)), (1, (range(1),)), None]
    assert [assign(ledger, 1) for _ in range(3)] == [(0, (range(2, 3),)), (0, (range(3, 4),)), None]
    assert ledger.exhausted
    settle_all(ledger)
    assert ledger.epochs.popleft().settled


# -- lockstep --------------------------------------------------------------------------------


def test_global_batches_are_taken_in_order_up_to_the_end_of_the_run():
    ledger = ledger_of(8, max_batches=7)
    taken = [ledger.take_global((0, 1), (0.5, 0.5), 5) for _ in range(3)]
    assert taken == [(0, range(5)), (0, range(5, 7)), None]


# -- tracking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notes", "kept"),
    [
        ([(0, range(3)), (0, range(3, 7))], [(0, range(7))]),
        ([(0, range(3)), (1, range(3, 7))], None),
        ([(0, range(3)), (0, range(4, 7))], None),
        ([(0, range(4, 7)), (0, range(3))], None),
    ],
    ids=["in a row", "epochs", "gap", "backwards"],
)
def test_only_adjacent_batches_of_one_epoch_are_merged(notes, kept):
    ledger = RankLedger()
    for epoch, span in notes:
        ledger.add_trained(epoch, span)
    assert ledger.trained == (notes if kept is None else kept)


@few_examples
@given(st.data())
def test_every_batch_is_assigned_and_settled_exactly_once(data):
    world = data.draw(st.integers(1, 4), "world_size")
    num_samples, batch_size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    num_epochs = data.draw(st.integers(1, 3))
    ledger = BatchLedger(
        num_samples=num_samples,
        batch_size=batch_size,
        num_epochs=num_epochs,
        world_size=world,
        granularity=data.draw(st.integers(1, 3), "accumulate"),
    )
    seconds = tuple(data.draw(st.sampled_from((1e-4, 1e-2, 0.05))) for _ in range(world))
    shares = tuple((1 / s) / sum(1 / t for t in seconds) for s in seconds)
    closed = []
    for _ in range(1000):
        if len(closed) == num_epochs:
            break
        rank = data.draw(st.integers(0, world - 1))
        assign(ledger, rank, data.draw(st.sampled_from((None, seconds))), shares)
        held = ledger.by_rank[rank].num_assigned
        ledger.record_trained(rank, data.draw(st.integers(0, held)))
        if data.draw(st.booleans()):
            for r in range(world):
                ledger.freeze(r)
                ledger.settle(r)
        if data.draw(st.integers(0, 9)) == 0:
            while any(assign(ledger, r, None, shares) for r in range(world)):
                settle_all(ledger)
            settle_all(ledger)
        while ledger.oldest is not None and ledger.oldest.settled:
            epoch = ledger.epochs.popleft()
            assert epoch.num_samples == num_samples
            closed.append(epoch.epoch)
    assert closed == list(range(len(closed)))


def test_ranks_under_a_lead_limit_always_receive_short_chunks():
    ledger = ledger_of(8)
    seconds, shares = (1e-3, 1.0), (0.999, 0.001)
    sizes = [
        size(ledger.assign_chunk(i % 2, shares=shares, seconds_per_batch=seconds, max_chunk=2))
        for i in range(4)
    ]
    assert sizes == [2, 2, 2, 2]


# -- grants with fixed ratios -------------------------------------------------------------


# -- minimum batches ----------------------------------------------------------------------


def test_granted_and_revoked_batches_keep_the_ratios():
    ledger = ledger_of(40, granted=True, ratios=(0.75, 0.25))
    shares = (0.5, 0.5)
    ledger.grant(0, [range(8)], shares)
    assert ledger.epochs[0].quotas == [6, 2]
    ledger.grant(0, [range(8, 20)], shares)
    assert ledger.epochs[0].quotas == [15, 5]
    ledger.revoke_open(12, shares)
    assert ledger.epochs[0].granted.spans == (range(12),)
    assert ledger.epochs[0].quotas == [9, 3]
    while chunk := assign(ledger, 0):
        assert size(chunk) > 0
    assert ledger.by_rank[0].num_assigned == 9


@pytest.mark.parametrize("committed", [False, True])
def test_batches_that_were_revoked_for_a_failed_round_are_granted_again(committed):
    """Otherwise no machine trains them; those of a committed round may be another machine's."""
    ledger, shares = ledger_of(40, granted=True), (0.5, 0.5)
    ledger.grant(0, [range(8)], shares)
    size(assign(ledger, 0))
    ledger.revoke_open(2, shares)
    kept = ledger.epochs[0].granted.spans
    assert len(ledger.epochs[0].open) == 2
    ledger.end_machine_round(shares, committed=committed)
    assert ledger.epochs[0].granted.spans == (kept if committed else (range(8),))
    ledger.end_machine_round(shares, committed=False)
    assert ledger.epochs[0].granted.spans == (kept if committed else (range(8),))


def test_batches_that_are_granted_again_are_not_trained_again():
    """A grant after a round has those that the machine kept."""
    ledger, shares = ledger_of(40, granted=True), (0.5, 0.5)
    ledger.grant(0, [range(8)], shares)
    taken = size(assign(ledger, 0))
    epoch = ledger.grant(0, [range(12)], shares)
    assert len(epoch.open) == 12 - taken
    assert epoch.count_elsewhere([range(4), range(12, 20)]) == 8
    assert epoch.count_elsewhere([range(22)]) == 2
    assert epoch.num_elsewhere == 10


@few_examples
@given(st.data())
def test_no_rank_of_unequal_batches_is_left_with_a_single_sample(data):
    """Batch statistics of one sample are not defined, and who trains the rest is timing."""
    unit = data.draw(st.integers(1, 3), "samples of a batch of the ledger")
    sizes = data.draw(st.lists(st.integers(3, 6), min_size=2, max_size=3), "sizes")
    world, num_samples = len(sizes), data.draw(st.integers(2, 60), "samples")
    ledger = BatchLedger(
        num_samples=num_samples, batch_size=unit, num_epochs=1, world_size=world,
        granularity=data.draw(st.integers(1, 2), "accumulate"), sizes=sizes,
    )  # fmt: skip
    ledger.cuts.min_batch = 2
    alive, num_settled = list(range(world)), 0

    def shares():
        return [1 / len(alive) if rank in alive else 0.0 for rank in range(world)]

    def train(rank):
        own = ledger.by_rank[rank]
        ledger.record_trained(rank, sum(-(-len(span) // sizes[rank]) for _, span in own.assigned))
        assert own.num_assigned == 0

    while True:
        rank = data.draw(st.sampled_from(alive), "rank")
        if len(alive) > 1 and data.draw(st.integers(0, 9), "dies") == 9:
            alive.remove(rank)
            ledger.reopen_rank(rank, shares())
            continue
        seconds = data.draw(st.sampled_from([None, 1e-3, CHUNK_S / 4]), "seconds")
        seconds = None if seconds is None else (seconds,) * world
        chunk = assign(ledger, rank, seconds, shares())
        if chunk is None:
            break
        for start, stop in ledger.cuts.of_rank(rank, chunk[1])[1]:
            assert 2 <= stop - start <= sizes[rank] * unit
        if data.draw(st.booleans(), "trains"):
            train(rank)
    for rank in alive:
        train(rank)
        ledger.freeze(rank)
        num_settled += ledger.settle(rank)
    assert num_settled + len(ledger.epochs[0].open) == ledger.batches_per_epoch
