"""A model of GPUs, of the waits of calls to their driver, and of NCCL on top.

A kernel of a collective occupies its stream until the kernels of all ranks run. A call to the
driver waits for nothing but locks, for a stream, for its device, or for all devices; one that
waits for devices holds a lock meanwhile, without which nothing can be launched. The calls are
put into the class that waits for most of what CUDA's documentation allows.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.device import cuda_api
from runtime.device.cuda_api import CudaApi
from tests.simulation.stepped_threads import Scheduler
from tests.support.tape import _READS, is_view, tensors_in, written_by

GARBAGE = 77.0
FREE_S = 0.25
"""Seconds from the last rank's abort until NCCL frees its kernels' memory; 0.5 on an H200."""


class Stream:
    """Work in order; ``given`` and ``done`` count it."""

    def __init__(self, name, device):
        self.name = name
        self.device = device
        self.queue = deque()
        self.given = self.done = 0

    def pop(self):
        self.queue.popleft()
        self.done += 1


class Op:
    """Work of a stream: its name, duration and effect."""

    def __init__(self, what, run=None, duration_s=0.0, is_ready=None):
        self.what = what
        self.run = run or (lambda: None)
        self.duration_s = duration_s
        self.due = None
        self.is_ready = is_ready


class GpuEvent:
    def __init__(self):
        self.stream, self.position = None, 0

    @property
    def is_complete(self):
        return self.stream is None or self.stream.done >= self.position


class Gpu:
    """One device.

    Attributes:
        holder: The thread that holds the lock of its context.
        kernels: Names of the kernels that are loaded.
    """

    def __init__(self, device):
        self.device = device
        self.streams = []
        self.holder = None
        self.kernels = set()


class Machine:
    """The devices, and the calls of threads to their driver.

    Args:
        scheduler: Runs it.
        devices: The devices.

    Attributes:
        violations: Violated invariants.
        snapshot: The waits of all threads when the first communicator was aborted.
    """

    def __init__(self, scheduler, devices):
        self.scheduler = scheduler
        self.random = scheduler.random
        self.gpus = {device: Gpu(device) for device in devices}
        self.holder = None  # of the driver's lock
        self.queries_lock = self.random.random() < 0.5
        self.violations = []
        self.snapshot = ""
        self.comms = {}
        self.num_launches = 0
        self.is_running = False  # an operation of the device, not of a thread
        self._places = {}
        scheduler.machine = self

    # -- execution on the devices ------------------------------------------------------------

    def streams(self):
        return [stream for gpu in self.gpus.values() for stream in gpu.streams]

    def steps(self):
        """The operations that the devices can execute now."""
        found = []
        for stream in self.streams():
            if not stream.queue:
                continue
            op = stream.queue[0]
            if op.due is None:
                op.due = self.scheduler.now + op.duration_s
            if op.due <= self.scheduler.now and (op.is_ready is None or op.is_ready()):
                found.append(lambda stream=stream: self._run(stream))
        return found

    def _run(self, stream):
        self.is_running = True
        try:
            with torch.no_grad():
                stream.queue[0].run()
        finally:
            self.is_running = False
        stream.pop()

    def next_time(self):
        now = self.scheduler.now
        times = [s.queue[0].due for s in self.streams() if s.queue and s.queue[0].due is not None]
        return min((time for time in times if time > now), default=None)

    def states(self):
        return [f"{s.name}: {s.queue[0].what}" for s in self.streams() if s.queue]

    def forbid(self, what):
        if what not in self.violations:
            self.violations.append(what)

    # -- calls to the driver ------------------------------------------------------------

    def call(self, gpu, what, *, waits="nothing"):
        """A call to the driver in the current thread.

        Args:
            gpu: The device of the context.
            what: The call.
            waits: ``"nothing"`` but locks, the ``"device"``, or ``"all"`` devices.
        """
        scheduler = self.scheduler
        me = scheduler.current
        me.slots["context"] = True

        def is_free():
            return self.holder in (None, me) and gpu.holder in (None, me)

        scheduler.block(is_free, None, f"{what}, for a lock of the driver")
        if waits == "nothing":
            return
        if waits == "device":
            gpu.holder = me
            streams = gpu.streams
        else:
            self.holder = me
            streams = self.streams()
        marks = [(stream, stream.given) for stream in streams]
        try:
            scheduler.block(
                lambda: all(stream.done >= given for stream, given in marks),
                None,
                f"{what}, for {waits if waits == 'all' else 'its'} devices",
            )
        finally:
            if waits == "device":
                gpu.holder = None
            else:
                self.holder = None

    def give(self, stream, op):
        stream.queue.append(op)
        stream.given += 1

    def kernel(self, stream, name, run=None, duration_s=0.0):
        """Launch a kernel; the first launch of each loads it, which waits for the device."""
        gpu = stream.device
        is_new = name not in gpu.kernels
        self.call(gpu, f"a launch of {name}", waits="device" if is_new else "nothing")
        gpu.kernels.add(name)
        self.give(stream, Op(name, run, duration_s))

    def allocate(self, gpu):
        """Allocate memory of a device, mostly from the allocator's cache."""
        drawn = self.random.random()
        if drawn < 0.15:
            self.call(gpu, "an allocation", waits="device")
        elif drawn < 0.25:
            self.call(gpu, "an allocation after freeing the cache", waits="all")

    def synchronize(self, stream):
        """Wait for all work enqueued on a stream."""
        given = stream.given
        self.scheduler.block(lambda: stream.done >= given, None, f"{stream.name}, synchronized")

    # -- threads and tensors ------------------------------------------------------------

    @property
    def slots(self):
        return self.scheduler.current.slots

    def stream_of(self, device):
        return self.slots.get(("stream", device)) or self.default_stream(device)

    def default_stream(self, device):
        gpu = self.gpus[device]
        if not gpu.streams:
            gpu.streams.append(Stream(f"default stream of {device}", gpu))
        return gpu.streams[0]

    def place(self, tensor, device):
        if tensor.numel():
            self._places[tensor.untyped_storage().data_ptr()] = tensor, device
        return tensor

    def device_of(self, tensor):
        found = self._places.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        return found[1] if found else torch.device("cpu")

    def on_thread(self, work):
        """``work`` with the operations of PyTorch given to streams."""

        def run():
            with Operations(self):
                work()

        return run

    def read(self, tensor):
        """Values of a tensor once the stream of this thread is through."""
        self.synchronize(self.stream_of(self.device_of(tensor)))
        self.is_running = True
        try:
            return tensor.tolist()
        finally:
            self.is_running = False


