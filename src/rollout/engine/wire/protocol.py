"""The messages between driver and engine.

A frame is ``u32 length (little-endian) | msgpack``; messages are tagged, array-like Structs.
docs/engines.md says what each side promises.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import msgspec

from rollout.engine.core import Chunk, EngineInfo, EngineLoad, Natural, SamplingParams
from rollout.engine.wire.operations import Operation
from rollout.medium import Media

if TYPE_CHECKING:
    from collections.abc import Callable

PROTOCOL_VERSION = 3
Role = Literal["data", "control"]
ROLES: tuple[Role, ...] = ("control", "data")
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver wants of a channel; the engine's side keeps to it too.

    Attributes:
        heartbeat_s: Between two heartbeats, in either direction.
        heartbeat_timeout_s: Silence after which the driver gives the engine up.
        reconnect_s: How long a broken connection may be replaced, and how long the engine keeps
            the requests of a driver that has none; 0 never waits.
        max_frame_bytes: Longest message.
        stream_interval: Tokens gathered before a partial answer is sent.
        stream_interval_s: How long a token waits at most to be sent.
    """

    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    heartbeat_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    reconnect_s: Seconds = 5.0
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=4096, lt=2**32)] = 256 * 1024 * 1024
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] = 1
    stream_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 0.25


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver takes for granted; an engine that knows better refuses it.

    Attributes:
        vocab_size: Ids that its tokenizer can produce; the model may have more. 0: unknown.
        eos_ids: Its tokenizer's, and those that the model's files name: at least one of them must
            end the engine's generations. Empty: unknown.
        fingerprint: Of the model, where it can tell what the engine's own must be. Empty: unknown.
        remedy: What of the configuration to look at where they differ, for people; may be empty.
    """

    vocab_size: Natural = 0
    eos_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    remedy: str = ""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The server sends first, so that its version is known whatever the client sends."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The client's answer.

    Attributes:
        session: Ties a client's two connections together, and later ones to the first.
        received: None on a session's first connection of this role; else the bytes that arrived
            over the earlier ones, in whole frames.
    """

    version: int
    role: Role
    session: str
    nonce: bytes
    proof: bytes
    terms: Terms = Terms()
    facts: DriverFacts = DriverFacts()
    received: Natural | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The server's proof, the facts about its engine, and the bytes that it has of the client."""

    proof: bytes
    info: EngineInfo
    received: Natural = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Why the server closes this connection."""

    reason: str


class Submit(msgspec.Struct, array_like=True, tag=10, gc=False):
    """A request for tokens; its prompt may begin with what the server has of this trajectory.

    Attributes:
        ids: int32 little-endian: the prompt from index `kept` on.
        kept: Tokens of the trajectory's prefix that come before.
        kept_sum: CRC-32 of those.
        has_prefix: The prompt is the beginning of the next one: worth keeping.
        remaining_s: Until its deadline, from its arrival: clocks differ.
        media: Of the images and videos in the prompt, in order: digest, position of the first
            placeholder, and ids up to the last one. The server asks for those that it lacks.
    """

    request_id: str
    ids: bytes
    sampling: SamplingParams
    session_id: str = ""
    priority: int = 0
    kept: Natural = 0
    kept_sum: Natural = 0
    has_prefix: bool = False
    remaining_s: Seconds | None = None
    routed_experts: bool = False
    routed_experts_start: Natural = 0
    media: tuple[tuple[str, Natural, Natural], ...] = ()


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """End this request; its last chunk follows on the data connection."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A heartbeat; asks for a `Pong` with the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The peer is alive; from an engine, this is its load."""

    number: int
    load: EngineLoad = EngineLoad()


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Bytes that have arrived over this role's connections, in whole frames."""

    received: Natural


class SendWhole(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The prefix that a request builds on is not there: it was not taken, send it whole."""

    request_id: str


class SendMedia(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """A request names media that are not there: send them. It is begun when they have come."""

    request_id: str
    digests: tuple[str, ...]


class MediaPart(msgspec.Struct, frozen=True, array_like=True, tag=24, kw_only=True):
    """A part of the content of a medium that was asked for; its parts come in order.

    Attributes:
        medium: On the first part, all but the content.
        is_last: Nothing follows.
    """

    digest: str
    content: bytes
    medium: Media | None = None
    is_last: bool = False


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The client leaves for good."""


class Command(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """Do this; a `CommandDone` with the same number answers."""

    number: Natural
    operation: Operation


class CommandDone(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """It is done, with what came of it, or why it was not.

    Attributes:
        is_fatal: And the engine is of no more use.
    """

    number: Natural
    error: str = ""
    is_fatal: bool = False
    result: str = ""


FromServer = (
    Challenge | Welcome | Refused | Chunk | Pong | Ping | Ack | SendWhole | SendMedia | CommandDone
)
FromClient = Hello | Submit | Abort | Ping | Pong | Ack | Bye | Command | MediaPart


class FrameError(OSError):
    """The peer sent what is no frame, or no message."""


class CutError(FrameError):
    """The connection ended in the middle of a frame; another one may continue it."""


class FrameTooLongError(Exception):
    """A message of ours is past the maximum; nothing of it has been sent."""


#: What reading, writing or decoding raises when a connection is of no more use.
CONNECTION_ERRORS = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    OSError,
)
#: What a decoder raises on hostile bytes; deep nesting and huge numbers among them.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, MemoryError)

encoder = msgspec.msgpack.Encoder()
_decode_from_server: Callable[[Any], FromServer] = msgspec.msgpack.Decoder(FromServer).decode
_decode_from_client: Callable[[Any], FromClient] = msgspec.msgpack.Decoder(FromClient).decode


def decode_from_server(payload: bytes | memoryview) -> FromServer:
    """The message in a frame; a `FrameError` whatever is wrong with it."""
    try:
        return _decode_from_server(payload)
    except _DECODE_ERRORS as error:
        raise FrameError(f"not a message: {error}") from None


def decode_from_client(payload: bytes | memoryview) -> FromClient:
    """The message in a frame; a `FrameError` whatever is wrong with it."""
    try:
        return _decode_from_client(payload)
    except _DECODE_ERRORS as error:
        raise FrameError(f"not a message: {error}") from None
