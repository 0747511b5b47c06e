"""Averages of gradients: of those that replicas have computed, and under lockstep.

Under lockstep the weighted mean over the ranks is formed after or during the backward pass. In
buckets, gradients travel while the backward pass still computes others: a hook on each
parameter counts those of a bucket, and the last one sends it off.

The host reads the device only for the flags that say which parameters got a gradient, and only
where this rank alone cannot know. With a collective whose ``host_runs_ahead`` is set, the host does
not wait for the exchange either: a flag on the device gates the optimizer's kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.collective.base import LOW_PRECISION, LateResult, MeanInParts
from runtime.core.loss_weights import WindowWeight
from runtime.device.timing import HostTimer, StepTimer
from runtime.replica.flat import FlatLayout, NamedParams
from runtime.replica.non_finite import StepFiniteCheck

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the first exchange begins early, as in PyTorch's DDP."""
_NO_ORDER, _TWICE = -1, -2


class GradientReducer:
    """Averages gradients over the ranks through one flat tensor for each dtype.

    They are weighted by samples, or by a :class:`~runtime.core.loss_weights.WindowWeight`: as soon
    as one rank's loss has a weight, each such rank multiplies its gradients by its weight for each
    sample, which lies in one more element, and the reduced gradients are divided by what that
    element became. The ranks agree on it as they meet, and nothing else changes without weights.

    Complex gradients lie there as real and imaginary parts.

    Behind the gradients of the first dtype lies a flag for each parameter: a parameter
    that got no gradient on any rank keeps ``.grad is None`` for the optimizer. Where steps
    are judged, a last element tells every rank whether all losses are finite.

    With ``bucket_bytes`` gradients lie in the order in which the backward pass computes them. The
    ranks agree on it in their first step, which overlaps nothing, and anew in each new group: it
    is that of the lowest rank that has one. Buckets are sent in that order on every rank. What got
    no gradient is sent at the end of the step, with the flags.

    Args:
        params: The replica's parameters.
        collective: Where the ranks meet.
        judge: Judges what was reduced.
        comm: The context for collectives, see :meth:`Device.comm`.
        bucket_bytes: About how much travels at once; ``None``: all, after the backward pass.
        timer: Times the steps; waits within the backward pass are left out.

    Attributes:
        collective: Where the ranks meet.
        packed: What :meth:`pack` has found.
        called_off: Where the collective trails, 1 on the device if there is nothing to step by,
            else 0; of the last exchange.
        is_empty: Whether the weights of the last exchange sum to 0: there is nothing to step by.
    """

    def __init__(
        self,
        params: NamedParams,
        collective: Collective,
        finite_check: StepFiniteCheck | None = None,
        comm: Comm | None = None,
        *,
        bucket_bytes: int | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        self._params = params.params
        self.collective = collective
        self._finite_check = finite_check
        self._comm = comm or _here
        self._bucket_bytes = bucket_bytes
        self._timer = timer or HostTimer()
        self._agreed = bucket_bytes is None
        self._overlaps = False
        self._noted: list[int] | None = None  # the order of the backward pass in progress
        self._seen: list[int] = []  # by this rank, while no order is agreed on
        self._order: list[int] | None = None
        self._mean: MeanInParts | None = None
        self._armed: tuple[int, WindowWeight | None] | None = None
        self._failure: BaseException | None = None
        self._broken_off: list[Tensor] = []
        self.packed = NOTHING
        self.is_empty = False
        device = self._params[0].device
        self.called_off = torch.zeros((), dtype=torch.float32, device=device)
        self._outcome: LateResult | None = None
        self._arrange(None)
        if bucket_bytes is not None:
            _watch(self, self._params)

    def _arrange(self, order: Sequence[int] | None) -> None:
        """Make the flat tensors anew, with the gradients in this order."""
        like = [p.data for p in self._params]
        arrangement = FlatLayout(like, order)
        num = len(like)
        dtypes = [like[group[0]].dtype for group in arrangement.groups]
        widths = [2 if dtype.is_complex else 1 for dtype in dtypes]
        dtypes = [dtype.to_real() for dtype in dtypes]
        room = [0] * len(dtypes)
        room[0] = num if self._finite_check is None else num + 1
        # Where a total has most digits; 16 bits would round it to three of them.
        widest = max(range(len(dtypes)), key=lambda i: (dtypes[i].itemsize, -i))
        self._weight_apart = dtypes[widest] in LOW_PRECISION
        if not self._weight_apart:
            room[widest] += 1
        lengths = [
            arrangement.end(number, len(group) - 1) * width
            for number, (group, width) in enumerate(zip(arrangement.groups, widths, strict=True))
        ]
        self._flats = [
            torch.zeros(length + more, dtype=dtype, device=like[0].device)
            for length, more, dtype in zip(lengths, room, dtypes, strict=True)
        ]
        self._grads = [flat[:length] for flat, length in zip(self._flats, lengths, strict=True)]
        start = self._grads[0].numel()
        self._flags = self._flats[0][start : start + num]
        self._loss_flag = self._flats[0][
            start + num : start + num + int(self._finite_check is not None)
        ]
        # 0 wherever no weight was told.
        self._weight = self._flats[widest][-1:]
        if self._weight_apart:
            self._weight = self._weight.new_zeros(1, dtype=torch.float32)
        laid = [
            flat if width == 1 else torch.view_as_complex(flat.view(-1, 2))
            for flat, width in zip(self._grads, widths, strict=True)
        ]
        self._views = arrangement.views(laid, like)
        self._buckets = list(self._cut(arrangement, widths, room, order))
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.params}

    def _cut(
        self,
        arrangement: FlatLayout,
        widths: Sequence[int],
        room: Sequence[int],
        order: Sequence[int] | None,
    ) -> Iterator[_Bucket]:
        """The buckets, in the order in which they are sent; one for each dtype without an order."""
        place = {i: at for at, i in enumerate(order or range(len(self._params)))}
        closed: list[_Bucket] = []
        last: list[_Bucket] = []
        for number, (group, flat) in enumerate(zip(arrangement.groups, self._flats, strict=True)):
            begun = start = 0
            limit = min(FIRST_BUCKET_BYTES, self._bucket_bytes or 0)
            for index in range(len(group)):
                end = arrangement.end(number, index) * widths[number]
                is_last = index + 1 == len(group)
                is_full = order is not None and (end - start) * flat.element_size() >= limit
                if is_last:
                    end = flat.numel()
                if is_last or is_full:
                    is_open = is_last and room[number] > 0
                    bucket = _Bucket(group[begun : index + 1], flat[start:end], is_open)
                    (last if is_open else closed).append(bucket)
                    begun, start = index + 1, end
                    limit = self._bucket_bytes or 0
        closed.sort(key=lambda bucket: place[bucket.params[-1]])
        yield from closed
        yield from last

    def join(self, collective: Collective) -> None:
        """Meet the other ranks there from now on."""
        self.collective = collective
        self._agreed = self._bucket_bytes is None
        self._overlaps = False
        self._seen, self._order = [], None
        self._broken_off = []
        self.called_off.zero_()  # a graph of the step reads it over any collective

    def take_late_result(self) -> LateResult | None:
        """How the last exchange ends; ``None``: it has ended well."""
        outcome, self._outcome = self._outcome, None
        return outcome

    @property
    def _in_parts(self) -> bool:
        """Whether an exchange is made in parts, on every rank alike."""
        return self._bucket_bytes is not None or self.collective.host_runs_ahead

    def forget(self) -> None:
        """Nothing of the last step is left, made or not."""
        self.packed = NOTHING
        self._armed = self._noted = self._failure = None
        if self._mean is not None:
            # Broken off: what was sent may still be written to until the group is another one.
            self._mean, self._broken_off = None, self._flats
            self._arrange(self._order)

    def arm(self, num_samples: int, weight: WindowWeight | None) -> None:
        """The backward pass that follows is the last one of the step.

        Args:
            num_samples: Samples behind this rank's gradients.
            weight: Of the step; ``None``: its samples.
        """
        if self._bucket_bytes is None:
            return
        if not self._agreed:
            self._noted = []
            return
        if self._overlaps:
            self._armed = num_samples, weight
            for bucket in self._buckets:
                bucket.missing, bucket.sent = len(bucket.params), False

    def disarm(self) -> None:
        """The backward pass is over.

        Raises:
            CollectiveAborted, CollectiveTimeout: Gradients could not be sent off.
            ValueError: A parameter got its gradient in several parts.
        """
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._seen = noted if len(set(noted)) == len(noted) else [_TWICE]
        self._armed = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def give_up(self) -> None:
        """The backward pass has failed: nobody waits for gradients of this rank."""
        self._armed = self._noted = self._failure = None
        if self._mean is not None:
            self.collective.abort()

    def arrived(self, index: int) -> None:
        """A parameter has its gradient. In the thread of the backward pass; raises nothing."""
        if self._noted is not None:
            self._noted.append(index)
        if self._armed is None or self._failure is not None:
            return
        try:
            self._take(self._bucket_of[index])
        except BaseException as error:  # autograd would hide where it comes from
            self._failure = error

    def _take(self, bucket: _Bucket) -> None:
        bucket.missing -= 1
        if bucket.missing < 0:
            self.collective.abort()
            raise ValueError(
                "a parameter got its gradient in several parts within one backward pass, after "
                "some had gone to the other ranks: call bucket_cap_mb(None)"
            )
        if bucket.missing:
            return
        for waiting in self._buckets:
            if waiting.sent:
                continue
            if waiting.missing or waiting.is_open:
                return
            assert self._armed is not None
            num_samples, weight = self._armed
            with torch.no_grad():
                self._write(waiting, num_samples, weight)
                self._send(waiting, num_samples, weighed=weight is not None)

    def _send(self, bucket: _Bucket, num_samples: int, *, weighed: bool) -> None:
        if self._mean is None:
            tally = num_samples if weighed else 0
            self._mean = self.collective.mean_in_parts(num_samples, tally=tally)
        bucket.sent = True
        self._timer.pause()  # the ranks may meet for each part
        try:
            with self._comm(joined=False):
                self._mean.add([bucket.flat])
        finally:
            self._timer.resume()

    def _write(self, bucket: _Bucket, num_samples: int, weight: WindowWeight | None) -> None:
        """Copy the gradients of a bucket into its flat tensor."""
        views = [self._views[i] for i in bucket.params]
        grads = [self._params[i].grad for i in bucket.params]
        _copy(views, grads, complete=not [g for g in grads if g is None])
        if weight is not None:
            torch._foreach_mul_(views, weight.unit / num_samples)

    def pack(
        self, num_samples: int, losses: Sequence[Tensor] = (), weight: WindowWeight | None = None
    ) -> None:
        """Write this rank's gradients, flags and losses into the flat tensors.

        Does not wait for the device, and where every parameter has a gradient it issues
        nothing but work on the device, so that it may be captured. In buckets, the first step
        of a group waits for the other ranks.

        Args:
            num_samples: Samples behind this rank's gradients; 0: it only receives.
            losses: Of the step.
            weight: Of the step; ``None``: its samples.
        """
        if not self._agreed:
            self._agree()
        grads = [p.grad for p in self._params]
        complete = num_samples > 0 and not [g for g in grads if g is None]
        if num_samples > 0:
            if self._mean is None:
                _copy(self._views, grads, complete=complete)
                if weight is not None:
                    torch._foreach_mul_(self._grads, weight.unit / num_samples)
            else:
                for bucket in self._waiting():
                    self._write(bucket, num_samples, weight)
            if complete:
                # Each time: a peer that lacks a parameter halves its flag, which would end at 0.
                self._flags.fill_(1)
            else:
                told = torch.tensor([g is not None for g in grads])
                self._flags.copy_(told, non_blocking=True)
        if self._finite_check is not None:
            self._finite_check.write_flag(self._loss_flag, losses)
        if weight is not None:
            value = weight.units * (weight.unit / num_samples)
            if isinstance(value, Tensor):
                self._weight.copy_(value)
            else:
                self._weight.fill_(value)
        self.packed = PackedGradients(grads, complete=complete, weighed=weight is not None)

    def _waiting(self) -> Sequence[_Bucket]:
        """What has not been sent in this step."""
        if self._mean is None:
            return self._buckets
        return [bucket for bucket in self._buckets if not bucket.sent]

    def _agree(self) -> None:
        """Put the gradients into the order that the lowest rank has seen, on every rank alike."""
        num = len(self._params)
        mine = torch.full((num + 1,), _NO_ORDER, dtype=torch.int64)
        mine[: len(self._seen)] = torch.tensor(self._seen, dtype=torch.int64)
        told = mine.new_empty(self.collective.world_size * (num + 1))
        self._timer.pause()
        self.collective.agree(
            "averages gradients with", bucket_bytes=self._bucket_bytes, num_parameters=num
        )
        self.collective.all_gather_into(told, mine)
        self._timer.resume()
        rows = told.view(self.collective.world_size, -1).tolist()
        found = [row for row in rows if row[0] != _NO_ORDER]
        if not found:  # no rank had a sample
            return
        self._agreed = True
        self._overlaps = all(row[0] != _TWICE for row in found)
        if self._overlaps:
            first = [i for i in found[0] if i >= 0]
            self._order = first + sorted(set(range(num)) - set(first))
        self._arrange(self._order)

    def can_end_late(self) -> bool:
        """Whether nothing has to be read before the step that was packed can be made."""
        judged = self._finite_check is not None and self._finite_check.reads
        return self.collective.host_runs_ahead and self.packed.complete and not judged

    def exchange(self, num_samples: int, *, late: bool = False) -> bool:
        """Replace what was packed by the weighted mean over the ranks.

        Args:
            num_samples: As :meth:`pack` was told.
            late: Where :meth:`can_end_late`, do not wait: the step has to be one that
                :attr:`called_off` calls off, and :meth:`take_late_result` tells the rest.

        Returns:
            Whether the step may be made; if not, it is taken back. Whether there is anything
            to step by is in :attr:`is_empty`.

        Raises:
            NonFiniteError, CollectiveAborted: See :meth:`StepFiniteCheck.accept_reduced`.
        """
        self.is_empty = False
        told = {"tally": num_samples} if self.packed.weighed else {}
        try:
            with self._comm():
                if self._in_parts:
                    mean = self._mean or self.collective.mean_in_parts(num_samples, **told)
                    waiting = self._waiting()
                    self._mean = mean
                    mean.add([bucket.flat for bucket in waiting])
                    if self._weight_apart and self.collective.host_runs_ahead:
                        mean.add([self._weight])
                    if late:
                        total, self._outcome = mean.end_late(self.called_off)
                    else:
                        total = mean.end()
                    self._mean = None
                else:
                    total = self.collective.weighted_mean_(self._flats, num_samples, **told)
        except BaseException:
            self._weight.zero_()
            raise
        # The same on every rank: they have said it as they met.
        num_weighed = self.collective.tally
        if late:
            if num_weighed:
                self._divide_late((total - num_weighed) / total)
            return True
        mean_weight = self._mean_weight(total, num_weighed, num_samples) if num_weighed else 1.0
        if self._finite_check is not None and not self._finite_check.accept_reduced(
            self._flats, self._loss_flag, self.packed.grads, self.collective
        ):
            return False
        if num_weighed:
            self.is_empty = not mean_weight > 0
            if not self.is_empty:
                for flat in self._grads:
                    flat.div_(mean_weight)
        if self.collective.host_runs_ahead:
            self.called_off.zero_()
        return True

    def _divide_late(self, plain: float) -> None:
        """Divide by the reduced weight for each sample, which only the device knows.

        Args:
            plain: The part of the samples whose loss has no weight.
        """
        mean = self._weight + plain
        is_empty = (mean > 0).logical_not_().float().reshape(())
        torch.maximum(self.called_off, is_empty, out=self.called_off)
        for flat in self._grads:
            flat.div_(mean.to(flat.dtype))
        self._weight.zero_()

    def _mean_weight(self, total: float, num_weighed: float, num_samples: int) -> float:
        """The reduced weight for each sample; reads one number of the device.

        Args:
            total: Samples of all ranks.
            num_weighed: Those of the ranks whose loss has a weight.
            num_samples: Those of this rank.
        """
        if self._weight_apart and not self.collective.host_runs_ahead:
            with self._comm():
                self.collective.weighted_mean_([self._weight], num_samples)
        mean = float(self._weight) + (total - num_weighed) / total
        self._weight.zero_()  # a rank without a weight writes nothing
        return mean

    def unpack(self) -> None:
        """Make what was reduced the parameters' ``.grad``."""
        used = None if self.packed.complete else (self._flags > 0).tolist()
        for i, (p, view) in enumerate(zip(self._params, self._views, strict=True)):
            p.grad = view if used is None or used[i] else None
        self.packed = PackedGradients([], complete=self.packed.complete)  # the memory of the others


