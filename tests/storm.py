"""A storm of faults over machines as processes: ``python -m tests.storm --count 100``.

Machines are killed, suspended, started late and stopped, and the lighthouse is killed and
restarted, in sequence or several at a time. At least one machine that has taken part in a round
keeps running. At the end all machines must have equal parameters, in which each batch counts once.
The faults and their pauses are drawn from the seed; their effect depends on the clock.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.support.machines import LighthouseProcess, TrainingMachine

MAX_MACHINES = 5
"""Largest number of live machines."""
QUIET_S = 60.0
"""Longest time without a round while enough machines and the lighthouse are running."""
SAMPLES = 2003
KINDS = {"kill": 4, "stop": 4, "join": 4, "lighthouse": 2, "leave": 1}
"""Kinds of faults, with their weights."""


class StormFailed(Exception):
    """A guarantee is violated; the message names it."""


class Storm:
    """Machines under injected faults.

    Args:
        seed: Seed of the faults.
        policy: Averaging policy of each machine.
        min_machines: Fewest machines in a round.
        log_line: Called with a line for each fault.
        logs: Directory for the machines' logs; ``None``: no logs.

    Attributes:
        counts: Number of faults of each kind.
        longest_quiet_s: Longest time without a round.
    """

    def __init__(
        self, seed, *, policy="cadence", min_machines=1, log_line=lambda line: None, logs=None
    ):
        self.counts = Counter()
        self.longest_quiet_s = 0.0
        self._draw = random.Random(seed)
        self._args = (
            *("--samples", SAMPLES, "--epochs", 1_000_000, "--sleep-s", 0.01, "--period", 0.3),
            *("--policy", policy, "--machines", min_machines, "--timeout", 2.0),
        )
        self._min_machines = min_machines
        self._log_line = log_line
        self._logs = logs
        self._started_at = time.monotonic()
        self._server = LighthouseProcess(join_timeout_s=3.0)
        self._port, self._address = self._server.port, self._server.address
        self._server_back_at = None  # while it is down
        self._machines = {}
        self._leaving = {}
        self._stopped = {}  # time at which each is resumed
        self._steady_from = {}  # number of rounds after which each counts as steady
        self._num_started = 0
        self._num_rounds = 0
        self._quiet_since = time.monotonic()

    def run(self, count):
        """Inject ``count`` faults; returns the results of the remaining machines.

        Raises:
            StormFailed: A guarantee is violated.
        """
        while len(self._machines) < 3:
            self._start_machine()
        self._wait_for(lambda: len(self._steady()) == 3)
        for _ in range(count):
            while not self._fault(self._draw.choices(list(KINDS), KINDS.values())[0]):
                self._watch()
            pause_s = self._draw.choice((0.0, 0.3, 1.0, 4.0)) * self._draw.random()
            until = time.monotonic() + pause_s
            self._wait_for(lambda until=until: time.monotonic() >= until)
        return self._end()

    def close(self):
        """Kill all processes."""
        for process in (self._server, *self._machines.values(), *self._leaving.values()):
            process.close()

    def _fault(self, kind):
        """Inject a fault; False if it is not possible now."""
        match kind:
            case "lighthouse":
                if self._server_back_at is not None:
                    return False
                self._server.close()
                seconds = self._draw.choice((0.0, 1.0, 4.0))
                self._server_back_at = time.monotonic() + seconds
                return self._record(kind, f"is back after {seconds:g} s")
            case "join":
                if len(self._machines) == MAX_MACHINES:
                    return False
                return self._record(kind, self._start_machine())
        candidates = sorted(name for name in self._machines if set(self._steady()) - {name})
        if kind != "kill":
            candidates = [name for name in candidates if name in self._steady()]
        if not candidates:
            return False
        name = self._draw.choice(candidates)
        match kind:
            case "kill":
                self._machines.pop(name).close()
                self._stopped.pop(name, None)
                return self._record(kind, name)
            case "leave":
                self._leaving[name] = self._machines.pop(name)
                self._leaving[name].signal(signal.SIGINT)
                return self._record(kind, name)
            case "stop":
                seconds = self._draw.choice((0.1, 1.0, 3.0, 8.0))
                self._machines[name].signal(signal.SIGSTOP)
                self._stopped[name] = time.monotonic() + seconds
                return self._record(kind, f"{name} for {seconds:g} s")
        raise AssertionError(kind)

    def _record(self, kind, details):
        self.counts[kind] += 1
        at_s = time.monotonic() - self._started_at
        names = " ".join(f"({n})" if n in self._stopped else n for n in self._machines)
        self._log_line(f"{self.counts.total():4d}  {at_s:6.1f} s  {kind} {details:<22} {names}")
        return True

    def _start_machine(self):
        name = f"m{self._num_started}"
        self._num_started += 1
        log = () if self._logs is None else ("--log", Path(self._logs) / f"{name}.log")
        self._machines[name] = TrainingMachine(self._address, *self._args, *log)
        self._steady_from[name] = 0
        return name

    def _steady(self):
        """Running machines that have taken part in a round since they started or resumed."""
        return [
            name
            for name, machine in self._machines.items()
            if name not in self._stopped and machine.num_rounds > self._steady_from[name]
        ]

    def _watch(self):
        """Apply due events, and read the machines' output."""
        now = time.monotonic()
        if self._server_back_at is not None and now >= self._server_back_at:
            self._server.close()
            self._server = LighthouseProcess(port=self._port, join_timeout_s=3.0)
            self._server_back_at = None
        for name in [name for name, at in self._stopped.items() if now >= at]:
            del self._stopped[name]
            self._steady_from[name] = self._machines[name].num_rounds
            self._machines[name].signal(signal.SIGCONT)
        for name, machine in self._machines.items():
            if machine.poll().answer is not None:
                raise StormFailed(f"machine {name} has ended by itself: {machine.answer}")
        num_rounds = sum(machine.num_rounds for machine in self._machines.values())
        num_running = sum(
            machine.started and name not in self._stopped
            for name, machine in self._machines.items()
        )
        quiet_s = now - self._quiet_since
        if (
            num_rounds != self._num_rounds
            or self._server_back_at is not None
            or num_running < self._min_machines
        ):
            self._num_rounds, self._quiet_since = num_rounds, now
        elif quiet_s > QUIET_S:
            self._show_threads()
            raise StormFailed(f"no round for {quiet_s:.0f} s")
        self.longest_quiet_s = max(self.longest_quiet_s, quiet_s)
        time.sleep(0.02)

    def _wait_for(self, ready):
        while not ready():
            self._watch()

    def _show_threads(self):
        for machine in self._machines.values():
            machine.signal(signal.SIGCONT)
            machine.signal(signal.SIGUSR2)
        for machine in self._machines.values():
            machine.poll(1.0)  # the machine prints its stacks

    def _end(self):
        """Resume all machines, and end the run on all of them."""
        for name in self._stopped:
            self._stopped[name] = 0.0
        if len(self._machines) < max(2, self._min_machines):
            self._start_machine()
        self._wait_for(
            lambda: self._server_back_at is None and len(self._steady()) == len(self._machines)
        )
        self._machines[self._steady()[0]].signal(signal.SIGUSR1)
        ended_at = time.monotonic()
        while any(machine.poll().answer is None for machine in self._machines.values()):
            if time.monotonic() > ended_at + QUIET_S:
                self._show_threads()
                names = [n for n, m in self._machines.items() if m.answer is None]
                raise StormFailed(f"machines {names} have not ended after {QUIET_S:g} s")
            time.sleep(0.02)
        for name, machine in self._leaving.items():
            answer = machine.join(QUIET_S)
            if answer["num_missing"] or answer["num_twice"]:
                raise StormFailed(f"machine {name}, which left, has batches wrong: {answer}")
        return {name: machine.join(QUIET_S) for name, machine in self._machines.items()}


