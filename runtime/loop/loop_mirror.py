"""What the caller does to the first replica's model holds for all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.core.errors import ReplicaMismatch
from runtime.loop.loop_replica import LoopReplica
from runtime.replica.build import Template

Seen = list[tuple[Tensor, int]]


class LoopMirror:
    """Compares the first replica with what it was and with the others.

    In the caller's thread, while the replicas rest. Modes and frozen parameters are compared
    with the other replicas' own, for ``loss_fn`` may change those too. Values are compared by
    PyTorch's count of writes in place.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._replicas = replicas
        self._first, *self._others = replicas
        self._homes = [
            (module._parameters, key, p, f"{prefix}.{key}" if prefix else key, p.requires_grad)
            for prefix, module in self._first.model.named_modules()
            for key, p in module._parameters.items()
            if p is not None
        ]
        self._seen = self._look()

    def follow_flags(self) -> None:
        """Pass modes and frozen parameters on.

        Raises:
            RuntimeError: A parameter was replaced, or unfrozen that is not trained.
        """
        for parameters, key, p, name, is_trained in self._homes:
            if parameters.get(key) is not p:
                raise RuntimeError(
                    f"parameter {name!r} of the primary was replaced, and the optimizers hold the "
                    "old one: write to it in place (p.copy_(...), load_state_dict without "
                    "assign=True)"
                )
            if p.requires_grad and not is_trained:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the replicas were built, so no optimizer "
                    "holds it: leave it trainable in model_factory, and freeze it on the primary "
                    "until it shall be trained"
                )
        self._take_out_of_inference()
        for other in self._others:
            for module, its in zip(self._first.modules, other.modules, strict=True):
                if its.training is not module.training:
                    its.training = module.training
            for p, its_p in zip(self._first.tensors, other.tensors, strict=True):
                if its_p.requires_grad is not p.requires_grad:
                    its_p.requires_grad_(p.requires_grad)

    def _take_out_of_inference(self) -> None:
        """Replace the buffers that the primary's forward made in inference mode.

        Nobody else may write to those.
        """
        for module in self._first.modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_inference():
                    with torch.inference_mode(False):
                        module._buffers[key] = buffer.clone()

    def follow_settings(self) -> None:
        """Give every optimizer the settings of the first one's groups.

        Raises:
            RuntimeError: It has other groups than it was built with.
        """
        groups = self._first.optimizer.param_groups
        for other in self._others:
            own = other.optimizer.param_groups
            if [len(g["params"]) for g in own] != [len(g["params"]) for g in groups]:
                raise RuntimeError(
                    "the first optimizer has other parameter groups than the others: build all "
                    "groups in optim_factory"
                )
            for group, its in zip(groups, own, strict=True):
                for key, value in group.items():
                    if key == "params":
                        continue
                    if isinstance(value, Tensor) and isinstance(its.get(key), Tensor):
                        its[key].copy_(value)
                    elif its.get(key) is not value:
                        its[key] = value

    def is_changed(self) -> bool:
        """Whether tensors of the first replica were written to since :meth:`are_alike`."""
        now = self._look()
        return len(now) != len(self._seen) or any(
            tensor is not old or version != old_version
            for (tensor, version), (old, old_version) in zip(now, self._seen, strict=True)
        )

    def check(self) -> None:
        """Make sure that the others can take over what the first has.

        Raises:
            ReplicaMismatch: They cannot; names the first difference.
        """
        first = Template.of(self._first.model)
        for rank, other in enumerate(self._others, 1):
            difference = first.first_difference(Template.of(other.model))
            if difference is not None:
                raise ReplicaMismatch(
                    f"replica {rank} cannot follow the primary: {difference}; change tensors in "
                    "place and keep their shapes, or build a new DataParallelCoordinator"
                )

    def are_alike(self) -> None:
        """All replicas hold what the first one holds now."""
        self._seen = self._look()

    def _look(self) -> Seen:
        tensors = (*self._first.tensors, *self._first.buffers())
        return [(t, -1 if t.is_inference() else t._version) for t in tensors]
