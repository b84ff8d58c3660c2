"""An engine that records what it is asked and what it gives out.

It stands outside of the code that is checked: nothing here is what the library counts itself.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from harness.watched_tools import InjectedError
from rollout.engine.core import EngineBroken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.engine.core import Chunk, EngineCore, GenerationRequest


class SentRequest:
    """One request as its engine had it.

    Attributes:
        chunks: What the engine gave out, in order.
        is_open: Whether its answer is still iterated over.
    """

    __slots__ = ("chunks", "is_open", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.is_open = True


class WatchedCore:
    """An `EngineCore` around another one; everything that is not here is that one's own.

    Attributes:
        name: The replica.
        requests: What it was asked and what it gave out, by request id.
        reused_ids: Request ids that it was given more than once.
        is_serving: Between its start and its end, whichever way that comes.
        is_gone: It was closed, or did not start.
        on_freeze: Stops its connections; the placement sets it.
    """

    def __init__(self, name: str, core: EngineCore) -> None:
        self.name = name
        self.requests: dict[str, SentRequest] = {}
        self.reused_ids: list[str] = []
        self.is_serving = False
        self.is_gone = False
        self._core = core
        self.on_freeze: Callable[[], None] = lambda: None
        self._on_death: Callable[[], None] | None = None
        self._is_killed = False
        self._is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    @property
    def on_death(self) -> Callable[[], None] | None:
        """Called when the engine dies; the placement sets it."""
        return self._on_death

    @on_death.setter
    def on_death(self, callback: Callable[[], None]) -> None:
        self._on_death = callback
        if hasattr(self._core, "on_death"):
            self._core.on_death = self.kill

    def kill(self) -> None:
        """Let the engine die: its connections break at once; one that starts does not come up."""
        self._is_killed = True
        self.is_serving = False
        if self._on_death is not None:
            self._on_death()

    def freeze(self) -> None:
        """Freeze the engine: it says nothing any more, not even that it is alive."""
        self.is_serving = False
        self.on_freeze()

    def break_down(self) -> None:
        """Let the engine say that it is broken, in place of the next thing that it has to say."""
        self.is_serving = False
        self._is_broken = True

    async def start(self) -> None:
        """See `EngineCore.start`."""
        try:
            await self._core.start()
            if self._is_killed:
                raise InjectedError("killed while it started")
        except BaseException:
            self.is_gone = True
            raise
        self.is_serving = True

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `EngineCore.generate`."""
        if request.request_id in self.requests:
            self.reused_ids.append(request.request_id)
        sent = self.requests[request.request_id] = SentRequest(request)
        try:
            async with aclosing(self._core.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if self._is_broken:
                        raise EngineBroken("broken by the harness")
                    sent.chunks.append(chunk)
                    yield chunk
        finally:
            sent.is_open = False

    async def aclose(self) -> None:
        """See `EngineCore.aclose`."""
        self.is_gone = True
        self.is_serving = False
        await self._core.aclose()
