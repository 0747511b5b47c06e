"""Trainer, TrainerBuilder and fit: the entry points of the package."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Self,
    SupportsFloat,
    TypedDict,
    Unpack,
    overload,
)

import torch
from torch import nn
from torch.utils.data import DataLoader

from coordinator.config import ApplyPolicy, AverageBackend
from runtime.callbacks import METRIC_REMEDY, Callback
from runtime.cluster.cluster_settings import ClusterSettings
from runtime.cluster.outer import OuterOptimizer
from runtime.core.checks import (
    check_callable,
    check_choice,
    check_devices,
    check_flag,
    check_float,
    check_int,
    check_path,
    check_text,
    check_word,
)
from runtime.core.loss_weights import CountedLoss
from runtime.core.tracebacks import folds_tracebacks
from runtime.data.epoch_index import check_sampler
from runtime.data.stream import is_stream
from runtime.data.torch_loader import settings_of_loader
from runtime.fsdp import ShardingStrategy
from runtime.fsdp.shard_reducer import RunSharding
from runtime.handle import TrainerHandle, start_run
from runtime.loop.ddp_config import DdpConfig
from runtime.loop.loop_setup import set_up
from runtime.loop.module import ReplicatedModule
from runtime.replica.build import (
    CopyingFactory,
    LoopOptimFactory,
    ModelT,
    ModelT_co,
    OptimFactories,
    OptimFactory,
)
from runtime.replica.non_finite import ON_NON_FINITE
from runtime.replica.schedule import SchedulerFactories, takes_total
from runtime.results import TrainedState
from runtime.settings import (
    LOSS_REDUCTIONS,
    MAX_SEED,
    ON_WORKER_FAILURE,
    PRECISION_NAMES,
    PRECISIONS,
    RunSettings,
)
from runtime.timeline import Timeline
from runtime.worker.loop_worker import LoopWorker

if TYPE_CHECKING:
    from coordinator.metrics import EpochMetrics
    from runtime.worker.worker import GpuWorker


class Trainer:
    """Trains a model on all devices of one machine from one process."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        calls = "".join(
            f".{_OTHER_LIBRARIES_NAMES.get(name, name)}({value!r:.40})"
            for name, value in settings.items()
            if hasattr(TrainerBuilder, _OTHER_LIBRARIES_NAMES.get(name, name))
        )
        given = ", ".join(["..."] * bool(args) + [f"{k}={v!r:.40}" for k, v in settings.items()])
        raise TypeError(
            f"Trainer({given}): a run is set up by Trainer.builder(model_factory, optim_factory, "
            f"train_fn).dataset(ds).batch_size(32){calls}.run().join(), and your own loop by "
            "Trainer.setup(model, optim_factory); docs/coming-from.md has both beside Lightning, "
            "Accelerate and the HF Trainer"
        )

    @overload
    @staticmethod
    def builder(
        model_factory: ModelT,
        optim_factory: OptimFactories,
        train_fn: Callable[[ModelT, Any], Any] | Mapping[str, Callable[[ModelT, Any], Any]],
    ) -> TrainerBuilder[ModelT]: ...

    @overload
    @staticmethod
    def builder(
        model_factory: Callable[[torch.device], ModelT],
        optim_factory: OptimFactories,
        train_fn: Callable[[ModelT, Any], Any] | Mapping[str, Callable[[ModelT, Any], Any]],
    ) -> TrainerBuilder[ModelT]: ...

    @staticmethod
    def builder(
        model_factory: Any, optim_factory: OptimFactories, train_fn: Any
    ) -> TrainerBuilder[Any]:
        """Return a builder for a run whose training loop the runtime executes.

        Args:
            model_factory: ``f(device) -> nn.Module``, called once for each worker, one at
                a time; every replica starts from rank 0's weights. A module in its place is
                copied for each worker, and receives the trained weights when the run ends.
            optim_factory: ``f(params) -> Optimizer``; receives the trainable parameters.
            train_fn: ``f(model, batch)``; returns the batch's mean loss as a tensor, ``(loss,
                weight)``, a :class:`~gpuworker.Weighted`, or a model's output with a field
                ``loss``; a sum with ``loss_reduction("sum")``. Called in the worker's thread, on
                its device, with its compute stream current. See below.

        A loss alone counts as the mean over the batch's samples. If it is a mean over other
        elements, return ``(loss, weight)`` with their number or total weight: the tokens that are
        not ignored, ``(labels != -100).sum()``, or the sum of the class weights of the labels. The
        weight is a number or a scalar tensor, at least 0; a tensor on the device stays there.
        Gradients of ranks and micro-batches, averages of parameters, ``avg_loss`` and recorded
        scalars are then weighted by it, so that results equal those of one device; samples
        are counted as usual. A loss with weight 0 adds nothing, even if it is NaN. If the total
        weight of a step is 0 the optimizer does not step. On CUDA that total is one number read in
        each step, unless no ranks reduce gradients and the optimizer is ``fused=True`` (without
        fp16), which skips such a step on the device. A negative or non-finite weight ends the run
        with ``ValueError``; on CUDA when it is read, as losses are.

        Of a model's output (a dict, or an output object of the Transformers library) ``loss`` is
        used, with its field ``loss_weight`` as the weight. Without that field the weight is the
        number of the batch's ``labels`` other than -100, without the first of each sequence for a
        causal language model. Without both a warning is logged.

        Several optimizers, as in a GAN, are dicts: ``{"judge": f, "maker": g}`` in place of
        ``optim_factory``, where each factory receives the trainable parameters of the submodule
        of that name, and functions under the same names in place of ``train_fn``. Each batch is a
        step of each optimizer, in the order of the functions: forward, backward, reduction under
        ``SYNC``, clipping and step. Only the parameters of the stepping optimizer get gradients.
        ``avg_loss`` is the sum of the losses; each is a scalar ``loss/<name>``. Losses are means
        over samples, without weights. ``on_non_finite("skip")`` drops the step of the optimizer
        whose loss or gradients are not finite, and counts the batch as skipped.

        Raises:
            TypeError: An argument is not callable.
            ValueError: The two dicts have different names.
        """
        return TrainerBuilder(model_factory, optim_factory, train_fn)

    @overload
    @staticmethod
    def loop(
        model_factory: ModelT,
        optim_factory: LoopOptimFactory[ModelT],
        loop: Callable[[LoopWorker], object],
    ) -> TrainerBuilder[ModelT]: ...

    @overload
    @staticmethod
    def loop(
        model_factory: Callable[[torch.device], ModelT],
        optim_factory: LoopOptimFactory[ModelT],
        loop: Callable[[LoopWorker], object],
    ) -> TrainerBuilder[ModelT]: ...

    @staticmethod
    def loop(
        model_factory: Any, optim_factory: Any, loop: Callable[[LoopWorker], object]
    ) -> TrainerBuilder[Any]:
        """Return a builder for a run whose training loop is your own, under every policy.

        ``loop(worker)`` runs in the thread of each worker and makes its steps; assignment of data,
        averaging, epochs, checkpoints, resuming, deaths and evaluation are those of
        :meth:`builder`::

            def loop(worker):
                for batch in worker.batches():
                    loss = loss_fn(worker.model, batch)
                    worker.step(loss)

        Args:
            model_factory: As in :meth:`builder`.
            optim_factory: ``f(model) -> Optimizer``, or a dict of optimizers by name, each of its
                own parameters; receives the worker's model.
            loop: ``f(worker)``; see :class:`~gpuworker.LoopWorker`. Called again for the next epoch
                if it returns before the run is over.

        Raises:
            TypeError: An argument is not callable.
        """
        check_callable("loop", loop, "(worker)")
        check_callable("optim_factory", optim_factory, "(model) -> Optimizer or dict of them")
        return TrainerBuilder(model_factory, optim_factory, call_model)._set(loop=loop)

    @overload
    @staticmethod
    def setup(
        model_or_factory: ModelT,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        param_groups: Callable[[ModelT], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[ModelT]: ...

    @overload
    @staticmethod
    def setup(
        model_or_factory: Callable[[torch.device], ModelT],
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        param_groups: Callable[[ModelT], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[ModelT]: ...

    @overload
    @staticmethod
    def setup(
        model_or_factory: Any,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        param_groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[Any]: ...

    @staticmethod
    def setup(
        model_or_factory: Any,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        param_groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[Any]:
        """Prepare a model for the caller's own training loop, on one or several devices.

        The loop is the same for both: ``out = model(x); loss.backward(); model.step()``; see
        :class:`~gpuworker.ReplicatedModule`. Gradients equal those of the whole batch on one
        device, for any division of the batch. Blocks until all replicas are built.

        Args:
            model_or_factory: A module, which is moved to the first device, keeps its weights
                and is trained, while copies of it compute for the other ranks; or
                ``f(device) -> nn.Module``, called once, and once more for each device if its
                module cannot be copied; or an object whose ``.module`` is a module (a task head),
                or a factory of one: its ``.module`` is replaced by the returned module.
            optim_factory: ``f(params) -> Optimizer``; receives the trainable parameters.
            devices: ``None``: every visible CUDA device, else one CPU. A device may be listed more
                than once. Several CPU devices share PyTorch's intra-op threads with the calling
                thread, which has as many as each of them until it closes the model.
            param_groups: ``f(model) -> list of groups``, which ``optim_factory`` receives in place
                of the parameters: for weight decay by name or by module.

        Returns:
            A module in train mode (modes set on submodules are kept) whose ``state_dict`` has the
            model's own keys.

        Raises:
            TypeError, ValueError: An argument or a factory's result is invalid.
            ReplicaMismatch: A factory returned different models.
        """
        config = DdpConfig()
        return set_up(
            model_or_factory,
            optim_factory,
            devices,
            config,
            use_el_che=None,
            param_groups=param_groups,
        )

    @overload
    @staticmethod
    def setup_with(
        model_or_factory: ModelT,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        config: DdpConfig,
        param_groups: Callable[[ModelT], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[ModelT]: ...

    @overload
    @staticmethod
    def setup_with(
        model_or_factory: Callable[[torch.device], ModelT],
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        config: DdpConfig,
        param_groups: Callable[[ModelT], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[ModelT]: ...

    @overload
    @staticmethod
    def setup_with(
        model_or_factory: Any,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        config: DdpConfig,
        param_groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[Any]: ...

    @staticmethod
    def setup_with(
        model_or_factory: Any,
        optim_factory: OptimFactory,
        devices: Sequence[torch.device | str] | None = None,
        *,
        config: DdpConfig,
        param_groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    ) -> ReplicatedModule[Any]:
        """Like :meth:`setup`, with settings.

        ElChe is on for all devices, unless ``max_anchor=0`` (with :meth:`setup` only for GPUs of
        different models): ``model.batch_counts`` is then the number of batches that each device
        trains between two reductions, if the loop passes several to ``model.accumulate(...)``.
        """
        return set_up(
            model_or_factory,
            optim_factory,
            devices,
            config,
            use_el_che=True,
            param_groups=param_groups,
        )


class FitSettings(TypedDict, total=False):
    """The keyword arguments of ``fit``: methods of the builder, with the type of the argument."""

    sampler: Any
    batch_size: int | Sequence[int]
    global_batch_size: int
    seed: int
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any]
    loader_workers: int
    dataset_lock: bool
    prefetch: int
    resident: bool
    cuda_graphs: bool
    devices: Sequence[str | torch.device] | str | torch.device | int
    policy: ApplyPolicy | str
    backend: AverageBackend | str
    anchor: int
    min_anchor: int
    max_anchor: int
    overhead_target: float
    max_batch_diff: int
    max_overshoot: int
    divergence_threshold: float
    partition_ratios: Sequence[float]
    balance: bool
    sharded: ShardingStrategy
    bucket_cap_mb: float | None
    sync_batchnorm: bool
    all_gather: bool
    progressive_dispatch: bool
    max_grad_norm: float
    accumulate: int
    loss_reduction: str
    precision: str | int
    on_non_finite: str
    on_drift: str
    scheduler: SchedulerFactories
    lr_scale_ratio: float | Literal["auto"]
    ema: float
    param_groups: Callable[[Any], list[dict[str, Any]]]
    max_steps: int
    eval_fn: Callable[[Any, int], Mapping[str, SupportsFloat]]
    eval_every: int
    eval_rank: int
    val_dataset: Any
    epoch_fn: Callable[[int, GpuWorker], object]
    metrics_fn: Callable[[EpochMetrics], object]
    cluster: str | None
    metrics_every: int
    callbacks: Callback | Sequence[Callback]
    checkpoint_every: int
    checkpoint_fn: Callable[[int, Any], object]
    checkpoint_dir: str | os.PathLike[str]
    resume: str | os.PathLike[str]
    snapshot_timeout: float
    collective_timeout: float
    stall_timeout: float
    max_failed_rounds: int
    on_worker_failure: str
    vram_fraction: float
    pin_threads: bool
    tune_allocator: bool
    progress: bool
    timeline: Timeline


def fit(
    model: ModelT,
    dataset: Any,
    *,
    optimizer: OptimFactory,
    loss: Callable[[Any, Any], Any] | None = None,
    epochs: int = 1,
    **settings: Unpack[FitSettings],
) -> TrainedState[ModelT]:
    """Train a module on all devices and wait for the end: the short form of :class:`Trainer`.

    Afterwards, and after Ctrl-C, the module holds the trained weights, on its own device.

    Args:
        model: The module; each worker trains a copy.
        dataset: See :meth:`TrainerBuilder.dataset`.
        optimizer: ``f(params) -> Optimizer``, for instance ``torch.optim.AdamW``.
        loss: ``f(output, target)`` returns the mean loss; batches are then ``(input, target)``.
            ``None``: the model returns the loss, alone or as the field ``loss``. With a module or a
            ``functools.partial`` of ``reduction="sum"`` the losses are sums, see
            :meth:`TrainerBuilder.loss_reduction`. A mean of PyTorch's cross-entropy or negative
            log-likelihood by class weights, or over labels that are not ignored, has their sum as
            its weight, also within a module or function that returns it unchanged; one that
            returns another value made of it is refused.
        epochs: Number of passes over the data set.
        settings: Other methods of the builder, by name: ``batch_size=32, policy="sync"``.

    Returns:
        The trained state, with the metrics of each epoch.

    Raises:
        TypeError: A setting does not exist, or ``model`` is not a module.
        ValueError: A setting is invalid.
        WorkerFailed: A worker failed; the module is unchanged.
        BaseException: Any exception that interrupts the wait, such as one of a signal handler; the
            run is ended before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fit trains a torch.nn.Module in place, not a {type(model).__name__}; "
            "Trainer.builder takes a function that makes one"
        )
    check_callable("loss", loss or call_model, "(output, target) -> loss")
    given: Any = loss
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise TypeError(f"loss={given.__name__} is a class: pass an instance, {given.__name__}()")

    counted = CountedLoss(loss or call_model, in_graphs=bool(settings.get("cuda_graphs")))

    def train_fn(replica: nn.Module, batch: Any) -> Any:
        if loss is None:
            return call_model(replica, batch)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"a batch is a {type(batch).__name__}, and fit(loss=f) needs (input, target): give "
                "a data set of pairs, or let the model compute the loss and leave loss out"
            )
        return counted(replica(batch[0]), batch[1])

    builder = Trainer.builder(model, optimizer, train_fn).dataset(dataset).num_epochs(epochs)
    keywords = loss.keywords if isinstance(loss, functools.partial) else {}
    if keywords.get("reduction", getattr(loss, "reduction", None)) == "sum":
        builder.loss_reduction("sum")
    for name, value in settings.items():
        if name.startswith("_") or name == "run":
            raise TypeError(f"fit({name}=...): the builder has no setting {name!r}")
        try:
            method = getattr(builder, name)
        except AttributeError as error:
            raise TypeError(f"fit({name}=...): {error}") from None
        method(value)
    with builder.run() as handle:  # which nobody else has: any exception ends the run
        return handle.join()


class TrainerBuilder(Generic[ModelT_co]):
    """Collects the settings of a run; every method returns the builder.

    A wrong type raises ``TypeError``, a number out of range ``ValueError``, at once.
    """

    def __init__(
        self,
        model_factory: ModelT_co | Callable[[torch.device], ModelT_co],
        optim_factory: OptimFactories,
        train_fn: Callable[[ModelT_co, Any], Any] | Mapping[str, Callable[[ModelT_co, Any], Any]],
    ) -> None:
        factory: Any = model_factory
        if isinstance(model_factory, nn.Module):
            factory = CopyingFactory(model_factory)
        check_callable("model_factory", factory, "(device) -> nn.Module")
        if isinstance(optim_factory, Mapping) or isinstance(train_fn, Mapping):
            check_optimizer_dicts(optim_factory, train_fn)
        else:
            check_callable("optim_factory", optim_factory, "(params) -> Optimizer")
            check_callable("train_fn", train_fn, "(model, batch) -> loss or (loss, weight)")
        self._explicit: set[str] = set()
        self._loader_settings: dict[str, Any] = {}
        self._settings = RunSettings(
            model_factory=factory, optim_factory=optim_factory, train_fn=train_fn
        )

    if not TYPE_CHECKING:  # hidden from type checkers, which see the methods

        def __getattr__(self, name: str) -> Any:
            own = [known for known in vars(TrainerBuilder) if not known.startswith("_")]
            near = difflib.get_close_matches(name, own, 1)
            here = _OTHER_LIBRARIES_NAMES.get(name) or (near[0] if near else None)
            hint = f"did you mean {here}?" if here else "docs/training.md lists them all"
            if name in _OPTIMIZER_SETTINGS:
                hint = f"the optimizer has it: lambda params: torch.optim.AdamW(params, {name}=...)"
            elif not name.startswith("_") and hasattr(TrainerHandle, name):
                hint = f"the handle that run() returns has it: builder.run().{name}"
            raise AttributeError(f"the builder has no setting {name!r}: {hint}")

    def _set(self, **values: Any) -> Self:
        self._settings = replace(self._settings, **values)
        self._explicit |= set(values)
        return self

    def dataset(self, ds: Any, *, length: int | None = None) -> Self:
        """The training data: a map-style data set, a ``TensorDataset``, a tuple or dict of tensors
        or arrays, or an object with ``__len__`` and ``get_batch(indices)``. Shared by all
        threads and read from several of them; see :meth:`dataset_lock`.

        Or a stream: an ``IterableDataset``, or another object without ``__getitem__`` whose
        ``__iter__`` starts over in each epoch. Each item is trained once an epoch. Batches follow
        the stream's order, whichever workers train them. One thread at a time reads the stream.
        An item is kept until no worker's death can require it again.

        Args:
            ds: The data set.
            length: Items in an epoch of a stream; no more are read (default: ``len(ds)``;
                without one, ``run()`` reads the stream once to count them, for at most 10 s).

        From a ``DataLoader`` the builder uses the data set, ``batch_size`` (of one worker),
        sampler, ``generator``, ``collate_fn``, number of processes (for each worker) and
        ``drop_last``, and for the processes ``worker_init_fn``, ``timeout``, ``prefetch_factor``
        and ``multiprocessing_context``. The builder's own methods override these. Batches are
        always pinned and processes persistent. Subclasses that override ``__iter__`` or
        ``__len__``, ``batch_sampler``, ``pin_memory_device`` and ``in_order=False`` are refused.
        """
        self._loader_settings = settings_of_loader(ds) if isinstance(ds, DataLoader) else {}
        dataset = self._loader_settings.pop("dataset", ds)
        if length is not None:
            check_int("dataset(length=)", length, 1)
            if not is_stream(dataset):
                raise ValueError(
                    f"dataset(length={length}) is for streams, and {type(dataset).__name__} can be "
                    "read by index: leave length out, or use sampler()"
                )
        return self._set(dataset=dataset, dataset_length=length)

    def steps_per_epoch(self, n: int) -> Self:
        """Optimizer steps of each worker in an epoch, instead of a data set: for a loop of
        :meth:`Trainer.loop` that makes its own data, as in reinforcement learning, and counts
        ``worker.steps()``.

        Under ``CADENCE`` and ``ASYNC`` ``n`` is the mean over the workers, which step at their own
        speed. Schedules, ``max_steps`` and metrics count the steps of all workers, each as a batch
        of one sample.
        """
        return self._set(steps_per_epoch=check_int("steps_per_epoch", n, 1))

    def sampler(self, s: Any) -> Self:
        """Samples of an epoch and their order (default: each sample once, in a new random order
        each epoch): a ``torch.utils.data.Sampler``, or another iterable of indices with a length.
        It is iterated once an epoch, in one thread, seeded by run and epoch; a sampler with its
        own ``generator`` keeps using it. The positions of its output are divided among the
        workers: each is trained exactly once, so a sample is trained as often as it was drawn.
        """
        return self._set(sampler=check_sampler(s))

    def batch_size(self, n: int | Sequence[int]) -> Self:
        """Samples in a batch of one worker; :meth:`global_batch_size` sets those of one step.

        A list gives one size for each device. Under ``CADENCE`` and ``ASYNC`` each device trains
        batches of its own size, and schedules count batches of the mean size. Under ``SYNC``
        ``[48, 16]`` cuts each global batch of 64 samples into pieces of these sizes, in the order
        of devices. A step then trains the same samples as with ``batch_size(32)``, and two runs
        give the same bits. The sizes must add up to a multiple of the number of devices. With
        :meth:`balance`, which is on for devices of different kinds, they are only the first
        sizes, which measured speed then changes; ``balance(False)`` keeps them. When a worker
        dies the global batch stays the same: the others cut it in proportion to their sizes.
        """
        if isinstance(n, Sequence) and not isinstance(n, (str, bytes)):
            sizes = tuple(check_int("batch_size", size, 1) for size in n)
            if not sizes:
                raise ValueError("batch_size([]): pass one number for each device")
            self._check_one_batch_size("batch_size", list(sizes), "global_batch_size")
            return self._set(batch_size=max(1, sum(sizes) // len(sizes)), batch_sizes=sizes)
        size = check_int("batch_size", n, 1)
        self._check_one_batch_size("batch_size", size, "global_batch_size")
        return self._set(batch_size=size, batch_sizes=None)

    def global_batch_size(self, n: int) -> Self:
        """Samples of one optimizer step over all devices, in place of :meth:`batch_size`.

        Each global batch is split over the devices, into unequal parts where ``n`` does not divide
        or :meth:`balance` is on; with :meth:`accumulate` into micro-batches as well. Under
        ``CADENCE`` and ``ASYNC`` each device trains its part of ``n`` as its own batch. Schedules,
        :meth:`max_steps`, :meth:`metrics_every`, :meth:`eval_every` and ``every_steps`` count
        global batches: an epoch has ``ceil(len(ds) / n)``, or ``floor`` with :meth:`drop_last`,
        whatever the number of devices and micro-batches. The ``batch_size`` of a ``DataLoader``
        is then not used.

        Raises:
            ValueError: :meth:`batch_size` was called, too.
        """
        size = check_int("global_batch_size", n, 1)
        self._check_one_batch_size("global_batch_size", size, "batch_size")
        return self._set(global_batch_size=size)

    def _check_one_batch_size(self, name: str, value: Any, other: str) -> None:
        if other in self._explicit:
            raise ValueError(
                f"{name}({value}) was called after {other}: call one of them; global_batch_size(n) "
                "is one optimizer step over all devices, batch_size(n) the batch of each device"
            )

    def num_epochs(self, n: int) -> Self:
        """Number of passes over the data set."""
        return self._set(num_epochs=check_int("num_epochs", n, 1))

    def seed(self, n: int) -> Self:
        """Seed of the initial weights, of the order of samples and of each worker's generator.

        Without it order and generators use 0, and the model factory draws from PyTorch's process
        generator: such runs repeat after ``torch.manual_seed(n)``, and otherwise differ in their
        initial weights. To compare seeds, set it: ``torch.manual_seed`` changes the initial
        weights only.
        """
        return self._set(seed=check_int("seed", n, 0, MAX_SEED))

    def drop_last(self, flag: bool) -> Self:
        """Omit the short last batch of each epoch (default: train it)."""
        return self._set(drop_last=check_flag("drop_last", flag))

    def collate_fn(self, f: Callable[[list[Any]], Any]) -> Self:
        """Function that makes a batch from a list of samples (default: PyTorch's)."""
        check_callable("collate_fn", f, "(list of samples) -> batch")
        return self._set(collate_fn=f)

    def loader_workers(self, n: int) -> Self:
        """Loader processes of each worker, for data sets with heavy Python code (default 0: a
        thread). Tensors in memory are loaded without any. The processes import the main script,
        so it must start its run under ``if __name__ == "__main__":``.
        """
        return self._set(loader_workers=check_int("loader_workers", n, 0))

    def dataset_lock(self, flag: bool) -> Self:
        """True: one thread at a time reads the data set and makes its batches, those of validation
        included; draws from Python's ``random`` and NumPy's global generators are then seeded by
        batch, like PyTorch's. False: no read waits for another one. By default reads are made one
        at a time where they change a file, memory or attribute that they share: the first reads
        show it, see ``docs/data.md``.
        """
        return self._set(dataset_lock=check_flag("dataset_lock", flag))

    def prefetch(self, depth: int) -> Self:
        """Batches that a thread loads ahead (default: by the memory free after the first steps,
        up to 8). On a CUDA device it is an upper limit within :meth:`vram_fraction`. 0 loads each
        batch in the worker's thread, when it is needed. Tensors in memory are not loaded ahead
        for CPU devices.

        On a CUDA device a batch is valid until the next call of ``train_fn``: clone tensors to
        keep them longer.
        """
        return self._set(prefetch=check_int("prefetch", depth, 0))

    def resident(self, flag: bool) -> Self:
        """Keep the data set on the device and gather batches there (default: if tensors in memory
        fit into the part of :meth:`vram_fraction` that is free after the first steps). ``True``
        copies it there at the start, memory maps too, and is an error if it does not fit;
        ``False`` copies each batch. Only for tensors and arrays. Workers on one device share the
        copy.
        """
        return self._set(resident=check_flag("resident", flag))

    def cuda_graphs(self, flag: bool) -> Self:
        """Capture the whole step once and replay it (default: off): forward, backward, clip
        and optimizer, under ``SYNC`` with the reduction between two graphs. For models whose
        steps are so short that launching their kernels takes longer than running them.

        ``train_fn`` then runs as Python code in the first steps only. It must do the same work on
        every batch and must not read from the device; Python values that it uses (a factor of a
        loss, a weight that is not a tensor on the device, the epoch's number) keep their captured
        value until ``current_worker().forget_graphs()``. Batches of another shape, such as the
        short one at an epoch's end, are trained eagerly. So are steps that cannot be captured,
        with a warning that gives the reason, and all steps of workers that share a GPU.
        ``capturable`` is set in optimizers that have it; without it (plain ``SGD``) a constant
        learning rate is captured: with a scheduler, build the optimizer with ``fused=True``. No
        effect on CPU devices.
        """
        return self._set(cuda_graphs=check_flag("cuda_graphs", flag))

    def devices(self, devices: Sequence[str | torch.device] | str | torch.device | int) -> Self:
        """One worker for each entry; a device may be listed more than once (default: every
        visible CUDA device, else one ``"cpu"``). A number ``n`` means the first ``n`` CUDA
        devices, or ``n`` workers on the CPU without CUDA; -1 and ``"auto"`` mean the default,
        ``"gpu"`` every visible CUDA device.
        """
        return self._set(devices=check_devices(devices))

    def policy(self, p: ApplyPolicy | str) -> Self:
        """Policy of averaging (default ``SYNC``); ``"cadence"`` is ``ApplyPolicy.CADENCE``."""
        return self._set(policy=check_choice("policy", p, ApplyPolicy, _STRATEGIES))

    def backend(self, b: AverageBackend | str) -> Self:
        """The transport over which replicas average; ``"thread"`` is ``AverageBackend.THREAD``.

        The default, ``AUTO``, chooses the first transport by devices and policy. Under ``CADENCE``
        and ``ASYNC`` the coordinator then tries those that fit the devices, a collective and
        averaging on the CPU, and keeps the cheaper one. The cost is the time that ranks lose in a
        round, the coordinator's own time, and staleness. It measures again when ranks have died,
        and when the anchor has doubled. If a transport cannot connect, or fails
        :meth:`max_failed_rounds` times in a row, the run changes to the other with a warning.
        ``SYNC`` tries none, and changes only from NCCL to the reduction in memory. An explicit
        transport is kept, and its failure ends the run. ``handle.backend`` is the one in use,
        ``handle.backend_reason`` the reason.
        """
        return self._set(backend=check_choice("backend", b, AverageBackend))

    def anchor(self, n: int) -> Self:
        """Batches of the slowest rank between two averagings at the start (default 10).

        An anchor set here is not lowered, unless :meth:`min_anchor` allows it.
        """
        return self._set(anchor=check_int("anchor", n, 1))

    def min_anchor(self, n: int) -> Self:
        """Lower limit to which the anchor shrinks while averaging costs less than half of
        :meth:`overhead_target` (default 2, under ``ASYNC`` 5, or the anchor that was set).
        """
        return self._set(min_anchor=check_int("min_anchor", n, 1))

    def max_anchor(self, n: int) -> Self:
        """Upper limit of the anchor (default 200), which grows while averaging is expensive for
        the ranks or the coordinator.
        """
        return self._set(max_anchor=check_int("max_anchor", n, 1))

    def overhead_target(self, f: float) -> Self:
        """Share of the ranks' time that averaging may cost, 0.01 to 0.50 (default 0.10)."""
        return self._set(overhead_target=check_float("overhead_target", f, 0.01, 0.50))

    def speed_hint(self, rank: int, ratio: float) -> Self:
        """Initial estimate: the other ranks are ``ratio`` times as fast as ``rank``."""
        hint = (check_int("speed_hint", rank, 0), check_float("speed_hint", ratio, 1.0))
        return self._set(speed_hint=hint)

    def max_batch_diff(self, n: int) -> Self:
        """Limit on the lead of the fastest rank in batches since the last averaging; 0 is
        lockstep. A rank without data left does not hold the others back. No effect under
        ``SYNC``.
        """
        return self._set(max_batch_diff=check_int("max_batch_diff", n, 0))

    def max_overshoot(self, n: int) -> Self:
        """Batches that a rank may train beyond its count under ``ASYNC`` (default: a
        quarter of the count, at least 2).
        """
        return self._set(max_overshoot=check_int("max_overshoot", n, 0))

    def divergence_threshold(self, f: float) -> Self:
        """Relative distance of replicas from their average above which the anchor grows more
        slowly and finally shrinks (default 0.05). The anchor also shrinks if the
        divergence, relative to batches and learning rate, has tripled over ten rounds and
        is above a tenth of the threshold.
        """
        number = check_float("divergence_threshold", f, 0.0, above=True)
        return self._set(divergence_threshold=number)

    def no_divergence_guard(self) -> Self:
        """Adapt the anchor to the cost of averaging only."""
        return self._set(divergence_threshold=None)

    def partition_ratios(self, ratios: Sequence[float]) -> Self:
        """Fixed share of each rank (default: by measured throughput; equal under SYNC).

        Under ``SYNC`` these are the proportions of each step: with ``[3, 1]`` a global batch of 64
        samples is 48 on the first device and 16 on the second.
        """
        if not isinstance(ratios, Iterable):
            raise TypeError(f"partition_ratios({ratios!r}): pass a list, one number a device")
        numbers = tuple(check_float("partition_ratios", r, 0.0) for r in ratios)
        if not numbers or sum(numbers) <= 0:
            raise ValueError("partition_ratios: give each device a number, one of them above 0")
        return self._set(partition_ratios=numbers)

    def balance(self, flag: bool) -> Self:
        """Under ``SYNC``, cut each global batch by measured speed, so that all ranks finish
        their pieces together; a rank that would delay the others with a single sample gets
        none. The default is on for devices of different kinds (other names, capabilities or
        memory, or a CPU beside GPUs) and off otherwise. If ranks on devices of one kind differ in
        speed, the run's summary states the gain.

        A global step trains the same samples with or without balancing, and its gradient is
        their mean. The rank that trains a sample depends on measured time, so results agree up to
        rounding and not bit for bit. :meth:`partition_ratios` fixes shares instead. A piece may
        be larger than :meth:`batch_size`; with batch normalisation in training mode it has two
        samples or more, unless :meth:`sync_batchnorm` is on. If a device has no memory for it,
        pieces become smaller and the step is repeated.
        """
        return self._set(balance=check_flag("balance", flag))

    def bucket_cap_mb(self, mb: float | None) -> Self:
        """Under ``SYNC``, reduce gradients in buckets of about ``mb`` MiB while the backward pass
        still computes others; the first bucket has at most 1 MiB. ``None`` reduces all at once
        after the backward pass. The default is 25 over ``NCCL``, and ``None`` otherwise: on a CPU
        the exchange and the backward pass would compete for the same cores. ``cuda_graphs``,
        ``sync_batchnorm`` and ``all_gather`` do not work with buckets; with them the default is
        ``None``.

        Over ``NCCL`` and ``GLOO`` a bucket is reduced as soon as it is complete, in the order in
        which the backward pass of the first step computed the gradients. Over ``THREAD`` all are
        reduced together at the end. Gradients are the same up to rounding.
        """
        size = 0.0 if mb is None else check_float("bucket_cap_mb", mb, 0.0, above=True)
        return self._set(bucket_cap_mb=size)

    def sync_batchnorm(self, flag: bool) -> Self:
        """Under ``SYNC``, let batch normalisation use the statistics of the global batch in forward
        and backward, for any sizes of the ranks' pieces (default off: each rank uses those of its
        own piece). ``BatchNorm1d``, ``2d`` and ``3d`` layers synchronise in every forward and
        backward pass, so all ranks must call them in the same order. With ``accumulate(n)`` each
        micro-batch has its own statistics. A piece whose loss has the weight 0 counts in the
        statistics but adds no gradient.
        """
        return self._set(sync_batchnorm=check_flag("sync_batchnorm", flag))

    def all_gather(self, flag: bool) -> Self:
        """Allow :func:`gpuworker.all_gather` in ``train_fn``, for losses that relate the samples of
        the global batch to each other (default off; only under ``SYNC``). Before each step the
        ranks then exchange flags for the presence of a batch. A rank trains its whole piece in
        one pass, even if the piece has grown because another rank died.
        """
        return self._set(all_gather=check_flag("all_gather", flag))

    def sharded(self, strategy: ShardingStrategy, intra_node_size: int | None = None) -> Self:
        """Under ``SYNC``, shard gradients and optimizer state over the workers, like :class:`FSDP`.

        Between two steps each worker's model has its full parameters, so that ``train_fn``,
        evaluations, callbacks and checkpoints see the whole model. During the reduction's end and
        the optimizer's step, ``FULL_SHARD`` and ``HYBRID_SHARD`` free all but the worker's shard;
        ``SHARD_GRAD_OP`` keeps them. ``NO_SHARD`` shards nothing.

        ``optim_factory`` receives full parameters; its optimizer then trains shards, of one
        dimension each. So each element's step must depend on that element alone, as with AdamW
        and SGD, and not on the norm or the shape of a parameter. Checkpoints load at another
        number of workers, and in runs without shards. The host reads one number of each rank in
        every step.

        Args:
            strategy: The state to shard.
            intra_node_size: For ``HYBRID_SHARD``: number of workers that share one copy of the
                state.
        """
        if not isinstance(strategy, ShardingStrategy):
            raise TypeError(f"sharded({strategy!r}): pass a ShardingStrategy, such as FULL_SHARD")
        return self._set(sharding=RunSharding(strategy, intra_node_size))

    def progressive_dispatch(self, flag: bool) -> Self:
        """Accept ``True``, which has no effect: without ``SYNC`` data is always assigned in small
        chunks on demand. ``SYNC`` refuses it.
        """
        if not check_flag("progressive_dispatch", flag):
            raise ValueError(
                "progressive_dispatch(False) was removed: leave it out; partition_ratios([...]) "
                "fixes each worker's share of the data"
            )
        return self._set(progressive_dispatch=True)

    def max_grad_norm(self, f: float) -> Self:
        """Clip the norm of the gradients: after the reduction under ``SYNC``, else on each rank."""
        return self._set(max_grad_norm=check_float("max_grad_norm", f, 0.0, above=True))

    def accumulate(self, n: int) -> Self:
        """Micro-batches for each optimizer step (default 1), averaged by their samples, or by
        the weights that ``train_fn`` returns: parts of :meth:`global_batch_size`, or each of
        :meth:`batch_size`.
        """
        return self._set(accumulate=check_int("accumulate", n, 1))

    def loss_reduction(self, name: str) -> Self:
        """``"mean"`` (default) or ``"sum"``: the reduction over the samples of the batch by which
        ``train_fn`` computes its loss. With ``"sum"`` the gradient of a step is that of the sum
        over the global batch, or over one device's batch under ``CADENCE`` and ``ASYNC`` without
        :meth:`global_batch_size`. ``avg_loss`` is the mean over samples with both.
        """
        return self._set(loss_reduction=check_word("loss_reduction", name, LOSS_REDUCTIONS))

    def precision(self, name: str | int) -> Self:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``: autocast around ``train_fn``; fp16 with a
        gradient scaler for each worker. Lightning's names (``"bf16-mixed"``, ``"16-mixed"``,
        ``"32-true"``) are accepted, except those of low precision without autocast.
        """
        known = {**dict.fromkeys(PRECISIONS), **PRECISION_NAMES}
        if not isinstance(name, str | int) or str(name) not in known:
            raise ValueError(f"precision({name!r}): pass one of {', '.join(PRECISIONS)}")
        return self._set(precision=PRECISION_NAMES.get(str(name), str(name)))

    def on_non_finite(self, mode: str) -> Self:
        """Reaction to a loss or gradient that is NaN or infinite (default ``"raise"``).

        ``"raise"`` ends the run with :class:`~gpuworker.NonFiniteError`, which names rank,
        step and parameter, before a non-finite value is averaged, evaluated, passed to a callback
        or returned. ``"skip"`` drops the step, on every rank under ``SYNC``. It costs one value
        read from the device in each step; ``EpochMetrics.num_skipped`` counts the samples.
        ``"ignore"`` checks no step: a replica that is not finite when parameters are averaged
        loads its peers' average and resets its optimizer. Without a finite peer the run ends as
        with ``"raise"``.
        """
        return self._set(on_non_finite=check_word("on_non_finite", mode, ON_NON_FINITE))

    def on_drift(self, mode: str) -> Self:
        """Reaction to replicas that differ under ``SYNC``: ``"raise"``, the only one.

        Replicas are equal by construction, unless user code depends on the rank. Their parameters
        and optimizer states are compared at the end of each epoch and every 1000 steps. A
        difference ends the run with :class:`~gpuworker.ReplicaMismatch`, which names the first
        tensor that differs, the ranks and the last step after which they were equal.
        """
        if mode == "repair":
            raise ValueError(
                'on_drift("repair") was removed: leave it out, and let callbacks, hooks and '
                "train_fn act alike on every rank; ReplicaMismatch names the tensor that differs"
            )
        check_word("on_drift", mode, ("raise",))
        return self

    def scheduler(
        self, f: SchedulerFactories, *, interval: str = "step", metric: str | None = None
    ) -> Self:
        """``f(optimizer)`` or ``f(optimizer, total)`` returns a torch scheduler, stepped once for
        each global batch of :meth:`global_batch_size`, or for each batch trained by any rank with
        :meth:`batch_size`, or, with ``interval="epoch"``, once for each epoch of them. ``total`` is
        the number of its steps in the run, with :meth:`max_steps` and the length of a stream;
        early ends are unknown. Under ``CADENCE`` and ``ASYNC`` a rank's schedule enters an epoch
        when its count of batches reaches it.

        ``ReduceLROnPlateau`` is stepped by a metric of each closed epoch: ``metric`` is a field of
        :class:`~gpuworker.EpochMetrics`, such as ``"avg_loss"``, or a name in its ``scalars``,
        such as ``"eval/loss"``. Under ``SYNC`` that is before the next epoch's first step. Under
        the other policies ranks begin the next epoch before an epoch closes: they step with the
        next work that they receive, a fraction of a second later.

        Each of several optimizers gets its own scheduler; a dict limits this to the named ones.
        """
        for each in f.values() if isinstance(f, Mapping) else (f,):
            check_callable("scheduler", each, "f(optimizer[, total]) -> LRScheduler")
            takes_total(each)
        check_word("scheduler: interval", interval, ("step", "epoch"))
        if metric is not None:
            check_text("scheduler: metric", metric, METRIC_REMEDY)
        return self._set(scheduler=f, scheduler_interval=interval, scheduler_metric=metric)

    def lr_scale_ratio(self, f: float | Literal["auto"]) -> Self:
        """Multiply the learning rate by ``1 + (world_size - 1) * f`` (Goyal et al., 2017:
        1.0 is the linear scaling rule).

        By default ``"auto"``: no factor under ``SYNC``. Under ``CADENCE`` and ``ASYNC``, optimizers
        whose steps ignore the scale of the gradient, such as Adam and RMSprop, have one of
        ``sqrt(K) * K_eff / K``, where ``K`` ranks train ``n`` batches each between two averagings
        and ``K_eff = sum(n)**2 / sum(n**2)``: ``sqrt(K)`` for equal speeds. It multiplies the rate
        during steps, whatever set it; rates that are read, set, reported or saved are without it.
        It follows the measured speeds if it changes by more than 5 %, and is 1 while ranks train
        more than 200 batches between two averagings. Between machines there is none.
        """
        automatic = isinstance(f, str) and f == "auto"
        number = None if automatic else check_float("lr_scale_ratio", f, 0.0)
        return self._set(lr_scale_ratio=number)

    def ema(self, decay: float) -> Self:
        """Keep an exponential moving average of the parameters, ``ema = decay * ema + (1 - decay) *
        params``, which starts from the initial ones; see :meth:`TrainedState.ema_state_dict`.
        Under ``SYNC`` each optimizer step updates it, as on one device. Under ``CADENCE`` and
        ``ASYNC`` each averaging round does, with ``decay`` to the power of the optimizer steps of a
        rank since the last one. It is part of checkpoints, and takes the memory of the parameters
        on each device.
        """
        return self._set(ema=check_float("ema", decay, 0.0, 1.0))

    def param_groups(self, f: Callable[[ModelT_co], list[dict[str, Any]]]) -> Self:
        """``f(model)`` returns the parameter groups that the optimizer factory receives."""
        check_callable("param_groups", f, "(model) -> list of parameter groups")
        return self._set(param_groups=f)

    def max_steps(self, n: int) -> Self:
        """End after ``n`` global batches, or with :meth:`batch_size` after ``n`` batches over all
        ranks. The metrics of an incomplete epoch cover its trained part; see
        ``EpochMetrics.partial``. With :meth:`batch_size` under ``SYNC`` a multiple of the number of
        devices ends between global batches, so that a resume is exact.
        """
        return self._set(max_steps=check_int("max_steps", n, 1))

    def eval_fn(self, f: Callable[[ModelT_co, int], Mapping[str, SupportsFloat]]) -> Self:
        """``f(model, epoch)`` returns a dict of floats, which appear in ``EpochMetrics.scalars``
        under ``eval/``; called with the averaged weights, in eval mode.
        """
        check_callable("eval_fn", f, "(model, epoch) -> dict of floats")
        return self._set(eval_fn=f)

    def eval_rank(self, rank: int) -> Self:
        """Run :meth:`eval_fn` and :meth:`checkpoint_fn` on this rank while it lives.

        By default they run on the lowest live rank, unless by measured speed they cost the run
        clearly less on another one: under ``CADENCE`` and ``ASYNC``, and at the end of an epoch
        under ``SYNC`` with :meth:`balance`. All ranks hold the same average there, so that results
        and exceptions do not depend on the rank.
        """
        return self._set(eval_rank=check_int("eval_rank", rank, 0))

    def eval_every(self, n: int) -> Self:
        """Call :meth:`eval_fn` also within an epoch, for every ``n`` global batches, or with
        :meth:`batch_size` for every ``n`` batches over all ranks
        (default: when an epoch closes). ``metrics_fn``, loggers and callbacks receive its values
        as a :class:`~gpuworker.StepMetrics` with ``num_batches=0``, under ``eval/``.

        Under ``SYNC``, and in a run of one device, training pauses after the first step that
        reaches a multiple of ``n``. Under ``CADENCE`` and ``ASYNC`` the evaluation follows an
        early averaging; evaluations that become due during another one are skipped.
        """
        return self._set(eval_every=check_int("eval_every", n, 1))

    def val_dataset(
        self,
        ds: Any,
        every: int = 1,
        every_steps: int | None = None,
        fn: Callable[[ModelT_co, Any], Any] | None = None,
    ) -> Self:
        """Validate the averaged weights on all workers, in eval mode without gradients.

        Each sample is evaluated once. The means over all samples are scalars of the epoch under
        ``val/``, for callbacks (``KeepBest(metric="val/loss")``) and loggers.

        Args:
            ds: A data set that is read by index, or a ``DataLoader`` of one.
            every: Epochs between two validations, each at the end of an epoch.
            every_steps: Also validate within epochs, every so many batches over all ranks, as
                :meth:`eval_every`. Training pauses.
            fn: ``f(model, batch)`` returns a dict of means, as for
                :meth:`TrainedState.evaluate`; ``None``: the loss and scalars of ``train_fn``.
        """
        if ds is None:
            raise TypeError("val_dataset(None): pass a data set, or leave the call out")
        if fn is not None:
            check_callable("val_dataset: fn", fn, "(model, batch) -> dict of means")
        if every_steps is not None:
            check_int("val_dataset: every_steps", every_steps, 1)
        return self._set(
            val_dataset=ds,
            val_every=check_int("val_dataset: every", every, 1),
            val_every_steps=every_steps,
            val_fn=fn,
        )

    def epoch_fn(self, f: Callable[[int, GpuWorker], object]) -> Self:
        """``f(epoch, worker)``, called in each worker's thread before its first batch of an
        epoch.
        """
        check_callable("epoch_fn", f, "(epoch, worker)")
        return self._set(epoch_fn=f)

    def metrics_fn(self, f: Callable[[EpochMetrics], object]) -> Self:
        """``f(EpochMetrics)``, called once an epoch on a separate thread, and ``f(StepMetrics)``
        with :meth:`metrics_every` or :meth:`eval_every`; returning ``False`` ends the run. Its
        exceptions are logged and training continues. Loggers
        (:class:`~gpuworker.TensorBoardLogger`, :class:`~gpuworker.CsvLogger`,
        :class:`~gpuworker.CombinedLogger` and their subclasses) are closed when the run ends and
        can be reused; no other object is closed.
        """
        check_callable("metrics_fn", f, "(EpochMetrics)")
        return self._set(metrics_fn=f)

    def cluster(
        self,
        address: str | None = None,
        min_machines: int | None = None,
        period: float | None = None,
        outer: OuterOptimizer | None = None,
        token: str | None = None,
        timeout: float | None = None,
        *,
        host: str | None = None,
        compression: str | None = None,
    ) -> Self:
        """Train together with other machines, each of which runs this script.

        The policy applies within each machine. Between machines parameters are averaged once a
        period, weighted by the batches each has trained, while training continues. Samples are
        assigned by measured speed, and each is trained exactly once an epoch over all machines.
        Machines may join late, leave and die: see the page on clusters. Requires
        ``pip install 'gpuworker[cluster]'``, and a server on one of the machines:
        ``gpuworker lighthouse``.

        Args:
            address: ``host:port`` of that server (or ``GPUWORKER_CLUSTER``).
            min_machines: Minimum number of machines to train together (1, or
                ``GPUWORKER_CLUSTER_MIN_MACHINES``); with more than half of all, a network
                partition cannot leave two groups that both continue.
            period: Seconds from one average between machines to the next (30, or
                ``GPUWORKER_CLUSTER_PERIOD``).
            outer: Outer optimizer: ``Mean()``, the default, applies the average;
                ``Nesterov(lr, momentum)`` steps towards it with momentum.
            token: Shared secret of all machines (or ``GPUWORKER_CLUSTER_TOKEN``).
            timeout: Seconds after which an unresponsive machine is excluded (30, or
                ``GPUWORKER_CLUSTER_TIMEOUT``); a dead one is excluded at once.
            host: The name or address by which the others reach this machine, and the only one on
                which it listens (default: that from which it reaches the server; or
                ``GPUWORKER_CLUSTER_HOST``).
            compression: ``"bf16"`` or ``"int8"``: format of parameters sent between machines
                (default: uncompressed; or ``GPUWORKER_CLUSTER_COMPRESSION``).
        """
        return self._set(
            cluster=ClusterSettings.of(
                address=address,
                min_machines=min_machines,
                period=period,
                outer=outer,
                token=token,
                timeout_s=timeout,
                host=host,
                compression=compression,
            )
        )

    def metrics_every(self, n: int) -> Self:
        """Also pass a :class:`~gpuworker.StepMetrics` to :meth:`metrics_fn`, loggers and callbacks
        once at least ``n`` global batches, or with :meth:`batch_size` batches of all ranks, were
        reported: their number (``num_batches``), loss, scalars, learning rate and samples a
        second. Ranks report ten or more times a second, so that no step waits for a value from
        the device. Under ``SYNC`` metrics cover the same steps of all ranks, as few as ``n``
        allows; otherwise all that was reported.
        """
        return self._set(metrics_every=check_int("metrics_every", n, 1))

    def callbacks(self, *callbacks: Callback | Sequence[Callback]) -> Self:
        """Objects that observe the run and may end it: :class:`~gpuworker.EarlyStopping`,
        :class:`~gpuworker.KeepBest`, :class:`~gpuworker.TimeLimit`, or other subclasses of
        :class:`~gpuworker.Callback`. They receive an epoch's metrics after :meth:`metrics_fn`, in
        this order. A list in place of several arguments works as well.
        """
        given: list[Any] = []
        for each in callbacks:
            given += each if isinstance(each, list | tuple) else [each]
        for callback in given:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks({callback!r:.80}): pass gpuworker.Callback objects; loggers and "
                    "functions go into metrics_fn(...)"
                )
        return self._set(callbacks=tuple(given))

    def checkpoint_every(self, n: int) -> Self:
        """Call :meth:`checkpoint_fn` every ``n`` epochs."""
        return self._set(checkpoint_every=check_int("checkpoint_every", n, 1))

    def checkpoint_fn(self, f: Callable[[int, ModelT_co], object]) -> Self:
        """``f(version, model)``, called with a model that holds the average; ``version`` is the
        number of closed epochs. Its exceptions are logged and training continues.
        """
        check_callable("checkpoint_fn", f, "(version, model)")
        return self._set(checkpoint_fn=f)

    def checkpoint_dir(
        self,
        path: str | os.PathLike[str],
        every: int = 1,
        keep: int = 3,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
    ) -> Self:
        """Write the whole state of the run into this directory every ``every`` epochs, when
        it is stopped and at its end; the last ``keep`` are kept. The directory is created if
        needed.

        ``every_s`` and ``every_steps`` also write within an epoch, after that many seconds or
        batches over all ranks since the last checkpoint, whichever is first. Such a checkpoint
        is written after an early averaging; under ``SYNC`` with ``every_s`` within about a second,
        or two steps that take longer. Batches are counted from the ranks' reports, at most half a
        second late. The last ``keep`` of these are kept, too, counted separately. :meth:`resume`
        loads the newest of both kinds.

        Training waits only while the state is copied in memory. A thread writes the files, and
        skips a checkpoint when a newer one is ready. A failed write is logged and counted, and
        training continues. State that could not be resumed ends the run with ``CheckpointError``
        before its first step, or after it if the step creates it; the first checkpoint is read
        back. Each checkpoint is a directory
        ``step-<batches>-epoch-<closed epochs>-<serial>``, within an epoch with ``within`` in place
        of ``epoch``; its ``weights.safetensors`` can be loaded into a bare module. A checkpoint is
        complete or absent, even after a crash.

        Checkpoints also hold frozen parameters that ``train_fn`` has changed, and modules' extra
        state (``get_extra_state``). Give each run its own directory: checkpoints older than the
        last ``keep`` are removed, even those of another run.
        """
        return self._set(
            checkpoint_dir=check_path("checkpoint_dir", path),
            saves=True,
            save_every=check_int("checkpoint_dir: every", every, 1),
            checkpoint_dir_keep=check_int("checkpoint_dir: keep", keep, 1),
            save_every_s=None
            if every_s is None
            else check_float("checkpoint_dir: every_s", every_s, 0.0, above=True),
            save_every_steps=None
            if every_steps is None
            else check_int("checkpoint_dir: every_steps", every_steps, 1),
        )

    def resume(self, path: str | os.PathLike[str], missing_ok: bool = False) -> Self:
        """Resume from the newest complete checkpoint in ``path``, or from ``path`` itself if it is
        a checkpoint's own directory. An incomplete or altered checkpoint is refused with a
        warning, and the previous one is used. Checkpoints contain no executable code.

        Model, ``batch_size``, length of the data set, ``seed``, ``drop_last``, ``accumulate``
        and the choice of ``SYNC`` or another policy must be those of the run that wrote it;
        devices and their number may differ, and ``num_epochs`` may be raised. Under ``SYNC`` the
        global batch stays that of the devices at the start of the run. The checkpoint's values of
        the optimizer and the scheduler, including learning rate and length, replace those set
        here. With ``missing_ok`` the run starts from the beginning if the directory has no
        checkpoint.
        """
        return self._set(
            resume=check_path("resume", path),
            resume_missing_ok=check_flag("resume: missing_ok", missing_ok),
        )

    def snapshot_timeout(self, s: float) -> Self:
        """Timeout of an averaging round on the CPU path, in seconds (default 5, at least three
        measured steps).
        """
        return self._set(snapshot_timeout_s=check_float("snapshot_timeout", s, 0.0, above=True))

    def collective_timeout(self, s: float) -> Self:
        """Seconds that a rank waits for its peers in a collective (default 60)."""
        return self._set(collective_timeout_s=check_float("collective_timeout", s, 0.0, above=True))

    def stall_timeout(self, s: float) -> Self:
        """Seconds without progress after which the run ends with ``RunStalled``, which lists the
        stack of every thread (default 300). Must exceed the longest step or callback.
        """
        return self._set(stall_timeout_s=check_float("stall_timeout", s, 0.0, above=True))

    def max_failed_rounds(self, n: int) -> Self:
        """Averaging rounds that may fail in a row before the run ends, or, with ``AUTO``,
        continues over another transport if this one has failed (default 5).
        """
        return self._set(max_failed_rounds=check_int("max_failed_rounds", n, 1))

    def on_worker_failure(self, mode: str) -> Self:
        """Reaction to a worker that raises or whose thread ends.

        ``"raise"`` (default): the run stops and :meth:`TrainerHandle.join` raises
        ``WorkerFailed``. ``"continue"``: the others train the dead worker's unfinished batches
        and those that it trained since the last averaging, down to one worker;
        ``TrainedState.failures`` lists the dead workers. Replicas that differ, non-finite values
        and a failure to build rank 0 always end the run.
        """
        check_word("on_worker_failure", mode, ON_WORKER_FAILURE)
        return self._set(continue_on_failure=mode == "continue")

    def vram_fraction(self, f: float) -> Self:
        """Fraction of each CUDA device's memory that the run may reserve, above 0 and at most 1
        (default 0.9): models, activations and batches of all workers on it. It limits PyTorch's
        allocator in the whole process during the run.
        """
        return self._set(vram_fraction=check_float("vram_fraction", f, 0.0, 1.0, above=True))

    def pin_threads(self, flag: bool) -> Self:
        """Run the thread of each CUDA worker on the cores of its GPU's NUMA node (default on),
        within the affinity of the process. No effect if Linux reports no node for the GPU or the
        machine has one node.
        """
        return self._set(pin_threads=check_flag("pin_threads", flag))

    def tune_allocator(self, flag: bool) -> Self:
        """Keep freed memory in the process while CPU workers train (default on). It acts on
        the whole process and cannot be undone.
        """
        return self._set(tune_allocator=check_flag("tune_allocator", flag))

    def progress(self, flag: bool) -> Self:
        """``False``: no progress, and no lines on stderr at the start and the end. Default: a
        progress bar on a terminal or in a notebook; elsewhere a line for each epoch and one every
        30 seconds, in the log at INFO, or on stderr if no handler is configured.
        """
        return self._set(progress=check_flag("progress", flag))

    def timeline(self, tl: Timeline) -> Self:
        """Record a timeline of the run; see :class:`~gpuworker.Timeline`. One timeline records
        one run.
        """
        if not isinstance(tl, Timeline):
            raise TypeError(f"timeline({tl!r:.80}): pass a gpuworker.Timeline()")
        return self._set(timeline=tl)

    @folds_tracebacks
    def run(self) -> TrainerHandle[ModelT_co]:
        """Check all settings, start the threads and return without waiting.

        Raises:
            ValueError, TypeError: A setting is missing or invalid; no thread was started.
        """
        from_loader = {k: v for k, v in self._loader_settings.items() if k not in self._explicit}
        return start_run(replace(self._settings, **from_loader))


_STRATEGIES = {
    **dict.fromkeys(
        ("ddp", "dp", "ddp_spawn", "ddp_notebook", "ddp_find_unused_parameters_true"),
        'DDP\'s averaging of gradients in each step is policy("sync")',
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp2", "deepspeed"),
        "shards are for your own loop: gpuworker.FSDP, see docs/own-loops.md",
    ),
}
"""Advice for strategies of other libraries, given as a policy."""


_OPTIMIZER_SETTINGS = frozenset(["lr", "betas", "eps", "weight_decay", "momentum", "nesterov"])
_OTHER_LIBRARIES_NAMES = {
    "train_dataset": "dataset",
    "train_dataloader": "dataset",
    "train_dataloaders": "dataset",
    "dataloader": "dataset",
    "num_workers": "loader_workers",
    "shuffle": "sampler",
    "epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "gradient_clip_val": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "mixed_precision": "precision",
    "amp": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "lr_scheduler": "scheduler",
    "seed_everything": "seed",
    "strategy": "policy",
    "accelerator": "devices",
    "gpus": "devices",
    "num_processes": "devices",
    "sync_batch_norm": "sync_batchnorm",
    "val_check_interval": "eval_every",
    "val_dataloaders": "val_dataset",
    "val_dataloader": "val_dataset",
    "eval_dataloader": "val_dataset",
    "eval_dataset": "val_dataset",
    "validation_data": "val_dataset",
    "eval_steps": "eval_every",
    "log_every_n_steps": "metrics_every",
    "logging_steps": "metrics_every",
    "logger": "metrics_fn",
    "save_steps": "checkpoint_dir",
    "default_root_dir": "checkpoint_dir",
    "resume_from_checkpoint": "resume",
    "enable_progress_bar": "progress",
}
"""Names of settings in ``DataLoader``, DDP, Lightning, Accelerate and the HF Trainer."""


def check_optimizer_dicts(optim_factory: Any, train_fn: Any) -> None:
    """Check the dicts of several optimizers and their training functions.

    Raises:
        TypeError: One of them is not a dict, or a value is not callable.
        ValueError: Their keys differ.
    """
    if not (isinstance(optim_factory, Mapping) and isinstance(train_fn, Mapping)):
        raise TypeError(
            "several optimizers are two dicts under the same names, one of optimizer factories "
            "and one of training functions: pass both, or a function for each"
        )
    if not optim_factory or set(optim_factory) != set(train_fn):
        raise ValueError(
            f"the optimizers are named {list(optim_factory)}, the training functions "
            f"{list(train_fn)}: give each optimizer a function under its name"
        )
    for name, factory in optim_factory.items():
        check_callable(f"optim_factory[{name!r}]", factory, "(params) -> Optimizer")
        check_callable(f"train_fn[{name!r}]", train_fn[name], "(model, batch) -> loss")


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch unpacked: a mapping by name, a sequence by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
