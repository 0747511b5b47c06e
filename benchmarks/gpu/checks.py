"""No wait for the device in the step loop, as far as PyTorch can tell."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.bench import Bench, tidy
from benchmarks.gpu_loops import STALL_S, ended
from runtime import (
    ApplyPolicy,
    AverageBackend,
    GpuWorker,
    Trainer,
    UserFunctions,
    WorkerConfig,
    WorkerFailed,
    create_collectives,
    current_worker,
    record_scalar,
)
from runtime.device import DeviceContext, open_device
from runtime.intra_op import IntraOpThreads

BATCH, WIDTH, NUM_CLASSES = 64, 64, 10
NEVER = 100_000
"""An anchor that no epoch reaches: the average comes when it closes."""


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, NUM_CLASSES)
        )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss, with a scalar on the side."""
    x, y = batch
    logits = model(x)
    record_scalar("accuracy", (logits.argmax(1) == y).float().mean())
    return F.cross_entropy(logits, y)


def waits(model: nn.Module, batch: Any) -> Tensor:
    """The fault itself: a step that reads its loss."""
    loss = loss_of(model, batch)
    return loss if loss.item() > -1.0 else -loss


def set_mode(bench: Bench, mode: str) -> None:
    """What PyTorch does at a wait for the device, in the whole process; nothing on a CPU."""
    if not bench.dry:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is called a prototype
            torch.cuda.set_sync_debug_mode(mode)


class Watch:
    """Makes every wait an error, from a step that all ranks have reached on, for some steps.

    Args:
        bench: Says where.
        num_ranks: Ranks of the run.
        warm: Steps of each rank before.
        wanted: Steps of each rank under the watch.

    Attributes:
        watched: Steps of all ranks under the watch.
    """

    def __init__(self, bench: Bench, num_ranks: int, warm: int, wanted: int) -> None:
        self._bench = bench
        self._warm, self._wanted = warm, wanted
        self._lock = threading.Lock()
        self._counts = [0] * num_ranks
        self._before: list[int] | None = None
        self._over = False
        self.watched = 0

    def step(self, rank: int) -> None:
        """A rank begins a step."""
        with self._lock:
            if self._over:
                return
            self._counts[rank] += 1
            if self._before is None:
                if min(self._counts) > self._warm:
                    self._before = list(self._counts)
                    set_mode(self._bench, "error")
                return
            each = [now - then for now, then in zip(self._counts, self._before, strict=True)]
            self.watched = sum(each)
            if min(each) >= self._wanted:
                self._over = True
                set_mode(self._bench, "default")


def watched_run(
    bench: Bench,
    policy: ApplyPolicy,
    num_ranks: int,
    *,
    resident: bool = False,
    anchor: int = NEVER,
    train_fn: Callable[[nn.Module, Any], Tensor] = loss_of,
) -> tuple[int, int, str]:
    """Steps under watch, how many were wanted, and the text of the error if there was one."""
    warm, wanted = bench.pick((40, 250), (4, 6))
    watch = Watch(bench, num_ranks, warm, wanted)

    def step(model: nn.Module, batch: Any) -> Tensor:
        watch.step(current_worker().rank)
        return train_fn(model, batch)

    # Room for ranks of unequal speed, all in one epoch.
    num_samples = 3 * num_ranks * (warm + wanted) * BATCH
    data = (torch.randn(num_samples, WIDTH), torch.randint(NUM_CLASSES, (num_samples,)))
    builder = (
        Trainer.builder(
            lambda device: Mlp().to(device),
            lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
            step,
        )
        .dataset(data)
        .batch_size(BATCH)
        .num_epochs(1)
        .devices([bench.device] * num_ranks)
        .policy(policy)
        .anchor(anchor)
        .max_anchor(max(anchor, 200))
        .max_grad_norm(1.0)
        .precision("bf16")
        .resident(resident)
        .stall_timeout(STALL_S)
        .tune_allocator(False)
        .progress(False)
    )
    if policy is not ApplyPolicy.SYNC:
        builder.backend(AverageBackend.CPU)
    error = ""
    try:
        ended(bench, builder.run())
    except WorkerFailed as failure:
        error = f"{failure}; {failure.__cause__}"
    finally:
        set_mode(bench, "default")
    tidy()
    return watch.watched, num_ranks * wanted, error


def lone_steps(bench: Bench) -> tuple[int, str]:
    """Steps of a lone worker that reduces its gradients by NCCL, and the error if any."""
    kind = bench.pick("nccl", "thread")
    (end,) = create_collectives(1, kind, [bench.device])
    endpoints, _ = GpuWorker.channels()
    config = WorkerConfig(
        device=bench.device,
        num_samples=BATCH,
        batch_size=BATCH,
        policy=ApplyPolicy.SYNC,
        report_interval_s=0.0,
    )
    functions = UserFunctions(
        model_factory=lambda device: Mlp().to(device),
        optim_factory=lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
        train_fn=loss_of,
    )
    device: DeviceContext = open_device(bench.device, 1)
    count, error = 0, ""
    IntraOpThreads.acquire()
    try:
        with device.activate():
            worker = GpuWorker(config, functions, endpoints, collective=end, device=device)
            batch = (
                torch.randn(BATCH, WIDTH, device=bench.device),
                torch.randint(NUM_CLASSES, (BATCH,), device=bench.device),
            )
            for _ in range(5):
                worker.train_step(batch)
            set_mode(bench, "error")
            try:
                for _ in range(bench.pick(200, 3)):
                    worker.train_step(batch)
                    worker.handle_control()
                    count += 1
            except RuntimeError as failure:
                error = f"{type(failure).__name__}: {failure}; {failure.__cause__}"
            finally:
                set_mode(bench, "default")
            worker.close()
    finally:
        IntraOpThreads.release()
        end.close()
    return count, error


def step_loop(bench: Bench) -> None:
    """Whole runs with the mode on, but for start, end and rounds."""
    sync, cadence = ApplyPolicy.SYNC, ApplyPolicy.CADENCE
    ways: list[tuple[str, bool, Callable[[], tuple[int, int, str]]]] = [
        ("SYNC, 1 rank, streamed", True, lambda: watched_run(bench, sync, 1)),
        ("SYNC, 1 rank, resident", True, lambda: watched_run(bench, sync, 1, resident=True)),
        ("CADENCE, 1 rank, streamed", False, lambda: watched_run(bench, cadence, 1)),
        (
            "CADENCE, 2 workers on one GPU, between rounds",
            True,
            lambda: watched_run(bench, cadence, 2),
        ),
        (
            "CADENCE, 2 workers on one GPU, with rounds",
            False,
            lambda: watched_run(bench, cadence, 2, anchor=10),
        ),
    ]
    for name, has_target, run in ways:
        watched, wanted, error = run()
        bench.row(f"steps without a wait: {name}", watched, target=wanted if has_target else None)
        if has_target:
            bench.check(f"no wait was seen: {name}", not error)
        if error:
            bench.note(f"{name}: {error}"[:1000])
    count, error = lone_steps(bench)
    # The host waits for the reduction by an event, which the mode does not see.
    bench.row("steps without a wait but for the reduction: lone worker, SYNC over NCCL", count)
    if error:
        bench.note(f"lone worker, SYNC over NCCL: {error}"[:1000])
    if not bench.dry:
        _, _, error = watched_run(bench, sync, 1, train_fn=waits)
        bench.check("control: a step that reads its loss is noticed", "synchroniz" in error)
