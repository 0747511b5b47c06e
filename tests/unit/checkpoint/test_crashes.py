"""A process killed at any system call while writing leaves only complete checkpoints."""

import sys
from pathlib import Path

import pytest

from runtime.checkpoint.tensor_file import HAS_WHEEL
from tests.support import programs
from tests.support.pairs import SCALE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

EVERY = 1 if SCALE > 1 else 3

# A child is forked for each call that changes the disk, or for every third, and kills itself
# before that call.
SCRIPT = """
import logging, os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # no threads, which fork would not copy
from runtime.checkpoint.store import load_newest
from runtime.checkpoint.store import remove_old_checkpoints, write_checkpoint
from runtime.checkpoint.tensor_file import HAS_WHEEL
from tests.support import programs
from tests.support.checkpointing import make, names, same

logging.basicConfig(level="WARNING")
CALLS = {
    "mkdir", "open", "flock", "fsync", "rename", "unlink", "rmdir", "close", "write", "flush",
    "serialize_file", "write_record", "write_end_of_file",
}

class Killer:
    def __init__(self, number):
        self.left, self.seen = number, []

    def __call__(self, frame, event, function):
        if event != "c_call" or function.__name__ not in CALLS:
            return
        self.seen.append(function.__name__)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def work(directory, killer):
    sys.setprofile(killer)
    write_checkpoint(directory, make(3))
    remove_old_checkpoints(directory, 2)
    sys.setprofile(None)

def prepare(root, name):
    return Path(shutil.copytree(root / "before", root / name))

root = Path(sys.argv[1])
for step in (1, 2):
    write_checkpoint(root / "before", make(step))
counting = Killer(-1)
work(prepare(root, "counted"), counting)
new, num_left = 0, 0
for number in range(1, len(counting.seen) + 1, int(sys.argv[2])):
    directory = prepare(root, str(number))
    child = os.fork()
    if child == 0:
        work(directory, Killer(number))
        os._exit(7)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, number
    found = load_newest(directory)
    step = found.data.global_step
    assert found.refused == () and step in (2, 3) and same(found.data, make(step)), number
    assert step >= 2 + bool(new), "a complete checkpoint is never lost"
    new += step == 3
    num_left += any(name.startswith(".") for name in names(directory))
    # The next process removes leftovers and continues.
    write_checkpoint(directory, make(4))
    remove_old_checkpoints(directory, 2)
    kept = [int(name.split("-")[1]) for name in sorted(names(directory), key=lambda n: n[-6:])]
    assert kept == [step, 4], kept
    shutil.rmtree(directory)
print(len(counting.seen), num_left, new, *sorted(set(counting.seen)))
"""


def test_the_newest_complete_checkpoint_is_found_whenever_the_writer_was_killed(tmp_path):
    done = programs.run([sys.executable, "-c", SCRIPT, str(tmp_path), str(EVERY)], timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    num_calls, num_left, num_new, *kinds = done.stdout.split()
    assert int(num_calls) >= 30
    assert 20 // EVERY <= int(num_left) < int(num_calls)  # children were killed during writing
    assert 1 <= int(num_new) < int(num_calls) // 2
    written = {"serialize_file"} if HAS_WHEEL else {"write"}
    assert {"mkdir", "fsync", "rename", "unlink", "rmdir"} | written <= set(kinds)
