"""Copies of a module for other replicas: equal in all that training uses, or refused by name."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.references import references

logger = logging.getLogger(__name__)

_REMEDY = "pass a factory that builds the module for each device, lambda device: Net().to(device)"
_MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_COMPILED = ("forward", "_forward", "_compiled_call_impl")
"""Attributes of ``torch.compile``, which a copy makes anew."""
_MAX_DEPTH = 3
"""Depth to which objects that a hook captures are searched for tensors of the model."""


def copy_module(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Deep-copy a module, with what ``copy.deepcopy`` and ``Module.to`` lose.

    Parameters keep their hooks, hooks on accumulated gradients, attributes, ties and strides.
    Tensors that are views of one storage are views of one storage in the copy. Gradients are not
    copied.

    Args:
        module: The module, not modified.
        device: The device of the copy; ``None``: that of the module.

    Raises:
        TypeError: A copy would differ from the module; the message names the first cause.
    """
    check_copyable(module)
    memo: dict[int, Any] = {}
    twins = {}
    for name, t in named_tensors(module):
        if id(t) not in memo and _is_plain(t):
            memo[id(t)] = _twin(t, memo)
            twins[name] = t, memo[id(t)]
    memo.update(_recomputed(module))
    try:
        copied = copy.deepcopy(module, memo)
        changed = _changed_tensor(module, copied, memo)
        if device is not None:
            _move(copied, device)
        for original, twin in twins.values():
            _copy_hooks(original, twin, memo)
            vars(twin).update(copy.deepcopy(vars(original), memo))
    except Exception as error:
        raise TypeError(
            f"a {type(module).__name__} cannot be copied for each replica ({error}): {_REMEDY}"
        ) from error
    if device is not None:
        copied = copied.to(device)
    difference = first_difference(module, copied)
    if difference is None and changed is not None:
        difference = f"{changed!r} has other values"
    if difference is not None:
        raise TypeError(
            f"the copy of a {type(module).__name__} for another replica differs from it: "
            f"{difference}; {_REMEDY}"
        )
    return copied


def check_copyable(module: nn.Module) -> None:
    """Check that a module has nothing that a copy cannot have.

    Raises:
        TypeError: It is a script module, in shared memory, or has a hook that refers to it.
    """
    for name, sub in module.named_modules():
        if isinstance(sub, torch.jit.ScriptModule):
            where = f"{name!r} is" if name else "this module is"
            raise TypeError(
                f"{where} made by torch.jit.script or torch.jit.trace, whose parameters cannot be "
                f"copied for each replica: {_REMEDY}"
            )
    check_unshared(module, f"copies of it do not share that memory: {_REMEDY}")
    own = {id(sub) for sub in module.modules()}
    own |= {id(t) for _, t in named_tensors(module)}
    for where, hook in _functions(module):
        captured = _captured(hook, own)
        if captured is not None:
            raise TypeError(
                f"{where} refers to {captured} of the module, and in a copy it would use the "
                f"original's: {_REMEDY}"
            )


def check_unshared(module: nn.Module, consequence: str) -> None:
    """Raise ``TypeError`` if a tensor of the module is in memory shared between processes."""
    for name, t in named_tensors(module):
        # CUDA tensors always count as shared.
        if t.device.type == "cpu" and _is_plain(t) and t.is_shared():  # type: ignore[no-untyped-call]
            raise TypeError(
                f"{name!r} is in shared memory (share_memory()), and {consequence}. "
                "copy.deepcopy(module) is a module of its own memory"
            )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def effect_of_train(module: nn.Module) -> str | None:
    """The first flag, number or text that a call of ``module.train()`` would set, as code.

    Tried on a copy without memory for tensors, and only if a part overrides ``train``; ``None`` if
    nothing would change, or such a copy cannot be made. Parts in eval mode are taken as meant.
    """
    if all(type(m).train is nn.Module.train and "train" not in vars(m) for m in module.modules()):
        return None
    try:
        memo: dict[int, Any] = {id(t): _without_memory(t) for _, t in named_tensors(module)}
        tried = copy.deepcopy(module, memo).train()
        for part, own in zip(tried.modules(), module.modules(), strict=True):
            if part.training and not own.training:
                part.eval()
        pairs: list[tuple[str, Any, Any]] = [
            *(
                (name, vars(m), vars(tried.get_submodule(name)))
                for name, m in module.named_modules()
            ),
            *(
                (
                    name,
                    {"requires_grad": p.requires_grad},
                    {"requires_grad": memo[id(p)].requires_grad},
                )
                for name, p in module.named_parameters()
            ),
        ]
    except Exception:
        logger.debug("train() could not be tried on a copy", exc_info=True)
        return None
    for name, before, after in pairs:
        for key, value in before.items():
            if isinstance(value, (int, float, str)) and after.get(key, value) != value:
                return f"{'.'.join(filter(None, ('model', name, key)))} = {after[key]!r}"
    return None


