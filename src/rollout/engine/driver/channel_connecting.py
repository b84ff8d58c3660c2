"""Connections to a replica, and the channel that is made of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio

from rollout.engine.driver.channel import Channel
from rollout.engine.pool.generation import TokenCounts
from rollout.engine.wire.greeting import Connect, Greeter
from rollout.engine.wire.handshake import HANDSHAKE_S
from rollout.engine.wire.protocol import CONNECTION_ERRORS, ROLES, DriverFacts, Role, Terms
from rollout.errors import ChannelError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.wire.frames import FrameStream


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

    The channel does its work while its `run` is awaited, and counts in `tokens`.

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
        channel = Channel(
            name,
            greeter,
            welcome.info,
            frames,
            tokens=TokenCounts() if tokens is None else tokens,
        )
        try:
            yield channel
        finally:
            await channel.leave()
    finally:
        for each in frames.values():
            await each.aclose()
