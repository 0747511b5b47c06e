"""Random draws of a thread: from a generator of its own in place of PyTorch's default one.

PyTorch has one default generator for the CPU, and many operations, dropout among them, take no
other. Threads that share it draw in an order that the clock decides, so that no run could be
repeated. Each of these operations ends in one of the kernels of :data:`RANDOM_KERNELS`, which
do take a generator. They are put in place of PyTorch's kernels for the CPU once a process, as
``torch.library.get_kernel`` is meant for, and hand the calling thread's generator on where it has
one and the caller gives none. All other operations are untouched and cost what they did, and so
are those of tensors that are not on the CPU.

``torch.get_rng_state``, ``set_rng_state``, ``manual_seed`` and ``fork_rng`` act on the thread's
generator in the same way: ``torch.utils.checkpoint`` computes a forward pass a second time between
them, with the draws of the first one.
"""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

RANDOM_KERNELS = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli.out",
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "multinomial.out",
    "normal.Tensor_Tensor",
    "normal.Tensor_Tensor_out",
    "normal.Tensor_float",
    "normal.Tensor_float_out",
    "normal.float_Tensor",
    "normal.float_Tensor_out",
    "normal_",
    "poisson",
    "random_",
    "random_.from",
    "random_.to",
    "randperm.generator_out",
    "rrelu_with_noise",
    "rrelu_with_noise.out",
    "rrelu_with_noise_",
    "uniform_",
)
"""All that ATen draws with on the CPU."""

_MAX_NUMPY_SEED = 2**32 - 1
_RNG_LOCK = threading.Lock()
_installed: list[torch.library.Library] = []


class _Own(threading.local):
    generator: torch.Generator | None = None


_own = _Own()


@contextmanager
def thread_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Let this thread's draws on the CPU come from a generator of the CPU.

    Args:
        generator: The generator; ``None``: PyTorch's default one.
    """
    if not _installed:
        install_thread_generators()
    before, _own.generator = _own.generator, generator
    try:
        yield
    finally:
        _own.generator = before


class _DefaultGenerator:
    """Stands for the default generator within ``torch.random``: it is each thread's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own.generator or torch.default_generator, name)


def install_thread_generators() -> None:
    """Make :func:`thread_generator` work; only the first call of the process does anything.

    A run calls it before its threads are started: PyTorch's table of kernels must not change
    under an operation. Takes some milliseconds. Thread-safe; blocks while another thread
    is in it.
    """
    with _RNG_LOCK:
        if _installed:
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        _installed.append(library)
        with warnings.catch_warnings():
            # The first kernel that is replaced in a process is warned of.
            warnings.simplefilter("ignore")
            missing = [name for name in RANDOM_KERNELS if not _replace(library, name)]
        torch.random.default_generator = _DefaultGenerator()  # type: ignore[attr-defined, assignment]
    if missing:
        logger.warning(
            "this version of PyTorch (%s) has no CPU kernels %s: what it draws instead comes from "
            "its default generator, which all threads share",
            torch.__version__,
            ", ".join(missing),
        )


def _replace(library: torch.library.Library, name: str) -> bool:
    """Replace a kernel; whether there is one of that name."""
    packet, _, overload = name.partition(".")
    try:
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        draw = torch.library.get_kernel(op, "CPU").call_boxed
    except (AttributeError, RuntimeError):
        return False
    place = [argument.name for argument in op._schema.arguments].index("generator")
    kernel = _with_generator(draw, place)
    library.impl(name, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    return True


def _with_generator(call: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A kernel that passes the thread's generator where none is given.

    Args:
        call: The kernel of before.
        place: Index of the generator among its arguments.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        generator = _own.generator
        # PyTorch leaves positional arguments out that have their default.
        if generator is not None and len(args) <= place and kwargs.get("generator") is None:
            kwargs["generator"] = generator
        return call(keys, *args, **kwargs)

    return kernel


@contextmanager
def seeded_globals() -> Iterator[None]:
    """Seed Python's and NumPy's global generators like this thread's own, and restore them after.

    Of use only where no other thread draws from them meanwhile. Without a generator of the
    thread's own nothing happens.
    """
    if _own.generator is None:
        yield
        return
    seed = _own.generator.initial_seed() & _MAX_NUMPY_SEED
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
