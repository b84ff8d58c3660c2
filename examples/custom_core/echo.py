"""An engine of one's own: an `EngineCore` that says again what it was told, a token at a time."""

from collections.abc import AsyncIterator

from rollout.engine.core import Chunk, EngineInfo, EngineLoad, GenerationRequest


class EchoCore:
    def __init__(self, vocab_size: int, eos_id: int) -> None:
        self.info = EngineInfo(
            vocab_size=vocab_size,
            eos_ids=(eos_id,),
            context_length=4096,
            fingerprint="echo-1",
            max_requests=256,
        )
        self._aborted: set[str] = set()

    async def start(self) -> None:
        """A real core loads its model here."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        last_ids = request.prompt_ids[-4 * request.sampling.max_new_tokens :]
        count = len(last_ids) // 4
        for at in range(count):
            if request.request_id in self._aborted:
                yield Chunk(request_id=request.request_id, offset=at, finish_reason="abort")
                break
            yield Chunk(
                request_id=request.request_id,
                offset=at,
                ids=last_ids[4 * at : 4 * at + 4],
                log_probs=bytes(4),  # sure of itself: log 1 = 0.0
                finish_reason="length" if at == count - 1 else None,
            )
        self._aborted.discard(request.request_id)

    def abort_nowait(self, request_id: str) -> None:
        self._aborted.add(request_id)

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def aclose(self) -> None:
        """A real core frees its model here."""
