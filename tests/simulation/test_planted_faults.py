"""Faults planted in coordinator and protocol, each of which the simulator must find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator import epochs
from coordinator import messages as m
from coordinator.cadence import RoundSchedule
from coordinator.config import ApplyPolicy
from coordinator.epochs import EpochScheduler
from coordinator.failure_recovery import FailureRecovery
from coordinator.ledger import BatchCuts, BatchLedger
from coordinator.lr_factor import LrFactor
from coordinator.machine import Coordinator
from coordinator.rounds import Round, RoundRunner
from coordinator.run_state import RunState
from coordinator.shares import Shares
from coordinator.steps import StepPlan, StepQueue
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol
from tests.simulation.finding import STUCK, assert_is_found, drawn, simulate_all_quietly
from tests.simulation.harness import Simulation, simulate
from tests.simulation.schedule import stopped_late
from tests.support.pairs import SCALE


def test_a_dropped_resume_is_found(monkeypatch):
    send = Simulation._send_to_worker

    def dropping(self, rank, message):
        if not (isinstance(message, m.Resume) and self.machine.run_state.num_averagings):
            send(self, rank, message)

    monkeypatch.setattr(Simulation, "_send_to_worker", dropping)
    assert_is_found(STUCK)


def test_a_parked_rank_not_woken_by_a_round_is_found(monkeypatch):
    new_round = WorkerProtocol._new_round

    def asleep(self, budget):
        limit = self._budget.limit if self.parked else budget.limit
        parked = self.parked
        new_round(self, m.BatchBudget(limit=limit, report_after=budget.report_after))
        if parked:
            self._budget = m.BatchBudget(limit=0)
            self._update_state()

    monkeypatch.setattr(WorkerProtocol, "_new_round", asleep)
    assert_is_found(STUCK, first=40)


def test_a_parked_rank_counted_as_busy_is_found(monkeypatch):
    """A round that waits for a rank which waits for the round."""
    due = RoundSchedule.is_round_due

    def blind(self, live):
        return not any(r.parked for r in live) and due(self, live)

    monkeypatch.setattr(RoundSchedule, "is_round_due", blind)
    assert_is_found(STUCK, first=63)


def test_a_coordinator_that_accepts_an_old_round_is_found(monkeypatch):
    def forgetful(self, message, state):
        seen = self.snapshots if isinstance(message, m.ParamSnapshot) else self.acks
        return self.state is state and message.rank in self.ranks and message.rank not in seen

    monkeypatch.setattr(Round, "accepts", forgetful)
    assert_is_found("but the average holds", first=61)


def test_a_worker_that_accepts_an_old_round_is_found(monkeypatch):
    updated = WorkerProtocol.on_updated

    def forgetful(self, update):
        if self._mark is None:
            self.on_snapshot_taken(update.round)
        return updated(self, update)

    def drop_and_repeat(self, rank, message):
        send(self, rank, message)
        if isinstance(message, m.Update):
            send(self, rank, message)

    send = Simulation._send_to_worker
    monkeypatch.setattr(Simulation, "_send_to_worker", drop_and_repeat)
    simulate_all_quietly()
    monkeypatch.setattr(WorkerProtocol, "on_updated", forgetful)
    assert_is_found("samples for the batches", first=17)


def test_one_batch_that_is_never_settled_is_found(monkeypatch):
    settle = BatchLedger.settle

    def skipping(self, rank):
        held = self.by_rank[rank].in_round
        held[:] = [(epoch, span) for epoch, span in held if epoch or 3 not in span]
        return settle(self, rank)

    monkeypatch.setattr(BatchLedger, "settle", skipping)
    assert_is_found(STUCK)


def test_a_batch_settled_before_it_is_averaged_is_found(monkeypatch):
    def early(self, rank):
        BatchLedger.freeze(self, rank)
        BatchLedger.settle(self, rank)

    trained = BatchLedger.record_trained

    def trained_and_settled(self, rank, count):
        trained(self, rank, count)
        early(self, rank)

    monkeypatch.setattr(BatchLedger, "record_trained", trained_and_settled)
    assert_is_found("is closed without the effect")


def test_late_rounds_counted_over_a_good_one_are_found(monkeypatch):
    end_round = RoundRunner._end_round

    def grudging(self):
        num_failed = self.round.num_failed
        end_round(self)
        self.round.num_failed = num_failed

    monkeypatch.setattr(RoundRunner, "_end_round", grudging)
    assert_is_found("failures in a row end the run", drawn(lambda s: s.late_chance), first=351)


def test_halts_counted_over_a_step_are_found(monkeypatch):
    """Halts of ``SYNC`` at different steps are not consecutive failures."""
    on_halted = FailureRecovery.on_halted

    def grudging(self, event):
        self._last_step = event.step
        on_halted(self, event)

    def halts_often(schedule):
        lockstep = schedule.config.policy is ApplyPolicy.SYNC and schedule.config.world_size > 1
        return lockstep and schedule.collective_timeout_s and not schedule.deaths

    monkeypatch.setattr(FailureRecovery, "on_halted", grudging)
    assert_is_found("failures in a row end the run", drawn(halts_often), first=22)


def test_a_batch_assigned_twice_is_found(monkeypatch):
    assign = BatchLedger._assign

    def twice(self, epoch, rank, count):
        spans = assign(self, epoch, rank, count)
        if epoch.num_settled == 0 and spans and spans[0].start == 2:
            epoch.open.put_back([range(2, 3)])
        return spans

    monkeypatch.setattr(BatchLedger, "_assign", twice)
    assert_is_found("), which rank")


def test_a_lost_plan_is_found(monkeypatch):
    receive = WorkerProtocol.receive

    def deaf_when_parked(self, message):
        if self.parked and isinstance(message, m.StartEpoch):
            return None
        return receive(self, message)

    monkeypatch.setattr(WorkerProtocol, "receive", deaf_when_parked)
    assert_is_found(STUCK)


def test_a_round_that_begins_before_the_last_was_acknowledged_is_found(monkeypatch):
    def hasty(self):
        return len(self.acks) >= len(self.ranks) - 1

    monkeypatch.setattr(Round, "all_acks", property(hasty))
    assert_is_found("acknowledged round")


@pytest.mark.parametrize(
    ("counts", "found"),
    [(("batches", "samples"), "samples for the batches"), (("weight",), "weight 0 for the")],
)
def test_counts_zeroed_by_an_update_are_found(counts, found, monkeypatch):
    updated = WorkerProtocol.on_updated

    def zeroed(self, update):
        taken = updated(self, update)
        if taken:
            for name in counts:
                setattr(self, name, 0)
        return taken

    monkeypatch.setattr(WorkerProtocol, "on_updated", zeroed)
    assert_is_found(found)


def test_a_worker_that_joins_a_round_while_it_leaves_is_found(monkeypatch):
    receive = WorkerProtocol.receive

    def eager(self, message):
        if self.leaving and isinstance(message, m.SyncNow):
            return message
        return receive(self, message)

    def resend(self, rank, message):
        send(self, rank, message)
        if isinstance(message, m.Shutdown):
            send(self, rank, m.SyncNow(round=99))

    send = Simulation._send_to_worker
    monkeypatch.setattr(Simulation, "_send_to_worker", resend)
    simulate_all_quietly()
    monkeypatch.setattr(WorkerProtocol, "receive", eager)
    assert_is_found(STUCK, first=10)


def test_a_lockstep_rank_that_is_stopped_within_a_plan_is_found(monkeypatch):
    """Its peer waits in the reduction."""
    monkeypatch.setattr(EpochScheduler, "is_between_plans", True)
    assert_is_found(STUCK, drawn(stops))


def stops(schedule):
    c = schedule.config
    lockstep = c.policy is ApplyPolicy.SYNC and c.world_size > 1
    return lockstep and schedule.stop_at_s is not None and not c.save_every


def shares(schedule):
    return schedule.config.balance


def test_a_stale_share_is_found(monkeypatch):
    """One rank trains the sizes of an earlier plan."""
    pieces = StepPlan.pieces
    before = {}

    def stale(self, rank):
        first = before.setdefault(self.ranks, self.whole)
        if rank == self.ranks[-1] and len(first) == self.num_slices:
            self = replace(self, whole=first)
        return pieces(self, rank)

    monkeypatch.setattr(StepPlan, "pieces", stale)
    assert_is_found("trained others", drawn(shares))


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([ApplyPolicy.SYNC], "a piece of 1 sample with batch statistics"),
        ([ApplyPolicy.CADENCE, ApplyPolicy.ASYNC], "a batch of 1 sample with batch statistics"),
    ],
)
def test_batch_statistics_of_one_sample_are_found(policies, message, monkeypatch):
    monkeypatch.setattr(RunState, "require_batch_statistics", lambda self: None)
    assert_is_found(message, drawn(lambda s: s.batch_statistics and s.config.policy in policies))


def averages(schedule):
    c = schedule.config
    return c.policy is not ApplyPolicy.SYNC and c.world_size > 1


def test_a_factor_of_the_learning_rate_sent_to_one_rank_is_found(monkeypatch):
    budget = RunState.initial_budget

    def of_one(self, rank):
        found = budget(self, rank)
        return found if rank == 0 or not self.num_averagings else replace(found, lr_factor=2.0)

    monkeypatch.setattr(RunState, "initial_budget", of_one)
    assert_is_found("has the factor 2.0, others", drawn(averages))


def test_a_factor_of_the_learning_rate_that_ignores_a_death_is_found(monkeypatch):
    update = LrFactor.update

    def of_all(self, batch_counts):
        update(self, [max(1, count) for count in batch_counts])

    monkeypatch.setattr(LrFactor, "update", of_all)
    assert_is_found("a factor of", drawn(lambda s: averages(s) and s.deaths))


def sized(schedule):
    c = schedule.config
    return c.policy is ApplyPolicy.SYNC and c.batch_sizes is not None


def test_the_size_of_one_rank_used_for_another_is_found(monkeypatch):
    pieces = StepPlan.pieces

    def mistaken(self, rank):
        if rank == self.ranks[-1]:
            swapped = tuple((*sizes[:-2], *reversed(sizes[-2:])) for sizes in self.whole)
            self = replace(self, whole=swapped)
        return pieces(self, rank)

    monkeypatch.setattr(StepPlan, "pieces", mistaken)
    assert_is_found("trained others", drawn(sized))


def sized_apart(schedule):
    c = schedule.config
    return c.policy is not ApplyPolicy.SYNC and c.batch_sizes is not None and c.world_size > 1


def test_a_batch_counted_as_one_of_the_ledger_is_found(monkeypatch):
    def one_each(self, rank, count):
        ledger = self.by_rank[rank]
        while count > 0 and ledger.assigned:
            epoch, span = ledger.assigned.popleft()
            ledger.add_trained(epoch, span[:count])
            if span[count:]:
                ledger.assigned.appendleft((epoch, span[count:]))
            count -= len(span[:count])

    monkeypatch.setattr(BatchLedger, "record_trained", one_each)
    assert_is_found("trained, not recorded: [(", drawn(sized_apart))


def test_the_size_of_another_rank_in_a_plan_is_found(monkeypatch):
    of_rank = BatchCuts.of_rank

    def mistaken(self, rank, spans):
        return of_rank(self, (rank + 1) % len(self.sizes), spans)

    monkeypatch.setattr(BatchCuts, "of_rank", mistaken)
    assert_is_found("has batches of", drawn(sized_apart))


def test_a_short_batch_counted_as_a_whole_one_is_found(monkeypatch):
    """The steps of the run then include batches beyond the end of the range."""
    settle = BatchLedger.settle

    def whole(self, rank):
        size = self.cuts.sizes[rank]
        return -(-settle(self, rank) // size) * size

    monkeypatch.setattr(BatchLedger, "settle", whole)
    assert_is_found("batches records", drawn(sized_apart))


def test_a_weight_other_than_that_of_the_share_is_found(monkeypatch):
    init = PlanSteps.__init__

    def of_whole_batches(self, plan, config):
        init(self, plan, config)
        self.steps = [[config.batch_size] * len(sizes) for sizes in self.steps]

    monkeypatch.setattr(PlanSteps, "__init__", of_whole_batches)
    assert_is_found("weighs", drawn(shares))


def test_an_empty_share_is_found(monkeypatch):
    sizes = Shares.sizes

    def greedy(self, total, ranks):
        first, *others = sizes(self, total, ranks)
        return (first + others[0], 0, *others[1:])

    monkeypatch.setattr(Shares, "sizes", greedy)
    assert_is_found("empty piece", drawn(shares))


def small_memory(schedule):
    return schedule.config.balance and bool(schedule.memory)


def test_a_piece_that_stays_too_large_is_found(monkeypatch):
    monkeypatch.setattr(Shares, "record_out_of_memory", lambda self, rank, num_samples: None)
    assert_is_found("failed for no reason: MemoryError", drawn(small_memory))


def test_a_repeated_step_without_its_first_batches_is_found(monkeypatch):
    """Batches of the window that a rank trained before it ran out of memory are lost."""
    num_batches, agree = StepQueue._num_batches, StepQueue.agree

    def more(self, num_global):
        return min(num_batches(self, num_global) + 1, num_batches(self, 10**9))

    def one_more(self, num_steps):
        with monkeypatch.context() as patch:
            patch.setattr(StepQueue, "_num_batches", more)
            return agree(self, num_steps)

    monkeypatch.setattr(StepQueue, "agree", one_more)
    steady = drawn(lambda s: small_memory(s) and not s.deaths and s.stop_at_s is None)
    assert_is_found("recorded, not trained: [(", steady, first=26)


def test_a_stop_while_plans_are_queued_is_survived(monkeypatch):
    monkeypatch.setattr(epochs, "PLAN_STEPS", 2)
    draw = drawn(shares)
    for seed in range(60 if SCALE == 1 else 150):
        simulate(seed, draw=lambda seed: stopped_late(draw(seed)))


def test_a_plan_that_begins_where_the_first_one_did_is_found(monkeypatch):
    plan = EpochScheduler._plan

    def again(self, epoch, span, ranks, first_step):
        plans = self._run.ledger.queue.plans
        return plan(self, epoch, span, ranks, plans[-1].first_step if plans else first_step)

    monkeypatch.setattr(EpochScheduler, "_plan", again)
    assert_is_found("the plan begins at", drawn(shares))


def test_dropped_steps_that_are_counted_again_are_found(monkeypatch):
    """A death can only undo steps after the dropped plans."""
    add = StepQueue.add

    def forgetful(self, plan):
        before = self.settled
        add(self, plan)
        self.settled = before

    monkeypatch.setattr(StepQueue, "add", forgetful)
    assert_is_found("the plan begins at", drawn(shares))


def test_a_message_to_the_dead_is_found(monkeypatch):
    handle = Coordinator.handle

    def chatty(self, event, now):
        commands = handle(self, event, now)
        if isinstance(event, m.Exiting):
            self.run_state.send(event.rank, m.SetGlobalStep(step=0))
        return commands

    monkeypatch.setattr(Coordinator, "handle", chatty)
    assert_is_found("a message to rank")


def test_epochs_that_close_out_of_order_are_found(monkeypatch):
    def first_settled(self):
        settled = next((epoch for epoch in self.epochs if epoch.settled), None)
        if settled is not None:
            self.epochs.remove(settled)
            self.epochs.appendleft(settled)
        return self.epochs[0] if self.epochs else None

    monkeypatch.setattr(BatchLedger, "oldest", property(first_settled))
    assert_is_found("epoch 1 closes after []", first=76)
