"""One driver's session in the engine: its requests, as long as its connection lasts.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.channel.core_hosting import describe_error, is_fatal
from rollout.engine.channel.framing import CONNECTION_ERRORS, Notifier
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
    Sleep,
    Submit,
    WakeUp,
)
from rollout.engine.core import INTERRUPTED, TAGS_OF_LEVEL, Chunk, GenerationRequest
from rollout.scopes import open_task_group
from rollout.seeds import RequestIds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from rollout.engine.channel.framing import FrameStream
    from rollout.engine.channel.messages import Operation
    from rollout.engine.core import EngineCore
    from rollout.medium import PlacedMedia

logger = logging.getLogger("rollout.engine")

#: Fields of a chunk whose bytes follow each other when chunks are joined.
_PACKED = ("ids", "log_probs", "top_ids", "top_log_probs", "routed_experts")


@dataclass(eq=False, slots=True)
class _ServerRequest:
    """A request of the session, from its arrival to its last chunk.

    Attributes:
        deadline: Clock time at which it is aborted.
        media: Of its prompt, once they have come.
        idle: Scope of its wait for media, or for the end of an operation, while it lasts.
        core_id: Its id at the core; empty while the core does not have it.
        is_aborted: Its end was asked for.
        is_interrupted: It was cut off for an operation.
        ids: Those sampled so far, packed.
        expert_bytes: Of the routed experts so far.
        waiting: Chunks whose tokens wait for more; each continues the one before it.
    """

    submit: Submit
    deadline: float
    media: tuple[PlacedMedia, ...] = ()
    idle: anyio.CancelScope | None = None
    core_id: str = ""
    is_aborted: bool = False
    is_interrupted: bool = False
    ids: bytearray = field(default_factory=bytearray)
    expert_bytes: int = 0
    waiting: list[Chunk] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many ids there are."""
        return len(self.ids) // 4


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
        self._tasks: TaskGroup
        self._requests: dict[str, _ServerRequest] = {}
        self._media = MediaReceiver(frames, media_cache_bytes)
        self._interval = 1 if getattr(core, "is_gathering", False) else settings.stream_interval
        self._has_waiting_tokens = Notifier()
        self._ids = RequestIds()
        self._interrupting = 0  # operations under way that no request may run beside
        self._released: frozenset[str] = frozenset()  # memory, by tags: none runs without it
        self._parked, self._resumed = Notifier(), Notifier()

    async def run(self) -> None:
        """Serve until the connection ends; the core is then rid of the session's requests.

        What the core itself raises where no request or operation is at fault propagates.
        """
        async with open_task_group() as self._tasks:
            self._tasks.start_soon(self._report_load)
            self._tasks.start_soon(self._flush_waiting_tokens)
            try:
                await self._frames.run(self._handle)
            except CONNECTION_ERRORS as error:
                logger.debug("the connection ended: %r", error)

    async def _report_load(self) -> None:
        """Report the load, which is our heartbeat, and abort requests past their deadlines.

        An abort that an operation waits for is repeated.
        """
        while True:
            now = anyio.current_time()
            load = msgspec.structs.replace(self._core.load(), measured_at_s=now)
            self._frames.send_nowait(LoadReport(load))
            for request in self._requests.values():
                if request.deadline <= now and not self._is_held:
                    request.deadline = math.inf
                    self._abort(request)
                elif request.is_interrupted and request.core_id:
                    self._core.abort_nowait(request.core_id)
            await anyio.sleep(self._settings.heartbeat_s)

    def _handle(self, message: FromClient) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                if request_id in self._requests:  # else its last chunk is on its way
                    self._abort(self._requests[request_id])
            case MediaPart():
                self._media.take(message)
            case Command():
                self._tasks.start_soon(self._run_command, message)
            case _:
                raise FrameError(f"a {type(message).__name__} after the handshake")

    def _submit(self, submit: Submit) -> None:
        request_id, size = submit.request_id, len(submit.ids)
        if request_id in self._requests:
            self._fail(request_id, f"request id {request_id!r} is in use")
        elif size % 4:
            self._fail(request_id, f"{size} bytes of ids; expected packed int32")
        else:
            left_s = math.inf if submit.remaining_s is None else submit.remaining_s
            deadline = anyio.current_time() + left_s
            request = self._requests[request_id] = _ServerRequest(submit, deadline)
            self._tasks.start_soon(self._serve_request, request)

    def _abort(self, request: _ServerRequest) -> None:
        """Ask for the end of a request; it is over when its last chunk has been sent."""
        request.is_aborted = True
        if request.core_id:
            self._core.abort_nowait(request.core_id)
        elif request.idle is not None:
            request.idle.cancel()

    async def _run_command(self, command: Command) -> None:
        operation = command.operation
        self._interrupting += command.interrupts
        try:
            if command.interrupts:
                await self._interrupt_requests()
            result = await self._carry_out(operation)
            answer = CommandDone(command.number, result=result)
            if isinstance(operation, Sleep):
                self._released |= frozenset(TAGS_OF_LEVEL[operation.level])
        except Exception as failure:
            logger.exception("%s failed", operation)
            answer = CommandDone(command.number, describe_error(failure), is_fatal(failure))
        if isinstance(operation, WakeUp):  # where that failed, the core refuses its requests
            self._released -= frozenset(operation.tags)
        self._interrupting -= command.interrupts
        if not self._is_held:
            self._resumed.notify()
        self._frames.send_nowait(answer)

    @property
    def _is_held(self) -> bool:
        """Whether no request of the session may run."""
        return self._interrupting > 0 or bool(self._released)

    async def _interrupt_requests(self) -> None:
        """Cut off the session's requests; returns when the core has none of them."""
        for request in self._requests.values():
            if request.core_id:
                request.is_interrupted = True
                self._core.abort_nowait(request.core_id)
        while any(request.core_id for request in self._requests.values()):
            await self._parked.wait()

    async def _serve_request(self, request: _ServerRequest) -> None:
        """Have the core answer it; again, from its tokens, where it was cut off meanwhile."""
        submit, is_over = request.submit, False
        try:
            while not is_over:
                if (submit.media or self._is_held) and not request.is_aborted:
                    with anyio.CancelScope() as request.idle:
                        await self._wait_to_run(request)
                    request.idle = None
                if request.is_aborted:
                    rid, count = submit.request_id, request.count
                    self._send(Chunk(request_id=rid, offset=count, finish_reason="abort"))
                    return
                is_over = await self._generate(request)
        except Exception as error:
            logger.exception("the core failed on request %s", submit.request_id)
            self._flush(request)
            self._fail(submit.request_id, describe_error(error), fatal=is_fatal(error))
        finally:
            del self._requests[submit.request_id]

    async def _wait_to_run(self, request: _ServerRequest) -> None:
        """Return when its media have come, and no operation holds it; that time does not count."""
        submit = request.submit
        if submit.media and not request.media:
            request.media = await self._media.collect(submit.request_id, submit.media)
        began = anyio.current_time()
        while self._is_held:
            await self._resumed.wait()
        request.deadline += anyio.current_time() - began

    def _build_request(self, request: _ServerRequest) -> GenerationRequest:
        """What is left of it to be generated, under an id that the core does not know."""
        submit, sampling, count = request.submit, request.submit.sampling, request.count
        start = submit.routed_experts_start
        if count:
            sampling = msgspec.structs.replace(
                sampling, max_new_tokens=sampling.max_new_tokens - count
            )
        if request.expert_bytes:
            layers, top_k = self._core.info.capabilities.expert_shape or (1, 1)
            start += request.expert_bytes // (2 * layers * top_k)
        return GenerationRequest(
            request_id=self._ids.new() if request.is_interrupted else submit.request_id,
            prompt_ids=submit.ids + request.ids,
            sampling=sampling,
            session_id=submit.session_id,
            priority=submit.priority,
            routed_experts=submit.routed_experts,
            routed_experts_start=start,
            media=request.media,
        )

    async def _generate(self, request: _ServerRequest) -> bool:
        """Have the core answer; False where the request was cut off, and is to continue."""
        wanted, start = self._build_request(request), request.count
        request.core_id, request.is_interrupted = wanted.request_id, False
        chunks = self._core.generate(wanted)
        is_over = False
        try:
            async for answer in chunks:
                is_over = answer.finish_reason is not None
                count = request.count
                chunk = self._adopt(request, answer, start)
                self._deliver(request, chunk, is_next=chunk.offset == count)
                if is_over:
                    return chunk.finish_reason is not None
                await self._frames.wait_for_room()
        finally:
            # Closing it aborts the request; an iterator need not be a generator.
            close = getattr(chunks, "aclose", None)
            try:
                if close is not None:
                    await close()
                elif not is_over:
                    self._core.abort_nowait(wanted.request_id)
            finally:
                request.core_id = ""
                self._parked.notify()
        self._flush(request)
        self._fail(request.submit.request_id, "the engine ended its answer without saying why")
        return True

    def _adopt(self, request: _ServerRequest, chunk: Chunk, start: int) -> Chunk:
        """A chunk of the core's as one of the request, `start` ids of which came before."""
        if chunk.request_id != request.core_id:
            raise ValueError(f"the engine answered for request {chunk.request_id!r}")
        submit = request.submit
        if request.core_id != submit.request_id:
            chunk = msgspec.structs.replace(
                chunk,
                request_id=submit.request_id,
                offset=start + chunk.offset,
                cached_tokens=min(chunk.cached_tokens, len(submit.ids) // 4),
            )
        if chunk.offset == request.count:
            request.ids += chunk.ids
            request.expert_bytes += len(chunk.routed_experts)
        is_cut_off = request.is_interrupted and not request.is_aborted
        if not is_cut_off or chunk.finish_reason != "abort":
            return chunk
        if submit.sampling.find_stateful_field():
            return msgspec.structs.replace(chunk, error=INTERRUPTED)
        last_id = int.from_bytes(request.ids[-4:], "little")
        reason = self._core.info.find_ending(
            submit.sampling, len(submit.ids) // 4, request.count, last_id
        )
        return msgspec.structs.replace(chunk, finish_reason=reason)

    # Chunks are coalesced: tokens wait until there are enough of them, or for long enough.

    def _deliver(self, request: _ServerRequest, chunk: Chunk, *, is_next: bool) -> None:
        waiting = request.waiting
        if waiting and not (is_next and _continues(waiting[-1], chunk)):
            self._flush(request)
        waiting.append(chunk)
        count = chunk.offset + len(chunk.ids) // 4 - waiting[0].offset
        # One that contradicts itself, or says something again, goes alone: the client refuses it
        # or drops it, and none with it.
        is_whole = is_next and _is_sound(chunk)
        if chunk.finish_reason or count >= self._interval or not is_whole:
            self._flush(request)
        else:
            self._has_waiting_tokens.notify()

    async def _flush_waiting_tokens(self) -> None:
        """Send what has gathered every `stream_interval_s`: no token waits longer."""
        while True:
            await self._has_waiting_tokens.wait()
            await anyio.sleep(self._settings.stream_interval_s)
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
            if chunk.request_id in self._requests:  # of which nobody waits for more
                self._abort(self._requests[chunk.request_id])

    def _fail(self, request_id: str, error: str, *, fatal: bool = False) -> None:
        self._frames.send_nowait(
            Chunk(request_id=request_id, finish_reason="error", error=error, is_fatal=fatal)
        )


def _is_sound(chunk: Chunk) -> bool:
    return len(chunk.log_probs) == len(chunk.ids) and len(chunk.top_log_probs) == len(chunk.top_ids)


def _continues(last: Chunk, chunk: Chunk) -> bool:
    is_next = chunk.offset == last.offset + len(last.ids) // 4
    return is_next and chunk.weight_version == last.weight_version and _is_sound(chunk)
