"""The NCCL transport on the model of GPUs: schedules drawn by seed, and their invariants."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from runtime.collective import barrier, base, nccl, process_group, subgroups, thread
from runtime.collective.base import ReduceOp
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, GpuWorkerError
from runtime.device import capture_gate, cuda_api
from tests.simulation.gpu_machine import Machine, ModelBackend, ModelCuda, standing_in_for_cuda
from tests.simulation.stepped_threads import Scheduler, Threading, stepped

TIMEOUT_S = 0.5
MODULES = (barrier, base, nccl, process_group, subgroups, thread, capture_gate, cuda_api)
KINDS = ("mean", "parts", "parts", "late", "sum", "max", "gather", "scatter", "copy", "tell")


class ScheduleFailed(AssertionError):
    """A schedule violated an invariant; replay it by its seed."""


@dataclass
class Step:
    """One exchange, the same on every rank.

    Attributes:
        kind: Of ``KINDS``.
        sizes: Elements of each tensor.
        dtype: Of all of them.
        waits: True if each rank allocates, or loads a kernel, in front of each part.
    """

    kind: str
    sizes: list[int]
    dtype: torch.dtype
    waits: bool


@dataclass
class Plan:
    """The events of a schedule.

    Attributes:
        shared: True if all ranks are on one GPU.
        failing: The rank that fails, and before which step; ``None``: none.
        aborter: True if another thread aborts at some time.
        stuck: True if an abort never ends.
        closes: True if a rank that fails closes its end.
        reversed_rank: The rank whose parts come in the reverse order.
        failing_readers: Ranks that cannot load the kernel for late results.
        durations_s: Durations of kernels, one of which is drawn for each.
    """

    world_size: int
    shared: bool
    steps: list[Step]
    num_prefetchers: int
    failing: tuple[int, int] | None = None
    aborter: bool = False
    stuck: bool = False
    closes: bool = True
    reversed_rank: int | None = None
    failing_readers: frozenset = field(default_factory=frozenset)
    durations_s: tuple[float, ...] = (0.0, 0.0, 0.002)

    @property
    def is_calm(self):
        """True if no rank may see an error."""
        return self.failing is None and not self.aborter


def draw(random):
    """A plan."""
    world_size = random.choice((2, 2, 2, 3))
    steps = [
        Step(
            random.choice(KINDS),
            [random.randint(1, 3) * world_size for _ in range(random.randint(1, 3))],
            random.choice((torch.float32, torch.float32, torch.bfloat16)),
            random.random() < 0.5,
        )
        for _ in range(random.randint(2, 4))
    ]
    plan = Plan(world_size, random.random() < 0.3, steps, random.choice((0, 1, 2)))
    drawn = random.random()
    if drawn < 0.15:
        plan.failing = random.randrange(world_size), random.randrange(len(steps))
        plan.closes = random.random() < 0.5
    elif drawn < 0.3:
        plan.aborter = True
    if not plan.is_calm:
        plan.stuck = random.random() < 0.3
        if random.random() < 0.5:
            plan.durations_s = (0.0, 0.002, 0.4)  # some exchanges are aborted behind long kernels
    return plan


class Failed(Exception):
    """A rank's own error, planted."""


