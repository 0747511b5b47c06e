"""Runs listed and stopped from another process of the same user."""

import json
import os
import socket
import stat
import sys
import tempfile
import threading
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from runtime.__main__ import main
from runtime.monitor import control
from runtime.monitor.control import (
    CONTROL,
    control_directories,
    find_runs,
    require_private,
    stop_runs,
)
from tests.support import programs
from tests.support.running import SYNC, THREAD, WAIT_S, Gate, Trace, builder

ROOT = Path(__file__).parents[2]
FOREVER = 100_000


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path_factory):
    """A user's runtime directory; short, as a socket's path is bounded."""
    tmp_path_factory.getbasetemp()  # not within it
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        monkeypatch.setenv("TMPDIR", base)
        monkeypatch.setattr(tempfile, "tempdir", base)
        yield Path(base) / "gpuworker"


def control_threads():
    return [t for t in threading.enumerate() if t.name == "run-control"]


def mine():
    (process,) = [each for each in find_runs() if each.pid == os.getpid()]
    return process


def test_a_run_is_listed_with_its_progress(directory, tmp_path):
    trace = Trace()
    b = builder(train=trace, dataset=FOREVER, epochs=7, way=(SYNC, THREAD))
    handle = b.checkpoint_dir(tmp_path, every_steps=10).run()
    trace.wait_for(lambda: trace.steps[0] > 100)
    (run,) = mine().runs
    handle.stop()
    handle.join(WAIT_S)
    assert (run["epoch"], run["num_epochs"], run["policy"]) == (0, 7, "SYNC")
    assert 0 < run["step"] <= run["total_steps"] == 7 * FOREVER // 2
    assert run["samples_per_s"] > 0
    assert run["loss"] < 0
    assert run["devices"] == ["cpu", "cpu"]
    assert run["checkpoint_dir"] == str(tmp_path)
    assert run["last_checkpoint"] is None or run["last_checkpoint"].startswith(str(tmp_path))
    assert find_runs() == []
    assert control_threads() == []
    assert list(directory.iterdir()) == []


def test_speed_and_loss_are_those_of_the_last_seconds(monkeypatch):
    gate = Gate()
    handle = builder(train=gate, dataset=FOREVER).run()
    gate.await_entry()
    paused = []
    listed = CONTROL._runs[0]
    first = listed.read(paused.append)
    second = listed.read(paused.append)
    assert paused == [control.SAMPLE_S]  # once: asked again within the window
    assert first["loss"] is second["loss"] is None  # no step was made
    gate.opened.set()
    handle.stop()
    handle.join(WAIT_S)


def test_only_the_user_may_reach_the_socket(directory):
    gate = Gate()
    handle = builder(train=gate).run()
    (path,) = directory.iterdir()
    assert path.name == f"{os.getpid()}.sock"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    gate.opened.set()
    handle.join(WAIT_S)


def test_a_request_of_another_user_is_not_answered(monkeypatch):
    gate = Gate()
    handle = builder(train=gate).run()
    monkeypatch.setattr(control, "peer_of", lambda connection: (1, os.getuid() + 1))
    with pytest.raises(LookupError):
        stop_runs(os.getpid())
    monkeypatch.undo()
    gate.opened.set()
    assert not handle.join(WAIT_S).stopped


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]\n", b"\xff\n", b"x" * 1000, b"[" * 200 + b"]" * 55 + b"\n"]
)
def test_malformed_requests_do_not_end_the_server(directory, content):
    gate = Gate()
    handle = builder(train=gate).run()
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(directory / f"{os.getpid()}.sock"))
        other.sendall(content)
    assert len(mine().runs) == 1
    gate.opened.set()
    handle.join(WAIT_S)


def test_all_runs_of_a_process_share_one_thread():
    gates = Gate(), Gate()
    handles = [builder(train=gate).run() for gate in gates]
    assert len(mine().runs) == 2
    assert len(control_threads()) == 1
    for gate, handle in zip(gates, handles, strict=True):
        gate.opened.set()
        handle.join(WAIT_S)
    assert control_threads() == []


def test_stop_ends_the_run_at_a_step_boundary_and_saves(tmp_path):
    trace = Trace()
    handle = builder(train=trace, dataset=FOREVER).checkpoint_dir(tmp_path).run()
    trace.wait_for(lambda: trace.steps[0] > 3)
    (run,) = stop_runs(os.getpid())
    state = handle.join(WAIT_S)
    assert run["checkpoint_dir"] == str(tmp_path)
    assert (state.stopped, state.reason) == (True, "stopped")
    assert any(path.name.startswith("step-") for path in tmp_path.iterdir())


