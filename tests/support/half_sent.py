"""A process that keeps many half-sent requests open at a server: ``half_sent.py PORT COUNT``.

Prints ``open`` once no more connect, and ends with its standard input.
"""

from __future__ import annotations

import errno
import resource
import select
import socket
import sys
import threading
import time

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Never: "
QUIET_S = 0.5


def opened(port):
    """A socket with a pending connection, or ``None``."""
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    return None


def keep_open(port, count):
    """Hold ``count`` requests open; those that the server closes are replaced."""
    poll, sockets = select.poll(), {}
    printed, num_sent, changed = False, 0, time.monotonic()
    while True:
        while len(sockets) < count and (sock := opened(port)) is not None:
            sockets[sock.fileno()] = sock
            poll.register(sock, select.POLLOUT)
        for fd, event in poll.poll(50):
            if not event & (select.POLLHUP | select.POLLERR | select.POLLIN):
                try:
                    sockets[fd].sendall(HALF)
                    poll.modify(fd, select.POLLIN)
                    num_sent, changed = num_sent + 1, time.monotonic()
                    continue
                except OSError:
                    pass
            poll.unregister(fd)
            sockets.pop(fd).close()
        if not printed and num_sent and time.monotonic() - changed > QUIET_S:
            printed = True
            print("open", num_sent, flush=True)


if __name__ == "__main__":
    wanted = int(sys.argv[2])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, wanted + 200), hard))
    threading.Thread(target=keep_open, args=(int(sys.argv[1]), wanted), daemon=True).start()
    sys.stdin.read()
