"""One machine of a cluster as a program, which makes the engine calls requested on stdin.

``python -m tests.support.engine_program OPTIONS`` reads and writes a line of JSON per call; see
:class:`tests.support.machines.EngineMachine` for the other end.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from runtime.cluster import machine_group, torchft_engine
from runtime.cluster.engine import ClusterState
from runtime.cluster.lighthouse import load_torchft
from runtime.cluster.options import EngineOptions
from runtime.cluster.torchft_engine import TorchftEngine

if importlib.util.find_spec("torchft"):
    load_torchft("tests")  # once for all programs that are forked

NUMEL = 5000
groups: Any = machine_group


def digest(tensors):
    """Digest of the bits of tensors."""
    return hashlib.sha256(
        b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


def contribution(seed):
    """Tensors of every supported dtype."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(NUMEL, generator=draw)
    return [x, x[:999].double(), x[:2000].bfloat16(), x[:0]]


class Program:
    """The calls, by name."""

    def __init__(self, value=0.0, checked=True, **options):
        self._value = value
        if not checked:  # as a machine that asks another server
            engine: Any = torchft_engine
            engine.Membership = lambda *args: SimpleNamespace(close=lambda: None)
        self._engine = TorchftEngine(EngineOptions(**options), self._offer)

    def _offer(self):
        weights = torch.full((NUMEL,), self._value)
        return ClusterState(tensors={"w": weights}, meta={"value": self._value})

    def quorum(self):
        """Form a quorum, and adopt the state received."""
        found = self._engine.quorum()
        healed = found.healed
        if healed is not None:
            self._value = healed.meta["value"]
            assert torch.equal(healed.tensors["w"], self._offer().tensors["w"])
        return {
            "generation": found.generation,
            "rank": found.rank,
            "members": found.members,
            "refused": found.refused,
            "healed": None if healed is None else healed.meta["value"],
            "step": self._engine.step,
        }

    def gather(self, report="", size=0):
        """Gather a text, padded by ``size`` bytes."""
        return [
            part.rstrip(b".").decode()
            for part in self._engine.gather(report.encode() + b"." * size)
        ]

    def all_reduce(self, seed=0, numel=None):
        """Sum tensors; returns the digest and the first elements of the sums."""
        tensors = contribution(seed) if numel is None else [torch.ones(numel)]
        self._engine.all_reduce(tensors)
        return {"digest": digest(tensors), "first": [t[:2].tolist() for t in tensors]}

    def commit(self, ok=True, value=None):
        """Commit; a positive decision changes the state."""
        done = self._engine.commit(ok)
        if done and value is not None:
            self._value = value
        return {"done": done, "step": self._engine.step}

    def reset(self, step=0):
        """Set the step."""
        self._engine.reset(step)

    def close(self):
        """Close the engine."""
        self._engine.close()

    def cancel_after(self, timeout_s):
        """Cancel calls after a time."""
        self._engine.cancel_after(timeout_s)

    # -- faults ---------------------------------------------------------------------

    def freeze_at(self, point):
        """Make the next call of this name report its point and block for ever."""
        kind = groups.MachineGroup
        inner = {"gather": "_all_gather", "all_reduce": "_compare_layouts"}[point]
        first = getattr(kind, inner)

        def frozen(group, *args):
            first(group, *args)
            reply({"frozen": point})
            threading.Event().wait()

        setattr(kind, inner, frozen)

    def send(self, kind):
        """Send something else in place of an envelope."""
        envelopes = {
            "a pickle": lambda *_: pickle.dumps({"facts": list(range(100))}),
            "a wrong token": lambda token, *rest: SEALED("wrong", *rest),
            "an old message": lambda token, purpose, number, *rest: SEALED(
                token, purpose, number - 1, *rest
            ),
            "too much": lambda *_: b"x" * (17 << 20),
            "half a message": lambda *args: SEALED(*args)[:20],
        }
        hello = groups._exchange_hellos

        def honest_hello(*args):
            groups.seal = SEALED
            try:
                return hello(*args)
            finally:
                groups.seal = envelopes[kind]

        groups._exchange_hellos = honest_hello
        groups.seal = envelopes[kind]


SEALED = groups.seal


def reply(answer):
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main():
    """Answer until stdin ends."""
    program = Program(**json.loads(sys.argv[1]))
    reply({"ready": True})
    for line in sys.stdin:
        call = json.loads(line)
        start = time.monotonic()
        try:
            result = getattr(program, call.pop("call"))(**call)
            answer = {"result": result}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
            answer["machines"] = getattr(error, "machines", ())
        reply({**answer, "took_s": time.monotonic() - start, "at_s": time.monotonic()})


if __name__ == "__main__":
    main()
