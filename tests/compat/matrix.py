"""All rows of the matrix, and the packages that they need."""

from __future__ import annotations

import importlib.metadata

from tests.compat import graphs, language, recipes, vision
from tests.compat.case import Case
from tests.compat.torchvision import let_it_import

PACKAGES = {
    "PyTorch alone": (),
    "Transformers": ("transformers", "peft", "datasets"),
    "timm": ("timm", "torchvision"),
    "torchvision": ("torchvision",),
    "PyTorch Geometric": ("torch-geometric",),
    "torchmetrics": ("torchmetrics",),
}
"""The distributions that a group's rows import."""


def all_cases() -> list[Case]:
    """Every row, in order."""
    return [*recipes.CASES, *language.CASES, *vision.CASES, *graphs.CASES]


def reason_to_skip(group: str) -> str:
    """Reason why a group's rows cannot run here; empty if they can."""
    for name in PACKAGES[group]:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"needs {name}"
    if PACKAGES[group]:
        let_it_import()
    return ""
