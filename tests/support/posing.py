"""Groups whose tensors pose as GPU tensors, over the stand-in for CUDA."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import contextmanager

from runtime.collective import Collective, create_collectives
from runtime.collective import nccl as nccl_module
from runtime.collective.process_group import _connect_gloo
from tests.support.fake_cuda import GPU, FakeCuda, standing_in

POSING = ("staged", "nccl")
_launch = threading.local()
"""``works``: operations begun between ``_group_start`` and ``_group_end`` in this thread."""


class PosingBackend:
    """NCCL's process group as seen by its ranks; Gloo makes the exchange, at once.

    Attributes:
        calls: Names of the calls, in order, of all ranks.
    """

    def __init__(self, store, rank, world_size, timeout_s, calls=None):
        self.rank = rank
        self.calls = [] if calls is None else calls
        self.ended = threading.Event()
        self._args = rank, world_size, store, timeout_s
        self._gloo = None
        self._note("new")

    def eager_connect_single_device(self, device):
        self._note("connect")
        self._gloo = _connect_gloo(*self._args)

    def allreduce(self, tensors, options):
        return self._run("allreduce", options, tensors)

    def broadcast(self, tensors, options):
        return self._run("broadcast", options, tensors)

    def _allgather_base(self, output, input, options):
        return self._run("_allgather_base", options, output, input)

    def _reduce_scatter_base(self, output, input, options):
        assert output.numel() * self._args[1] == input.numel()
        assert output.dtype is input.dtype
        return self._run("_reduce_scatter_base", options, output, input)

    def _group_start(self):
        assert not hasattr(_launch, "works"), "a launch inside another"
        _launch.works = []

    def _group_end(self):
        """Wait for the pending operations of all ranks."""
        works = _launch.works
        del _launch.works
        for work in works:
            work.wait()

    def abort(self):
        self._note("abort")
        self._end()

    def shutdown(self):
        self._note("shutdown")
        self._end()

    def _run(self, name, options, *tensors):
        assert options.asyncOp is False, "it would run on a stream of its own"
        self._note(name)
        gloo = self._gloo
        if gloo is None:
            raise RuntimeError("NCCL communicator was aborted")
        work = getattr(gloo, name)(*tensors, options)
        if hasattr(_launch, "works"):
            _launch.works.append(work)
        else:
            work.wait()

    def _note(self, name):
        self.calls.append((name, self.rank))

    def _end(self):
        self._gloo = None
        self.ended.set()


@contextmanager
def posing_group(world_size, kind, timeout_s, *, fake=None, new_backend=PosingBackend):
    """A connected group of ranks that pose as ranks on one GPU."""
    fake = fake or FakeCuda(patience=1, allow_default=True, prompt=True)
    before, nccl_module.new_backend = nccl_module.new_backend, new_backend
    try:
        with standing_in(fake):
            devices = [GPU] * world_size
            ends: Sequence[Collective]
            if kind == "nccl":
                ends = nccl_module.create_nccl_groups(devices, timeout_s)
            else:
                ends = create_collectives(world_size, "thread", devices, timeout_s)
            try:
                yield ends
            finally:
                for end in ends:
                    end.close()
    finally:
        nccl_module.new_backend = before
