"""Parameter averaging from the side of one replica: snapshots, updates and collectives.

All copies run under the device's comm context, which orders them after the last optimizer step
and before the next forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from coordinator.averaging import usable_weights
from coordinator.messages import Payload
from runtime.collective.base import Collective
from runtime.device.base import Device, PendingCopy
from runtime.replica.flat import FlatState, change, norm, reals
from runtime.replica.param_ema import ParamEma

TINY_NORM = 1e-10


class ReplicaAverager:
    """Averages a replica's flat state with those of its peers.

    Holds one snapshot of the replica, reused from round to round. Over CPU memory the coordinator
    averages it; over a collective divergence is measured against it, and it is restored if the
    collective is aborted.

    Attributes:
        collective: The collective of the ranks; replaced after the death of one.
        ema: Moving average of the parameters that each round updates; ``None``: there is none.
    """

    def __init__(
        self,
        state: FlatState,
        device: Device,
        collective: Collective | None,
        ema: ParamEma | None = None,
    ) -> None:
        self._state = state
        self._device = device
        self.collective = collective
        self.ema = ema
        self._batches_alone = 0  # without other ranks, batches since the last round
        # The snapshot on the replica's device, and its copy in CPU memory for the coordinator;
        # on a CPU both are the same.
        self._base: Payload | None = None
        self._host_copy: Payload | None = None
        self._arrival: PendingCopy | None = None
        self._params_before: list[Tensor] | None = None
        self._buffers_before: tuple[Tensor, ...] = ()
        self.version = 0
        self._on_cpu = device.device.type == "cpu"

    @property
    def leads(self) -> bool:
        """True on the lowest rank of the collective."""
        return self.collective is None or self.collective.rank == 0

    def snapshot(self, *, reuse: bool, params: bool = True) -> Payload:
        """Copy the live state to CPU memory; blocks until the copy is complete.

        Args:
            reuse: Copy into the replica's snapshot, which stays valid until the next call and
                which :meth:`apply` subtracts from an average; otherwise into new memory.
            params: Copy the parameters and buffers; otherwise the buffers alone.
        """
        if not params:
            return self._copy_buffers()
        if not reuse:
            return self._copy_out(None)
        payload, arrival, _ = self.start_snapshot()
        if arrival is not None:
            arrival.wait()
        return payload

    def last_snapshot(self) -> Payload:
        """Like :meth:`snapshot`, without new memory on the device; no average may follow."""
        return self._copy_out(self._host_copy)

    def _copy_buffers(self) -> Payload:
        floats, others = self._state.buffers.empty()
        with self._device.comm(), torch.no_grad():
            self._state.buffers.read_into(floats, others)
            return Payload(params=(), buffers=floats, other_buffers=others).map(
                lambda t: t.to("cpu")
            )

    def _copy_out(self, host_copy: Payload | None) -> Payload:
        if self._on_cpu:
            payload = host_copy or self._state.new_payload()
            with self._device.comm():
                self._state.snapshot_into(payload)
            return payload
        with self._device.comm():
            live = self._state.live()
            payload = host_copy or self._device.host_twin(live)
            arrival = self._device.fetch(live, payload)
        if arrival is not None:
            arrival.wait()
        return payload

    def start_snapshot(self) -> Snapshot:
        """Take a snapshot; its copy to CPU memory may still be pending."""
        # The last round over a collective can no longer be undone: free its memory.
        self._params_before, self._buffers_before = None, ()
        if self._base is None:
            self._base = self._state.new_base()
        if self._host_copy is None:
            self._host_copy = self._device.host_twin(self._base)
        squares = None
        with self._device.comm():
            if self._on_cpu:
                squares = self._state.snapshot_with_norms(self._base)
            else:
                self._state.snapshot_into(self._base)
        # Ordered after the copy on the device, the only one that training waits for.
        self._arrival = self._device.fetch(self._base, self._host_copy)
        return Snapshot(self._host_copy, self._arrival, squares)

    def apply(
        self,
        average: Payload,
        at_average: Callable[[], None] | None = None,
        num_batches: float = 0.0,
    ) -> PendingCopy | None:
        """Add ``average - snapshot`` to the live state, which keeps the training since then.

        Args:
            average: The average that the last snapshot was part of; may be overwritten once the
                returned copy has completed.
            at_average: Called while the live state is exactly the average.

        Returns:
            The pending copy of the average to the device; ``None`` if it has completed.
        """
        base, host_copy = self._base, self._host_copy
        assert base is not None, "an update follows a snapshot"
        assert host_copy is not None, "an update follows a snapshot"
        average = self._staged(average, host_copy)
        self._move_ema(average, num_batches)
        floats, others = self._state.buffers.empty()
        scratch = Payload(params=(), buffers=floats, other_buffers=others)
        # live + (average - base), grouped so that the result is exact where nothing was trained
        # since, and so that the live state can be the average itself in between.
        if self._on_cpu and at_average is None:
            with self._device.comm():
                self._state.add_progress(average, base, scratch)
        else:
            with self._device.comm():
                self._state.compute_progress(base, scratch)
            if at_average is not None:
                with self._device.comm():
                    self._state.load(average)
            try:
                if at_average is not None:
                    at_average()
            finally:  # the live state is saved if it raised
                with self._device.comm():
                    self._state.load_with_progress(average, base, scratch)
        self.version += 1
        self._arrival = self._device.arrival()
        return self._arrival

    def note_batches(self, num_batches: int) -> float:
        """Record the batches of this rank since the last round, before a checkpoint.

        Returns:
            Those that the moving average does not contain.
        """
        due = float(num_batches - self._batches_alone)
        if self.ema is not None:
            self.ema.batches_due = due
        return due

    def step_alone(self, num_batches: int) -> None:
        """Update the moving average by the live weights, with no other rank left.

        Args:
            num_batches: Batches of this rank since the last round.
        """
        if self.ema is not None:
            self.ema.move(self._state.params.flats, self.note_batches(num_batches))
            self._batches_alone = num_batches

    def _move_ema(self, average: Payload, num_batches: float) -> None:
        if self.ema is not None:
            with self._device.comm():
                self.ema.move(average.params, num_batches)

    def replace(self, average: Payload, num_batches: float = 0.0) -> PendingCopy | None:
        """Replace the live state and discard the training since; otherwise as :meth:`apply`."""
        self._state.check_payload(average)
        staged = self._staged(average, self._host_copy or self._device.host_twin(average))
        if staged is not average:
            self._host_copy = staged
        self._move_ema(staged, num_batches)
        with self._device.comm():
            self._state.load(staged)
        self.version += 1
        self._arrival = self._device.arrival()
        return self._arrival

    @contextmanager
    def holding(self, state: Payload | None) -> Iterator[None]:
        """Load a state for the duration of the context, then restore the live one bit for bit.

        Args:
            state: The state, in CPU memory, not modified; ``None``: keep the live state.
        """
        if state is None:
            yield
            return
        self._state.check_payload(state)
        own = self._copy_out(None)
        # New memory: the snapshot of a round may still be pending.
        staged = self._staged(state, self._device.host_twin(state))
        try:
            with self._device.comm():
                self._state.load(staged)
            yield
        finally:
            with self._device.comm():
                self._state.load(own)
            arrival = self._device.arrival()
            if arrival is not None:
                arrival.wait()

    @torch.no_grad()
    def apply_delta(self, delta: Payload) -> None:
        """Add differences to the live state.

        Args:
            delta: Differences of parameters and float buffers, and the new values of the other
                buffers; in CPU memory, not modified.
        """
        self._state.check_payload(delta)
        staged = self._staged(delta, self._host_copy or self._device.host_twin(delta))
        if staged is not delta:
            self._host_copy = staged
        with self._device.comm():
            for flat, change in zip(self._state.params.flats, staged.params, strict=True):
                flat.add_(change.to(flat.device, non_blocking=True))
            floats, others = self._state.buffers.empty()
            self._state.buffers.read_into(floats, others)
            for live, change in zip(floats, staged.buffers, strict=True):
                live.add_(change.to(live.device, non_blocking=True))
            for live, value in zip(others, staged.other_buffers, strict=True):
                live.copy_(value, non_blocking=True)
            self._state.buffers.write_from(floats, others)
        self._arrival = self._device.arrival()

    def _staged(self, average: Payload, host_copy: Payload) -> Payload:
        """The average in memory that the device can copy from; the source may be overwritten."""
        if self._arrival is not None:
            self._arrival.wait()  # the previous copy uses the same memory
        return self._device.stage(average, host_copy)

    @torch.no_grad()
    def all_reduce(
        self, weight: float, *, healthy: bool | None = None, num_batches: float = 0.0
    ) -> ReducedState:
        """Average the live state over all ranks, weighted.

        Blocks until every rank has joined. If the collective is aborted, the live state is that
        of before the call.

        Args:
            weight: The weight of this rank's training since the last round.
            healthy: True if this rank's state is finite; ``None`` (on all ranks alike): all are.
            num_batches: Batches of this rank since the last round, for the moving average.

        Returns:
            The replica's distance from the average, and the time waited for the others.

        Raises:
            CollectiveAborted, CollectiveTimeout: The round failed.
        """
        collective = self.collective
        assert collective is not None, "SyncNow needs a collective"
        params = self._state.params
        params.check()
        self._base = self._host_copy = None  # no average of a snapshot can follow
        if self._params_before is None:
            self._params_before = params.like()
        floats, others = self._state.buffers.empty()
        with self._device.comm():
            for old, flat in zip(self._params_before, params.flats, strict=True):
                old.copy_(flat)
            self._state.buffers.read_into(floats, others)
            self._buffers_before = tuple(t.clone() for t in (*floats, *others))
            try:
                start = time.perf_counter()
                collective.barrier()
                waited = time.perf_counter() - start
                if healthy is not None:
                    weight = self._agree_weight(weight if healthy else -1)
                total = collective.weighted_mean_(reals([*params.flats, *floats]), weight)
                if others and total > 0:
                    self._copy_from_heaviest(others, weight)
                if self.ema is not None:
                    num_batches = sum(collective.all_gather_number(num_batches))
                    num_batches /= collective.world_size
                collective.check()
            except BaseException:
                for old, flat in zip(self._params_before, params.flats, strict=True):
                    flat.copy_(old)
                raise
            if total > 0:
                self._state.buffers.write_from(floats, others)
            if self.ema is not None:
                self.ema.move(params.flats, num_batches, undoable=True)
            # Keep the change that this round made, so that it can be undone.
            buffers = zip(self._buffers_before, (*floats, *others), strict=True)
            self._buffers_before = tuple(_difference(old, new) for old, new in buffers)
            for old, flat in zip(self._params_before, params.flats, strict=True):
                old.sub_(flat)
            post = float(norm(params.flats))
            divergence = float(norm(self._params_before)) / post if post > TINY_NORM else 0.0
        self.version += 1
        return ReducedState(divergence, post, waited)

    @torch.no_grad()
    def undo_all_reduce(self) -> None:
        """Revert the change of the last :meth:`all_reduce`, and keep the training since then.

        Exact up to rounding. Boolean buffers that the round changed get their earlier value.
        """
        assert self._params_before is not None, "undo_all_reduce() follows all_reduce()"
        with self._device.comm():
            if self.ema is not None:
                self.ema.undo()
            for flat, change in zip(self._state.params.flats, self._params_before, strict=True):
                flat.add_(change)
            if self._buffers_before:
                floats, others = self._state.buffers.empty()
                self._state.buffers.read_into(floats, others)
                for live, change in zip((*floats, *others), self._buffers_before, strict=True):
                    if live.dtype is torch.bool:
                        live.copy_(change.add(live).clamp_(0, 1))
                    else:
                        live.add_(change)
                self._state.buffers.write_from(floats, others)
        self.version -= 1

    def sync_buffers(self, num_samples: int) -> None:
        """Average the buffers alone, at the end of a lockstep plan."""
        collective = self.collective
        if collective is None or not self._state.buffers:
            return
        floats, others = self._state.buffers.empty()
        with torch.no_grad(), self._device.comm():
            self._state.buffers.read_into(floats, others)
            total = float(num_samples)
            if floats:
                total = collective.weighted_mean_(reals(floats), num_samples)
            if others:
                self._copy_from_heaviest(others, num_samples)
            if total > 0:
                self._state.buffers.write_from(floats, others)

    def _agree_weight(self, weight: float) -> float:
        """This rank's weight, given the health of all; a negative weight means not healthy."""
        collective = self.collective
        assert collective is not None
        weights = usable_weights(
            [None if w < 0 else w for w in collective.all_gather_number(weight)]
        )
        return weights[collective.rank]

    def _copy_from_heaviest(self, others: tuple[Tensor, ...], weight: float) -> None:
        """Copy integer buffers from the rank of largest weight, the lowest rank on ties."""
        collective = self.collective
        assert collective is not None
        weights = collective.all_gather_number(weight)
        for flat in others:
            collective.broadcast_(flat, src=weights.index(max(weights)))


def _difference(old: Tensor, new: Tensor) -> Tensor:
    """``old - new`` in the memory of ``old``; booleans count as 0 and 1, in new memory."""
    if old.dtype is torch.bool:
        return old.to(torch.int8).sub_(new.to(torch.int8))
    change(old, new, out=old)
    return old


class Snapshot(NamedTuple):
    """A snapshot of a replica's state in CPU memory.

    Attributes:
        payload: The state; valid until the next snapshot.
        arrival: The pending copy of the payload; ``None``: it has completed.
        squares: Squared norms of its parameter tensors; ``None`` on a GPU, where reading them
            would wait for the device.
    """

    payload: Payload
    arrival: PendingCopy | None
    squares: tuple[float, ...] | None


class ReducedState(NamedTuple):
    """Measurements of an averaging round over a collective.

    Attributes:
        divergence: ``||pre - post|| / ||post||`` over the parameters.
        norm: ``||post||``.
        waited_s: Seconds spent waiting for the others.
    """

    divergence: float
    norm: float
    waited_s: float
