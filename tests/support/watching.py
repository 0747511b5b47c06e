"""Requests over real sockets and the event stream, for tests of the monitor."""

from __future__ import annotations

import http.client
import json
from contextlib import contextmanager

from tests.support.running import WAIT_S


def request(monitor, path="/", method="GET", headers=None, host="localhost"):
    """Status, headers and body of a request; ``host`` is the header, ``None`` sends none."""
    connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=WAIT_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name in [host] if isinstance(host, str) else host or []:
            connection.putheader("Host", name)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


class Stream:
    """An open page and the messages it received."""

    def __init__(self, answer):
        self._answer = answer
        self.raw = []
        self.whole = None

    def next(self):
        """Kind and content of the next message; ``None`` at the end of the stream."""
        kind = None
        while line := self._answer.readline():
            self.raw.append(line)
            name, _, value = line.decode("ascii").rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                return kind, json.loads(value)
        return None

    def until(self, ready):
        """All messages so far, merged, once ``ready`` is true for them."""
        while (message := self.next()) is not None:
            kind, content = message
            if kind == "history":
                self.whole = content
            elif kind == "news":
                assert self.whole is not None
                for name in ("ticks", "epochs", "events"):
                    self.whole[name] += content[name]
                self.whole["now"] = content["now"]
            if self.whole is not None and ready(self.whole):
                return self.whole
        raise AssertionError("the stream ended first")


@contextmanager
def open_page(monitor):
    """The event stream of a page that reads everything."""
    connection = http.client.HTTPConnection("127.0.0.1", monitor.port, timeout=WAIT_S)
    try:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        yield Stream(answer)
    finally:
        connection.close()


def over(whole):
    """True if the run on the page has ended."""
    return whole["now"] is not None and whole["now"]["state"] != "running"


def history_of(monitor):
    """The first message of a page."""
    with open_page(monitor) as stream:
        kind, content = stream.next()
        assert kind == "history"
        return content