def _without_memory(t: Tensor) -> Tensor:
    twin = torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)
    return nn.Parameter(twin, t.requires_grad) if isinstance(t, nn.Parameter) else twin


def _is_plain(t: Tensor) -> bool:
    """True for strided tensors in one storage, as opposed to wrappers of other tensors."""
    return (
        (isinstance(t, nn.Parameter) or type(t) is Tensor)
        and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__
        and t.is_leaf
        and t.layout is torch.strided
        and t.device.type != "meta"
        and not (t.is_quantized or t.is_conj() or t.is_neg())
        and not torch.nn.parameter.is_lazy(t)
    )


def _twin(t: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a tensor on its device; storages are copied once for each ``memo``."""
    storage = copy.deepcopy(t.untyped_storage(), memo)
    data = torch.empty(0, dtype=t.dtype, device=t.device)
    data.set_(storage, t.storage_offset(), t.size(), t.stride())
    twin: Tensor = torch.Tensor._make_subclass(type(t), data, t.requires_grad)
    return twin


def _changed_tensor(module: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> str | None:
    """Name of a tensor that a module's own ``__deepcopy__`` made with other values, if any."""
    own = dict(named_tensors(copied))
    for name, t in named_tensors(module):
        made, twin = own.get(name), memo.get(id(t))
        if made is None or twin is None or made is twin:
            continue
        if made.shape != t.shape or made.dtype != t.dtype:
            continue  # found later
        if not torch.equal(made, t) and not _equal_but_for_nan(made, t):
            return name
    return None


def _equal_but_for_nan(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _recomputed(module: nn.Module) -> dict[int, Tensor]:
    """Copies of attributes that a forward hook computes anew, as ``weight_norm`` does, by id."""
    return {id(t): t.detach().clone() for t, _ in _hooked_attributes(module)}


def _hooked_attributes(module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    for prefix, sub in module.named_modules():
        for hook in sub._forward_pre_hooks.values():
            attribute = getattr(hook, "name", getattr(hook, "_tensor_name", None))
            value = vars(sub).get(attribute) if isinstance(attribute, str) else None
            if isinstance(value, Tensor):
                yield value, f"{prefix}.{attribute}" if prefix else str(attribute)


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are attributes of modules, without those that a forward hook computes."""
    hooked = {id(t) for t, _ in _hooked_attributes(module)}
    for prefix, sub in module.named_modules():
        for key, value in vars(sub).items():
            if isinstance(value, Tensor) and id(value) not in hooked:
                yield (f"{prefix}.{key}" if prefix else key), value


def _move(module: nn.Module, device: torch.device) -> None:
    """Move tensors to a device; those of one storage are in one storage there."""
    moved: dict[int, torch.UntypedStorage] = {}
    for _, t in named_tensors(module):
        if t.device == device or not _is_plain(t):
            continue
        storage = t.untyped_storage()
        if storage._cdata not in moved:
            content = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            moved[storage._cdata] = content.to(device).untyped_storage()
        data = torch.empty(0, dtype=t.dtype, device=device)
        new = moved[storage._cdata]
        t.data = data.set_(new, t.storage_offset(), t.size(), t.stride())


def _copy_hooks(original: Tensor, twin: Tensor, memo: dict[int, Any]) -> None:
    requires_grad = twin.requires_grad
    if any(getattr(original, kind, None) for kind in _TENSOR_HOOKS):
        twin.requires_grad_(True)  # a frozen parameter may have hooks
    for hook in (original._backward_hooks or {}).values():
        twin.register_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        register = twin.register_post_accumulate_grad_hook
        register(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]
    if twin.requires_grad != requires_grad:
        twin.requires_grad_(requires_grad)


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Hooks of the module and its tensors, and functions that are attributes of modules."""
    for name, t in named_tensors(module):
        for kind in _TENSOR_HOOKS:
            for hook in (getattr(t, kind, None) or {}).values():
                yield f"a hook of the parameter {name!r}", hook
    for name, sub in module.named_modules():
        where = repr(name) if name else "the module"
        for kind in _MODULE_HOOKS:
            for hook in getattr(sub, kind, {}).values():
                yield f"a hook of {where}", hook
        for key, value in vars(sub).items():
            if key in _COMPILED and hasattr(value, "_torchdynamo_orig_callable"):
                continue
            if isinstance(value, FunctionType | functools.partial):
                yield f"the function {key!r} of {where}", value


def _captured(value: Any, own: set[int], depth: int = _MAX_DEPTH) -> str | None:
    """Name of the first object of ``own`` that a function refers to without being its argument.

    Arguments of partials, instances of bound methods and callable objects are copied with the
    module; closures, defaults and globals of functions are not.
    """
    if isinstance(value, functools.partial):
        return _captured(value.func, own, depth)
    function = value if isinstance(value, FunctionType) else getattr(value, "__func__", None)
    if not isinstance(function, FunctionType):
        return None
    for name, held in references(function):
        if _refers(held, own):
            return f"{name!r}"
        if depth and isinstance(held, FunctionType):
            found = _captured(held, own, depth - 1)
            if found is not None:
                return found
    return None


def _refers(value: Any, own: set[int], depth: int = 1) -> bool:
    if id(value) in own or id(getattr(value, "__self__", None)) in own:
        return True
    if isinstance(value, torch.optim.Optimizer):
        return any(id(p) in own for group in value.param_groups for p in group["params"])
    if depth and type(value) in (list, tuple, set, dict):
        values = value.values() if isinstance(value, Mapping) else value
        return any(_refers(each, own, depth - 1) for each in values)
    return False


def first_difference(module: nn.Module, copied: nn.Module) -> str | None:
    """The first difference between a module and its copy in what training uses, if any."""
    for describe in (_describe_modules, _describe_tensors):
        one, other = describe(module), describe(copied)
        for name in one | other:
            if one.get(name) != other.get(name):
                return _difference_of(name, one.get(name), other.get(name))
    return None


def _difference_of(name: str, one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if one is None or other is None:
        return f"{name} is only in {'the copy' if one is None else 'the original'}"
    key = next(key for key in one | other if one.get(key) != other.get(key))
    return f"the {key} of {name} is {other.get(key)}, in the original it is {one.get(key)}"


def _describe_modules(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        repr(name): {
            "class": type(sub).__qualname__,
            "mode": "train" if sub.training else "eval",
            "number of hooks": sum(len(getattr(sub, kind, ())) for kind in _MODULE_HOOKS),
        }
        for name, sub in module.named_modules()
    }


def _describe_tensors(module: nn.Module) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    ties: dict[int, str] = {}
    storages: dict[int, str] = {}
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for name, t in every:
        facts = found[repr(name)] = {
            "type": type(t).__name__,
            "shape": tuple(t.shape),
            "dtype": t.dtype,
            "requires_grad": t.requires_grad,
            "tied tensor": ties.setdefault(id(t), name),
        }
        if _is_plain(t):
            facts["stride"] = t.stride()
            shared = t.untyped_storage()._cdata
            facts["storage"] = f"that of {storages.setdefault(shared, name)!r}"
        if isinstance(t, nn.Parameter):
            facts["number of hooks"] = sum(
                len(getattr(t, kind, None) or ()) for kind in _TENSOR_HOOKS
            )
            facts["attributes"] = sorted(vars(t))
    return found
