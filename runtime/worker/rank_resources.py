"""RankResources: what the parts of one worker share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.core.rng import seed_of
from runtime.device.base import Device
from runtime.device.cuda import open_device
from runtime.device.launch_load import LaunchLoad
from runtime.device.metering import StepMeter
from runtime.device.timing import StepTimer
from runtime.replica.batch_log import BatchLog
from runtime.worker.lockstep import LockstepProgress, WorkerProgress
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.worker_config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """The settings, device, random generator, counters and instruments that the parts of a worker
    share. For its thread.

    Attributes:
        context: The device, with its streams.
        generator: On the device; part of a checkpoint.
        protocol: State and counts in the control protocol.
        progress: Set from a checkpoint.
        lockstep: Under ``SYNC`` equal on all ranks.
        timer: Times the steps.
        meter: Counts them for reports.
        log: Receives the losses and scalars of each step.
        recorder: Records the time by cause.
    """

    config: WorkerConfig
    context: Device
    generator: torch.Generator
    protocol: WorkerProtocol
    timer: StepTimer
    meter: StepMeter
    log: BatchLog
    recorder: WorkerRecorder
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    lockstep: LockstepProgress = field(default_factory=LockstepProgress)

    @classmethod
    def open(
        cls,
        config: WorkerConfig,
        device: Device | None = None,
        recorder: WorkerRecorder | None = None,
        launch_load: LaunchLoad | None = None,
    ) -> RankResources:
        """Make them for a worker.

        Args:
            device: The worker's device; ``None``: made from the settings.
            recorder: ``None``: a new one.
            launch_load: Receives samples of the launch times.
        """
        context = device or open_device(config.device, config.num_cpu_workers)
        generator = torch.Generator(config.device)
        seed_generator(generator, config.seed, config.rank, 0)
        timer = context.new_timer(launch_load)
        meter = StepMeter(context.new_log(), timer)
        meter.log.each = [] if config.metrics_every else None
        return cls(
            config=config,
            context=context,
            generator=generator,
            protocol=WorkerProtocol(config.rank),
            timer=timer,
            meter=meter,
            log=BatchLog(meter.log),
            recorder=recorder or WorkerRecorder(),
        )


def seed_generator(generator: torch.Generator, seed: int, rank: int, epoch: int) -> None:
    """Seed a rank's generator for an epoch, the same after a resume."""
    generator.manual_seed(seed_of(seed, rank, epoch))
