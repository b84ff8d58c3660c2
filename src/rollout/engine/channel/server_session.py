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
)
from rollout.engine.core import Chunk, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.engine.channel.operations import Operation
    from rollout.engine.core import EngineCore
    from rollout.medium import PlacedMedia

logger = logging.getLogger("rollout.engine")

#: Fields of a chunk whose bytes follow each other when chunks are joined.
_PACKED = ("ids", "log_probs", "top_ids", "top_log_probs", "routed_experts")


class _ServerRequest:
    """A request of the session, from its arrival to its last chunk.

    Attributes:
        deadline: Clock time at which it is aborted.
        collecting: Scope of its wait for the media of its prompt, while it lasts.
        is_started: The core has it.
        is_aborted: It was aborted before the core had it.
        waiting: Chunks whose tokens wait for more; each continues the one before it.
    """

    __slots__ = ("collecting", "deadline", "is_aborted", "is_started", "submit", "waiting")

    def __init__(self, submit: Submit) -> None:
        remaining_s = submit.remaining_s
        self.submit = submit
        self.deadline = math.inf if remaining_s is None else anyio.current_time() + remaining_s
        self.collecting: anyio.CancelScope | None = None
        self.is_started = self.is_aborted = False
        self.waiting: list[Chunk] = []


class ServerSession:
    """Serves one driver whose handshake is done."""

    def __init__(
        self,
        core: EngineCore,
        frames: FrameStream[FromClient],
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
        self._is_worker_due = False
        self._media = MediaReceiver(frames, media_cache_bytes)
        self._interval = 1 if getattr(core, "is_gathering", False) else settings.stream_interval
        self._has_waiting_tokens = anyio.Event()

    async def run(self) -> None:
        """Serve until the connection ends; the core is then rid of the session's requests."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, tasks.cancel_scope)
            tasks.start_soon(self._report_load)
            tasks.start_soon(self._flush_waiting_tokens)
            try:
                while True:
                    for message in await self._frames.read():
                        self._handle(message, tasks)
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
        request_id, size = submit.request_id, len(submit.ids)
        if request_id in self._requests:
            self._fail(request_id, f"request id {request_id!r} is in use")
        elif size % 4:
            self._fail(request_id, f"{size} bytes of ids; expected packed int32")
        else:
            request = self._requests[request_id] = _ServerRequest(submit)
            self._queue.append(request)
            self._start_worker(tasks)

    def _abort(self, request: _ServerRequest) -> None:
        """Ask for the end of a request; it is over when its last chunk has been sent."""
        if request.is_started:
            self._core.abort_nowait(request.submit.request_id)
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

    def _start_worker(self, tasks: anyio.abc.TaskGroup) -> None:
        if not self._is_worker_due:
            self._is_worker_due = True
            tasks.start_soon(self._serve_queue, tasks)

    async def _serve_queue(self, tasks: anyio.abc.TaskGroup) -> None:
        """Serve queued requests; another task takes over where one has to wait for the core.

        So a core that answers at once needs no task for each request.
        """
        self._is_worker_due = False
        while self._queue:
            request = self._queue.popleft()
            if self._queue:
                self._start_worker(tasks)
            await self._serve_request(request)

    async def _serve_request(self, request: _ServerRequest) -> None:
        submit = request.submit
        try:
            media: tuple[PlacedMedia, ...] = ()
            if submit.media and not request.is_aborted:
                with anyio.CancelScope() as request.collecting:
                    media = await self._media.collect(submit.request_id, submit.media)
            if request.is_aborted:
                self._send(Chunk(request_id=submit.request_id, finish_reason="abort"))
                return
            request.is_started = True
            wanted = GenerationRequest(
                request_id=submit.request_id,
                prompt_ids=submit.ids,
                sampling=submit.sampling,
                session_id=submit.session_id,
                priority=submit.priority,
                routed_experts=submit.routed_experts,
                routed_experts_start=submit.routed_experts_start,
                media=media,
            )
            await self._generate(request, wanted)
        except Exception as error:
            logger.exception("the core failed on request %s", submit.request_id)
            self._flush(request)
            self._fail(submit.request_id, describe_error(error), fatal=is_fatal(error))
        finally:
            del self._requests[submit.request_id]

    async def _generate(self, request: _ServerRequest, wanted: GenerationRequest) -> None:
        chunks = self._core.generate(wanted)
        is_over = False
        try:
            async for chunk in chunks:
                self._deliver(request, chunk)
                is_over = chunk.finish_reason is not None
                if is_over:
                    return
                await self._frames.wait_for_room()
        finally:
            # Closing it aborts the request; an iterator need not be a generator.
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
            elif not is_over:
                self._core.abort_nowait(wanted.request_id)
        self._flush(request)
        self._fail(wanted.request_id, "the engine ended its answer without saying why")

    # Chunks are coalesced: tokens wait until there are enough of them, or for long enough.

    def _deliver(self, request: _ServerRequest, chunk: Chunk) -> None:
        if chunk.request_id != request.submit.request_id:
            raise ValueError(f"the engine answered for request {chunk.request_id!r}")
        waiting = request.waiting
        if waiting and not _continues(waiting[-1], chunk):
            self._flush(request)
        waiting.append(chunk)
        count = chunk.offset + len(chunk.ids) // 4 - waiting[0].offset
        # One that contradicts itself goes alone: the client refuses it, and none with it.
        if chunk.finish_reason or count >= self._interval or not _is_sound(chunk):
            self._flush(request)
        else:
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
        """Send what waits as one chunk."""
        waiting = request.waiting
        if len(waiting) == 1:
            self._send(waiting[0])
        elif waiting:
            joined = {name: b"".join(getattr(each, name) for each in waiting) for name in _PACKED}
            self._send(msgspec.structs.replace(waiting[-1], offset=waiting[0].offset, **joined))
        waiting.clear()

    def _send(self, chunk: Chunk) -> None:
        try:
            self._frames.send_nowait(chunk)
        except FrameTooLongError as error:
            self._fail(chunk.request_id, f"the answer does not fit: {error}")

    def _fail(self, request_id: str, error: str, *, fatal: bool = False) -> None:
        self._frames.send_nowait(
            Chunk(request_id=request_id, finish_reason="error", error=error, is_fatal=fatal)
        )


def _is_sound(chunk: Chunk) -> bool:
    return len(chunk.log_probs) == len(chunk.ids) and len(chunk.top_log_probs) == len(chunk.top_ids)


def _continues(last: Chunk, chunk: Chunk) -> bool:
    is_next = chunk.offset == last.offset + len(last.ids) // 4
    return is_next and chunk.weight_version == last.weight_version and _is_sound(chunk)
