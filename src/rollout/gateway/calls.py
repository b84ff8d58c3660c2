"""What a client asks for and what it gets, whatever API it speaks.

Each API is a pair of functions: one makes a `GatewayCall` of a body, one makes bodies and events of
`Answer`s. Between them stands nothing of any API.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from rollout.types import InvalidToolCall, ToolCall

Api = Literal["chat", "responses", "messages"]
#: "stop_string": one of the client's, which engines do not know.
Finish = Literal["stop", "length", "calls", "stop_string"]


#: Ids that are minted here end with so many characters, whatever an API puts before them.
ID_LENGTH = 24
#: What ids of calls begin with; the beginning of their answer's follows, and which call it is.
_CALL, _OF_ANSWER = "call_", 20


def call_id(answer_id: str, at: int) -> str:
    """The id of an answer's call."""
    return f"{_CALL}{answer_id[:_OF_ANSWER]}{at:0{ID_LENGTH - _OF_ANSWER}x}"


def are_of_one_answer(one: str, other: str) -> bool:
    """Whether these are ids of calls of one answer."""
    shared = len(_CALL) + _OF_ANSWER
    is_minted = one.startswith(_CALL) and len(one) == len(other) == len(_CALL) + ID_LENGTH
    return is_minted and one[:shared] == other[:shared]


class GivenCall(msgspec.Struct, frozen=True):
    """A tool call as a client gives it back.

    Attributes:
        arguments: The JSON value; a string where what it sent is no JSON.
        id: As the client has it, "" where it has none.
    """

    name: str
    arguments: Any
    id: str = ""


class GivenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a request.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool".
        text: Its text parts, joined; "" where it has none.
        reasoning: What the model thought, as echoed; None where the client sent nothing of it.
        calls: What the model called.
        call_id: Of a tool's answer: the call's.
        name: Of the tool or the speaker, where the client says one.
        is_error: Of a tool's answer, where the client says so.
        ids: What else names it: ids of messages and items, signatures, encrypted content.
        parts: Where it shows images or videos, all that it says and shows, in order: texts, and
            parts as messages of prompts have them; else empty.
        is_instructions: Whether it is what the Responses API keeps apart from its input.
    """

    role: str
    text: str = ""
    reasoning: str | None = None
    calls: tuple[GivenCall, ...] = ()
    call_id: str = ""
    name: str | None = None
    is_error: bool = False
    ids: tuple[str, ...] = ()
    parts: tuple[str | Mapping[str, Any], ...] = ()
    is_instructions: bool = False


class Asker(NamedTuple):
    """Who asks: the main agent has no id, and what it asks is not beside its work.

    Attributes:
        agent_id: Of a sub-agent.
    """

    is_side: bool = False
    agent_id: str | None = None


class GatewayCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request for a generation.

    Attributes:
        messages: The conversation; of the Responses API what is new since `previous_id`, if any. A
            system message that comes first then is said of the whole conversation.
        tools: OpenAI-style ``{"type": "function", "function": {…}}``.
        text_tools: Names of those whose calls the client is told, and gives back, as plain text.
        tool_choice: "auto", "none", "required" or the name of one; engines cannot force a call, so
            that all but "none" mean "auto".
        parallel_calls: Whether one turn may call several tools.
        sampling: Fields of `SamplingConfig` that the client sets; `max_new_tokens` among them.
        seed: The client's; None: derived from what was said before.
        n: Samples of one request.
        stop: Strings that end the turn where its text first contains one.
        previous_id: Of the Responses API: the answer that the messages follow.
        agent_id: Names a sub-agent, where the client says one.
        is_side: Whether its form says that it is beside the work: a title, a summary for people.
        wants_log_probs, wants_ids: Whether the answer carries them.
        forced_by: Fields of the body that would force what the model says, which no engine does.
        digest: Of the body and the route, the same for the same bytes.
        is_retry: Whether its client says that it has asked so before.
    """

    api: Api
    messages: tuple[GivenMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    text_tools: frozenset[str] = frozenset()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    sampling: Mapping[str, Any] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    previous_id: str | None = None
    agent_id: str | None = None
    is_side: bool = False
    wants_log_probs: bool = False
    wants_ids: bool = False
    forced_by: tuple[str, ...] = ()
    digest: bytes = b""
    is_retry: bool = False

    @property
    def field(self) -> str:
        """Of the body: where its messages stand."""
        return "input" if self.api == "responses" else "messages"

    @property
    def asker(self) -> Asker:
        """Who asks."""
        return Asker(self.is_side, self.agent_id)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model, as a client is told of it.

    Attributes:
        id: Minted here, unique in the trajectory; clients may echo it in forms of their API.
        text: Without reasoning, calls and special tokens; cut before a stop string.
        written: The text with invalid calls where the model wrote them; None where it says nothing
            of them.
        reasoning: None where there is none.
        calls: In order, with ids minted here; an `InvalidToolCall` is told as text.
        finish: Why it ended.
        stop_string: The one that ended it.
        ids: Sampled, int32; those past a stop string are not among them.
        log_probs: float32, one for each of `ids`.
        top_ids, top_log_probs: For each of `ids` the most likely ones, where they were asked for.
        weight_versions: One for each of `ids`.
    """

    id: str
    text: str
    reasoning: str | None
    calls: tuple[ToolCall | InvalidToolCall, ...]
    finish: Finish
    stop_string: str | None = None
    written: str | None = None
    ids: array[int]
    log_probs: array[float]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_log_probs: tuple[tuple[float, ...], ...] = ()
    weight_versions: tuple[int, ...] = ()


def told_text(answer: Answer) -> str:
    """The text of an answer as clients see it: calls that could not be parsed stand in it."""
    if answer.written is not None:
        return answer.written
    invalid = [call.raw for call in answer.calls if isinstance(call, InvalidToolCall)]
    return "\n".join(part for part in (answer.text, *invalid) if part)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What answers one `GatewayCall`: as many answers as it asked for.

    Attributes:
        id: Minted here: the response's own, for `previous_id`.
        prompt_ids: What the model read, int32.
        cached_tokens: Of those, what needed no prefill.
    """

    id: str
    answers: tuple[Answer, ...]
    prompt_ids: array[int]
    cached_tokens: int = 0


class GatewayError(Exception):
    """A request that is refused; each API says it in its own shape.

    Attributes:
        status: Of HTTP; 400, 401, 403, 404, 405, 413, 500 or 503. SDKs are told to repeat none.
        code: A word for programs: "invalid_request", "authentication", "permission", "not_found",
            "too_large", "context_length" (each API has its own code for that), "trajectory_ended",
            "limit", "engine", "loop_blocked".
        field: Of the body, where one is at fault.
    """

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field


def check_forced(call: GatewayCall, unenforced: Literal["accept", "refuse"]) -> None:
    """Refuse what would force the model, unless `gateway.unenforced` accepts it.

    Raises:
        GatewayError: It is refused.
    """
    if unenforced == "refuse" and call.forced_by:
        field = call.forced_by[0]
        why = 'nothing holds the model to it, and gateway.unenforced is "refuse"'
        raise GatewayError(400, "invalid_request", f"{field}: {why}; expected none", field)


def refused_messages(call: GatewayCall, error: Exception) -> GatewayError:
    """What the template, or the model, cannot take of a call's messages, in words for its client.

    Only chat has its messages one for one as they were given: elsewhere no number names one.
    """
    words = str(error.__cause__ or error)  # without what was to be done with them here
    if call.api != "chat":
        words = re.sub(r"^messages\[\d+\]", call.field, words)
    return GatewayError(400, "invalid_request", words, call.field)
