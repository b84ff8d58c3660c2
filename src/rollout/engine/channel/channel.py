"""The driver's end of the connection to one engine: one session, from its handshake to its loss."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import anyio

from rollout.engine.channel.framing import CONNECTION_ERRORS, FrameStream
from rollout.engine.channel.handshake import CONNECT_S, authenticate_server
from rollout.engine.channel.media import MediaSender
from rollout.engine.channel.messages import (
    Abort,
    ChannelSettings,
    ClientExpectations,
    Command,
    CommandDone,
    FrameError,
    FrameTooLongError,
    FromServer,
    LoadReport,
    SendMedia,
    Submit,
    server_messages,
)
from rollout.engine.core import Chunk, EngineInfo, EngineLoad
from rollout.errors import ChannelError, EngineError
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from rollout.engine.channel.messages import Operation
    from rollout.medium import PlacedMedia

logger = logging.getLogger("rollout.engine")

OpenStream = Callable[[], Awaitable["ByteStream"]]
#: Why a channel was lost: its connection broke, fell silent or carried nonsense; a request or an
#: operation broke the engine; the engine's process ended; or the driver closed it.
LossCause = Literal["connection", "request", "operation", "process", "closed"]


class ChannelRequest(Protocol):
    """What a channel needs of the record of a request."""

    @property
    def media(self) -> tuple[PlacedMedia, ...]:
        """The images and videos of its prompt, in order."""

    def take(self, chunk: Chunk) -> bool:
        """Take a chunk; False where it is malformed, and the engine is to abort the request."""

    def end(self, lost_reason: str) -> None:
        """The engine no longer works on it: called once, after its last chunk (with "").

        Where the channel is lost first, `lost_reason` says why.
        """


class Channel:
    """A session with one engine; made by `connect_channel`.

    Attributes:
        info: The engine's facts from the handshake.
        load: What the engine last reported.
        lost: Fires when the session is over; `lost_reason` and `lost_cause` then say why.
        on_lost: Called at that moment, before any request learns of it.
        on_load: Called with each load report.
    """

    def __init__(
        self,
        name: str,
        frames: FrameStream[FromServer],
        info: EngineInfo,
        settings: ChannelSettings,
    ) -> None:
        self.name, self.info, self.load = name, info, EngineLoad()
        self.lost = anyio.Event()
        self.lost_reason = ""
        self.lost_cause: LossCause | None = None
        self.on_lost: Callable[[], object] = lambda: None
        self.on_load: Callable[[EngineLoad], object] = lambda _: None
        self._frames = frames
        self._settings = settings
        self._requests: dict[str, ChannelRequest] = {}
        self._aborting: dict[str, None] = {}
        self._commands: dict[int, tuple[anyio.Event, list[CommandDone]]] = {}
        self._numbers = itertools.count()
        self._media = MediaSender(frames)
        self._mark = frames.signs_of_life  # a step ago
        self._silent_s = 0.0

    @property
    def aborting(self) -> int:
        """Aborted requests whose last chunk has not come."""
        return len(self._aborting)

    @property
    def media_bytes(self) -> int:
        """Bytes of images and videos that the engine was sent."""
        return self._media.sent_bytes

    async def wait_for_room(self) -> None:
        """Return when a request may be sent, or the channel is lost; mostly at once."""
        await self._frames.wait_for_room()

    def submit_nowait(self, submit: Submit, request: ChannelRequest) -> None:
        """Send a request; `request` takes its chunks, and is ended exactly once.

        On a channel that is lost it is ended at once.

        Raises:
            ChannelError: It does not fit into a frame: nothing was sent, and `request` is not
                ended.
        """
        if self.lost_cause is not None:
            request.end(self.lost_reason)
            return
        try:
            self._frames.send_nowait(submit)
        except FrameTooLongError as error:
            raise ChannelError(f"{self.name}: the request does not fit: {error}") from None
        self._requests[submit.request_id] = request

    def abort_nowait(self, request_id: str) -> None:
        """Have the engine end a request, which still takes its last tokens.

        The abort is sent again at each load report until the last chunk has come. A request that
        is not in flight is ignored.
        """
        if request_id in self._requests:
            self._aborting[request_id] = None
            self._frames.send_nowait(Abort(request_id))

    async def command(self, operation: Operation, *, interrupts: bool = False) -> str:
        """Have the engine do something; returns its result when it is done.

        Cancellation leaves the engine to finish it.

        Args:
            interrupts: See `Command`.

        Raises:
            EngineError: It could not, and is as it was.
            ChannelError: The channel was lost.
        """
        if self.lost_cause is None:
            number, done, answers = next(self._numbers), anyio.Event(), list[CommandDone]()
            self._commands[number] = done, answers
            try:
                self._frames.send_nowait(Command(number, operation, interrupts))
                await done.wait()
            except FrameTooLongError as error:
                raise EngineError(f"{self.name}: the operation does not fit: {error}") from None
            finally:
                del self._commands[number]
            if answers:
                if answers[0].error:
                    raise EngineError(f"{self.name}: {answers[0].error}")
                return answers[0].result
        raise ChannelError(self.lost_reason)

    def lose(self, reason: str, cause: LossCause) -> None:
        """End the session; requests and commands in flight end with `reason`."""
        if self.lost_cause is not None:
            return
        self.lost_reason, self.lost_cause = f"{self.name}: {reason}", cause
        self.lost.set()
        self.on_lost()
        self._frames.discard_outgoing()
        requests, self._requests = self._requests, {}
        self._aborting.clear()
        for request in requests.values():
            request.end(self.lost_reason)
        for done, _ in self._commands.values():
            done.set()

    def close(self, reason: str = "the channel was closed") -> None:
        """End the session because the driver wants it."""
        self.lose(reason, "closed")

    async def run(self) -> None:
        """Read and write until the session is lost."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._converse)
            tasks.start_soon(self._media.run)
            await self.lost.wait()
            tasks.cancel_scope.cancel()

    async def _converse(self) -> None:
        try:
            await self._frames.run(self._handle)
        except anyio.EndOfStream:
            self.lose("the engine closed the connection", "connection")
        except CONNECTION_ERRORS as error:
            self.lose(f"the connection broke ({type(error).__name__}: {error})", "connection")

    def count_silence(self, step_s: float) -> None:
        """Count a step in which nothing arrived and nothing was handled; see `watch_silence`."""
        mark = self._frames.signs_of_life
        self._silent_s = self._silent_s + step_s if mark == self._mark else 0.0
        self._mark = mark
        if self._silent_s >= self._settings.heartbeat_timeout_s:
            self.lose(f"silent for {self._silent_s:.1f} s", "connection")

    def _handle(self, message: FromServer) -> None:
        if self.lost_cause is not None:
            return
        match message:
            case Chunk():
                self._take_chunk(message)
            case LoadReport(load) if math.isfinite(load.kv_used + load.measured_at_s):
                self.load = load
                self.on_load(load)
                for request_id in self._aborting:
                    self._frames.send_nowait(Abort(request_id))
            case CommandDone():
                self._finish_command(message)
            case SendMedia(request_id, digests):
                request = self._requests.get(request_id)
                self._media.queue(request.media if request else (), digests)
            case _:
                raise FrameError(f"a {type(message).__name__} after the handshake")

    def _take_chunk(self, chunk: Chunk) -> None:
        if chunk.is_fatal:
            self.lose(f"the engine is broken: {chunk.error}", "request")
            return
        request_id = chunk.request_id
        request = self._requests.get(request_id)
        if request is None:
            return  # of a request that has ended: the engine repeats itself
        if not request.take(chunk):
            self.abort_nowait(request_id)
        if chunk.finish_reason is not None:
            del self._requests[request_id]
            self._aborting.pop(request_id, None)
            request.end("")

    def _finish_command(self, answer: CommandDone) -> None:
        if answer.is_fatal:
            self.lose(f"the engine is broken: {answer.error}", "operation")
        elif answer.number in self._commands:  # else its caller was cancelled
            done, answers = self._commands[answer.number]
            answers.append(answer)
            done.set()


