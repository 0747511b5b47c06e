"""Driver calls that wait for the device, made on purpose while ranks exchange tensors.

A call may wait for the kernel of an exchange; if a peer's launch in turn waits for that call, the
ranks hang. Each probe is fired by a thread of its own and by the ranks' own threads, in forward
and backward passes, beside each way in which ranks exchange tensors.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from runtime import FSDP, ApplyPolicy, Ddp, ShardingStrategy, Trainer
from runtime.device.cuda_api import API
from tests.gpu.contact_record import NotHere
from tests.gpu.delays import LONG, delay
from tests.gpu.placing import Placement, on_ranks, run_ends
from tests.support.fake_cuda import GPU, FakeCuda
from tests.support.posing import posing_group

MIB = 2**20
LIMIT_S = 10.0
"""Time limit of an exchange: a rank that hangs makes its peers raise."""
KINDS = (
    *("allocate", "free", "module", "pinned", "register"),
    *("empty_cache", "out_of_memory", "cudnn", "synchronize"),
)


# -- calls ------------------------------------------------------------------------------------

_MODULE = """
.version 6.0
.target sm_50
.address_size 64
.visible .entry probe_{number}()
{{
    ret;
}}
"""
_numbers = itertools.count()


class Driver:
    """The CUDA driver by ``ctypes``, without the GIL; allocations are freed at the end."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotHere("there is no CUDA driver") from error
        API.make_context_current(device)
        self._blocks: list[ctypes.c_uint64] = []

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def allocate(self) -> None:
        block = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(3 * MIB))
        self._blocks.append(block)

    def free(self) -> None:
        if not self._blocks:
            self.allocate()
        self.call("cuMemFree_v2", self._blocks.pop())

    def load_module(self) -> None:
        """Compile a kernel, load it and launch it for the first time."""
        number = next(_numbers)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        text = _MODULE.format(number=number).encode()
        self.call("cuModuleLoadData", ctypes.byref(module), text)
        name = f"probe_{number}".encode()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        one = ctypes.c_uint(1)
        grid = (one,) * 6
        self.call(
            "cuLaunchKernel", function, *grid, ctypes.c_uint(0), stream, ctypes.c_void_p(), None
        )

    def pin(self) -> None:
        block = ctypes.c_void_p()
        self.call("cuMemAllocHost_v2", ctypes.byref(block), ctypes.c_size_t(MIB))
        self.call("cuMemFreeHost", block)

    def register(self) -> None:
        buffer = ctypes.create_string_buffer(MIB)
        self.call("cuMemHostRegister_v2", buffer, ctypes.c_size_t(MIB), ctypes.c_uint(0))
        self.call("cuMemHostUnregister", buffer)

    def close(self) -> None:
        while self._blocks:
            self.free()


@contextmanager
def cuda_call(kind: str, device: torch.device) -> Iterator[Callable[[], object]]:
    """A call of this kind, for this thread and its current stream."""
    driver = Driver(device)
    if kind == "free":
        for _ in range(8):
            driver.allocate()
    calls = {
        "allocate": driver.allocate,
        "free": driver.free,
        "module": driver.load_module,
        "pinned": driver.pin,
        "register": driver.register,
        "empty_cache": lambda: _empty_cache(device),
        "out_of_memory": lambda: _run_out_of_memory(device),
        "cudnn": lambda: _convolve(device),
        "synchronize": lambda: torch.cuda.synchronize(device),
    }
    searches = (
        torch.backends.cudnn.flags(enabled=True, benchmark=True)
        if kind == "cudnn"
        else nullcontext()
    )
    try:
        with torch.cuda.device(device), searches:
            yield calls[kind]
    finally:
        driver.close()


def _empty_cache(device: torch.device) -> None:
    block = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
    del block
    torch.cuda.empty_cache()


