"""What an FSDP module is, but for training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from runtime.collective import Collective, split
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, ReplicaMismatch
from runtime.fsdp.agreement import check_same
from runtime.fsdp.calls import calls_of
from runtime.fsdp.found import Found, describe, find_parameters
from runtime.fsdp.lifecycle import OwnedGroups
from runtime.fsdp.replicated import ReplicatedParameters
from runtime.fsdp.sharded import ShardedParameters
from runtime.fsdp.stale import STALE
from runtime.fsdp.state import Parameters, gather_state, load_state, sync_buffers
from runtime.fsdp.strategy import ShardGroups, ShardingStrategy, check_strategy, make_groups


class ShardedModule(nn.Module):
    """Wrapping, the whole state, and the end; see :class:`~runtime.fsdp.module.FSDP`."""

    def __init__(
        self,
        module: nn.Module,
        collective: Collective,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(collective, Collective):
            raise TypeError(
                f"collective={collective!r}: pass one rank's end of create_collectives(...)"
            )
        check_strategy(strategy, collective.world_size, intra_node_size)
        found = find_parameters(module)
        if any(isinstance(part, ShardedModule) for part in module.modules()):
            raise ValueError("the module contains an FSDP already; wrap the whole module once")
        self.module = module
        self.collective = collective
        self.strategy = strategy
        self._closed = False
        self._has_forward = False
        self._subgroups = OwnedGroups()
        self._calls = calls_of(collective)
        with self._aborting():
            how = f"the strategy {strategy.name} with intra_node_size={intra_node_size}"
            check_same([how, *describe(module, found)], collective)
            groups = make_groups(collective, strategy, intra_node_size)
            self._subgroups.add(groups.owned)
            self._groups = groups
            self._store: Parameters = _make_parameters(found, collective, groups, strategy)
            sync_buffers(module, collective)
        if strategy is not ShardingStrategy.NO_SHARD:  # which keeps the module's own
            STALE.watch(found)

    # -- state ------------------------------------------------------------------------------

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The bare module's state dict, in memory of the CPU; a collective call.

        Args:
            rank: Who gets it; ``None``: everybody.

        Returns:
            Full parameters, rank 0's buffers, with the keys of the bare module; an empty dict
            on a rank that does not get it.
        """
        if rank is not None and not 0 <= rank < self.collective.world_size:
            raise ValueError(f"rank={rank}: pass a rank under {self.collective.world_size}")
        with self._agreeing():
            self._check_open()
            self._store.check_shards()
        wanted = rank is None or rank == self.collective.rank
        with self._aborting():
            self._store.wait_prefetch()
            return gather_state(self.module, self._store, self.collective, wanted=wanted)

    def load_full_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of a state of the bare module; not collective.

        It may come from :meth:`full_state_dict` at any world size and strategy, or from the bare
        module, and must be the same on every rank, which may share it: it is only read.

        Args:
            state_dict: Tensors of the full shapes, on any device.
            strict: Whether the keys must be exactly those of the bare module.

        Raises:
            ValueError: Keys or shapes do not fit; nothing was changed.
            RuntimeError: A prefetch is pending, or gradients were not synced.
        """
        self._check_open()
        self._refuse_pending("load_full_state_dict()")
        if self._has_forward:
            raise RuntimeError(
                "load_full_state_dict() between forward() and sync_gradients(); call reshard() "
                "first to drop the step"
            )
        load_state(self.module, self._store, state_dict, strict=strict)

    def sync_buffers(self) -> None:
        """Every rank takes rank 0's buffers; a collective call."""
        with self._agreeing():
            self._check_open()
        with self._aborting():
            self._store.wait_prefetch()
            sync_buffers(self.module, self.collective)

    def unwrap(self) -> nn.Module:
        """Gives the bare module back with full parameters, and ends the wrapper.

        A collective call. The wrapper, its shards and optimizers of them are of no use after it.
        """
        with self._agreeing():
            self._check_open()
            self._store.check_shards()
        with self._aborting():
            self._store.drop_prefetch()
            self._store.restore()
        STALE.forget(self.module.parameters())
        self.close()
        return self.module

    def close(self) -> None:
        """Ends the wrapper and the groups it made, a prefetch included. Idempotent.

        Garbage collection does the same, in a thread called ``fsdp-closer``. The collective
        stays open.
        """
        self._closed = True
        self._subgroups.close()
        self._store.drop_prefetch()  # its group is closed, so it ends

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the shards' gradients, and drops those that were not synced."""
        self._store.drop_gradients()
        super().zero_grad(set_to_none)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards with the names of the parameters, whatever the module holds now."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._store.shard_of(parameter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards and buffers, for this rank at this world size."""
        with self._store.as_shards():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes what :meth:`state_dict` gave on this rank at this world size."""
        self._refuse_pending("load_state_dict()")
        with self._store.as_shards():
            return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise RuntimeError(
            "an FSDP module cannot be moved or converted: its shards are views of a flat tensor; "
            "call .to(...) on the bare module before wrapping"
        )

    # -- inside ---------------------------------------------------------------------------------

    def _make_side(self) -> Collective:
        side = split(self._groups.shard, 0)
        self._subgroups.add([side])
        return side

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this FSDP module was closed or unwrapped")

    def _refuse_pending(self, what: str) -> None:
        if self._store.is_prefetching:
            raise RuntimeError(f"{what} while a prefetch is pending; call forward() first")

    @contextmanager
    def _agreeing(self, *, counts: bool = True) -> Iterator[None]:
        """Around what is looked at before a collective call: all ranks make it, or none does.

        Wrong arguments do not belong here: who is told of them may pass others.

        Args:
            counts: Whether the call behind it is one that ranks make together.
        """
        try:
            yield
        except BaseException as error:
            tell = self._calls.refused if counts else self._calls.failed
            tell(self.collective, error)
            raise
        if counts:
            self._calls.made(self.collective)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Aborts the group when an exception leaves, so that no peer waits for this rank.

        Modules that differ are found by all ranks, in an exchange that is complete.
        """
        try:
            yield
        except ReplicaMismatch:
            raise
        except (CollectiveAborted, CollectiveTimeout) as error:
            self.collective.abort()  # it may have been a subgroup's
            if self._calls.reason is None:
                raise
            raise CollectiveAborted(self._calls.reason) from error
        except BaseException as error:
            self._calls.broke(self.collective, error)
            raise


def _make_parameters(
    found: list[Found], world: Collective, groups: ShardGroups, strategy: ShardingStrategy
) -> Parameters:
    if strategy is ShardingStrategy.NO_SHARD:
        return ReplicatedParameters(found, world)
    keep_full = not strategy.frees_parameters
    return ShardedParameters(found, world, groups, keep_full=keep_full)
