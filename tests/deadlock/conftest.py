"""Fixtures of this folder: injected faults that must fire, and a tap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from coordinator.machine import Coordinator
from coordinator.service import Service
from tests.deadlock.faults import Faults
from tests.deadlock.tap import Tap

PATCHED = ((Coordinator, "handle"), (Service, "_execute"))
PLAIN = [getattr(owner, name) for owner, name in PATCHED]


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Iterator[None]:
    """Fail on leftover patches: a tap would keep all messages of later runs alive."""
    yield
    assert [getattr(owner, name) for owner, name in PATCHED] == PLAIN


@pytest.fixture
def faults(tap: Tap) -> Iterator[Callable[..., Faults]]:
    """A factory of injectors; the test fails if one of their faults never fired.

    The tap comes first, and goes last: both patch the same methods.
    """
    with ExitStack() as stack:

        def make(*args: Any) -> Faults:
            return stack.enter_context(Faults(*args))

        yield make


@pytest.fixture
def tap() -> Iterator[Tap]:
    """Records all messages of the runs of the test."""
    with Tap() as opened:
        yield opened
