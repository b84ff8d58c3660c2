"""The driver's side of the channel to one replica."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING

import anyio

from rollout.bridge import loop_clock
from rollout.engine.core import Chunk, EngineInfo, EngineLoad
from rollout.engine.pool.generation import ChunkFault, Generation, TokenCounts
from rollout.engine.driver.heartbeat import Heartbeat
from rollout.engine.driver.lasting_connection import LastingConnection
from rollout.engine.driver.media_sender import MediaSender
from rollout.engine.driver.pending_commands import PendingCommands
from rollout.engine.driver.pending_request import Asker, PendingRequest
from rollout.engine.wire.frames import IDLE_ACK_BYTES, FrameStream
from rollout.engine.wire.protocol import (
    CONNECTION_ERRORS,
    ROLES,
    Abort,
    Ack,
    Bye,
    CommandDone,
    FrameError,
    FrameTooLongError,
    FromServer,
    Ping,
    Pong,
    Role,
    SendMedia,
    SendWhole,
    Submit,
    decode_from_server,
)
from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.routing import Dispatch
    from rollout.engine.wire.greeting import Greeter
    from rollout.engine.wire.operations import Operation
    from rollout.medium import PlacedMedia
    from rollout.token_prefix import TokenPrefix

logger = logging.getLogger("rollout.engine")

#: For telling a healthy engine that we leave.
BYE_S = 0.5


class Channel:
    """A live connection pair to one replica; made by `connect_channel`.

    Attributes:
        info: The engine's facts from the handshake.
        load: What the engine last said it was doing.
        lost: Fires when the connection is of no more use; `lost_reason` then says why.
        is_link_fault: It was lost because the connection broke, which the engine may survive.
        is_broken_by_command: It was lost because an operation broke the engine: no request did.
        on_lost: Called at that moment, before any request learns of it.
        on_load: Called with what the engine says it is doing, at each answer to a heartbeat.
        tokens: What became of the tokens that arrived.
    """

    def __init__(
        self,
        name: str,
        greeter: Greeter,
        info: EngineInfo,
        frames: dict[Role, FrameStream],
        tokens: TokenCounts,
    ) -> None:
        self.name, self.info, self.load = name, info, EngineLoad()
        self.lost = anyio.Event()
        self.lost_reason, self.is_link_fault, self.is_broken_by_command = "", False, False
        self.on_lost: Callable[[], None] = lambda: None
        self.on_load: Callable[[EngineLoad], None] = lambda _: None
        self.tokens, self._vocab_size = tokens, info.vocab_size
        self._greeter, self._frames = greeter, frames
        self._data, self._control = frames["data"], frames["control"]
        self._pending: dict[str, PendingRequest] = {}
        self._zombies: dict[str, PendingRequest] = {}
        self._commands = PendingCommands()
        self._heartbeat = Heartbeat(frames, greeter.terms)
        self._media = MediaSender(self._data, greeter.terms.max_frame_bytes)
        self._now = loop_clock()

    @property
    def in_flight(self) -> int:
        """Requests that a caller waits for."""
        return len(self._pending)

    @property
    def zombies(self) -> int:
        """Cancelled requests whose end the engine has not confirmed yet."""
        return len(self._zombies)

    @property
    def media_bytes(self) -> int:
        """Bytes of images and videos that the replica was sent."""
        return self._media.sent_bytes

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that requests should `wait_for_room` first."""
        return self._data.is_full

    async def wait_for_room(self, prompt_tokens: int) -> None:
        """Return when such a request may be sent; waiting callers go in their order."""
        await self._data.wait_for_room(4 * prompt_tokens)

    def submit_nowait(
        self,
        request: Submit,
        generation: Generation,
        on_gone: Callable[[PendingRequest], None],
        *,
        prefix: TokenPrefix | None = None,
        deadline: float = math.inf,
        dispatch: Dispatch | None = None,
        media: tuple[PlacedMedia, ...] = (),
        asker: Asker | None = None,
    ) -> PendingRequest:
        """Send a request, at once; `generation` fills as chunks arrive.

        `on_gone` is called exactly once, with what is returned here, when the engine no longer
        works on the request: at its last chunk, also of a cancelled one, or when the channel is
        lost.

        Args:
            request: With its `ids`, which are the prompt, or without and with a prefix; how much
                the replica has and how much time is left is for the channel to say.
            prefix: The prompt; only what the replica does not have of it is sent.
            deadline: Clock time at which the engine aborts the request by itself.
            dispatch: Of what is returned.
            media: Of the prompt, in order; the replica is sent what it does not have.
            asker: Makes the request again where the replica lacks what came before; None: it is
                kept for that.

        Raises:
            ChannelError: It does not fit into a frame; nothing has been sent.
        """
        request_id = request.request_id
        part = generation.begin(request_id, self.name)
        pending = PendingRequest(
            request,
            prefix,
            0 if prefix is None else prefix.length,
            deadline,
            generation,
            part,
            on_gone,
            anyio.Event(),
            dispatch,
            media=media,
        )
        if self.lost_reason:
            pending.is_lost = True
            self._end(pending, self.lost_reason)
            return pending
        try:
            self._send(pending)
        except BaseException:  # it cannot be encoded: nothing has left
            on_gone(pending)
            raise
        if asker is not None:
            pending.asked = asker
        self._pending[request_id] = pending
        return pending

    def _send(self, pending: PendingRequest, *, whole: bool = False) -> None:
        message = pending.message()
        if pending.prefix is not None:
            lacking = pending.lacking(self._greeter.session, whole=whole)
            message.kept, message.kept_sum, message.ids = lacking
        if pending.deadline != math.inf:
            message.remaining_s = max(0.0, pending.deadline - self._now())
        try:
            self._data.send_nowait(message)
        except FrameTooLongError as error:
            raise ChannelError(f"{self.name}: the request does not fit: {error}") from None
        if pending.prefix is not None:
            pending.prefix.note_sent(self._greeter.session, pending.sent_tokens)
            message.ids = b""  # it is encoded; what is sent again is taken from the prefix again

    def abandon_nowait(self, pending: PendingRequest) -> None:
        """Have the engine end a request that is not waited for any longer.

        Until its last chunk arrives it is a zombie, and the abort is sent again at each heartbeat.
        Its generation still takes what arrives; a caller that stops waiting for that sets it to
        None.
        """
        if self._pending.pop(pending.request_id, None) is None:
            return
        self._zombies[pending.request_id] = pending
        self._control.send_nowait(Abort(pending.request_id))

    def interrupt_nowait(self, request_id: str) -> None:
        """Have the engine end a request; its caller gets the tokens that it has."""
        self._control.send_nowait(Abort(request_id))

    async def command(self, operation: Operation) -> str:
        """Have the engine do something; returns when it has, with what came of it.

        Cancellation leaves the engine to it.

        Raises:
            EngineError: It could not, and is as it was.
            ChannelError: The channel was lost.
        """
        if not self.lost.is_set():
            answer = await self._commands.send(operation, self._control)
            if answer is not None:
                if answer.error:
                    raise EngineError(f"{self.name}: {answer.error}")
                return answer.result
        raise ChannelError(self.lost_reason)

    def take(self, role: Role, payload: bytes | memoryview) -> None:
        """One frame of the engine.

        Raises:
            FrameError: It is not one that an engine of ours sends.
        """
        message = decode_from_server(payload)
        if type(message) is Chunk:
            self._on_chunk(message)
        else:
            self._on_other(role, message)

    def _on_other(self, role: Role, message: FromServer) -> None:
        frames = self._frames[role]
        match message:
            case Pong(_, load) if math.isfinite(load.kv_used) and math.isfinite(load.measured_at_s):
                self._heartbeat.answered(role)
                if role == "control":
                    self.load = load
                    self.on_load(load)
            case Ping(number):
                frames.send_nowait(Pong(number))
                frames.acknowledge_nowait(IDLE_ACK_BYTES)
            case Ack(received):
                frames.confirmed(received)
            case CommandDone():
                self._commands.answered(message)
                if message.is_fatal:
                    self.is_broken_by_command = not self.lost.is_set()
                    self.lose(f"the engine is broken: {message.error}")
            case SendWhole(request_id):
                self._send_whole(request_id)
            case SendMedia(request_id, digests):
                asking = self._pending.get(request_id) or self._zombies.get(request_id)
                self._media.answer(asking.media if asking else (), digests)
            case _:
                raise FrameError(f"a {type(message).__name__} after the handshake")

    def _send_whole(self, request_id: str) -> None:
        """The engine did not take the request: it lacks what came before."""
        zombie = self._zombies.pop(request_id, None)
        if zombie is not None:
            self._end(zombie, "")
            return
        pending = self._pending.get(request_id)
        if pending is None:
            return
        try:
            if pending.prefix is None:
                raise FrameError("the engine asks for a whole prompt that it was sent")
            self._send(pending, whole=True)
        except ChannelError as error:
            del self._pending[request_id]
            assert pending.generation is not None
            pending.generation.finish_reason = "error"
            self._end(pending, str(error))

    def _on_chunk(self, chunk: Chunk) -> None:
        pending = self._pending.get(chunk.request_id)
        if pending is None or chunk.is_fatal:
            self._on_unawaited(chunk)
            return
        try:
            pending.take(chunk, self._vocab_size, self.tokens)
        except ChunkFault as fault:
            self.tokens.refused += len(chunk.ids) // 4
            self._on_garbled(pending, fault, is_last=chunk.finish_reason is not None)
            return
        if pending.first_at is None and pending.part.count:
            pending.first_at = self._now()
        if chunk.finish_reason is not None:
            del self._pending[chunk.request_id]
            if pending.prefix is not None:  # the next turn builds on what the replica has
                had = pending.sent_tokens + pending.part.count
                pending.prefix.note_sent(self._greeter.session, had)
            self._end(pending, chunk.error)

    def _take_late(self, zombie: PendingRequest, chunk: Chunk) -> None:
        """Tokens of a cancelled request, kept while its caller waits for the last answer."""
        if zombie.generation is not None:
            try:
                zombie.take(chunk, self._vocab_size, self.tokens)
            except ChunkFault:
                zombie.generation = None
            else:
                return
        self.tokens.late += len(chunk.ids) // 4

    def _on_unawaited(self, chunk: Chunk) -> None:
        """A chunk of a request that has been abandoned or is over, or the last an engine says."""
        if self.lost_reason:
            return  # its request was told that the connection is lost
        if chunk.is_fatal:
            self.lose(f"the engine is broken: {chunk.error}")
            return
        zombie = self._zombies.get(chunk.request_id)
        if zombie is None:  # of a request that has ended
            self.tokens.repeated += len(chunk.ids) // 4
            return
        self._take_late(zombie, chunk)
        if chunk.finish_reason is not None:
            self._end(self._zombies.pop(chunk.request_id), chunk.error)

    def _on_garbled(self, pending: PendingRequest, fault: ChunkFault, *, is_last: bool) -> None:
        pending.is_garbled = True
        pending.error = f"{self.name} sent a faulty chunk: {fault}"
        self.abandon_nowait(pending)
        pending.generation = None
        pending.done.set()
        if is_last:  # it will say no more
            self._end(self._zombies.pop(pending.request_id), pending.error)

    def _end(self, pending: PendingRequest, error: str) -> None:
        pending.error = pending.error or error
        pending.on_gone(pending)
        pending.done.set()

    def lose(self, reason: str, *, is_link_fault: bool = False) -> None:
        """The channel is of no more use; what is under way ends with `reason`."""
        if self.lost.is_set():
            return
        self.is_link_fault = is_link_fault
        self.lost_reason = f"{self.name}: {reason}"
        self.lost.set()
        self.on_lost()
        self._data.let_all_pass()
        for pending in (*self._pending.values(), *self._zombies.values()):
            pending.is_lost = True
            self._end(pending, self.lost_reason)
        self._commands.abandon()
        self._pending.clear()
        self._zombies.clear()

    async def _beat(self) -> None:
        """Ping, repeat aborts, and judge the peer."""
        number = 0
        while await self._heartbeat.is_due():
            number += 1
            self._heartbeat.ping_nowait(number)
            for request_id in self._zombies:
                self._control.send_nowait(Abort(request_id))
        self.lose(f"silent for {self._heartbeat.silence_s:.1f} s")

    async def run(self) -> None:
        """Serve the connections until they are lost."""
        async with anyio.create_task_group() as tasks:
            for role in ROLES:
                parts = (self._frames[role], self._greeter, self._heartbeat, self)
                tasks.start_soon(LastingConnection(self.name, role, *parts).keep)
            tasks.start_soon(self._beat)
            tasks.start_soon(self._media.run)
            await self.lost.wait()
            tasks.cancel_scope.cancel()

    def close(self, reason: str = "the channel was closed") -> None:
        """End the channel; requests still under way fail with this reason."""
        self.lose(reason)

    async def leave(self) -> None:
        """End the channel, and tell a healthy engine, which forgets us at once then."""
        is_healthy = not self.lost.is_set()
        self.close()
        if is_healthy:
            bound = anyio.CancelScope(deadline=anyio.current_time() + BYE_S, shield=True)
            with bound, contextlib.suppress(*CONNECTION_ERRORS):
                self._control.send_nowait(Bye())
                await self._control.flush()