class NcclRun:
    """One schedule."""

    def __init__(self, seed, change=None):
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.plan = draw(self.scheduler.random)
        if change is not None:
            change(self.plan)
        places = range(1 if self.plan.shared else self.plan.world_size)
        gpus = [torch.device("cuda", index) for index in places]
        self.devices = gpus * self.plan.world_size if self.plan.shared else gpus
        self.machine = Machine(self.scheduler, gpus)
        self.api = ModelCuda(self.machine)
        self.api.failing_readers = self.plan.failing_readers
        self.errors = {}
        self.faults = []

    @property
    def num_events(self):
        """Steps of threads and devices."""
        return self.scheduler.num_steps

    @property
    def trace(self):
        """``(time, thread or device, what)`` of every step."""
        return self.scheduler.trace

    def run(self):
        """Runs the schedule; returns why it has failed, or ``None``."""
        scheduler = self.scheduler
        with ExitStack() as stack:
            stack.enter_context(standing_in_for_cuda(self.api))
            stack.enter_context(_replaced(capture_gate, "GATE", capture_gate.CaptureGate()))
            stack.enter_context(_replaced(nccl, "new_backend", ModelBackend))
            nccl._ENDING.clear()
            ModelBackend.machine = self.machine
            main = self.machine.on_thread(self._main)
            scheduler.run(main)
        if scheduler.failure is not None:
            return scheduler.failure
        if self.machine.violations:
            return self.machine.violations[0]
        return self.faults[0] if self.faults else None

    def _main(self):
        ends = nccl.create_nccl_groups(self.devices[: self.plan.world_size], TIMEOUT_S)
        threads = [
            Threading.Thread(target=self._rank, args=(end, ends), name=f"rank-{end.rank}")
            for end in ends
        ]
        threads += [
            Threading.Thread(target=self._prefetch, args=(n,), name=f"prefetch-{n}")
            for n in range(self.plan.num_prefetchers)
        ]
        if self.plan.aborter:
            threads.append(Threading.Thread(target=self._abort, args=(ends,), name="aborter"))
        if self.plan.stuck:
            self.machine.comms["stuck"] = {self.scheduler.random.randrange(self.plan.world_size)}
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if not self.plan.is_calm:
            self._second_group()
        if self.plan.closes:
            for end in ends:
                end.close()

    def _second_group(self):
        """Create a second group, or check that the refusal is justified."""
        try:
            ends = nccl.create_nccl_groups(self.devices[: self.plan.world_size], TIMEOUT_S)
        except (CollectiveAborted, CollectiveTimeout) as error:
            self.faults.append(f"no second group: {error}")
        except GpuWorkerError:
            if not self.plan.stuck:
                self.faults.append("a second group is refused though the first has ended")
        else:
            for end in ends:
                end.close()

    def _rank(self, end, ends):
        """The thread of a rank: computes, and meets the others."""
        device, api = self.devices[end.rank], self.api
        try:
            with api.on_device(device), api.stream(api.new_stream(device)):
                for number, step in enumerate(self.plan.steps):
                    if self.plan.failing == (end.rank, number):
                        for other in ends:
                            other.abort()
                        raise Failed
                    self._compute(device, step)
                    self._exchange(end, step)
        except Failed:
            pass
        except (CollectiveAborted, CollectiveTimeout, ValueError) as error:
            self._leaves(end, error)
        finally:
            if self.plan.closes or self.plan.failing is None or self.plan.failing[0] != end.rank:
                end.close()

    def _leaves(self, end, error):
        if self.plan.is_calm:
            seen = f"; at the first abort: {self.machine.snapshot}" if self.machine.snapshot else ""
            self.faults.append(f"rank {end.rank}: {type(error).__name__}: {error}{seen}")

    def _compute(self, device, step):
        machine = self.machine
        stream = machine.stream_of(device)
        random = self.scheduler.random
        if step.waits or random.random() < 0.3:
            machine.allocate(machine.gpus[device])
        name = f"kernel {random.randrange(6)}"
        machine.kernel(stream, name, duration_s=random.choice(self.plan.durations_s))

    def _tensor(self, end, values, dtype):
        device = self.devices[end.rank]
        self.machine.allocate(self.machine.gpus[device])
        return self.machine.place(torch.tensor(values, dtype=dtype), device)

    def _expect(self, end, tensor, values):
        found = self.machine.read(tensor)
        if not all(abs(a - b) < 1e-2 for a, b in zip(found, values, strict=True)):
            end.check()  # raises if the group was aborted meanwhile
            self.faults.append(f"rank {end.rank} trusts {found} where {values} is due")

    def _exchange(self, end, step):
        """One exchange of a rank, and its result."""
        n, rank, dtype = end.world_size, end.rank, step.dtype
        size = step.sizes[0]
        whole = float(sum(range(1, n + 1)))
        if step.kind == "tell":
            assert end.all_gather_number(rank) == tuple(range(n))
        elif step.kind == "sum":
            tensor = self._tensor(end, [rank + 1.0] * size, dtype)
            end.all_reduce_(tensor)
            self._expect(end, tensor, [whole] * size)
        elif step.kind == "max":
            tensor = self._tensor(end, [rank + 1.0] * size, dtype)
            end.all_reduce_(tensor, ReduceOp.MAX)
            self._expect(end, tensor, [float(n)] * size)
        elif step.kind == "copy":
            tensor = self._tensor(end, [rank + 1.0] * size, dtype)
            end.broadcast_(tensor, 1)
            self._expect(end, tensor, [2.0] * size)
        elif step.kind == "gather":
            output = self._tensor(end, [0.0] * n, dtype)
            end.all_gather_into(output, self._tensor(end, [rank + 1.0], dtype))
            self._expect(end, output, [r + 1.0 for r in range(n)])
        elif step.kind == "scatter":
            output = self._tensor(end, [0.0], dtype)
            end.reduce_scatter_into(output, self._tensor(end, [rank + 1.0] * n, dtype))
            self._expect(end, output, [whole])
        else:
            self._mean(end, step, sum(r * r for r in range(1, n + 1)) / whole)

    def _mean(self, end, step, mean):
        rank, dtype = end.rank, step.dtype
        tensors = [self._tensor(end, [rank + 1.0] * size, dtype) for size in step.sizes]
        if step.kind == "mean" and not end.host_runs_ahead:  # as the reducer of gradients does it
            end.weighted_mean_(tensors, rank + 1.0)
            for tensor in tensors:
                self._expect(end, tensor, [mean] * tensor.numel())
            return
        parts = end.bucketed_mean(rank + 1.0)
        order = tensors[::-1] if rank == self.plan.reversed_rank else tensors
        for tensor in order:
            parts.add([tensor])
            self._compute(self.devices[rank], step)
        if step.kind != "late":
            parts.end()
            for tensor in tensors:
                self._expect(end, tensor, [mean] * tensor.numel())
            return
        abort_flag = self._tensor(end, 7.0, torch.float32)
        _, result = parts.end_async(abort_flag)
        self._compute(self.devices[rank], step)
        if result is not None:
            result.wait()
        for tensor in tensors:
            self._expect(end, tensor, [mean] * tensor.numel())

    def _prefetch(self, number):
        """A thread that pins memory and copies, beside the ranks."""
        device = self.devices[number % len(self.devices)]
        api = self.api
        with api.on_device(device), api.stream(api.new_stream(device)):
            for _ in range(3):
                pinned = api.empty_pinned((2,), torch.float32)
                event = api.new_event()
                with capture_gate.GATE.driver_call():  # as slots do
                    api.copy(self.machine.place(torch.zeros(2), device), pinned)
                    api.record(event)
                api.wait_host(event)

    def _abort(self, ends):
        scheduler, machine = self.scheduler, self.machine
        number = scheduler.random.randint(1, 8)  # of a launch that it interrupts
        scheduler.block(lambda: machine.num_launches >= number, 0.1, "its time to abort")
        for _ in range(scheduler.random.choice((0, 1, 3, 30))):
            scheduler.step("its time to abort")
        for end in ends:
            end.abort()


@contextmanager
def _replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def simulated():
    """The transport's modules on stepped threads, for any number of runs."""
    before = dict(os.environ)
    logging.disable(logging.CRITICAL)
    try:
        with ExitStack() as stack:
            stack.enter_context(stepped(*MODULES))
            # So that a wait of half a second is some steps, not thousands.
            stack.enter_context(_replaced(nccl, "_SPIN_S", 0.0))
            stack.enter_context(_replaced(nccl, "_FIRST_NAP_S", 0.002))
            stack.enter_context(_replaced(nccl, "_LONGEST_NAP_S", 0.02))
            stack.enter_context(_replaced(nccl, "ABORT_GRACE_S", 1.0))
            # The exit of this process does not wait for stepped threads.
            stack.enter_context(_replaced(process_group, "_RELEASED", set()))
            yield
    finally:
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(before)


def simulate_nccl(seed, change=None):
    """Run a schedule.

    Returns:
        The run.

    Raises:
        ScheduleFailed: Names the seed.
    """
    with simulated():
        run = NcclRun(seed, change)
        why = run.run()
    if why is not None:
        raise ScheduleFailed(f"seed {seed}: {why}\n{run.plan}")
    return run
