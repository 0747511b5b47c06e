"""Programs in separate processes, forked to save the import of PyTorch.

``run`` and ``Popen`` accept the arguments of ``subprocess``, as far as named below. The
first call starts a server, one for this process, which imports PyTorch and the runtime and then
forks a child for each program. The child runs it as the main program of its interpreter, with
its own arguments, environment, directory, files and process group, and ends as every
interpreter does, except as said at ``whole_end``.

The server of a process that has called ``share`` also serves the processes that it starts;
``python programs.py -u -c CODE`` is such a program.

Settings that an interpreter or PyTorch reads at start are those of the server. For tests of
these, use ``subprocess``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import multiprocessing.process
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing import forkserver, util
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 90.0
"""Time limit of the start of a program, including the server's for the first."""
WAIT_S = 110.0
"""Default limit of a wait for a program."""
MAX_MESSAGE = 1 << 20
PRELOADED = (
    "torch",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed",
    "torch.utils.data",
    "runtime",
    "tests.support.running",
)
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_")
"""Prefixes of variables that are read while an interpreter or PyTorch starts."""
SHARED = "TESTS_PROGRAMS"
"""Variable with the path of a shared server's socket."""
UNDERSTOOD = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS")
"""Those of them that also apply to a forked program."""
ENDING = ("__main__", "sys", "builtins", "runtime", "coordinator", "gpuworker", "tests")
"""Packages and modules that are cleared at the end of a program's interpreter."""
PR_SET_PDEATHSIG = 1

MODULE = "tests.support.programs"
# Leaves no name behind in the main module.
SERVE = f"exec(__import__({MODULE!r}, fromlist=['serve']).serve({{fd}}))"


