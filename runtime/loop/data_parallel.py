"""Replicas in parallel under one call for each mini-batch."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from coordinator.config import ApplyPolicy, AverageBackend, choose_backend
from runtime.collective import Collective, create_collectives
from runtime.core.checks import check_callable, check_devices, check_float
from runtime.core.errors import (
    CollectiveAborted,
    CollectiveTimeout,
    NonFiniteError,
    ReplicaFailed,
    ReplicaMismatch,
)
from runtime.core.threads import IntraOpThreads
from runtime.data.batches import move_batch, parts_of
from runtime.device.base import Device
from runtime.device.cuda import open_device
from runtime.device.cuda_api import Event
from runtime.device.sync import StreamSync
from runtime.loop.rank_threads import Call, Outcome, RankThreads
from runtime.replica.build import (
    BuildOrder,
    ModelFactory,
    OptimFactory,
    Replica,
    Template,
    adopt,
    build_replica,
)
from runtime.replica.gradients import average_gradients, gradient_norm, has_non_finite
from runtime.replica.non_finite import first_bad
from runtime.replica.step import GradientReducer
from runtime.replica.weights import Weighted, check_weight

# -- A mini-batch cut for replicas: every sample once, in order --


def shard_samples(samples: Any, num_shards: int) -> list[Any]:
    """Cut samples into contiguous shards whose sizes differ by one at most.

    The later shards are the larger ones: 10 samples over 3 give 3, 3 and 4. With fewer
    samples than shards some shards are empty; no samples at all give no shards. Shards of
    tensors are views.

    What a sample is depends on the container:

    - a tensor, or a tuple, list or dict that holds tensors: *columns*, cut along their first
      dimension. The parts of a tuple or list that holds a tensor, and all values of a dict,
      are columns themselves, of any depth; a list of strings is one, for example. A tuple
      of nothing but containers is one of columns, too.
    - any other list, tuple or range: its elements are the samples. So a list of tensors is
      a list of columns, as a ``DataLoader`` gives it; stack tensors that are samples, or
      wrap each in a tuple.

    Args:
        samples: The mini-batch.
        num_shards: How many shards, at least 1.

    Returns:
        ``num_shards`` shards of the kind of ``samples``, or ``[]``.

    Raises:
        TypeError: Something that has no samples.
        ValueError: Columns of different lengths, a tensor without dimension, no columns.
    """
    if isinstance(num_shards, bool) or not isinstance(num_shards, int):
        raise TypeError(f"num_shards={num_shards!r}: pass a whole number")
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: must be at least 1")
    count = count_samples(samples)
    if count == 0:
        return []
    size, rest = divmod(count, num_shards)
    sizes = [size] * (num_shards - rest) + [size + 1] * rest
    return [_cut(samples, end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def count_samples(samples: Any) -> int:
    """How many samples there are; raises as :func:`shard_samples`."""
    lengths: dict[str, int] = {}
    _measure(samples, "samples", lengths)
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"columns must hold the same number of samples: {found}")
    if not lengths:
        raise ValueError(f"samples is an empty {type(samples).__name__}; pass at least one column")
    return next(iter(lengths.values()))


def holds_columns(samples: Any) -> bool:
    """Whether a container is cut by its parts, not between them."""
    if isinstance(samples, Mapping):
        return True
    if not isinstance(samples, (tuple, list)) or not samples:
        return False
    if any(isinstance(part, Tensor) for part in samples):
        return True
    return isinstance(samples, tuple) and all(
        isinstance(part, (tuple, list, Mapping)) for part in samples
    )


def _parts(samples: Any) -> list[tuple[Any, Any]]:
    return list(samples.items() if isinstance(samples, Mapping) else enumerate(samples))


def _measure(samples: Any, name: str, lengths: dict[str, int]) -> None:
    if isinstance(samples, Tensor):
        if samples.ndim == 0:
            raise ValueError(
                f"{name} is a tensor without dimension: its first one counts the samples"
            )
        lengths[name] = len(samples)
    elif holds_columns(samples):
        for key, part in _parts(samples):
            _measure(part, f"{name}[{key!r}]", lengths)
    elif isinstance(samples, Sequence) and not isinstance(samples, (str, bytes)):
        lengths[name] = len(samples)
    else:
        raise TypeError(
            f"{name} is a {type(samples).__name__}: pass tensors, tuples, lists or dicts of "
            "them, or a list of samples"
        )


def _cut(samples: Any, start: int, stop: int) -> Any:
    if not holds_columns(samples):
        return samples[start:stop]
    parts = {key: _cut(part, start, stop) for key, part in _parts(samples)}
    if isinstance(samples, Mapping):
        return parts
    if hasattr(samples, "_fields"):
        return type(samples)(*parts.values())
    return type(samples)(parts.values())


# -- The threads of replicas, with their devices, their cores and their collective --


def start_threads(
    devices: Sequence[torch.device], backend: AverageBackend
) -> tuple[list[Device], Sequence[Collective], RankThreads]:
    """Start a thread for each replica, inside its device's context.

    The last thread to end closes the collective and gives the intra-op threads back.

    Args:
        devices: The replicas' devices.
        backend: The resolved transport.

    Returns:
        Device objects, ends of the collective (none for one device), and the threads.
    """
    num_cpu = sum(device.type == "cpu" for device in devices)
    contexts = [open_device(device, num_cpu) for device in devices]
    kind = backend.value if backend in (AverageBackend.NCCL, AverageBackend.GLOO) else "thread"
    ends = create_collectives(len(devices), kind, devices) if len(devices) > 1 else []
    IntraOpThreads.acquire()

    def on_end() -> None:
        IntraOpThreads.release()
        for end in ends:
            end.close()

    # Once the threads are made they end everything, even if one could not be started.
    activate = [c.activate for c in contexts]
    return contexts, ends, RankThreads("data-parallel", activate, on_end, lend=num_cpu)


def first_error(outcomes: Sequence[Outcome]) -> tuple[int, BaseException | None]:
    """The first failure that is not the echo of another rank's."""
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    echoes = (CollectiveAborted, CollectiveTimeout)
    first = [(rank, e) for rank, e in failed if not isinstance(e, echoes)]
    return next(iter(first or failed), (0, None))


