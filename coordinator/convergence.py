"""What the divergence of the replicas says about the cadence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

_ROUNDS_IN_A_ROW = 3


class Verdict(Enum):
    """What a round's divergence asks of the cadence."""

    STABLE = "stable"
    """The anchor may grow."""
    SUPPRESS_GROWTH = "suppress_growth"
    """The anchor must not grow."""
    NUDGE_DOWN = "nudge_down"
    """The anchor should come down."""


class ConvergenceGuard:
    """Judges each averaging round by how far the replicas were apart.

    Above the threshold in one round: :attr:`Verdict.SUPPRESS_GROWTH`. Above it in three
    rounds in a row with the last no smaller than the first:
    :attr:`Verdict.NUDGE_DOWN`, after which the guard forgets these rounds, so that each
    step down needs three rounds of its own.

    Args:
        threshold: Largest divergence, ``||pre - post|| / ||post||``, that is no concern.
        enabled: ``False``: every round is stable and nothing is remembered.

    Raises:
        ValueError: ``threshold`` is not a positive finite number.
    """

    def __init__(self, threshold: float = 0.05, *, enabled: bool = True) -> None:
        if not (math.isfinite(threshold) and threshold > 0):
            raise ValueError(
                f"divergence threshold must be a positive number, got {threshold!r}; "
                "0.05 is the default, and the guard can be switched off instead"
            )
        self._threshold = threshold
        self._enabled = enabled
        self._row: list[float] = []

    def report(self, divergences: Sequence[float]) -> Verdict:
        """Judge a round; call it once for each.

        Args:
            divergences: One for each rank that was in the round. One that is not finite
                counts as above the threshold. Empty: nothing was measured, which is
                stable and neither continues nor ends a row.

        Returns:
            What the round asks of the cadence.
        """
        if not self._enabled or not divergences:
            return Verdict.STABLE
        worst = max(d if math.isfinite(d) else math.inf for d in divergences)
        if worst <= self._threshold:
            self._row.clear()
            return Verdict.STABLE
        self._row = [*self._row, worst][-_ROUNDS_IN_A_ROW:]
        if len(self._row) == _ROUNDS_IN_A_ROW and self._row[-1] >= self._row[0]:
            self._row.clear()
            return Verdict.NUDGE_DOWN
        return Verdict.SUPPRESS_GROWTH

    def state_dict(self) -> dict[str, Any]:
        """The rounds in the current row, as plain floats."""
        return {"row": list(self._row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; threshold and switch stay as built."""
        self._row = [float(d) for d in state["row"]]
