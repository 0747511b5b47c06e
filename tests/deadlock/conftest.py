"""What holds for this folder: a short timeout, faults that must fire, and a tap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deadlock.faults import Faults
from tests.deadlock.tap import Tap

TIMEOUT_S = 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has an elapsed bound."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def faults() -> Iterator[Callable[..., Faults]]:
    """Gives injectors; the test fails if a fault planted in one of them never fired."""
    with ExitStack() as stack:

        def make(*args: Any) -> Faults:
            return stack.enter_context(Faults(*args))

        yield make


@pytest.fixture
def tap() -> Iterator[Tap]:
    """Sees all traffic of the runs of the test."""
    with Tap() as opened:
        yield opened