class PackedGradients(NamedTuple):
    """What a rank gives to a reduction.

    Attributes:
        grads: Its own gradients, one for each parameter.
        complete: Whether every parameter has one.
        weighed: Whether the step's loss has a weight other than its samples.
    """

    grads: Sequence[Tensor | None]
    complete: bool
    weighed: bool = False


NOTHING = PackedGradients([], complete=False)


class Comm(Protocol):
    """See :meth:`Device.comm`."""

    def __call__(self, *, joined: bool = True) -> AbstractContextManager[None]:
        """The context for a collective."""


def _here(*, joined: bool = True) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(slots=True)
class _Bucket:
    """Gradients that travel together.

    Attributes:
        params: Their parameters, none of them in another bucket.
        flat: Where they lie.
        is_open: Whether flags lie behind them, which are known at the end of the step.
        missing: How many the backward pass has not computed yet.
        sent: Whether they are on their way.
    """

    params: Sequence[int]
    flat: Tensor
    is_open: bool
    missing: int = 0
    sent: bool = False


def _copy(views: Sequence[Tensor], grads: Sequence[Tensor | None], *, complete: bool) -> None:
    if complete:
        torch._foreach_copy_(views, grads)  # type: ignore[arg-type]
        return
    for view, grad in zip(views, grads, strict=True):
        view.zero_() if grad is None else view.copy_(grad)


def _watch(reducer: GradientReducer, params: Sequence[nn.Parameter]) -> None:
    """Tell the reducer of each gradient; keeps it alive no longer than others do."""
    told = weakref.ref(reducer)

    def hook(index: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            found = told()
            if found is not None:
                found.arrived(index)

        return arrived

    for i, p in enumerate(params):
        p.register_post_accumulate_grad_hook(hook(i))  # type: ignore[no-untyped-call]
