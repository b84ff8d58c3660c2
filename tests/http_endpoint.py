"""An HTTP server on this machine with answers that were prepared."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint(ThreadingHTTPServer):
    """Gives these answers to POST requests, in order: a status, and text or what is sent as JSON.

    Attributes:
        asked: The JSON of each request.
        paths: Where they were sent to.
        keys: What they had in their header ``Authorization``.
    """

    def __init__(self, *answers: tuple[int, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers["Authorization"])
        status, answer = self.server.answers.pop(0)
        body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After-Ms", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
