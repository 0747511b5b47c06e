"""What a captured step reads of a module, and must find where it was."""

from __future__ import annotations

from torch import Tensor, nn


class ModuleTensors:
    """The tensors that a module keeps beside its parameters: buffers and plain attributes.

    A graph reads and writes them where they were when it was captured. A module that gives
    one of them a new tensor, in a step or between two, is not followed by any replay.

    Args:
        module: The module; its parts are those of now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, object], str, str, Tensor]] = []
        for prefix, part in module.named_modules():
            for place in (part._buffers, part.__dict__):
                for key, value in place.items():
                    if isinstance(value, Tensor):
                        name = f"{prefix}.{key}" if prefix else key
                        self._places.append((place, key, name, value))

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [value for _, _, _, value in self._places]

    def first_replaced(self) -> str | None:
        """Name of the first that is another tensor now."""
        for place, key, name, value in self._places:
            if place.get(key) is not value:
                return name
        return None

    def put_back(self) -> None:
        """Make them what they were."""
        for place, key, _, value in self._places:
            place[key] = value
