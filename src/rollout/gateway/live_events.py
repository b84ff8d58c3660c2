"""A reply in events while its answer is made: what is certain of it, and signs of life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from rollout.gateway.asgi import EVENTS

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from rollout.gateway.apis.writing import AnswerStream
    from rollout.gateway.asgi import Exchange
    from rollout.gateway.calls import Draft


class LiveEvents:
    """Writes to a client until the answer is there; it runs on the loop that serves.

    Args:
        exchange: To write to; begun with the first event.
        stream: Makes events of drafts.
        keep_alive: An event of no content.
        keep_alive_s: Between two signs of life.
        pace_s: Least time between two drafts that are told.
        tasks: Ends with the wait for the answer.
    """

    def __init__(
        self,
        exchange: Exchange,
        stream: AnswerStream,
        keep_alive: bytes,
        *,
        keep_alive_s: float,
        pace_s: float,
        tasks: TaskGroup,
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._pace_s = pace_s
        self._tasks = tasks
        self._draft: Draft | None = None
        self._news = anyio.Event()
        self._is_running = self._is_over = False
        self._timer: Any = exchange.call_later(keep_alive_s, self._start)

    def take(self, draft: Draft) -> None:
        """Tell this one soon, in place of those before it that are not told yet."""
        if not self._is_over:
            self._draft = draft
            self._news.set()
            self._start()

    def end(self) -> None:
        """The answer is there, or none will be; what is being written is written."""
        self._is_over = True
        self._timer.cancel()
        self._timer = None

    def _start(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._tasks.start_soon(self._run)

    async def _run(self) -> None:
        while True:
            await self._write()
            await anyio.sleep(self._pace_s)
            with anyio.move_on_after(self._keep_alive_s):
                await self._news.wait()

    async def _write(self) -> None:
        draft, self._draft, self._news = self._draft, None, anyio.Event()
        data = self._keep_alive if draft is None else self._stream.more(draft)
        if not data:
            return
        with anyio.CancelScope(shield=True):  # an event is written whole, or counts as not told
            if not self._exchange.has_begun:
                await self._exchange.begin(200, EVENTS)
            await self._exchange.write(data)