def _run_out_of_memory(device: torch.device) -> None:
    """The allocator frees what it has cached, tries again, and raises."""
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        torch.empty(total + 2**30, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return
    raise AssertionError("more memory than the device has was allocated")


def _convolve(device: torch.device) -> None:
    """A shape that cuDNN has not seen yet; on the CPU an ordinary convolution."""
    side = 16 + next(_numbers) % 64
    weight = torch.ones(4, 4, 3, 3, device=device)
    F.conv2d(torch.ones(2, 4, side, 16, device=device), weight)


def _fill_address_space() -> None:
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError:
        return
    raise AssertionError("more memory than the machine has was allocated")


@contextmanager
def cpu_call(kind: str) -> Iterator[Callable[[], object]]:
    """Context of a CPU substitute for the call.

    Raises:
        NotHere: The CPU has no substitute.
    """
    blocks: list[torch.Tensor] = []
    calls = {
        "allocate": lambda: blocks.append(torch.empty(MIB, dtype=torch.uint8)),
        "free": lambda: blocks.pop() if blocks else blocks.append(torch.empty(MIB)),
        "empty_cache": lambda: gc.collect(0),
        "out_of_memory": _fill_address_space,
        "cudnn": lambda: _convolve(torch.device("cpu")),
    }
    if kind not in calls:
        raise NotHere("a CPU has no such call")
    yield calls[kind]


@contextmanager
def stand_in_call(kind: str, fake: FakeCuda) -> Iterator[Callable[[], object]]:
    """A call of the runtime's CUDA API, on its fake."""
    fake.make_context_current(GPU)
    calls = {
        "pinned": lambda: fake.empty_pinned((16,), torch.float32),
        "module": fake.host_reader,
        "synchronize": fake.run_all,
    }
    if kind in calls:
        yield calls[kind]
        return
    with cpu_call(kind) as call:
        yield call


class Probe:
    """Fires a call beside exchanges; a context manager.

    Args:
        make_call: Gives the call for a device, in the thread that makes it.
        device: That of the calls of the probe's own thread.
    """

    def __init__(self, make_call, device: torch.device) -> None:
        self._make_call = make_call
        self._device = device
        self._passes = itertools.count()
        self._signal = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._fire, name="probe", daemon=True)
        self._error: BaseException | None = None
        self._ended = False
        self.num_fired = 0

    def __enter__(self) -> Probe:
        with self._make_call(
            self._device
        ):  # raises here if the call is not possible on this machine
            pass
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._ended = True
        self._signal.release()
        self._thread.join(LIMIT_S)
        if kind is None:
            assert not self._thread.is_alive(), "the probe's call does not return"
            if self._error is not None:
                raise self._error
            assert self.num_fired > 0, "the probe was never fired"

    def _fire(self) -> None:
        try:
            with ExitStack() as stack:
                if self._device.type == "cuda":
                    stream = API.new_stream(self._device)
                    stack.enter_context(torch.cuda.stream(stream))
                call = stack.enter_context(self._make_call(self._device))
                while self._signal.acquire() and not self._ended:
                    call()
                    self.num_fired += 1
        except BaseException as error:
            self._error = error

    def passing(self, tensor: torch.Tensor) -> None:
        """Called in a rank's thread before an exchange, or in the middle of a pass."""
        number = next(self._passes)
        if number % 3 == 0:
            delay(tensor.device, LONG // 5)  # its peers' kernels wait on the device
        if number % 2 == 0:
            self._signal.release()
        if number % 8 == 5:
            with self._make_call(tensor.device) as call:
                call()


_active: Probe | None = None


def _passing(tensor: torch.Tensor) -> None:
    if _active is not None:
        _active.passing(tensor)


@contextmanager
def active(probe: Probe) -> Iterator[Probe]:
    """Models fire this probe."""
    global _active
    _active = probe
    try:
        with probe:
            yield probe
    finally:
        _active = None


class Probed(nn.Module):
    """Calls the probe in the middle of forward and of backward."""

    WIDTH = 32

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.Tanh())
        self.norm = nn.BatchNorm1d(self.WIDTH) if norm else nn.Identity()
        self.second = nn.Sequential(
            nn.Linear(self.WIDTH, self.WIDTH), nn.Tanh(), nn.Linear(self.WIDTH, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        _passing(x)
        if x.requires_grad:
            x.register_hook(_passing)
        return self.second(x).squeeze(1)


def squares(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]) - 1).square().mean()


def adamw(params):
    return torch.optim.AdamW(params, 1e-3, fused=True)


# -- exchanges --------------------------------------------------------------------------------


def exchange(placement: Placement, times: int) -> None:
    """All-reductions by the ranks' threads."""
    on_ranks(placement.kind, placement.devices, _exchanging(len(placement.devices), times), LIMIT_S)


def _exchanging(world_size: int, times: int):
    def work(end, device):
        for step in range(times):
            tensor = torch.full((4096,), float(end.rank + step), device=device)
            _passing(tensor)
            end.all_reduce_(tensor)
            total = world_size * step + sum(range(world_size))
            assert tensor[-1].item() == total, f"step {step}: {tensor[-1].item()}, not {total}"

    return work


