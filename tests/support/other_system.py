"""Program that uses the packages without the parts of Python that another system lacks.

``python -m tests.support.other_system windows DIRECTORY``. The libraries are imported first, since
they choose their own code by system. Prints working features and refusals, one to a line.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import pkgutil
import platform
import signal
import socket
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import aiohttp  # noqa: F401
import numpy  # noqa: F401
import psutil  # noqa: F401
import torch
import tqdm  # noqa: F401
from torch._functorch import eager_transforms  # noqa: F401
from torch.utils.data import DataLoader  # noqa: F401

with suppress(ImportError):  # it has no wheel without the GIL
    import safetensors.torch  # noqa: F401

PACKAGES = ("coordinator", "runtime", "gpuworker")
SYSTEMS = {
    "windows": (
        "win32",
        ("fcntl", "resource", "pwd", "grp", "termios", "_posixshmem"),
        {
            os: (
                "O_DIRECTORY O_NOFOLLOW O_NONBLOCK RTLD_NOLOAD RTLD_LAZY sched_getaffinity "
                "sched_setaffinity fork register_at_fork killpg getuid geteuid"
            ),
            signal: "SIGKILL SIGHUP pthread_sigmask pthread_kill sigwait SIG_BLOCK",
            mmap: "MADV_HUGEPAGE madvise",
            socket: "AF_UNIX SO_PEERCRED",
        },
    ),
    "macos": (
        "darwin",
        (),
        {os: "sched_getaffinity sched_setaffinity", mmap: "MADV_HUGEPAGE"},
    ),
}


def hide(system):
    """Remove what the system lacks."""
    name_of_system, modules, names = SYSTEMS[system]
    for name in list(sys.modules):  # of a forked program
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]
    sysconfig.get_config_vars()  # by the name of the system, once
    pair, family = socket.socketpair, socket.AF_UNIX
    vars(socket)["socketpair"] = lambda *_: pair(family)  # of another family on Windows
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, attributes in names.items():
        for name in attributes.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = name_of_system
    vars(platform)["libc_ver"] = lambda: ("", "")
    if system == "windows":
        load = ctypes.CDLL

        def library(name, *arguments, **settings):
            if name is None:
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            return load(name, *arguments, **settings)

        vars(ctypes)["CDLL"] = library


def import_all():
    """Import every module of the packages, and return their number."""
    found = 0
    for package in PACKAGES:
        module = importlib.import_module(package)
        for each in pkgutil.walk_packages(module.__path__, f"{package}."):
            if not each.name.endswith(("__main__", "torchft_engine")):
                importlib.import_module(each.name)
            found += 1
    return found


def train(directory):
    """Train with the parts that need no locks of directories; return the state."""
    import gpuworker
    from runtime.checkpoint.tensor_file import load_file

    net = torch.nn.Linear(4, 2)
    x = torch.randn(64, 4)
    for policy in ("sync", "cadence"):
        state = gpuworker.fit(
            net,
            (x, x[:, :2].argmax(1)),
            loss=torch.nn.functional.cross_entropy,
            optimizer=torch.optim.AdamW,
            batch_size=8,
            policy=policy,
            devices=["cpu", "cpu"],
            callbacks=gpuworker.KeepBest(directory / "best.safetensors"),
            timeline=gpuworker.Timeline(),
            progress=False,
        )
    state.save(directory / "weights.safetensors")
    state.save(directory / "weights.safetensors")  # replaces the file
    net.load_state_dict(load_file(directory / "weights.safetensors"))
    with gpuworker.Trainer.setup(net, torch.optim.AdamW, ["cpu", "cpu"]) as model:
        model(x).sum().backward()
        model.step()
    with gpuworker.Monitor(port=0):
        pass
    return net, x


def refusals(net, x, directory):
    """Messages of the refused features."""
    import gpuworker
    from runtime.__main__ import main

    builder = gpuworker.Trainer.builder(net, torch.optim.AdamW, lambda m, b: m(b[0]).sum())
    builder.dataset((x,)).batch_size(8).num_epochs(100_000).devices("cpu").progress(False)

    def save():
        with builder.run() as handle:
            handle.save(directory / "save")

    tries = {
        "save": save,
        "checkpoint_dir": lambda: builder.checkpoint_dir(directory / "run").run(),
        "status": lambda: main(["status"]),
        "stop": lambda: main(["stop", "1"]),
        "lighthouse": lambda: main(["lighthouse", "--host", "127.0.0.1", "--port", "0"]),
    }
    for name, do in tries.items():
        try:
            do()
        except BaseException as error:
            yield f"{name}: {type(error).__name__}: {error}"
        else:
            yield f"{name}: works"


def run(system, directory):
    """Print the working features and the refusals."""
    hide(system)
    sys.stdout.write(f"imported {import_all()} modules\n")
    net, x = train(directory)
    sys.stdout.write("trained\n")
    if system == "windows":
        for line in refusals(net, x, directory):
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
