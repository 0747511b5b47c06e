"""Invariants of a simulated run, checked after every event."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from coordinator.messages import Average, Command, PublishEpoch, PublishSteps, Send
from coordinator.metrics import EpochMetrics, StepMetrics
from coordinator.run_errors import AveragingFailed, RunStalled
from coordinator.run_state import RankState
from coordinator.splitting import batch_bounds, seconds, split_by_cost
from coordinator.steps import StepPlan
from runtime.core.errors import CollectiveTimeout
from tests.simulation.effects import Batch, Traced, Violation, squares_of
from tests.simulation.replicas import expect_payload
from tests.simulation.saves import BEFORE, SaveChecks, consumed_by

if TYPE_CHECKING:
    from tests.simulation.harness import Simulation


class Checks:
    """Checks one run; every method raises :class:`Violation`.

    Attributes:
        longest_answer_s: Longest time between a request of a round and its answer.
    """

    def __init__(self, sim: Simulation) -> None:
        c = sim.schedule.config
        self._sim = sim
        self._config = c
        self._per_epoch = c.batches_per_epoch
        self._trained: dict[Batch, int] = {}
        self._num_trained: Counter[int] = Counter()
        self._pieces: defaultdict[int, dict[Batch, tuple[int, int]]] = defaultdict(dict)
        self._begun: defaultdict[int, list[int]] = defaultdict(list)
        self._left: dict[int, set[int]] = {}  # by epoch
        self._asked = 0
        self._unanswered: set[int] = set()
        self._asked_at: dict[int, float] = {}
        self.longest_answer_s = 0.0
        self._num_failed_rounds = 0
        self._num_averagings = 0
        self._failed_before = 0
        self._dismissed: set[int] = set()
        self._sizes: dict[int, int] = {}  # of the plan being dealt
        self._dealt: dict[int, tuple[tuple[int, int], ...]] = {}  # its pieces
        self._dealt_at: tuple[int, int, int] | None = None
        self._needed = (0, 0)  # no earlier batch may be dealt again
        self._closed: list[int] = []
        self._done_per_epoch: list[tuple[str, int]] = []
        self.saves = SaveChecks(sim)
        self._is_cut_anyhow = c.max_steps is not None
        self._evaluated_at: int | None = None
        self._validated: dict[int, frozenset[Batch]] = {}
        self._validated_batches: set[tuple[int, int]] = set()
        self._validated_at: int | None = None
        self._partial: list[EpochMetrics] = []
        self._round_ranks: Counter[int] = Counter()
        self._lr_factors: dict[int, float] = {}
        self._resumed: frozenset[Batch] = frozenset()
        self._omitted_before: frozenset[Batch] = frozenset()
        if sim.origin is not None:
            self._resumed = sim.origin.held
            self._omitted_before = consumed_by(sim.origin.run, self._per_epoch) - self._resumed
            self._trained = dict.fromkeys(self._resumed, BEFORE)
            if c.batch_sizes is None:
                self._evaluated_at = self._validated_at = len(self._resumed)
            self._closed = list(range(sim.origin.run.num_closed))
            consumed = [span for e in sim.origin.run.epochs for span in e.consumed]
            num = c.accumulate * sim.per_global
            self._is_cut_anyhow |= any(span.start or span.stop % num for span in consumed)

    # -- the coordinator ---------------------------------------------------------------

    def on_command(self, command: Command) -> None:
        """Check the commands of the coordinator."""
        match command:
            case Send():
                self._on_send(command.rank, command.message)
            case Average():
                if self._sim.average_pending and not self._sim.dead:  # otherwise that round is void
                    raise Violation("two averages are computed at a time")
                squares = tuple(map(squares_of, command.payloads)) if command.round >= 0 else ()
                if command.squares != squares:
                    raise Violation(f"norms of other snapshots: {command.squares}, not {squares}")
            case PublishEpoch():
                self._on_publish(command)
            case PublishSteps(metrics=metrics) if metrics.num_batches == 0:
                if "val/at" in metrics.scalars:
                    self._on_validated_within(metrics)

    def _on_send(self, rank: int, message: m.ToWorker) -> None:
        if isinstance(message, m.Shutdown):
            self._dismissed.add(rank)
            return
        state = self._sim.machine.run_state.ranks[rank].state
        if state in (RankState.GONE, RankState.DEAD):
            raise Violation(f"a message to rank {rank}, which is {state.value}: {message}")
        if rank in self._dismissed:
            raise Violation(f"a message to rank {rank} after its Shutdown: {message}")
        if isinstance(message, m.StartEpoch):
            spans = message.plan.batches
            if (steps := message.plan.steps) is not None:
                self._on_pieces(rank, steps)
                spans = (steps.span,)
            first = min((b for span in spans for b in span), default=None)
            if first is not None and (message.plan.epoch, first) < self._needed:
                raise Violation(f"{message} after all before {self._needed} was released")
        if isinstance(message, m.SyncNow | m.RequestParams | m.Update):
            self._asked_at[rank] = self._sim.now
        if isinstance(message, m.SyncNow | m.RequestParams):
            self._round_ranks[message.round] += 1
            self._on_request(rank, message.round)
        elif (
            isinstance(message, m.SetGlobalStep)
            and self._sim.num_live
            and message.step != self._config.count_steps(len(self._sim.averaged()))
        ):
            raise Violation(f"{message}, but the average holds {len(self._sim.averaged())}")

    def _on_pieces(self, rank: int, plan: StepPlan) -> None:
        """Check the pieces, and the sizes of the first batch, once all ranks have the plan."""
        live = [r.rank for r in self._sim.machine.run_state.live]
        now = self._sim.machine.run_state.generation, plan.epoch, plan.first_step
        if now != self._dealt_at:  # ranks that have left the epoch have no pieces
            self._dealt_at, self._sizes, self._dealt = now, {}, {}
        pieces = tuple(piece for _, piece in plan.pieces(rank))
        if not pieces:
            return
        start, stop = pieces[0]
        self._sizes[rank] = stop - start
        self._dealt[rank] = pieces
        is_split = self._config.policy is ApplyPolicy.SYNC and not self._sim.schedule.memory
        if rank == live[-1] and is_split and self._least > 1:
            for each in zip(*self._dealt.values(), strict=False):
                sizes = [stop - start for start, stop in each]
                if 1 in sizes and sum(sizes) > 1:
                    raise Violation(f"a piece of 1 sample with batch statistics: {sizes}")
        whole = sum(self._sizes.values()) == self._slice_samples(live)
        if rank == live[-1] and whole and self._config.balance:
            for idle in [r for r, n in self._sizes.items() if n == 0]:
                self._must_rest(idle)

    @property
    def _least(self) -> int:
        """Minimum samples of a rank, if there are as many: two for batch statistics."""
        c, world = self._config, self._config.world_size
        own = min(size for size in c.batch_sizes or (c.batch_size,) if size)
        total = c.global_batch_size if c.policy is ApplyPolicy.SYNC else None
        if total is not None and c.batch_sizes is None:
            own = -(-total // c.num_micro_batches // world)
        return 2 if self._sim.schedule.batch_statistics and own > 1 else 1

    def _slice_samples(self, live: Sequence[int]) -> int | None:
        """Samples in the first slice of a whole global batch, if enough for all ranks."""
        total = self._sim.machine.run_state.slice_samples(live)
        return total if total >= self._least * len(live) else None

    def _must_rest(self, rank: int) -> None:
        """Check that an idle rank cannot hold the smallest piece, or would delay the step."""
        memory = self._sim.schedule.memory
        if memory and memory[rank] < self._least:
            return
        shares = self._sim.machine.run_state.shares
        sizes = {r: n for r, n in self._sizes.items() if n}
        costs = {r: cost for r in (*sizes, rank) if (cost := shares.cost(r)) is not None}
        gains, total = True, sum(sizes.values())
        if len(costs) > len(sizes) and total >= self._least * len(costs):  # all are measured
            best = split_by_cost(total, tuple(costs.values()), self._least)
            best_s = max(seconds(cost, n) for cost, n in zip(costs.values(), best, strict=True))
            now_s = max(seconds(costs[r], n) for r, n in sizes.items())
            # Memory limits, not times, decide here.
            gains = best_s < 0.96 * now_s and not memory
        if gains:
            raise Violation(f"rank {rank} has an empty piece, and the smallest would delay nobody")

    def _on_request(self, rank: int, round_id: int) -> None:
        if round_id == self._asked:
            self._unanswered.add(rank)
            return
        given_up = self._sim.machine.run_state.num_failed_rounds
        self._unanswered -= self._sim.dead
        if self._unanswered and given_up == self._num_failed_rounds:
            raise Violation(
                f"round {round_id} begins before the ranks {sorted(self._unanswered)} "
                f"acknowledged round {self._asked}"
            )
        if round_id < self._asked:
            raise Violation(f"round {round_id} comes after round {self._asked}")
        if self._sim.machine.run_state.num_averagings > self._num_averagings:
            self._num_averagings = self._sim.machine.run_state.num_averagings
            self._failed_before = given_up
        self._num_failed_rounds = given_up
        self._asked, self._unanswered = round_id, {rank}

    def on_event(self, event: m.Event) -> None:
        """Record an event before the coordinator handles it."""
        self._needed = max(self._needed, self._sim.machine.first_needed())
        if isinstance(event, m.SyncAck | m.ParamSnapshot):
            took_s = self._sim.now - self._asked_at[event.rank]
            self.longest_answer_s = max(self.longest_answer_s, took_s)
        if isinstance(event, m.SyncAck) and event.round == self._asked:
            self._unanswered.discard(event.rank)

    def _on_publish(self, command: PublishEpoch) -> None:
        metrics, c = command.metrics, self._config
        if metrics.partial:
            self._partial.append(metrics)  # checked with the result
            return
        if metrics.epoch != len(self._closed):
            raise Violation(f"epoch {metrics.epoch} closes after {self._closed}")
        self._closed.append(metrics.epoch)
        samples = sum(map(self._sim.samples_of, self._batches_of(metrics.epoch)))
        if metrics.epoch in self._left and self._sim.dead:
            return  # a worker may not have received yet that a round was undone
        omitted = self.omitted(metrics.epoch, self._sim.settled())
        samples -= sum(map(self._sim.samples_of, omitted))
        by_rank = sum(r.num_samples for r in metrics.per_rank)
        if self._sim.spans_epochs:
            by_rank = samples + metrics.num_retrained
        if metrics.num_samples != samples or by_rank - metrics.num_retrained != samples:
            raise Violation(f"{samples} samples are trained in an epoch, published: {metrics}")
        if not self._sim.num_live:
            return  # no rank was left to evaluate it
        self._must_hold(metrics.epoch, self._sim.settled(), "closed")
        if c.evaluate and ("evaluated", metrics.epoch) not in self._done_per_epoch:
            raise Violation(f"epoch {metrics.epoch} is published before it was evaluated")
        due = c.val_batches and (metrics.epoch + 1) % c.val_every == 0
        if due or "val/at" in metrics.scalars:
            self._must_be_validated(metrics.scalars)

    def _must_be_validated(self, scalars: Mapping[str, float]) -> None:
        """Check that the means are over all batches of the validation set, each of them once."""
        if scalars.get("val/at") != (self._config.val_batches - 1) / 2:
            raise Violation(
                f"{self._config.val_batches} batches are validated, published: {scalars}"
            )

    def on_validated_batch(self, task: m.Task, batch: int) -> None:
        """Check that each batch of a validation has one result."""
        if (task.id, batch) in self._validated_batches:
            raise Violation(f"batch {batch} is validated twice: {task}")
        self._validated_batches.add((task.id, batch))

    def on_validated(self, rank: int, task: m.Task, held: frozenset[Batch]) -> None:
        """Check that all ranks validate one average."""
        if self._validated.setdefault(task.id, held) != held:
            raise Violation(f"rank {rank} validates another average than its peers: {task}")
        busy = [w.rank for w in self._sim.workers if w.protocol.plan or w.protocol.plans]
        if self._config.policy is ApplyPolicy.SYNC and busy and not self._sim.dead:
            raise Violation(f"rank {rank} validates while {busy} have a plan")

    def _on_validated_within(self, metrics: StepMetrics) -> None:
        every, last = self._config.val_every_steps, self._validated_at
        assert every is not None
        self._must_be_validated(metrics.scalars)
        undone = self._sim.dead or self._sim.num_faults
        if last is not None and metrics.step // every <= last // every and not undone:
            raise Violation(f"validated after {last} and after {metrics.step} batches of {every}")
        self._validated_at = metrics.step

    def _batches_of(self, epoch: int) -> list[Batch]:
        return [(epoch, b) for b in range(self._per_epoch)]

    def _must_hold(self, epoch: int, effects: frozenset[Batch], what: str) -> None:
        omitted = self.omitted(epoch, effects)
        missing = [b for b in self._batches_of(epoch) if b not in effects and b not in omitted]
        if missing:
            raise Violation(f"epoch {epoch} is {what} without the effect of {missing}")

    def omitted(self, epoch: int, effects: frozenset[Batch]) -> set[Batch]:
        """The batches without an effect of an epoch that every rank has left."""
        omitted = {batch for batch in self._omitted_before if batch[0] == epoch}
        left, dead = self._left.get(epoch, set()), self._sim.dead
        if left and not set(range(self._config.world_size)) - left - dead:
            lost = {None, *dead}
            omitted |= {b for b in self._batches_of(epoch) if self._trained.get(b) in lost}
        return omitted - effects

    # -- the workers ---------------------------------------------------------------------

    def on_left(self, rank: int, epoch: int) -> None:
        """The body of a rank leaves an epoch, and all before it."""
        for number in range(epoch + 1):
            self._left.setdefault(number, set()).add(rank)

    def on_lr_factor(self, rank: int, number: int, factor: float) -> None:
        """Check the factor of the learning rate after a round: the same on all its ranks, and no
        larger than for equal shares of as many.
        """
        if self._lr_factors.setdefault(number, factor) != factor:
            raise Violation(f"rank {rank} has the factor {factor}, others {self._lr_factors}")
        world, live = self._config.world_size, self._round_ranks[number]
        if self._config.batch_sizes is None and factor > max(1.0, live / world**0.5) + 1e-9:
            raise Violation(f"a factor of {factor} with {live} of {world} ranks")

    def on_begin_epoch(self, rank: int, epoch: int) -> None:
        """The rank trains the first plan of an epoch."""
        self._begun[rank].append(epoch)

    def on_lockstep_plan(self, rank: int, plan: m.EpochPlan, num_held: int | None) -> None:
        """The rank begins a plan of ``SYNC``; ``num_held``: batches held, if between two steps."""
        steps = plan.steps
        first = 0 if steps is None else steps.first_step
        if num_held is not None and first != num_held:
            raise Violation(f"rank {rank} holds {num_held} batches, the plan begins at {first}")
        pieces = () if steps is None else steps.pieces(rank)
        self._pieces[rank].update({(plan.epoch, key): piece for key, piece in pieces})

    def _bounds(self, batch: Batch) -> tuple[int, int]:
        return batch_bounds(batch[1], self._config.num_samples, self._config.batch_size)

    def on_reduced(
        self, loads: Mapping[int, Sequence[Batch]], weights: Sequence[float], num_steps: int = 1
    ) -> tuple[Batch, ...]:
        """The ranks of ``SYNC`` have made a step together.

        Whatever pieces they had, these are the samples of whole batches, each of them once, and
        of whole global batches, whoever died.

        Returns:
            The batches.
        """
        self._failed_before = self._sim.machine.run_state.generation
        trained: Counter[tuple[int, int]] = Counter()
        found: dict[tuple[int, int], int] = {}
        for (rank, own), weight in zip(loads.items(), weights, strict=True):
            pieces = [(b[0], range(*self._pieces[rank][b])) for b in own]
            if (size := sum(len(piece) for _, piece in pieces)) != weight:
                raise Violation(f"rank {rank} weighs {weight} with {size} samples")
            trained.update((epoch, i) for epoch, piece in pieces for i in piece)
            found.update({(epoch, i): rank for epoch, piece in pieces for i in piece})
            self._num_trained[rank] += size
        batches = sorted({(epoch, i // self._config.batch_size) for epoch, i in found})
        wanted = Counter((b[0], i) for b in batches for i in range(*self._bounds(b)))
        if trained != wanted:
            raise Violation(f"a step of {sum(wanted.values())} samples trained others: {loads}")
        self._must_be_global(batches, num_steps)
        for batch in batches:
            first = (batch[0], self._bounds(batch)[0])
            self._note_trained(found[first], batch, self._sim.samples_of(batch))
        return tuple(batches)

    def _must_be_global(self, batches: Sequence[Batch], num_steps: int) -> None:
        """Check that a step has ``accumulate`` global batches, or as many in each of several steps
        of the plan, except for the last one.
        """
        c, (epoch, first) = self._config, batches[0]
        num = c.accumulate * self._sim.per_global
        stop = min(first + num_steps * num, self._per_epoch)
        wanted = [(epoch, b) for b in range(first, stop)]
        if self._is_cut_anyhow:  # the rest of the run, or gaps between consumed batches
            wanted = wanted[: len(batches)]
        elif first % num:
            raise Violation(f"a step of {num} batches begins in the middle of one: {batches}")
        if list(batches) != wanted:
            raise Violation(f"a step of {num} batches trained {batches}")

    def on_trained(self, rank: int, batch: Batch, size: int) -> None:
        """The rank trained a batch."""
        self._num_trained[rank] += size
        self._note_trained(rank, batch, size)

    def on_own_batches(self, rank: int, plan: m.EpochPlan) -> None:
        """Check a plan with the rank's own batch size: only the end of a range is short."""
        sizes = self._config.batch_sizes
        if sizes is None or not plan.batches:
            return
        numbers = [(plan.epoch, b) for span in plan.batches for b in span]
        c = self._config
        following = [*plan.pieces[1:], (-1, -1)]
        for (start, stop), (after, end) in zip(plan.pieces, following, strict=True):
            is_short = stop - start < sizes[rank] and stop == after
            if is_short and self._least > 1 and end - after <= c.batch_size + 1:
                is_short = stop - start < sizes[rank] - c.batch_size  # its last part was alone
            if stop - start > sizes[rank] or is_short:
                raise Violation(
                    f"rank {rank} has batches of {sizes[rank]} samples, the plan is {plan}"
                )
        # Ranks of two units cannot give one away, and quotas and limits leave what they leave.
        is_free = c.partition_ratios is None and c.max_steps is None
        is_free = is_free and self._sim.origin is None and c.num_samples > 1
        is_free = is_free and self._least > 1 and min(sizes) > 2 * c.batch_size
        if is_free and any(stop - start == 1 for start, stop in plan.pieces):
            raise Violation(f"a batch of 1 sample with batch statistics: {plan}")
        self._pieces[rank].update(zip(numbers, plan.pieces, strict=True))

    def on_trained_own(self, rank: int, number: Batch, size: int) -> list[Batch]:
        """The rank trained a batch, which may be several batches of the ledger."""
        if self._config.batch_sizes is None:
            self.on_trained(rank, number, size)
            return [number]
        start, stop = self._pieces[rank][number]
        unit = self._config.batch_size
        batches = [(number[0], b) for b in range(start // unit, -(-stop // unit))]
        if not start % unit == size - (stop - start) == 0 or batches[0] != number:
            raise Violation(f"rank {rank} trains {start} to {stop} of {number} with {size} samples")
        for batch in batches:
            self.on_trained(rank, batch, self._sim.samples_of(batch))
        if sum(map(self._sim.samples_of, batches)) != size:
            raise Violation(f"rank {rank} trains {size} samples of {batches}")
        return batches

    def _note_trained(self, rank: int, batch: Batch, size: int) -> None:
        before = self._trained.get(batch)
        if before is not None:
            # Under lockstep a batch can be lost with a rank that did not train it.
            lost = self._sim.dead if self.needs_rounds else self._sim.dead and {before}
            if before not in lost or before == BEFORE:
                raise Violation(f"rank {rank} trains {batch}, which rank {before} trained")
        if not 0 <= batch[1] < self._per_epoch or size != self._sim.samples_of(batch):
            raise Violation(f"rank {rank} trains {batch} with {size} samples")
        self._trained[batch] = rank

    def on_per_epoch(self, rank: int, what: str, epoch: int, held: frozenset[Batch]) -> None:
        """Check that the evaluated or handed over state is the average that closes an epoch."""
        undone = self._sim.dead or self._sim.num_faults  # of a round that failed on other ranks
        if (what, epoch) in self._done_per_epoch and not undone:
            raise Violation(f"epoch {epoch} is {what} twice")
        self._done_per_epoch.append((what, epoch))
        self._must_hold(epoch, held, what)

    def on_evaluated_within(self, rank: int, at: int) -> None:
        """Check an evaluation within an epoch."""
        c, last = self._config, self._evaluated_at
        assert c.eval_every is not None
        undone = self._sim.dead or self._sim.num_faults
        if last is not None and at // c.eval_every <= last // c.eval_every and not undone:
            raise Violation(f"evaluated after {last} and after {at} batches of {c.eval_every}")
        if c.policy is ApplyPolicy.SYNC:
            in_step = c.accumulate * c.world_size
            windows = self._sim.schedule.window_chance
            if at % c.eval_every >= in_step and not (undone or self._resumed or windows):
                raise Violation(f"evaluated after {at} batches, by steps of {in_step}")
            busy = [w.rank for w in self._sim.workers if w.protocol.plan or w.protocol.plans]
            if busy and not undone:
                raise Violation(f"rank {rank} evaluates while {busy} have a plan")
        self._evaluated_at = at

    # -- the end ---------------------------------------------------------------------------

    def at_end(self) -> None:
        """Check the end of the run: no batch is lost and no rank is left."""
        machine = self._sim.machine
        left = [w.rank for w in self._sim.workers if not self._sim.ended(w)]
        if left:
            raise Violation(f"the run is done and the ranks {left} still run")
        outcome = machine.outcome
        if outcome.failure is not None:
            self._must_have_failed(outcome.failure)
            return
        if {f.rank for f in outcome.failures} != self._sim.dead:
            raise Violation(f"{sorted(self._sim.dead)} died, reported: {outcome.failures}")
        payload = outcome.payload
        if not isinstance(payload, Traced):
            assert payload is None
            if not outcome.stopped:
                raise Violation("a run without a result")
            return
        if payload.held is not None:
            expect_payload(payload, "the result")
        effects = payload.base.union(payload.local)
        self._cut_epochs(effects)
        if len(effects) != len(payload.base) + len(payload.local):
            raise Violation("a batch is in the result twice")
        if effects - self._trained.keys():
            raise Violation(f"never trained: {sorted(effects - self._trained.keys())}")
        if effects != self._trained.keys() and not self._sim.dead:
            raise Violation(f"trained, not in the result: {sorted(self._trained.keys() - effects)}")
        self._all_was_done(effects, outcome.stopped)
        self.saves.at_end()

    def _must_have_failed(self, failure: m.WorkerFailure) -> None:
        """Check that a run fails exactly if a death must end it."""
        sim, s = self._sim, self._sim.schedule
        late = s.late_chance or s.collective_timeout_s
        if isinstance(failure.error, AveragingFailed):
            run = sim.machine.run_state
            failed = run.num_failed_rounds if self.needs_rounds else run.generation
            if (in_a_row := failed - self._failed_before) < self._config.max_failed_rounds - 1:
                raise Violation(f"{in_a_row} failures in a row end the run") from failure.error
        if late and isinstance(failure.error, AveragingFailed | CollectiveTimeout | RunStalled):
            return
        if not sim.dead:
            raise Violation(f"the run failed for no reason: {failure.error!r}") from failure.error
        if not self._config.continue_on_failure or len(sim.dead) == len(sim.workers):
            return
        if 0 in sim.dead and not sim.workers[0].was_built:
            return
        raise Violation(
            f"the run failed although it could continue: {failure.error!r}"
        ) from failure.error

    def _cut_epochs(self, effects: frozenset[Batch]) -> None:
        """Check that metrics of partial epochs agree with the result."""
        reported = {metrics.epoch: metrics.num_samples for metrics in self._partial}
        if len(reported) != len(self._partial) or (reported and self._config.max_steps is None):
            raise Violation(f"partial epochs in the result: {self._partial}")
        held: Counter[int] = Counter()
        for batch in effects:
            held[batch[0]] += self._sim.samples_of(batch)
        wanted = {epoch: num for epoch, num in held.items() if epoch not in self._closed}
        limited = self._config.max_steps is not None
        if limited and not self._sim.machine.outcome.stopped and reported != wanted:
            raise Violation(
                f"{wanted} samples are in the result of epochs that were cut: {reported}"
            )

    def _all_was_done(self, effects: frozenset[Batch], stopped: bool) -> None:
        c, num_effects = self._config, len(effects)
        num_omitted = sum(len(self.omitted(epoch, effects)) for epoch in range(c.num_epochs))
        wanted = total = self._per_epoch * c.num_epochs - num_omitted
        if c.max_steps is not None:
            wanted = min(total, c.count_batches(c.max_steps))
        if num_effects > wanted or (not stopped and num_effects != wanted):
            raise Violation(f"{num_effects} batches of {wanted} are in the result")
        if stopped:
            return
        whole = c.num_epochs if c.max_steps is None else wanted // self._per_epoch
        # An epoch that the run or its origin left has fewer batches.
        has_left = bool(self._left or num_omitted)
        if len(self._closed) != whole and not (has_left and c.max_steps is not None):
            raise Violation(f"only the epochs {self._closed} have closed")
        if c.max_steps is None:
            for rank in set(range(c.world_size)) - self._sim.dead:
                if self._begun[rank] != self._unfinished():
                    raise Violation(f"rank {rank} began the epochs {self._begun[rank]}")
        if not self._sim.dead and not self._sim.machine.run_state.generation and not self._resumed:
            self._shares()
        self._was_evaluated()
        self._was_validated()

    def _was_validated(self) -> None:
        """Check that there were validations within long enough epochs, without deaths or stops."""
        c, sim, every = self._config, self._sim, self._config.val_every_steps
        if every is None or c.max_steps is not None or self._resumed:
            return
        if self._left or sim.dead or sim.num_faults or sim.machine.run_state.num_failed_rounds:
            return
        counted, ahead = c.steps_per_epoch, 4 * c.world_size * c.accumulate
        if counted >= 2 * every + ahead and self._validated_at is None:
            raise Violation(f"never validated within {counted} batches of {every}")

    def _was_evaluated(self) -> None:
        """Check the evaluations within long enough epochs, without deaths or stops."""
        c, sim = self._config, self._sim
        if c.eval_every is None or c.max_steps is not None or self._resumed:
            return
        if self._left or sim.dead or sim.num_faults or sim.machine.run_state.num_failed_rounds:
            return
        counted, ahead = c.steps_per_epoch, 4 * c.world_size * c.accumulate
        if counted >= 2 * c.eval_every + ahead and self._evaluated_at is None:
            raise Violation(f"never evaluated within {counted} batches of {c.eval_every}")

    def _unfinished(self) -> list[int]:
        """Epochs with batches trained in this run."""
        epochs = range(self._config.num_epochs)
        done = self._resumed | self._omitted_before
        return [e for e in epochs if not done.issuperset(self._batches_of(e))]

    def _shares(self) -> None:
        """Check that fixed ratios hold in every epoch to within a batch."""
        c = self._config
        if c.partition_ratios is None or c.max_steps is not None or self._left:
            return
        scale = self._per_epoch / sum(c.partition_ratios)
        for epoch in range(c.num_epochs):
            trained = Counter(rank for (e, _), rank in self._trained.items() if e == epoch)
            for rank, ratio in enumerate(c.partition_ratios):
                if abs(trained[rank] - ratio * scale) >= 1:
                    raise Violation(f"rank {rank} trained {trained[rank]} of {self._per_epoch}")

    @property
    def samples_by_rank(self) -> list[int]:
        """Samples that each rank trained."""
        return [self._num_trained[w.rank] for w in self._sim.workers]

    @property
    def needs_rounds(self) -> bool:
        """True if replicas are averaged by rounds."""
        return self._config.world_size > 1 and self._config.policy is not ApplyPolicy.SYNC
