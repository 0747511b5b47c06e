"""The end of groups whose owner is closed, or garbage.

Garbage is collected in the middle of anything, maybe in a thread that holds the lock of the
very group that shall be closed. So a finalizer takes no lock: it puts a note into a queue that
allows for that, and a thread closes the groups.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runtime.collective import Collective
from runtime.collective.base import Group
from runtime.device import cuda_api
from runtime.device.cuda_api import StreamSync
from runtime.fsdp.layout import SharedParameter

logger = logging.getLogger(__name__)


class Prefetch:
    """One all-gather, in a thread of its own and over a group of its own.

    On a GPU it runs on a stream of its own, behind what the current stream of the caller had
    been given, and is complete when the thread ends. The thread ends with the all-gather,
    which waits for peers no longer than its group allows and ends at an abort of that.

    Args:
        gather: Fills the tensors; called once, in the thread.
        fulls: What it fills, at least one.
        name: Of the thread.
        stream: Of the GPU, where it runs; ``None``: on a new one.

    Attributes:
        stream: Where it runs, for the next one; ``None`` on a CPU. One after the other on the
            same stream keep the memory of one.
    """

    def __init__(
        self,
        gather: Callable[[Sequence[Tensor]], None],
        fulls: Sequence[Tensor],
        name: str,
        stream: cuda_api.Stream | None = None,
    ) -> None:
        self.stream = stream
        self._gather = gather
        self._fulls = fulls
        self._error: BaseException | None = None
        self._api = cuda_api.API
        device = self._api.device_of(fulls[0])
        self._device: torch.device | None = device if device.type == "cuda" else None
        self._sync = StreamSync()
        self._behind = self._sync.mark(device)
        if self._device is not None and stream is None:
            self.stream = self._api.new_stream(self._device)
        # A daemon: the interpreter must not wait for a peer that never comes.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> Sequence[Tensor]:
        """Waits for the end; gives the tensors, filled, or raises what the thread raised, once."""
        self.end()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads back to here
        return self._fulls

    def end(self) -> None:
        """Waits for the end, whatever it is."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                if self._device is not None:
                    stack.enter_context(self._api.on_device(self._device))
                    stack.enter_context(self._api.stream(self.stream))
                    self._sync.wait(self._device, [self._behind])
                self._gather(self._fulls)
                if self._device is not None:
                    # The memory belongs to the caller's stream: nothing may be pending here.
                    self._sync.wait_host(self._sync.mark(self._device))
        except BaseException as error:
            self._error = error


StepCheck = Callable[[Optimizer], None]
"""Called before a step of an optimizer; raises if gradients wait for their reduction."""


# Such optimizers are found at their next step: looking through the whole heap for them when a
# module is wrapped takes seconds in a large process.


class SilentSteps:
    """Refuses steps that would train nothing, or each rank by itself. Thread-safe.

    Those are steps on parameters that the module no longer uses, since they were sharded, and
    steps on shards whose gradients were not reduced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sharded: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._shards: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[StepCheck]]] = {}
        self._version = 0
        self._checked: weakref.WeakKeyDictionary[
            Optimizer, tuple[int, Sequence[weakref.ref[StepCheck]]]
        ] = weakref.WeakKeyDictionary()

    def watch(
        self,
        check: StepCheck,
        shards: Iterable[nn.Parameter],
        sharded: Sequence[SharedParameter] = (),
    ) -> None:
        """Call a method, held weakly, before steps on shards; refuse those on what was sharded."""
        method = weakref.WeakMethod(check)
        with self._lock:
            if self._version == 0:
                register_optimizer_step_pre_hook(self._check)
            self._version += 1
            for known in (self._sharded, self._shards):
                for key in [key for key, (ref, _) in known.items() if ref() is None]:
                    del known[key]
            for each in sharded:
                self._sharded[id(each.parameter)] = weakref.ref(each.parameter), each.name
            for shard in shards:
                self._shards[id(shard)] = weakref.ref(shard), method

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """They are their module's again."""
        with self._lock:
            for parameter in parameters:
                self._sharded.pop(id(parameter), None)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before each step of any optimizer; looks at its parameters once.

        Raises:
            ValueError: They were sharded.
            RuntimeError: Gradients of these shards were not reduced.
        """
        with self._lock:
            version, checks = self._checked.get(optimizer, (0, ()))
            if version != self._version:
                checks = self._checks_of(optimizer)
                self._checked[optimizer] = self._version, checks
        for ref in checks:
            if (check := ref()) is not None:
                check(optimizer)

    def _checks_of(self, optimizer: Optimizer) -> Sequence[weakref.ref[StepCheck]]:
        found: dict[int, weakref.ref[StepCheck]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                ref, name = self._sharded.get(id(p), (None, ""))
                if ref is not None and ref() is p:
                    raise ValueError(
                        f"{type(optimizer).__name__} was built from {name!r} before the module "
                        "was wrapped, and would train nothing; build the optimizer from "
                        "fsdp.parameters()"
                    )
                shard = self._shards.get(id(p))
                if shard is not None and shard[0]() is p:
                    found[id(shard[1])] = shard[1]
        return tuple(found.values())


SILENT_STEPS = SilentSteps()
"""That of the process."""


class _Failure(NamedTuple):
    """Where a rank failed.

    Attributes:
        end: Its end; a group must not be kept alive by what is known of its calls.
        reason: What the others are told.
    """

    end: weakref.ref[Collective]
    reason: str


class Calls:
    """The collective calls of a group, and the ranks that failed before one. Thread-safe.

    All ranks make the same calls in the same order, so each counts its own. A call that fails
    before anything was exchanged is no matter if it fails on every rank: all go on. If it
    fails on some alone, the others would wait for them in it or in the next: the group is
    aborted through a rank that failed, as soon as one rank has failed and another has not,
    whoever comes first.

    Args:
        world_size: How many ranks there are.

    Attributes:
        reason: Why the group was aborted, if it was for a rank's failure; the first stands.
    """

    def __init__(self, world_size: int) -> None:
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._numbers = [0] * world_size
        # Of each call that not all have made: what became of the ranks that told.
        self._told: dict[int, dict[int, _Failure | None]] = {}

    def made(self, end: Collective) -> None:
        """A rank makes its next call."""
        self._tell(end, None, counts=True)

    def refused(self, end: Collective, error: BaseException) -> None:
        """A rank's next call has failed before anything was exchanged."""
        self._tell(end, error, counts=True)

    def failed(self, end: Collective, error: BaseException) -> None:
        """A rank has failed between two calls."""
        self._tell(end, error, counts=False)

    def broke(self, end: Collective, error: BaseException) -> None:
        """A rank has failed in a call that the others are in: aborts the group."""
        with self._lock:
            self.reason = self.reason or _reason(end, error)
        end.abort()

    def _tell(self, end: Collective, error: BaseException | None, *, counts: bool) -> None:
        rank = end.rank
        with self._lock:
            number = self._numbers[rank]
            told = self._told.setdefault(number, {})
            # A failure before a call stands, even if the call is made then.
            if error is not None:
                told[rank] = _Failure(weakref.ref(end), _reason(end, error))
            elif rank not in told:
                told[rank] = None
            if counts:
                self._numbers[rank] += 1
                if min(self._numbers) > number:
                    del self._told[number]
            failures = [failure for failure in told.values() if failure is not None]
            if not failures or len(failures) == len(told):
                return
            self.reason = self.reason or failures[0].reason
        # Not under the lock; through the rank that failed, which the error names then.
        (failures[0].end() or end).abort()