def set_up(placement: Placement, times: int) -> None:
    """A custom loop over replicas."""
    resolve = mock.patch(
        "runtime.loop.loop_setup.resolve_backend", return_value=(placement.backend, "a check")
    )
    with resolve, Trainer.setup(Probed(), adamw, placement.devices) as model:
        for _ in range(times):
            squares(model, (torch.randn(16, Probed.WIDTH, device=placement.devices[0]),)).backward()
            model.step()


def wrapped(placement: Placement, times: int) -> None:
    """``Ddp.wrap``: one thread makes every rank's passes, then gradients are reduced."""
    models = [Probed().to(device) for device in placement.devices]
    with Ddp.wrap(models, placement.devices, placement.backend) as ddp:
        ddp.sync_params()
        for _ in range(times):
            for model, device in zip(models, placement.devices, strict=True):
                model.zero_grad()
                squares(model, (torch.randn(8, Probed.WIDTH, device=device),)).backward()
            ddp.weighted_all_reduce_gradients([8] * len(models))


def sharded(placement: Placement, times: int) -> None:
    """``FSDP``: parameters gathered, gradients scattered, within passes."""

    def work(end, device):
        fsdp = FSDP(Probed().to(device), end, ShardingStrategy.FULL_SHARD)
        optimizer = adamw(fsdp.parameters())
        for _ in range(times):
            optimizer.zero_grad()
            squares(fsdp, (torch.randn(8, Probed.WIDTH, device=device),)).backward()
            fsdp.sync_gradients()
            optimizer.step()
            fsdp.broadcast_updated_params()
        fsdp.close()

    on_ranks(placement.kind, placement.devices, work, LIMIT_S)


def trained(placement: Placement, times: int, policy: ApplyPolicy, **settings) -> None:
    """A run with this number of steps for each rank."""
    norm = settings.get("sync_batchnorm", False)
    world_size, size = len(placement.devices), 8
    builder = (
        Trainer.builder(lambda device: Probed(norm=norm).to(device), adamw, squares)
        .dataset((torch.randn(size * world_size * times, Probed.WIDTH),))
        .batch_size(size)
        .num_epochs(1)
        .devices(placement.devices)
        .policy(policy)
        .backend(placement.backend)
        .collective_timeout(LIMIT_S)
        .partition_ratios([1 / world_size] * world_size)
        .tune_allocator(False)
        .progress(False)
        .seed(0)
    )
    for name, value in settings.items():
        getattr(builder, name)(value)
    state = builder.run().join(4 * LIMIT_S)
    assert state.metrics[0].num_samples == size * world_size * times
    if policy is not ApplyPolicy.SYNC:
        assert state.metrics[0].num_averagings > 0


def _rounds(policy: ApplyPolicy):
    return lambda p, times: trained(p, times, policy, anchor=1, max_anchor=1)


EXCHANGES = {
    "PARALLEL": exchange,
    "SYNC buckets": lambda p, times: trained(p, times, ApplyPolicy.SYNC, bucket_cap_mb=0.002),
    "Ddp": wrapped,
    "FSDP": sharded,
    "Trainer.setup": set_up,
    "SYNC batch norm": lambda p, times: trained(p, times, ApplyPolicy.SYNC, sync_batchnorm=True),
    "CADENCE": _rounds(ApplyPolicy.CADENCE),
    "ASYNC": _rounds(ApplyPolicy.ASYNC),
}


def pairs() -> list[tuple[str, str]]:
    """Every mode with every kind, in an order in which each occurs early."""
    modes = list(EXCHANGES)
    return [
        (mode, KINDS[(index + shift) % len(KINDS)])
        for shift in range(len(KINDS))
        for index, mode in enumerate(modes)
    ]


def probe(placement: Placement, mode: str, kind: str, times: int) -> dict[str, object]:
    """Make a kind of call at least this many times while ranks exchange in a mode.

    Raises:
        NotHere: The call is not possible on this machine.
    """
    device = placement.devices[0]
    if placement.is_cuda:
        fired = Probe(partial(cuda_call, kind), device)
    else:
        fired = Probe(lambda _: cpu_call(kind), device)
    with active(fired):
        EXCHANGES[mode](placement, times)
    return {"fired": fired.num_fired}


def probe_stand_in(kind: str, times: int) -> dict[str, object]:
    """The transport of NCCL over fakes of the device and its backend."""
    fake = FakeCuda(patience=1, allow_default=True, prompt=True)
    devices = (torch.device("cpu"),) * 2
    with posing_group(2, "nccl", LIMIT_S, fake=fake) as ends:
        fired = Probe(lambda _: stand_in_call(kind, fake), devices[0])
        with active(fired):
            run_ends(ends, devices, _exchanging(2, times))
    return {"fired": fired.num_fired}