def violations(answers):
    """The guarantees violated by the results of :meth:`Storm.run`; empty if none."""
    found = []
    if len({answer["digest"] for answer in answers.values()}) != 1:
        found.append("digests differ")
    for name, answer in answers.items():
        if answer["num_missing"] or answer["num_twice"]:
            found.append(f"{name}: {answer['num_missing']} missing, {answer['num_twice']} twice")
        wrong = {n for n in answer["num_trained"] if n != SAMPLES}
        if wrong:
            found.append(f"{name}: epochs of {sorted(wrong)} samples, not {SAMPLES}")
        if not answer["stopped"] or not answer["num_batches"]:
            found.append(f"{name}: {answer['num_batches']} batches, stopped: {answer['stopped']}")
    return "; ".join(found)


def main():
    """Run the storm, and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="cadence", choices=["sync", "cadence", "async"])
    parser.add_argument("--min-machines", type=int, default=1)
    parser.add_argument("--logs", help="directory for the machines' logs")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.policy}, at least {args.min_machines} machine(s)", flush=True)
    start = time.monotonic()
    storm = Storm(
        args.seed,
        policy=args.policy,
        min_machines=args.min_machines,
        log_line=lambda line: print(line, flush=True),
        logs=args.logs,
    )
    try:
        answers = storm.run(args.count)
        problem = violations(answers)
    except (StormFailed, AssertionError) as error:
        answers, problem = {}, str(error)
    finally:
        storm.close()
    if problem:
        print(f"seed {args.seed}: {problem}")
        for name, answer in answers.items():
            print(name, {k: v for k, v in answer.items() if not isinstance(v, list)})
        return 1
    answer = next(iter(answers.values()))
    faults = ", ".join(f"{n} {kind}" for kind, n in sorted(storm.counts.items()))
    print(
        f"{args.count} faults ({faults}) in {time.monotonic() - start:.0f} s: {len(answers)} "
        f"machines ended with equal digests after {answer['step']} rounds; "
        f"{answer['num_batches']} batches of {len(answer['num_samples'])} whole epochs and of "
        f"open ones, each in exactly one round; no round for {storm.longest_quiet_s:.1f} s at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
