"""Machines in separate network namespaces, whose links can be cut.

``python -m tests.support.namespaces PID MODULE ...`` runs a module in the namespace of a process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys

SUBNET = "10.77.29"
CLONE_NEWNET = 0x40000000


class Namespaces:
    """A namespace with a bridge, and others connected to it.

    Raises:
        OSError: No namespace can be created; names the failed command and its error.
    """

    def __init__(self):
        self._processes = []
        try:
            self.hub = self._namespace()
            self._ip(self.hub, "link add hub type bridge")
            self._ip(self.hub, "link set hub up")
            self._ip(self.hub, "link set lo up")
        except BaseException:
            self.close()
            raise

    def join(self, number):
        """A namespace with the address ``10.77.29.number``; returns the process that keeps it."""
        pid = self._namespace()
        self._ip(self.hub, f"link add to{number} type veth peer name eth0 netns {pid}")
        self._ip(self.hub, f"link set to{number} master hub up")
        self._ip(pid, f"address add {SUBNET}.{number}/24 dev eth0")
        self._ip(pid, "link set lo up")
        self._ip(pid, "link set eth0 up")
        return pid

    def cut(self, number):
        """Drop all traffic to and from this namespace."""
        self._ip(self.hub, f"link set to{number} down")

    def mend(self, number):
        """Undo :meth:`cut`."""
        self._ip(self.hub, f"link set to{number} up")

    def close(self):
        """End the processes, and with them the namespaces."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _namespace(self):
        command = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError as error:
            raise OSError(f"{' '.join(command)}: {error}") from error
        self._processes.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(f"{' '.join(command)}: {process.communicate()[1].strip()}")
        return process.pid

    def _ip(self, pid, what):
        command = ["nsenter", "--net", f"--target={pid}", "ip", *what.split()]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise OSError(f"{' '.join(command)}: {found.stderr.strip()}")


def main():
    """Enter a namespace before any thread starts, and run a module in it."""
    _, pid, module, *args = sys.argv
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns() into the namespace of {pid}")
    os.close(namespace)
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
