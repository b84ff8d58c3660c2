"""The proof of the shared secret, and the facts that both sides must agree on.

It runs on each connection before anything else::

    server -> Challenge(version, nonce)
    client -> Hello(version, nonce, proof of both nonces, settings, expectations)
    server -> Welcome(proof of both nonces, facts about the engine)  |  Refused(reason)

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Literal

from rollout.engine.channel.messages import (
    PROTOCOL_VERSION,
    Challenge,
    ChannelSettings,
    ClientExpectations,
    FrameError,
    FromClient,
    FromServer,
    Hello,
    Refused,
    Welcome,
)

if TYPE_CHECKING:
    from rollout.engine.channel.framing import FrameStream
    from rollout.engine.core import EngineInfo

#: From the acceptance of a connection to its welcome.
HANDSHAKE_S = 5.0
#: The same for a driver, whose connection may have to wait until it is accepted.
CONNECT_S = 2 * HANDSHAKE_S
NONCE_BYTES = 32


def prove(secret: bytes, side: Literal["client", "server"], *nonces: bytes) -> bytes:
    """HMAC-SHA256 over the side and both nonces: neither side can replay the other's proof."""
    return hmac.digest(secret, side.encode() + b"".join(nonces), "sha256")


async def authenticate_client(
    frames: FrameStream[FromClient], secret: bytes, info: EngineInfo
) -> tuple[Hello, bytes]:
    """Return a client's hello and our proof for it.

    Raises:
        FrameError: It has no proof, or expects another model; it was told so.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    frames.send_nowait(Challenge(PROTOCOL_VERSION, nonce))
    await frames.flush()
    hello = await frames.read_one()
    fault = _find_hello_fault(hello, secret, nonce, info)
    if fault:
        frames.send_nowait(Refused(fault))
        await frames.flush()
        raise FrameError(f"a client was refused: {fault}")
    assert isinstance(hello, Hello)
    return hello, prove(secret, "server", hello.nonce, nonce)


def _find_hello_fault(hello: FromClient, secret: bytes, nonce: bytes, info: EngineInfo) -> str:
    if not isinstance(hello, Hello):
        return f"expected a hello, got {type(hello).__name__}"
    if hello.version != PROTOCOL_VERSION:
        return f"protocol version {hello.version}; this engine speaks {PROTOCOL_VERSION}"
    if not hmac.compare_digest(hello.proof, prove(secret, "client", nonce, hello.nonce)):
        return "the proof of the shared secret is wrong"
    fault, remedy = _find_mismatch(hello.expectations, info), hello.expectations.remedy
    return f"{fault}; {remedy}" if fault and remedy else fault


def _find_mismatch(expected: ClientExpectations, info: EngineInfo) -> str:
    """What the driver assumes and the engine knows to be otherwise; empty if nothing."""
    if expected.vocab_size > info.vocab_size > 0:
        return (
            f"the driver's tokenizer knows {expected.vocab_size} ids, the engine's model "
            f"{info.vocab_size}"
        )
    if expected.eos_ids and info.eos_ids and not set(expected.eos_ids) & set(info.eos_ids):
        ours = list(info.eos_ids)
        return f"the driver's end tokens are {list(expected.eos_ids)}, the engine's {ours}"
    wanted, found = expected.fingerprint, info.fingerprint
    if wanted and found and wanted != found:
        return f"the driver expects model {wanted}, the engine serves {found}"
    return ""


async def authenticate_server(
    frames: FrameStream[FromServer],
    secret: bytes,
    settings: ChannelSettings,
    expectations: ClientExpectations,
) -> EngineInfo:
    """Return the engine's facts, after each side has proved that it holds the secret."""
    challenge = await frames.read_one()
    if not isinstance(challenge, Challenge):
        raise FrameError(f"expected a challenge, got {type(challenge).__name__}")
    if challenge.version != PROTOCOL_VERSION:
        theirs, ours = challenge.version, PROTOCOL_VERSION
        raise FrameError(f"the engine speaks protocol version {theirs}; this driver {ours}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = prove(secret, "client", challenge.nonce, nonce)
    frames.send_nowait(Hello(PROTOCOL_VERSION, nonce, proof, settings, expectations))
    await frames.flush()
    # The engine may send on at once: what follows the answer stays in the stream's buffer.
    answer = await frames.read_one()
    if isinstance(answer, Refused):
        raise FrameError(f"the engine refused the connection: {answer.reason}")
    if not isinstance(answer, Welcome) or not hmac.compare_digest(
        answer.proof, prove(secret, "server", nonce, challenge.nonce)
    ):
        raise FrameError("the engine did not prove that it holds the shared secret")
    return answer.info
