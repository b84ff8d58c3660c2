"""What vLLM's server is asked, and how its answers read.

Written after vLLM 0.33.0's own definition of ``/v1/completions`` and tested against answers in
its shape; not run against a server.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.core import Chunk, FinishReason, Id, Natural, unpack_ids
from rollout.engine.cores.base import OpenRequest
from rollout.engine.cores.checks import (
    LogProb,
    check_log_probs,
    check_scored_ids,
    read_fields,
)
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import GenerationRequest, SamplingParams
    from rollout.engine.cores.http.client import HttpClient

FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
#: Fields that are checked against each other.
IDS, COUNT = "choices[0].token_ids", "usage.completion_tokens"
LOG_PROBS, TOKENS = "choices[0].logprobs.token_logprobs", "choices[0].logprobs.tokens"


class VllmApi:
    """vLLM's ``/v1/completions`` on one server, with token ids both ways.

    Attributes:
        path: Where requests go.
        liveness_path: What the server's own process answers, in a long step and paused too.
        abort_path: Empty: nothing but the end of the connection aborts a request.
        is_gathering: An event has as many tokens as the server was started with, one as a
            rule; the engine's server gathers.
    """

    path = "/v1/completions"
    liveness_path = "/health"
    abort_path = ""
    is_gathering = False

    _model = ""

    async def describe(self, client: HttpClient) -> tuple[int | None, int]:
        """The context length that the server names; it knows no weight version of ours."""
        model = (await client.get("/v1/models"))["data"][0]
        self._model = model["id"]
        return model.get("max_model_len"), 0

    def find_fault(self, sampling: SamplingParams) -> str:
        """What the server cannot do; empty where it can."""
        if sampling.temperature not in (0, 1):
            return (
                f"sampling.temperature = {sampling.temperature!r}; expected 0 or 1: vLLM gives "
                "log-probs before the temperature"
            )
        return ""

    def body(
        self, request: GenerationRequest, room: int, weight_version: int, chunk_tokens: int
    ) -> dict[str, Any]:
        """A request as JSON; `room` tokens fit into the context after the prompt.

        What changes nothing is written out too: a server fills in what a request leaves out, from
        the model's ``generation_config.json``.
        """
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
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "min_tokens": 0,
            "n": 1,
            "stop": [],
            "logit_bias": None,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # of the sampled token, and none beside it
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # beside the log-probs: it says whose they are
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if request.priority:
            # vLLM runs smaller ones first, and refuses any where it does not schedule by them.
            body["priority"] = -request.priority
        return body

    def reader(self, request: GenerationRequest) -> VllmReader:
        """Reads the answers to one request."""
        return VllmReader(request.request_id)


# The fields of an event that are read, and their types.


class _LogProbs(msgspec.Struct):
    token_logprobs: list[LogProb]
    tokens: list[str] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[Id]
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Natural | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class VllmReader(OpenRequest):
    """A request under way; reads its events, each of which has the new tokens only."""

    __slots__ = ()

    def read(self, answer: Mapping[str, Any]) -> list[Chunk]:
        """The chunk that an event adds."""
        event = read_fields(answer, _Event)
        if not event.choices:  # the usage, at the very end
            return []
        choice = event.choices[0]
        self._check(choice, event.usage)
        reason = choice.finish_reason
        finish = None if reason is None else FINISH.get(reason, "error")
        scored = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        start, self.tokens = self.tokens, self.tokens + len(choice.token_ids)
        self.is_over = finish is not None
        return [
            Chunk(
                request_id=self.request_id,
                offset=start,
                ids=array("i", choice.token_ids).tobytes(),
                log_probs=array("f", scored).tobytes(),
                finish_reason=finish,
                error=f"vLLM ended the request with {reason!r}" if finish == "error" else "",
            )
        ]

    def _check(self, choice: _Choice, usage: _Usage | None) -> None:
        ids, scored = choice.token_ids, choice.logprobs
        if scored is None and ids:
            raise EngineError("choices[0].logprobs is missing or null; expected log-probs")
        if scored is not None:
            check_log_probs(LOG_PROBS, len(scored.token_logprobs), IDS, len(ids))
            if scored.tokens is not None:
                check_log_probs(TOKENS, len(scored.tokens), IDS, len(ids))
                check_scored_ids(TOKENS, [_read_id(token) for token in scored.tokens], IDS, ids)
        count = self.tokens + len(ids)
        total = usage and usage.completion_tokens
        if total is not None and total != count:
            raise EngineError(f"{IDS} had {count} ids; expected {total}, as {COUNT} says")
        # The last event may have text that was held back, of tokens that came before.
        is_of_none = not ids and (not count or choice.finish_reason is None)
        if choice.text and is_of_none:
            raise EngineError(f"{IDS} has no ids; expected those of the text")


def _read_id(token: str) -> int | None:
    """The id in ``"token_id:94"``; None where it is a token's text."""
    number = token.removeprefix("token_id:")
    return int(number) if number != token and number.isdecimal() else None
