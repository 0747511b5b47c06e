"""A run in a Jupyter notebook: a bar below the cell, and an interrupt that keeps the state."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebook'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
pytest.importorskip("ipykernel", reason="needs the extra 'notebook'")
pytest.importorskip("ipywidgets", reason="needs the extra 'notebook'")

ROOT = Path(__file__).parents[2]

PREPARE = """
import os, signal
import torch
from runtime import Trainer, current_worker
x = torch.randn(64, 4)
stop_at = None
def train_fn(model, batch):
    worker = current_worker()
    if worker.local_step == stop_at and worker.rank == 0:
        os.kill(os.getpid(), signal.SIGINT)  # as the notebook's stop button does
    return model(batch[0]).square().mean()
def builder(epochs):
    net = torch.nn.Linear(4, 1)
    b = Trainer.builder(net, lambda params: torch.optim.SGD(params, 0.01), train_fn)
    return b.dataset((x,)).batch_size(4).num_epochs(epochs).devices(["cpu"] * 2).policy("sync")
"""
TRAIN = """
state = builder(2).run().join()
print("epochs", len(state.metrics))
"""
INTERRUPT = """
stop_at = 20
handle = builder(100_000).run()
handle.join()
"""
AFTER = """
print("stopped", handle.state.stopped, len(handle.state.params))
stop_at = None
print("epochs", len(builder(1).run().join().metrics))
"""


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
def test_a_bar_is_shown_and_an_interrupted_cell_keeps_the_state():
    cells = [nbformat.v4.new_code_cell(text) for text in (PREPARE, TRAIN, INTERRUPT, AFTER)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=60,
        allow_errors=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    train, interrupt, after = ([*cell.outputs] for cell in notebook.cells[1:])
    widget = "application/vnd.jupyter.widget-view+json"
    assert any(widget in out.get("data", {}) for out in train)
    assert "epochs 2" in "".join(out.get("text", "") for out in train)
    assert [out.ename for out in interrupt if out.output_type == "error"] == ["KeyboardInterrupt"]
    output = "".join(out.get("text", "") for out in after)
    assert "stopped True 2" in output
    assert "epochs 1" in output
