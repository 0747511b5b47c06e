"""What a user says of the cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.cluster.engine import Engine, State
from runtime.cluster.lighthouse import JOIN_TIMEOUT_S
from runtime.cluster.options import EngineOptions
from runtime.cluster.outer import Mean, OuterOptimizer
from runtime.core.checks import check_float

logger = logging.getLogger(__name__)


PERIOD = "GPUWORKER_CLUSTER_PERIOD"
"""The environment variable for ``period``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of this machine in a cluster.

    Attributes:
        engine: How to reach the other machines.
        period_s: Seconds from one round between machines to the next.
        outer: Optimizer that applies the mean of the machines' changes.
        connect: Makes the engine.
    """

    engine: EngineOptions
    period_s: float = 30.0
    outer: OuterOptimizer = field(default_factory=Mean)
    connect: Connect = field(default_factory=lambda: connect_torchft)

    def __post_init__(self) -> None:
        check_float("cluster(period=)", self.period_s, 0.0, above=True)
        if self.period_s >= JOIN_TIMEOUT_S:
            # The lighthouse does not report the settings that it was started with.
            logger.warning(
                "cluster(period=%g) is not below the %g s for which a lighthouse waits by default "
                "for machines that still train: start it with --join-timeout %g, or rounds leave "
                "them out",
                self.period_s,
                JOIN_TIMEOUT_S,
                2 * self.period_s,
            )
        if not isinstance(self.outer, OuterOptimizer):
            raise TypeError(
                f"cluster(outer={self.outer!r:.80}): pass runtime.Mean() or runtime.Nesterov()"
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
        """Make the settings; an argument that is ``None`` comes from the environment or a default.

        Raises:
            ValueError: A value is missing or out of range, or several processes were started to
                train in lockstep: each would then wait until all are restarted.
        """
        found = os.environ if environ is None else environ
        if found.get("TORCHELASTIC_RUN_ID") and _joint(found):
            raise ValueError(
                "cluster(): torchrun has started several processes that it restarts together, so "
                "that none could go on without the others: start the script once on each machine, "
                "by itself or with torchrun --nnodes=1 --nproc-per-node=1"
            )
        if period is None and found.get(PERIOD):
            try:
                period = float(found[PERIOD])
            except ValueError as error:
                raise ValueError(f"{PERIOD}={found[PERIOD]!r}: pass a number") from error
        return cls(
            engine=EngineOptions.from_environment(found, **engine),
            period_s=30.0 if period is None else period,
            outer=Mean() if outer is None else outer,
        )


Connect = Callable[[EngineOptions, Callable[[], State]], Engine]
"""Makes an engine from its options and from what gives the state that heals a peer."""


def connect_torchft(options: EngineOptions, offer: Callable[[], State]) -> Engine:
    """The engine on torchft."""
    from runtime.cluster.torchft_engine import TorchftEngine

    return TorchftEngine(options, offer)


def _joint(environ: Mapping[str, str]) -> bool:
    return any(
        environ.get(name, "1").isdecimal() and int(environ.get(name, "1")) > 1
        for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
