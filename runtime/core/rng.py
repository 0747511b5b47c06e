"""Per-thread random generators on the CPU, in place of PyTorch's default generator.

PyTorch has one default generator for the CPU, and many operations, such as dropout, accept no
other. The order in which threads draw from it depends on timing, so runs would not be
reproducible. Each of these operations ends in one of the kernels of :data:`RANDOM_KERNELS`, which
do take a generator. Once per process, wrappers replace PyTorch's CPU kernels with
``torch.library.get_kernel`` and pass the calling thread's generator if it has one and the caller
passes none. Other operations and other devices are not affected.

``torch.get_rng_state``, ``set_rng_state``, ``manual_seed`` and ``fork_rng`` act on the thread's
generator, too: with them ``torch.utils.checkpoint`` repeats the random numbers of a forward pass.
"""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
"""All random CPU kernels of ATen."""

_MAX_NUMPY_SEED = 2**32 - 1
_RNG_LOCK = threading.Lock()
_installed: list[torch.library.Library] = []


class _ThreadState(threading.local):
    generator: torch.Generator | None = None


_thread = _ThreadState()


@contextmanager
def thread_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Draw this thread's random numbers on the CPU from ``generator``.

    Args:
        generator: A CPU generator; ``None``: PyTorch's default one.
    """
    if not _installed:
        install_thread_generators()
    before, _thread.generator = _thread.generator, generator
    try:
        yield
    finally:
        _thread.generator = before


class _DefaultGenerator:
    """Default generator of ``torch.random``, which delegates to the thread's generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_thread.generator or torch.default_generator, name)


def install_thread_generators() -> None:
    """Replace the random kernels; only the first call of the process has an effect.

    A run calls it before it starts threads, since PyTorch's kernel table must not change during an
    operation. Takes some milliseconds. Thread-safe; blocks while another thread is in it.
    """
    with _RNG_LOCK:
        if _installed:
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # PyTorch warns about the first kernel replaced in a process.
            warnings.simplefilter("ignore")
            missing = [name for name in RANDOM_KERNELS if not _replace(library, name)]
        torch.random.default_generator = _DefaultGenerator()  # type: ignore[attr-defined, assignment]
        _installed.append(library)  # last: thread_generator() reads it without the lock
    if missing:
        logger.warning(
            "this version of PyTorch (%s) has no CPU kernels %s: the operations that replace them "
            "draw from its default generator, which all threads share",
            torch.__version__,
            ", ".join(missing),
        )


def _replace(library: torch.library.Library, name: str) -> bool:
    """Replace a kernel; False if there is none of this name."""
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
    """A kernel that passes the thread's generator if the caller passes none.

    Args:
        call: The original kernel.
        place: Index of the generator among its arguments.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        generator = _thread.generator
        # PyTorch omits positional arguments that have their default value.
        if generator is not None and len(args) <= place and kwargs.get("generator") is None:
            kwargs["generator"] = generator
        return call(keys, *args, **kwargs)

    return kernel


@dataclass(frozen=True, slots=True)
class GlobalGenerators:
    """States of the process's generators on the CPU: PyTorch's default, Python's and NumPy's."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def current(cls) -> GlobalGenerators:
        """The present states."""
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def seeded_globals() -> Iterator[None]:
    """Seed Python's and NumPy's global generators from this thread's generator; restore them after.

    Only meaningful while no other thread draws from them. Has no effect if the thread has no
    generator.
    """
    if _thread.generator is None:
        yield
        return
    seed = _thread.generator.initial_seed() & _MAX_NUMPY_SEED
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seed_of(*key: int, stream: int | None = None) -> int:
    """A seed from some numbers: the upper 63 bits of the first word of NumPy's ``SeedSequence``.

    Args:
        key: The numbers, such as seed, rank and epoch.
        stream: Separates draws for different purposes with the same numbers.
    """
    sequence = np.random.SeedSequence(key, spawn_key=() if stream is None else (stream,))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1
