"""Where agents, tools and engines of a golden run wait for each other, and how time passes.

What a run records must not depend on how fast anything is. So a run decides by events what comes
before what, and lets time pass only when everything waits.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (a loop whose time can be put forward)
from collections import Counter, defaultdict
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import sniffio

from rollout.engine import Chunk
from rollout.testing import SimulatedCore, decode_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine import GenerationRequest

#: Tokens of a chunk where engines hold answers back; a held answer has so many.
HELD_TOKENS = 8


class Stage:
    """Events by name: how often they came, and gates that stay shut until they are opened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._changed = anyio.Event()
        self._gates: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)

    def note(self, name: str) -> None:
        """Count an event."""
        self.counts[name] += 1
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, name: str, count: int) -> None:
        """Wait until an event has come so often."""
        while self.counts[name] < count:
            await self._changed.wait()

    async def pass_gate(self, name: str) -> None:
        """Count the arrival, and wait until the gate is opened."""
        self.note(name)
        await self._gates[name].wait()

    def open(self, name: str) -> None:
        """Let everybody through, also those who come later."""
        self._gates[name].set()

    def is_open(self, name: str) -> bool:
        """Whether it has been opened."""
        return self._gates[name].is_set()


class JumpingLoop(asyncio.SelectorEventLoop):
    """asyncio's loop on the machine's clock, which `elapse` puts forward."""

    _ahead_s = 0.0

    def time(self) -> float:
        """Seconds on the loop's clock."""
        return super().time() + self._ahead_s

    def put_forward(self, seconds: float) -> None:
        """What is due by then is done in the loop's next round."""
        self._ahead_s += seconds


async def elapse(seconds: float) -> None:
    """Let time pass while everything waits: virtual time on trio, a jump on asyncio."""
    if runs_on_asyncio():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        loop.put_forward(seconds)
        await anyio.sleep(0.001)  # for what is due
    else:
        await anyio.sleep(seconds)


def runs_on_asyncio() -> bool:
    """Where time is real."""
    return sniffio.current_async_library() == "asyncio"


class HeldCore(SimulatedCore):
    """Holds the answer to a prompt with "hold" back after its first chunk.

    It continues once the gate "held" of the stage is open; an abort ends it with what it has.
    """

    #: That of the run; a run sets it before it opens its engines.
    stage: ClassVar[Stage]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_gathering = True  # the first chunk is sent at once
        self._aborted: dict[str, anyio.Event] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """As the simulated engine, but see above."""
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk
                if chunk.finish_reason is None and await self._is_cut(request):
                    yield Chunk(
                        request_id=request.request_id,
                        offset=chunk.offset + len(chunk.ids) // 4,
                        weight_version=chunk.weight_version,
                        finish_reason="abort",
                    )
                    return

    async def _is_cut(self, request: GenerationRequest) -> bool:
        """Wait until the answer may continue, or is aborted."""
        if self.stage.is_open("held") or "hold" not in decode_ids(request.prompt_ids):
            return False
        aborted = self._aborted[request.request_id] = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:

                async def wait_for_gate() -> None:
                    await self.stage.pass_gate("held")
                    tasks.cancel_scope.cancel()

                tasks.start_soon(wait_for_gate)
                await aborted.wait()
                tasks.cancel_scope.cancel()
        finally:
            del self._aborted[request.request_id]
        return aborted.is_set()

    def abort_nowait(self, request_id: str) -> None:
        """End a request; one that is held at once."""
        aborted = self._aborted.get(request_id)
        if aborted is None:
            super().abort_nowait(request_id)
        else:
            aborted.set()

    async def aclose(self) -> None:
        """End all."""
        for aborted in self._aborted.values():
            aborted.set()
        await super().aclose()
