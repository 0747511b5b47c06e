"""What the caller does to rank 0's model holds for all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

from torch import Tensor

from runtime.loop.replica import LoopReplica


class Mirror:
    """Compares rank 0's model with what it was, and passes changes on.

    Looked at before the replicas compute, while nobody else uses them: train and eval mode of
    each module, frozen and unfrozen parameters, weights that were changed in place, and
    buffers that were changed or replaced. The version counter of a tensor tells of changes in
    place; it does not see those through ``.data``.

    What rank 0's own forward makes of its buffers is no change of the caller's: see
    :meth:`buffers_are_seen`.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._first, *self._others = replicas
        self._modes = self._read_modes()
        self._trainable = self._read_trainable()
        self._trained = list(self._trainable)
        self._versions = self._read_versions()
        self._slots = [
            (module, slots, key)
            for module in self._first.modules
            for slots in (module._parameters, module._modules)
            for key in slots
        ]
        self._parts = self._read_parts()
        self.buffers_are_seen()

    def check(self) -> None:
        """Make sure that rank 0's model consists of what the optimizers and replicas hold.

        Raises:
            RuntimeError: A parameter or a module was replaced.
        """
        parts = self._read_parts()
        if any(map(is_not, parts, self._parts)):
            changed = [new is not old for new, old in zip(parts, self._parts, strict=True)]
            module, _, key = self._slots[changed.index(True)]
            raise RuntimeError(
                f"{key!r} of a {type(module).__name__} was replaced after Trainer.setup, and the "
                "optimizers and the other replicas hold what was there before: put it back and "
                "change weights in place (load_state_dict without assign, p.copy_()), or build "
                "the whole model before Trainer.setup"
            )

    def flags(self) -> bool:
        """Pass modes and frozen parameters on; tells whether a mode has changed.

        Raises:
            RuntimeError: A parameter requires a gradient that did not when it was set up.
        """
        modes = self._read_modes()
        changed = modes != self._modes
        if changed:
            self._modes = modes
            for replica in self._others:
                for module, mode in zip(replica.modules, modes, strict=True):
                    module.training = mode
        trainable = self._read_trainable()
        if trainable != self._trainable:
            self._refuse_strangers(trainable)
            self._trainable = trainable
            for replica in self._others:
                for p, flag in zip(replica.tensors, trainable, strict=True):
                    p.requires_grad_(flag)
        return changed

    def _refuse_strangers(self, trainable: Sequence[bool]) -> None:
        names = [name for name, _ in self._first.model.named_parameters()]
        for name, now, then in zip(names, trainable, self._trained, strict=True):
            if now and not then:
                raise RuntimeError(
                    f"parameter {name!r} was frozen in Trainer.setup, so no optimizer holds it and "
                    "no gradient of it is exchanged: freeze parameters after Trainer.setup, and "
                    "unfreeze them when they are due"
                )

    def weights_changed(self) -> bool:
        """Whether rank 0's weights were changed since :meth:`weights_are_alike`."""
        return self._read_versions() != self._versions

    def weights_are_alike(self) -> None:
        """All ranks have the same weights now."""
        self._versions = self._read_versions()

    def buffers_changed(self) -> bool:
        """Whether rank 0's buffers were changed or replaced since :meth:`buffers_are_seen`.

        Raises:
            RuntimeError: Replaced by one of another shape or dtype, which others cannot take.
        """
        now = self._first.state.buffers.tensors()
        if not any(map(is_not, now, self._buffers)):
            return _versions(now) != self._buffer_versions
        names = self._first.state.buffers.names
        for replica in self._others:
            for name, new, old in zip(names, now, replica.state.buffers.tensors(), strict=True):
                if (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise RuntimeError(
                        f"buffer {name!r} was replaced by one of shape {tuple(new.shape)} and "
                        f"{new.dtype}, the other replicas have {tuple(old.shape)} and {old.dtype}: "
                        "keep both, or register such a buffer before Trainer.setup"
                    )
        return True

    def buffers_written(self) -> bool:
        """Whether any of rank 0's buffers was written to since; one that was replaced is not."""
        now = self._first.state.buffers.tensors()
        pairs = zip(now, self._buffers, _versions(now), self._buffer_versions, strict=True)
        return any(new is old and v != before for new, old, v, before in pairs)

    def buffers_are_seen(self) -> None:
        """Rank 0's buffers, as they are now, hold nothing that others must be told of."""
        self._buffers = self._first.state.buffers.tensors()
        self._buffer_versions = _versions(self._buffers)

    def _read_parts(self) -> list[object]:
        return [slots.get(key) for _, slots, key in self._slots]

    def _read_modes(self) -> list[bool]:
        return [module.training for module in self._first.modules]

    def _read_trainable(self) -> list[bool]:
        return [p.requires_grad for p in self._first.tensors]

    def _read_versions(self) -> list[int]:
        return _versions(self._first.tensors)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed; tensors of inference mode do not tell."""
    return [-1 if t.is_inference() else t._version for t in tensors]
