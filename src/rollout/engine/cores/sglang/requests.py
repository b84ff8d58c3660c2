"""One request: what SGLang is asked, why it is not taken on, and how it ends. No SGLang here."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.engine.core import (
    Chunk,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    unpack_ids,
)
from rollout.engine.cores.checks import request_fault
from rollout.engine.cores.sglang.answers import AnswerReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.engine.cores.sglang.arguments import Options

#: SGLang keeps seeds as int64.
SEED_BITS = 63


class OpenRequest:
    """A request under way.

    Attributes:
        is_aborted: Its end was asked for and has not been confirmed.
        is_over: Its last chunk has been made.
    """

    __slots__ = ("_end", "_reader", "_wait", "is_aborted", "is_over")

    def __init__(self, request_id: str) -> None:
        self.is_aborted = False
        self.is_over = False
        self._reader = AnswerReader(request_id)
        self._wait: anyio.CancelScope | None = None
        self._end: tuple[FinishReason, str] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for an answer: `give_up` ends it."""
        with anyio.CancelScope() as self._wait:
            if self._end is not None:
                self._wait.cancel()
            yield
        self._wait = None

    def give_up(self, reason: FinishReason, error: str = "") -> None:
        """No answer will come: `last_chunk` ends the request; what is called first counts."""
        self._end = self._end or (reason, error)
        if self._wait is not None:
            self._wait.cancel()

    def hold(self) -> None:
        """Keep tokens back until the final answer says which weights sampled each of them."""
        self._reader.is_held = True

    def read(self, answer: Mapping[str, Any]) -> list[Chunk]:
        """What an answer adds."""
        chunks = self._reader.read(answer)
        self.is_over = bool(chunks) and chunks[-1].finish_reason is not None
        return chunks

    def last_chunk(self) -> Chunk:
        """The end of a request that has been given up."""
        assert self._end is not None
        self.is_over = True
        reason, error = self._end
        return Chunk(
            request_id=self._reader.request_id,
            offset=self._reader.tokens,
            finish_reason=reason,
            error=error,
        )


def refusal_of(
    request: GenerationRequest,
    options: Options,
    info: EngineInfo,
    *,
    open_requests: int,
    is_draining: bool,
) -> Chunk | None:
    """The answer to a request that is not taken on; None where it is."""
    fault = request_fault(request, info) or _sglang_fault(request, options)
    if fault is not None:
        return Chunk(request_id=request.request_id, finish_reason="error", error=fault)
    full = None
    if is_draining:
        full = "the engine is being drained"
    elif open_requests >= info.max_requests:
        waiting = open_requests - options.max_running
        full = f"engine queue is full: {waiting} waiting, limit {options.max_queued}"
    if full is None:
        return None
    return Chunk(request_id=request.request_id, finish_reason="rejected", error=full)


def _sglang_fault(request: GenerationRequest, options: Options) -> str | None:
    """What other engines can do and SGLang cannot."""
    sampling = request.sampling
    if sampling.repetition_penalty != 1:
        return (
            f"sampling.repetition_penalty = {sampling.repetition_penalty!r}; expected 1: SGLang "
            "penalises generated tokens only and gives log-probs after the penalty"
        )
    if sampling.ignore_eos and sampling.stop_token_ids:
        return "sampling.ignore_eos: SGLang then ignores sampling.stop_token_ids too"
    if request.routed_experts and not options.routed_experts:
        return "routed_experts: expected engine.routed_experts = true, set when the engine starts"
    return None


def request_fields(
    request: GenerationRequest, options: Options, info: EngineInfo, weight_version: int
) -> dict[str, Any]:
    """What SGLang is asked, as fields of its `GenerateReqInput`."""
    ids = unpack_ids(request.prompt_ids)
    fields: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": ids.tolist(),
        "sampling_params": _sampling(request.sampling, options, info.context_length - len(ids)),
        "return_logprob": True,
        "top_logprobs_num": request.top_log_probs,
        "return_routed_experts": request.routed_experts,
        "priority": request.priority,
        # Keys and values of other weights must not be found in the prefix cache.
        "extra_key": f"weights-{weight_version}",
    }
    if request.session_id:
        fields["session_id"] = request.session_id
    return fields


def _sampling(sampling: SamplingParams, options: Options, room: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    if options.deterministic:
        # SGLang gives a request without a seed the same one as every other such request.
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        params["sampling_seed"] = seed
    return params
