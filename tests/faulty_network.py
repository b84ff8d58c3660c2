"""Engines in real processes behind connections that can be cut, muted or garbled."""

from __future__ import annotations

import math
import random  # noqa: TID251  (a seed determines the cuts)
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import attrs
from anyio.abc import ByteStream

from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle

Fault = Literal["cut", "mute", "garbage"]
#: Announces a frame of seven bytes that no decoder knows.
GARBAGE = b"\x07\x00\x00\x00garbage"


class FaultyStream(ByteStream):
    """A connection to an engine; `fault` strikes when the next bytes come from it.

    Args:
        life_bytes: It is cut after so many bytes, both directions together.
    """

    def __init__(self, real: ByteStream, life_bytes: float = math.inf) -> None:
        self.fault: Fault | None = None
        self._real = real
        self._life_bytes = life_bytes

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The engine's bytes, unless a fault strikes."""
        data = await self._live_for(await self._real.receive(max_bytes))
        if self.fault == "mute":
            await anyio.sleep_forever()
        fault, self.fault = self.fault, None
        if fault == "cut":
            await anyio.aclose_forcefully(self._real)
            return data[: max(1, len(data) // 2)]
        return GARBAGE + data if fault == "garbage" else data

    async def send(self, item: bytes) -> None:
        """To the engine."""
        await self._real.send(await self._live_for(item))

    async def _live_for(self, data: bytes) -> bytes:
        """What of these bytes still arrives; the last ones cut the connection."""
        if self._life_bytes <= 0:
            raise anyio.BrokenResourceError
        data = data[: int(min(self._life_bytes, len(data)))]
        self._life_bytes -= len(data)
        if self._life_bytes <= 0:
            await anyio.aclose_forcefully(self._real)
        return data

    async def send_eof(self) -> None:
        """To the engine."""
        await self._real.send_eof()

    async def aclose(self) -> None:
        """Close the real one."""
        await self._real.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Those of the real one."""
        return self._real.extra_attributes


class FaultyProcesses(LocalProcess):
    """`LocalProcess`, whose connections can be made to fail.

    Attributes:
        streams: Connections of each replica, in the order in which they were opened.
        cuts: How many further connections are cut at a random byte.
    """

    #: The least and the most bytes of a connection that is to be cut.
    LIFE_BYTES = (2_000, 200_000)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.streams: dict[str, list[FaultyStream]] = {}
        self.cuts = 0
        self._dice = random.Random(1)

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        async with super().open_replica(name, spec, start_timeout_s) as handle:

            async def connect() -> ByteStream:
                life_bytes = math.inf
                if self.cuts:
                    self.cuts -= 1
                    life_bytes = self._dice.randint(*self.LIFE_BYTES)
                stream = FaultyStream(await handle.connect(), life_bytes)
                self.streams.setdefault(name, []).append(stream)
                return stream

            yield attrs.evolve(handle, connect=connect)

    def strike(self, name: str, fault: Fault) -> None:
        """All connections that a replica has now meet a fault."""
        for stream in self.streams[name]:
            stream.fault = fault
