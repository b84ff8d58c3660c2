"""The driver's side of the channel to one replica."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio.abc import ByteStream

from rollout.engine.core import Chunk, EngineInfo, EngineLoad, GenerationRequest
from rollout.engine.generation import ChunkFault, Generation, TokenCounts
from rollout.engine.protocol import (
    CONNECTION_ERRORS,
    HANDSHAKE_S,
    Abort,
    FrameStream,
    Ping,
    Pong,
    Role,
    UpdateWeights,
    WeightsUpdated,
    decode_from_server,
    greet_as_client,
)
from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from rollout.engine.weights import WeightSource

logger = logging.getLogger("rollout.engine")

HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0
Connect = Callable[[], Awaitable[ByteStream]]


class PendingRequest:
    """A request under way: `done` fires at its last chunk or when the channel is lost.

    Attributes:
        generation: Filled as chunks come; None once nobody waits for them any more.
        error: Why the engine refused or failed it; empty otherwise.
        is_lost: The channel was lost under it.
        is_garbled: The engine's answer contradicted itself; what came before stays.
    """

    __slots__ = ("done", "error", "generation", "is_garbled", "is_lost", "on_gone", "request_id")

    def __init__(
        self, request_id: str, generation: Generation, on_gone: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.generation: Generation | None = generation
        self.on_gone = on_gone
        self.done = anyio.Event()
        self.error = ""
        self.is_lost = False
        self.is_garbled = False


class Channel:
    """A live connection pair to one replica; made by `connect_channel`.

    Attributes:
        info: The engine's facts from the handshake.
        load: What the engine last said it was doing.
        lost: Fires when the connection is of no more use; `lost_reason` then says why.
        is_link_fault: It was lost because the connection broke, which the engine may survive.
        on_lost: Called at that moment, before any request learns of it.
        on_load: Called with what the engine says it is doing, at each answer to a heartbeat.
        tokens: What became of the tokens that arrived.
    """

    def __init__(
        self,
        name: str,
        info: EngineInfo,
        data: FrameStream,
        control: FrameStream,
        tokens: TokenCounts | None = None,
    ) -> None:
        self.name = name
        self.info = info
        self.load = EngineLoad()
        self.lost = anyio.Event()
        self.lost_reason = ""
        self.is_link_fault = False
        self.on_lost: Callable[[], None] = lambda: None
        self.on_load: Callable[[EngineLoad], None] = lambda _: None
        self.tokens = TokenCounts() if tokens is None else tokens
        self._data = data
        self._control = control
        self._pending: dict[str, PendingRequest] = {}
        self._zombies: dict[str, PendingRequest] = {}
        self._last_heard = 0.0
        self._weights = anyio.Event()
        self._weights_version = -1
        self._weights_answer = WeightsUpdated(-1)

    @property
    def in_flight(self) -> int:
        """Requests that somebody waits for."""
        return len(self._pending)

    @property
    def zombies(self) -> int:
        """Cancelled requests whose end the engine has not confirmed yet."""
        return len(self._zombies)

    def submit_nowait(
        self, request: GenerationRequest, generation: Generation, on_gone: Callable[[], None]
    ) -> PendingRequest:
        """Send a request; `generation` fills as chunks arrive.

        `on_gone` is called exactly once, when the engine no longer works on the request: at its
        last chunk, also of a cancelled one, or when the channel is lost.
        """
        pending = PendingRequest(request.request_id, generation, on_gone)
        generation.begin(request.request_id, self.name)
        if self.lost.is_set():
            pending.is_lost = True
            self._end(pending, self.lost_reason)
            return pending
        try:
            self._data.send_nowait(request)
        except Exception:  # it cannot be encoded: nothing has left
            on_gone()
            raise
        self._pending[request.request_id] = pending
        return pending

    def abandon_nowait(self, pending: PendingRequest) -> None:
        """Stop waiting for a request and have the engine end it.

        Until its last chunk arrives it is a zombie, and the abort is sent again at each heartbeat.
        """
        if self._pending.pop(pending.request_id, None) is None:
            return
        pending.generation = None
        self._zombies[pending.request_id] = pending
        self._control.send_nowait(Abort(pending.request_id))

    def interrupt_nowait(self, request_id: str) -> None:
        """Have the engine end a request; whoever waits for it gets the tokens that it has."""
        self._control.send_nowait(Abort(request_id))

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """Have the engine load other weights; returns when it has. One at a time.

        Cancellation leaves the engine to it.

        Raises:
            EngineError: It could not, and has the weights that it had.
            ChannelError: The channel was lost.
        """
        self._weights, self._weights_version = anyio.Event(), version
        if not self.lost.is_set():
            self._control.send_nowait(UpdateWeights(version, source))
            await self._weights.wait()
        if self.lost.is_set():
            raise ChannelError(self.lost_reason)
        if self._weights_answer.error:
            raise EngineError(f"{self.name}: {self._weights_answer.error}")
        self.info = msgspec.structs.replace(self.info, weight_version=version)

    def _on_weights(self, answer: WeightsUpdated) -> None:
        if answer.version == self._weights_version:
            self._weights_answer = answer
            self._weights.set()

    def _on_chunk(self, chunk: Chunk) -> None:
        if self.lost.is_set():
            return  # its request was told that the connection is lost
        if chunk.is_fatal:
            self._lose(f"the engine is broken: {chunk.error}")
            return
        pending = self._pending.get(chunk.request_id) or self._zombies.get(chunk.request_id)
        count = len(chunk.ids) // 4
        if pending is None:
            self.tokens.repeated += count  # of a request that has ended: nothing to add it to
            return
        if pending.generation is None:
            self.tokens.late += count
        elif not self._take(pending, chunk):
            return
        if chunk.finish_reason is not None:
            del (self._pending if pending.generation is not None else self._zombies)[
                chunk.request_id
            ]
            self._end(pending, chunk.error)

    def _take(self, pending: PendingRequest, chunk: Chunk) -> bool:
        generation = pending.generation
        assert generation is not None
        count = len(chunk.ids) // 4
        try:
            is_new = generation.take(chunk)
        except ChunkFault as fault:
            self.tokens.refused += count
            pending.is_garbled = True
            pending.error = f"{self.name} sent a faulty chunk: {fault}"
            self.abandon_nowait(pending)
            pending.done.set()
            if chunk.finish_reason is not None:  # and it will say no more
                self._end(self._zombies.pop(chunk.request_id), pending.error)
            return False
        if is_new:
            self.tokens.taken += count
        else:
            self.tokens.repeated += count
        return True

    def _end(self, pending: PendingRequest, error: str) -> None:
        pending.error = pending.error or error
        pending.on_gone()
        pending.done.set()

    def _lose(self, reason: str, *, is_link_fault: bool = False) -> None:
        if self.lost.is_set():
            return
        self.is_link_fault = is_link_fault
        self.lost_reason = f"{self.name}: {reason}"
        self.lost.set()
        self.on_lost()
        for pending in (*self._pending.values(), *self._zombies.values()):
            pending.is_lost = True
            self._end(pending, self.lost_reason)
        self._weights.set()
        self._pending.clear()
        self._zombies.clear()

    async def _read(self, frames: FrameStream) -> None:
        try:
            while True:
                payloads = await frames.read()
                self._last_heard = anyio.current_time()
                for payload in payloads:
                    message = decode_from_server(payload)
                    if isinstance(message, Chunk):
                        self._on_chunk(message)
                    elif isinstance(message, Pong):
                        self.load = message.load
                        self.on_load(message.load)
                    elif isinstance(message, WeightsUpdated):
                        self._on_weights(message)
        except anyio.EndOfStream:
            self._lose("the engine closed the connection", is_link_fault=True)
        except CONNECTION_ERRORS as error:
            self._lose(
                f"the connection broke ({type(error).__name__}: {error})", is_link_fault=True
            )

    async def _write(self, frames: FrameStream) -> None:
        try:
            await frames.write_forever()
        except CONNECTION_ERRORS as error:
            self._lose(
                f"the connection broke ({type(error).__name__}: {error})", is_link_fault=True
            )

    async def _beat(self) -> None:
        """Ping, repeat aborts, and judge the peer.

        A late tick is our own loop's fault: what the peer sent meanwhile has not been read yet,
        so its silence is counted from now.
        """
        due = self._last_heard = anyio.current_time()
        number = 0
        while True:
            due += HEARTBEAT_S
            await anyio.sleep_until(due)
            now = anyio.current_time()
            if now - due > HEARTBEAT_S / 2:
                due = self._last_heard = now
            elif now - self._last_heard > HEARTBEAT_TIMEOUT_S:
                self._lose(f"silent for {now - self._last_heard:.1f} s")
                return
            number += 1
            self._control.send_nowait(Ping(number))
            for request_id in self._zombies:
                self._control.send_nowait(Abort(request_id))

    async def run(self) -> None:
        """Serve the connections until they are lost."""
        async with anyio.create_task_group() as tasks:
            for frames in (self._data, self._control):
                tasks.start_soon(self._read, frames)
                tasks.start_soon(self._write, frames)
            tasks.start_soon(self._beat)
            await self.lost.wait()
            tasks.cancel_scope.cancel()

    def close(self, reason: str = "the channel was closed") -> None:
        """End the channel; requests still under way fail with this reason."""
        self._lose(reason)


@contextlib.asynccontextmanager
async def connect_channel(
    name: str, connect: Connect, secret: bytes, tokens: TokenCounts | None = None
) -> AsyncIterator[Channel]:
    """Connect and shake hands on a data and a control connection; closes both at the end.

    The channel does its work while somebody awaits its `run`, and counts in `tokens`.

    Raises:
        ChannelError: No connection, or the handshake failed.
    """
    session = secrets.token_hex(8)
    async with contextlib.AsyncExitStack() as stack:

        async def greet(role: Role) -> tuple[FrameStream, EngineInfo]:
            frames = FrameStream(await connect())
            stack.push_async_callback(frames.aclose)
            return frames, await greet_as_client(frames, secret, role=role, session=session)

        try:
            with anyio.fail_after(HANDSHAKE_S):
                control, info = await greet("control")
                data, _ = await greet("data")
        except (*CONNECTION_ERRORS, TimeoutError) as error:
            text = str(error) or type(error).__name__
            raise ChannelError(f"{name}: no channel to the engine: {text}") from error
        channel = Channel(name, info, data, control, tokens)
        try:
            yield channel
        finally:
            channel.close()
