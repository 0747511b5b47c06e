"""PyTorch's profiler over all workers' threads, with the parts of each step named."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from gpuworker import ApplyPolicy, Trainer, current_worker

nvtx: Any = torch.cuda.nvtx  # its functions have no annotations
POLICIES = [policy.value for policy in ApplyPolicy]


class Ranges(threading.local):
    """Named ranges of the calling worker's thread; each ends where the next begins.

    They appear as ``gpu-worker-0/forward`` and so on in the profiler's table and trace, and on
    GPUs also as NVTX ranges for Nsight Systems.
    """

    def __init__(self) -> None:
        self.open = ExitStack()

    def begin(self, part: str) -> None:
        self.end()
        worker = current_worker()
        name = f"gpu-worker-{worker.rank}/{part}"
        self.open.enter_context(record_function(name))
        if worker.device.type == "cuda":
            self.open.enter_context(nvtx.range(name))

    def end(self) -> None:
        self.open.close()


RANGES = Ranges()


def train_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    RANGES.begin("forward")
    points, labels = batch
    loss = nn.functional.cross_entropy(model(points), labels)
    RANGES.begin("backward")  # the worker calls loss.backward() next
    return loss


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    # Under SYNC the time between backward and optimizer is the reduction.
    optimizer.register_step_pre_hook(lambda *_: RANGES.begin("optimizer"))
    optimizer.register_step_post_hook(lambda *_: RANGES.end())
    return optimizer


def build_model(device: torch.device) -> nn.Sequential:
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, default="cadence")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("torch.trace.json"))
    args = parser.parse_args()
    data = torch.randn(2048, 64), torch.randint(10, (2048,))
    builder = Trainer.builder(build_model, make_optimizer, train_fn).dataset(data)
    builder.batch_size(32).num_epochs(args.epochs).devices(args.devices).progress(False)
    builder.policy(ApplyPolicy(args.policy))
    activities = [ProfilerActivity.CPU]
    if any(device.startswith("cuda") for device in args.devices):
        activities.append(ProfilerActivity.CUDA)
    # Without this the profiler records only the thread that starts it.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        builder.run().join()
    found = [e for e in profiler.key_averages() if e.key.startswith("gpu-worker-")]
    for event in sorted(found, key=lambda event: event.key):
        mean_us = event.cpu_time_total / event.count
        print(f"{event.key:24} {event.count:5} times, {mean_us:8.1f} us each on the CPU")
    profiler.export_chrome_trace(str(args.out))
    print(f"open {args.out} in Perfetto")


if __name__ == "__main__":
    main()
