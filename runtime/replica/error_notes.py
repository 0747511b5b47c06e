"""Notes on errors of user functions, with the cause in the user's terms and the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from runtime.core.nested import tensors_in
from runtime.device.memory import is_out_of_memory

_BACKWARD_TWICE = "backward through the graph a second time"
_CHANGED_IN_PLACE = "has been modified by an inplace operation"
_ONE_SAMPLE = "Expected more than 1 value per channel"
_DTYPE = re.compile(
    r"same dtype|scalar type|Input type .* should be the same|dtype|not implemented for '"
)


def explain_error(
    error: BaseException,
    function: str,
    model: nn.Module,
    batch: Any,
    *,
    owns_backward: bool = False,
    place: str = "batch",
    memory: MemoryUse | None = None,
) -> None:
    """Add notes to an error of PyTorch that a user function caused.

    Args:
        error: The error; other errors are not changed.
        model: The model that it was called with.
        batch: The batch that it was called with.
        owns_backward: True if the caller, not the user, runs the backward pass.
        place: Name of the batch in ``function``.
        memory: For the note on a lack of memory; ``None``: the caller adds it.
    """
    text = str(error)
    if isinstance(error, ValueError) and _ONE_SAMPLE in text:
        add_note_once(
            error,
            "batch normalisation computes statistics of each batch, and this one has a single "
            "sample, as the last batch of an epoch may: leave it out (drop_last), or use a batch "
            "size that leaves another remainder",
        )
    if not isinstance(error, RuntimeError):
        return
    if is_out_of_memory(error):
        if memory is not None:
            add_note_once(error, memory.note())
    elif owns_backward and _BACKWARD_TWICE in text:
        add_note_once(
            error,
            f"{function} calls backward() on the loss that it returns, and the run does so itself: "
            f"end {function} with return loss, and leave loss.backward(), optimizer.step() and "
            "optimizer.zero_grad() out",
        )
    elif owns_backward and _CHANGED_IN_PLACE in text:
        add_note_once(
            error,
            f"the run calls backward() once {function} has returned, so that {function} must not "
            "write to tensors that its loss is computed from: compute it from a copy, such as "
            "model.queue.clone() for a memory bank that the new keys are written to",
        )
    elif _DTYPE.search(text):
        note = _dtype_note(function, model, batch, place)
        if note is not None:
            add_note_once(error, note)


def explain_size(error: BaseException, sizes: Sequence[int], remedy: str) -> None:
    """Add a note to an error that names the sizes of two batches, of which one followed the other.

    Args:
        sizes: Samples of a rank's batches or pieces, up to the one that failed; 0: none before.
        remedy: Advice for the caller.
    """
    numbers = set(re.findall(r"\d+", str(error)))
    for before, now in pairwise(sizes):
        if before and before != now and {str(before), str(now)} <= numbers:
            add_note_once(
                error,
                f"the piece of this device has changed from {before} to {now} samples, and a state "
                f"that the model keeps between two calls has the size of the former: {remedy}",
            )


def add_note_once(error: BaseException, note: str) -> None:
    """Add a note unless the error has it."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _dtype_note(function: str, model: nn.Module, batch: Any, place: str) -> str | None:
    """The first tensor of a batch whose dtype is not that of the model's parameters."""
    of_model = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(of_model) != 1:
        return None
    (wanted,) = of_model
    differing = [
        (item, tensor.dtype)
        for item, tensor in tensors_in(batch, place)
        if tensor.dtype not in (wanted, torch.bool, torch.int64)
    ]
    if not differing:
        return None
    found = ", ".join(f"{item} is {_name(dtype)}" for item, dtype in differing)
    return (
        f"{found}, and the model's parameters are {_name(wanted)}: convert the data once, "
        f"array.astype(numpy.{_name(wanted)}) or tensor.to({wanted}), or in {function}, "
        f"{differing[0][0]}.to({wanted})"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MemoryUse(NamedTuple):
    """A batch for which there was no memory.

    Attributes:
        remedy: Advice for the caller.
        largest: Samples of the largest batch that fitted; 0: none yet; ``None``: not known.
    """

    num_samples: int
    remedy: str
    largest: int | None = None

    def note(self) -> str:
        fitted = f", the largest that fitted had {self.largest}" if self.largest else ""
        if self.largest == 0:
            fitted = ", none has fitted yet"
        return f"the batch had {self.num_samples} samples{fitted}: {self.remedy}"


def accumulate_remedy(
    num_samples: int, largest: int, accumulate: int, global_batch_size: int | None
) -> str:
    """The settings of a run that train the same samples in a step, in smaller batches.

    Args:
        largest: Samples of the largest batch that fitted; 0: none yet.
        accumulate: Batches of a step so far.
        global_batch_size: Samples of a step, if they are set.
    """
    if num_samples < 2:
        return 'use precision("bf16"), a smaller model or gpuworker.FSDP'
    parts = 2
    while 0 < largest < -(-num_samples // parts):
        parts += 1
    calls = f".accumulate({parts * accumulate})"
    if global_batch_size is None:
        calls = f".batch_size({-(-num_samples // parts)}){calls}"
    return f"{calls} trains as many samples in each optimizer step with less memory"
