"""Ctrl-C and SIGTERM in separate processes: exit status and output."""

import re
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.support import programs
from tests.support.running import WAIT_S

ROOT = Path(__file__).parents[3]
GRACE_S = 0.2

# The first step waits until join() has installed its handlers, then for a byte from the parent.
SCRIPT = f"""
import os, signal, time
from runtime.core import signals
from runtime.core.signals import INTERRUPTS
from tests.support import programs
from tests.support.running import builder, count_up

signals.REPETITION_S = 0.0
default = signal.getsignal(signal.SIGTERM)

def tell(text):
    os.write(1, text.encode() + b"\\n")

class Listener:
    stop = lambda self, reason: tell("asked to stop")
    abort = lambda self: tell("asked to abort")
    wait_threads = lambda self, timeout_s: None

def train(model, batch):
    while signal.getsignal(signal.SIGTERM) is default:
        time.sleep(0.001)
    tell("in a step")
    os.read(0, 1)
    tell("step done")
    return count_up(model, batch)

def caught(error):
    tell(f"{{type(error).__name__}}, {{'no state' if handle.state is None else 'a state'}}")

listener = Listener()
INTERRUPTS.add(listener)
handle = builder(train=train, dataset=100_000, ranks=1)._set(grace_s={GRACE_S}).run()
try:
    handle.join()
except KeyboardInterrupt as error:
    caught(error)
    try:
        handle.join()
    except RuntimeError as error:
        caught(error)
    raise
finally:
    INTERRUPTS.remove(listener)
"""


@contextmanager
def script_in_a_step():
    command = [sys.executable, "-c", SCRIPT]
    files = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
    with programs.Popen(command, cwd=ROOT, whole_end=True, **files) as process:
        try:
            assert process.stdout.readline() == b"in a step\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def send(process, signum, answer):
    process.send_signal(signum)
    assert process.stdout.readline() == answer


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_after_the_code_that_handles_the_end_of_the_run(signum):
    with script_in_a_step() as process:
        send(process, signum, b"asked to stop\n")
        out, err = process.communicate(b".", WAIT_S)
    assert out.splitlines()[0] == b"step done"
    assert out.splitlines()[-1] == b"KeyboardInterrupt, a state"
    assert b"Traceback" not in err
    assert process.returncode == -signum


END_SCRIPT = """
import atexit, logging, signal, sys
from tests.support import programs
from runtime.core.signals import INTERRUPTS

handler = logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout))
logging.getLogger("test").addHandler(handler)
try:
    with INTERRUPTS.waiting():
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    pass
logging.getLogger("test").warning("a record")
print("saved", end="")
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", -signal.SIGTERM),
        ("sys.exit(3)", -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.exit(3)", 3),
    ],
)
def test_output_is_complete_when_the_default_action_ends_the_process(ending, status):
    script = "import logging.handlers" + END_SCRIPT.format(ending=ending)
    command = [sys.executable, "-c", script]
    found = programs.run(command, timeout=WAIT_S, whole_end=True)
    assert found.stdout == "saveda record\n" or found.stdout == "a record\nsaved"
    assert found.returncode == status


def test_ctrl_c_ends_a_script_with_a_keyboard_interrupt():
    with script_in_a_step() as process:
        send(process, signal.SIGINT, b"asked to stop\n")
        out, err = process.communicate(b".", WAIT_S)
    assert out.splitlines()[0] == b"step done"
    assert out.splitlines()[-1] == b"KeyboardInterrupt, a state"
    last = err.splitlines()[-3:]
    assert re.match(rb"KeyboardInterrupt: the run was stopped after \d+ of 50,000 batches", last[0])
    assert b"checkpoint_dir(path)" in last[2]
    assert b"Traceback" not in err
    assert process.returncode == -signal.SIGINT


def test_a_second_ctrl_c_ends_a_script_stuck_in_a_step():
    with script_in_a_step() as process:
        send(process, signal.SIGINT, b"asked to stop\n")
        send(process, signal.SIGINT, b"asked to abort\n")
        process.wait(WAIT_S)  # the step never continues
        out = process.stdout.read()
    assert out.splitlines() == [b"KeyboardInterrupt, no state", b"RunAborted, no state"]
    assert process.returncode == -signal.SIGINT


LOOP_SCRIPT = f"""
import signal, threading, torch
from runtime import Trainer
from tests.support import programs

main, left, once = threading.main_thread().ident, threading.Event(), threading.Lock()

class Net(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return Interrupting.apply(y) if {{in_backward}} else interrupt(y)

class Interrupting(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, grad: interrupt(grad))

def interrupt(x):
    if once.acquire(blocking=False):
        signal.pthread_kill(main, signal.SIGINT)
    left.wait({WAIT_S})  # the caller waits in its call of the model meanwhile
    return x

try:
    model = Trainer.setup(Net(4, 1), lambda params: torch.optim.SGD(params, 0.1), ["cpu", "cpu"])
    model(torch.ones(8, 4)).sum().backward()
finally:
    left.set()
"""


@pytest.mark.parametrize("in_backward", [False, True])
def test_ctrl_c_in_a_loop_of_the_user_prints_one_line(in_backward):
    script = LOOP_SCRIPT.format(in_backward=in_backward)
    command = [sys.executable, "-c", script]
    found = programs.run(command, timeout=2 * WAIT_S, whole_end=True)
    assert "Traceback" not in found.stderr
    last = found.stderr.splitlines()[-1]
    assert last == "KeyboardInterrupt: interrupted in a call of the model's replicas"
    assert found.returncode == -signal.SIGINT