class Operations(TorchDispatchMode):
    """Enqueues operations on tensors of a GPU on the current stream of the thread."""

    def __init__(self, machine):
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        machine = self._machine
        if machine.is_running or Scheduler.active is None or machine.scheduler.dead:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        devices = [d for d in map(machine.device_of, given) if d.type == "cuda"]
        if not devices or is_view(func):
            return func(*args, **kwargs)
        stream = machine.stream_of(devices[0])
        if func in _READS:
            machine.synchronize(stream)
            return func(*args, **kwargs)
        name = func._schema.name
        if written_by(func, args, kwargs):
            machine.kernel(stream, name, lambda: func(*args, **kwargs))
            return next(iter(written_by(func, args, kwargs)))
        out = func(*args, **kwargs)  # for its shape
        machine.allocate(stream.device)
        for tensor in tensors_in(out):
            machine.place(tensor, devices[0])
        if "empty" not in name:
            made = out.detach()

            def run():
                made.copy_(func(*args, **kwargs))

            machine.kernel(stream, name, run)
        return out


class ModelCuda(CudaApi):
    """The API of the model's driver."""

    def __init__(self, machine):
        self.machine = machine
        self.failing_readers = frozenset()

    @contextmanager
    def on_device(self, device):
        slots = self.machine.slots
        before = slots.get("device", 0)
        if device.index != before:
            slots["context"] = True  # CUDA is called only for a change
        slots["device"] = device.index
        try:
            yield
        finally:
            slots["device"] = before

    def make_context_current(self, device):
        self.machine.call(self.machine.gpus[device], "a launch")

    @property
    def _device(self):
        return torch.device("cuda", self.machine.slots.get("device", 0))

    @property
    def _gpu(self):
        return self.machine.gpus[self._device]

    def current_stream(self, device):
        return self.machine.stream_of(device)

    def new_stream(self, device):
        gpu = self.machine.gpus[device]
        gpu.streams.append(Stream(f"stream {len(gpu.streams)} of {device}", gpu))
        return gpu.streams[-1]

    @contextmanager
    def stream(self, stream):
        slots, key = self.machine.slots, ("stream", stream.device.device)
        before = slots.get(key)
        slots[key] = stream
        try:
            yield
        finally:
            slots[key] = before

    def new_event(self, *, timing=False):
        return GpuEvent()

    def record(self, event, stream=None):
        stream = stream or self.machine.stream_of(self._device)
        self.machine.call(stream.device, "a record")
        self.machine.give(stream, Op("an event"))
        event.stream, event.position = stream, stream.given

    def wait_event(self, event, stream=None):
        stream = stream or self.machine.stream_of(self._device)
        self.machine.call(stream.device, "a wait")
        awaited, position = event.stream, event.position
        self.machine.give(
            stream,
            Op("a wait for an event", is_ready=lambda: not awaited or awaited.done >= position),
        )

    def is_complete(self, event):
        if event.stream is not None and self.machine.queries_lock:
            self.machine.call(event.stream.device, "a query")
        else:
            self.machine.scheduler.step("a query")
        return event.is_complete

    def wait_host(self, event):
        self.machine.scheduler.block(lambda: event.is_complete, None, "an event, on the host")

    def _new_pinned(self, shape, dtype):
        self.machine.call(self._gpu, "pinned memory", waits="all")
        return torch.zeros(tuple(shape), dtype=dtype)

    def _load_reader(self):
        if "context" not in self.machine.slots:
            raise RuntimeError("CUDA driver error: invalid device context")
        rank = int(self.machine.scheduler.current.name.rsplit("-", 1)[-1])
        if rank in self.failing_readers:
            raise OSError("planted")
        self.machine.call(self._gpu, "a module", waits="device")

        def read(target, source):
            stream = self.machine.stream_of(self._device)
            self.machine.kernel(stream, "read_host", lambda: target.copy_(source))

        return read

    def copy(self, target, source):
        stream = self.machine.stream_of(self._device)
        self.machine.kernel(stream, "copy", lambda: target.copy_(source))

    def device_of(self, tensor):
        return self.machine.device_of(tensor)


