"""Claims of SECURITY.md that no other test makes: the ports that a process opens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime import Monitor
from tests.support.running import GLOO, SYNC, THREAD, WAIT_S, builder, count_up

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="lists ports of Linux")
LISTENING = "0A"
LOOPBACK = "0100007F"


def listening():
    """``address:port`` of this process's listening sockets, in hexadecimal."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # of the listing itself
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in own:
                found.add(local)
    return found


def opened_by(way):
    before, found = listening(), set()

    def train(model, batch):
        found.update(listening() - before)
        return count_up(model, batch)

    builder(train=train, way=way).run().join(WAIT_S)
    return found


def test_a_run_opens_no_port():
    assert opened_by((SYNC, THREAD)) == set()


def test_gloo_between_workers_listens_on_loopback_only():
    found = opened_by((SYNC, GLOO))
    assert found
    assert {address.partition(":")[0] for address in found} == {LOOPBACK}


def test_the_live_page_listens_on_loopback_only():
    pytest.importorskip("aiohttp")
    before = listening()
    with Monitor() as monitor:
        assert listening() - before == {f"{LOOPBACK}:{monitor.port:04X}"}
