"""Train a case through each API of the runtime, and compare the results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from runtime import (
    FSDP,
    ApplyPolicy,
    Collective,
    DataParallelCoordinator,
    Trainer,
    Weighted,
    create_collectives,
)
from runtime.checkpoint.format import plain_key
from tests.compat.case import (
    BATCH_SIZE,
    NUM_DEVICES,
    NUM_EPOCHS,
    Case,
    loss_of,
    repeated,
)

JOIN_S = 120.0
State = dict[str, Tensor]
GLOBAL_BATCH = NUM_DEVICES * BATCH_SIZE
DEVICES = ["cpu"] * NUM_DEVICES


def one_device(case: Case) -> State:
    """A plain loop over the global batches."""
    model = case.model()
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    for batch in repeated(case.batches(GLOBAL_BATCH)):
        optimizer.zero_grad()
        loss_of(case.loss(model, batch)).backward()
        optimizer.step()
    return model.state_dict()


def _builder(case: Case, policy: ApplyPolicy) -> State:
    builder = (
        Trainer.builder(case.model(), case.optimizer, case.loss)
        .dataset(case.batches(BATCH_SIZE))
        .num_epochs(NUM_EPOCHS)
        .devices(DEVICES)
        .policy(policy)
        .progress(False)
    )
    failures: list[Exception] = []  # errors of callbacks are logged and do not end a run
    if case.watch is not None:
        watch = case.watch(case.model())

        def watch_average(version: int, model: nn.Module) -> None:
            try:
                watch(model)
            except Exception as error:
                failures.append(error)

        builder.checkpoint_every(1).checkpoint_fn(watch_average)
    state = builder.run().join(JOIN_S)
    if failures:
        raise failures[0]
    assert len(state.metrics) == NUM_EPOCHS
    return state.state_dict()


def sync(case: Case) -> State:
    """``Trainer.builder`` under ``SYNC``."""
    return _builder(case, ApplyPolicy.SYNC)


def cadence(case: Case) -> State:
    """``Trainer.builder`` under ``CADENCE``."""
    return _builder(case, ApplyPolicy.CADENCE)


def setup(case: Case) -> State:
    """``Trainer.setup``."""
    with Trainer.setup(case.model(), case.optimizer, DEVICES) as model:
        watch = case.watch(model.module) if case.watch is not None else None
        if case.whole:

            def loss_fn(module: nn.Module, batch: Any) -> Any:
                loss = loss_of(case.loss(module, batch))
                return loss if case.weight is None else (loss, case.weight(batch))

            for batches in model.rounds(repeated(case.batches(BATCH_SIZE))):
                model.accumulate(loss_fn, batches)
                model.step()
        else:
            for batch in repeated(case.batches(GLOBAL_BATCH)):
                loss_of(case.loss(model, batch)).backward()
                model.step()
                if watch is not None:
                    watch(model.module)
        return {key: value.clone() for key, value in model.state_dict().items()}


def fsdp(case: Case) -> State:
    """``FSDP`` with full sharding, over two threads."""
    # Made here: a loader that begins in one thread would draw from the generator that is seeded
    # for what another one makes.
    made = [(case.model(), case.batches(BATCH_SIZE)) for _ in range(NUM_DEVICES)]

    def train(end: Collective) -> State:
        try:
            module, loader = made[end.rank]
            model = FSDP(module, end)
            optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
            mine = islice(repeated(loader), end.rank, None, end.world_size)
            for batch in mine:
                optimizer.zero_grad()
                loss_of(case.loss(model, batch)).backward()
                model.sync_gradients(None if case.weight is None else case.weight(batch))
                optimizer.step()
            state: State = model.full_state_dict()
            model.close()
        except BaseException:
            end.abort()
            raise
        finally:
            end.close()
        return state

    with ThreadPoolExecutor(NUM_DEVICES) as pool:
        futures = [pool.submit(_alone(train), end) for end in create_collectives(NUM_DEVICES)]
        errors = [error for f in futures if (error := f.exception(JOIN_S)) is not None]
        for error in errors:
            if not type(error).__name__.startswith("Collective"):
                raise error
        return futures[0].result()


def _alone(train: Callable[[Collective], State]) -> Callable[[Collective], State]:
    def run(end: Collective) -> State:
        torch.set_num_threads(1)
        return train(end)

    return run


def coordinator(case: Case) -> State:
    """``DataParallelCoordinator``."""

    def loss_fn(model: nn.Module, samples: Any) -> Any:
        batch = case.collate(samples) if case.whole else samples
        loss = loss_of(case.loss(model, batch))
        return loss if case.weight is None else Weighted(loss, case.weight(batch))

    with DataParallelCoordinator(
        lambda device: case.model().to(device), case.optimizer, loss_fn, DEVICES
    ) as replicas:
        watch = case.watch(replicas.primary) if case.watch is not None else None
        for samples in repeated(case.batches(GLOBAL_BATCH, listed=case.whole)):
            replicas.train_batch(samples)
            if watch is not None:
                watch(replicas.primary)
        # The primary is the factory's module; for a compiled one, the module inside.
        return getattr(replicas.primary, "_orig_mod", replicas.primary).state_dict()


APIS: dict[str, Callable[[Case], State]] = {
    "SYNC": sync,
    "CADENCE": cadence,
    "setup": setup,
    "FSDP": fsdp,
    "coordinator": coordinator,
}
TITLES = {
    "SYNC": "builder, `SYNC`",
    "CADENCE": "builder, `CADENCE`",
    "setup": "`Trainer.setup`",
    "FSDP": "`FSDP`",
    "coordinator": "`DataParallelCoordinator`",
}


EQUAL, TRAINS, ABSENT, REFUSED, FAILED = "=", "ok", "n/a", "refused", "FAILED"


class Judge:
    """Compares the results of one case.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._start = case.model().state_dict()
        self._wanted: State | None = None

    def judge(self, api: str) -> tuple[str, str]:
        """Train through one API.

        Returns:
            The verdict and remarks.
        """
        case = self._case
        if api in case.absent:
            return ABSENT, case.absent[api]
        try:
            found = APIS[api](case)
            if api in case.refused:
                return FAILED, f"not refused: {case.refused[api]}"
            return self._compare(api, found)
        except Exception as error:
            remark = " ".join(str(error).split())
            if api in case.refused and case.refused[api] in remark:
                return REFUSED, case.refused[api]
            return FAILED, f"{type(error).__name__}: {remark[:200]}"

    def _compare(self, api: str, found: State) -> tuple[str, str]:
        case = self._case
        before, after = self._mean_loss(case.model()), self._mean_loss(case.load(found))
        assert after < before, f"the loss went from {before:.4g} to {after:.4g}"
        if api == "CADENCE":
            return TRAINS, ""
        if case.differs or api in case.unlike:
            return TRAINS, case.differs or case.unlike[api]
        if self._wanted is None:
            self._wanted = one_device(case)
        difference = self._difference(found, self._wanted)
        assert difference < case.tolerance, f"differs from one device by {difference:.2g}"
        return EQUAL, ""

    def _difference(self, found: State, wanted: State) -> float:
        """Difference of the parameters' change from that on one device, relative to it."""
        names = [plain_key(name) for name, _ in self._case.model().named_parameters()]
        start, actual, expected = (
            torch.cat([named[name].to(torch.float64).flatten() for name in names])
            for named in (
                {plain_key(key): value for key, value in state.items()}
                for state in (self._start, found, wanted)
            )
        )
        return float((actual - expected).norm() / (expected - start).norm())

    @torch.no_grad()
    def _mean_loss(self, model: nn.Module) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            losses = [
                float(loss_of(self._case.loss(model, batch)))
                for batch in self._case.batches(GLOBAL_BATCH)
            ]
        return sum(losses) / len(losses)
