"""A fault injector: user functions that fail at chosen places.

Every fault counts its shots. A block (or a test, through the fixture ``faults``) that
planted a fault which never fired fails: it would have shown nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pytest

from coordinator import messages as m
from coordinator.machine import Coordinator
from runtime import current_worker
from runtime.data.batches import batch_generator
from runtime.worker import worker_threads
from tests.support.running import builder, count_up, counter, numbers, plain_sgd

BOUND_S = 40.0
"""Bound of every wait in this folder, below its timeout."""


class Planted(RuntimeError):
    """The error of an injected fault."""


class Vanish(BaseException):
    """Ends a worker's thread without a message to the coordinator."""


@dataclass(slots=True)
class _Fault:
    what: str
    act: Callable[[], object]
    num_shots: int = 0


class Faults:
    """A ``train_fn`` that fails, vanishes, stalls or is slow at chosen steps.

    Steps are the calls of ``train_fn``, counted for each rank from 0. Faults of one place
    act in the order in which they were planted. Every method that plants one returns the
    injector. Thread-safe; use it in a ``with`` block, at whose end everything that stalls
    is released and every fault must have fired.

    Args:
        train_fn: The step without faults.
        model_factory: The same for :meth:`model`.

    Attributes:
        steps: Steps begun by each rank.
    """

    def __init__(
        self,
        train_fn: Callable[[Any, Any], Any] = count_up,
        model_factory: Callable[[Any], Any] = counter,
    ) -> None:
        self._train_fn = train_fn
        self._model_factory = model_factory
        self._faults: defaultdict[tuple[Any, ...], list[_Fault]] = defaultdict(list)
        self._changed = threading.Condition()
        self._untils: list[threading.Event] = []
        self._patch = pytest.MonkeyPatch()
        self.steps: Counter[int] = Counter()

    # -- planting ------------------------------------------------------------------

    def fail_at(self, *, rank: int, step: int, error: BaseException | None = None) -> Faults:
        """Raise in a step."""
        return self._plant(f"fail_at({rank=}, {step=})", _raising(error), "step", rank, step)

    def vanish_at(self, *, rank: int, step: int) -> Faults:
        """End the worker's thread in a step without a message to the coordinator."""
        return self._plant(f"vanish_at({rank=}, {step=})", _raising(Vanish()), "step", rank, step)

    def stall_at(self, *, rank: int, step: int, until: threading.Event) -> Faults:
        """Wait in a step until ``until`` is set, at the latest when the block ends."""
        return self._plant(f"stall_at({rank=}, {step=})", self._waiting(until), "step", rank, step)

    def hold(self, *, rank: int, step: int, until: threading.Event) -> Faults:
        """:meth:`stall_at`, with rank 0 beginning its first epoch only once that stalls."""
        begun = threading.Event()
        self._plant(f"hold({rank=}, {step=})", begun.set, "step", rank, step)
        self.stall_in_epoch(rank=0, epoch=0, until=begun)
        return self.stall_at(rank=rank, step=step, until=until)

    def stall_in_epoch(self, *, rank: int, epoch: int, until: threading.Event) -> Faults:
        """Wait before a rank's first batch of an epoch, where no time is measured."""
        what = f"stall_in_epoch({rank=}, {epoch=})"
        return self._plant(what, self._waiting(until), "epoch", rank, epoch)

    def meet_at(self, *, ranks: Sequence[int], step: int) -> Faults:
        """Let ranks wait for one another in a step, before its next fault."""
        barrier = threading.Barrier(len(ranks), timeout=BOUND_S)
        for rank in ranks:
            self._plant(f"meet_at({rank=}, {step=})", barrier.wait, "step", rank, step)
        return self

    def slow(self, *, rank: int, seconds: float) -> Faults:
        """Delay every step by ``seconds``."""
        assert 0 < seconds < 0.2, "a slow step is no way to win a race: use stall_at"
        pause = threading.Event()
        return self._plant(f"slow({rank=})", lambda: pause.wait(seconds), "every step", rank)

    def fail_in_build(self, *, rank: int, error: BaseException | None = None) -> Faults:
        """Raise in the rank's :meth:`model` factory."""
        return self._plant(f"fail_in_build({rank=})", _raising(error), "build", rank)

    def stall_in_build(self, *, rank: int, until: threading.Event) -> Faults:
        """Wait in the rank's :meth:`model` factory."""
        return self._plant(f"stall_in_build({rank=})", self._waiting(until), "build", rank)

    def fail_in_optimizer(self, *, rank: int) -> Faults:
        """Raise in the rank's :meth:`optim` factory."""
        return self._plant(f"fail_in_optimizer({rank=})", _raising(None), "optim", rank)

    def fail_in_eval(self, *, epoch: int, error: BaseException | None = None) -> Faults:
        """Raise in :meth:`evaluate`."""
        return self._plant(f"fail_in_eval({epoch=})", _raising(error), "eval", epoch)

    def fail_in_data(
        self, *, batch: int, epoch: int = 0, error: BaseException | None = None
    ) -> Faults:
        """Raise when :meth:`dataset` reads a batch, by its position in the epoch."""
        key = _key_of(epoch, batch)
        return self._plant(f"fail_in_data({batch=}, {epoch=})", _raising(error), "data", key)

    def stall_in_data(self, *, rank: int, read: int, until: threading.Event) -> Faults:
        """Wait in the ``read``-th read of :meth:`dataset` for a rank, from 0."""
        what = f"stall_in_data({rank=}, {read=})"
        return self._plant(what, self._waiting(until), "read", rank, read)

    def fail_in_read(self, *, rank: int, read: int) -> Faults:
        """Raise in the ``read``-th read of :meth:`dataset` for a rank, from 0."""
        return self._plant(f"fail_in_read({rank=}, {read=})", _raising(None), "read", rank, read)

    def _plant(self, what: str, act: Callable[[], object], *key: Any) -> Faults:
        with self._changed:
            self._faults[key].append(_Fault(what, act))
        return self

    def _waiting(self, until: threading.Event) -> Callable[[], None]:
        self._untils.append(until)

        def wait() -> None:
            assert until.wait(BOUND_S), "a stalled step was never released"

        return wait

    # -- the user's functions ----------------------------------------------------------

    def __call__(self, model: Any, batch: Any) -> Any:
        """The ``train_fn``."""
        rank = current_worker().rank
        with self._changed:
            step = self.steps[rank]
            self.steps[rank] += 1
            self._changed.notify_all()
        self._reached("step", rank, step)
        self._reached("every step", rank)
        return self._train_fn(model, batch)

    def model(self, device: Any) -> Any:
        """A model factory."""
        self._reached("build", current_worker().rank)
        return self._model_factory(device)

    def optim(self, params: Any) -> Any:
        """An optimizer factory."""
        self._reached("optim", current_worker().rank)
        return plain_sgd(params)

    def begin_epoch(self, epoch: int, worker: Any) -> None:
        """An ``epoch_fn``."""
        self._reached("epoch", worker.rank, epoch)

    def evaluate(self, model: Any, epoch: int) -> dict[str, float]:
        """An evaluation function."""
        self._reached("eval", epoch)
        return {"w": float(model.w)}

    def dataset(self, num_samples: int) -> _Reads:
        """A data set that is read on a loader's thread."""
        return _Reads(self, num_samples)

    def builder(self, **settings: Any) -> Any:
        """``builder()`` of the unit tests with this injector in every place."""
        b = builder(train=self, model=self.model, optim=self.optim, **settings)
        # Else a stalled read is one of the first, for which all ranks wait.
        return b.dataset_lock(False).epoch_fn(self.begin_epoch)

    def _reached(self, *key: Any) -> None:
        for fault in self._faults.get(key, ()):
            with self._changed:
                fault.num_shots += 1
                self._changed.notify_all()
            fault.act()

    # -- outcome ----------------------------------------------------------------

    @property
    def num_shots(self) -> int:
        """Number of fired faults."""
        with self._changed:
            return sum(f.num_shots for faults in self._faults.values() for f in faults)

    @property
    def missed(self) -> list[str]:
        """Faults that never fired."""
        with self._changed:
            return [f.what for faults in self._faults.values() for f in faults if not f.num_shots]

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait until ``ready()``, which is evaluated after each step and fault."""
        with self._changed:
            assert self._changed.wait_for(ready, BOUND_S), "the run did not get that far"

    def await_all(self) -> None:
        """Wait until every fault has fired; stalls may continue."""
        self.wait_for(lambda: not self.missed)

    def __enter__(self) -> Faults:
        handle = Coordinator.handle

        def deaf(machine: Coordinator, event: m.Event, now: float) -> Any:
            if isinstance(event, m.Failed) and isinstance(event.error, Vanish):
                return []
            return handle(machine, event, now)

        can_answer = worker_threads.can_answer

        def vanishes(worker: Any, error: BaseException) -> bool:
            return not isinstance(error, Vanish) and can_answer(worker, error)  # None: not built

        self._patch.setattr(Coordinator, "handle", deaf)
        self._patch.setattr(worker_threads, "can_answer", vanishes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patch.undo()
        for until in self._untils:
            until.set()
        if kind is None:
            assert not self.missed, f"never fired: {', '.join(self.missed)}"


class _Reads:
    """Sample ``i`` is ``i``; not in memory, so that it is read on a loader's thread."""

    def __init__(self, faults: Faults, num_samples: int) -> None:
        self._faults = faults
        self._column = numbers(num_samples)[0]
        self._lock = threading.Lock()
        self._num_reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._column)

    def get_batch(self, indices: Any) -> Any:
        worker = current_worker()
        with self._lock:
            read = self._num_reads[worker.rank]
            self._num_reads[worker.rank] += 1
        self._faults._reached("read", worker.rank, read)
        self._faults._reached("data", worker.generator.initial_seed())
        return (self._column[indices],)


def _raising(error: BaseException | None) -> Callable[[], None]:
    def fire() -> None:
        raise error or Planted("planted")

    return fire


def _key_of(epoch: int, batch: int) -> int:
    """Identifies a batch inside a data set: its generator, in a run of seed 0."""
    return batch_generator(0, epoch, batch).initial_seed()
