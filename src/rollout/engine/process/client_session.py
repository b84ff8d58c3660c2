"""What an engine's side holds for one client: its connections, its requests, its answers.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.core import Chunk, GenerationRequest
from rollout.engine.process.core_loading import told_of
from rollout.engine.process.running import Running
from rollout.engine.process.session_media import SessionMedia
from rollout.engine.process.work_queue import WorkQueue
from rollout.engine.wire.frames import IDLE_ACK_BYTES
from rollout.engine.wire.operations import carry_out
from rollout.engine.wire.protocol import (
    CONNECTION_ERRORS,
    ROLES,
    Abort,
    Ack,
    Bye,
    Command,
    CommandDone,
    FrameError,
    FrameTooLongError,
    MediaPart,
    Ping,
    Pong,
    SendMedia,
    SendWhole,
    Submit,
    decode_from_client,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import EngineCore
    from rollout.engine.process.media_store import MediaStore
    from rollout.engine.process.session_prefixes import PrefixStore
    from rollout.engine.wire.frames import FrameStream
    from rollout.engine.wire.handshake import ServerHandshake
    from rollout.engine.wire.protocol import FromClient, Role, Terms

logger = logging.getLogger("rollout.engine")

#: Aborts travel on a connection of their own and can overtake their request; this many of those
#: that named nothing are remembered.
EARLY_ABORTS = 4096
#: Tokens whose time comes within this share of the interval leave together.
TOGETHER = 0.1


class ClientSession:
    """One client, over all of its connections, until it leaves or has none for too long."""

    def __init__(
        self,
        core: EngineCore,
        key: str,
        terms: Terms,
        prefixes: PrefixStore,
        media: MediaStore,
    ) -> None:
        self.key = key
        self.requests: dict[str, Running] = {}
        self._core = core
        self._terms = terms
        self._prefixes = prefixes
        self._media = SessionMedia(
            media, lambda *asked: self._frames["data"].send_nowait(SendMedia(*asked))
        )
        self._frames: dict[Role, FrameStream] = {}
        self._connections: dict[Role, tuple[anyio.CancelScope, anyio.Event]] = {}
        self._early_aborts: OrderedDict[str, None] = OrderedDict()
        self._queue = WorkQueue(self._generate)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._over = anyio.Event()
        self._changed = anyio.Event()  # a connection came or went
        self._due = math.inf
        self._earlier = anyio.Event()
        self._gathered = 1 if getattr(core, "is_gathering", False) else terms.stream_interval
        self._arrived_at = 0.0  # what is being taken; to ask for each would cost a microsecond

    # --- life

    async def host(self, first: ServerHandshake, frames: FrameStream) -> None:
        """Serve the client from its first connection to its end."""
        connected = self._changed
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._queue.open(tasks)
                try:
                    tasks.start_soon(self._keep_time)
                    tasks.start_soon(self.serve, first, frames)
                    await connected.wait()
                    await self._until_over()
                finally:  # the other connection is served elsewhere: it must ask for no work now
                    self._tasks = None
                    self._queue.close()
                    tasks.cancel_scope.cancel()
        finally:
            self._prefixes.drop_client(self.key)
            for scope, _ in self._connections.values():  # those that other tasks serve
                scope.cancel()

    async def _until_over(self) -> None:
        while not self._over.is_set():
            changed, is_alone = self._changed, not self._connections
            with anyio.move_on_after(self._terms.reconnect_s if is_alone else math.inf) as scope:
                await changed.wait()
            if scope.cancelled_caught:
                return

    def end(self) -> None:
        """The client is gone for good, or not to be trusted any more."""
        self._over.set()
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # --- connections

    async def serve(self, handshake: ServerHandshake, frames: FrameStream) -> None:
        """Serve one connection of this client until it breaks."""
        role, received = handshake.hello.role, handshake.hello.received
        await self._end_connection(role)
        scope, gone = self._connections[role] = anyio.CancelScope(), anyio.Event()
        self._note_change()
        try:
            with scope:
                if (role in self._frames) != (received is not None):
                    await handshake.refuse("this session has no such connection to continue")
                    return
                await self._welcome(handshake, frames, role)
                await self._converse(role)
        except CONNECTION_ERRORS as error:
            logger.debug("%s connection ended: %r", role, error)
        finally:
            if self._connections.get(role) == (scope, gone):
                del self._connections[role]
            gone.set()
            self._note_change()

    async def _end_connection(self, role: Role) -> None:
        """The client knows better than we do that its old connection is broken."""
        if role in self._connections:
            scope, gone = self._connections[role]
            scope.cancel()
            await gone.wait()

    async def _welcome(self, handshake: ServerHandshake, frames: FrameStream, role: Role) -> None:
        known, received = self._frames.get(role), handshake.hello.received
        await handshake.welcome(self._core.info, known.received if known else 0)
        if known is None or received is None:
            frames.begin(self._terms.max_frame_bytes)
            self._frames[role] = frames
        else:
            try:
                known.continue_on(frames, received)
            except FrameError:
                self.end()
                raise

    async def _converse(self, role: Role) -> None:
        frames = self._frames[role]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, frames, tasks.cancel_scope)
            try:
                while True:
                    payloads = await frames.read()
                    self._arrived_at = anyio.current_time()
                    for payload in payloads:
                        self.take(role, payload)
                    frames.acknowledge_nowait()
            except CONNECTION_ERRORS as error:
                logger.debug("%s connection broke: %r", role, error)
            tasks.cancel_scope.cancel()

    async def _write(self, frames: FrameStream, connection: anyio.CancelScope) -> None:
        try:
            await frames.write_forever()
        except CONNECTION_ERRORS:
            connection.cancel()

    # --- messages

    def take(self, role: Role, payload: bytes | memoryview) -> None:
        """One frame of the client.

        Raises:
            FrameError: It is not one that a client of ours sends; the session is over.
        """
        try:
            self._handle(role, decode_from_client(payload))
        except FrameError:
            self.end()
            raise

    def _handle(self, role: Role, message: FromClient) -> None:
        match message:
            case Submit() if role == "data":
                self._submit(message)
            case MediaPart() if role == "data":
                for running in self._media.take(message):
                    self._queue.add(running)
            case Abort(request_id):
                self.abort(request_id)
            case Ping(number):
                load = self._core.load()
                timed = msgspec.structs.replace(load, measured_at_s=anyio.current_time())
                self._frames[role].send_nowait(Pong(number, timed))
                self._frames[role].acknowledge_nowait(IDLE_ACK_BYTES)
            case Pong():
                pass  # that it could be sent was the point
            case Ack(received):
                self._frames[role].confirmed(received)
            case Command() if self._tasks is not None:
                self._tasks.start_soon(self._carry_out, message, self._frames[role])
            case Bye():
                self.end()
            case _:
                raise FrameError(f"a {type(message).__name__} after the handshake")

    def _submit(self, message: Submit) -> None:
        request_id = message.request_id
        if request_id in self.requests:
            self._refuse(request_id, f"request id {request_id!r} is in use")
            return
        if len(message.ids) % 4:
            self._refuse(request_id, f"{len(message.ids)} bytes of ids; expected packed int32")
            return
        if request_id in self._early_aborts:
            del self._early_aborts[request_id]
            self._send(Chunk(request_id=request_id, finish_reason="abort"))
            return
        prompt: bytes | Callable[[], bytes] | None = message.ids
        if message.has_prefix:
            prompt = self._prefixes.prompt_of(
                self._prefix_key(message.session_id),
                request_id,
                message.kept,
                message.kept_sum,
                message.ids,
            )
            if prompt is None:
                self._frames["data"].send_nowait(SendWhole(request_id))
                return
        elif message.kept:
            raise FrameError("a request builds on a prefix that it does not belong to")
        assert prompt is not None
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt,
            sampling=message.sampling,
            session_id=message.session_id,
            priority=message.priority,
            routed_experts=message.routed_experts,
            routed_experts_start=message.routed_experts_start,
        )
        deadline = math.inf
        if message.remaining_s is not None:
            deadline = self._arrived_at + message.remaining_s
            if deadline < self._due:
                self._be_awake_at(deadline)
        running = self.requests[request_id] = Running(request, deadline, message.has_prefix)
        if not message.media or self._media.is_ready(running, message.media):
            self._queue.add(running)

    def _prefix_key(self, session_id: str) -> tuple[str, str]:
        return self.key, session_id

    def abort(self, request_id: str) -> None:
        """Ask the core for the end of a request; it is gone when its last chunk has been sent."""
        running = self.requests.get(request_id)
        if running is None:
            self._early_aborts[request_id] = None
            if len(self._early_aborts) > EARLY_ABORTS:
                self._early_aborts.popitem(last=False)
        elif running.is_started:
            self._core.abort_nowait(request_id)
        elif self._media.is_waiting(request_id):
            self._media.forget(request_id)
            del self.requests[request_id]
            self._send(Chunk(request_id=request_id, finish_reason="abort"))
        else:
            running.is_aborted = True

    # --- work

    async def _generate(self, running: Running) -> None:
        request_id = running.request.request_id
        frames = self._frames["data"]
        try:
            if running.is_aborted:
                self._deliver(running, Chunk(request_id=request_id, finish_reason="abort"))
                return
            running.is_started = True
            chunks = self._core.generate(running.request)
            try:
                async for chunk in chunks:
                    self._deliver(running, chunk)
                    if chunk.finish_reason is not None:
                        return
                    if frames.is_full:
                        await frames.wait_for_room(4 * self._terms.stream_interval)
            finally:
                await chunks.aclose()  # type: ignore[attr-defined]
            self._refuse(request_id, "the engine ended its answer without saying why")
        except Exception as error:
            logger.exception("the core failed on request %s", request_id)
            self._release(running)
            text, is_fatal = told_of(error)
            self._refuse(request_id, text, is_fatal=is_fatal)
        finally:
            del self.requests[request_id]

    # --- answers

    def _deliver(self, running: Running, chunk: Chunk) -> None:
        if chunk.request_id != running.request.request_id:
            raise ValueError(f"the engine answered for request {chunk.request_id!r}")
        if running.has_prefix and chunk.ids and chunk.offset == running.answered:
            running.answered += len(chunk.ids) // 4
            self._prefixes.add(
                self._prefix_key(running.request.session_id), chunk.request_id, chunk.ids
            )
        for each in running.gather(chunk, self._gathered):
            self._send(each)
        if running.buffered and running.buffered_until == math.inf:
            running.buffered_until = anyio.current_time() + self._terms.stream_interval_s
            if running.buffered_until < self._due:
                self._be_awake_at(running.buffered_until)

    def _release(self, running: Running) -> None:
        """Send the tokens that waited for more."""
        for chunk in running.take_buffered():
            self._send(chunk)

    def _send(self, chunk: Chunk) -> None:
        try:
            self._frames["data"].send_nowait(chunk)
        except FrameTooLongError as error:
            self._refuse(chunk.request_id, f"the answer does not fit: {error}")

    def _refuse(self, request_id: str, error: str, *, is_fatal: bool = False) -> None:
        chunk = Chunk(request_id=request_id, finish_reason="error", error=error, is_fatal=is_fatal)
        self._frames["data"].send_nowait(chunk)

    async def _carry_out(self, command: Command, frames: FrameStream) -> None:
        error, is_fatal, result = "", False, ""
        try:
            result = await carry_out(self._core, command.operation)
        except Exception as failure:
            logger.exception("%s failed", command.operation)
            error, is_fatal = told_of(failure)
        frames.send_nowait(CommandDone(command.number, error, is_fatal, result))

    # --- time

    def _be_awake_at(self, time: float) -> None:
        self._due = min(time, self._due)
        self._earlier.set()

    async def _keep_time(self) -> None:
        """Heartbeats, deadlines, and tokens that have waited long enough.

        A heartbeat of ours lets the system notice that a client's machine is gone. Silence says
        nothing: a client may be busy, and its socket is open.
        """
        beat, number = anyio.current_time(), 0
        while True:
            now = anyio.current_time()
            soon = now + TOGETHER * self._terms.stream_interval_s
            if now >= beat:
                beat, number = now + self._terms.heartbeat_s, number + 1
                for role in ROLES:
                    if role in self._connections and role in self._frames:
                        self._frames[role].send_nowait(Ping(number))
            self._due = math.inf
            for running in list(self.requests.values()):
                if running.buffered_until <= soon:
                    self._release(running)
                if running.deadline <= now:
                    running.deadline = math.inf
                    self.abort(running.request.request_id)
                self._due = min(self._due, running.buffered_until, running.deadline)
            self._earlier = anyio.Event()
            with anyio.CancelScope(deadline=min(beat, self._due)):
                await self._earlier.wait()
