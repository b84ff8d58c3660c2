"""Requests as SGLang takes them, and its answers as chunks. No SGLang here.

An answer is a mapping: ``output_ids`` and ``meta_info``. Answers are cumulative: each holds all
tokens so far, and their ``output_token_logprobs`` as (log-prob, id, text).
"""

from __future__ import annotations

import base64
import secrets
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.engine.core import (
    Chunk,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    unpack_ids,
)
from rollout.engine.cores.base import OpenRequest
from rollout.engine.cores.checks import check_log_probs, check_scored_ids
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.engine.cores.sglang.server_arguments import SGLangOptions

#: Status of an answer to a request that found the queue full.
SERVICE_UNAVAILABLE = 503
#: Fields that are checked against each other.
IDS, COUNT = "output_ids", "meta_info.completion_tokens"
LOG_PROBS = "meta_info.output_token_logprobs"
#: SGLang keeps seeds as int64.
SEED_BITS = 63
#: Parameters of SGLang that no request of ours uses, as they change nothing.
_NOTHING: Mapping[str, Any] = {
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
}


def find_sampling_fault(sampling: SamplingParams) -> str:
    """What other engines can do and SGLang cannot; empty where it can."""
    if sampling.repetition_penalty != 1:
        return (
            f"sampling.repetition_penalty = {sampling.repetition_penalty!r}; expected 1: SGLang "
            "penalises generated tokens only and gives log-probs after the penalty"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != 0:
            value = getattr(sampling, name)
            return f"sampling.{name} = {value!r}; expected 0: SGLang gives log-probs after it"
    if sampling.ignore_eos and sampling.stop_token_ids:
        return "sampling.ignore_eos: SGLang then ignores sampling.stop_token_ids too"
    return ""


def build_fields(
    request: GenerationRequest, options: SGLangOptions, info: EngineInfo, salt: str
) -> dict[str, Any]:
    """A request as fields of its `GenerateReqInput`."""
    ids = unpack_ids(request.prompt_ids)
    params = build_sampling(request.sampling, info.context_length - len(ids))
    if options.deterministic:
        params["sampling_seed"] = choose_seed(request.sampling)
    return {
        "rid": request.request_id,
        "session_id": request.session_id or None,
        "input_ids": ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": request.sampling.top_log_probs,
        "return_routed_experts": request.routed_experts,
        "routed_experts_start_len": request.routed_experts_start,
        "priority": request.priority,
        "extra_key": salt,
    }


def build_sampling(sampling: SamplingParams, room: int) -> dict[str, Any]:
    """Everything but the seed, by SGLang's names.

    What changes nothing is written out too: a server started with ``--preferred-sampling-params``
    fills in what a request leaves out.
    """
    return {
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        **_NOTHING,
    }


def choose_seed(sampling: SamplingParams) -> int:
    """For deterministic inference, where SGLang gives requests without a seed all the same one."""
    return secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed


def make_salt(weight_version: int) -> str:
    """Keeps keys and values of other weights from being found in the prefix cache."""
    return f"weights-{weight_version}"


class AnswerReader(OpenRequest):
    """A request under way. Its answers are read in their order; each token leaves in one chunk.

    An answer says token by token what sampled it (``weight_versions``), or names only the version
    that is current when it arrives: then, once the weights have changed under a request, its tokens
    wait until the final answer says.

    Attributes:
        is_buffering: Tokens wait for the final answer; set beforehand where weights are changed
            under running requests.
    """

    __slots__ = ("_version", "is_buffering")

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.is_buffering = False
        self._version: int | None = None

    def read(self, answer: Mapping[str, Any]) -> list[Chunk]:
        """The chunks that an answer adds; the last one of a final answer has a finish reason."""
        meta = answer["meta_info"]
        if not is_abort(meta):  # what one repeats or leaves out is not taken
            self._check_counts(answer, meta)
        version = parse_version(meta.get("weight_version"))
        if meta.get("finish_reason") is not None:
            return self._final(answer, meta, version)
        if meta.get("weight_versions"):
            return self._by_version(answer, meta)
        if self._version is None:
            self._version = version
        self.is_buffering = self.is_buffering or version != self._version
        if self.is_buffering:
            return []
        return [self._chunk(answer, len(answer["output_ids"]), version)]

    def _check_counts(self, answer: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        count, total = len(answer["output_ids"]), meta.get("completion_tokens")
        if total is not None and total != count:
            raise EngineError(f"{IDS} has {count} ids; expected {total}, as {COUNT} says")
        if count < self.tokens:
            raise EngineError(f"{IDS} has {count} ids; expected the {self.tokens} before it too")
        scored = len(meta.get("output_token_logprobs") or ())
        if count or scored > 1:  # SGLang may have one before the first token has left it
            check_log_probs(LOG_PROBS, scored, IDS, count)

    def _final(
        self, answer: Mapping[str, Any], meta: Mapping[str, Any], version: int
    ) -> list[Chunk]:
        count = len(answer["output_ids"])
        chunks = self._by_version(answer, meta)
        if self.tokens < count or not chunks:  # a version of SGLang that names no spans
            chunks.append(self._chunk(answer, max(count, self.tokens), version))
        self.is_over = True
        reason, error = read_finish(meta["finish_reason"])
        chunks[-1] = msgspec.structs.replace(
            chunks[-1],
            finish_reason=reason,
            error=error,
            cached_tokens=meta.get("cached_tokens") or 0,
            routed_experts=read_experts(meta),
        )
        return chunks

    def _by_version(self, answer: Mapping[str, Any], meta: Mapping[str, Any]) -> list[Chunk]:
        """New tokens, a chunk for each version that the answer says has sampled some."""
        count = len(answer["output_ids"])
        spans = meta.get("weight_versions") or ()
        ends = [(min(span["end"], count), parse_version(span["version"])) for span in spans]
        return [self._chunk(answer, end, version) for end, version in ends if end > self.tokens]

    def _chunk(self, answer: Mapping[str, Any], end: int, version: int) -> Chunk:
        """The tokens from where the last chunk ended up to `end`."""
        start, meta = self.tokens, answer["meta_info"]
        ids = list(answer["output_ids"][start:end])
        scored: Sequence[Any] = (meta.get("output_token_logprobs") or ())[start:end]
        check_log_probs(LOG_PROBS, start + len(scored), IDS, start + len(ids))
        if (own := [entry[1] for entry in scored]) != ids:
            check_scored_ids(LOG_PROBS, own, IDS, ids, start)
        self.tokens = end
        rows: Sequence[Any] = meta.get("output_top_logprobs") or ()
        likely = [entry for row in rows[start:end] for entry in row or ()]
        return Chunk(
            request_id=self.request_id,
            offset=start,
            ids=array("i", ids).tobytes(),
            log_probs=array("f", [entry[0] for entry in scored]).tobytes(),
            weight_version=version,
            top_ids=array("i", [entry[1] for entry in likely]).tobytes(),
            top_log_probs=array("f", [entry[0] for entry in likely]).tobytes(),
        )


def is_abort(meta: Mapping[str, Any]) -> bool:
    """Whether an answer is the end of a request that was cut off or refused."""
    return (meta.get("finish_reason") or {}).get("type") == "abort"


def read_finish(reason: Mapping[str, Any]) -> tuple[FinishReason, str]:
    """Our finish reason for SGLang's, and the text of an error."""
    kind, status = reason.get("type"), reason.get("status_code")
    if kind in ("stop", "length"):
        return kind, ""
    if kind == "abort" and status is None:
        return "abort", ""
    message = str(reason.get("message") or f"SGLang ended the request with {dict(reason)}")
    return ("rejected" if status == SERVICE_UNAVAILABLE else "error"), message


def parse_version(text: str | None, field: str = "meta_info.weight_version") -> int:
    """A weight version of ours; 0 for what SGLang says where none was set, and for other names."""
    version = int(text.lstrip("0")[:11] or 0) if text and text.isdecimal() else 0
    if version >= 2**31:  # they travel as int32
        raise EngineError(f"{field} = {text!r:.40}; expected less than 2**31")
    return version


def read_experts(meta: Mapping[str, Any]) -> bytes:
    """The routed experts of a final answer as packed int16: (tokens, layers, top_k).

    Of all tokens but the last, from where they were asked for. SGLang sends int32 in base64. Empty
    where none were asked for.
    """
    encoded = meta.get("routed_experts")
    if not encoded:
        return b""
    return np.frombuffer(base64.b64decode(encoded), np.int32).astype(np.int16).tobytes()
