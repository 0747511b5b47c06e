"""One replica's side of an averaging: snapshots, updates and collectives.

All copies run under the device's comm context, which orders them after the last
optimizer step and before the next forward.
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
from runtime.collective import Collective
from runtime.device.base import Device, PendingCopy
from runtime.replica.flat import FlatState, change, norm, reals

TINY_NORM = 1e-10


class ReplicaAverager:
    """Averages a replica's flat state with its peers'.

    Holds one snapshot of the replica, reused from round to round: over the CPU path it
    is what the coordinator averages, over a collective what divergence is measured
    against and what comes back if the collective is aborted.

    Attributes:
        collective: Where the ranks meet; replaced when one of them is gone.
        version: Averages taken.
    """

    def __init__(self, state: FlatState, device: Device, collective: Collective | None) -> None:
        self._state = state
        self._device = device
        self.collective = collective
        # The snapshot where the replica lies, and where the coordinator can read it; one
        # and the same on a CPU.
        self._base: Payload | None = None
        self._twin: Payload | None = None
        self._arrival: PendingCopy | None = None
        self._before: list[Tensor] | None = None
        self._before_buffers: tuple[Tensor, ...] = ()
        self.version = 0
        self._on_cpu = device.device.type == "cpu"

    @property
    def leads(self) -> bool:
        """Whether this is the lowest rank of those that meet."""
        return self.collective is None or self.collective.rank == 0

    def snapshot(self, *, reuse: bool, params: bool = True) -> Payload:
        """Copy the live state to CPU memory; blocks until it is there.

        Args:
            reuse: Use this replica's one snapshot buffer, which stays valid until the
                next call, and which an average can be taken against; otherwise memory of
                its own.
            params: Whether to copy the parameters, or the buffers alone.
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
        """As :meth:`snapshot`, where no average follows: takes no more memory of the device."""
        return self._copy_out(self._twin)

    def _copy_buffers(self) -> Payload:
        floats, others = self._state.buffers.empty()
        with self._device.comm(), torch.no_grad():
            self._state.buffers.read_into(floats, others)
            return Payload(params=(), buffers=floats, taken=others).map(lambda t: t.to("cpu"))

    def _copy_out(self, twin: Payload | None) -> Payload:
        if self._on_cpu:
            payload = twin or self._state.new_payload()
            with self._device.comm():
                self._state.snapshot_into(payload)
            return payload
        with self._device.comm():
            live = self._state.live()
            payload = twin or self._device.host_twin(live)
            arrival = self._device.fetch(live, payload)
        if arrival is not None:
            arrival.wait()
        return payload

    def start_snapshot(self) -> Snapshot:
        """Take a snapshot whose copy to CPU memory may still be on its way."""
        # A round over a collective cannot be undone any more: its memory is for the snapshot.
        self._before, self._before_buffers = None, ()
        if self._base is None:
            self._base = self._state.new_base()
        if self._twin is None:
            self._twin = self._device.host_twin(self._base)
        squares = None
        with self._device.comm():
            if self._on_cpu:
                squares = self._state.snapshot_with_norms(self._base)
            else:
                self._state.snapshot_into(self._base)
        # Behind the copy on the device, which is all that training waits for.
        self._arrival = self._device.fetch(self._base, self._twin)
        return Snapshot(self._twin, self._arrival, squares)

    def take(
        self, average: Payload, meanwhile: Callable[[], None] | None = None
    ) -> PendingCopy | None:
        """Add ``average - snapshot`` to the live state, losing nothing trained since.

        Args:
            average: The average that the last snapshot went into; not read any more once
                this returns and what it returns has arrived.
            meanwhile: Called while the live state is exactly the average.

        Returns:
            When the average has reached the device; ``None``: it has.
        """
        base, twin = self._base, self._twin
        assert base is not None, "an update follows a snapshot"
        assert twin is not None, "an update follows a snapshot"
        average = self._staged(average, twin)
        floats, others = self._state.buffers.empty()
        scratch = Payload(params=(), buffers=floats, taken=others)
        # live + (average - base), grouped so that the result is exact where nothing was trained,
        # and the average itself can be held in between.
        if self._on_cpu and meanwhile is None:
            with self._device.comm():
                self._state.add_progress(average, base, scratch)
        else:
            with self._device.comm():
                self._state.compute_progress(base, scratch)
            if meanwhile is not None:
                with self._device.comm():
                    self._state.load(average)
                meanwhile()
            with self._device.comm():
                self._state.load_with_progress(average, base, scratch)
        self.version += 1
        self._arrival = self._device.arrival()
        return self._arrival

    def replace(self, average: Payload) -> PendingCopy | None:
        """Replace the live state, whatever was trained; as :meth:`take` otherwise."""
        self._state.check_payload(average)
        staged = self._staged(average, self._twin or self._device.host_twin(average))
        if staged is not average:
            self._twin = staged
        with self._device.comm():
            self._state.load(staged)
        self.version += 1
        self._arrival = self._device.arrival()
        return self._arrival

    @contextmanager
    def holding(self, state: Payload | None) -> Iterator[None]:
        """The live state is exactly this one meanwhile, and then what it was, bit for bit.

        Args:
            state: On the CPU, only read; ``None``: the live state stays.
        """
        if state is None:
            yield
            return
        self._state.check_payload(state)
        own = self._copy_out(None)
        # Memory of its own: the snapshot of a round may be on its way.
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
    def shift(self, delta: Payload) -> None:
        """Add differences to the live state, keeping what was trained meanwhile.

        Args:
            delta: Differences of parameters and float buffers, and the new values of the other
                buffers; on the CPU, only read.
        """
        self._state.check_payload(delta)
        staged = self._staged(delta, self._twin or self._device.host_twin(delta))
        if staged is not delta:
            self._twin = staged
        with self._device.comm():
            for flat, change in zip(self._state.params.flats, staged.params, strict=True):
                flat.add_(change.to(flat.device, non_blocking=True))
            floats, others = self._state.buffers.empty()
            self._state.buffers.read_into(floats, others)
            for live, change in zip(floats, staged.buffers, strict=True):
                live.add_(change.to(live.device, non_blocking=True))
            for live, value in zip(others, staged.taken, strict=True):
                live.copy_(value, non_blocking=True)
            self._state.buffers.write_from(floats, others)
        self._arrival = self._device.arrival()

    def _staged(self, average: Payload, twin: Payload) -> Payload:
        """The average where the device can copy from; it is not read any more after that."""
        if self._arrival is not None:
            self._arrival.wait()  # the last copy from or to the same memory
        return self._device.stage(average, twin)

    @torch.no_grad()
    def all_reduce(self, weight: float, *, healthy: bool | None = None) -> ReducedState:
        """Average the live state over all ranks, weighted.

        Blocks until every rank has joined. If the collective is aborted the live state
        is the one before the call.

        Args:
            weight: Of what this rank has trained since the last round.
            healthy: Whether its state may be used; ``None``, on every rank alike: it may on
                all of them.

        Returns:
            How far the replica was from the average, and how long it waited.

        Raises:
            CollectiveAborted, CollectiveTimeout: The round failed.
        """
        collective = self.collective
        assert collective is not None, "SyncNow needs a collective"
        params = self._state.params
        params.check()
        self._base = self._twin = None  # no average of a snapshot can come any more
        if self._before is None:
            self._before = params.like()
        floats, others = self._state.buffers.empty()
        with self._device.comm():
            for old, flat in zip(self._before, params.flats, strict=True):
                old.copy_(flat)
            self._state.buffers.read_into(floats, others)
            self._before_buffers = tuple(t.clone() for t in (*floats, *others))
            try:
                start = time.perf_counter()
                collective.barrier()
                waited = time.perf_counter() - start
                if healthy is not None:
                    weight = self._agree_weight(weight if healthy else -1)
                total = collective.weighted_mean_(reals([*params.flats, *floats]), weight)
                if others and total > 0:
                    self._take_from_heaviest(others, weight)
                collective.check()
            except BaseException:
                for old, flat in zip(self._before, params.flats, strict=True):
                    flat.copy_(old)
                raise
            if total > 0:
                self._state.buffers.write_from(floats, others)
            # From here on what the round took away, so that it can be undone.
            buffers = zip(self._before_buffers, (*floats, *others), strict=True)
            self._before_buffers = tuple(_taken_away(old, new) for old, new in buffers)
            for old, flat in zip(self._before, params.flats, strict=True):
                old.sub_(flat)
            post = float(norm(params.flats))
            divergence = float(norm(self._before)) / post if post > TINY_NORM else 0.0
        self.version += 1
        return ReducedState(divergence, post, waited)

    @torch.no_grad()
    def undo_all_reduce(self) -> None:
        """Take back what the last :meth:`all_reduce` changed; keep what was trained since.

        Exact up to rounding. A flag that the round changed is what it was before the round.
        """
        assert self._before is not None, "an averaging comes before its undoing"
        with self._device.comm():
            for flat, change in zip(self._state.params.flats, self._before, strict=True):
                flat.add_(change)
            if self._before_buffers:
                floats, others = self._state.buffers.empty()
                self._state.buffers.read_into(floats, others)
                for live, change in zip((*floats, *others), self._before_buffers, strict=True):
                    if live.dtype is torch.bool:
                        live.copy_(change.add(live).clamp_(0, 1))
                    else:
                        live.add_(change)
                self._state.buffers.write_from(floats, others)
        self.version -= 1

    def sync_buffers(self, num_samples: int) -> None:
        """Average buffers alone, under lockstep at the end of a plan."""
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
                self._take_from_heaviest(others, num_samples)
            if total > 0:
                self._state.buffers.write_from(floats, others)

    def _agree_weight(self, weight: float) -> float:
        """This rank's weight once it is known who is healthy; a rank that is not says -1."""
        collective = self.collective
        assert collective is not None
        weights = usable_weights([None if w < 0 else w for w in collective.tell(weight)])
        return weights[collective.rank]

    def _take_from_heaviest(self, others: tuple[Tensor, ...], weight: float) -> None:
        """Integer buffers come from the rank with the largest weight, the lowest on ties."""
        collective = self.collective
        assert collective is not None
        weights = collective.tell(weight)
        for flat in others:
            collective.broadcast_(flat, src=weights.index(max(weights)))


def _taken_away(old: Tensor, new: Tensor) -> Tensor:
    """``old - new``, in the memory of ``old`` but for flags, which count as 0 and 1."""
    if old.dtype is torch.bool:
        return old.to(torch.int8).sub_(new.to(torch.int8))
    change(old, new, out=old)
    return old


class Snapshot(NamedTuple):
    """A replica's state on its way to the coordinator.

    Attributes:
        payload: Valid until the next snapshot.
        arrival: When it may be read; ``None``: at once.
        squares: Squared norms of its parameter tensors; ``None``: not measured, as a device
            would have to be waited for.
    """

    payload: Payload
    arrival: PendingCopy | None
    squares: tuple[float, ...] | None


class ReducedState(NamedTuple):
    """What a round over a collective has shown.

    Attributes:
        divergence: ``||pre - post|| / ||post||`` over the parameters.
        norm: ``||post||``.
        waited_s: Seconds spent waiting for the others.
    """

    divergence: float
    norm: float
    waited_s: float
