"""Cores that break in ways of their own; each counts like `fake_core.CountingCore`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import msgspec

from fake_core import CountingCore
from rollout.engine.core import Chunk, EngineBroken, GenerationRequest, unpack_ids
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.engine.weights import DiskWeights

#: A prompt that begins with this id is poison.
POISON = 13


class MortalCore(CountingCore):
    """Dies when it is asked to (in process), or of a poisonous prompt.

    Args:
        index: Of the replica.
        poison: What a poisonous prompt does: "exit" ends the engine, "late" does so after three
            tokens, "memory" and "broken" raise, "fatal" says so in a chunk.
    """

    def __init__(self, *, poison: str = "exit", index: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.index = index
        self.on_death: Any = None
        self.requests: list[GenerationRequest] = []
        self.is_closed = False
        self._poison = poison

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Count, or die."""
        self.requests.append(request)
        is_poison = unpack_ids(request.prompt_ids)[0] == POISON
        if is_poison and self._poison != "late":
            yield self._die(request)
            return
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if is_poison and len(request.prompt_ids) // 4 + chunk.offset >= 4:
                    yield self._die(request)
                    return
                yield chunk

    async def aclose(self) -> None:
        """Note it."""
        self.is_closed = True

    def _die(self, request: GenerationRequest) -> Chunk:
        if self._poison == "memory":
            raise MemoryError("no room for 13")
        if self._poison == "broken":
            raise EngineBroken("the card has fallen off the bus")
        if self._poison != "fatal" and self.on_death is not None:
            self.on_death()
        elif self._poison != "fatal":
            os._exit(13)
        return Chunk(
            request_id=request.request_id,
            finish_reason="error",
            error="CUDA out of memory",
            is_fatal=True,
        )


class UpdatableCore(MortalCore):
    """Stamps the version that it was given last; directories called "bad", or in such, are bad.

    Of those called "fatal" half is in place when it breaks.

    Args:
        load_s: What loading takes.
        name: With "picky" it refuses "odd" directories too; with "fragile" it breaks of them.
    """

    def __init__(self, *, load_s: float = 0.0, name: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.version = 0
        self.loaded: list[str] = []
        self._load_s = load_s
        self._name = name

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Take some time."""
        await anyio.sleep(self._load_s)
        parts = Path(source.path).parts  # not any text in it: the names of others are random
        if "bad" in parts or (self._name == "picky" and "odd" in parts):
            raise FileNotFoundError(f"no weights in {source.path}")
        if "fatal" in parts or (self._name == "fragile" and "odd" in parts):
            raise EngineBroken(f"half of {source.path} is in place")
        self.version = version
        self.loaded.append(source.path)
        self.info = msgspec.structs.replace(self.info, weight_version=version)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Count, with the version of now."""
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield msgspec.structs.replace(chunk, weight_version=self.version)


class StutteringCore(SimulatedCore):
    """Says everything twice."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Each chunk of the simulated engine, twice."""
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk
                yield chunk


class StubbornSimulation(SimulatedCore):
    """Does not start again while there is a reason not to."""

    refusal = ""

    async def start(self) -> None:
        """Start, or say why not."""
        if self.refusal:
            raise MemoryError(self.refusal)
        await super().start()