def kind_of(device: torch.device) -> str:
    """What replicas must share to compute the same bits."""
    if device.type == "cpu":
        return device.type
    return str(torch.cuda.get_device_properties(device).name)


# -- Work that all replicas of a loop do at once, and whether they are alike after it --

SETTLE_S = 30.0
"""How long Ctrl-C waits for the replicas to come to the end of what they are doing."""


class LoopCalls:
    """Calls of one thread to the threads of replicas.

    Ctrl-C may come between any two lines of the caller: every piece of work is done by all
    replicas or by none, and what went wrong is known at the next call at the latest.

    Args:
        threads: Of the replicas.
        devices: Of the replicas.

    Attributes:
        fault: Why the replicas may differ for good.
        num_batches: Batches trained, for errors.
    """

    def __init__(self, threads: RankThreads, devices: Sequence[torch.device]) -> None:
        self._threads = threads
        self._devices = devices
        self._changing: Call | None = None
        self.fault: str | None = None
        self.num_batches = 0

    def check(self) -> None:
        """Raises ``RuntimeError`` where nothing can be done with the replicas any more."""
        self._judge()
        if self._threads.closed:
            raise RuntimeError("this DataParallelCoordinator is closed; build a new one")
        if self.fault is not None:
            raise RuntimeError(
                f"the replicas may differ, for {self.fault}; build a new DataParallelCoordinator "
                "from a saved state"
            )

    def run(self, work: Callable[[int], Any], *, changes: bool = False) -> list[Outcome]:
        """Let every replica's thread work, and wait for all of them.

        Args:
            work: A replica's part.
            changes: Whether the replicas differ if it fails on one of them.
        """
        call = self._threads.new_call(work)
        self._changing = call if changes else None
        before = self.fault
        try:
            self._threads.deliver(call)
            call.wait()
        except BaseException:  # Ctrl-C: leave no thread at work on the replicas
            self.fault = "it was interrupted, and a replica did not come to an end"
            if call.is_begun:
                self._threads.deliver(call)  # to those that it has not reached
                if not call.wait(SETTLE_S):
                    raise
            self.fault = before
            raise
        return call.outcomes

    def settle(self, work: Callable[[int], Any]) -> None:
        """As :meth:`run`, for work that leaves the replicas different if it fails.

        Raises:
            ReplicaFailed: It did.
        """
        outcomes = self.run(work, changes=True)
        self._judge()
        self.values(outcomes)

    def values(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """What the replicas returned; raises ``ReplicaFailed`` for the first that failed."""
        rank, error = first_error(outcomes)
        if error is not None:
            what = f"batch {self.num_batches}"
            raise ReplicaFailed(rank, str(self._devices[rank]), what, error) from error
        return [outcome.value for outcome in outcomes]

    def _judge(self) -> None:
        """Take note if the last change failed; Ctrl-C may have come before that was seen."""
        if self._changing is not None:
            rank, error = first_error(self._changing.outcomes)
            if error is not None:
                self.fault = f"rank {rank} failed while the replicas were changed"
            self._changing = None


# -- One replica of a :class:`~runtime.loop.data_parallel.DataParallelCoordinator`, in its thread
# --

LossFn = Callable[[nn.Module, Any], Any]


class Part(NamedTuple):
    """What a replica made of its samples.

    Attributes:
        loss: Their mean loss.
        second: What ``loss_fn`` gave beside it in a tuple of two, to be read with that of the
            other replicas.
        weight: What the loss is a mean over; ``None``: the samples.
        correct: How many of them were right, as ``loss_fn`` counted.
    """

    loss: float = 0.0
    second: float | None = None
    weight: float | None = None
    correct: int = 0


class Reduced(NamedTuple):
    """A replica's view of the averaged gradients.

    Attributes:
        norm: Their L2 norm; not finite exactly if one of them is not.
        bad: The first parameter whose gradient was not finite on this replica before.
    """

    norm: float
    bad: str | None = None


class LoopReplica:
    """A model, its optimizer and its part in each batch. Every method runs in its thread.

    Args:
        replica: The built replica.
        device: Where it lives; the thread is inside its ``activate()``.
        collective: Where gradients are averaged; ``None``: there is one replica.

    Attributes:
        modules: The model and everything in it, in one order on every replica.
        tensors: All its parameters, frozen ones too, in one order on every replica.
    """

    def __init__(self, replica: Replica, device: Device, collective: Collective | None) -> None:
        self.model = replica.model
        self.optimizer = replica.optimizer
        # PyTorch takes the tensors of a state as they are, and each replica needs its own.
        self.optimizer.register_load_state_dict_pre_hook(lambda _, state: copy.deepcopy(state))
        self.modules = list(replica.model.modules())
        self.tensors = list(replica.model.parameters())
        self._state = replica.state
        self._params = replica.state.params.params
        self._names = replica.state.params.names
        self._device = device
        self._reducer: GradientReducer | None = None
        if collective is not None:
            self._reducer = GradientReducer(replica.state.params, collective, comm=device.comm)
        device.pin_accumulators(self._params)
        self._kept: list[Tensor] = []
        self._checked = False

    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now; a module may replace them."""
        return self._state.buffers.tensors()

    def forward_backward(
        self, loss_fn: LossFn, samples: Any, num_samples: int, behind: Sequence[Event]
    ) -> Part:
        """Compute the gradients of a shard. The parameters stay as they are.

        Args:
            loss_fn: The user's.
            samples: The shard; tensors in columns are moved to the device.
            num_samples: Its size; 0: nothing is computed.
            behind: Marks in the caller's streams, which the device's work must wait for.
        """
        StreamSync().wait(self._device.device, behind)
        self._state.params.check()
        self._kept = [buffer.clone() for buffer in self.buffers()]
        self._forget_gradients()
        if num_samples == 0:
            return Part()
        if isinstance(samples, Tensor) or holds_columns(samples):
            samples = move_batch(samples, self._device.device)
        loss, told = _check_result(loss_fn(self.model, samples))
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._checked:
            self._check_gradients()
        return told._replace(loss=float(loss.detach()))

    def reduce(self, weight: float) -> Reduced:
        """Average the gradients with those of the other replicas; not all weights are 0."""
        own = [p.grad for p in self._params]
        if self._reducer is not None:
            try:
                amount: Any = weight
                self._reducer.pack(amount)
                self._reducer.exchange(amount)
                self._reducer.unpack()
            except BaseException:
                self._reducer.collective.abort()  # the peers wait for this rank
                raise
        grads = self._gradients()
        norm = gradient_norm(grads)
        if math.isfinite(norm):
            return Reduced(norm)
        return Reduced(norm, first_bad(self._names, own))

    def step(self, factor: float, source: LoopReplica) -> None:
        """Scale the gradients, let the optimizer step, take over another replica's buffers.

        Waits for the device: what the replica holds may be read anywhere afterwards.

        Args:
            factor: What to multiply the gradients with.
            source: Whose buffers every replica has afterwards.
        """
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        self.optimizer.step()
        with torch.no_grad():
            for target, value in zip(self.buffers(), source.buffers(), strict=True):
                if target is not value:
                    target.copy_(value)
        self._kept = []
        self._device.finish()

    def undo(self) -> None:
        """Take the batch back: the buffers are as they were, and there are no gradients."""
        with torch.no_grad():
            for buffer, kept in zip(self.buffers(), self._kept, strict=False):
                buffer.copy_(kept)
        self._kept = []
        self._forget_gradients()
        self._device.finish()

    def copy_optimizer(self, source: LoopReplica) -> None:
        """Take over the state and settings of another replica's optimizer, which rests."""
        self.optimizer.load_state_dict(source.optimizer.state_dict())
        self._device.finish()

    def copy_params(self, source: LoopReplica) -> None:
        """Take over another replica's trainable parameters, which nobody changes meanwhile."""
        with torch.no_grad():
            flats = zip(self._state.params.flats, source._state.params.flats, strict=True)
            for target, value in flats:
                target.copy_(value)
        self._device.finish()

    def copy_all(self, source: LoopReplica, rank: int, behind: Sequence[Event]) -> None:
        """Take over every tensor of another replica's model, frozen ones and buffers too."""
        StreamSync().wait(self._device.device, behind)
        adopt(self.model, Template.of(source.model), rank)
        self._device.finish()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._params if p.grad is not None]

    def _forget_gradients(self) -> None:
        for p in self._params:
            p.grad = None

    def _check_gradients(self) -> None:
        if not self._gradients():
            raise ValueError(
                "loss_fn's loss reaches no trainable parameter: every gradient is None after "
                "backward; compute the loss with the model that loss_fn is given"
            )
        for name, p in zip(self._names, self._params, strict=True):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which replicas cannot average: "
                    "build the embedding with sparse=False"
                )
        self._checked = True


