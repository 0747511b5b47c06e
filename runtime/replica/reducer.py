"""Gradient reduction of lockstep runs: the weighted mean over the ranks.

It is computed after or during the backward pass. In buckets, gradients are sent while the backward
pass computes others: a hook on each parameter counts the gradients of its bucket, and the last one
sends the bucket.

The host reads the device only for the flags of parameters with a gradient, and only if this rank
lacks some gradient. With a collective whose ``host_runs_ahead`` is set, the host does not wait for
the exchange either: a flag on the device gates the optimizer's kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from runtime.collective.base import BucketedMean, Collective, CollectiveWork
from runtime.core.loss_weights import WindowWeight
from runtime.device.timing import HostTimer, StepTimer
from runtime.replica.flat import FlatParams, FlatState, NamedParams
from runtime.replica.gradients import FlatGradients, copy_gradients
from runtime.replica.max_norm import MaxNorm
from runtime.replica.non_finite import StepFiniteCheck

FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket: small, so that the first exchange begins early, as in PyTorch's DDP."""
_NO_ORDER, _REPEATED = -1, -2


class GradientReducer:
    """Averages gradients over the ranks through one flat tensor for each dtype.

    Gradients are weighted by samples, or by a :class:`~runtime.core.loss_weights.WindowWeight`: if
    any rank's loss has a weight, each such rank multiplies its gradients by its weight for each
    sample, which is stored in one more element, and the reduced gradients are divided by the
    reduced element. The exchange itself reports if any rank has a weight.

    Complex gradients are stored as real and imaginary parts.

    After the gradients of the first dtype there is a flag for each parameter: a parameter without
    a gradient on any rank keeps ``.grad is None`` for the optimizer. If steps are checked, one
    more element is NaN on all ranks unless all losses are finite.

    With ``bucket_bytes``, gradients are stored in the order in which the backward pass computes
    them. The ranks agree on the order of the lowest rank that has one, in the first step of each
    group, which does not overlap. All ranks send the buckets in that order. Parameters without a
    gradient are sent at the end of the step, with the flags.

    Args:
        comm: The context for collectives, see :meth:`Device.comm`.
        bucket_bytes: Approximate size of a bucket; ``None``: a single exchange after backward.
        timer: Timer of the steps; waits within the backward pass are excluded.
        sums: Return the sum over all samples in place of their mean.

    Attributes:
        packed: The result of the last :meth:`pack`.
        skip_flag: On the device, 1 if the optimizer must skip the step, else 0; of the last
            exchange with ``host_runs_ahead``.
        is_empty: True if the weights of the last exchange sum to 0, so no step is made.
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
        sums: bool = False,
    ) -> None:
        self._sums = sums
        self._params = params.params
        self.collective = collective
        self._finite_check = finite_check
        self._comm = comm or _no_context
        self._bucket_bytes = bucket_bytes
        self._timer = timer or HostTimer()
        self._has_order = bucket_bytes is None
        self._overlaps = False
        self._recorded: list[int] | None = None  # order of the backward pass in progress
        self._own_order: list[int] = []  # order on this rank, until the ranks agree
        self._order: list[int] | None = None
        self._mean: BucketedMean | None = None
        self._armed: tuple[int, WindowWeight | None] | None = None
        self._failure: BaseException | None = None
        self._aborted_flats: Sequence[Tensor] = ()
        self.packed = NOTHING
        self.is_empty = False
        device = self._params[0].device
        self.skip_flag = torch.zeros((), dtype=torch.float32, device=device)
        self._pending_work: CollectiveWork | None = None
        self._arrange(None)
        self._hooks: list[Any] = []
        if bucket_bytes is not None:
            self._hooks = _register_hooks(self, self._params)

    def _arrange(self, order: Sequence[int] | None) -> None:
        """Allocate the flat tensors, with the gradients in this order."""
        num, checks = len(self._params), self._finite_check is not None
        like = [p.data for p in self._params]
        self._store = store = FlatGradients(like, order, num_flags=num + checks, weighed=True)
        self._flats, self._views = store.flats, store.views
        self._flags, self._loss_flag = store.flags[:num], store.flags[num:]
        self._buckets = list(self._split_buckets(order))
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.params}

    def _split_buckets(self, order: Sequence[int] | None) -> Iterator[_Bucket]:
        """The buckets in sending order; without an order, one for each dtype."""
        place = {i: at for at, i in enumerate(order or range(len(self._params)))}
        closed: list[_Bucket] = []
        last: list[_Bucket] = []
        for group, ends, flat, room in self._store.extents():
            begin = start = 0
            limit = min(FIRST_BUCKET_BYTES, self._bucket_bytes or 0)
            for index, end in enumerate(ends):
                is_last = index + 1 == len(group)
                is_full = order is not None and (end - start) * flat.element_size() >= limit
                if is_last:
                    end = flat.numel()
                if is_last or is_full:
                    is_open = is_last and room > 0
                    bucket = _Bucket(group[begin : index + 1], flat[start:end], is_open)
                    (last if is_open else closed).append(bucket)
                    begin, start = index + 1, end
                    limit = self._bucket_bytes or 0
        closed.sort(key=lambda bucket: place[bucket.params[-1]])
        yield from closed
        yield from last

    def join(self, collective: Collective) -> None:
        """Use another collective from now on."""
        self.collective = collective
        self._has_order = self._bucket_bytes is None
        self._overlaps = False
        self._own_order, self._order = [], None
        self._aborted_flats = ()
        self.skip_flag.zero_()  # a graph of the step reads it over any collective

    def run_hooks_last(self) -> None:
        """Let the hooks that send buckets run after those that user code has added meanwhile."""
        added = [
            next(reversed(p._post_accumulate_grad_hooks)) != hook.id
            for p, hook in zip(self._params, self._hooks, strict=False)
        ]
        if any(added):
            for hook in self._hooks:
                hook.remove()
            self._hooks = _register_hooks(self, self._params)

    @property
    def has_buckets(self) -> bool:
        """True if gradients are sent in buckets, during the backward pass."""
        return self._bucket_bytes is not None

    def take_pending_work(self) -> CollectiveWork | None:
        """The pending result of the last exchange; ``None`` if it has completed."""
        result, self._pending_work = self._pending_work, None
        return result

    @property
    def _is_bucketed(self) -> bool:
        """True if an exchange has several parts, on every rank alike."""
        return self._bucket_bytes is not None or self.collective.host_runs_ahead

    def reset(self) -> None:
        """Reset the state of the last step, whether it was completed or not."""
        self.packed = NOTHING
        self._armed = self._recorded = self._failure = None
        if self._mean is not None:
            # Aborted: until the ranks have a new group, peers may still write to these tensors.
            self._mean, self._aborted_flats = None, self._flats
            self._arrange(self._order)

    def arm(self, num_samples: int, weight: WindowWeight | None) -> None:
        """Send buckets during the backward pass that follows, the last one of the step.

        Args:
            weight: The weight of the step; ``None``: its samples.
        """
        if self._bucket_bytes is None:
            return
        if not self._has_order:
            self._recorded = []
            return
        if self._overlaps:
            self._armed = num_samples, weight
            for bucket in self._buckets:
                bucket.missing, bucket.sent = len(bucket.params), False

    def disarm(self) -> None:
        """End the backward pass.

        Raises:
            CollectiveAborted, CollectiveTimeout: Gradients could not be sent.
            ValueError: A parameter received its gradient in several parts.
        """
        if self._recorded is not None:
            noted, self._recorded = self._recorded, None
            self._own_order = noted if len(set(noted)) == len(noted) else [_REPEATED]
        self._armed = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abort_backward(self) -> None:
        """Abort the exchange after a failed backward pass: peers must not wait for this rank."""
        self._armed = self._recorded = self._failure = None
        if self._mean is not None:
            self.collective.abort()

    def gradient_ready(self, index: int) -> None:
        """Count a parameter's gradient. Runs in the backward pass's thread; does not raise."""
        if self._recorded is not None:
            self._recorded.append(index)
        if self._armed is None or self._failure is not None:
            return
        try:
            self._count(self._bucket_of[index])
        except BaseException as error:  # autograd would lose its origin
            self._failure = error

    def _count(self, bucket: _Bucket) -> None:
        bucket.missing -= 1
        if bucket.missing < 0:
            self.collective.abort()
            raise ValueError(
                "a parameter received its gradient in several parts within one backward pass, "
                "after part of it was sent to the other ranks: call bucket_cap_mb(None)"
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
            self._mean = self.collective.bucketed_mean(num_samples, tally=tally)
        bucket.sent = True
        self._timer.pause()  # an exchange may wait for the other ranks
        try:
            with self._comm(joined=False):
                self._mean.add([bucket.flat])
        finally:
            self._timer.resume()

    def _write(self, bucket: _Bucket, num_samples: int, weight: WindowWeight | None) -> None:
        """Copy the gradients of a bucket to its flat tensor."""
        views = [self._views[i] for i in bucket.params]
        grads = [self._params[i].grad for i in bucket.params]
        copy_gradients(views, grads, complete=not [g for g in grads if g is None])
        if weight is not None:
            torch._foreach_mul_(views, weight.unit / num_samples)

    def pack(
        self, num_samples: int, losses: Sequence[Tensor] = (), weight: WindowWeight | None = None
    ) -> None:
        """Write this rank's gradients, flags and losses to the flat tensors.

        Does not wait for the device. If every parameter has a gradient, it only issues work on
        the device and can be captured. With buckets, the first step of a group waits for the
        other ranks.

        Args:
            num_samples: Samples of this rank's gradients; 0: it only receives.
            weight: The weight of the step; ``None``: its samples.
        """
        if not self._has_order:
            self._agree_on_order()
        grads = [p.grad for p in self._params]
        complete = num_samples > 0 and not [g for g in grads if g is None]
        if num_samples > 0:
            if self._mean is None:
                copy_gradients(self._views, grads, complete=complete)
                if weight is not None:
                    torch._foreach_mul_(self._store.parts, weight.unit / num_samples)
            else:
                for bucket in self._waiting():
                    self._write(bucket, num_samples, weight)
            if complete:
                # In every step: the mean of a flag shrinks if a peer lacks the gradient.
                self._flags.fill_(1)
            else:
                flags = torch.tensor([g is not None for g in grads])
                self._flags.copy_(flags, non_blocking=True)
        if self._finite_check is not None:
            self._finite_check.write_flag(self._loss_flag, losses)
        if weight is not None:
            value = weight.units * (weight.unit / num_samples)
            if isinstance(value, Tensor):
                self._store.weight.copy_(value)
            else:
                self._store.weight.fill_(value)
        self.packed = PackedGradients(grads, complete=complete, weighed=weight is not None)

    def _waiting(self) -> Sequence[_Bucket]:
        """The buckets of this step that have not been sent."""
        if self._mean is None:
            return self._buckets
        return [bucket for bucket in self._buckets if not bucket.sent]

    def _agree_on_order(self) -> None:
        """Collective: use the recorded order of the lowest rank that has one, on all ranks."""
        num = len(self._params)
        mine = torch.full((num + 1,), _NO_ORDER, dtype=torch.int64)
        mine[: len(self._own_order)] = torch.tensor(self._own_order, dtype=torch.int64)
        gathered = mine.new_empty(self.collective.world_size * (num + 1))
        self._timer.pause()
        self.collective.agree(
            "averages gradients with", bucket_bytes=self._bucket_bytes, num_parameters=num
        )
        self.collective.all_gather_into(gathered, mine)
        self._timer.resume()
        rows = gathered.view(self.collective.world_size, -1).tolist()
        found = [row for row in rows if row[0] != _NO_ORDER]
        if not found:  # no rank had a sample
            return
        self._has_order = True
        self._overlaps = all(row[0] != _REPEATED for row in found)
        if self._overlaps:
            first = [i for i in found[0] if i >= 0]
            self._order = first + sorted(set(range(num)) - set(first))
        self._arrange(self._order)

    def can_end_async(self) -> bool:
        """True if the host need not read the device between the exchange and the packed step."""
        judged = self._finite_check is not None and self._finite_check.reads
        return self.collective.host_runs_ahead and self.packed.complete and not judged

    def exchange(self, num_samples: int, *, async_op: bool = False) -> bool:
        """Replace the packed values by their weighted mean over the ranks. Collective.

        Args:
            num_samples: As passed to :meth:`pack`.
            async_op: If :meth:`can_end_async`, do not wait: the step must be gated by
                :attr:`skip_flag`, and :meth:`take_pending_work` returns the pending result.

        Returns:
            False if the step was dropped, because a value was not finite. See also
            :attr:`is_empty`.

        Raises:
            NonFiniteError, CollectiveAborted: See :meth:`StepFiniteCheck.accept_reduced`.
        """
        self.is_empty = False
        weighed = {"tally": num_samples} if self.packed.weighed else {}
        try:
            with self._comm():
                if self._is_bucketed:
                    mean = self._mean or self.collective.bucketed_mean(num_samples, **weighed)
                    waiting = self._waiting()
                    self._mean = mean
                    mean.add([bucket.flat for bucket in waiting])
                    if self._store.weight_apart and self.collective.host_runs_ahead:
                        mean.add([self._store.weight])
                    if async_op:
                        total, self._pending_work = mean.end_async(self.skip_flag)
                    else:
                        total = mean.end()
                    self._mean = None
                else:
                    total = self.collective.weighted_mean_(self._flats, num_samples, **weighed)
        except BaseException:
            self._store.weight.zero_()
            raise
        # The same on every rank: part of the exchange.
        num_weighed = self.collective.tally
        if async_op:
            if self._sums:
                self._multiply(total)
            if num_weighed:
                self._divide_async((total - num_weighed) / total)
            return True
        mean_weight = self._mean_weight(total, num_weighed, num_samples) if num_weighed else 1.0
        if self._finite_check is not None and not self._finite_check.accept_reduced(
            self._flats, self._loss_flag, self.packed.grads, self.collective
        ):
            return False
        if num_weighed:
            self.is_empty = not mean_weight > 0
            if not self.is_empty:
                for flat in self._store.parts:
                    flat.div_(mean_weight)
        if self._sums:
            self._multiply(total)
        if self.collective.host_runs_ahead:
            self.skip_flag.zero_()
        return True

    def _multiply(self, total: float) -> None:
        for flat in self._store.parts:
            flat.mul_(total)

    def _divide_async(self, plain: float) -> None:
        """Divide by the reduced weight for each sample, a value on the device.

        Args:
            plain: The fraction of samples whose loss has no weight.
        """
        mean = self._store.weight + plain
        is_empty = (mean > 0).logical_not_().float().reshape(())
        torch.maximum(self.skip_flag, is_empty, out=self.skip_flag)
        for flat in self._store.parts:
            flat.div_(mean.to(flat.dtype))
        self._store.weight.zero_()

    def _mean_weight(self, total: float, num_weighed: float, num_samples: int) -> float:
        """The reduced weight for each sample; reads one number from the device.

        Args:
            total: Samples of all ranks.
            num_weighed: Samples of the ranks whose loss has a weight.
        """
        if self._store.weight_apart and not self.collective.host_runs_ahead:
            with self._comm():
                self.collective.weighted_mean_([self._store.weight], num_samples)
        mean = float(self._store.weight) + (total - num_weighed) / total
        self._store.weight.zero_()  # a rank without a weight writes nothing
        return mean

    def unpack(self) -> None:
        """Set the parameters' ``.grad`` to the reduced gradients."""
        used = None if self.packed.complete else (self._flags > 0).tolist()
        for i, (p, view) in enumerate(zip(self._params, self._views, strict=True)):
            p.grad = view if used is None or used[i] else None
        self.packed = PackedGradients([], complete=self.packed.complete)  # frees the own gradients

    def clip(self, max_norm: MaxNorm) -> None:
        """Clip the reduced gradients of all parameters by their norm."""
        max_norm.clip(self._params)

    def after_step(self) -> None:
        """Called after the optimizer's step."""


