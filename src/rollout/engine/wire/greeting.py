"""How a driver opens the connections of one channel."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from anyio.abc import ByteStream

from rollout.engine.wire.handshake import greet_as_client, handshake_frames

if TYPE_CHECKING:
    from rollout.engine.wire.frames import FrameStream
    from rollout.engine.wire.protocol import DriverFacts, Role, Terms, Welcome

Connect = Callable[[], Awaitable[ByteStream]]


class Greeter:
    """Opens connections of one channel.

    Attributes:
        session: Ties them together; new for every channel.
        terms: What both sides keep to.
    """

    def __init__(self, connect: Connect, secret: bytes, terms: Terms, facts: DriverFacts) -> None:
        self.session = secrets.token_hex(8)
        self.terms = terms
        self._connect = connect
        self._secret = secret
        self._facts = facts

    async def greet(self, role: Role, received: int | None = None) -> tuple[FrameStream, Welcome]:
        """A new connection with its handshake done; `received` continues an earlier one."""
        frames = handshake_frames(await self._connect())
        try:
            welcome = await greet_as_client(
                frames,
                self._secret,
                role=role,
                session=self.session,
                terms=self.terms,
                facts=self._facts,
                received=received,
            )
        except BaseException:
            await frames.aclose()
            raise
        return frames, welcome
