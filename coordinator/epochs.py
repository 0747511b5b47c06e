"""Dealing epochs out and closing them in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from coordinator import messages as m
from coordinator.messages import PublishEpoch
from coordinator.pool import Epoch, LockstepPlan
from coordinator.state import Core, Rank

PLAN_STEPS = 5
"""Optimizer steps in a plan where shares are measured. While ranks train one the next lies
with them, so that a new speed is followed in the fourth plan at the latest."""


@dataclass(slots=True)
class _Closing:
    """A closed epoch that waits for its evaluation or for the checkpoint function."""

    epoch: Epoch
    epoch_s: float


class Epochs:
    """Sends plans, closes epochs whose every batch is settled, publishes their metrics."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._closing: deque[_Closing] = deque()
        self._last_close = 0.0
        self._values: tuple[float | None, ...] = ()
        self.resumed_s = 0.0

    def begin(self, now: float) -> None:
        """The run starts, or goes on :attr:`resumed_s` after the last epoch closed."""
        self._last_close = now - self.resumed_s

    @property
    def elapsed_s(self) -> float:
        """Time since the last epoch closed."""
        return self._core.now - self._last_close

    def closing(self) -> list[tuple[Epoch, float]]:
        """Epochs that wait to be published, and how long they took."""
        return [(closing.epoch, closing.epoch_s) for closing in self._closing]

    def all_open(self) -> list[Epoch]:
        """Every epoch that is not published."""
        return [*(closing.epoch for closing in self._closing), *self._core.pool.epochs]

    @property
    def all_published(self) -> bool:
        """Whether no closed epoch waits for what the lead does with its average."""
        return not self._closing

    def _find(self, number: int) -> Epoch | None:
        """An epoch that is open or waits to be published."""
        for closing in self._closing:
            if closing.epoch.epoch == number:
                return closing.epoch
        return self._core.pool.find(number)

    def on_evaluated(self, event: m.EvalReport) -> None:
        """The lead has evaluated an epoch."""
        epoch = self._find(event.epoch)
        if epoch is not None:
            epoch.evaluation = dict(event.values)

    def on_saved(self, event: m.CheckpointDone) -> None:
        """The lead's checkpoint function has returned."""
        epoch = self._find(event.version - 1)
        if epoch is not None:
            epoch.saved = True

    def _done_with(self, epoch: Epoch) -> bool:
        """Whether the lead has done everything with the epoch's average."""
        return self.per_epoch(epoch) == (None, None)

    def deal(self, now: float) -> None:
        """Keep two plans with every rank: one in progress, one behind it.

        Everyone gets a first plan before anyone gets a second one. Under a limit on the
        lead all train at one pace, so that chunks follow the limit and not the speed.
        """
        wanting = [rank for rank in self._core.live if rank.num_queued < 2]
        if not wanting:
            return
        lead = self._core.config.max_batch_diff
        max_chunk = None if lead is None else lead + 1
        shares, seconds = self._core.elche.shares, self._core.elche.seconds_per_batch
        for depth in (1, 2):
            for rank in wanting:
                if rank.num_queued >= depth:
                    continue
                chunk = self._core.pool.deal_chunk(
                    rank.rank,
                    now,
                    shares=shares,
                    seconds_per_batch=seconds,
                    max_chunk=max_chunk,
                )
                if chunk is not None:
                    self._tell_older(rank, chunk[0])
                    self._start(rank, m.EpochPlan(epoch=chunk[0], batches=chunk[1]))

    def _tell_older(self, rank: Rank, before: int) -> None:
        """A rank without a batch in an epoch still hears of it, before the next one."""
        for epoch in self._core.pool.epochs:
            if epoch.epoch < before and rank.rank not in epoch.told:
                epoch.told.add(rank.rank)
                self._start(rank, m.EpochPlan(epoch=epoch.epoch))

    def _start(self, rank: Rank, plan: m.EpochPlan) -> None:
        name, closed = self._core.config.scheduler_metric, self._core.outcome.metrics
        if name is not None and closed:
            self._values += tuple(e.value(name) for e in closed[len(self._values) :])
            plan = replace(plan, metrics=self._values)
        rank.num_queued += 1
        self._core.send(rank.rank, m.StartEpoch(plan=plan))

    def deal_lockstep(self, now: float) -> None:
        """Deal the next epoch to all ranks once they are through with the last.

        With shares by measured speed, the next steps of it, once all are through with the
        plan before the last: their sizes are the same on all ranks, because they come with
        the plan, and what the steps took decides those of the plan after the next.
        """
        while self._deal_next(now):
            pass

    def _deal_next(self, now: float) -> bool:
        live = self._core.live
        balances = self._core.shares is not None and len(live) > 1
        most_queued = max((r.num_queued for r in live), default=0)
        if most_queued > int(balances) or not self.all_published:
            # Peers of a lead that evaluates wait here, where no timeout runs.
            return False
        most = PLAN_STEPS * self._core.config.accumulate * len(live) if balances else None
        dealt = self._core.pool.deal_epoch(
            now, [r.rank for r in live], self._core.elche.shares, most
        )
        if dealt is None:
            return False
        number, parts = dealt
        pieces = self._cut_pieces(parts) if balances else {}
        more = balances and self._core.pool.has_more(self._core.pool.epochs[0])
        shares = [0] * len(self._core.ranks)
        for rank, spans in parts.items():
            shares[rank] = sum(len(span) for span in spans)
        epoch = self._core.pool.find(number)
        steps = -(-max(shares) // self._core.config.accumulate)
        if epoch is not None and not self._core.alone:
            epoch.num_averagings += steps
            self._core.num_averagings += steps
        plan = self._core.plan
        first_step = self._core.global_step
        if most_queued and plan is not None:
            assert plan.epoch == number, "an epoch begins when the one before is trained"
            first_step = plan.first_step + plan.num_batches
            plan.extend(parts, pieces, steps)
            plan.forget_told(self._core.config.accumulate)
        else:
            self._core.plan = LockstepPlan(
                epoch=number,
                parts=parts,
                first_window=self._core.num_windows,
                num_windows=steps,
                first_step=first_step,
                pieces=pieces,
            )
        self._core.num_windows += steps
        for info in live:
            own = m.EpochPlan(
                epoch=number,
                batches=parts[info.rank],
                shares=tuple(shares),
                first_step=first_step,
                pieces=tuple(pieces.get(info.rank, ())),
                more=more,
            )
            self._start(info, own)
        return True

    def measure(self, rank: int) -> None:
        """A rank is through with a plan: what it took says how large its pieces shall be."""
        shares, plan = self._core.shares, self._core.plan
        if shares is None or plan is None:
            return
        times = plan.take_times(rank)
        if times is not None:
            shares.observe(rank, *times)

    def _cut_pieces(self, parts: dict[int, tuple[range, ...]]) -> dict[int, list[tuple[int, int]]]:
        """The pieces of each rank, of sizes that follow what was measured."""
        shares = self._core.shares
        assert shares is not None, "pieces are cut where shares are measured"
        ranks = list(parts)
        sizes = shares.sizes(self._core.global_batch(len(ranks)), ranks)
        return self._core.pool.cut_pieces(parts, sizes, shares.short)

    def has_work(self, epoch: int) -> bool:
        """Whether the average that closes the epoch is evaluated or handed over."""
        every = self._core.config.checkpoint_every
        return self._core.config.evaluate or (every is not None and (epoch + 1) % every == 0)

    def per_epoch(self, epoch: Epoch) -> tuple[int | None, int | None]:
        """What the lead has yet to do with the average that closes the epoch."""
        every = self._core.config.checkpoint_every
        version = epoch.epoch + 1
        due = every is not None and version % every == 0 and not epoch.saved
        evaluate = self._core.config.evaluate and epoch.evaluation is None
        return epoch.epoch if evaluate else None, version if due else None

    def orphan(self) -> Epoch | None:
        """A closed epoch whose lead died before it had evaluated or handed it over."""
        for closing in self._closing:
            if not self._done_with(closing.epoch) and not self._core.is_live(closing.epoch.lead):
                return closing.epoch
        return None

    def ask_lead(self, epoch: Epoch) -> None:
        """Have the first live rank evaluate and hand over its weights as they are."""
        evaluate, checkpoint = self.per_epoch(epoch)
        lead = self._core.live[0].rank
        epoch.lead = lead
        if evaluate is not None:
            self._core.send(lead, m.Evaluate(epoch=evaluate))
        if checkpoint is not None:
            self._core.send(lead, m.Checkpoint(version=checkpoint))

    def close(self, now: float) -> None:
        """Close epochs whose every batch is settled, in order.

        Those that one averaging closes at once share the time since the last one closed.
        """
        num_before = len(self._closing)
        self._close_settled()
        closed = list(self._closing)[num_before:]
        for closing in closed:
            closing.epoch_s = (now - self._last_close) / len(closed)
        if closed:
            self._last_close = now

    def _close_settled(self) -> None:
        while (epoch := self._core.pool.oldest) is not None and epoch.settled:
            work = self.has_work(epoch.epoch)
            if self._core.lockstep or self._core.alone:
                if self._core.lockstep and any(r.num_queued for r in self._core.live):
                    return
                if work and not epoch.worked:
                    self.ask_lead(epoch)
            elif work and not epoch.worked:
                return
            for rank in self._core.live:
                self._tell_older(rank, epoch.epoch + 1)
            self._core.pool.pop_oldest()
            self._closing.append(_Closing(epoch=epoch, epoch_s=0.0))

    def publish(self, *, anyway: bool = False) -> None:
        """Publish closed epochs, in order, once the lead is done with them.

        Args:
            anyway: Nobody is left who could do anything with them.
        """
        while self._closing and (anyway or self._done_with(self._closing[0].epoch)):
            head = self._closing.popleft()
            if self._core.steps is not None:
                self._core.publish_steps(self._core.steps.flush())
            metrics = head.epoch.tally.close(
                epoch=head.epoch.epoch,
                epoch_s=head.epoch_s,
                num_samples=head.epoch.num_samples,
                num_retrained=head.epoch.num_retrained,
                num_averagings=head.epoch.num_averagings,
                devices=self._core.config.devices,
                divergence=head.epoch.divergence,
                param_norm=head.epoch.norm,
                extra_scalars={f"eval/{k}": v for k, v in (head.epoch.evaluation or {}).items()},
            )
            self._core.outcome.metrics.append(metrics)
            # Users may write to what they are given, while a checkpoint reads what is kept.
            given = replace(metrics, scalars=metrics.scalars.copy())
            self._core.out.append(PublishEpoch(metrics=given))