class PackedGradients(NamedTuple):
    """The gradients of a rank as packed for a reduction.

    Attributes:
        grads: Its own gradients, one for each parameter.
        complete: True if every parameter has one.
        weighed: True if the step's loss has a weight other than its samples.
    """

    grads: Sequence[Tensor | None]
    complete: bool
    weighed: bool = False


NOTHING = PackedGradients([], complete=False)


class Sharding(Protocol):
    """Shards the gradients and the optimizer's state of replicas over their ranks."""

    def shard(
        self,
        model: nn.Module,
        state: FlatState,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
    ) -> None:
        """Replace the parameters of ``state``, and those of the optimizer by this rank's shards.

        Collective.
        """

    def make_reducer(
        self,
        params: FlatParams,
        collective: Collective,
        finite_check: StepFiniteCheck | None,
        *,
        timer: StepTimer,
        sums: bool,
    ) -> GradientReducer:
        """The reducer of these parameters."""


class Comm(Protocol):
    """See :meth:`Device.comm`."""

    def __call__(self, *, joined: bool = True) -> AbstractContextManager[None]:
        """The context for a collective."""


def _no_context(*, joined: bool = True) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(slots=True)
class _Bucket:
    """Gradients that are sent together.

    Attributes:
        params: Indices of their parameters, none of them in another bucket.
        is_open: True if flags follow them, which are complete at the end of the step.
        missing: Number of gradients that the backward pass has not computed yet.
        sent: True if the bucket was sent.
    """

    params: Sequence[int]
    flat: Tensor
    is_open: bool
    missing: int = 0
    sent: bool = False


def _register_hooks(reducer: GradientReducer, params: Sequence[nn.Parameter]) -> list[Any]:
    """Call the reducer for each gradient, through a weak reference; returns the hooks' handles."""
    reference = weakref.ref(reducer)

    def hook(index: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if (reducer := reference()) is not None:
                reducer.gradient_ready(index)

        return arrived

    register = [p.register_post_accumulate_grad_hook for p in params]
    return [each(hook(i)) for i, each in enumerate(register)]  # type: ignore[no-untyped-call]
