"""An `EngineServer` over a core that answers at once, in a process of its own.

python -m wire.channel_server [none | ids | list] < secret
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import anyio

from rollout.engine.channel.server import EngineServer
from rollout.engine.core import Chunk, EngineInfo, EngineLoad, GenerationRequest
from wire.payload import ANSWER_IDS, ANSWER_LOG_PROBS, READINGS, VOCABULARY, send_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class InstantCore:
    """The same 200 tokens for everybody, in one chunk, without waiting.

    Args:
        reading: What it does with a prompt, one of `READINGS`.
    """

    def __init__(self, reading: str) -> None:
        self._read = READINGS[reading]
        self.info = EngineInfo(
            vocab_size=VOCABULARY,
            eos_ids=(2,),
            context_length=1 << 20,
            fingerprint="instant",
            max_requests=1 << 16,
            core="instant",
        )
        self._ids, self._log_probs = ANSWER_IDS.tobytes(), ANSWER_LOG_PROBS.tobytes()

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """One chunk, and its end."""
        if self._read is not None:
            self._read(request.prompt_ids)
        yield Chunk(
            request_id=request.request_id,
            ids=self._ids,
            log_probs=self._log_probs,
            finish_reason="length",
        )

    def abort_nowait(self, request_id: str) -> None:
        """Nothing runs for long enough."""

    def load(self) -> EngineLoad:
        """Idle."""
        return EngineLoad()

    async def aclose(self) -> None:
        """Nothing to free."""


async def main() -> None:
    """Serve until killed."""
    secret = sys.stdin.buffer.read(32)
    server = EngineServer(InstantCore(*sys.argv[1:] or ["none"]), secret)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=1024)
    send_port(listener.extra(anyio.abc.SocketAttribute.local_port))
    await listener.serve(server.serve_connection)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
