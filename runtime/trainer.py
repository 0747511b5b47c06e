"""The entry point."""

from __future__ import annotations

from runtime.builder import TrainerBuilder
from runtime.replica import ModelFactory, OptimFactory
from runtime.step import TrainFn


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
            train_fn: ``f(model, batch) -> Tensor``, the batch's mean loss; called in the
                worker's thread, on its device, under its compute stream.

        Raises:
            TypeError: One of them cannot be called.
        """
        return TrainerBuilder(model_factory, optim_factory, train_fn)
