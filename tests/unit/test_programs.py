"""Forked programs behave like started ones, as far as tests rely on it."""

import os
import signal
import subprocess
import sys
from functools import partial
from subprocess import DEVNULL, PIPE

import psutil
import pytest

from tests.house import ROOT
from tests.support import programs
from tests.support.programs import _Server
from tests.support.running import until

WAIT_S = 50


def both(args, whole_end=False, **kwargs):
    """Exit status, stdout and stderr of a new interpreter and of a forked program."""
    given = {"stdout": PIPE, "stderr": PIPE, "text": True, "timeout": WAIT_S, "cwd": ROOT, **kwargs}
    runs = (subprocess.run, partial(programs.run, whole_end=whole_end))
    found = [run([sys.executable, *args], **given) for run in runs]
    return [(done.returncode, done.stdout, done.stderr) for done in found]


START = """
import os, signal, sys, threading, atexit, warnings
def start():
    atexit.register(print, "at exit")
    print(__name__, globals().get("__file__"), sys.argv, sys.path[:2], os.getcwd())
    print(sys.modules["__main__"].start is start)
    print({k: v for k, v in sorted(os.environ.items()) if k != "_"})
    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGPIPE))
    print(sorted(os.listdir("/proc/self/fd"))[:3], sys.stdin.read(), sys.stdout.write_through)
    print(os.getsid(0) == os.getpid(), threading.enumerate(), threading.main_thread().name)
    print("to stderr", file=sys.stderr)
    warnings.warn("one", ResourceWarning)
start()
"""


@pytest.mark.parametrize("how", ["script", "code", "module"])
def test_a_forked_program_has_the_environment_of_a_started_one(tmp_path, how):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "program.py"
    path.write_text(START)
    args = {
        "script": ["folder/program.py"],
        "code": ["-c", START],
        "module": ["-m", "folder.program"],
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "always",
        "OTHER": "value",
    }
    started, forked = both(
        [*args[how], "one", "--two"],
        cwd=tmp_path,
        env=environment,
        input="typed",
        start_new_session=True,
    )
    pids = [text.split("MainThread, started ")[1].split(")")[0] for _, text, _ in (started, forked)]
    assert forked[1].replace(pids[1], pids[0]) == started[1]
    assert (forked[0], forked[2]) == (started[0], started[2])
    assert started[0] == 0


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a message')",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import threading; threading.Thread(target=print, args=['ends']).start(); raise SystemExit",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, json; atexit.register(lambda: print(json.dumps([1])))",
    ],
)
@pytest.mark.parametrize("whole_end", [False, True])
def test_a_forked_program_ends_like_a_started_one(code, whole_end):
    started, forked = both(["-c", code], whole_end)
    assert forked == started


def test_objects_of_a_program_are_finalized_without_a_whole_end():
    code = "class A:\n def __del__(self): print('finalized')\na = A()"
    started, forked = both(["-c", code])
    assert forked == started
    assert started[1] == "finalized\n"


@pytest.mark.parametrize(("error", "status"), [("KeyboardInterrupt", -2), ("ValueError(1)", 1)])
def test_an_error_ends_a_program_with_a_traceback(error, status):
    (code, _, expected), (found, _, text) = both(["-c", f"raise {error}"])
    assert code == found == status
    assert [text.splitlines()[at] for at in (0, -1)] == [
        expected.splitlines()[at] for at in (0, -1)
    ]


def test_signals_reach_a_program_and_appear_in_its_status():
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        code = "print('begun', flush=True); import signal; signal.pause()"
        with programs.Popen([sys.executable, "-c", code], stdout=PIPE, stderr=DEVNULL) as process:
            assert process.stdout.readline() == b"begun\n"
            assert process.poll() is None
            process.send_signal(signum)
            assert process.wait(WAIT_S) == process.returncode == -signum
            process.send_signal(signum)  # without a reader
            assert not psutil.pid_exists(process.pid)


def test_a_program_that_exceeds_its_timeout_is_killed():
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        programs.run([sys.executable, "-c", code], timeout=0.5)
    assert not psutil.pid_exists(int(caught.value.stdout))


SPAWNING = """
import multiprocessing
VALUE = 3
def work(queue):
    queue.put((__name__, VALUE))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""


def test_multiprocessing_imports_the_program_as_its_main_module(tmp_path):
    (tmp_path / "program.py").write_text(SPAWNING)
    done = programs.run([sys.executable, "program.py"], cwd=tmp_path, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, "('__mp_main__', 3)\n")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (["-c", ""], {"env": {**os.environ, "OMP_NUM_THREADS": "7"}}),
        (["-c", ""], {"env": {**os.environ, "PYTHONHASHSEED": "7"}}),
        (["-c", ""], {"preexec_fn": print}),
    ],
)
def test_options_that_require_a_new_interpreter_are_refused(args, kwargs):
    with pytest.raises(ValueError, match="only"):
        programs.run([sys.executable, *args], **kwargs)


@pytest.fixture
def server(monkeypatch):
    """A separate server, which imports nothing."""
    bare = f"from tests.support import programs; programs.PRELOADED = (); {programs.SERVE}"
    monkeypatch.setattr(programs, "SERVE", bare)
    monkeypatch.setattr(_Server, "_one", None)
    monkeypatch.setenv(programs.SHARED, "")
    yield lambda: _Server._one._process
    _Server._one.close()


LIVING = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def gone(pid):
    """True if a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_programs_end_with_their_server_and_the_next_gets_another(server, how):
    with programs.Popen([sys.executable, "-c", LIVING], stdout=PIPE) as process:
        assert int(process.stdout.readline()) == process.pid
        first = server().pid
        if how == "closed":
            _Server._one.close()
        else:
            server().kill()
        with pytest.raises(RuntimeError, match="has ended before"):
            process.wait(WAIT_S)
        until(lambda: gone(process.pid))
    done = programs.run([sys.executable, "-c", "print(3)"])
    assert done.stdout == "3\n"
    assert server().pid != first


FORKED = [sys.executable, programs.__file__, "-u", "-c"]


def test_processes_share_a_server_and_receive_the_status_of_their_programs(server):
    programs.share()
    code = "import os, sys; print(os.getppid(), sys.stdin.read()); sys.exit(3)"
    for _ in range(2):
        done = subprocess.run(
            [*FORKED, code], input="typed", stdout=PIPE, text=True, timeout=WAIT_S, check=False
        )
        assert (done.returncode, done.stdout) == (3, f"{server().pid} typed\n")


def test_the_programs_of_a_process_end_with_it_and_the_others_continue(server):
    programs.share()
    living = [*FORKED, LIVING]
    with (
        subprocess.Popen(living, stdout=PIPE) as ends,
        subprocess.Popen(living, stdout=PIPE) as lives,
    ):
        first, second = (int(process.stdout.readline()) for process in (ends, lives))
        ends.kill()
        until(lambda: gone(first))
        assert not gone(second)
        os.kill(second, signal.SIGTERM)
        assert lives.wait(WAIT_S) == 128 + signal.SIGTERM
