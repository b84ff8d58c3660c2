"""A core that says what it was told to, whatever model's tokenizer the driver has."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from rollout.engine.core import Capabilities, Chunk, EngineInfo, EngineLoad, GenerationRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class ScriptedCore:
    """The nth request of a session is answered with the nth reply; further ones with the last.

    Args:
        replies: Ids of each.
        vocab_size: Of the tokenizer.
        modalities: What it takes beside text.
    """

    def __init__(
        self,
        *,
        replies: Sequence[Sequence[int]],
        vocab_size: int,
        modalities: Sequence[Any] = ("image", "video"),
    ) -> None:
        self.info = EngineInfo(
            vocab_size=vocab_size,
            eos_ids=(),
            context_length=8192,
            fingerprint="scripted",
            max_requests=256,
            core="scripted",
            capabilities=Capabilities(modalities=tuple(modalities)),
        )
        self._replies = [list(reply) for reply in replies]
        self._asked: dict[str, int] = {}

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The whole reply at once."""
        at = self._asked.get(request.session_id, 0)
        self._asked[request.session_id] = at + 1
        ids = self._replies[min(at, len(self._replies) - 1)]
        ids = ids[: request.sampling.max_new_tokens]
        yield Chunk(
            request_id=request.request_id,
            ids=array("i", ids).tobytes(),
            log_probs=array("f", [-0.5] * len(ids)).tobytes(),
            weight_version=0,
        )
        yield Chunk(request_id=request.request_id, offset=len(ids), finish_reason="stop")

    def abort_nowait(self, request_id: str) -> None:
        """Replies are there at once."""

    def load(self) -> EngineLoad:
        """Nothing waits."""
        return EngineLoad()

    async def aclose(self) -> None:
        """Nothing to close."""