def _check_result(result: object) -> tuple[Tensor, Part]:
    """The mean loss, and what else ``loss_fn`` gave."""
    loss, part = result, Part()
    if isinstance(result, Weighted):
        loss = result.loss
        weight, correct = host_weight(result.weight), read_correct(_number(result.correct))
        part = Part(weight=weight, correct=correct)
    elif isinstance(result, tuple) and len(result) == 2:
        loss, part = result[0], Part(second=_number(result[1]))
    elif isinstance(result, tuple) and len(result) == 3:
        loss, correct, weight = result
        part = Part(weight=host_weight(weight), correct=read_correct(_number(correct)))
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(result).__name__}: return the mean loss of the samples as a "
            "tensor, (loss, weight), (loss, number correct), or Weighted(loss, weight, correct)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}: return a scalar, the mean loss "
            "of the samples, for instance loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient: compute it from the model's output "
            "outside torch.no_grad(), and do not detach it"
        )
    return loss, part


def _number(value: object) -> float:
    """A number that ``loss_fn`` gave beside the loss."""
    found = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(found, bool) or not isinstance(found, Real):
        raise TypeError(
            f"loss_fn returned (loss, {type(value).__name__}): the second is the number of "
            "samples that were right, for instance (logits.argmax(1) == y).sum(), or the loss's "
            "weight, for instance (labels != -100).sum()"
        )
    return float(found)


