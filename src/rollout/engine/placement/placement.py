"""What a placement offers: replicas that are up, and a way to connect to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import anyio
import attrs

from rollout.engine.channel.channel import OpenStream
from rollout.engine.channel.sockets import TlsFiles

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


@attrs.frozen
class CoreSpec:
    """Which core a replica runs: ``package.module:Class`` and its keyword arguments.

    The arguments are plain data, because they may travel to another process as JSON.

    Attributes:
        tls: What its connections are encrypted with, where they leave the process.
        slot: Which of the things that replicas do not share is its own: GPUs, a URL, a machine. No
            two replicas have the same at once; one that is added takes the lowest that is free.
    """

    core: str
    options: dict[str, Any]
    tls: TlsFiles | None = None
    slot: int = 0


@attrs.frozen
class ReplicaHandle:
    """A replica that answers.

    Attributes:
        connect: Opens a byte stream to its server.
        secret: What both sides of the hello must prove to hold.
        died: Fires when the engine is known to be gone, e.g. its process has ended.
        machines: That it is spread over.
        is_here: All of it is on the driver's machine, and sees the files that it has in memory.
        machine: Where the first part of it is; those with the same name see each other's files.
    """

    connect: OpenStream
    secret: bytes
    died: anyio.Event
    machines: int = 1
    is_here: bool = True
    machine: str = ""


class Placement(Protocol):
    """Where engines live."""

    def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AbstractAsyncContextManager[ReplicaHandle]:
        """Start an engine; it is gone when the block has been left, whatever it was doing.

        What it lives on may be kept for its next start, until `release`.
        """

    async def release(self, name: str) -> None:
        """Give back what is kept for a replica that is not started again."""
