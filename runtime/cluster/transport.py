"""Healing: the state of one machine for another, as safetensors and JSON over HTTP."""

from __future__ import annotations

import hmac
import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load, save

from runtime.cluster.engine import EngineError, PeerRefused, State

META = "meta"


class StateServer:
    """Hands the offered state to machines that know the token, while it is on offer."""

    def __init__(self, host: str, token: str | None, timeout_s: float) -> None:
        self._token = token
        self._offered: tuple[int, bytes] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = timeout_s

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.address = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="cluster-states", daemon=True
        )
        self._thread.start()

    def offer(self, step: int, state: State) -> None:
        """Hand out this state to whoever asks for this step."""
        tensors = {name: t.contiguous() for name, t in state.tensors.items()}
        self._offered = step, save(tensors, {META: json.dumps(state.meta)})

    def withdraw(self) -> None:
        """Hand out nothing."""
        self._offered = None

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        given = request.headers.get("Authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            request.send_error(401)
            return
        offered = self._offered
        if offered is None or request.path != f"/state/{offered[0]}":
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(offered[1])))
        request.end_headers()
        request.wfile.write(offered[1])


def fetch_state(address: str, step: int, token: str | None, timeout_s: float) -> State:
    """The state of another machine.

    Raises:
        EngineError: It does not answer, or has none.
    """
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for _ in range(50):
            connection.request("GET", f"/state/{step}", headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 404:
                break
            threading.Event().wait(0.05)
        if answer.status == 401:
            raise PeerRefused((address,), "it refuses this machine's token")
        if answer.status != 200:
            raise EngineError(f"{address} answers {answer.status}")
        length = int.from_bytes(content[:8], "little")
        meta = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][META])
        return State(tensors=load(content), meta=meta)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise EngineError(f"{address} sent no state: {error}") from error
    finally:
        connection.close()
