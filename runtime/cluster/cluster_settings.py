"""ClusterSettings: the user's settings of this machine in a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.cluster.engine import ClusterEngine, ClusterState
from runtime.cluster.lighthouse import JOIN_TIMEOUT_S
from runtime.cluster.options import EngineOptions
from runtime.cluster.outer import Mean, OuterOptimizer
from runtime.core.checks import check_float
from runtime.core.launchers import WORLD_SIZE, num_launched

logger = logging.getLogger(__name__)

_LAUNCHERS = (WORLD_SIZE, "GROUP_WORLD_SIZE")
PERIOD_VARIABLE = "GPUWORKER_CLUSTER_PERIOD"
"""Environment variable of ``period``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of this machine in a cluster.

    Attributes:
        engine: Address of the cluster, timeouts and limits.
        period_s: Seconds between rounds of the machines.
        outer: Outer optimizer, which applies the mean change of the machines.
        connect: Creates the engine.
    """

    engine: EngineOptions
    period_s: float = 30.0
    outer: OuterOptimizer = field(default_factory=Mean)
    connect: EngineFactory = field(default_factory=lambda: connect_torchft)

    def __post_init__(self) -> None:
        check_float("cluster: period", self.period_s, 0.0, above=True)
        if self.period_s >= JOIN_TIMEOUT_S:
            # The lighthouse does not report its own settings.
            logger.warning(
                "cluster(period=%g) is not below the %g s for which a lighthouse waits by default "
                "for machines that are still training: start it with --join-timeout %g, or rounds "
                "take place without them",
                self.period_s,
                JOIN_TIMEOUT_S,
                2 * self.period_s,
            )
        if not isinstance(self.outer, OuterOptimizer):
            raise TypeError(
                f"cluster(outer={self.outer!r:.80}): pass gpuworker.Mean() or Nesterov()"
            )

    @classmethod
    def of(
        cls,
        *,
        period: float | None,
        outer: OuterOptimizer | None,
        environ: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> ClusterSettings:
        """Create the settings; ``None`` stands for the environment variable or the default.

        Raises:
            ValueError: A value is missing or out of range, or torchrun has started several
                processes, which it restarts together.
        """
        found = os.environ if environ is None else environ
        if found.get("TORCHELASTIC_RUN_ID") and num_launched(found, *_LAUNCHERS) > 1:
            raise ValueError(
                "cluster(): torchrun has started several processes, which it restarts together, so "
                "that none can continue without the others: start the script once on each "
                "machine, by itself or with torchrun --nnodes=1 --nproc-per-node=1"
            )
        if period is None and (text := found.get(PERIOD_VARIABLE)):
            try:
                period = float(text)
            except ValueError as error:
                raise ValueError(f"{PERIOD_VARIABLE}={text!r}: pass a number") from error
        return cls(
            engine=EngineOptions.from_environment(found, **engine),
            period_s=30.0 if period is None else period,
            outer=Mean() if outer is None else outer,
        )


EngineFactory = Callable[[EngineOptions, Callable[[], ClusterState]], ClusterEngine]
"""Creates an engine from its options and a function that returns the state to heal a peer."""


def connect_torchft(options: EngineOptions, offer: Callable[[], ClusterState]) -> ClusterEngine:
    """The default engine; imports torchft."""
    from runtime.cluster.torchft_engine import TorchftEngine

    return TorchftEngine(options, offer)
