"""A server that speaks OpenEnv's messages over `/ws`, and says what an action is at `/schema`."""

from __future__ import annotations

import json
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

SCHEMA = {
    "title": "EchoAction",
    "type": "object",
    "additionalProperties": False,
    "properties": {"metadata": {"type": "object"}, "text": {"type": "string"}},
    "required": ["text"],
}


class EchoServer:
    """Echoes in capitals; `boom` fails, `bye` ends the episode, `drop` ends the connection, `mute`
    is never answered, and `odd` has a reward that is no number.
    """

    def __init__(self, room: int = 2, schema: dict[str, Any] = SCHEMA) -> None:
        self.room, self.schema = room, schema
        self.open = self.refused = 0
        self.messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.is_ending = threading.Event()

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": self.schema, "observation": {}, "state": {}}).encode()
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        return Response(HTTPStatus.OK, "OK", headers, body)

    def serve(self, socket: ServerConnection) -> None:
        with self._lock:
            is_full = self.open >= self.room
            self.open += not is_full
            self.refused += is_full
        if is_full:
            socket.send(_error("CAPACITY_REACHED", "Server at capacity"))
            return
        try:
            for text in socket:
                message = json.loads(text)
                self.messages.append(message)
                if message["data"].get("text") == "drop":
                    return
                if message["data"].get("text") == "mute":
                    self.is_ending.wait()
                    return
                socket.send(self._answer(message))
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                self.open -= 1

    def _answer(self, message: dict[str, Any]) -> str:
        data = message["data"]
        if message["type"] == "reset":
            if "fault" in data:
                return _error("EXECUTION_ERROR", data["fault"])
            return _observation(f"hello {data.get('task', '')}", None)
        if set(data) != {"text"}:
            return _error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["text"]}])
        if data["text"] == "boom":
            return _error("EXECUTION_ERROR", "boom")
        if data["text"] == "odd":
            return _observation("ODD", "0.5", True)
        return _observation(data["text"].upper(), len(data["text"]) / 10, data["text"] == "bye")


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


def _observation(text: str, reward: object, done: bool = False) -> str:
    data = {"observation": {"text": text}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


@contextmanager
def serving(echo: EchoServer) -> Iterator[str]:
    """The URL of the server, while it serves in threads."""
    server: Server = serve(echo.serve, "127.0.0.1", 0, process_request=echo.answer_http)
    thread = threading.Thread(target=server.serve_forever)
    # It leaves its selector to the collector: none that is a file, which a test would leak.
    plain = SimpleNamespace(**vars(selectors) | {"DefaultSelector": selectors.SelectSelector})
    with patch("websockets.sync.server.selectors", plain):
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            echo.is_ending.set()
            server.shutdown()
            thread.join()