def host_weight(value: object) -> float:
    """A weight as a number; the host has read the loss already."""
    weight = check_weight("the weight that loss_fn returned", value)
    return weight if isinstance(weight, float) else check_weight("weight", weight.cpu())  # type: ignore[return-value]


def read_correct(number: float) -> int:
    """A number of samples that were right."""
    if not number.is_integer() or number < 0:
        raise ValueError(
            f"loss_fn returned (loss, {number:g}): the second is the number of samples that were "
            "right, not their share; for instance (logits.argmax(1) == y).sum(). If it is the "
            "loss's weight, return runtime.Weighted(loss, weight)"
        )
    return int(number)


class Seconds:
    """Reads what ``loss_fn`` gives beside the loss in a tuple of two: a weight, or a count.

    All replicas' numbers of a batch are read alike. They are weights if one of them cannot be
    a number of right samples: it exceeds the replica's samples, or is a fraction above 1. From
    then on they always are. Until then they count right samples.
    """

    def __init__(self) -> None:
        self._are_weights = False
        self._were_counts = False

    def look(self, parts: Sequence[Part], counts: Sequence[int]) -> None:
        """Find out what the numbers of a batch are.

        Raises:
            ValueError: These are weights, and earlier ones were taken for counts.
        """
        told = [(p.second, n) for p, n in zip(parts, counts, strict=True) if p.second is not None]
        if not self._are_weights and any(s > n or (s > 1 and s % 1) for s, n in told):
            if self._were_counts:
                raise ValueError(
                    "loss_fn returned (loss, number), and the number can be no count of right "
                    "samples, for which earlier ones were taken: return runtime.Weighted(loss, "
                    "weight), or (loss, correct, weight)"
                )
            self._are_weights = True
        if not self._are_weights:
            self._were_counts = self._were_counts or any(s for s, _ in told)

    def read(self, part: Part) -> Part:
        """A replica's part with its number in its place.

        Raises:
            ValueError: It is neither a weight nor a count.
        """
        if part.second is None:
            return part
        if self._are_weights:
            return part._replace(weight=host_weight(part.second))
        return part._replace(correct=read_correct(part.second))


