"""The messages between driver and engine: tagged, array-like msgspec Structs.

docs/engines.md says what each side promises.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rollout.engine.core import Chunk, EngineInfo, EngineLoad, Natural, SamplingParams
from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.medium import Media

PROTOCOL_VERSION = 5
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ChannelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a driver wants a channel to be run; the engine keeps to it too.

    Attributes:
        heartbeat_s: Between two load reports of the engine.
        heartbeat_timeout_s: Silence after which the driver gives the connection up.
        reconnect_s: How long the driver tries to connect anew before it restarts the engine.
        max_frame_bytes: Longest message.
        stream_interval: Tokens coalesced before a partial answer is sent.
        stream_interval_s: How long a token waits at most to be sent.
    """

    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    heartbeat_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    reconnect_s: Seconds = 5.0
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=4096, lt=2**32)] = 256 * 1024 * 1024
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] = 1
    stream_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 0.25


class ClientExpectations(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver assumes about the model; an engine that serves another one refuses it.

    Attributes:
        vocab_size: Ids that its tokenizer can produce; the model may have more. 0: unknown.
        eos_ids: Its tokenizer's, and those that the model's files name: at least one of them must
            end the engine's generations. Empty: unknown.
        fingerprint: Of the model, where it can tell what the engine's own must be. Empty: unknown.
        remedy: What of the configuration to change where they differ, for people; may be empty.
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
    """The client's answer, with its proof of the secret over both nonces."""

    version: int
    nonce: bytes
    proof: bytes
    settings: ChannelSettings = ChannelSettings()
    expectations: ClientExpectations = ClientExpectations()


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The server's proof, and the facts about its engine."""

    proof: bytes
    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Why the server closes this connection."""

    reason: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """A request for tokens.

    Attributes:
        ids: The whole prompt, int32 little-endian.
        remaining_s: Until its deadline, from its arrival: clocks differ. None: it has none.
        media: Of the images and videos in the prompt, in order: digest, position of the first
            placeholder, and ids up to the last one. The server asks for those that it lacks.
    """

    request_id: str
    ids: bytes
    sampling: SamplingParams
    session_id: str = ""
    priority: int = 0
    remaining_s: Seconds | None = None
    routed_experts: bool = False
    routed_experts_start: Natural = 0
    media: tuple[tuple[str, Natural, Natural], ...] = ()


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """End this request; its last chunk follows."""

    request_id: str


class LoadReport(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """What the engine is doing; it is also its heartbeat."""

    load: EngineLoad


class SendMedia(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """A request names media that the server lacks: send them; it starts when they are there."""

    request_id: str
    digests: tuple[str, ...]


class MediaPart(msgspec.Struct, frozen=True, array_like=True, tag=21, kw_only=True):
    """A part of the content of a medium that the server asked for; parts come in order.

    Attributes:
        medium: On the first part, all but the content.
        is_last: Nothing follows.
    """

    digest: str
    content: bytes
    medium: Media | None = None
    is_last: bool = False


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load_weights"):
    """Load other weights; what is sampled from then on has this version."""

    version: int
    source: DiskWeights


class ReceiveWeights(msgspec.Struct, frozen=True, array_like=True, tag="receive_weights"):
    """Join a broadcast; the result is the directory of what came, or empty."""

    source: DistributedWeights


class DropWeights(msgspec.Struct, frozen=True, array_like=True, tag="drop_weights"):
    """Remove a directory that came of `ReceiveWeights`."""

    path: str


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Release memory; see `BaseCore.sleep`."""

    level: int


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag="wake_up"):
    """Take memory back; see `BaseCore.wake_up`."""

    tags: tuple[str, ...]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag="flush_cache"):
    """Forget what was computed of earlier requests."""


Operation = LoadWeights | ReceiveWeights | DropWeights | Sleep | WakeUp | FlushCache


class Command(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """Do this; a `CommandDone` with the same number answers.

    Attributes:
        interrupts: The session's requests are cut off first. Once it is done, and the engine is
            awake, they continue from the tokens that they have.
    """

    number: Natural
    operation: Operation
    interrupts: bool = False


class CommandDone(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """The operation has been done, with its result, or `error` says why not.

    Attributes:
        is_fatal: The engine is broken.
    """

    number: Natural
    error: str = ""
    is_fatal: bool = False
    result: str = ""


FromServer = Challenge | Welcome | Refused | Chunk | LoadReport | SendMedia | CommandDone
FromClient = Hello | Submit | Abort | Command | MediaPart


class FrameError(OSError):
    """The peer sent what is no frame, or no message."""


class FrameTooLongError(Exception):
    """A message of ours is past the maximum; nothing of it has been sent."""


encoder = msgspec.msgpack.Encoder()
server_messages: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
client_messages: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
