"""OpenRLHF's own vLLM engine, as one of ours."""

from __future__ import annotations

import math
from array import array
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import anyio

from rollout.engine.core import (
    Capabilities,
    Chunk,
    EngineInfo,
    EngineLoad,
    FinishReason,
    unpack_ids,
)
from rollout.integrations.row_media import images_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rollout.engine.core import GenerationRequest
    from rollout.medium import Media
    from rollout.worker_threads import WorkerThreads

#: Requests under way at once; vLLM queues them itself.
MAX_REQUESTS = 4096
_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class LlmCore:
    """An `EngineCore` over ``llm_engine.generate(ids, sampling_params)``, as executors get it.

    It says nothing before its end: an aborted generation has no tokens. Its weights are
    OpenRLHF's to change; what version they have it does not say, which here is 0.

    Args:
        llm_engine: What `execute` got.
        sampling_params: Of that call: each request changes a copy.
        loop: The loop on which `llm_engine` runs.
        context_length: Prompt and generated tokens fit in it.
    """

    is_gathering = True

    def __init__(
        self, llm_engine: Any, sampling_params: Any, loop: WorkerThreads, context_length: int
    ) -> None:
        self._llm_engine = llm_engine
        self._params = sampling_params
        self._loop = loop
        self._open: dict[str, anyio.CancelScope] = {}
        self._sampled = 0
        self.info = EngineInfo(
            vocab_size=0,
            eos_ids=(),
            context_length=context_length,
            fingerprint="",
            max_requests=MAX_REQUESTS,
            core="openrlhf",
            capabilities=Capabilities(
                no_sleep="OpenRLHF's own engine keeps its memory",
                max_top_log_probs=0,
                modalities=("image",),
                no_media="OpenRLHF's engines take images",
            ),
        )

    async def start(self) -> None:
        """It runs already."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """One chunk: the answer, or why there is none."""
        yield await self._chunk(request)

    def abort_nowait(self, request_id: str) -> None:
        """End the wait for an answer, and with it vLLM's request."""
        if request_id in self._open:
            self._open[request_id].cancel()

    def load(self) -> EngineLoad:
        """What this core has under way."""
        return EngineLoad(running=len(self._open), generated_tokens=self._sampled)

    async def aclose(self) -> None:
        """End every request."""
        for scope in self._open.values():
            scope.cancel()

    async def _chunk(self, request: GenerationRequest) -> Chunk:
        rid, ids = request.request_id, unpack_ids(request.prompt_ids).tolist()
        room = self.info.context_length - len(ids)
        if room < 1:
            fault = f"the prompt has {len(ids)} tokens; the context is {room + len(ids)}"
            return Chunk(request_id=rid, finish_reason="error", error=fault)
        params = self._sampling(request, room)
        try:
            with anyio.CancelScope() as scope:
                self._open[rid] = scope
                media = [each.medium for each in request.media]
                answer = await self._loop.run_asyncio("llm_engine", self._asked, ids, params, media)
        except Exception as error:  # of foreign code, whatever it is
            text = f"llm_engine.generate: {type(error).__name__}: {error}"
            return Chunk(request_id=rid, finish_reason="error", error=text)
        finally:
            del self._open[rid]
        if scope.cancelled_caught:
            return Chunk(request_id=rid, finish_reason="abort")
        return self._answer(rid, answer.outputs[0])

    async def _asked(self, ids: list[int], params: Any, media: Sequence[Media]) -> Any:
        if not media:
            return await self._llm_engine.generate(ids, params)
        shown = {"image": images_of(media)}
        return await self._llm_engine.generate(ids, params, multi_modal_data=shown)

    def _sampling(self, request: GenerationRequest, room: int) -> Any:
        """vLLM's settings for one request."""
        sampling, params = request.sampling, deepcopy(self._params)
        params.max_tokens = min(sampling.max_new_tokens, room)
        params.logprobs = 1
        params.stop_token_ids = list(sampling.stop_token_ids)
        params.top_k = max(sampling.top_k, 0)  # 0 keeps all
        same = ("temperature", "top_p", "min_p", "seed", "ignore_eos")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in (*same, *penalties):
            setattr(params, name, getattr(sampling, name))
        return params

    def _answer(self, request_id: str, output: Any) -> Chunk:
        ids = list(output.token_ids)
        self._sampled += len(ids)
        scored = [each[token].logprob for token, each in zip(ids, output.logprobs, strict=True)]
        if not all(map(math.isfinite, scored)):
            error = "llm_engine.generate: log-probs of sampled tokens are not finite"
            return Chunk(request_id=request_id, finish_reason="error", error=error)
        finish = _FINISH.get(output.finish_reason, "error")
        return Chunk(
            request_id=request_id,
            ids=array("i", ids).tobytes(),
            log_probs=array("f", scored).tobytes(),
            finish_reason=finish,
            error="" if finish != "error" else f"vLLM ended it with {output.finish_reason!r}",
        )