class Comm:
    """A communicator: what its ranks have launched, in order.

    Args:
        world_size: Number of ranks.
        unmaps: True if its memory is freed without a wait for the device, as with ``cuMemUnmap``.
    """

    def __init__(self, world_size, unmaps):
        self.world_size = world_size
        self.unmaps = unmaps
        self.ops = [[] for _ in range(world_size)]
        self.backends = [None] * world_size
        self.connected, self.closing, self.aborting, self.ended = set(), set(), set(), set()
        self.seals = set()


class Kernel(Op):
    """One rank's kernel of a collective."""

    def __init__(self, comm, rank, what, outputs, compute):
        super().__init__(f"{what[0]} {len(comm.ops[rank])} of rank {rank}")
        self.comm, self.rank, self.outputs, self.compute = comm, rank, outputs, compute
        self.kind = what
        self.index = len(comm.ops[rank])
        self.is_ready, self.run = self._can_end, self._end
        self.result = None
        self.is_garbage = False
        self.stream = None

    def _peers(self):
        rows = self.comm.ops
        return [row[self.index] if len(row) > self.index else None for row in rows]

    def _can_end(self):
        if self.result is not None or self.is_garbage:
            return True
        if self.comm.aborting:
            # An aborted kernel signals its peers that data has arrived.
            self.is_garbage = True
            return True
        peers = self._peers()
        if any(peer is None or peer.stream.queue[0] is not peer for peer in peers):
            return False
        if len({peer.kind for peer in peers}) > 1:
            return False  # they wait for data that never arrives
        machine = self.comm.machine
        machine.is_running = True
        try:
            with torch.no_grad():
                results = self.compute(peers)
        finally:
            machine.is_running = False
        for peer, result in zip(peers, results, strict=True):
            peer.result = result
        return True

    def _end(self):
        machine = self.comm.machine
        if (id(self.comm), self.rank) in machine.comms.get("left", ()):
            machine.forbid(f"{self.what} writes after its rank has left by an exception")
        for output, result in zip(self.outputs, self.result or self.outputs, strict=True):
            if self.is_garbage:
                output.fill_(GARBAGE) if output.is_floating_point() else output.fill_(77)
            else:
                output.copy_(result)


