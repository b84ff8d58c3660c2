"""The wire between driver and engine: messages, frames and the proof of the shared secret.

A frame is ``u32 length (little-endian) | msgpack``; messages are tagged, array-like Structs. The
handshake runs on each connection before anything else::

    server -> Challenge(version, nonce)
    client -> Hello(version, role, session, nonce, proof of both nonces)
    server -> Welcome(proof of both nonces, facts about the engine)  |  Refused(reason)

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec

from rollout.engine.core import Chunk, EngineInfo, EngineLoad, GenerationRequest
from rollout.engine.weights import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import ByteStream

PROTOCOL_VERSION = 1
#: A frame past this is a fault of the peer: 16 M tokens with log-probs are still below it.
MAX_FRAME_BYTES = 256 * 1024 * 1024
#: Bytes asked of the socket at once; larger reads cost memory and gain nothing on loopback.
READ_BYTES = 256 * 1024
HANDSHAKE_S = 10.0
NONCE_BYTES = 32
Role = Literal["data", "control"]


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The server speaks first, so that its version is known whatever the client sends."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The client's answer; `session` ties its data and control connections together."""

    version: int
    role: Role
    session: str
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The server's proof and the facts that the driver's tokenizer must agree with."""

    proof: bytes
    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Why the server closes this connection."""

    reason: str


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """End this request; its last chunk follows on the data connection."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Asks for a `Pong` with the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The peer is alive, and this is its load."""

    number: int
    load: EngineLoad


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """Load these weights; a `WeightsUpdated` with the same version answers."""

    version: int
    source: WeightSource


class WeightsUpdated(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """The weights are loaded, or why they are not."""

    version: int
    error: str = ""


FromServer = Challenge | Welcome | Refused | Chunk | Pong | WeightsUpdated
FromClient = Hello | GenerationRequest | Abort | Ping | UpdateWeights

_encoder = msgspec.msgpack.Encoder()
decode_from_server: Callable[[Any], FromServer] = msgspec.msgpack.Decoder(FromServer).decode
decode_from_client: Callable[[Any], FromClient] = msgspec.msgpack.Decoder(FromClient).decode

#: What reading, writing or decoding raises when a connection is of no more use.
CONNECTION_ERRORS = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    msgspec.MsgspecError,
    OSError,
)


class FrameError(OSError):
    """The peer sent something that is no frame, or ended in the middle of one."""


def proof_of(secret: bytes, side: Literal["client", "server"], *nonces: bytes) -> bytes:
    """HMAC-SHA256 over the side and both nonces: neither side can replay the other's proof."""
    return hmac.digest(secret, side.encode() + b"".join(nonces), "sha256")


