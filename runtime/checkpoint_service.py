"""CheckpointService: writes the coordinator's checkpoints, and answers calls of ``save()``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from coordinator.messages import LOOP_TICKET, Payload, SaveCheckpoint, SaveFailed
from coordinator.saved_run import SavedRun
from runtime.checkpoint.content import CheckpointData, SavedSampler, SavedSettings, SavedStream
from runtime.checkpoint.format import named_weights, plain
from runtime.checkpoint.optimizer_shards import missing_shards
from runtime.checkpoint.resume import check_content, check_sampler
from runtime.checkpoint.store import CheckpointWriter, entries, is_complete
from runtime.core.errors import CheckpointError
from runtime.data.epoch_index import EpochIndex
from runtime.data.stream import StreamAdapter
from runtime.replica.flat import FlatState
from runtime.settings import RunSettings

logger = logging.getLogger(__name__)

CLOSE_S = 600.0
"""Seconds that the end of a run waits for a slow disk."""

FAILED_CLOSE_S = 30.0
"""The same after a failure, whose error is then raised."""

POLL_S = 0.2
"""Interval at which that wait checks for an abort, in seconds."""

WARN_AFTER_S = 5.0
"""Seconds after which that wait is logged."""


_RESUME = "resume('{}') continues from it"


class CheckpointService:
    """Checkpoints of one run. Thread-safe.

    Args:
        settings: The run's settings; without ``checkpoint_dir`` only ``save()`` writes checkpoints.
        saved_settings: Settings that must match when resuming.
        index: Returns a sampler's orders and the state of its generator.
        stream: The data set, if it is a stream.
        on_refused: Called from any thread with the reason why the first checkpoint could not be
            taken or would not be resumed.

    Raises:
        CheckpointError: A run with these settings or this sampler could not be resumed.
    """

    def __init__(
        self,
        settings: RunSettings,
        saved_settings: SavedSettings,
        index: EpochIndex,
        stream: StreamAdapter | None,
        on_refused: Callable[[CheckpointError], None],
    ) -> None:
        self._writer: CheckpointWriter | None = None
        if settings.saves:
            _check_start(index.generator_state(0))
        if settings.checkpoint_dir is not None:
            _warn_of_other_checkpoints(settings.checkpoint_dir, settings.resume)
            self._writer = CheckpointWriter(
                settings.checkpoint_dir,
                settings.checkpoint_dir_keep,
                check=check_content,
                on_refused=on_refused,
            )
        self._on_refused = on_refused
        self._saved_settings = saved_settings
        self._index = index
        self._stream = stream
        self._layout: WeightLayout | None = None
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._num_tickets = 0
        self._last: CheckpointData | None = None
        self._has_warned = False
        self._over = False
        self._abandoned = False
        self._error: BaseException | None = None
        self._why: BaseException | None = None

    def bind_model(self, model: nn.Module, state: FlatState) -> None:
        """Set the model of rank 0, which has the names of the weights."""
        self._layout = WeightLayout(model, state)

    def take(self, command: SaveCheckpoint | SaveFailed, error: str = "") -> None:
        """Handle a command of the coordinator, on its thread; returns immediately.

        Args:
            error: The run's error, recorded in its last checkpoint.
        """
        if isinstance(command, SaveFailed):
            self._fail(command)
            writer = self._writer
            is_first = writer is not None and writer.wait(0.0) and not writer.num_written
            if is_first and not command.tickets and isinstance(command.error, CheckpointError):
                self._on_refused(command.error)
            return
        if self._layout is None:
            return  # no worker was built
        if missing := missing_shards(command.ranks):
            lost = CheckpointError(
                f"shards {missing} of the optimizer's state are lost with the ranks that held them"
            )
            self._fail(SaveFailed(error=lost, tickets=command.tickets))
            return
        data = self.data(command)
        if command.final:
            data = replace(data, reason=command.reason, error=error)
        is_kept = command.scheduled or LOOP_TICKET in command.tickets
        if is_kept and self._writer is not None:
            self._writer.submit(data)
        with self._lock:
            self._answer(command.tickets, data)
            if command.final:
                self._last = data

    def _answer(
        self, tickets: Sequence[int], data: CheckpointData | None, error: Exception | None = None
    ) -> None:
        """Answer calls of ``save()``; called with the lock held."""
        for number in tickets:
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                ticket.give(data, error)

    def data(self, command: SaveCheckpoint) -> CheckpointData:
        """The content of a checkpoint; its tensors are views of the command's."""
        assert self._layout is not None, "a model is built before its state is saved"
        return CheckpointData(
            weights=self._layout.weights(command.payload, command.ranks[0].module.frozen),
            ranks=command.ranks,
            run=command.run,
            settings=self._saved_settings,
            orders=self._index.sampled_orders(command.run.num_closed),
            sampler=self._index.generator_state(command.run.num_closed),
            stream=self._stream_state(command.run),
            within=command.within,
        )

    def _stream_state(self, run: SavedRun) -> SavedStream | None:
        """The stream's state at or before its first untrained batch."""
        if self._stream is None:
            return None
        epoch, batch = run.next_epoch, 0
        if run.epochs:
            oldest = run.epochs[0]
            epoch, spans = oldest.epoch, oldest.consumed
            batch = spans[0].stop if spans and spans[0].start == 0 else 0
        state = self._stream.state(epoch, batch)
        try:
            if state is None:
                return None
            return replace(state, stream=plain(state.stream, "the state of the stream"))
        except CheckpointError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s; a resumed run will read trained items again", error)
            return None

    def _fail(self, command: SaveFailed) -> None:
        error = command.error
        logger.error("no checkpoint could be taken: %s; training continues", error)
        with self._lock:
            self._error = error
            self._answer(command.tickets, None, error)

    def ticket(self) -> tuple[int | None, Ticket]:
        """Register a call of ``save()``; its number is ``None`` if the run is over."""
        ticket = Ticket()
        with self._lock:
            if self._over:
                ticket.give(self._last, self._why)
                return None, ticket
            self._num_tickets += 1
            self._tickets[self._num_tickets] = ticket
            return self._num_tickets, ticket

    def claim(self) -> None:
        """Lock the directory against other runs until :meth:`close`.

        Raises:
            CheckpointError: Another run holds it, or it is not writable.
        """
        if self._writer is not None:
            self._writer.claim()

    def release(self) -> None:
        """Unlock the directory of a run that could not start."""
        if self._writer is not None:
            self._writer.close(0.0)

    @property
    def newest(self) -> Path | None:
        """Directory of the last checkpoint written by this run."""
        return None if self._writer is None else self._writer.newest

    def abandon(self) -> None:
        """End a wait in :meth:`close`; acquires no lock."""
        self._abandoned = True

    def close(
        self, error: BaseException | None, *, forget: bool = True
    ) -> tuple[BaseException, ...]:
        """End of the run: answer all calls of ``save()`` and wait for the writer.

        Args:
            error: The run's error, if any.
            forget: Free the weight layout; :meth:`data` must not be called afterwards.

        Returns:
            The last error of taking and of writing a checkpoint, if any.
        """
        with self._lock:
            self._over, self._why = True, error
            for ticket in self._tickets.values():
                ticket.give(self._last, error)
            self._tickets.clear()
            if forget:
                self._layout = None
        writer = self._writer
        errors = () if self._error is None else (self._error,)
        if writer is None:
            return errors
        self._await(writer, CLOSE_S if error is None else FAILED_CLOSE_S)
        if not writer.close(0.0):
            late = CheckpointError(
                f"the run ended before its last checkpoint was written to {writer.directory}"
            )
            return (*errors, late)
        return errors if writer.last_error is None else (*errors, writer.last_error)

    def note(self, *, has_state: bool) -> str:
        """Location of the state that the run left, for its error; after :meth:`close`."""
        writer, last = self._writer, self._last
        if writer is None:
            if not has_state:
                return "No state could be kept, and no checkpoint_dir(path) was set"
            return (
                "handle.state holds the last consistent weights, and handle.state.save(path) "
                "writes them; with checkpoint_dir(path) a run can be resumed from there"
            )
        if last is None:
            return f"No newer state could be saved; {self._newest(writer)}"
        where = f"The state after {last.global_step} batches"
        if writer.wait(0.0) and not writer.last_failed:
            return f"{where} was saved to {writer.newest}; {_RESUME.format(writer.directory)}"
        error = writer.last_error if writer.wait(0.0) else "it is still being written"
        return (
            f"{where} could not be saved to {writer.directory}: {error}. handle.save(path) writes "
            f"it to another directory; {self._newest(writer)}"
        )

    @staticmethod
    def _newest(writer: CheckpointWriter) -> str:
        with suppress(OSError):
            for entry in entries(writer.directory):
                if is_complete(entry.path):
                    resume = _RESUME.format(writer.directory)
                    return f"the last complete checkpoint is {entry.path}, and {resume}"
        return f"there is no complete checkpoint in {writer.directory}"

    def _await(self, writer: CheckpointWriter, limit_s: float) -> None:
        """Wait for the writer, until :meth:`abandon` or at most ``limit_s``."""
        began, has_warned = time.monotonic(), False
        while not (writer.wait(POLL_S) or self._abandoned):
            waited = time.monotonic() - began
            if waited > limit_s:
                return
            if waited > WARN_AFTER_S and not has_warned:
                has_warned = True
                logger.warning(
                    "the run is over, and its last checkpoint is still being written to %s; a "
                    "second Ctrl-C stops waiting",
                    writer.directory,
                )


