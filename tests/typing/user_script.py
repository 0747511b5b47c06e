"""A user's program with every type declared, for ``mypy --strict`` and pyright; it is not run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpuworker import (
    ApplyPolicy,
    CsvLogger,
    EpochMetrics,
    GpuWorker,
    KeepBest,
    ReplicatedModule,
    Statistics,
    StepMetrics,
    TrainedState,
    Trainer,
    TrainerBuilder,
    TrainerHandle,
    fit,
    predict,
    record_scalar,
)

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A model with an attribute of its own."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def make_net(device: torch.device) -> Net:
    return Net().to(device)


def train_fn(model: Net, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    record_scalar("accuracy", (logits.argmax(1) == y).float().mean())
    return F.cross_entropy(logits, y)


def evaluate(model: Net, epoch: int) -> dict[str, float]:
    return {"width": float(model.width + epoch)}


def groups(model: Net) -> list[dict[str, object]]:
    return [{"params": model.layers.parameters(), "weight_decay": 0.1}]


def on_epoch(epoch: int, worker: GpuWorker) -> None:
    worker.set_lr(0.1 / (epoch + 1))


def on_metrics(metrics: EpochMetrics | StepMetrics) -> bool:
    return metrics.epoch < 3


x = torch.randn(640, 20)
data = (x, x[:, :5].argmax(1))

builder = Trainer.builder(make_net, lambda params: torch.optim.AdamW(params, 3e-4), train_fn)
assert_type(builder, TrainerBuilder[Net])
builder.dataset(data).batch_size(32).num_epochs(10).devices(["cpu", "cpu"]).policy("sync")
builder.policy(ApplyPolicy.SYNC).param_groups(groups).eval_fn(evaluate).epoch_fn(on_epoch)
builder.eval_fn(lambda model, epoch: {"width": torch.tensor(model.width)})
builder.metrics_fn(on_metrics).metrics_fn(CsvLogger("run.csv")).metrics_fn(lambda m: m.avg_loss < 1)
builder.checkpoint_fn(lambda version, model: print(version, model.width))
builder.val_dataset(data, fn=lambda model, batch: {"width": float(model.width)}).ema(0.99)
builder.callbacks(KeepBest("best.safetensors")).callbacks([KeepBest("best.safetensors")])
builder.scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10))
handle = builder.run()
assert_type(handle, TrainerHandle[Net])
for m in handle.metrics():
    assert_type(m, EpochMetrics)
    assert_type(m.scalars["accuracy"], float)
assert_type(handle.next_metrics(timeout=1.0), EpochMetrics | None)
assert_type(handle.statistics(), Statistics)
state = handle.join()
assert_type(state, TrainedState[Net])
assert_type(state.params, dict[str, Tensor])
assert_type(state.model(), Net)
assert_type(state.model(make_net, "cpu"), Net)
assert_type(state.load_into(Net()).width, int)
with Trainer.builder(Net(), torch.optim.AdamW, train_fn).dataset(data).run() as running:
    assert_type(running, TrainerHandle[Net])


def report(handle: TrainerHandle, state: TrainedState) -> nn.Module:
    """A helper that takes handles and states of any model, and names none."""
    print(handle.world_size, state.stopped)
    return state.model()


report(handle, state)
assert_type(
    fit(Net(), data, loss=F.cross_entropy, optimizer=torch.optim.AdamW, epochs=2, batch_size=32),
    TrainedState[Net],
)
state.evaluate(data, lambda model, batch: {"width": model.width})
predict(state, x)

model = Trainer.setup(Net(), torch.optim.AdamW, ["cpu", "cpu"], param_groups=groups)
assert_type(model, ReplicatedModule[Net])
assert_type(model.module.width, int)
assert_type(Trainer.setup(make_net, torch.optim.AdamW).module, Net)
model.accumulate(lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]), [data])

Trainer.builder(
    nn.ModuleDict({"a": Net(), "b": Net()}),
    {"a": torch.optim.SGD, "b": torch.optim.SGD},
    {"a": lambda model, batch: model["a"](batch), "b": lambda model, batch: model["b"](batch)},
)
