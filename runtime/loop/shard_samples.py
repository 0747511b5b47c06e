"""Cuts a mini-batch into shards of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from runtime.core.nested import (
    cut_attributes,
    cuts_itself,
    is_batch,
    items_of,
    like,
    num_rows,
    piece_of,
    with_items,
)


def shard_samples(samples: Any, num_shards: int) -> list[Any]:
    """Cut samples into contiguous shards whose sizes differ by at most one.

    The later shards are larger: 10 samples over 3 shards give 3, 3 and 4. With fewer samples
    than shards some shards are empty; no samples at all give no shards. Shards of tensors are
    views.

    The container determines the samples:

    - a tensor, or a tuple, list or dict that holds tensors: *columns*, cut along their first
      dimension. The parts of a tuple or list that holds a tensor, and all values of a dict,
      are columns themselves, of any depth; for example, a list of strings is a column. A tuple
      that holds only containers is one of columns, too.
    - a dataclass, and an object with a ``batch_size`` or ``to(device)``: cut by its class, by
      slices, ``split`` or its constructor.
    - any other list, tuple or range: its elements are the samples. So a list of tensors is a
      list of columns, as a ``DataLoader`` yields it; if each tensor is a sample, stack them or
      wrap each in a tuple.

    Args:
        samples: The mini-batch.
        num_shards: Number of shards, at least 1.

    Returns:
        ``num_shards`` shards of the kind of ``samples``, or ``[]``.

    Raises:
        TypeError: A value cannot hold samples.
        ValueError: Columns differ in length, a tensor has no dimension, or there are no columns.
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
    ends = zip(sizes, accumulate(sizes), strict=True)
    return [_slice(samples, end - n, end, count) for n, end in ends]


def count_samples(samples: Any) -> int:
    """The number of samples; raises as :func:`shard_samples`."""
    lengths: dict[str, int] = {}
    _update_shares(samples, "samples", lengths)
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"columns must hold the same number of samples: {found}")
    if not lengths:
        raise ValueError(f"samples is an empty {type(samples).__name__}; pass at least one column")
    return next(iter(lengths.values()))


def holds_columns(samples: Any) -> bool:
    """True if a container's parts are columns, each of which is cut."""
    if isinstance(samples, Mapping):
        return not cuts_itself(samples)
    if not isinstance(samples, (tuple, list)) or not samples:
        return False
    if any(isinstance(part, Tensor) for part in samples):
        return True
    return isinstance(samples, tuple) and all(
        isinstance(part, (tuple, list, Mapping)) for part in samples
    )


def _update_shares(samples: Any, name: str, lengths: dict[str, int]) -> None:
    if isinstance(samples, Tensor):
        if samples.ndim == 0:
            raise ValueError(
                f"{name} is a tensor without dimension: its first one counts the samples"
            )
        if samples.layout is not torch.strided:
            raise TypeError(
                f"{name} is a tensor of layout {samples.layout}, which cannot be cut: pass a dense "
                "one, for instance tensor.to_dense()"
            )
        lengths[name] = len(samples)
    elif is_batch(samples) and (size := num_rows(samples)) is not None:
        lengths[name] = size
    elif holds_columns(samples):
        for key, part in zip(*items_of(samples), strict=True):
            _update_shares(part, f"{name}[{key!r}]", lengths)
    elif isinstance(samples, Sequence) and not isinstance(samples, (str, bytes)):
        lengths[name] = len(samples)
    else:
        raise TypeError(
            f"{name} is a {type(samples).__name__}: pass tensors, tuples, lists or dicts of "
            "them, or a list of samples"
        )


def _slice(samples: Any, start: int, stop: int, count: int) -> Any:
    if is_batch(samples):
        return piece_of(samples, start, stop, count)
    if holds_columns(samples):
        parts = [_slice(part, start, stop, count) for part in items_of(samples)[1]]
        return cut_attributes(with_items(samples, parts), start, stop, count)
    part = samples[start:stop]
    return like(part, samples) if isinstance(samples, Tensor) else part
