"""The coordinator's inbox: one round's answers wake it once, and nothing is held for long."""

from __future__ import annotations

import queue
import threading

import pytest

from coordinator import messages as m
from coordinator import service as inbox_module
from coordinator.messages import Send
from coordinator.service import Inbox

WAIT_S = 60.0


def snapshot(rank, round_id=1):
    return m.ParamSnapshot(
        round=round_id, rank=rank, payload=m.Payload(params=()), num_samples=1, num_batches=1
    )


def ack(rank, round_id=1, *, ok=True):
    return m.SyncAck(round=round_id, rank=rank, ok=ok)


def report(rank):
    return m.BatchReport(rank=rank, epoch=0, tally=m.Tally())


def update(round_id):
    return m.Update(
        round=round_id, average=m.Payload(params=()), num_samples=1, allowance=m.Allowance()
    )


REQUESTS = {
    "request": (m.RequestParams(round=1), snapshot),
    "update": (update(1), ack),
    "sync": (m.SyncNow(round=1, allowance=m.Allowance()), ack),
}


def asked(message, ranks=(0, 1, 2)):
    inbox = Inbox()
    ask(inbox, message, ranks)
    return inbox


def ask(inbox, message, ranks, **how):
    inbox.handled(report(0), [Send(rank=rank, message=message) for rank in ranks], **how)


def drain(inbox):
    taken = []
    while not inbox.empty():
        taken.append(inbox.get_nowait())
    return taken


@pytest.mark.parametrize(("message", "answer"), REQUESTS.values(), ids=REQUESTS)
def test_the_answers_of_a_round_come_together_and_in_order(message, answer):
    inbox = asked(message)
    answers = [answer(rank) for rank in (2, 0, 1)]
    for one in answers[:2]:
        inbox.put(one)
        assert inbox.empty()
    inbox.put(answers[2])
    assert drain(inbox) == answers


def test_whatever_else_comes_takes_along_what_was_held():
    """A report that was put behind a snapshot is not in it."""
    inbox = asked(m.RequestParams(round=1))
    first, told, second = snapshot(0), report(0), snapshot(1)
    inbox.put(first)
    inbox.put(told)
    assert drain(inbox) == [first, told]
    inbox.put(second)
    assert inbox.empty(), "a report ends nothing: the third answer is still to come"
    inbox.put(snapshot(2))
    assert drain(inbox) == [second, snapshot(2)]


