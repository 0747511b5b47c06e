"""FSDP: a module with sharded parameters, gradients and optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from runtime.checkpoint.format import plain_key
from runtime.collective import Collective, split
from runtime.core.checks import in_func_transform
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, ReplicaMismatch
from runtime.core.loss_weights import check_weight
from runtime.core.module_wrapper import ModuleWrapper, is_own_method
from runtime.core.nested import tensors_in
from runtime.core.process_state import CompileLimits, ProcessState, import_dynamo
from runtime.core.rng import adopt_generator, seed_of
from runtime.fsdp.call_agreement import agreement_of
from runtime.fsdp.full_state import ParameterStore, gather_state, load_state, sync_buffers
from runtime.fsdp.group_closer import OwnedGroups
from runtime.fsdp.replicated import ReplicatedParameters
from runtime.fsdp.sharded import ShardedParameters
from runtime.fsdp.sharded_norm import check_clip, clip_by_, sharded_norm
from runtime.fsdp.shared_parameters import (
    CLAIMS,
    SharedParameter,
    check_same_on_all_ranks,
    describe_module,
    find_parameters,
)
from runtime.fsdp.strategy import ShardGroups, ShardingStrategy, check_strategy, make_groups
from runtime.replica.flat import views_of
from runtime.replica.gradients import scale_for_mean_
from runtime.replica.optimizers import needs_whole_parameters
from runtime.replica.rank_statistics import warn_of_frequencies
from runtime.replica.step_checks import STEP_CHECKS

logger = logging.getLogger(__name__)

IN_TRANSFORM = (
    "FSDP: forward was called inside a transform of torch.func (grad, vmap, jacrev), which would "
    "include the gathering of parameters: use torch.autograd.grad(..., create_graph=True), or "
    "NO_SHARD"
)
CHANGED_GRADIENTS = (
    "FSDP: gradients were changed between sync_gradients() and the optimizer's step. A rank holds "
    "a part of them: torch.nn.utils.clip_grad_norm_, and other helpers that read all gradients, "
    "compute another result on each rank. Use fsdp.clip_grad_norm_(max_norm). Elementwise changes, "
    "such as scaling by a constant, are right"
)


class FSDP(ModuleWrapper):
    """A module whose parameters, gradients and optimizer state are sharded over the ranks.

    The algorithm is ZeRO's (Rajbhandari et al., 2020). Each rank builds its own wrapper in its
    own thread, with its own module. All ranks call the same methods in the same order::

        fsdp = FSDP(Net(), collective)
        optimizer = torch.optim.AdamW(fsdp.parameters())
        for x, y in batches:                    # each rank its own
            optimizer.zero_grad()
            loss_fn(fsdp(x), y).backward()
            fsdp.sync_gradients()               # the mean over the ranks
            fsdp.clip_grad_norm_(1.0)           # not torch.nn.utils.clip_grad_norm_
            optimizer.step()
            fsdp.broadcast_updated_params()     # only needed for SHARD_GRAD_OP

    Wrapping, ``forward``, ``sync_gradients`` and every method called a collective call below
    block until all ranks have called them, at most for the collective's timeout. Work runs on
    the calling thread's current stream.

    **Errors.** A failure inside a collective call aborts the collective, so that no rank waits.
    A misuse detected before any exchange, or an exception of the module, changes nothing if all
    ranks raise it: all may continue. If only some ranks raise it, the collective is aborted at
    once, and the other ranks raise ``CollectiveAborted``, which names a rank that failed. If two
    ranks make different calls, both raise it, with both calls; a call of some ranks alone names
    the others, once they have closed their collectives or the timeout has passed. Invalid
    arguments abort nothing: call again with valid ones. The wrapper does not detect exceptions
    outside its methods, in backward for instance: a rank that leaves its loop by an exception
    must close or abort its collective, so that the others stop waiting.

    **Parameters.** ``parameters()`` yields this rank's shards: a one-dimensional tensor for each
    parameter, some of them empty if a parameter has fewer elements than there are ranks. They
    are views of one flat tensor for each dtype. For ``NO_SHARD`` they are the module's own.
    Build the optimizer from them, after wrapping. Tied parameters are one parameter and stay
    tied; frozen ones are sharded too, and get no gradient; dtypes may be mixed. All ranks start
    with rank 0's parameters and buffers. Buffers are not sharded; each rank updates its own,
    and :meth:`sync_buffers` and :meth:`full_state_dict` use rank 0's.

    **Memory.** Under ``FULL_SHARD`` and ``HYBRID_SHARD`` the full parameters exist from
    ``forward`` until :meth:`sync_gradients`, or until the end of ``forward`` if gradients are
    disabled. Backward keeps them and does not gather again: the whole module is one unit, so
    all of them are needed at the start of backward anyway. A rank's peak memory is thus its
    shards, full parameters, full gradients and activations. :meth:`sync_gradients` frees the
    full parameters before it reduces, and the full gradients once they are reduced. Wrap
    evaluation in ``torch.no_grad()``, or call :meth:`reshard` after it.

    **Gradients** are averaged over all ranks, with equal weights or those of
    :meth:`sync_gradients`. They add up over several backward passes, and over several calls of
    :meth:`sync_gradients` until ``zero_grad``. :meth:`zero_grad` of this object and
    :meth:`reshard` drop full gradients that were not synced; the optimizer's ``zero_grad`` does
    not.

    Clip gradients only with :meth:`clip_grad_norm_` of this object.
    ``torch.nn.utils.clip_grad_norm_(fsdp.parameters(), ...)``, and other helpers that read all
    gradients at once, read only this rank's shards; a warning names them.

    **Random numbers.** From here on the calling thread draws on the CPU from a generator of its
    own, seeded by ``torch.initial_seed()`` and the rank; the main thread from PyTorch's default
    one, as ever.

    **Parameter groups.** A shard carries the attributes of its original, and ``original_shape`` and
    ``original_name``. Make groups by these, or with :meth:`param_groups`.

    Args:
        module: On its device, with its final dtypes, the same on every rank. The wrapper owns
            it from here on.
        collective: This rank's collective; the caller keeps ownership and closes it.
        strategy: The state to shard.
        intra_node_size: For ``HYBRID_SHARD``: ranks of a node, contiguous; divides the world
            size.

    Attributes:
        module: The bare module. It holds the shards in place of its parameters, except between
            ``forward`` and :meth:`sync_gradients`.
        collective: As passed.
        strategy: As passed.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: There are no parameters, or some cannot be sharded; the strategy does not
            fit the world size; an optimizer was built from the bare module.
        ReplicaMismatch: The ranks' modules or strategies differ.
    """

    VARIABLE = "fsdp"
    OWNER = "FSDP"
    module: nn.Module

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
                f"collective={collective!r}: pass one of the collectives of create_collectives(...)"
            )
        check_strategy(strategy, collective.world_size, intra_node_size)
        found = find_parameters(module)
        if any(isinstance(part, FSDP) for part in module.modules()):
            raise ValueError("the module contains an FSDP already; wrap the whole module once")
        import_dynamo()
        CompileLimits.extend(collective.world_size)
        self.module = module
        self.collective = collective
        self.strategy = strategy
        self._closed = False
        self._has_forward = False
        self._has_warned = False
        self._subgroups = OwnedGroups()
        self._calls = agreement_of(collective)
        self._generator = torch.Generator()
        self._generator.manual_seed(seed_of(torch.initial_seed(), collective.rank))
        self._adopt_generator()
        with self._agreeing("FSDP(...)"):
            pass
        with self._aborting():
            CLAIMS.claim(((each.name, each.parameter) for each in found), self)
            how = f"the strategy {strategy.name} with intra_node_size={intra_node_size}"
            check_same_on_all_ranks([how, *describe_module(module, found)], collective)
            groups = make_groups(collective, strategy, intra_node_size)
            self._subgroups.add(groups.owned)
            self._groups = groups
            self._store: ParameterStore = _make_parameters(found, collective, groups, strategy)
            CLAIMS.claim(zip(self._store.names, self._store.shards, strict=True), self)
            sync_buffers(module, collective)
        if collective.rank == 0 and collective.world_size > 1:
            warn_of_frequencies(module)
        sharded = {}
        if strategy is not ShardingStrategy.NO_SHARD:
            sharded = {each.name: each.parameter for each in found}
        STEP_CHECKS.watch(self._check_synced, self._store.shards, sharded)
        self._seal(logs=collective.rank == 0)

    def _wrapped(self) -> nn.Module:
        return cast("nn.Module", self._modules["module"])

    def _adopted(self, value: Any) -> Any:
        if isinstance(value, (nn.Module, nn.Parameter)):
            raise RuntimeError(
                "FSDP shards a module's parameters when it wraps it: add, replace or delete "
                "modules and parameters before FSDP(...)"
            )
        return value

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if is_own_method(value) and self.strategy is not ShardingStrategy.NO_SHARD:
            raise AttributeError(
                f"fsdp.{name}: only calls of fsdp itself gather the parameters. Call {name} in the "
                f"module's forward, or fsdp.module.{name} if it uses no parameters"
            )
        return value

    def _adopt_generator(self) -> None:
        if self.collective.world_size > 1:
            adopt_generator(self._generator)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with full parameters; a collective call if they must be gathered.

        Waits for a pending prefetch. With gradients enabled the full parameters stay until
        :meth:`sync_gradients`, and further calls before that use them.

        Raises:
            RuntimeError: The shards were changed after a prefetch had started; a transform of
                ``torch.func`` calls it.
            BaseException: The module's exception; aborts the collective unless every rank
                raises.
        """
        self._adopt_generator()
        parameters = self._store
        was_unsharded = parameters.is_unsharded
        gathers = parameters.is_prefetching or parameters.needs_all_gather
        with self._agreeing("forward()", counts=gathers):
            self._check_open()
            if self.strategy is not ShardingStrategy.NO_SHARD and in_func_transform():
                raise RuntimeError(IN_TRANSFORM)
            parameters.check()
        with self._aborting():
            parameters.unshard()
        keeps_full = torch.is_grad_enabled() and parameters.is_trainable
        states = parameters.full_states()
        try:
            with ProcessState.held():
                output = self.module(*args, **kwargs)
            parameters.check_unchanged(states)
        except BaseException as error:
            if not was_unsharded:
                parameters.reshard()
            self._calls.failed_between(self.collective, error)
            raise
        if keeps_full:
            self._has_forward = True
            parameters.end_forward()
            guard_backward(output, parameters)
        elif not was_unsharded:
            parameters.reshard()
        return output

    def prefetch_forward_params(self) -> None:
        """Start to gather the parameters of the next ``forward`` in a separate thread.

        Returns at once. Call it after ``optimizer.step()``, do other work, then call
        ``forward``, which waits for the rest. The first call makes a separate group and is
        therefore a collective call. Other collective calls first wait for the prefetch.

        Raises:
            RuntimeError: A prefetch is pending; the full parameters already exist; the strategy
                never frees them.
        """
        with self._agreeing("prefetch_forward_params()"):
            self._check_open()
            self._check_prefetch()
        with self._aborting():
            self._store.start_prefetch(
                self._make_prefetch_group, f"fsdp-prefetch-{self.collective.rank}"
            )

    def _check_prefetch(self) -> None:
        if not self.strategy.frees_parameters:
            raise RuntimeError(
                f"{self.strategy.name} keeps full parameters on every rank, so there is nothing to "
                "prefetch; leave the call out, or use FULL_SHARD or HYBRID_SHARD"
            )
        parameters = self._store
        if parameters.is_prefetching:
            raise RuntimeError(
                "prefetch_forward_params() was called twice without a forward() in between"
            )
        if parameters.is_unsharded:
            raise RuntimeError(
                "prefetch_forward_params() while forward() holds the full parameters; call "
                "sync_gradients() and optimizer.step(), or reshard(), first"
            )
        parameters.check()

    @property
    def has_pending_prefetch(self) -> bool:
        """True if a prefetch was started that no ``forward`` has used yet."""
        return self._store.is_prefetching

    def sync_gradients(self, weight: float | Tensor | None = None) -> None:
        """Average the gradients over all ranks into ``.grad`` of the shards; a collective call.

        Adds to existing gradients. Parameters that no rank used, and frozen ones, get none, as on
        one device. Frees full parameters and gradients.

        Args:
            weight: The count that this rank's loss is a mean over: tokens, or a sum of class
                weights. A number or a scalar tensor; the host does not read one on a GPU.
                Either every rank passes a weight, or none does. The gradients of a rank with
                weight 0 add nothing, even if they are NaN; if all weights are 0 the result is
                zeros. ``None``: equal weights. With several backward passes before this call,
                let each loss be ``loss * its weight / the rank's weight``.

        Raises:
            TypeError: The weight is neither a number nor a tensor.
            RuntimeError: No ``forward`` ran with gradients enabled since the last call, or an
                optimizer has cleared gradients since ``backward``.
            ReplicaMismatch: Under ``NO_SHARD``, parameters differ between ranks; compared at the
                first call, and after a ``forward`` that changes some.
            ValueError: A gradient is sparse; the weight is negative, NaN or not a scalar, or
                some ranks passed none.
        """
        checked = None if weight is None else check_weight("weight", weight)
        with self._agreeing("sync_gradients()"):
            self._check_open()
            if not self._has_forward:
                raise RuntimeError(
                    "sync_gradients() before forward(): run forward() with gradients enabled, and "
                    "backward(), before each call"
                )
            self._store.check_gradients()
            self._store.check_mark()
        with self._aborting():
            if checked is not None:
                gradients = self._store.gradients()
                scale_for_mean_(gradients, checked, self._store.shards[0].device, self.collective)
            self._store.reduce()
        self._has_forward = False

    def _check_synced(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of an optimizer of the shards."""
        if self._closed:
            return
        shards = (
            self.strategy is not ShardingStrategy.NO_SHARD and self._groups.shard.world_size > 1
        )
        if shards and needs_whole_parameters(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} relates elements of whole parameters, of which a rank "
                "has a part: use an element-wise optimizer such as AdamW, or NO_SHARD"
            )
        if self._store.has_unreduced:
            raise RuntimeError(
                f"{type(optimizer).__name__} would step without the gradients of the other ranks: "
                "call fsdp.sync_gradients() after backward() and before optimizer.step()"
            )
        if not self._has_warned and self._store.gradients_changed:
            self._has_warned = True
            logger.warning(CHANGED_GRADIENTS)

    def broadcast_updated_params(self) -> None:
        """Gather the updated parameters under ``SHARD_GRAD_OP``; a collective call.

        Call it after ``optimizer.step()``; otherwise the next ``forward`` does it. No effect with
        other strategies.
        """
        if self.strategy is not ShardingStrategy.SHARD_GRAD_OP:
            self._check_open()
            return
        with self._agreeing("broadcast_updated_params()"):
            self._check_open()
            self._store.check_shards()
        with self._aborting():
            self._store.refresh_full()

    @torch.no_grad()
    def update_shards(self, flat: Tensor) -> None:
        """Write this rank's shards, for optimizers that keep a flat copy; not collective.

        Args:
            flat: This rank's shards of all ``parameters()`` in order, without padding, of shape
                ``(numel,)``.

        Raises:
            ValueError: The shape is wrong.
            RuntimeError: A prefetch is pending.
        """
        self._check_open()
        if not isinstance(flat, Tensor):
            raise TypeError(f"update_shards takes a tensor, not a {type(flat).__name__}")
        shards = self._store.shards
        num_elements = sum(shard.numel() for shard in shards)
        if flat.dim() != 1 or flat.numel() != num_elements:
            raise ValueError(
                f"update_shards got the shape {tuple(flat.shape)}; this rank has {num_elements} "
                "elements in one dimension"
            )
        self._refuse_pending("update_shards()")
        for shard, part in zip(
            shards, views_of(flat, [shard.size() for shard in shards]), strict=True
        ):
            shard.copy_(part)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip reduced gradients by the norm over all ranks; a collective call.

        Use it in place of ``torch.nn.utils.clip_grad_norm_``, which would clip each rank's
        shards by their own norm.

        Args:
            max_norm: Largest norm after clipping.
            norm_type: Order of the norm, infinity included.
            error_if_nonfinite: True if a norm that is NaN or infinite is an error.

        Returns:
            The norm before clipping, a scalar, the same on every rank.

        Raises:
            TypeError, ValueError: An argument is wrong.
            RuntimeError: There are gradients not yet synced; the norm is not finite.
        """
        max_norm, norm_type = check_clip(max_norm, norm_type)
        exchanges = self.strategy is not ShardingStrategy.NO_SHARD
        with self._agreeing("clip_grad_norm_()", counts=exchanges):
            self._check_open()
            if self._has_forward:
                raise RuntimeError("clip_grad_norm_() before sync_gradients(): sync first")
        shards = self._store.shards
        if self.strategy is ShardingStrategy.NO_SHARD:
            return torch.nn.utils.clip_grad_norm_(
                shards, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        with self._aborting():
            self._store.wait_prefetch()
            total = sharded_norm(shards, self._groups.shard, norm_type)
        changed = self._store.gradients_changed
        clip_by_(shards, total, max_norm, error_if_nonfinite=error_if_nonfinite)
        if not changed:
            self._store.record_gradients()
        return total

    def param_groups(self, f: Callable[[Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return parameter groups of shards for an optimizer, made by the full parameters.

        Args:
            f: ``f(module) -> list of parameter groups``, called once with the bare module. Its
                parameters have their full shapes, names and attributes, and undefined values.
        """
        self._check_open()
        self._refuse_pending("param_groups()")
        with self._store.as_full_shapes():
            groups = f(self.module)
            return [
                {**group, "params": [self._store.shard_of(p) for p in group["params"]]}
                for group in groups
            ]

    def reshard(self) -> None:
        """Free full parameters, and drop a prefetch and gradients not yet synced.

        Not a collective call, but every rank must make it.
        """
        self._check_open()
        self._store.drop_prefetch()
        self._store.drop_gradients()
        self._store.reshard()
        self._has_forward = False

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the bare module's state dict in CPU memory; a collective call.

        Args:
            rank: The rank that receives it; ``None``: every rank.

        Returns:
            Full parameters and rank 0's buffers under the keys of the bare module; an empty dict
            on the other ranks.
        """
        if rank is not None and not 0 <= rank < self.collective.world_size:
            raise ValueError(f"rank={rank}: pass a rank under {self.collective.world_size}")
        with self._agreeing("full_state_dict()"):
            self._check_open()
            self._store.check_shards()
        keep = rank is None or rank == self.collective.rank
        with self._aborting():
            self._store.wait_prefetch()
            return gather_state(self.module, self._store, self.collective, keep=keep)

    def load_full_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a state dict of the bare module; not collective.

        The state may come from :meth:`full_state_dict` at any world size and strategy, or from
        the bare module. It must be the same on every rank. Ranks may share it: it is only read.

        Args:
            state_dict: Tensors of the full shapes, on any device.
            strict: True if the keys must be exactly those of the bare module.

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
        """Copy rank 0's buffers to every rank; a collective call."""
        with self._agreeing("sync_buffers()"):
            self._check_open()
        with self._aborting():
            self._store.wait_prefetch()
            sync_buffers(self.module, self.collective)

    def unwrap(self) -> nn.Module:
        """Return the bare module with full parameters, and close the wrapper.

        A collective call. Do not use the wrapper, its shards or their optimizers afterwards.
        """
        with self._agreeing("unwrap()"):
            self._check_open()
            self._store.check_shards()
        with self._aborting():
            self._store.drop_prefetch()
            self._store.restore_full()
        STEP_CHECKS.forget(self.module.parameters())
        self.close()
        return self.module

    def close(self) -> None:
        """Close the wrapper, a pending prefetch and the groups it made. Idempotent.

        Garbage collection does the same, in the thread ``fsdp-closer``. The collective
        stays open.
        """
        self._closed = True
        CLAIMS.release(self)
        self._subgroups.close()
        self._store.drop_prefetch()  # ends, since its group is closed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards' gradients, and drop gradients not yet synced."""
        self._store.drop_gradients()
        super().zero_grad(set_to_none)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards under the parameters' names, also while the module is unsharded."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._store.shard_of(parameter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards and buffers, to be loaded by this rank at this world size, into a
        module of the same memory format.

        That of an optimizer of the shards, which says neither, has the same limits.
        """
        with self._store.as_shards():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a :meth:`state_dict` of this rank at this world size, or a full state.

        A state with the keys of the bare module is loaded by :meth:`load_full_state_dict`.

        Raises:
            ValueError: It has other shards, or elements in another order; nothing was changed.
        """
        self._refuse_pending("load_state_dict()")
        names = {plain_key(name) for name in self.module.state_dict()}
        given = {plain_key(name) for name in state_dict}
        if given & names and not given & {f"module.{name}" for name in names}:
            strict = args[0] if args else kwargs.get("strict", True)
            self.load_full_state_dict(state_dict, strict=strict)
            return _IncompatibleKeys(sorted(names - given), sorted(given - names))
        with self._store.as_shards():
            return super().load_state_dict(state_dict, *args, **kwargs)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        metadata["shards"] = self._store.shard_facts()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # Without metadata, as in a plain dict, only the sizes of shards are compared.
        if (facts := local_metadata.get("shards")) is not None:
            self._store.check_shard_facts(facts)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise RuntimeError(
            "an FSDP module cannot be moved or converted: its shards are views of a flat tensor; "
            "call .to(...) on the bare module before wrapping"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an FSDP module cannot be copied or pickled: keep fsdp.full_state_dict(), or copy the "
            "bare module before wrapping"
        )

    def _make_prefetch_group(self) -> Collective:
        group = split(self._groups.shard, 0)
        self._subgroups.add([group])
        return group

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this FSDP module was closed or unwrapped")

    def _refuse_pending(self, what: str) -> None:
        if self._store.is_prefetching:
            raise RuntimeError(f"{what} while a prefetch is pending; call forward() first")

    @contextmanager
    def _agreeing(self, call: str, *, counts: bool = True) -> Iterator[None]:
        """Wrap the checks before a collective call, so that all ranks make it or none does.

        Arguments are checked outside, since a caller may call again with valid ones.

        Args:
            call: The call, for errors.
            counts: True if it is collective.
        """
        try:
            yield
        except BaseException as error:
            report = self._calls.rejected if counts else self._calls.failed_between
            report(self.collective, error)
            raise
        self._call = call
        if counts:
            self._calls.entered(self.collective, call)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort the group on an exception, so that no peer waits for this rank.

        A ``ReplicaMismatch`` is raised by all ranks after a complete exchange and aborts nothing.
        """
        try:
            yield
        except ReplicaMismatch:
            raise
        except (CollectiveAborted, CollectiveTimeout) as error:
            self.collective.abort()  # it may have been a subgroup's
            if self._calls.reason is not None:
                raise CollectiveAborted(self._calls.reason) from error
            if behind := self._calls.behind(self.collective):
                raise type(error)(
                    f"rank {self.collective.rank} called {self._call}, which all ranks have to "
                    f"call, and {_ranks(behind)} did not: {error}"
                ) from error
            raise
        except BaseException as error:
            self._calls.failed_during(self.collective, error)
            raise


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _make_parameters(
    found: list[SharedParameter], world: Collective, groups: ShardGroups, strategy: ShardingStrategy
) -> ParameterStore:
    if strategy is ShardingStrategy.NO_SHARD:
        return ReplicatedParameters(found, world)
    keep_full = not strategy.frees_parameters
    return ShardedParameters(found, world, groups, keep_full=keep_full)


def guard_backward(output: Any, parameters: ParameterStore) -> None:
    """Make a backward fail if the full parameters of its forward were freed.

    Args:
        output: The output of forward: tensors, alone or in tuples, lists, mappings and
            dataclasses; others are not guarded.
    """
    generation = parameters.generation

    def check(_: Tensor) -> None:
        if parameters.generation != generation:
            raise RuntimeError(
                "backward() after the full parameters of its forward() were freed or replaced; "
                "run every backward() before sync_gradients() and reshard()"
            )
        parameters.begin_backward()

    for _, tensor in tensors_in(output, "output"):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(check)  # type: ignore[no-untyped-call]