# -- What the caller does to the first replica's model holds for all replicas --

Seen = list[tuple[Tensor, int]]


class LoopMirror:
    """Compares the first replica with what it was and with the others.

    In the caller's thread, while the replicas rest. Modes and frozen parameters are compared
    with the other replicas' own, for ``loss_fn`` may change those too. Values are compared by
    PyTorch's count of writes in place.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._replicas = replicas
        self._first, *self._others = replicas
        self._homes = [
            (module._parameters, key, p, f"{prefix}.{key}" if prefix else key, p.requires_grad)
            for prefix, module in self._first.model.named_modules()
            for key, p in module._parameters.items()
            if p is not None
        ]
        self._seen = self._look()

    def follow_flags(self) -> None:
        """Pass modes and frozen parameters on.

        Raises:
            RuntimeError: A parameter was replaced, or unfrozen that is not trained.
        """
        for parameters, key, p, name, is_trained in self._homes:
            if parameters.get(key) is not p:
                raise RuntimeError(
                    f"parameter {name!r} of the primary was replaced, and the optimizers hold the "
                    "old one: write to it in place (p.copy_(...), load_state_dict without "
                    "assign=True)"
                )
            if p.requires_grad and not is_trained:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the replicas were built, so no optimizer "
                    "holds it: leave it trainable in model_factory, and freeze it on the primary "
                    "until it shall be trained"
                )
        self._take_out_of_inference()
        for other in self._others:
            for module, its in zip(self._first.modules, other.modules, strict=True):
                if its.training is not module.training:
                    its.training = module.training
            for p, its_p in zip(self._first.tensors, other.tensors, strict=True):
                if its_p.requires_grad is not p.requires_grad:
                    its_p.requires_grad_(p.requires_grad)

    def _take_out_of_inference(self) -> None:
        """Replace the buffers that the primary's forward made in inference mode.

        Nobody else may write to those.
        """
        for module in self._first.modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_inference():
                    with torch.inference_mode(False):
                        module._buffers[key] = buffer.clone()

    def follow_settings(self) -> None:
        """Give every optimizer the settings of the first one's groups.

        Raises:
            RuntimeError: It has other groups than it was built with.
        """
        groups = self._first.optimizer.param_groups
        for other in self._others:
            own = other.optimizer.param_groups
            if [len(g["params"]) for g in own] != [len(g["params"]) for g in groups]:
                raise RuntimeError(
                    "the first optimizer has other parameter groups than the others: build all "
                    "groups in optim_factory"
                )
            for group, its in zip(groups, own, strict=True):
                for key, value in group.items():
                    if key == "params":
                        continue
                    if isinstance(value, Tensor) and isinstance(its.get(key), Tensor):
                        its[key].copy_(value)
                    elif its.get(key) is not value:
                        its[key] = value

    def is_changed(self) -> bool:
        """Whether tensors of the first replica were written to since :meth:`are_alike`."""
        now = self._look()
        return len(now) != len(self._seen) or any(
            tensor is not old or version != old_version
            for (tensor, version), (old, old_version) in zip(now, self._seen, strict=True)
        )

    def check(self) -> None:
        """Make sure that the others can take over what the first has.

        Raises:
            ReplicaMismatch: They cannot; names the first difference.
        """
        first = Template.of(self._first.model)
        for rank, other in enumerate(self._others, 1):
            difference = first.first_difference(Template.of(other.model))
            if difference is not None:
                raise ReplicaMismatch(
                    f"replica {rank} cannot follow the primary: {difference}; change tensors in "
                    "place and keep their shapes, or build a new DataParallelCoordinator"
                )

    def are_alike(self) -> None:
        """All replicas hold what the first one holds now."""
        self._seen = self._look()

    def _look(self) -> Seen:
        tensors = (*self._first.tensors, *self._first.buffers())
        return [(t, -1 if t.is_inference() else t._version) for t in tensors]


_REMEDY = (
    "No replica was changed. Lower the learning rate, set max_grad_norm, or guard the loss "
    "against such batches"
)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a mini-batch.

    Attributes:
        avg_loss: Mean loss of its samples, or weighted by what ``loss_fn`` gave. 0 where all
            weights are 0: then no optimizer has stepped.
        correct: How many of them were right; 0 where ``loss_fn`` does not count them.
        total: How many there were.
        grad_norm: L2 norm of the averaged gradient, before it was clipped.
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float


class DataParallelCoordinator:
    """Trains one model on several devices, a mini-batch at a time, in the user's own loop.

    Each replica runs in a thread of its own, ``data-parallel-<rank>``, which lives until
    :meth:`close`; replicas on the CPU share its cores out. Every :meth:`train_batch` leaves
    all replicas with the same parameters and buffers, bit for bit on devices of one kind
    and with an optimizer that draws no random numbers. On devices of different kinds every
    replica takes over replica 0's parameters after each step. Replicas on the CPU share
    PyTorch's process-wide generator, so dropout there draws in no fixed order.

    One thread uses it at a time. A context manager; also closed when it is garbage and when
    the interpreter exits.

    Args:
        model_factory: ``f(device) -> nn.Module``, called in each replica's thread, one at a
            time, replica 0 first. All start from replica 0's weights. Which parameters are
            trainable is settled then; only those travel.
        optim_factory: ``f(params) -> Optimizer`` with the trainable parameters. Their memory
            has been moved by then: keep parameters, not ``.data``.
        loss_fn: ``f(model, samples)`` gives the mean loss of the samples; ``(loss, weight)``
            where it is a mean over something else (tokens, a sum of class weights); ``(loss,
            number correct)``; ``(loss, number correct, weight)``; or a :class:`Weighted`, which
            leaves nothing to guess. In a tuple of two the number is a weight if, on any
            replica of the batch, it exceeds the number of samples or is a fraction above 1,
            and stays one for good; otherwise it counts right samples. If that turns out wrong
            later it is an error. So where a weight may never exceed the samples (one label a
            sample), return a :class:`Weighted`. Replicas of weight 0 add nothing, even if
            their loss is NaN. Runs in the replicas' threads at once; enter autocast there.
        devices: One for each replica; a device may stand more than once.
        backend: How gradients travel, as for :class:`~runtime.trainer.Trainer` under SYNC.
        max_grad_norm: Clip the averaged gradient's norm to this; ``None``: leave it.

    Attributes:
        backend: The resolved transport.
        backend_reason: A sentence that says why.

    Raises:
        TypeError, ValueError: A wrong argument, models that differ, or what a factory raises.
    """

    shard_samples = staticmethod(shard_samples)
    average_gradients = staticmethod(average_gradients)
    has_non_finite = staticmethod(has_non_finite)

    def __init__(
        self,
        model_factory: ModelFactory,
        optim_factory: OptimFactory,
        loss_fn: LossFn,
        devices: Sequence[torch.device | str],
        *,
        backend: AverageBackend = AverageBackend.AUTO,
        max_grad_norm: float | None = None,
    ) -> None:
        check_callable("model_factory", model_factory, "f(device) -> torch.nn.Module")
        check_callable("optim_factory", optim_factory, "f(params) -> Optimizer")
        check_callable(
            "loss_fn", loss_fn, "f(model, samples) -> loss, (loss, weight) or (loss, correct)"
        )
        if isinstance(devices, Sequence) and not devices:
            raise ValueError(
                "devices is empty: name one device for each replica, as ['cpu', 'cpu']"
            )
        self._devices = check_devices(devices)
        self._loss_fn = loss_fn
        self._max_grad_norm = max_grad_norm
        if max_grad_norm is not None:
            self._max_grad_norm = check_float("max_grad_norm", max_grad_norm, 0, above=True)
        if not isinstance(backend, AverageBackend):
            raise TypeError(f"backend={backend!r}; pass an AverageBackend")
        self.backend, self.backend_reason = choose_backend(
            backend,
            ApplyPolicy.SYNC,
            [str(device) for device in self._devices],
            nccl_available=torch.distributed.is_available()
            and torch.distributed.is_nccl_available(),
        )
        self._unlike = len({kind_of(device) for device in self._devices}) > 1
        self._seconds = Seconds()
        self._busy = threading.Lock()
        self._alike = True
        contexts, ends, self._threads = start_threads(self._devices, self.backend)
        self._calls = LoopCalls(self._threads, self._devices)
        try:
            self._replicas = self._build(model_factory, optim_factory, contexts, ends)
        except BaseException:
            self._threads.close()
            raise
        self._mirror = LoopMirror(self._replicas)
        # Appended to: the hook must not keep this object and its threads alive.
        self._loaded: list[torch.optim.Optimizer] = []
        self._replicas[0].optimizer.register_load_state_dict_post_hook(self._loaded.append)

    def _build(
        self,
        model_factory: ModelFactory,
        optim_factory: OptimFactory,
        contexts: Sequence[Device],
        ends: Sequence[Collective],
    ) -> list[LoopReplica]:
        order = BuildOrder()

        def build(rank: int) -> LoopReplica:
            device = contexts[rank]
            replica = build_replica(
                order, rank, device.device, model_factory, optim_factory, finish=device.finish
            )
            built = LoopReplica(replica, device, ends[rank] if ends else None)
            device.finish()
            return built

        try:
            outcomes = self._calls.run(build)
        finally:
            order.forget()  # wakes whoever waits for replica 0
        rank, error = first_error(outcomes)
        if error is not None:
            error.add_note(f"while replica {rank} was built on {self._devices[rank]}")
            raise error
        return [outcome.value for outcome in outcomes]

    # -- what there is ------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """Number of replicas."""
        return len(self._devices)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each replica's device."""
        return self._devices

    @property
    def primary(self) -> nn.Module:
        """Replica 0's model, to evaluate and save; it stays usable after :meth:`close`.

        What is changed here between two batches holds for all replicas from the next one on:

        - the mode of each module: call ``primary.train()`` after an evaluation in ``eval()``
          mode;
        - which parameters are frozen, of those that were trainable when it was built;
        - parameters and buffers that were written to in place, as ``load_state_dict`` does,
          or buffers that were replaced by others of their shapes.

        PyTorch counts writes in place, and that tells of them. It does not count those through
        ``.data`` and by fused optimizers: call :meth:`sync_params` after these. Parameters that
        were replaced are an error.
        """
        return self._replicas[0].model

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Every replica's model."""
        return tuple(replica.model for replica in self._replicas)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Every replica's optimizer.

        Settings of the first one, a learning rate or what a scheduler sets, and a state that is
        loaded into it, hold for all from the next batch on. Save the first one's; load it there.
        """
        return tuple(replica.optimizer for replica in self._replicas)

    # -- training -----------------------------------------------------------------------

    def train_batch(self, samples: Any) -> BatchResult:
        """Train all replicas on a mini-batch, cut among them; blocks until they are done.

        The step is that of one device on the whole mini-batch, apart from what a model
        computes over a batch (batch norm). The buffers of the first replica that had
        samples are copied to all. If anything goes wrong before the step, every replica is
        as it was before the call, without gradients, and training may go on; but a replica
        that fails in the middle of the averaging breaks the group, and this object, for good.

        Args:
            samples: As for :func:`~runtime.shard_samples`. Tensors in columns are
                moved to each replica's device; lists of samples are handed over as they
                are. With fewer samples than replicas some have none, and take the step all
                the same. Work on the caller's current streams is waited for.

        Raises:
            TypeError, ValueError: Samples that cannot be cut, or none.
            ReplicaFailed: A replica failed; names its rank, with the original as the cause.
            ReplicaMismatch: A buffer of the primary was replaced by one of another shape.
            NonFiniteError: A loss or a gradient is NaN or infinite. No optimizer has stepped.
            RuntimeError: Closed, broken by an earlier failure within a step, or in use; a
                parameter of the primary was replaced, or unfrozen which was frozen when it
                was built.
            KeyboardInterrupt: Ctrl-C. Each replica has come to the end of what it was doing,
                so either all or none have stepped; the next call puts right what is left.
        """
        with self._turn():
            total = count_samples(samples)
            if total == 0:
                raise ValueError("train_batch got no samples; leave the call out")
            shards = shard_samples(samples, self.num_devices)
            counts = [count_samples(shard) for shard in shards]
            self._mirror.follow_flags()
            self._mirror.follow_settings()
            marks = self._marks(samples)
            if self._loaded:
                self._copy_from_primary(lambda r, _: r.copy_optimizer(self._replicas[0]))
                self._loaded.clear()
            if not self._alike or self._mirror.is_changed():
                self._copy_all(marks)
            self._alike = False  # until the end: Ctrl-C may come between any two lines
            try:
                loss, correct, weights = self._compute(shards, counts, marks)
                if not any(weights):
                    self._undo()
                    self._are_alike()
                    return BatchResult(0.0, correct, total, 0.0)
                norm = self._reduce(weights)
            except BaseException:
                if self._calls.fault is None:
                    self._undo()
                    self._are_alike()
                raise
            self._step(norm, counts)
            self._calls.num_batches += 1
            self._are_alike()
        return BatchResult(loss, correct, total, norm)

    def _compute(
        self, shards: Sequence[Any], counts: Sequence[int], marks: Sequence[Event]
    ) -> tuple[float, int, list[float]]:
        """Every replica's gradients; the mean loss, the number correct, and the weights."""
        outcomes = self._calls.run(
            lambda rank: self._replicas[rank].forward_backward(
                self._loss_fn, shards[rank], counts[rank], marks
            )
        )
        found = self._calls.values(outcomes)
        self._seconds.look(found, counts)
        parts = []
        for rank, part in enumerate(found):
            try:
                parts.append(self._seconds.read(part))
            except ValueError as error:
                what = f"batch {self._calls.num_batches}"
                raise ReplicaFailed(rank, str(self._devices[rank]), what, error) from error
        told = [part.weight is not None for part, n in zip(parts, counts, strict=True) if n]
        if any(told) and not all(told):
            raise ValueError(
                "loss_fn returned a weight on some replicas only, and what the others' losses are "
                "means over is not known: return it for every shard, 0 where nothing counts"
            )
        weights = [
            float(n) if part.weight is None else part.weight
            for part, n in zip(parts, counts, strict=True)
        ]
        counted = [(part.loss, weight) for part, weight in zip(parts, weights, strict=True)]
        for rank, (loss, weight) in enumerate(counted):
            if weight and not math.isfinite(loss):
                raise NonFiniteError(rank, self._calls.num_batches, "loss", remedy=_REMEDY)
        mean = sum(loss * weight for loss, weight in counted if weight) / (sum(weights) or 1.0)
        return mean, sum(part.correct for part in parts), weights

    def _reduce(self, weights: Sequence[float]) -> float:
        """Average the gradients on all replicas; their norm."""
        outcomes = self._calls.run(lambda rank: self._replicas[rank].reduce(weights[rank]))
        if (error := first_error(outcomes)[1]) is not None:
            self._calls.fault = (
                f"their gradients could not be averaged ({error}), and the group is broken"
            )
        reduced = self._calls.values(outcomes)
        bad = [rank for rank, r in enumerate(reduced) if not math.isfinite(r.norm)]
        if bad:
            rank = next((r for r in bad if weights[r] and reduced[r].bad is not None), bad[0])
            name = reduced[rank].bad
            number = self._calls.num_batches
            raise NonFiniteError(rank, number, "gradient", name, remedy=_REMEDY)
        return float(reduced[0].norm)

    def _step(self, norm: float, counts: Sequence[int]) -> None:
        factor = 1.0
        if self._max_grad_norm is not None:
            factor = min(1.0, self._max_grad_norm / (norm + 1e-6))
        source = self._replicas[next(rank for rank, n in enumerate(counts) if n)]
        self._calls.settle(lambda rank: self._replicas[rank].step(factor, source))
        if self._unlike:
            self._copy_from_primary(lambda r, _: r.copy_params(self._replicas[0]))

    def sync_params(self) -> None:
        """Give every replica the primary's parameters, frozen ones too, and buffers.

        Needed after changes that PyTorch does not count, see :attr:`primary`; others are
        followed without it. Blocks until it is done. Optimizer states stay as they are.

        Raises:
            ReplicaMismatch, RuntimeError: As :meth:`train_batch`.
        """
        with self._turn():
            self._mirror.follow_flags()
            self._copy_all(self._marks(()))

    def _copy_all(self, marks: Sequence[Event]) -> None:
        """Give every replica all tensors of the primary's."""
        self._mirror.check()
        if not self._alike:
            self._undo()  # of a batch that was interrupted; nothing where it was stepped
        self._alike = False
        self._copy_from_primary(lambda r, rank: r.copy_all(self._replicas[0], rank, marks))
        self._are_alike()

    def _undo(self) -> None:
        self._calls.settle(lambda rank: self._replicas[rank].undo())

    def _are_alike(self) -> None:
        self._mirror.are_alike()
        self._alike = True

    def _copy_from_primary(self, copy: Callable[[LoopReplica, int], None]) -> None:
        self._calls.settle(lambda rank: copy(self._replicas[rank], rank) if rank else None)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._busy.locked():
            raise RuntimeError(
                "this DataParallelCoordinator is at work already: call it from one thread at a "
                "time, and not from loss_fn"
            )
        with self._busy:  # not acquire(): Ctrl-C could come before a try
            self._calls.check()
            yield

    def _marks(self, samples: Any) -> list[Event]:
        """Events in the caller's current streams of every GPU that plays a part."""
        tensors = [part for part in parts_of(samples) if isinstance(part, Tensor)]
        return StreamSync(self._devices).marks(tensors)

    # -- the end ------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and wait for them; gives the intra-op threads back. Idempotent.

        Raises:
            RuntimeError: A thread does not come back from user code.
        """
        self._threads.close()

    def __enter__(self) -> DataParallelCoordinator:
        """Close when the block is left."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
