"""Sessions of the gateway that answer from a script, for tests of its HTTP side."""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import asynccontextmanager, closing
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import anyio

from rollout.config import GatewayConfig
from rollout.gateway.asgi import ExchangeLimits
from rollout.gateway.calls import (
    Answer,
    Completion,
    GatewayCall,
    GatewayError,
)
from rollout.gateway.hosting import prepare
from rollout.gateway.runtime_loop import open_runtime_loop
from rollout.gateway.server import Service, not_found, routes
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH, KEY = "path-one", "key-one"


def answer(number: int = 0, text: str = "Four.", **fields: Any) -> Answer:
    """What a model might say."""
    said: dict[str, Any] = {
        "id": f"answer-{number}",
        "text": text,
        "reasoning": None,
        "calls": (),
        "finish": "stop",
        "ids": array("i", [7, 8, 9]),
        "log_probs": array("f", [-0.5, -0.25, -1.0]),
        "weight_versions": (3, 3, 3),
    }
    return Answer(**(said | fields))


class FakeSession:
    """One trajectory.

    Attributes:
        script: What it answers next: answers, or an error; "Four." at its end.
        calls: What was asked.
        sampled: How many answers were sampled, and not replayed.
        delivered_ids, left_ids: What the server says became of them.
        hold: Where set, answers wait until it is.
        cancelled: Generations that were cancelled.
        pause_s: How long an answer takes.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key
        self.script: deque[Answer | Exception] = deque()
        self.calls: list[GatewayCall] = []
        self.sampled = 0
        self.delivered_ids: list[str] = []
        self.left_ids: list[str] = []
        self.hold: anyio.Event | None = None
        self.cancelled = 0
        self.pause_s = 0.0
        self.tokens = 11
        self.activity = "trajectory"
        self.failures: list[Exception] = []
        self._stored: dict[bytes, Completion] = {}
        self._cut: dict[bytes, Completion] = {}

    async def complete(self, call: GatewayCall) -> Completion:
        self.calls.append(call)
        await self._know_fate(call.digest)
        stored = self._stored.pop(call.digest, None)
        if stored is not None and stored.id in self.left_ids:
            self._stored[call.digest] = stored
            return stored
        try:
            if self.hold is not None:
                await self.hold.wait()
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        completion = self._cut.pop(call.digest, None) or self._sample(call)
        try:
            await anyio.sleep(self.pause_s)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            self._cut[call.digest] = completion
            raise
        self._stored[call.digest] = completion
        return completion

    def _sample(self, call: GatewayCall) -> Completion:
        answers = tuple(self._next() for _ in range(call.n))
        return Completion(
            id=f"completion-{self.sampled}",
            answers=answers,
            prompt_ids=array("i", [1, 2, 3, 4]),
            cached_tokens=2,
        )

    async def _know_fate(self, digest: bytes) -> None:
        """Of an equal call whose answer is on its way, as the gateway waits for that."""
        with anyio.move_on_after(1.0):
            while (
                (stored := self._stored.get(digest)) is not None
                and stored.id not in self.left_ids
                and stored.id not in self.delivered_ids
            ):
                await anyio.sleep(0.001)

    def _next(self) -> Answer:
        self.sampled += 1
        said = self.script.popleft() if self.script else answer(self.sampled)
        if isinstance(said, Exception):
            raise said
        return said

    def delivered(self, completion_id: str) -> None:
        self.delivered_ids.append(completion_id)

    def left(self, completion_id: str) -> None:
        self.left_ids.append(completion_id)

    def fail(self, error: Exception) -> None:
        self.failures.append(error)

    async def count_tokens(self, call: GatewayCall) -> int:
        self.calls.append(call)
        return self.tokens


class FakeSessions:
    """Sessions by their paths."""

    def __init__(self, *sessions: FakeSession) -> None:
        self._sessions = {session.path: session for session in sessions}

    def authenticate(self, path: str, key: str) -> FakeSession:
        session = self._sessions.get(path)
        if session is None:
            raise GatewayError(404, "not_found", "no such trajectory")
        if not compare_digest(session.key.encode(), key.encode()):
            raise GatewayError(401, "authentication", "the key is not this trajectory's")
        return session


@asynccontextmanager
async def served(*sessions: FakeSession, **settings: Any) -> AsyncIterator[str]:
    """The URL of a server with these sessions, as the gateway makes it."""
    config = GatewayConfig(**settings)
    threads = WorkerThreads(max_threads=4, max_abandoned=1)
    with closing(threads), closing(await prepare(config, threads)) as host:
        async with open_runtime_loop() as loop:
            service = Service(
                sessions=FakeSessions(*sessions),
                loop=loop,
                limits=ExchangeLimits(
                    max_body_bytes=config.max_body_bytes,
                    body_s=config.body_s,
                    write_s=config.write_s,
                ),
                models=(config.model, *config.model_aliases),
                spell=lambda token_id: b"<%d>" % token_id,
                keep_alive_s=config.keep_alive_s,
                unenforced=config.unenforced,
            )
            async with host.serving(routes(service), not_found(service)):
                yield host.url