async def watch_silence(channels: Collection[Channel], settings: ChannelSettings) -> None:
    """Lose sessions of which nothing has been heard for `heartbeat_timeout_s`, until cancelled.

    Silence is counted in steps in which nothing arrived and nothing was handled. Where our own loop
    was blocked, however long, that is one step, and in the next one the reader takes what has
    arrived meanwhile. One task counts for all: a timer for each of thousands would cost more than
    their reports.
    """
    step_s = min(settings.heartbeat_s, settings.heartbeat_timeout_s) / 2
    while True:
        await anyio.sleep(step_s)
        for channel in tuple(channels):
            channel.count_silence(step_s)


@asynccontextmanager
async def connect_channel(
    name: str,
    open_stream: OpenStream,
    secret: bytes,
    *,
    settings: ChannelSettings | None = None,
    expectations: ClientExpectations | None = None,
    timeout_s: float = CONNECT_S,
    watched: dict[Channel, None] | None = None,
) -> AsyncIterator[Channel]:
    """Connect, shake hands, and serve one session until the block is left.

    A session that is lost meanwhile does not end the block: await `Channel.lost`.

    Args:
        open_stream: Opens a byte stream to the engine's server.
        settings: How the channel is run; None takes the defaults.
        expectations: What the engine must agree with.
        timeout_s: For the connection and the handshake.
        watched: Gets the channel while the block lasts, where one task of the caller's watches the
            silence of many; None: this one is watched by itself.

    Raises:
        ChannelError: No connection, or the handshake failed.
    """
    settings = settings or ChannelSettings()
    frames: FrameStream[FromServer] | None = None
    try:
        try:
            with anyio.fail_after(timeout_s):
                frames = FrameStream(await open_stream(), server_messages)
                info = await authenticate_server(
                    frames, secret, settings, expectations or ClientExpectations()
                )
        except (*CONNECTION_ERRORS, TimeoutError) as error:
            text = str(error) or type(error).__name__
            raise ChannelError(f"{name}: no channel to the engine: {text}") from error
        frames.max_frame_bytes = settings.max_frame_bytes
        channel = Channel(name, frames, info, settings)
        async with open_task_group() as tasks:
            tasks.start_soon(channel.run)
            if watched is None:
                watched = {}
                tasks.start_soon(watch_silence, watched, settings)
            watched[channel] = None
            try:
                yield channel
            finally:
                del watched[channel]
                channel.close()
    finally:
        if frames is not None:
            await frames.aclose()
