"""One driver's session in the engine: its requests, as long as its connection lasts.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.channel.coalescing import ChunkCoalescer
from rollout.engine.channel.core_hosting import describe_error, is_fatal
from rollout.engine.channel.framing import CONNECTION_ERRORS, FrameStream
from rollout.engine.channel.media import MediaReceiver
from rollout.engine.channel.messages import (
    Abort,
    ChannelSettings,
    Command,
    CommandDone,
    FrameError,
    FrameTooLongError,
    FromClient,
    LoadReport,
    MediaPart,
    Submit,
    decode_from_client,
)
from rollout.engine.core import Chunk, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.engine.channel.operations import Operation
    from rollout.engine.core import EngineCore

logger = logging.getLogger("rollout.engine")


class _ServerRequest:
    """A request of the session, from its arrival to its last chunk.

    Attributes:
        deadline: Clock time at which it is aborted.
        media: Of its prompt; see `Submit.media`.
        collecting: Scope of its wait for them, while it lasts.
        is_started: The core has it.
        is_aborted: It was aborted before the core had it.
        coalescer: Tokens of its answer that wait for more.
    """

    __slots__ = (
        "coalescer",
        "collecting",
        "deadline",
        "is_aborted",
        "is_started",
        "media",
        "request",
    )

    def __init__(self, submit: Submit, interval: int) -> None:
        self.request = GenerationRequest(
            request_id=submit.request_id,
            prompt_ids=submit.ids,
            sampling=submit.sampling,
            session_id=submit.session_id,
            priority=submit.priority,
            routed_experts=submit.routed_experts,
            routed_experts_start=submit.routed_experts_start,
        )
        remaining_s = submit.remaining_s
        self.deadline = math.inf if remaining_s is None else anyio.current_time() + remaining_s
        self.media = submit.media
        self.collecting: anyio.CancelScope | None = None
        self.is_started = self.is_aborted = False
        self.coalescer = ChunkCoalescer(interval)


class ServerSession:
    """Serves one driver whose handshake is done."""

    def __init__(
        self,
        core: EngineCore,
        frames: FrameStream,
        settings: ChannelSettings,
        carry_out: Callable[[Operation], Awaitable[str]],
        media_cache_bytes: int,
    ) -> None:
        self._core = core
        self._frames = frames
        self._settings = settings
        self._carry_out = carry_out
        self._requests: dict[str, _ServerRequest] = {}
        self._queue: deque[_ServerRequest] = deque()
        self._idle_workers: list[anyio.Event] = []
        self._is_worker_due = False
        self._media = MediaReceiver(frames, media_cache_bytes)
        self._interval = 1 if getattr(core, "is_gathering", False) else settings.stream_interval
        self._has_waiting_tokens = anyio.Event()

    async def run(self) -> None:
        """Serve until the connection ends; the core is then rid of the session's requests.

        Raises:
            OSError, anyio.EndOfStream, anyio.BrokenResourceError: How the connection ended.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, tasks.cancel_scope)
            tasks.start_soon(self._report_load)
            tasks.start_soon(self._flush_waiting_tokens)
            try:
                while True:
                    for payload in await self._frames.read():
                        self._handle(decode_from_client(payload), tasks)
            except CONNECTION_ERRORS as error:
                logger.debug("the connection ended: %r", error)
            tasks.cancel_scope.cancel()

    async def _write(self, session: anyio.CancelScope) -> None:
        try:
            await self._frames.write_forever()
        except CONNECTION_ERRORS as error:
            logger.debug("the connection broke: %r", error)
            session.cancel()

    async def _report_load(self) -> None:
        """Report the load, which is our heartbeat, and abort requests past their deadlines."""
        while True:
            now = anyio.current_time()
            load = msgspec.structs.replace(self._core.load(), measured_at_s=now)
            self._frames.send_nowait(LoadReport(load))
            for request in self._requests.values():
                if request.deadline <= now:
                    request.deadline = math.inf
                    self._abort(request)
            await anyio.sleep(self._settings.heartbeat_s)

    # --- messages

    def _handle(self, message: FromClient, tasks: anyio.abc.TaskGroup) -> None:
        match message:
            case Submit():
                self._submit(message, tasks)
            case Abort(request_id):
                if request_id in self._requests:  # else its last chunk is on its way
                    self._abort(self._requests[request_id])
            case MediaPart():
                self._media.take(message)
            case Command():
                tasks.start_soon(self._run_command, message)
            case _:
                raise FrameError(f"a {type(message).__name__} after the handshake")

    def _submit(self, submit: Submit, tasks: anyio.abc.TaskGroup) -> None:
        request_id = submit.request_id
        if request_id in self._requests:
            self._fail(request_id, f"request id {request_id!r} is in use")
        elif len(submit.ids) % 4:
            self._fail(request_id, f"{len(submit.ids)} bytes of ids; expected packed int32")
        else:
            request = self._requests[request_id] = _ServerRequest(submit, self._interval)
            self._queue.append(request)
            self._wake_worker(tasks)

    def _abort(self, request: _ServerRequest) -> None:
        """Ask for the end of a request; it is over when its last chunk has been sent."""
        if request.is_started:
            self._core.abort_nowait(request.request.request_id)
            return
        request.is_aborted = True
        if request.collecting is not None:
            request.collecting.cancel()

    async def _run_command(self, command: Command) -> None:
        error, fatal, result = "", False, ""
        try:
            result = await self._carry_out(command.operation)
        except Exception as failure:
            logger.exception("%s failed", command.operation)
            error, fatal = describe_error(failure), is_fatal(failure)
        self._frames.send_nowait(CommandDone(command.number, error, fatal, result))

    # --- requests

    def _wake_worker(self, tasks: anyio.abc.TaskGroup) -> None:
        """Have a task serve what is queued, unless one is about to.

        Requests run side by side: a worker wakes another one before it may have to wait within the
        core. A core that answers at once thus needs no task switch for each request.
        """
        if self._is_worker_due:
            return
        self._is_worker_due = True
        if self._idle_workers:
            self._idle_workers.pop().set()
        else:
            tasks.start_soon(self._work, tasks)

    async def _work(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            self._is_worker_due = False
            while self._queue:
                request = self._queue.popleft()
                if self._queue:
                    self._wake_worker(tasks)
                await self._serve_request(request)
            woken = anyio.Event()
            self._idle_workers.append(woken)
            await woken.wait()

    async def _serve_request(self, request: _ServerRequest) -> None:
        request_id = request.request.request_id
        try:
            if request.media and not request.is_aborted:
                with anyio.CancelScope() as request.collecting:
                    request.request.media = await self._media.collect(request_id, request.media)
            if request.is_aborted:
                self._send(Chunk(request_id=request_id, finish_reason="abort"))
                return
            request.is_started = True
            await self._generate(request)
        except Exception as error:
            logger.exception("the core failed on request %s", request_id)
            self._flush(request)
            self._fail(request_id, describe_error(error), fatal=is_fatal(error))
        finally:
            del self._requests[request_id]

    async def _generate(self, request: _ServerRequest) -> None:
        request_id = request.request.request_id
        chunks = self._core.generate(request.request)
        is_over = False
        try:
            async for chunk in chunks:
                self._deliver(request, chunk)
                is_over = chunk.finish_reason is not None
                if is_over:
                    return
                if self._frames.is_full:
                    await self._frames.wait_for_room()
        finally:
            # Closing it aborts the request; an iterator need not be a generator.
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
            elif not is_over:
                self._core.abort_nowait(request_id)
        self._flush(request)
        self._fail(request_id, "the engine ended its answer without saying why")

    def _deliver(self, request: _ServerRequest, chunk: Chunk) -> None:
        if chunk.request_id != request.request.request_id:
            raise ValueError(f"the engine answered for request {chunk.request_id!r}")
        for each in request.coalescer.add(chunk):
            self._send(each)
        if not request.coalescer.is_empty:
            self._has_waiting_tokens.set()

    async def _flush_waiting_tokens(self) -> None:
        """Send what has gathered every `stream_interval_s`: no token waits longer."""
        while True:
            await self._has_waiting_tokens.wait()
            await anyio.sleep(self._settings.stream_interval_s)
            self._has_waiting_tokens = anyio.Event()
            for request in self._requests.values():
                self._flush(request)

    def _flush(self, request: _ServerRequest) -> None:
        for chunk in request.coalescer.flush():
            self._send(chunk)

    def _send(self, chunk: Chunk) -> None:
        try:
            self._frames.send_nowait(chunk)
        except FrameTooLongError as error:
            self._fail(chunk.request_id, f"the answer does not fit: {error}")

    def _fail(self, request_id: str, error: str, *, fatal: bool = False) -> None:
        self._frames.send_nowait(
            Chunk(request_id=request_id, finish_reason="error", error=error, is_fatal=fatal)
        )
