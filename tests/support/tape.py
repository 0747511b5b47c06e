"""A fake of CUDA graphs: records PyTorch's operations and runs them again.

Like a graph, it does not run the operations that it records, keeps the memory of every tensor,
reads no values for Python, and does not record what Python does.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
}


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written_by(func, args, kwargs):
    """The arguments that an operation writes to."""
    if "batch_norm" in func._schema.name and "backward" not in func._schema.name:
        return tensors_in((args, kwargs))  # its running statistics
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(given.get(argument.name))
    ]


def is_view(func):
    infos = [out.alias_info for out in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


class Tape(TorchDispatchMode):
    """Records the operations in its context, and undoes them at its end."""

    def __init__(self):
        super().__init__()
        self._entries = []
        self._before = {}
        self.num_replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in written_by(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()
        out = func(*args, **kwargs)
        if not is_view(func):
            self._entries.append((func, args, kwargs, out))
        return out

    def __exit__(self, *error):
        super().__exit__(*error)
        for storage, before in self._before.values():
            storage.copy_(before)
        self._spoil()
        self._before.clear()

    @torch.no_grad()
    def _spoil(self):
        """Spoil the tensors created in the capture, which have no values before a replay."""
        for _, args, kwargs, out in self._entries:
            given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
            for tensor in tensors_in(out):
                if tensor.untyped_storage().data_ptr() not in given | set(self._before):
                    bad = float("nan") if tensor.is_floating_point() else 77
                    tensor.detach().fill_(bad)

    @torch.no_grad()
    def replay(self):
        self.num_replays += 1
        for func, args, kwargs, out in self._entries:
            given = {id(tensor) for tensor in tensors_in((args, kwargs))}
            new = func(*args, **kwargs)
            for old, now in zip(tensors_in(out), tensors_in(new), strict=True):
                if id(old) not in given:
                    old.copy_(now)
