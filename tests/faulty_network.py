"""Engines in real processes behind connections that can be cut, muted or garbled."""

from __future__ import annotations

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
    """A connection to an engine; `fault` strikes when the next bytes come from it."""

    def __init__(self, real: ByteStream) -> None:
        self.fault: Fault | None = None
        self._real = real

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The engine's bytes, unless a fault strikes."""
        data = await self._real.receive(max_bytes)
        if self.fault == "mute":
            await anyio.sleep_forever()
        fault, self.fault = self.fault, None
        if fault == "cut":
            await anyio.aclose_forcefully(self._real)
            return data[: max(1, len(data) // 2)]
        return GARBAGE + data if fault == "garbage" else data

    async def send(self, item: bytes) -> None:
        """To the engine."""
        await self._real.send(item)

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
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.streams: dict[str, list[FaultyStream]] = {}

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        async with super().open_replica(name, spec, start_timeout_s) as handle:

            async def connect() -> ByteStream:
                stream = FaultyStream(await handle.connect())
                self.streams.setdefault(name, []).append(stream)
                return stream

            yield attrs.evolve(handle, connect=connect)

    def strike(self, name: str, fault: Fault) -> None:
        """All connections that a replica has now meet a fault."""
        for stream in self.streams[name]:
            stream.fault = fault
