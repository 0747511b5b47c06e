"""LoopWorker: the worker as a user's own training loop receives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runtime.evaluation.pending_means import EvaluationFn
from runtime.replica.optimizers import Optimizers
from runtime.worker.own_loop import OwnLoop


class LoopWorker:
    """The worker as passed to ``loop(worker)`` of :meth:`gpuworker.Trainer.loop`.

    ``loop`` runs in the thread of each worker, on its device, with its compute stream current. The
    usual body is::

        def loop(worker):
            for batch in worker.batches():
                loss = loss_fn(worker.model, batch)
                worker.step(loss)

    Averaging rounds, checkpoints, epochs and deaths of other ranks are handled between two batches,
    when the iterator yields the next one, and not within a step over several batches; nothing
    changes the replica while the body runs. A batch is valid until then: clone tensors to keep them
    longer. After a death under ``SYNC`` a step may
    not be made; ``step`` then returns without an effect, and the iterator yields the batch again.
    Local variables of the loop are kept.

    Only for use in the thread of the worker.

    Attributes:
        model: The worker's replica.
        optimizer: Its optimizer; of several, ``worker.optimizer[name]`` is one.
        optimizers: The optimizers by name; of a single one, under the empty name.
        rank: The worker's rank.
        world_size: Number of ranks at the start of the run.
        device: The worker's device.
    """

    def __init__(self, owner: Any, loop: OwnLoop) -> None:
        self._owner = owner
        self._loop = loop
        self.model: nn.Module = owner.model
        self.optimizer: torch.optim.Optimizer = owner.optimizer
        self.optimizers: dict[str, torch.optim.Optimizer] = (
            dict(owner.optimizer.members)
            if isinstance(owner.optimizer, Optimizers)
            else {"": owner.optimizer}
        )
        self.rank: int = owner.rank
        self.world_size: int = owner.world_size
        self.device: torch.device = owner.device

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches that the coordinator assigns to this worker, of all epochs.

        Each is on the worker's device. The iterator ends with the run. Under ``SYNC`` a rank
        without samples in a step does not enter the body; its replica makes the steps of the
        others.

        ``continue`` before a step skips the batch: under ``SYNC`` all ranks discard it. ``break``
        and ``return`` leave the epoch: the rest of this worker's batches is assigned to the other
        workers, and ``loop`` is called again, or a further ``batches()`` continues, with the next
        epoch. An exception ends the worker.

        Raises:
            RuntimeError: The last batch left gradients without a step.
        """
        return self._loop.body.batches()

    def steps(self) -> Iterator[int]:
        """Count the worker's steps from 0 instead of :meth:`batches`, with ``steps_per_epoch(n)``.

        All rules of :meth:`batches` apply.
        """
        for _ in self._loop.body.batches():
            yield self._owner.local_step

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        optimizer: str | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of a loss. As after ``loss.backward()``, gradients add up until
        :meth:`step`, also over several batches; divide each loss as on one device. The batches
        count as trained with the step; an epoch that ends before it is an error.

        Args:
            loss: A scalar: the mean over the batch.
            weight: The number of units of which it is the mean, such as tokens; ``None``: the
                samples. With weights, the gradients of a step are the mean over the units of all
                its calls on all ranks: do not divide the losses.
            optimizer: Compute only the gradients of this optimizer's parameters; required if there
                are several.
            retain_graph: As in ``loss.backward``: another loss of the same forward pass follows.

        Raises:
            TypeError, ValueError: An argument is invalid.
            RuntimeError: Called outside the body of :meth:`batches`.
        """
        self._loop.backward(loss, weight, optimizer, retain_graph=retain_graph)

    def step(
        self,
        loss: Tensor | None = None,
        weight: float | Tensor | None = None,
        optimizer: str | None = None,
    ) -> None:
        """Make an optimizer step: the backward pass of a loss, the reduction over the ranks under
        ``SYNC``, clipping and step. Blocks under ``SYNC`` until all ranks step.

        Under ``SYNC`` the gradient is the mean over the ranks, weighted by samples or ``weight``,
        and all ranks with samples must make the same steps on each batch. The batch counts as
        trained with its first step. Gradients are ``None`` afterwards.

        Args:
            loss: As in :meth:`backward`; ``None``: use the gradients of earlier backward passes.
            weight: As in :meth:`backward`.
            optimizer: The optimizer to step; required if there are several.

        Raises:
            TypeError, ValueError: An argument is invalid.
            RuntimeError: Called outside the body of :meth:`batches`, or there is no gradient.
            NonFiniteError: See ``on_non_finite``.
            ReplicaMismatch: Under ``SYNC``, another rank makes other steps.
        """
        self._loop.step(loss, weight, optimizer)

    @property
    def epoch(self) -> int:
        """The epoch of the batch, counted from 0."""
        return int(self._owner.current_epoch)

    @property
    def global_step(self) -> int:
        """Batches of all ranks before this one: the position of the schedule. It is constant within
        the body, also after :meth:`step`, like the index of ``enumerate(loader)``; a counter of
        completed steps is one step ahead there. Equal on all ranks under ``SYNC``; otherwise those
        of other ranks are included after each averaging round.
        """
        return self._loop.global_step

    @property
    def is_first(self) -> bool:
        """True on the lowest rank that is alive, under ``SYNC`` of those with samples in the step;
        a rank that has left the epoch is none.
        """
        return self._loop.is_first

    def log(self, **scalars: float | Tensor) -> None:
        """Record scalars for the batch; see :func:`gpuworker.record_scalar`."""
        for name, value in scalars.items():
            self._owner.record_scalar(name, value)

    def evaluate(self, ds: Any, fn: EvaluationFn) -> dict[str, float]:
        """Evaluate a data set within an epoch, on all workers, and return the means.

        ``fn`` is called in evaluation mode without gradients. Each sample is evaluated once, in
        batches of the run's size or of the ``DataLoader``; the means are weighted by samples.
        Modes, buffers and random generators are as before afterwards, and training continues with
        the same bits. Blocks until all workers have evaluated their batches. Each evaluates the
        next batch when it has completed one.

        Under ``SYNC`` all ranks with samples call it at the same step with the same data. Buffers,
        such as the statistics of batch normalisation, are averaged for it. If a rank dies or leaves
        the epoch meanwhile, the evaluation is not made: the error ends this call of ``loop``, and
        if the run continues with the other ranks, ``loop`` is called again with the next batch.

        Under ``CADENCE`` and ``ASYNC`` with several workers any rank calls it, after its last step
        on a batch. The call forces an averaging round, which the others join at their next
        boundary; they evaluate batches, with the ``fn`` of the caller, and train on. The result is
        that of the round's average, which the replica holds afterwards. Batches of a rank that dies
        are evaluated by the others.

        Args:
            ds: As for ``dataset`` on the builder.
            fn: ``f(model, batch)``: a dict of means over the batch, or ``(dict, weight)``. Called
                in the threads of all workers.

        Raises:
            RuntimeError: Called outside the body of :meth:`batches`, or between :meth:`backward`
                and :meth:`step`; with several workers under ``CADENCE`` or ``ASYNC``, before
                :meth:`step`; or in a cluster, where ``val_dataset`` on the builder evaluates.
            EvaluationFailed: ``fn``, the model or the data set raised; under ``CADENCE`` and
                ``ASYNC`` on any rank.
            ReplicaMismatch: Under ``SYNC``, another rank makes a step instead.
            CollectiveAborted, CollectiveTimeout: Under ``SYNC``, another rank has died, or is late;
                otherwise, the run ends before the evaluation.
        """
        return self._loop.evaluate(ds, fn)

    def every(self, k: int) -> bool:
        """True within one batch for each multiple of ``k`` optimizer steps, under ``SYNC`` on all
        ranks with samples in it; otherwise of this rank's steps.
        """
        return self._loop.every(k)

    def set_lr(self, x: float) -> None:
        """Set the learning rate of all groups; a scheduler overwrites it with its next step. Under
        ``SYNC`` it holds on ranks without samples in the step, too.
        """
        self._loop.set_lr(x)

    def save(self) -> None:
        """Request a checkpoint into ``checkpoint_dir`` at the next boundary; returns at once.

        Requests of several ranks at one boundary make one checkpoint.

        Raises:
            RuntimeError: The run has no ``checkpoint_dir``.
        """
        self._loop.save()

    def stop(self) -> None:
        """Request the end of the run at a step boundary; returns at once."""
        self._owner.request_stop()
