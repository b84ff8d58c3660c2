"""An engine that records what it is asked and what it gives out.

It stands outside of the code that is checked: nothing here is what the library counts itself.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from harness.watched_tools import InjectedError
from rollout.engine.core import EngineBroken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.engine.core import Chunk, EngineCore, GenerationRequest


#: Characters of a request id that say whose it is; see `rollout.seeds.RequestIds`.
OWNER = 16


class SentRequest:
    """One request as its engine had it, with what continued it after an operation.

    Attributes:
        chunks: What the engine gave out, in order.
        ids: What the engine's session takes of them: those that follow what it has.
        is_open: Whether its answer is still iterated over.
    """

    __slots__ = ("_start", "chunks", "ids", "is_open", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.request, self.is_open = request, True
        self.chunks: list[Chunk] = []
        self.ids, self._start = b"", 0

    def add(self, chunk: Chunk) -> None:
        """Note a chunk, whose offset is counted from where the request was continued."""
        chunk = replace(chunk, offset=self._start + chunk.offset)
        self.chunks.append(chunk)
        if chunk.offset == len(self.ids) // 4:
            self.ids += chunk.ids

    def is_continued_by(self, request: GenerationRequest) -> bool:
        """Whether the engine continues it by this one."""
        is_same = request.session_id == self.request.session_id
        return is_same and request.prompt_ids == self.request.prompt_ids + self.ids

    def go_on(self) -> None:
        """It is continued: its driver does not see that it was cut off."""
        self.is_open, self._start = True, len(self.ids) // 4
        if self.chunks:
            self.chunks[-1] = replace(self.chunks[-1], finish_reason=None)


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
        self._owner = ""  # of the driver's request ids; the first request is the driver's
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
        sent = self._note_sent(request)
        try:
            async with aclosing(self._core.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if self._is_broken:
                        raise EngineBroken("broken by the harness")
                    sent.add(chunk)
                    yield chunk
        finally:
            sent.is_open = False

    def _note_sent(self, request: GenerationRequest) -> SentRequest:
        owner = request.request_id[:OWNER]
        self._owner = self._owner or owner
        if owner != self._owner:  # of the engine's session
            for sent in reversed(self.requests.values()):
                if sent.is_continued_by(request):
                    sent.go_on()
                    return sent
        sent = self.requests[request.request_id] = SentRequest(request)
        return sent

    async def aclose(self) -> None:
        """See `EngineCore.aclose`."""
        self.is_gone = True
        self.is_serving = False
        await self._core.aclose()
