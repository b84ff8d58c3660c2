"""What SGLang's own HTTP server is asked, and how its answers read.

Run against SGLang 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.core import Chunk, Id, Natural, unpack_ids
from rollout.engine.cores.checks import LogProb, read_fields
from rollout.engine.cores.sglang.translation import (
    COUNT,
    IDS,
    AnswerReader,
    build_sampling,
    choose_seed,
    find_sampling_fault,
    is_abort,
    make_salt,
    parse_version,
)
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import GenerationRequest
    from rollout.engine.cores.http.client import HttpClient


class SGLangApi:
    """SGLang's ``/generate`` on one server.

    Attributes:
        path: Where requests go.
        liveness_path: What the server's own process answers, in a long step and paused too. Its
            ``/health`` waits for a token that it has the schedulers sample.
        abort_path: Where aborts go; the last answer confirms one.
        is_gathering: A request says how many tokens an event has.
        find_fault: What the server cannot do; empty where it can.
    """

    path = "/generate"
    liveness_path = "/model_info"
    abort_path = "/abort_request"
    is_gathering = True
    find_fault = staticmethod(find_sampling_fault)

    _is_incremental = False
    _is_deterministic = False
    _priority_sign = 0  # what a priority is multiplied by

    async def describe(self, client: HttpClient) -> tuple[int | None, int]:
        """The context length and the weight version that the server names."""
        facts = await client.get("/server_info")
        self._is_incremental = bool(facts.get("incremental_streaming_output"))
        self._is_deterministic = bool(facts.get("enable_deterministic_inference"))
        if facts.get("enable_priority_scheduling"):  # other servers may refuse priorities
            self._priority_sign = -1 if facts.get("schedule_low_priority_values_first") else 1
        known = read_fields(facts, _ServerInfo)
        version = parse_version(known.weight_version, "weight_version")
        return known.max_req_input_len or known.context_length, version

    def body(
        self, request: GenerationRequest, room: int, weight_version: int, chunk_tokens: int
    ) -> dict[str, Any]:
        """A request as JSON; `room` tokens fit into the context, an event has `chunk_tokens`."""
        params = build_sampling(request.sampling, room)
        params["stream_interval"] = chunk_tokens
        if self._is_deterministic:
            params["sampling_seed"] = choose_seed(request.sampling)
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": unpack_ids(request.prompt_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "extra_key": make_salt(weight_version),
        }
        if self._priority_sign:
            body["priority"] = self._priority_sign * request.priority
        return body

    def reader(self, request: GenerationRequest) -> SGLangReader:
        """Reads the answers to one request."""
        return SGLangReader(request.request_id, is_incremental=self._is_incremental)


class _ServerInfo(msgspec.Struct):
    max_req_input_len: Natural | None = None
    context_length: Natural | None = None
    weight_version: str | None = None


class _ScoredToken(msgspec.Struct, array_like=True):
    log_prob: LogProb
    id: Id


class _Span(msgspec.Struct):
    end: Natural
    version: str | None


class _MetaInfo(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None
    completion_tokens: Natural | None = None
    output_token_logprobs: list[_ScoredToken] | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    cached_tokens: Natural | None = None


class _Answer(msgspec.Struct):
    """The fields of an event that are read, and their types."""

    meta_info: _MetaInfo
    output_ids: list[Id] | None = None


class SGLangReader(AnswerReader):
    """A request under way; reads its events.

    Args:
        is_incremental: The server was started with ``--incremental-streaming-output``: an event
            has the new tokens only, and they are added up here.
    """

    __slots__ = ("_ids", "_is_incremental", "_scored")

    def __init__(self, request_id: str, *, is_incremental: bool) -> None:
        super().__init__(request_id)
        self._is_incremental = is_incremental
        self._ids: list[int] = []
        self._scored: list[Any] = []

    def read(self, answer: Mapping[str, Any]) -> list[Chunk]:
        """The chunks that an event adds."""
        checked = read_fields(answer, _Answer)
        meta: Mapping[str, Any] = answer["meta_info"]
        if checked.output_ids is None:
            if not is_abort(meta):
                raise EngineError(f"{IDS} is missing or null; expected ids")
            answer = {**answer, "output_ids": []}
        # Without ids it alone tells an end at once from ids that were left out.
        is_needed = self._is_incremental or (meta.get("finish_reason") and not answer["output_ids"])
        if checked.meta_info.completion_tokens is None and is_needed and not is_abort(meta):
            raise EngineError(f"{COUNT} is missing or null; expected the number of ids")
        return super().read(self._add_up(answer) if self._is_incremental else answer)

    def _add_up(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """All tokens so far.

        The end of an aborted request repeats the last one behind the new ones, and all log-probs.
        """
        meta = answer["meta_info"]
        ids: list[int] = answer["output_ids"]
        scored: list[Any] = meta.get("output_token_logprobs") or []
        if is_abort(meta):
            new = max((meta.get("completion_tokens") or 0) - len(self._ids), 0)
            ids, scored = ids[:new], scored[:new]
        self._ids += ids
        self._scored += scored
        whole_meta = {**meta, "output_token_logprobs": self._scored}
        return {"output_ids": self._ids, "meta_info": whole_meta}