class Ticket:
    """One call of ``save()``, which waits for the state to write."""

    def __init__(self) -> None:
        # Not an Event: Ctrl-C may interrupt its Python code while it holds its lock.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._data: CheckpointData | None = None
        self._error: BaseException | None = None

    def give(self, data: CheckpointData | None, error: BaseException | None = None) -> None:
        """Answer the call; only the first answer has an effect."""
        if self._pending.locked():
            self._data, self._error = data, error
            self._pending.release()

    def wait(self, timeout_s: float) -> CheckpointData:
        """Block until the call is answered.

        Raises:
            TimeoutError: No answer in time.
            CheckpointError: The run ended without a full state.
        """
        if not self._pending.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"no step boundary was reached within {timeout_s:g} s")
        if self._data is not None:
            return self._data
        if isinstance(self._error, CheckpointError):
            raise self._error
        raise CheckpointError(
            "the run is over and kept no full state: call save() during the run, set "
            "checkpoint_dir(path), or write only the weights with state.save(path)"
        ) from self._error


class WeightLayout:
    """Builds state dicts from flat payloads, without the module."""

    def __init__(self, model: nn.Module, state: FlatState) -> None:
        self._params, self._buffers = state.params.viewer(), state.buffers.viewer()
        places: dict[int, tuple[str, int]] = {}
        for i, p in enumerate(state.params.params):
            places[id(p)] = ("param", i)
        for i, b in enumerate(state.buffers.tensors()):
            places[id(b)] = ("buffer", i)
        self._keys: list[tuple[str, tuple[str, int] | None]] = []
        self._frozen: dict[str, Tensor] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        self._frozen_names: dict[str, str] = {}
        for key, value in named_weights(model).items():
            place = places.get(id(value))
            self._keys.append((key, place))
            if place is None:
                # Frozen parameters rarely change: one copy serves all checkpoints.
                self._frozen[key] = value.detach().to("cpu")
                self._frozen_names[key] = names.get(id(value), key)

    def weights(self, payload: Payload, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The module's state dict with the payload's values, as views of it.

        Args:
            changed: Copies of frozen parameters that have changed, by name.
        """
        params, buffers = self._params(payload.params), self._buffers(payload)
        found: dict[str, Tensor] = {}
        for key, place in self._keys:
            if place is None:
                found[key] = changed.get(self._frozen_names[key], self._frozen[key])
            elif place[0] == "param":
                found[key] = params[place[1]]
            else:
                found[key] = buffers[place[1]]
        return found


def _check_start(sampler: SavedSampler | None) -> None:
    try:
        check_sampler(sampler)
    except ValueError as error:
        raise CheckpointError(
            f"no checkpoint of this run could be resumed: {error}. Correct it (a sampler needs a "
            "generator of the CPU), or train without checkpoint_dir(path)"
        ) from error


def _warn_of_other_checkpoints(directory: Path, resume: Path | None) -> None:
    """Warn about another run's checkpoints, which retention will remove."""
    if resume is not None and directory in (resume, resume.parent):
        return
    try:
        found = len(entries(directory))
    except OSError:
        return
    if found:
        logger.warning(
            "%s contains %d checkpoints of another run, which will be removed as new ones are "
            "written; resume from them with resume(path), or use another directory",
            directory,
            found,
        )
