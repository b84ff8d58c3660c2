"""The answers of OpenAI's responses: items, and the events that build them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.gateway.apis.response_output import Tools, message_item, opened, reasoning_item
from rollout.gateway.apis.writing import (
    COMMENT,
    AnswerStream,
    Teller,
    Telling,
    event,
    ids_of,
    openai_error,
    valid_calls,
)
from rollout.gateway.calls import Answer, Completion, Draft, GatewayCall, GatewayError, told_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


#: A sign of life that is an event.
KEEP_ALIVE = event({"type": "keepalive"}, "keepalive")


def error_body(error: GatewayError) -> Mapping[str, Any]:
    """An error, as this API tells it."""
    return openai_error(error)


class ResponsesRequest:
    """A body that was read; see `ApiRequest`.

    Attributes:
        tells_length_in_events: Whether an over-long prompt is told in the stream, where Codex
            looks for it.
        keep_alive: See `ApiRequest`; Codex counts events only, and skips those that it does not
            know.
        tools: Those of the body.
    """

    def __init__(
        self,
        call: GatewayCall,
        *,
        model: str | None,
        is_streamed: bool,
        tools: Tools,
        echoed: Mapping[str, Any],
        is_codex: bool,
    ) -> None:
        self.call = call
        self.model = model
        self.is_streamed = is_streamed
        self.tells_length_in_events = is_streamed and is_codex
        self.tools = tools
        self.keep_alive = KEEP_ALIVE if is_codex else COMMENT
        self._echoed = echoed

    def body(self, completion: Completion, teller: Teller) -> Mapping[str, Any]:
        """The whole answer."""
        (answer,) = completion.answers
        is_whole = answer.finish != "length"
        more = {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": list(self._items(answer, teller)),
            "usage": _usage(completion),
        }
        ids = ids_of(completion, answer) if self.call.wants_ids else {}
        return self.head(completion.id, teller) | more | ids

    def stream(self, teller: Teller) -> AnswerStream:
        """Each item added, told in differences, and done."""
        return _ResponsesStream(self, teller)

    def head(self, response_id: str, teller: Teller) -> dict[str, Any]:
        return {
            "id": response_id,
            "object": "response",
            "created_at": teller.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": teller.model,
            "output": [],
            "usage": None,
            **self._echoed,
        }

    def _items(self, answer: Answer, teller: Teller) -> Iterator[dict[str, Any]]:
        if answer.reasoning is not None:
            yield reasoning_item(answer.id, answer.reasoning)
        text, calls = told_text(answer), valid_calls(answer)
        if text or not calls:
            yield message_item(answer.id, text, self.log_probs(answer, teller))
        for call in calls:
            yield self.tools.item(call)

    def log_probs(self, answer: Answer, teller: Teller) -> list[dict[str, Any]]:
        """Of its text, where they are asked for."""
        return teller.log_probs(answer) if self.call.wants_log_probs else []


class _ResponsesStream:
    """See `AnswerStream`."""

    def __init__(self, request: ResponsesRequest, teller: Teller) -> None:
        self._request = request
        self._teller = teller
        self._telling = Telling()
        self._has_begun = False
        self._number = 0  # of the next event
        self._count = 0  # items that are done
        self._item: dict[str, Any] = {}  # as the open one was added; else empty
        self._said = ""  # in it
        self._whole: Callable[..., dict[str, Any]] = dict  # makes it of its text
        self._log_probs: list[Any] = []  # those of the text, known at the end

    def more(self, draft: Draft) -> bytes:
        (said,) = draft.answers
        if said is None:
            return b""
        events = [*self._begin(draft.id), *self._texts(said.id, said.text, said.reasoning)]
        return b"".join(events)

    def end(self, completion: Completion) -> bytes:
        return b"".join(self._rest(completion))

    def failure(self, error: GatewayError) -> bytes:
        told = error_body(error)["error"]
        if not self._request.tells_length_in_events:
            return event({"type": "error", "error": told, "sequence_number": self._number}, "error")
        head = self._request.head("", self._teller) | {"status": "failed"}
        failed = head | {"error": {"code": told["code"], "message": told["message"]}}
        return b"".join([*self._begin(""), self._event("response.failed", response=failed)])

    def _event(self, kind: str, **data: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number} | data
        self._number += 1
        return event(numbered, kind)

    def _begin(self, response_id: str) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            head = self._request.head(response_id, self._teller)
            yield self._event("response.created", response=head)
            yield self._event("response.in_progress", response=head)

    def _texts(self, answer_id: str, text: str, reasoning: str | None) -> Iterator[bytes]:
        """What is new of thoughts and text, each in its item; thoughts that come late after it."""
        has_thought = self._telling.reasoning is not None
        thought, said = self._telling.more_reasoning(reasoning), self._telling.more_text(text)
        is_late = self._is_open("message")
        if thought is not None and not is_late:
            yield from self._think(answer_id, thought)
        if said:
            yield from self._say(answer_id, said)
        if thought and is_late:
            thought = thought.removeprefix("\n") if has_thought else thought
            yield from self._think(answer_id, thought, is_late=True)

    def _is_open(self, kind: str) -> bool:
        return bool(self._item) and self._item["type"] == kind

    def _add(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        yield self._event("response.output_item.added", output_index=self._count, item=opened(item))
        self._item, self._said = item, ""

    def _think(self, answer_id: str, text: str, *, is_late: bool = False) -> Iterator[bytes]:
        """Add to the thoughts that are open; else open some."""
        if not self._is_open("reasoning"):
            yield from self._add(reasoning_item(answer_id, "", is_late=is_late))
            yield self._of_summary("part.added", part=self._item["summary"][0])
            self._whole = partial(reasoning_item, answer_id, is_late=is_late)
        if text:
            self._said += text
            yield self._of_summary("text.delta", delta=text)
            yield self._of_text("response.reasoning_text.delta", delta=text)

    def _say(self, answer_id: str, text: str) -> Iterator[bytes]:
        """Add to the text that is open; else open one."""
        if not self._is_open("message"):
            yield from self._add(message_item(answer_id, "", []))
            yield self._of_text("response.content_part.added", part=self._item["content"][0])
            self._whole = partial(message_item, answer_id, log_probs=self._log_probs)
        if text:
            self._said += text
            yield self._of_text("response.output_text.delta", delta=text, logprobs=[])

    def _close(self) -> Iterator[bytes]:
        """Say what the open item is, if one is."""
        if not self._item:
            return
        item = self._whole(text=self._said)
        if item["type"] == "message":
            (part,) = item["content"]
            told = {"text": self._said, "logprobs": part["logprobs"]}
            yield self._of_text("response.output_text.done", **told)
            yield self._of_text("response.content_part.done", part=part)
        else:
            yield self._of_summary("text.done", text=self._said)
            yield self._of_summary("part.done", part=item["summary"][0])
            yield self._of_text("response.reasoning_text.done", text=self._said)
        yield self._event("response.output_item.done", output_index=self._count, item=item)
        self._count += 1
        self._item = {}

    def _rest(self, completion: Completion) -> Iterator[bytes]:
        (answer,) = completion.answers
        self._log_probs += self._request.log_probs(answer, self._teller)
        yield from self._begin(completion.id)
        text, calls = told_text(answer), valid_calls(answer)
        yield from self._texts(answer.id, text, answer.reasoning)
        if not text and not calls:
            yield from self._say(answer.id, "")
        yield from self._close()
        for call in calls:
            yield from self._call(self._request.tools.item(call))
        whole = self._request.body(completion, self._teller)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _call(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        place, where = {"output_index": self._count}, {"item_id": item["id"]}
        yield self._event("response.output_item.added", **place, item=opened(item))
        if item["type"] == "function_call":
            stem, text = "response.function_call_arguments", item["arguments"]
            named = {"arguments": text, "name": item["name"]}
        else:
            stem, text = "response.custom_tool_call_input", item["input"]
            named = {"input": text}
        yield self._event(f"{stem}.delta", **place, **where, delta=text)
        yield self._event(f"{stem}.done", **place, **where, **named)
        yield self._event("response.output_item.done", **place, item=item)
        self._count += 1

    def _of_text(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, **self._place(), content_index=0, **data)

    def _of_summary(self, kind: str, **data: Any) -> bytes:
        kind = f"response.reasoning_summary_{kind}"
        return self._event(kind, **self._place(), summary_index=0, **data)

    def _place(self) -> dict[str, Any]:
        return {"output_index": self._count, "item_id": self._item["id"]}


def _usage(completion: Completion) -> Mapping[str, Any]:
    read = len(completion.prompt_ids)
    sampled = sum(len(answer.ids) for answer in completion.answers)
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + sampled,
    }
