"""What vLLM's server is asked, and how its answers read.

Written after vLLM 0.33.0's own definition of ``/v1/completions`` and tested against answers in
its shape; not run against a server.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from rollout.engine.core import Chunk, FinishReason, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import GenerationRequest, SamplingParams
    from rollout.engine.cores.http.client import HttpClient

FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmApi:
    """vLLM's ``/v1/completions`` on one server, with token ids both ways.

    Attributes:
        path: Where requests go.
        has_abort: Nothing but the end of the connection aborts a request.
        is_gathering: An event has as many tokens as the server was started with, one as a
            rule; the engine's server gathers.
    """

    path = "/v1/completions"
    has_abort = False
    is_gathering = False

    def __init__(self) -> None:
        self._model = ""

    async def describe(self, client: HttpClient) -> tuple[int | None, int]:
        """The context length that the server names; it knows no weight version of ours.

        Raises:
            HttpError: It does not answer.
        """
        model = (await client.get("/v1/models"))["data"][0]
        self._model = model["id"]
        return model.get("max_model_len"), 0

    def modalities(self, family: str) -> tuple[tuple[str, ...], str]:
        """Kinds of media that the server is sent: none; and why."""
        return (), "vLLM's /v1/completions takes none with token ids"

    def fault(self, sampling: SamplingParams) -> str | None:
        """What the server cannot do; None where it can."""
        if sampling.temperature not in (0, 1):
            return (
                f"sampling.temperature = {sampling.temperature!r}; expected 0 or 1: vLLM gives "
                "log-probs before the temperature"
            )
        return None

    def body(
        self, request: GenerationRequest, room: int, weight_version: int, chunk_tokens: int
    ) -> dict[str, Any]:
        """A request as JSON; `room` tokens fit into the context after the prompt."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "request_id": request.request_id,
            "prompt": unpack_ids(request.prompt_ids).tolist(),
            "max_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # of the sampled token, and none beside it
            "return_token_ids": True,
            "stream": True,
        }
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(sampling, name):
                body[name] = getattr(sampling, name)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if request.priority:
            # vLLM runs smaller ones first, and refuses any where it does not schedule by them.
            body["priority"] = -request.priority
        return body

    def media_fields(self, request: GenerationRequest) -> dict[str, Any]:
        """There are none; see `modalities`."""
        raise NotImplementedError

    def reader(self, request: GenerationRequest) -> VllmReader:
        """Reads the answers to one request."""
        return VllmReader(request.request_id)

    async def abort(self, client: HttpClient, request_id: str) -> None:
        """There is no such message; see `has_abort`."""
        raise NotImplementedError


class VllmReader:
    """Reads the events of one request: each has the new tokens only."""

    __slots__ = ("request_id", "tokens")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens = 0

    def read(self, answer: Mapping[str, Any]) -> list[Chunk]:
        """The chunk that an event adds; an event that is an error ends the request."""
        fault = answer.get("error")
        if fault is not None:
            text = fault.get("message") if isinstance(fault, dict) else fault
            return [self._chunk([], [], "error", str(text))]
        choices = answer.get("choices")
        if not choices:  # the usage, at the very end
            return []
        choice = choices[0]
        reason = choice.get("finish_reason")
        finish = None if reason is None else FINISH.get(reason, "error")
        scored = (choice.get("logprobs") or {}).get("token_logprobs") or []
        error = f"vLLM ended the request with {reason!r}" if finish == "error" else ""
        return [self._chunk(choice.get("token_ids") or [], scored, finish, error)]

    def _chunk(
        self, ids: list[int], log_probs: list[float], finish: FinishReason | None, error: str
    ) -> Chunk:
        start, self.tokens = self.tokens, self.tokens + len(ids)
        return Chunk(
            request_id=self.request_id,
            offset=start,
            ids=array("i", ids).tobytes(),
            log_probs=array("f", log_probs).tobytes(),
            finish_reason=finish,
            error=error,
        )