_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Popen(subprocess.Popen):
    """``subprocess.Popen`` of ``[sys.executable, SCRIPT | -c CODE | -m MODULE, ...]``, forked.

    In front there may be ``-W ACTION``, which holds from the first line of the program.
    Accepts ``stdin``, ``stdout``, ``stderr``, ``text``, ``cwd``, ``env`` and
    ``start_new_session``.

    Args:
        args: The command line.
        whole_end: Clear the modules of libraries at the end, and call the destructors of their
            static objects, as an interpreter does. It takes 0.4 s for PyTorch.
        kwargs: As of ``subprocess.Popen``.
    """

    def __init__(self, args: Any, *, whole_end: bool = False, **kwargs: Any) -> None:
        self._whole_end = whole_end
        super().__init__(args, **kwargs)

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(_execute_child).bind(self, *args).arguments
        if given["preexec_fn"] or given["pass_fds"] or given["args"][0] != sys.executable:
            raise ValueError(f"only subprocess can start {given['args']} in this way")
        env = given["env"]
        request = {
            "args": [os.fspath(arg) for arg in given["args"][1:]],
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": given["start_new_session"],
            "whole_end": self._whole_end,
        }
        fds = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        fds = [own if fd == -1 else fd for own, fd in enumerate(fds)]
        self._channel, self.pid, self._pidfd = _Server.get().fork(request, fds)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]

    def _ended(self, timeout_s: float) -> bool:
        """Wait for the server's exit message and store the status; False on timeout."""
        if self.returncode is None:
            ready, _, _ = select.select([self._channel], [], [], max(0.0, timeout_s))
            if not ready:
                return False
            status = self._channel.recv(MAX_MESSAGE)
            self._channel.close()
            os.close(self._pidfd)
            self.returncode = int(status) if status else -signal.SIGKILL
            if not status:
                raise RuntimeError(f"the server of programs has ended before {self.args!r}")
        return True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        self._ended(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self._ended(WAIT_S if timeout is None else timeout):
            raise subprocess.TimeoutExpired(self.args, WAIT_S if timeout is None else timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)


def run(
    args: list[Any],
    *,
    check: bool = False,
    timeout: float = WAIT_S,
    input: Any = None,
    **kwargs: Any,
) -> subprocess.CompletedProcess:
    """``subprocess.run`` of a forked program in this tree, whose output is captured as text."""
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | kwargs
    kwargs.setdefault("cwd", ROOT)
    if input is not None:
        kwargs["stdin"] = subprocess.PIPE
    with Popen(args, **kwargs) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    assert not check or process.returncode == 0, f"status {process.returncode}: {stderr}"
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def fork_from(monkeypatch: Any, module: ModuleType) -> None:
    """Fork the programs that ``module`` starts by ``subprocess.Popen``.

    The number of OpenMP's threads is read at start and stays that of this process.
    """

    def popen(args: list[Any], env: dict[str, str], **kwargs: Any) -> Popen:
        given = {name: value for name, value in env.items() if not name.startswith("OMP_")}
        given |= {name: value for name, value in os.environ.items() if name.startswith("OMP_")}
        return Popen(args, env=given, **kwargs)

    own = SimpleNamespace(
        PIPE=subprocess.PIPE, Popen=popen, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(module, "subprocess", own)


def preload(*modules: str) -> None:
    """Import more modules in the server, once for all later programs."""
    server = _Server.get()
    for module in modules:
        server.preload(module)


def share() -> None:
    """Start the server, for the processes that this one starts as well. Idempotent."""
    if not os.environ.get(SHARED):
        os.environ[SHARED] = _Server.get().listen()


class _Server:
    """Client of the forking process."""

    _one: _Server | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._preloaded = set(PRELOADED)
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = {k: v for k, v in os.environ.items() if k not in UNDERSTOOD}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if path := os.environ.pop(SHARED, None):
            self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.connect(path)
        else:
            self._start()
        self._control.settimeout(START_S)
        atexit.register(self.close)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE.format(fd=theirs.fileno())],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @classmethod
    def get(cls) -> _Server:
        """The server of this process, started if necessary."""
        with cls._lock:
            if cls._one is None or not cls._one._is_alive():
                if cls._one is not None:
                    cls._one.close()
                cls._one = cls()
            return cls._one

    def _is_alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return not select.select([self._control], [], [], 0.0)[0]  # only its end can be read

    def listen(self) -> str:
        """Let the server accept other clients; returns the path of its socket."""
        self._directory = tempfile.TemporaryDirectory(prefix="programs-")
        path = os.path.join(self._directory.name, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            socket.send_fds(self._control, [pickle.dumps(None)], [listener.fileno()])
        return path

    def preload(self, module: str) -> None:
        """Request the import of a module before the next request."""
        if module not in self._preloaded:
            self._control.send(pickle.dumps(module))
            self._preloaded.add(module)

    def fork(self, request: dict[str, Any], fds: list[int]) -> tuple[socket.socket, int, int]:
        """Start a program; returns the channel of its exit status, its pid and a pidfd."""
        self._refuse_what_is_read_at_start(request["env"])
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                message = [pickle.dumps(request)]
                socket.send_fds(self._control, message, [*fds, theirs.fileno()])
            channel.settimeout(START_S)
            pid, [pidfd], _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1)
        except BaseException as error:
            channel.close()
            self.close()
            raise RuntimeError(f"the server of programs did not start {request['args']}") from error
        return channel, int(pid), pidfd

    def _refuse_what_is_read_at_start(self, env: dict[str, str]) -> None:
        differ = sorted(
            name
            for name in env.keys() | self.environment.keys()
            if name.startswith(READ_AT_START)
            and name not in UNDERSTOOD
            and env.get(name) != self.environment.get(name)
        )
        if differ:
            raise ValueError(f"only a real start reads {', '.join(differ)}: use subprocess")

    def close(self) -> None:
        """End the server, if it is not another's, and all programs forked for this process."""
        atexit.unregister(self.close)
        self._control.close()
        if self._directory is not None:
            self._directory.cleanup()
        if self._process is None:
            return
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)


# --- in the server, and in what it forks ------------------------------------------


def fork_the_fork_server() -> None:
    """Start the fork server of ``multiprocessing`` as a fork of this program.

    It has imported what this program has. Requires a program with a single thread.
    """
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _spawnv_passfds  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _spawnv_passfds(path: Any, args: Sequence[Any], fds: Sequence[int]) -> int:
    """``multiprocessing.util.spawnv_passfds`` of ``[..., "-c", CODE]`` as a fork."""
    pid = os.fork()
    if not pid:
        try:
            bounds = sorted({2, *fds, os.sysconf("SC_OPEN_MAX")})
            for below, above in pairwise(bounds):
                os.closerange(below + 1, above)
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(args[-1], main.__dict__)
        finally:
            os._exit(0)
    return pid