class ModelBackend:
    """One rank's process group over the model of NCCL.

    Attributes:
        stuck: True if its abort never ends.
    """

    machine: Machine

    def __init__(self, store, rank, world_size, timeout_s):
        machine = self.machine
        key = store.compare_set("model", "", str(len(machine.comms)))
        if key not in machine.comms:
            machine.comms[key] = Comm(world_size, unmaps=machine.random.random() < 0.7)
        self.comm = machine.comms[key]
        self.comm.machine = machine
        for other in machine.comms.values():
            if isinstance(other, Comm) and other.aborting - other.ended:
                machine.forbid("a communicator is made while an earlier one is being aborted")
        self.comm.backends[rank] = self
        self.rank = rank
        self.gpu = None
        self.is_busy = False

    def eager_connect_single_device(self, device):
        machine, comm = self.machine, self.comm
        self.gpu = machine.gpus[device]
        machine.call(self.gpu, "a connection", waits="device")
        comm.connected.add(self.rank)
        machine.scheduler.block(
            lambda: len(comm.connected) == comm.world_size or comm.aborting, None, "its peers"
        )
        if comm.aborting:
            raise RuntimeError("NCCL communicator was aborted")

    def allreduce(self, tensors, options):
        (tensor,) = tensors

        def compute(peers):
            total = sum(peer.outputs[0].double() for peer in peers).to(tensor.dtype)
            return [(total,)] * len(peers)

        return self._issue(("allreduce", tensor.numel(), tensor.dtype), [tensor], compute)

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        root = options.rootRank
        return self._issue(
            ("broadcast", tensor.numel(), root),
            [tensor],
            lambda peers: [(peers[root].outputs[0].clone(),)] * len(peers),
        )

    def _allgather_base(self, output, input, options):
        kernel = ("allgather", input.numel(), input.dtype)
        self._issue(
            kernel,
            [output],
            lambda peers: [(torch.cat([p.input for p in peers]),)] * len(peers),
            input,
        )

    def _reduce_scatter_base(self, output, input, options):
        def compute(peers):
            total = sum(peer.input.double() for peer in peers).to(output.dtype)
            return [(part,) for part in total.view(len(peers), -1)]

        self._issue(("reduce_scatter", input.numel(), input.dtype), [output], compute, input)

    def _issue(self, kind, outputs, compute, input=None):
        machine = self.machine
        if self.comm.aborting:
            raise RuntimeError("NCCL communicator was aborted")
        if self.is_busy:
            machine.forbid("two threads use a communicator at once")
        self.is_busy = True
        stream = machine.stream_of(self.gpu.device)
        works = machine.slots.get("group")

        def launch():
            machine.call(self.gpu, f"the launch of {kind[0]} on rank {self.rank}")
            self.is_busy = False
            if self.rank in self.comm.aborting:
                machine.forbid("a kernel is launched on a communicator that is being aborted")
            kernel = Kernel(self.comm, self.rank, kind, outputs, compute)
            kernel.input, kernel.stream = input, stream
            self.comm.ops[self.rank].append(kernel)
            machine.give(stream, kernel)

        if works is None:
            machine.num_launches += 1
            launch()
        else:
            self.is_busy = False
            works.append(launch)

    def _group_start(self):
        self.machine.slots["group"] = []
        self.machine.num_launches += 1

    def _group_end(self):
        for launch in self.machine.slots.pop("group"):
            launch()

    def abort(self):
        machine, comm = self.machine, self.comm
        if not machine.snapshot:
            machine.snapshot = machine.scheduler.states()
        if self.rank in comm.closing or self.rank in comm.aborting:
            return
        comm.aborting.add(self.rank)
        stuck = machine.comms.get("stuck", ())
        machine.scheduler.block(lambda: self.rank not in stuck, None, "the end of its abort")
        if len(comm.aborting) == comm.world_size:  # the last one frees the memory of all
            machine.scheduler.block(lambda: False, FREE_S, "NCCL's threads")
            self._free()
        comm.ended.add(self.rank)

    def _free(self):
        machine = self.machine
        if self.gpu is None:
            return
        machine.call(
            self.gpu, "a free of a communicator", waits="nothing" if self.comm.unmaps else "all"
        )
        for kernel in itertools.chain(*self.comm.ops):
            if kernel in list(kernel.stream.queue)[1:]:
                machine.forbid(f"the memory of {kernel.what} is freed before it begins")

    def shutdown(self):
        machine, comm = self.machine, self.comm
        comm.closing.add(self.rank)
        machine.scheduler.block(
            lambda: len(comm.closing | comm.aborting) == comm.world_size, None, "peers that close"
        )
        machine.call(self.gpu, "a free of a communicator", waits="device")


@contextmanager
def standing_in_for_cuda(api):
    before, cuda_api.API = cuda_api.API, api
    try:
        yield
    finally:
        cuda_api.API = before
