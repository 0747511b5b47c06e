"""Outer optimizers for ``cluster(outer=...)``, and the error of a machine that cannot join."""

from __future__ import annotations

from gpuworker import ClusterError, Mean, Nesterov, OuterOptimizer

__all__ = ["ClusterError", "Mean", "Nesterov", "OuterOptimizer"]