def test_a_run_that_does_not_start_is_not_listed():
    def refuse(device):
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError):
        builder(model=refuse).run().join(WAIT_S)
    assert control_threads() == []


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_directory_that_others_may_enter_is_not_used(directory, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(PermissionError, match="no private directory"):
        require_private(directory)


def test_a_link_in_place_of_the_directory_is_not_followed(directory, tmp_path):
    tmp_path.chmod(0o700)
    directory.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        require_private(directory, create=True)


def test_without_a_usable_directory_a_run_is_not_listed(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(control, "control_directories", lambda: [file, tmp_path / "a" / "b"])
    gate = Gate()
    handle = builder(train=gate).run()
    assert control_threads() == []
    assert find_runs() == []
    gate.opened.set()
    handle.join(WAIT_S)


def test_without_a_runtime_directory_that_for_temporary_files_is_used(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    (only,) = control_directories()
    assert only == Path(tempfile.gettempdir()) / f"gpuworker-{os.getuid()}"


def test_sockets_of_processes_that_have_ended_are_removed(directory):
    require_private(directory, create=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "4194305.sock"))
    assert find_runs() == []
    assert list(directory.iterdir()) == []


def test_the_next_run_removes_sockets_of_processes_that_were_killed(directory):
    require_private(directory, create=True)
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as live:
        dead.bind(str(directory / "4194305.sock"))
        live.bind(str(directory / "77.sock"))
        live.listen()
        (directory / "notes.sock").touch()
        builder().run().join(WAIT_S)
        assert sorted(path.name for path in directory.iterdir()) == ["77.sock", "notes.sock"]


@pytest.mark.parametrize("reply", [b"[" * 100_000 + b"\n", b"[]\n", b"7\n", b"{\n"])
def test_a_process_with_a_malformed_reply_is_not_listed(directory, reply):
    require_private(directory, create=True)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(directory / "77.sock"))
        other.listen()

        def answer():
            with other.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        assert find_runs() == []
        thread.join(WAIT_S)


def test_a_process_that_does_not_answer_is_listed_as_such(directory, monkeypatch, capsys):
    monkeypatch.setattr(control, "TIMEOUT_S", 0.05)
    require_private(directory, create=True)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(directory / "77.sock"))
        hung.listen()
        (process,) = find_runs()
        main(["status"])
        with pytest.raises(SystemExit, match="process 77 does not answer"):
            main(["stop", "77"])
    assert (process.pid, process.responds, process.runs) == (77, False, [])
    assert "77" in capsys.readouterr().out


def test_a_forked_child_leaves_the_socket_to_its_parent(directory):
    gate = Gate()
    handle = builder(train=gate).run()
    (path,) = directory.iterdir()
    child = os.fork()
    if not child:
        os._exit(CONTROL._endpoint is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    assert len(mine().runs) == 1
    gate.opened.set()
    handle.join(WAIT_S)


SCRIPT = """
import os, sys
from tests.support import programs
from tests.support.running import Trace, builder
trace = Trace()
handle = builder(train=trace, dataset=10**7, ranks=1).checkpoint_dir(sys.argv[1]).run()
trace.wait_for(lambda: trace.steps[0] > 3)
print("begun", flush=True)
print(handle.join().reason)
"""


def test_the_commands_reach_a_run_of_another_process(tmp_path, capsys):
    script = tmp_path / "train_me.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    saved = tmp_path / "saved"
    command = [sys.executable, str(script), str(saved)]
    with programs.Popen(command, cwd=ROOT, env=environment, stdout=PIPE, stderr=DEVNULL) as process:
        assert process.stdout.readline() == b"begun\n"
        main(["status"])
        table = capsys.readouterr().out.splitlines()
        main(["status", "--json"])
        (record,) = json.loads(capsys.readouterr().out)
        main(["stop", str(process.pid)])
        output = capsys.readouterr().out
        out, _ = process.communicate(timeout=WAIT_S)
    assert table[0].split() == [
        "PID",
        "NAME",
        "EPOCH",
        "DONE",
        "SAMPLES/S",
        "LOSS",
        "LAST",
        "CHECKPOINT",
    ]
    assert table[1].split()[:3] == [str(process.pid), "train_me.py", "1/1"]
    assert table[1].endswith("none yet")
    assert (record["pid"], record["responds"]) == (process.pid, True)
    assert f"stops at its next step boundary and writes a checkpoint to {saved}" in output
    assert out == b"stopped\n"
    main(["status"])
    assert capsys.readouterr().out == "no active run of this user on this machine\n"
    with pytest.raises(SystemExit, match=f"process {process.pid} has no active run"):
        main(["stop", str(process.pid)])


def test_the_installed_command_lists_no_run():
    found = programs.run([sys.executable, "-m", "gpuworker", "status"], check=True)
    assert found.stdout == "no active run of this user on this machine\n"
