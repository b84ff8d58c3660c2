"""Connections to a replica, and the channel that is made of them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from rollout.engine.driver.channel import Channel
from rollout.engine.wire.handshake import HANDSHAKE_S, greet_as_client, handshake_frames
from rollout.engine.wire.protocol import CONNECTION_ERRORS, ROLES, DriverFacts, Role, Terms, Welcome
from rollout.errors import ChannelError

if TYPE_CHECKING:
    from rollout.engine.driver.generation import TokenCounts
    from rollout.engine.wire.frames import FrameStream

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
        """A new connection with its handshake done; `received` goes on with an earlier one."""
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


@contextlib.asynccontextmanager
async def connect_channel(
    name: str,
    connect: Connect,
    secret: bytes,
    tokens: TokenCounts | None = None,
    *,
    terms: Terms | None = None,
    facts: DriverFacts | None = None,
) -> AsyncIterator[Channel]:
    """Connect and shake hands on a data and a control connection; closes both at the end.

    The channel does its work while somebody awaits its `run`, and counts in `tokens`.

    Args:
        connect: Opens a byte stream to the server; called again when one breaks.
        terms: What both sides keep to; None takes the defaults.
        facts: What the engine must agree with.

    Raises:
        ChannelError: No connection, or the handshake failed.
    """
    terms = terms or Terms()
    greeter = Greeter(connect, secret, terms, facts or DriverFacts())
    frames: dict[Role, FrameStream] = {}
    try:
        try:
            with anyio.fail_after(HANDSHAKE_S):
                for role in ROLES:
                    frames[role], welcome = await greeter.greet(role)
                    frames[role].begin(terms.max_frame_bytes)
        except (*CONNECTION_ERRORS, TimeoutError) as error:
            text = str(error) or type(error).__name__
            raise ChannelError(f"{name}: no channel to the engine: {text}") from error
        channel = Channel(name, greeter, welcome.info, frames, tokens)
        try:
            yield channel
        finally:
            await channel.leave()
    finally:
        for each in frames.values():
            await each.aclose()
