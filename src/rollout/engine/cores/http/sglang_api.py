"""What SGLang's own HTTP server is asked, and how its answers read.

Run against SGLang 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.engine.core import Chunk, unpack_ids
from rollout.engine.cores.http.client import HttpError
from rollout.engine.cores.http.image_inputs import NO_VIDEOS, image_fault, image_fields
from rollout.engine.cores.sglang.answers import AnswerReader, parse_version
from rollout.engine.cores.sglang.generate_requests import (
    salt_of,
    sampling_fault,
    sampling_params,
    seed_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import GenerationRequest, SamplingParams
    from rollout.engine.cores.http.client import HttpClient

NOT_FOUND = 404


class SGLangApi:
    """SGLang's ``/generate`` on one server.

    Attributes:
        path: Where requests go.
        has_abort: An abort is a message of its own, and the last answer confirms it.
        is_gathering: A request says how many tokens an event has.
    """

    path = "/generate"
    has_abort = True
    is_gathering = True

    def __init__(self) -> None:
        self._facts: Mapping[str, Any] = {}
        self._is_incremental = False
        self._is_deterministic = False
        self._priority_sign = 0  # 0: it serves requests in their order

    async def describe(self, client: HttpClient) -> tuple[int | None, int]:
        """The context length and the weight version that the server names.

        Raises:
            HttpError: It does not answer.
        """
        try:
            facts = await client.get("/server_info")
        except HttpError as error:
            if error.status != NOT_FOUND:
                raise
            facts = await client.get("/get_server_info")  # its name in older versions
        self._facts = facts
        self._is_incremental = bool(facts.get("incremental_streaming_output"))
        self._is_deterministic = bool(facts.get("enable_deterministic_inference"))
        self._priority_sign = _priority_sign(facts)
        length = facts.get("max_req_input_len") or facts.get("context_length")
        return length, parse_version(facts.get("weight_version"))

    def modalities(self, family: str) -> tuple[tuple[str, ...], str]:
        """Kinds of media that the server is sent, once it was described, and why one is missing."""
        fault = image_fault(family, self._facts)
        return ((), fault) if fault else (("image",), NO_VIDEOS)

    def fault(self, sampling: SamplingParams) -> str | None:
        """What the server cannot do; None where it can."""
        return sampling_fault(sampling)

    def body(
        self, request: GenerationRequest, room: int, weight_version: int, chunk_tokens: int
    ) -> dict[str, Any]:
        """A request as JSON.

        Args:
            room: Tokens that fit into the context after the prompt.
            chunk_tokens: Of an event.
        """
        params = sampling_params(request.sampling, room)
        params["stream_interval"] = chunk_tokens
        if self._is_deterministic:
            params["sampling_seed"] = seed_of(request.sampling)
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": unpack_ids(request.prompt_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "extra_key": salt_of(weight_version),
        }
        if self._priority_sign:
            body["priority"] = self._priority_sign * request.priority
        return body

    def media_fields(self, request: GenerationRequest) -> dict[str, Any]:
        """Fields of the body that carry the media of a request; for a thread.

        Raises:
            MediaError: One cannot be sent.
        """
        return image_fields(request)

    def reader(self, request: GenerationRequest) -> SGLangReader:
        """Reads the answers to one request."""
        return SGLangReader(
            request.request_id,
            is_incremental=self._is_incremental,
            prompt_tokens=len(request.prompt_ids) // 4 if request.media else None,
        )

    async def abort(self, client: HttpClient, request_id: str) -> None:
        """Have the server end a request.

        Raises:
            HttpError: It does not answer.
        """
        await client.call("POST", "/abort_request", {"rid": request_id})


def _priority_sign(facts: Mapping[str, Any]) -> int:
    """What a priority is multiplied by; 0 where the server knows none, and may refuse them."""
    if not facts.get("enable_priority_scheduling"):
        return 0
    return -1 if facts.get("schedule_low_priority_values_first") else 1


class SGLangReader(AnswerReader):
    """Reads the events of one request.

    Args:
        is_incremental: The server was started with ``--incremental-streaming-output``: an event
            has the new tokens only, and they are added up here.
        prompt_tokens: As many as the server must make of the prompt; None: as it is given them.
    """

    __slots__ = ("_ids", "_is_incremental", "_prompt_tokens", "_scored")

    def __init__(
        self, request_id: str, *, is_incremental: bool, prompt_tokens: int | None = None
    ) -> None:
        super().__init__(request_id)
        self._prompt_tokens = prompt_tokens
        self._is_incremental = is_incremental
        self._ids: list[int] = []
        self._scored: list[Any] = []

    def read(self, answer: Mapping[str, Any]) -> list[Chunk]:
        """The chunks that an event adds; an event that is an error ends the request."""
        fault = answer.get("error") or self._drift(answer)
        if fault is not None:
            text = fault.get("message") if isinstance(fault, dict) else fault
            return [
                Chunk(
                    request_id=self.request_id,
                    offset=self.tokens,
                    finish_reason="error",
                    error=str(text),
                )
            ]
        return super().read(self._whole(answer) if self._is_incremental else answer)

    def _drift(self, answer: Mapping[str, Any]) -> str | None:
        """What is wrong where the server has read another prompt than it was sent."""
        found = answer["meta_info"].get("prompt_tokens")
        if self._prompt_tokens in (None, found):
            return None
        return (
            f"SGLang made {found} tokens of a prompt with images that has {self._prompt_tokens}: "
            "it must be the same model, and SGLANG_MM_AVOID_RETOKENIZE not 0"
        )

    def _whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """All tokens so far; the end of an aborted request repeats one, which is not new."""
        meta = answer["meta_info"]
        new = meta.get("completion_tokens", 0) - len(self._ids)
        if new > 0:
            self._ids += answer["output_ids"][-new:]
            self._scored += (meta.get("output_token_logprobs") or ())[-new:]
        whole_meta = {**meta, "output_token_logprobs": self._scored}
        return {"output_ids": self._ids, "meta_info": whole_meta}
