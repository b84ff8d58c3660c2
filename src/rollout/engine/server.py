"""The engine's side of the channel: requests in, chunks out.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.core import Chunk, EngineBroken, EngineCore, EngineLoad, GenerationRequest
from rollout.engine.loading import start_error_text
from rollout.engine.protocol import (
    CONNECTION_ERRORS,
    HANDSHAKE_S,
    Abort,
    FrameStream,
    Ping,
    Pong,
    UpdateWeights,
    WeightsUpdated,
    decode_from_client,
    greet_as_server,
)

if TYPE_CHECKING:
    from anyio.abc import ByteStream

logger = logging.getLogger("rollout.engine")

#: Aborts travel on a connection of their own and can overtake their request; this many of those
#: that named nothing are remembered.
EARLY_ABORTS = 4096


class EngineServer:
    """Serves one core to any number of connections.

    A connection that ends aborts the requests that came over it. A quiet client with an open
    socket is never taken for dead.
    """

    def __init__(self, core: EngineCore, secret: bytes) -> None:
        self._core = core
        self._secret = secret
        self._running: set[str] = set()
        self._early_aborts: OrderedDict[str, None] = OrderedDict()

    async def serve_connection(self, stream: ByteStream) -> None:
        """Serve one connection until it ends; returns without an error whatever the peer does."""
        frames = FrameStream(stream)
        try:
            with anyio.fail_after(HANDSHAKE_S):
                hello = await greet_as_server(frames, self._secret, lambda: self._core.info)
            if hello is None:
                return
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, frames, tasks.cancel_scope)
                if hello.role == "data":
                    await self._read_requests(frames, tasks)
                else:
                    await self._read_control(frames, tasks)
                tasks.cancel_scope.cancel()
        except (*CONNECTION_ERRORS, TimeoutError) as error:
            logger.debug("connection dropped during the handshake: %r", error)
        finally:
            await frames.aclose()

    async def _write(self, frames: FrameStream, connection: anyio.CancelScope) -> None:
        try:
            await frames.write_forever()
        except CONNECTION_ERRORS:
            connection.cancel()

    async def _read_requests(self, frames: FrameStream, tasks: anyio.abc.TaskGroup) -> None:
        try:
            while True:
                for payload in await frames.read():
                    message = decode_from_client(payload)
                    if isinstance(message, GenerationRequest):
                        tasks.start_soon(self._generate, message, frames)
        except CONNECTION_ERRORS as error:
            logger.debug("data connection ended: %r", error)

    async def _read_control(self, frames: FrameStream, tasks: anyio.abc.TaskGroup) -> None:
        try:
            while True:
                for payload in await frames.read():
                    message = decode_from_client(payload)
                    if isinstance(message, Ping):
                        frames.send_nowait(Pong(message.number, self._load()))
                    elif isinstance(message, Abort):
                        self._abort(message.request_id)
                    elif isinstance(message, UpdateWeights):
                        tasks.start_soon(self._update_weights, message, frames)
        except CONNECTION_ERRORS as error:
            logger.debug("control connection ended: %r", error)

    async def _update_weights(self, update: UpdateWeights, frames: FrameStream) -> None:
        load = getattr(self._core, "update_weights", None)
        error = ""
        try:
            if load is None:
                error = f"{type(self._core).__name__} cannot change its weights"
            else:
                await load(update.version, update.source)
        except Exception as failure:
            logger.exception("the weights of version %s were not loaded", update.version)
            error = start_error_text(failure)
        frames.send_nowait(WeightsUpdated(update.version, error))

    def _load(self) -> EngineLoad:
        """The core's load with its time: what waits on the way must not look like a slow engine."""
        return msgspec.structs.replace(self._core.load(), measured_at_s=anyio.current_time())

    def _abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._core.abort_nowait(request_id)
            return
        self._early_aborts[request_id] = None
        if len(self._early_aborts) > EARLY_ABORTS:
            self._early_aborts.popitem(last=False)

    async def _generate(self, request: GenerationRequest, frames: FrameStream) -> None:
        request_id = request.request_id
        if request_id in self._early_aborts:
            del self._early_aborts[request_id]
            frames.send_nowait(Chunk(request_id=request_id, finish_reason="abort"))
            return
        self._running.add(request_id)
        try:
            async with aclosing(self._core.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    frames.send_nowait(chunk)
        except Exception as error:
            logger.exception("the core failed on request %s", request_id)
            is_fatal = isinstance(error, EngineBroken | MemoryError)
            text = str(error) if isinstance(error, EngineBroken) else start_error_text(error)
            frames.send_nowait(
                Chunk(request_id=request_id, finish_reason="error", error=text, is_fatal=is_fatal)
            )
        finally:
            self._running.discard(request_id)
