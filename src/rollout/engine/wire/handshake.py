"""The proof of the shared secret and the facts that both sides must agree on.

It runs on each connection before anything else::

    server -> Challenge(version, nonce)
    client -> Hello(version, role, session, nonce, proof of both nonces, terms, facts, received)
    server -> Welcome(proof of both nonces, facts about the engine, received)  |  Refused(reason)

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Any, Literal

from rollout.engine.wire.frames import FrameStream
from rollout.engine.wire.protocol import (
    PROTOCOL_VERSION,
    Challenge,
    DriverFacts,
    FrameError,
    FromClient,
    Hello,
    Refused,
    Role,
    Terms,
    Welcome,
    decode_from_client,
    decode_from_server,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import ByteStream

    from rollout.engine.core import EngineInfo

HANDSHAKE_S = 10.0
#: An unauthenticated peer cannot make us buffer more than this.
HANDSHAKE_FRAME_BYTES = 64 * 1024
NONCE_BYTES = 32


class RefusedError(FrameError):
    """The engine refused the connection, and would refuse it again."""


def proof_of(secret: bytes, side: Literal["client", "server"], *nonces: bytes) -> bytes:
    """HMAC-SHA256 over the side and both nonces: neither side can replay the other's proof."""
    return hmac.digest(secret, side.encode() + b"".join(nonces), "sha256")


def handshake_frames(stream: ByteStream) -> FrameStream:
    """Frames over a connection that has proved nothing yet."""
    return FrameStream(stream, max_frame=HANDSHAKE_FRAME_BYTES)


async def _receive_one(frames: FrameStream, decode: Callable[[Any], Any]) -> Any:
    payloads = await frames.read()
    if len(payloads) != 1:
        raise FrameError("more than one message arrived during the handshake")
    return decode(payloads[0])


class ServerHandshake:
    """A client that has proved to hold the secret, and waits to be welcomed.

    Attributes:
        hello: What it said.
    """

    def __init__(self, frames: FrameStream, hello: Hello, proof: bytes) -> None:
        self.hello = hello
        self._frames = frames
        self._proof = proof

    async def welcome(self, info: EngineInfo, received: int = 0) -> None:
        """Prove ourselves and let it in; `received` are its bytes that had arrived before."""
        self._frames.send_nowait(Welcome(self._proof, info, received))
        await self._frames.flush()

    async def refuse(self, reason: str) -> None:
        """Tell it why not."""
        await _refuse(self._frames, reason)


async def _refuse(frames: FrameStream, reason: str) -> None:
    frames.send_nowait(Refused(reason))
    await frames.flush()


async def greet_as_server(
    frames: FrameStream, secret: bytes, info: Callable[[], EngineInfo]
) -> ServerHandshake | None:
    """Have a client prove itself; None (refused) where it does not, or takes us for another."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    frames.send_nowait(Challenge(PROTOCOL_VERSION, nonce))
    await frames.flush()
    hello = await _receive_one(frames, decode_from_client)
    fault = _fault_of(hello, secret, nonce)
    if not fault and (fault := mismatch(hello.facts, info())) and hello.facts.remedy:
        fault = f"{fault}; {hello.facts.remedy}"
    if fault:
        await _refuse(frames, fault)
        return None
    return ServerHandshake(frames, hello, proof_of(secret, "server", hello.nonce, nonce))


def _fault_of(hello: FromClient, secret: bytes, nonce: bytes) -> str:
    if not isinstance(hello, Hello):
        return f"expected a hello, got {type(hello).__name__}"
    if hello.version != PROTOCOL_VERSION:
        return f"protocol version {hello.version}; this engine speaks {PROTOCOL_VERSION}"
    if not hmac.compare_digest(hello.proof, proof_of(secret, "client", nonce, hello.nonce)):
        return "the proof of the shared secret is wrong"
    return ""


def mismatch(facts: DriverFacts, info: EngineInfo) -> str:
    """What a driver takes for granted and the engine knows to be otherwise; empty if nothing.

    What either of them does not know is no mismatch.
    """
    if facts.vocab_size > info.vocab_size > 0:
        return (
            f"the driver's tokenizer knows {facts.vocab_size} ids, the engine's model "
            f"{info.vocab_size}"
        )
    if facts.eos_ids and info.eos_ids and not set(facts.eos_ids) & set(info.eos_ids):
        return (
            f"the driver's end tokens are {list(facts.eos_ids)}, the engine's {list(info.eos_ids)}"
        )
    if facts.fingerprint and info.fingerprint and facts.fingerprint != info.fingerprint:
        return f"the driver expects model {facts.fingerprint}, the engine serves {info.fingerprint}"
    return ""


async def greet_as_client(
    frames: FrameStream,
    secret: bytes,
    *,
    role: Role,
    session: str,
    terms: Terms | None = None,
    facts: DriverFacts | None = None,
    received: int | None = None,
) -> Welcome:
    """The engine's facts, after each side has proved that it holds the secret.

    Raises:
        RefusedError: The peer refused us, and would again.
        FrameError: It speaks another version, or does not hold the secret.
    """
    challenge = await _receive_one(frames, decode_from_server)
    if not isinstance(challenge, Challenge):
        raise FrameError(f"expected a challenge, got {type(challenge).__name__}")
    if challenge.version != PROTOCOL_VERSION:
        theirs, ours = challenge.version, PROTOCOL_VERSION
        raise RefusedError(f"the engine speaks protocol version {theirs}; this driver {ours}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = proof_of(secret, "client", challenge.nonce, nonce)
    frames.send_nowait(
        Hello(
            PROTOCOL_VERSION,
            role,
            session,
            nonce,
            proof,
            terms or Terms(),
            facts or DriverFacts(),
            received,
        )
    )
    await frames.flush()
    # The engine may send on at once: what follows the answer stays in the stream's buffer.
    answer = decode_from_server(await frames.read_one())
    if isinstance(answer, Refused):
        raise RefusedError(f"the engine refused the connection: {answer.reason}")
    if not isinstance(answer, Welcome) or not hmac.compare_digest(
        answer.proof, proof_of(secret, "server", nonce, challenge.nonce)
    ):
        raise RefusedError("the engine did not prove that it holds the shared secret")
    return answer
