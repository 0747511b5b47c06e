"""Shared fixtures of the unit tests: one browser per module."""

from __future__ import annotations

import pytest

from tests.support.browsing import open_browser


@pytest.fixture(scope="module")
def browser():
    """A driver of a headless browser, started with the first page opened."""
    with open_browser() as driver:
        yield driver