FAULTS = {
    "failed": m.Failed(rank=2, epoch=0, step=0, error=ValueError("planted")),
    "ended": m.ThreadEnded(rank=2),
    "exiting": m.Exiting(rank=2),
    "time": m.Tick(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_nothing_is_held_once_a_rank_may_never_answer(fault):
    """Whenever that was put: it may lie in the queue while the ranks are asked."""
    inbox = Inbox()
    inbox.put(fault)
    ask(inbox, m.RequestParams(round=1), (0, 1, 2))
    inbox.put(snapshot(0))
    assert inbox.get_nowait() == fault
    assert inbox.empty()
    inbox.handled(fault, [])
    inbox.put(snapshot(1))
    assert drain(inbox) == [snapshot(0), snapshot(1)]


FROM_OUTSIDE = [m.StopRequested(), m.SaveRequested(ticket=1), m.AbortRequested()]


@pytest.mark.parametrize("event", FROM_OUTSIDE, ids=lambda event: type(event).__name__)
def test_a_signal_handler_may_put_while_its_thread_is_putting(event):
    """It runs between any two instructions, and would wait for itself."""
    inbox = Inbox()
    taken = threading.Event()

    def interrupted():
        with inbox._lock:
            inbox.put(event)
            taken.set()

    threading.Thread(target=interrupted, daemon=True).start()
    assert taken.wait(WAIT_S)
    assert inbox.get(timeout=WAIT_S) == event


def test_a_failed_answer_is_told_at_once():
    inbox = asked(update(1))
    inbox.put(ack(0))
    inbox.put(ack(1, ok=False))
    assert drain(inbox) == [ack(0), ack(1, ok=False)]


def test_an_answer_to_another_round_is_not_held():
    inbox = asked(m.RequestParams(round=2))
    inbox.put(snapshot(0, round_id=1))
    assert drain(inbox) == [snapshot(0, round_id=1)]
    for rank in range(2):
        inbox.put(snapshot(rank, round_id=2))
    assert inbox.empty(), "nor does it count as one of them"


def test_a_request_to_one_rank_is_answered_at_once():
    inbox = asked(m.RequestParams(round=1), ranks=(1,))
    inbox.put(snapshot(1))
    assert not inbox.empty()


def test_a_wait_that_ends_gives_what_is_held():
    inbox = asked(m.RequestParams(round=1))
    inbox.put(snapshot(0))
    inbox.put(snapshot(1))
    assert inbox.get(timeout=1e-3) == snapshot(0)
    assert inbox.get(timeout=WAIT_S) == snapshot(1)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=1e-3)


def test_nothing_is_held_for_longer_than_a_while(monkeypatch):
    """A wait may be as long as the run may stand still."""
    monkeypatch.setattr(inbox_module, "HELD_S", 1e-3)
    inbox = asked(m.RequestParams(round=1))
    inbox.put(snapshot(0))
    assert inbox.get(timeout=10 * WAIT_S) == snapshot(0)
    inbox.put(snapshot(1))
    assert inbox.get_nowait() == snapshot(1), "the others answer too late to wait for"


def patient(*acks, message=REQUESTS["update"][0]):
    """An inbox whose acknowledgements may wait for a report, and these have come."""
    inbox = Inbox()
    ask(inbox, message, (0, 1), acks_wait=True)
    for event in acks:
        inbox.put(event)
    return inbox


def test_acknowledgements_that_bring_nothing_wait_for_the_next_report():
    inbox = patient(ack(1), ack(0))
    assert inbox.empty()
    inbox.put(report(1))
    assert drain(inbox) == [ack(1), ack(0), report(1)]
    inbox.put(report(0))
    assert drain(inbox) == [report(0)]


def test_snapshots_never_wait_for_a_report():
    inbox = patient(snapshot(0), snapshot(1), message=m.RequestParams(round=1))
    assert drain(inbox) == [snapshot(0), snapshot(1)]


def test_acknowledgements_do_not_wait_for_long(monkeypatch):
    """They came while another event was handled: nobody waited for them."""
    monkeypatch.setattr(inbox_module, "HELD_S", 1e-3)
    inbox = patient(ack(0), ack(1))
    assert not inbox._missing
    assert [inbox.get(timeout=WAIT_S) for _ in range(2)] == [ack(0), ack(1)]


def test_the_last_acknowledgement_waits_no_more_once_a_rank_has_told_all():
    """Its chunk may have ended before, so that no report of it follows."""
    told = m.EpochReport(rank=1, epoch=0, tally=m.Tally())
    inbox = patient(ack(0), ack(1))
    inbox.handled(told, [])
    assert drain(inbox) == [ack(0), ack(1)]
    inbox = patient(ack(0))
    inbox.handled(told, [])
    assert inbox.empty(), "another is to come"
    inbox.put(ack(1))
    assert drain(inbox) == [ack(0), ack(1)]


def test_the_last_acknowledgement_does_not_wait_if_the_report_came_before_it():
    """The report may have been that of the count: the next round waits for the end of this one."""
    inbox = patient(ack(0))
    inbox.put(report(0))
    assert drain(inbox) == [ack(0), report(0)]
    inbox.put(ack(1))
    assert drain(inbox) == [ack(1)], "even if nobody has handled the report yet"


@pytest.mark.parametrize("event", [*FROM_OUTSIDE, m.Tick()], ids=lambda e: type(e).__name__)
def test_whatever_happens_acknowledgements_wait_no_more(event):
    """A run that is to stop needs the end of the round."""
    inbox = patient(ack(0), ack(1))
    inbox.handled(event, [])
    assert drain(inbox) == [ack(0), ack(1)]
    inbox = patient(ack(0))
    inbox.handled(event, [])
    inbox.put(ack(1))
    assert drain(inbox) == [ack(0), ack(1)]


def test_a_failed_acknowledgement_is_told_at_once_however_patient():
    inbox = patient(ack(0), ack(1, ok=False))
    assert drain(inbox) == [ack(0), ack(1, ok=False)]


def test_no_answer_is_lost_or_held_when_many_threads_put():
    num_ranks, num_rounds = 8, 200
    inbox = Inbox()
    asking = threading.Barrier(num_ranks + 1)

    def answer(rank):
        for round_id in range(num_rounds):
            asking.wait(WAIT_S)
            if rank % 2:
                inbox.put(report(rank))
            inbox.put(ack(rank, round_id))

    threads = [threading.Thread(target=answer, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for round_id in range(num_rounds):
        ask(inbox, update(round_id), range(num_ranks))
        asking.wait(WAIT_S)
        acks = set()
        while len(acks) < num_ranks:
            event = queue.SimpleQueue.get(inbox, timeout=WAIT_S)  # which releases nothing
            if isinstance(event, m.SyncAck):
                acks.add(event.rank)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
