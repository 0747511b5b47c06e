"""The user's functions, seen as they are called in a worker's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from runtime.timeline.causes import CALLBACKS
from runtime.timeline.events import Kind
from runtime.timeline.recorder import Lane
from runtime.worker.config import UserFunctions

P = ParamSpec("P")
R = TypeVar("R")


def watch_functions(functions: UserFunctions, lane: Lane) -> UserFunctions:
    """The user's functions, whose calls in the worker's thread are noted on its lane."""
    return replace(
        functions,
        eval_fn=_watched(functions.eval_fn, lane, Kind.EVALUATION, lambda model, epoch: epoch),
        epoch_fn=_watched(functions.epoch_fn, lane, Kind.EPOCH_FN, lambda epoch, worker: epoch),
        checkpoint_fn=_watched(
            functions.checkpoint_fn, lane, Kind.CHECKPOINT, lambda version, model: version
        ),
    )


def _watched(
    fn: Callable[P, R] | None, lane: Lane, kind: Kind, number: Callable[P, int]
) -> Callable[P, R] | None:
    if fn is None:
        return None
    inner = fn

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = lane.enter(CALLBACKS)
        start = lane.since
        try:
            return inner(*args, **kwargs)
        finally:
            lane.enter(before)
            lane.note(kind, start, number(*args, **kwargs))

    return call
