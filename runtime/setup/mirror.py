"""What the caller does to rank 0's model holds for all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.setup.replica import LoopReplica


class Mirror:
    """Compares rank 0's model with what it was, and passes changes on.

    Looked at before the replicas compute, while nobody else uses them: train and eval mode of
    each module, frozen and unfrozen parameters, and weights that were changed in place. The
    version counter of a tensor tells of the last; it does not see changes through ``.data``.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._first, *self._others = replicas
        self._modes = self._read_modes()
        self._trainable = self._read_trainable()
        self._versions = self._read_versions()

    def flags(self) -> None:
        """Pass modes and frozen parameters on."""
        modes = self._read_modes()
        if modes != self._modes:
            self._modes = modes
            for replica in self._others:
                for module, mode in zip(replica.modules, modes, strict=True):
                    module.training = mode
        trainable = self._read_trainable()
        if trainable != self._trainable:
            self._trainable = trainable
            for replica in self._others:
                for p, flag in zip(replica.tensors, trainable, strict=True):
                    p.requires_grad_(flag)

    def weights_changed(self) -> bool:
        """Whether rank 0's weights were changed since :meth:`weights_are_alike`."""
        return self._read_versions() != self._versions

    def weights_are_alike(self) -> None:
        """All ranks have the same weights now."""
        self._versions = self._read_versions()

    def _read_modes(self) -> list[bool]:
        return [module.training for module in self._first.modules]

    def _read_trainable(self) -> list[bool]:
        return [p.requires_grad for p in self._first.tensors]

    def _read_versions(self) -> list[int]:
        return [p._version for p in self._first.tensors]
