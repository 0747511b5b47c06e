"""Chosen test parameters, in place of the whole product, and numbers of examples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import hypothesis
import pytest

SCALE = int(os.environ.get("TEST_SCALE", "1"))
"""Factor on the number of cases; 1 in ordinary runs of the tests."""

few_examples = hypothesis.settings(max_examples=30 if SCALE == 1 else 100)
"""Fewer examples of a property in ordinary runs of the tests."""


def pairwise(*, indirect: Sequence[str] = (), **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Like ``parametrize`` over the product, with fewer cases; with all for ``TEST_SCALE`` above 1.

    Each pair of values of any two parameters is in a case. Cases are chosen
    greedily and deterministically.

    Args:
        indirect: Names of the parameters of fixtures.
        values: Values of each parameter.
    """
    cases = list(product(*(range(len(v)) for v in values.values())))
    if SCALE == 1:
        open_pairs = {pair for case in cases for pair in _pairs(case)}
        chosen = []
        while open_pairs:
            best = max(cases, key=lambda case: len(open_pairs & _pairs(case)))
            chosen.append(best)
            open_pairs -= _pairs(best)
        cases = chosen
    return _parametrize(values, cases, indirect)


def diagonal(*, times: int = 1, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Like :func:`pairwise`, but each value is in ``times`` or more cases and pairs may be missing.

    For factors that act independently. The cases are diagonals of the product,
    each with all values of the longest parameter.

    Args:
        times: Number of diagonals, at most the length of the second-longest parameter.
        values: Values of each parameter.
    """
    lengths = [len(v) for v in values.values()]
    if SCALE == 1:
        cases = [
            tuple((row + shift * place) % n for place, n in enumerate(lengths))
            for shift in range(times)
            for row in range(max(lengths))
        ]
    else:
        cases = list(product(*map(range, lengths)))
    return _parametrize(values, cases)


def _parametrize(
    values: dict[str, Sequence[Any]],
    cases: Sequence[tuple[int, ...]],
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    lists = list(values.values())
    rows = [tuple(lists[i][k] for i, k in enumerate(case)) for case in cases]
    return pytest.mark.parametrize(tuple(values), rows, indirect=list(indirect))


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    placed = list(enumerate(case))
    return set(combinations(placed, 2))
