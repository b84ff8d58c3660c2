"""The engine that verl keeps itself, behind our pool: its ``LLMServerClient`` as an `EngineCore`.

One replica stands for all servers: verl's own load balancer spreads the requests over them and
keeps the turns of a trajectory on one.
"""

from __future__ import annotations

import logging
import math
from array import array
from typing import TYPE_CHECKING, Any

import anyio

from rollout.engine.core import CORE_CLOSE_S, Capabilities, Chunk, EngineInfo, EngineLoad
from rollout.integrations.row_media import images_of, videos_of
from rollout.integrations.verl.servers import Placed, placing
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.engine.core import FinishReason, GenerationRequest, SamplingParams
    from rollout.integrations.verl.sessions import Sessions
    from rollout.medium import Media

logger = logging.getLogger("rollout.integrations")

#: Requests at once; past that verl's servers queue by themselves.
MAX_REQUESTS = 1 << 16
#: What verl's servers call an answer that was cut off by others.
ABORTED = ("aborted", "abort")


class ClientCore:
    """Generates through verl's client; its tokens arrive all at once.

    Args:
        vocab_size, eos_ids, context_length: Of the model.
        log_probs: Whether verl's servers are asked for the log-probs of what they sample. Without
            them a transcript has NaN in their place.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        context_length: int,
        log_probs: bool = True,
    ) -> None:
        self.info = EngineInfo(
            vocab_size=vocab_size,
            eos_ids=tuple(eos_ids),
            context_length=context_length,
            fingerprint="",
            max_requests=MAX_REQUESTS,
            core="verl",
            capabilities=Capabilities(
                no_sleep="verl puts its servers to sleep by itself",
                max_top_log_probs=0,
                modalities=("image", "video"),
            ),
        )
        self._log_probs = log_probs
        self._scopes: dict[str, tuple[anyio.CancelScope, Placed]] = {}
        self._threads = WorkerThreads(cleanup_s=CORE_CLOSE_S / 2)
        self._generated = 0
        self._client: Any = None
        self._sessions: Sessions

    def over(self, client: Any, sessions: Sessions) -> ClientCore:
        """This core, on a client."""
        self._client, self._sessions = client, sessions
        return self

    async def start(self) -> None:
        """verl's servers run already."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `EngineCore.generate`: one chunk."""
        yield await self._answer(request)

    def abort_nowait(self, request_id: str) -> None:
        """See `EngineCore.abort_nowait`; the server hears of it where it can end requests."""
        found = self._scopes.get(request_id)
        if found is not None:
            scope, placed = found
            placed.abort_nowait()
            scope.cancel()

    def load(self) -> EngineLoad:
        """Requests under way."""
        return EngineLoad(running=len(self._scopes), generated_tokens=self._generated)

    async def aclose(self) -> None:
        """Leave verl's servers as they are."""
        for request_id in tuple(self._scopes):
            self.abort_nowait(request_id)
        self._threads.close()

    async def _answer(self, request: GenerationRequest) -> Chunk:
        placed = Placed()
        with anyio.CancelScope() as scope:
            self._scopes[request.request_id] = scope, placed
            try:
                output = await self._threads.run_asyncio(
                    "verl's client", self._ask, request, placed
                )
                return self._chunk(request, output)
            except Exception as error:
                logger.debug("verl's client failed a request", exc_info=True)
                what = f"verl's client: {type(error).__name__}: {error}"
                return Chunk(
                    request_id=request.request_id, finish_reason="error", error=f"{what:.2000}"
                )
            finally:
                del self._scopes[request.request_id]
        return Chunk(request_id=request.request_id, finish_reason="abort")

    async def _ask(self, request: GenerationRequest, placed: Placed) -> Any:
        """verl's answer; on asyncio."""
        placing(placed)
        asked = self._sessions.asked(request.session_id)
        params = asked.sampling_params
        if params is None:
            params = sampling_params_of(request.sampling, log_probs=self._log_probs)
        ids = array("i", request.prompt_ids).tolist()
        return await self._client.generate(
            request_id=asked.request_id,
            prompt_ids=ids,
            sampling_params={**params, "max_tokens": request.sampling.max_new_tokens},
            **{**media_data([each.medium for each in request.media]), **asked.options},
        )

    def _chunk(self, request: GenerationRequest, output: Any) -> Chunk:
        """verl's answer in our words.

        Raises:
            ValueError: It has not one log-prob for each id.
        """
        self._sessions.tell(request.session_id, output)
        most = request.sampling.max_new_tokens
        ids = array("i", output.token_ids[:most])
        log_probs = output.log_probs
        if log_probs is None:
            if self._log_probs and ids:
                raise ValueError(
                    f"{len(ids)} ids without log-probs; expected them, with actor_rollout_ref."
                    "rollout.calculate_log_probs = True"
                )
            log_probs = [math.nan] * len(ids)
        elif len(log_probs) != len(output.token_ids):
            raise ValueError(f"{len(output.token_ids)} ids with {len(log_probs)} log-probs")
        self._generated += len(ids)
        fields = output.extra_fields
        return Chunk(
            request_id=request.request_id,
            ids=ids.tobytes(),
            log_probs=array("f", log_probs[:most]).tobytes(),
            # Of an answer that spans several versions nobody says where: the oldest stands for it.
            weight_version=fields.get("min_global_steps") or fields.get("global_steps") or 0,
            finish_reason=self._finish_reason(output, ids, request.sampling),
            cached_tokens=fields.get("num_cached_tokens") or 0,
        )

    def _finish_reason(
        self, output: Any, ids: array[int], sampling: SamplingParams
    ) -> FinishReason:
        """verl's servers say "completed" of whatever was not aborted."""
        if output.stop_reason in ABORTED:
            return "abort"
        if len(ids) < sampling.max_new_tokens:
            return "stop"
        ends = (*self.info.eos_ids, *sampling.stop_token_ids)
        is_whole = len(ids) == len(output.token_ids) and ids[-1] in ends
        return "stop" if is_whole else "length"


def media_data(media: Sequence[Media]) -> dict[str, Any]:
    """What verl's client is told of a prompt's media, as its own agent loops tell it."""
    shown = {"image_data": images_of(media), "video_data": videos_of(media)}
    return {name: each for name, each in shown.items() if each}


def sampling_params_of(sampling: SamplingParams, *, log_probs: bool) -> dict[str, Any]:
    """In the words of verl's servers, which vLLM and SGLang share; without the turn's length."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": log_probs,
    }
    given = {
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return params | {name: value for name, value in given.items() if value}
