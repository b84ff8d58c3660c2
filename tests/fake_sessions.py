"""Sessions of the gateway that answer from a script, for tests of its HTTP side."""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from rollout.bridge import wait_future
from rollout.config import GatewayConfig
from rollout.gateway.calls import (
    Answer,
    Completion,
    GatewayCall,
    GatewayError,
)
from rollout.gateway.http import serve_http
from rollout.gateway.routes import Router, TrajectoryApi
from rollout.gateway.task_runner import TaskRunner, Wait
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

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
    }
    return Answer(**(said | fields))


class FakeSession:
    """One trajectory.

    Attributes:
        script: What it answers next: answers, or an error; "Four." at its end.
        calls: What was asked.
        sampled: How many answers were sampled, and not replayed.
        left_ids: Answers of which the server says that their clients left before.
        hold: Where set, answers wait until it is.
        cancelled: Generations that were cancelled.
        pause_s: How long an answer takes.
    """

    runner: TaskRunner

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key
        self.script: deque[Answer | Exception] = deque()
        self.calls: list[GatewayCall] = []
        self.sampled = 0
        self.left_ids: list[str] = []
        self.hold: anyio.Event | None = None
        self.cancelled = 0
        self.pause_s = 0.0
        self._stored: dict[bytes, Completion] = {}

    async def complete(self, call: GatewayCall, wait: Wait[Completion] = wait_future) -> Completion:
        return await self.runner.run(lambda _: self._complete(call), wait=wait)

    async def _complete(self, call: GatewayCall) -> Completion:
        self.calls.append(call)
        stored = self._stored.pop(call.digest, None)
        if stored is not None and stored.id in self.left_ids:
            self._stored[call.digest] = stored
            return stored
        try:
            if self.hold is not None:
                await self.hold.wait()
            await anyio.sleep(self.pause_s)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        completion = self._stored[call.digest] = self._sample(call)
        return completion

    def _sample(self, call: GatewayCall) -> Completion:
        answers = tuple(self._next() for _ in range(call.n))
        return Completion(
            id=f"completion-{self.sampled}",
            answers=answers,
            prompt_ids=array("i", [1, 2, 3, 4]),
            cached_tokens=2,
        )

    def _next(self) -> Answer:
        self.sampled += 1
        said = self.script.popleft() if self.script else answer(self.sampled)
        if isinstance(said, Exception):
            raise said
        return said

    def mark_lost(self, completion_id: str) -> None:
        self.left_ids.append(completion_id)


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
    async with open_task_group() as tasks:
        for session in sessions:
            session.runner = TaskRunner(tasks)
        api = TrajectoryApi(
            FakeSessions(*sessions).authenticate, config, lambda token_id: b"<%d>" % token_id
        )
        async with serve_http(config, Router(api.routes).handle) as url:
            yield url


async def ask_officially(
    session: FakeSession, body: Callable[..., Any], *, key: str = KEY, **settings: Any
) -> Any:
    """What `body` returns, given clients of OpenAI's and Anthropic's; it runs in a thread."""
    async with served(session, **settings) as url:
        root = f"{url}/t/{session.path}"
        return await anyio.to_thread.run_sync(partial(_in_thread, root, key, body))


def _in_thread(root: str, key: str, body: Callable[..., Any]) -> Any:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    plain = openai.DefaultHttpxClient(verify=False), anthropic.DefaultHttpxClient(verify=False)
    with (
        openai.OpenAI(base_url=f"{root}/v1", api_key=key, http_client=plain[0]) as ours,
        anthropic.Anthropic(base_url=root, api_key=key, http_client=plain[1]) as theirs,
    ):
        return body(ours, theirs)
