"""Weighted average of the replicas' state on the CPU, and how far they are apart.

The arithmetic is in :mod:`coordinator.mixing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coordinator import host_memory
from coordinator.contents import Payload
from coordinator.mixing import Mix


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageResult:
    """What came out of a round.

    Attributes:
        average: The averaged state. Its tensors belong to the :class:`Averager`.
        num_samples: Sum of the weights; 0: the round changes nothing.
        divergences: ``||snapshot - average|| / ||average||`` over the parameters, one
            for each payload; 0 where ``||average|| <= 1e-10`` or ``num_samples == 0``,
            NaN or infinite where a snapshot is.
    """

    average: Payload
    num_samples: float
    divergences: tuple[float, ...]


class Averager:
    """Averages payloads into two result buffers used in turn.

    A result stays valid until the second :meth:`average` after the one that made it;
    copy what has to live longer. A coordinator that computes a round only after every
    rank has acknowledged the one before, or the one before was given up, keeps within
    that. Payloads are only read, and none is kept.

    Not thread-safe: one call at a time, from any thread. CPU only; blocks until done,
    with the intra-op threads of the calling thread.

    Args:
        serial: Mix without intra-op threads, whatever the settings: for small states, of
            which a team of threads would cost more than it brings.
    """

    def __init__(self, *, serial: bool = False) -> None:
        self._serial = serial
        self._results: list[Payload] = []
        self._turn = 0

    def average(
        self,
        payloads: Sequence[Payload],
        weights: Sequence[float],
        squares: Sequence[tuple[float, ...] | None] = (),
    ) -> AverageResult:
        """Average payloads of the same shapes and dtypes.

        float16 and bfloat16 are accumulated in float32, all others in their own
        precision; squared norms are summed over blocks in float64.

        Args:
            payloads: One for each rank, flat CPU tensors.
            weights: Of each payload, such as the samples behind it. One of weight 0 is not
                read into the average, so its values may be NaN. If all are 0 the result is a
                copy of the first payload.
            squares: For each payload the squared norm of each of its parameter tensors, or
                ``None``. Where all are known, of two ranks and in float32 or wider, the norm
                of the average follows from them and is not measured.

        Returns:
            The average, valid until the second call after this one. Buffers that are
            taken and not averaged come from the largest weight, the lowest rank first.

        Raises:
            ValueError: No payload, another number of weights, a negative weight, a
                tensor that is not on the CPU, or payloads that differ in shape or
                dtype, or squared norms of another number of payloads or tensors. Earlier
                results are then as they were.
        """
        _check(payloads, weights)
        _check_squares(payloads, squares)
        result = self._next_result(payloads[0])
        total = sum(weights)
        chosen = payloads[max(range(len(payloads)), key=lambda i: (weights[i], -i))]
        with torch.no_grad():
            _copy(result.taken, chosen.taken)
            if total == 0:
                _copy(result.params, payloads[0].params)
                _copy(result.buffers, payloads[0].buffers)
                return AverageResult(
                    average=result, num_samples=0, divergences=(0.0,) * len(payloads)
                )
            mix = Mix(weights, 0 if self._serial else torch.get_num_threads())
            known = _of_each_tensor(squares, len(result.params))
            params = zip(result.params, *(p.params for p in payloads), strict=True)
            for (out, *sources), square in zip(params, known, strict=True):
                mix.average(out, sources, measure=True, squares=square)
            for out, *sources in zip(result.buffers, *(p.buffers for p in payloads), strict=True):
                mix.average(out, sources, measure=False)
        return AverageResult(average=result, num_samples=total, divergences=mix.divergences)

    def _next_result(self, like: Payload) -> Payload:
        if self._results and _layout(self._results[0]) != _layout(like):
            self._results = []
        if len(self._results) < 2:
            self._results.append(payload_like(like))
            return self._results[-1]
        self._turn = 1 - self._turn
        return self._results[1 - self._turn]


def payload_like(payload: Payload) -> Payload:
    """A payload of the same shapes and dtypes whose values are not initialised."""
    return Payload(
        params=tuple(host_memory.empty_like(t) for t in payload.params),
        buffers=tuple(host_memory.empty_like(t) for t in payload.buffers),
        taken=tuple(host_memory.empty_like(t) for t in payload.taken),
    )


def clone_payload(payload: Payload) -> Payload:
    """A copy that shares no memory."""
    copied = payload_like(payload)
    for to, source in (
        (copied.params, payload.params),
        (copied.buffers, payload.buffers),
        (copied.taken, payload.taken),
    ):
        _copy(to, source)
    return copied


def usable_weights(samples: Sequence[float | None]) -> list[float]:
    """The weights of a round in which some states may not be used.

    Args:
        samples: Weight of each state, such as its samples; ``None``: not to be used.

    Returns:
        The weights, 0 for what is not used. Where that would leave nothing, the states that
        can be used and have no weight count alike, so that the others can take them.
    """
    weights = [n or 0 for n in samples]
    if any(weights) or None not in samples:
        return weights
    return [int(n is not None) for n in samples]


def _of_each_tensor(
    squares: Sequence[tuple[float, ...] | None], num_tensors: int
) -> Sequence[tuple[float, ...] | None]:
    """What is known of each tensor, for all payloads; ``None`` where one did not tell."""
    told = [of_payload for of_payload in squares if of_payload is not None]
    if not told or len(told) < len(squares):
        return [None] * num_tensors
    return list(zip(*told, strict=True))


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, tensor in zip(to, source, strict=True):
        target.copy_(tensor)


def _layout(payload: Payload) -> list[list[tuple[torch.Size, torch.dtype]]]:
    groups = (payload.params, payload.buffers, payload.taken)
    return [[(t.shape, t.dtype) for t in group] for group in groups]


def _check_squares(
    payloads: Sequence[Payload], squares: Sequence[tuple[float, ...] | None]
) -> None:
    if not squares:
        return
    if len(squares) != len(payloads):
        raise ValueError(f"{len(payloads)} payloads but the squared norms of {len(squares)}")
    for i, (payload, of_payload) in enumerate(zip(payloads, squares, strict=True)):
        if of_payload is not None and len(of_payload) != len(payload.params):
            raise ValueError(
                f"payload {i} has {len(payload.params)} parameter tensors but {len(of_payload)} "
                "squared norms: give one for each"
            )


def _check(payloads: Sequence[Payload], weights: Sequence[float]) -> None:
    if not payloads:
        raise ValueError("nothing to average: hand over at least one payload")
    if len(weights) != len(payloads):
        raise ValueError(
            f"{len(payloads)} payloads but {len(weights)} weights: give one for each payload"
        )
    if min(weights) < 0:
        raise ValueError(f"weights cannot be negative, got {list(weights)}")
    layout = _layout(payloads[0])
    for i, payload in enumerate(payloads):
        if _layout(payload) != layout:
            raise ValueError(
                f"payload {i} differs in shape or dtype from payload 0: {_layout(payload)} "
                f"instead of {layout}; every replica must hold the same model"
            )
        for tensor in (*payload.params, *payload.buffers, *payload.taken):
            if tensor.device.type != "cpu":
                raise ValueError(f"payload {i} is on {tensor.device}: send CPU tensors")
