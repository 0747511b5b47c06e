"""The package without its extras."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.slow

EXTRAS = ("aiohttp", "plotly", "tensorboard", "torchft", "wandb", "mlflow", "pynvml", "ipywidgets")


def test_the_package_can_be_imported_silently_and_trains_without_extras():
    program = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None
import torch, runtime, runtime.__main__
print("imported", file=sys.stderr)
for name in runtime.__all__:
    getattr(runtime, name)
try:
    runtime.Monitor()
except ImportError as error:
    assert "monitor" in str(error), error
else:
    raise AssertionError("Monitor needs the extra")
x = torch.randn(64, 4)
runtime.fit(
    torch.nn.Linear(4, 2), (x, x[:, :2]), loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, 0.1), epochs=1, batch_size=16, devices=["cpu"],
)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("imported\n")
