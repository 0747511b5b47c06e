"""Make torchvision importable if its operators cannot be loaded."""

from __future__ import annotations

import importlib.util

import torch


def let_it_import() -> None:
    """Declare the operators whose absence keeps torchvision from being imported.

    A wheel of it for CUDA cannot load its operators beside a CPU build of PyTorch. Models that
    need them (non-maximum suppression) do not run then; all others do.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        import torchvision  # noqa: F401
