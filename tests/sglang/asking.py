"""Ask a core and keep everything that it answers."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.core import Chunk, GenerationRequest, SamplingParams, pack_ids, unpack_ids
from rollout.seeds import RequestIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.core import EngineCore

request_ids = RequestIds()


class Answer(msgspec.Struct):
    """What came back for one request."""

    ids: list[int]
    log_probs: list[float]
    chunks: list[Chunk]

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]


def asked(prompt: Sequence[int], *, request: dict[str, Any] | None = None, **sampling: Any):
    """A greedy request of 16 tokens; keyword arguments change its sampling."""
    return GenerationRequest(
        request_id=request_ids.new(),
        prompt_ids=pack_ids(list(prompt)),
        sampling=SamplingParams(**{"max_new_tokens": 16, "temperature": 0.0, **sampling}),
        **(request or {}),
    )


async def collect(core: EngineCore, request: GenerationRequest, seen: list[Chunk] | None = None):
    """All chunks of a request, which must join up; `seen` fills as they come."""
    chunks = [] if seen is None else seen
    ids, log_probs = array("i"), array("f")
    async for chunk in core.generate(request):
        assert chunk.request_id == request.request_id
        assert chunk.offset == len(ids)
        assert len(chunk.ids) == len(chunk.log_probs)
        ids.extend(unpack_ids(chunk.ids))
        log_probs.frombytes(chunk.log_probs)
        chunks.append(chunk)
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    return Answer(ids.tolist(), log_probs.tolist(), chunks)
