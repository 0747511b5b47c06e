"""The entry point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runtime.builder import TrainerBuilder
from runtime.loop.build import set_up
from runtime.loop.config import DdpConfig
from runtime.loop.module import ReplicatedModule
from runtime.replica.build import ModelFactory, OptimFactory
from runtime.replica.step import TrainFn


class Trainer:
    """Trains a model on all devices of one machine from one process."""

    @staticmethod
    def builder(
        model_factory: ModelFactory, optim_factory: OptimFactory, train_fn: TrainFn
    ) -> TrainerBuilder:
        """Start describing a run whose loop the runtime owns.

        Args:
            model_factory: ``f(device) -> nn.Module``, called once for each worker, one at
                a time; every replica starts from rank 0's weights.
            optim_factory: ``f(params) -> Optimizer`` with the trainable parameters.
            train_fn: ``f(model, batch)`` gives the batch's mean loss as a tensor, or ``(loss,
                weight)``; called in the worker's thread, on its device, under its compute
                stream. See below.

        A loss alone counts as the mean over the batch's samples. If it is a mean over anything
        else, return ``(loss, weight)`` with what it is a mean over: the tokens that are not
        ignored, ``(labels != -100).sum()``, or the sum of the class weights of the labels. The
        weight is a number or a scalar tensor, from 0 up; a tensor on the device stays there.
        Gradients of ranks and micro-batches, averages of parameters, ``avg_loss`` and recorded
        scalars are then weighted by it, so that the numbers are those of one device; samples
        are counted as ever. What has the weight 0 adds nothing, even if it is NaN, and where a
        whole step has it the optimizer does not step. On CUDA that total is one number read in
        each step, unless no ranks reduce gradients and the optimizer is ``fused=True`` (without
        fp16), which leaves such a step out on the device. A weight that is no number from 0 up
        ends the run with ``ValueError``; on CUDA when it is read, as losses are.

        Raises:
            TypeError: One of them cannot be called.
        """
        return TrainerBuilder(model_factory, optim_factory, train_fn)

    @staticmethod
    def setup(
        model_or_factory: Any,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
    ) -> ReplicatedModule:
        """Prepare a model for a loop of your own, on one device or many.

        The loop is the same for both: ``out = model(x); loss.backward(); model.step()``; see
        :class:`~runtime.ReplicatedModule`. Gradients equal those of the whole batch on one
        device, however it is shared out. Blocks until all replicas are built.

        Args:
            model_or_factory: A module, which is moved to the first device and keeps its
                weights, with copies on the other devices; or ``f(device) -> nn.Module``,
                called once for each device, rank 0 first, all with rank 0's weights; or an
                object whose ``.module`` is a module (a task head), or a factory of such, whose
                ``.module`` becomes what this returns.
            optim_factory: ``f(params) -> Optimizer`` with the trainable parameters, called
                once for each device.
            devices: ``None``: every visible CUDA device, else one CPU. A device may stand more
                than once. Several CPU devices share PyTorch's intra-op threads with the calling
                thread, which has as many as each of them until it closes the model.

        Returns:
            A module in train mode whose ``state_dict`` has the model's own keys.

        Raises:
            TypeError, ValueError: An argument that cannot work, or what a factory gave.
            ReplicaMismatch: A factory gave different models.
        """
        return set_up(model_or_factory, optim_factory, devices, DdpConfig(), spaced=None)

    @staticmethod
    def setup_with(
        model_or_factory: Any,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        config: DdpConfig,
    ) -> ReplicatedModule:
        """As :meth:`setup`, with settings.

        ElChe is on for devices of any kind, unless ``max_anchor=0`` (with :meth:`setup` only
        for GPUs of different models): ``model.batch_counts`` then says how many batches each
        device trains between two reductions, where the loop supplies several with
        ``model.accumulate(...)``.
        """
        return set_up(model_or_factory, optim_factory, devices, config, spaced=True)