def serve(control_fd: int) -> CodeType:
    """Fork for each request. Returns only in the children, with the program to run.

    Kills what it has forked for a client once the other end of its socket is closed, and ends
    with the first client.
    """
    # Pending until a program is ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control = socket.socket(fileno=control_fd)
    atexit.register(_leave_libraries_alone)  # called last
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    listeners: dict[int, socket.socket] = {}
    clients = {control_fd: control}
    children: dict[int, tuple[int, socket.socket, int]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd in listeners:
                client, _ = listeners[fd].accept()
                clients[client.fileno()] = client
                poll.register(client, select.POLLIN)
                continue
            if fd in children:
                pid, channel, _ = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with channel, suppress(OSError):
                    channel.send(str(status).encode())
                continue
            message, fds = b"", list[int]()
            with suppress(ConnectionError):
                message, fds, _, _ = socket.recv_fds(clients[fd], MAX_MESSAGE, 4)
            if not message:
                for pidfd, (_, _, owner) in children.items():
                    if owner == fd or fd == control_fd:
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if fd == control_fd:
                    os._exit(0)
                poll.unregister(fd)
                clients.pop(fd).close()
                continue
            request = pickle.loads(message)
            if request is None:
                listeners[fds[0]] = socket.socket(fileno=fds[0])
                poll.register(fds[0], select.POLLIN)
                continue
            if isinstance(request, str):
                importlib.import_module(request)
                continue
            server, pid = os.getpid(), os.fork()
            if not pid:
                channels = (channel for _, channel, _ in children.values())
                for at in (*clients.values(), *listeners.values(), *channels):
                    at.detach()
                return _become(request, fds, server)
            for unused in fds[:3]:
                os.close(unused)
            pidfd, channel = os.pidfd_open(pid), socket.socket(fileno=fds[3])
            children[pidfd] = pid, channel, fd
            poll.register(pidfd, select.POLLIN)
            with suppress(OSError):
                socket.send_fds(channel, [str(pid).encode()], [pidfd])


def _leave_libraries_alone() -> None:
    """Exclude the modules of the server's libraries from the end of the interpreter."""
    kept = [sys.modules.pop(name) for name in _libraries if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_libraries: list[str] = []
"""Names of the modules of libraries at the fork."""


def _become(request: dict[str, Any], fds: list[int], server: int) -> CodeType:
    """Set this process up as requested; returns the code to run."""
    os.setsid() if request["start_new_session"] else os.setpgid(0, 0)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not request["whole_end"]:
        _libraries[:] = [name for name in sys.modules if name.partition(".")[0] not in ENDING]
        libc.on_exit(libc._exit, None)
    if os.getppid() != server:
        os._exit(1)
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    env = request["env"]
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # that of the environment
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        _open_again(fd, name, bool(env.get("PYTHONUNBUFFERED")))
    options, args = env.get("PYTHONWARNINGS", "").split(","), request["args"]
    while args[0] == "-W":
        options, args = [*options, args[1]], args[2:]
    options = [option for option in options if option]
    sys.warnoptions += options
    warnings._processoptions(options)  # type: ignore[attr-defined]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"].__dict__
    first, code = _program(args, main)
    paths = [os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [first, *paths, *sys.path[1:]]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return code


def _program(args: list[str], main: dict[str, Any]) -> tuple[str, CodeType]:
    """The first entry of ``sys.path`` and the code of a command line; sets ``sys.argv``."""
    how, *rest = args
    if how == "-c":
        sys.argv = [how, *rest[1:]]
        return "", compile(rest[0], "<string>", "exec")
    if how == "-m":
        sys.argv = [how, *rest[1:]]
        module = f"__import__('runpy')._run_module_as_main({rest[0]!r})"
        return os.getcwd(), compile(module, "<string>", "exec")
    if how.startswith("-"):
        raise ValueError(f"a forked program knows no option {how}")
    sys.argv = args
    main["__file__"] = path = os.path.abspath(how)
    return os.path.dirname(os.path.realpath(path)), compile(Path(path).read_bytes(), path, "exec")


def _open_again(fd: int, name: str, unbuffered: bool) -> None:
    """Open one of the three standard streams as an interpreter does while it starts."""
    old, writes = getattr(sys, name), fd > 0
    unbuffered = unbuffered and writes
    buffer = open(fd, "wb" if writes else "rb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    new = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=name == "stderr" or os.isatty(fd),
        write_through=unbuffered,
    )
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def main() -> int:
    """Run ``-u -c CODE`` forked, with a fork server of its own; returns its exit status."""
    _, how, code = sys.argv[1:]
    code = f"from {MODULE} import fork_the_fork_server as fork; fork(); del fork\n{code}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program's, which ends this one
    status = Popen([sys.executable, how, code]).wait(1e6)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
