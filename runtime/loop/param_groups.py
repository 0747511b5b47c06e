"""The parameter groups of rank 0's optimizer, which all others follow."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runtime.loop.replica import LoopReplica, Options


class ParamGroups:
    """Compares rank 0's groups with what they were, and passes changes on.

    Looked at before the replicas compute, while nobody else uses them. A parameter is found
    on another replica by its place in the model.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._first, *self._others = replicas
        self._places = {id(p): i for i, p in enumerate(self._first.state.params.params)}
        self._members = self._read()

    def follow(self) -> None:
        """Regroup the others as rank 0's optimizer is grouped now.

        Raises:
            ValueError: A parameter that is not trained here; it is taken out again.
        """
        members = self._read()
        if members == self._members:
            return
        if any(p not in self._places for group in members for p in group):
            self._drop_strangers()
            raise ValueError(
                "the optimizer was given a parameter that is not a trained one of the model, and "
                "has been taken from it again: only what required a gradient in Trainer.setup is "
                "exchanged between the replicas; freeze parameters after it, and add them to the "
                "optimizer when they are due"
            )
        places = [[self._places[p] for p in group] for group in members]
        for replica in self._others:
            replica.set_groups(places, self.options())
        self._members = members

    def options(self) -> Options:
        """Settings of rank 0's groups, as they are now; the caller's own."""
        return [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._first.optimizer.param_groups
        ]

    def _drop_strangers(self) -> None:
        kept = []
        for group in self._first.optimizer.param_groups:
            known = [p for p in group["params"] if id(p) in self._places]
            if known or not group["params"]:
                group["params"] = known
                kept.append(group)
        self._first.optimizer.param_groups[:] = kept

    def _read(self) -> list[list[int]]:
        # A parameter of the model lives as long as this, so nothing else gets its number.
        return [list(map(id, group["params"])) for group in self._first.optimizer.param_groups]