def _reason(end: Collective, error: BaseException) -> str:
    return f"rank {end.rank} failed: {type(error).__name__}: {error}"


_LOCK = threading.Lock()  # no finalizer takes it
_CALLS: weakref.WeakKeyDictionary[Group, Calls] = weakref.WeakKeyDictionary()


def calls_of(end: Collective) -> Calls:
    """What all ranks of a group tell each other through, whatever they wrap."""
    with _LOCK:
        return _CALLS.setdefault(end._group, Calls(end.world_size))


EXIT_S = 5.0
"""How long the thread may take to end with the interpreter."""


class OwnedGroups:
    """Groups that are closed with :meth:`close`, with this object and with the interpreter.

    For the thread of its owner.
    """

    def __init__(self) -> None:
        self._groups: list[Collective] = []
        self._finalizer: weakref.finalize[..., OwnedGroups] | None = None
        self._number = -1

    def add(self, groups: Sequence[Collective]) -> None:
        """Take charge of groups; if that fails they are closed."""
        self._groups.extend(groups)
        if not groups or self._finalizer is not None:
            return
        try:
            self._number = CLOSER.watch(self._groups)
        except BaseException:
            _close(self._groups)
            raise
        self._finalizer = weakref.finalize(self, CLOSER.notes.put, self._number)
        self._finalizer.atexit = False  # see Closer.close_all

    def close(self) -> None:
        """Close them in the calling thread. Idempotent."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            CLOSER.close(self._number)


class Closer:
    """Closes the groups of those that are garbage. Thread-safe.

    Its thread, a daemon, lives while there is anything that it may have to close.

    Attributes:
        notes: Numbers of what is garbage; may be put wherever garbage is collected.
    """

    def __init__(self) -> None:
        self.notes: SimpleQueue[int] = SimpleQueue()
        self._lock = threading.Lock()  # never taken by a finalizer
        self._numbers = itertools.count()
        self._open: dict[int, list[Collective]] = {}
        self._thread: threading.Thread | None = None

    def watch(self, groups: list[Collective]) -> int:
        """Groups that may have to be closed; gives their number.

        Raises:
            RuntimeError: No thread could be started.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fsdp-closer", daemon=True)
                thread.start()
                self._thread = thread
            number = next(self._numbers)
            self._open[number] = groups
            return number

    def close(self, number: int) -> None:
        """Close groups in the calling thread; nothing if that was done."""
        with self._lock:
            groups = self._open.pop(number, [])
        try:
            _close(groups)
        finally:
            self.notes.put(number)  # the thread may have no more to do

    def close_all(self) -> None:
        """Close everything, and end the thread."""
        with self._lock:
            thread = self._thread
            numbers = list(self._open)
        for number in numbers:
            self.close(number)
        if thread is not None:
            thread.join(EXIT_S)

    def _run(self) -> None:
        while True:
            number = self.notes.get()
            with self._lock:
                groups = self._open.pop(number, [])
            _close(groups)
            del groups
            with self._lock:
                if not self._open:
                    self._thread = None
                    return


def _close(groups: Sequence[Collective]) -> None:
    for group in groups:
        try:
            group.close()
        except Exception:
            logger.warning("rank %d: a subgroup did not close", group.rank, exc_info=True)


CLOSER = Closer()
"""That of the process."""
atexit.register(CLOSER.close_all)
