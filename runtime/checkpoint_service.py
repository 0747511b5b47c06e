"""From the coordinator's checkpoints to files, and to those who asked for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coordinator.messages import Payload, SaveCheckpoint, SaveFailed
from runtime.checkpoint.format import CheckpointData, named_weights, plain
from runtime.checkpoint.store import CheckpointWriter, entries
from runtime.core.errors import CheckpointError
from runtime.replica.flat import FlatState
from runtime.settings import RunSettings

logger = logging.getLogger(__name__)

SampledOrders = Callable[[int], dict[int, Tensor]]
"""Gives the orders of an epoch and those after it that are not to be had again."""

SamplerState = Callable[[int], dict[str, Any] | None]
"""Gives the state of a sampler's own generator before an epoch or one after it."""

StreamState = Callable[[int, int], dict[str, Any] | None]
"""Gives the state from which a stream comes to a batch of an epoch."""

CLOSE_S = 600.0
"""How long the end of a run waits for a slow disk."""

POLL_S = 0.2
"""How long it may take until an abort ends that wait."""

WARN_AFTER_S = 5.0
"""After how long that wait is told of."""


class CheckpointService:
    """What a run writes. Every method may be called from any thread.

    Args:
        config: Says whether checkpoints go to a directory, and how many stay there; else they go
            only where a call of ``save()`` says.
        compatible: The settings that must agree where one is continued.
        orders: See :meth:`EpochIndex.sampled_orders <runtime.data.epoch_index.EpochIndex.drawn>`.
        sampler: See :meth:`EpochIndex.generator_state
            <runtime.data.epoch_index.EpochIndex.generator_state>`.
        stream: See :meth:`StreamAdapter.state <runtime.data.stream.StreamAdapter.state>`;
            ``None``: there is no stream.
    """

    def __init__(
        self,
        config: RunSettings,
        compatible: dict[str, Any],
        orders: SampledOrders,
        sampler: SamplerState,
        stream: StreamState | None,
    ) -> None:
        self._writer: CheckpointWriter | None = None
        if config.checkpoint_dir is not None:
            _warn_of_other_checkpoints(config.checkpoint_dir, config.resume)
            self._writer = CheckpointWriter(config.checkpoint_dir, config.checkpoint_dir_keep)
        self._compatible = compatible
        self._orders = orders
        self._sampler = sampler
        self._stream = stream
        self._layout: WeightLayout | None = None
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._num_tickets = 0
        self._last: CheckpointData | None = None
        self._over = False
        self._abandoned = False
        self._error: BaseException | None = None
        self._why: BaseException | None = None

    def bind_model(self, model: nn.Module, state: FlatState) -> None:
        """Rank 0 is built: from here on weights have names."""
        self._layout = WeightLayout(model, state)

    def take(self, command: SaveCheckpoint | SaveFailed) -> None:
        """Hand a checkpoint on; returns at once. On the coordinator's thread."""
        if isinstance(command, SaveFailed):
            self._fail(command)
            return
        if self._layout is None:
            return  # nobody was ever built
        data = self.data(command)
        if command.scheduled and self._writer is not None:
            self._writer.submit(data)
        with self._lock:
            self._answer(command.tickets, data)
            if command.final:
                self._last = data

    def _answer(
        self, tickets: Sequence[int], data: CheckpointData | None, error: Exception | None = None
    ) -> None:
        """Under the lock."""
        for number in tickets:
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                ticket.give(data, error)

    def data(self, command: SaveCheckpoint) -> CheckpointData:
        """What a checkpoint is written as; its tensors are views of the command's."""
        assert self._layout is not None, "a model is built before its state is saved"
        return CheckpointData(
            weights=self._layout.weights(command.payload, command.ranks[0]["frozen"]),
            ranks=command.ranks,
            run=command.run,
            compatible=self._compatible,
            epoch=command.epoch,
            global_step=command.global_step,
            orders=self._orders(command.epoch),
            sampler=self._sampler(command.epoch),
            stream=self._stream_state(command.run),
            within=command.within,
        )

    def _stream_state(self, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """From where a stream comes to the first batch that is not trained."""
        if self._stream is None:
            return None
        epoch, batch = run["next_epoch"], 0
        if run["epochs"]:
            oldest = run["epochs"][0]
            epoch, spans = oldest["epoch"], oldest["consumed"]
            batch = spans[0][1] if spans and spans[0][0] == 0 else 0
        state = self._stream(epoch, batch)
        try:
            return None if state is None else dict(plain(state, "the state of the stream"))
        except CheckpointError as error:
            logger.warning("%s; a resumed run will read what was trained again", error)
            return None

    def _fail(self, command: SaveFailed) -> None:
        error = command.error
        logger.error("no checkpoint could be made: %s; training goes on", error)
        with self._lock:
            self._error = error
            self._answer(command.tickets, None, error)

    def ticket(self) -> tuple[int | None, Ticket]:
        """A call of ``save()``: its number for the coordinator, unless the run is over."""
        ticket = Ticket()
        with self._lock:
            if self._over:
                ticket.give(self._last, self._why)
                return None, ticket
            self._num_tickets += 1
            self._tickets[self._num_tickets] = ticket
            return self._num_tickets, ticket

    def claim(self) -> None:
        """The run begins: keep other runs out of its directory until :meth:`close`.

        Raises:
            CheckpointError: Another live run has it, or it cannot be written to.
        """
        if self._writer is not None:
            self._writer.claim()

    def release(self) -> None:
        """The run could not begin: give its directory up."""
        if self._writer is not None:
            self._writer.close(0.0)

    def abandon(self) -> None:
        """Let :meth:`close` wait no longer; takes no lock."""
        self._abandoned = True

    def close(
        self, error: BaseException | None, *, forget: bool = True
    ) -> tuple[BaseException, ...]:
        """The run is over: answer everybody, and wait for what is being written.

        Args:
            error: How it ended, if not well.
            forget: Whether :meth:`data` is not called any more.

        Returns:
            The last error of making and of writing one, if there was any.
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
        self._await(writer)
        if not writer.close(0.0):
            late = CheckpointError(
                f"the end of the run did not wait for the last checkpoint to {writer.directory}"
            )
            return (*errors, late)
        return errors if writer.last_error is None else (*errors, writer.last_error)

    def _await(self, writer: CheckpointWriter) -> None:
        """Wait for what is being written, until :meth:`abandon` or for :data:`CLOSE_S`."""
        began, told = time.monotonic(), False
        while not (writer.wait(POLL_S) or self._abandoned):
            waited = time.monotonic() - began
            if waited > CLOSE_S:
                return
            if waited > WARN_AFTER_S and not told:
                told = True
                logger.warning(
                    "the run is over, and its last checkpoint is still being written to %s; the "
                    "second Ctrl-C no longer waits for it",
                    writer.directory,
                )


class Ticket:
    """One call of ``save()``: waits for the state that it shall write."""

    def __init__(self) -> None:
        # Not an Event: Ctrl-C may leave its Python code in the middle, with its lock held.
        self._waits = threading.Lock()
        self._waits.acquire()
        self._data: CheckpointData | None = None
        self._error: BaseException | None = None

    def give(self, data: CheckpointData | None, error: BaseException | None = None) -> None:
        """Answer the call; the first answer counts."""
        if self._waits.locked():
            self._data, self._error = data, error
            self._waits.release()

    def wait(self, timeout_s: float) -> CheckpointData:
        """Block until it is answered.

        Raises:
            TimeoutError: It was not in time.
            CheckpointError: The run ended without a state.
        """
        if not self._waits.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"no step boundary was reached within {timeout_s:g} s")
        if isinstance(self._error, CheckpointError):
            raise self._error
        if self._data is None:
            raise CheckpointError(
                "the run is over and kept no full state: call save() while it runs, set "
                "checkpoint_dir(path), or write the weights alone with state.save(path)"
            ) from self._error
        return self._data


class WeightLayout:
    """Makes a state dict of flat payloads, without the module.

    Args:
        model: A replica, built.
        state: Its flat state.
    """

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
                # Few ever change: one copy serves all checkpoints, none is needed on a CPU.
                self._frozen[key] = value.detach().to("cpu")
                self._frozen_names[key] = names.get(id(value), key)

    def weights(self, payload: Payload, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The module's state dict with the payload's values, as views of it.

        Args:
            payload: The average.
            changed: Frozen parameters that are not as they were at first, by name; copies.
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


def _warn_of_other_checkpoints(directory: Path, resume: Path | None) -> None:
    """Warn of checkpoints that are not this run's, and will give way to its own."""
    if resume is not None and directory in (resume, resume.parent):
        return
    try:
        found = len(entries(directory))
    except OSError:
        return
    if found:
        logger.warning(
            "%s holds %d checkpoints of another run, which are removed as those of this one come; "
            "go on from them with resume(path), or name another directory",
            directory,
            found,
        )