class FrameStream:
    """Messages over a byte stream.

    `send_nowait` only appends to a buffer; one task runs `write_forever` and flushes whatever has
    gathered, so that a caller's cancellation never truncates a frame and many small messages
    share a system call.
    """

    def __init__(self, stream: ByteStream, *, max_frame: int = MAX_FRAME_BYTES) -> None:
        self._stream = stream
        self._max_frame = max_frame
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._wake = anyio.Event()
        self.bytes_sent = 0

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Queue one message; never waits.

        Raises:
            OverflowError: An integer does not fit into 64 bits; nothing has been queued.
        """
        start = len(self._outgoing)
        self._outgoing += b"\0\0\0\0"
        try:
            _encoder.encode_into(message, self._outgoing, -1)
        except BaseException:
            del self._outgoing[start:]  # half a frame would end the connection
            raise
        length = len(self._outgoing) - start - 4
        self._outgoing[start : start + 4] = length.to_bytes(4, "little")
        self._wake.set()

    async def flush(self) -> None:
        """Write what is queued; for the one task that owns the writing."""
        while self._outgoing:
            data, self._outgoing = self._outgoing, bytearray()
            await self._stream.send(bytes(data))
            self.bytes_sent += len(data)

    async def write_forever(self) -> None:
        """Write messages as they come, until the stream breaks or the task is cancelled."""
        while True:
            await self.flush()
            self._wake = anyio.Event()
            await self._wake.wait()

    async def read(self) -> list[bytes]:
        """The payloads that have arrived, at least one.

        Raises:
            anyio.EndOfStream: The peer closed between two frames.
            FrameError: It closed within one, or announced one past the maximum.
        """
        while True:
            frames = self._take_frames()
            if frames:
                return frames
            try:
                self._incoming += await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                if self._incoming:
                    raise FrameError("the connection ended in the middle of a frame") from None
                raise

    def _take_frames(self) -> list[bytes]:
        buffer, frames, at = self._incoming, [], 0
        while len(buffer) - at >= 4:
            length = int.from_bytes(buffer[at : at + 4], "little")
            if length > self._max_frame:
                raise FrameError(
                    f"a frame of {length} bytes was announced; {self._max_frame} at most"
                )
            if len(buffer) - at - 4 < length:
                break
            frames.append(bytes(buffer[at + 4 : at + 4 + length]))
            at += 4 + length
        if at:
            del buffer[:at]
        return frames

    async def aclose(self) -> None:
        """Close the stream at once; safe in a cancelled scope."""
        await anyio.aclose_forcefully(self._stream)


async def _receive_one(frames: FrameStream, decode: Callable[[Any], Any]) -> Any:
    payloads = await frames.read()
    if len(payloads) != 1:
        raise FrameError("more than one message arrived during the handshake")
    return decode(payloads[0])


async def greet_as_server(
    frames: FrameStream, secret: bytes, info: Callable[[], EngineInfo]
) -> Hello | None:
    """Prove ourselves to a client and have it prove itself; None (refused) where it does not."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    frames.send_nowait(Challenge(PROTOCOL_VERSION, nonce))
    await frames.flush()
    hello = await _receive_one(frames, decode_from_client)
    fault = _fault_of(hello, secret, nonce)
    if fault:
        frames.send_nowait(Refused(fault))
    else:
        frames.send_nowait(Welcome(proof_of(secret, "server", hello.nonce, nonce), info()))
    await frames.flush()
    return None if fault else hello


def _fault_of(hello: FromClient, secret: bytes, nonce: bytes) -> str:
    if not isinstance(hello, Hello):
        return f"expected a hello, got {type(hello).__name__}"
    if hello.version != PROTOCOL_VERSION:
        return f"protocol version {hello.version}; this engine speaks {PROTOCOL_VERSION}"
    if not hmac.compare_digest(hello.proof, proof_of(secret, "client", nonce, hello.nonce)):
        return "the proof of the shared secret is wrong"
    return ""


async def greet_as_client(
    frames: FrameStream, secret: bytes, *, role: Role, session: str
) -> EngineInfo:
    """The engine's facts, after each side has proved that it holds the secret.

    Raises:
        FrameError: The peer refused us, speaks another version, or does not hold the secret.
    """
    challenge = await _receive_one(frames, decode_from_server)
    if not isinstance(challenge, Challenge):
        raise FrameError(f"expected a challenge, got {type(challenge).__name__}")
    if challenge.version != PROTOCOL_VERSION:
        theirs, ours = challenge.version, PROTOCOL_VERSION
        raise FrameError(f"the engine speaks protocol version {theirs}; this driver {ours}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = proof_of(secret, "client", challenge.nonce, nonce)
    frames.send_nowait(Hello(PROTOCOL_VERSION, role, session, nonce, proof))
    await frames.flush()
    answer = await _receive_one(frames, decode_from_server)
    if isinstance(answer, Refused):
        raise FrameError(f"the engine refused the connection: {answer.reason}")
    if not isinstance(answer, Welcome) or not hmac.compare_digest(
        answer.proof, proof_of(secret, "server", nonce, challenge.nonce)
    ):
        raise FrameError("the engine did not prove that it holds the shared secret")
    return answer.info
