"""What a client asks for and what it gets, whatever API it speaks.

Each module of `apis` makes a `GatewayCall` of a body, and bodies and events of `Answer`s. Between
them stands nothing of any API.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollout.types import InvalidToolCall, ToolCall

Api = Literal["chat", "responses", "messages"]
#: "stop_string": one of the client's, which engines do not know.
Finish = Literal["stop", "length", "calls", "stop_string"]

#: Ids that are minted here end with so many characters, whatever an API puts before them.
ID_LENGTH = 24
#: What ids of calls begin with; the beginning of their answer's follows, and which call it is.
_CALL, _OF_ANSWER = "call_", 20


def mint_call_id(answer_id: str, at: int) -> str:
    """The id of an answer's call."""
    return f"{_CALL}{answer_id[:_OF_ANSWER]}{at:0{ID_LENGTH - _OF_ANSWER}x}"


def are_of_one_answer(one: str, other: str) -> bool:
    """Whether these are ids of calls of one answer."""
    shared = len(_CALL) + _OF_ANSWER
    is_minted = one.startswith(_CALL) and len(one) == len(other) == len(_CALL) + ID_LENGTH
    return is_minted and one[:shared] == other[:shared]


class ClientCall(msgspec.Struct, frozen=True):
    """A tool call as a client gives it back.

    Attributes:
        arguments: The JSON value; a string where what it sent is no JSON.
        id: As the client has it, "" where it has none.
    """

    name: str
    arguments: Any
    id: str = ""


class ClientMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a request.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool".
        text: Its text parts, joined; "" where it has none.
        reasoning: What the model thought, as echoed; None where the client sent nothing of it.
        calls: What the model called.
        call_id: Of a tool's result: the call's.
        name: Of the tool or the speaker, where the client sends one.
        ids: What else names it: ids of messages and items, signatures, encrypted content.
        parts: Where it shows images or videos, all of its content in order: texts, and parts as
            messages of prompts have them; else empty.
        is_instructions: Whether it is what the Responses API keeps apart from its input.
    """

    role: str
    text: str = ""
    reasoning: str | None = None
    calls: tuple[ClientCall, ...] = ()
    call_id: str = ""
    name: str | None = None
    ids: tuple[str, ...] = ()
    parts: tuple[str | Mapping[str, Any], ...] = ()
    is_instructions: bool = False


class GatewayCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request for a generation.

    Attributes:
        messages: The conversation; of the Responses API what is new since `previous_id`, if any. A
            system message that comes first then is meant for the conversation from its beginning.
        tools: OpenAI-style ``{"type": "function", "function": {…}}``.
        text_tools: Names of those whose calls the client gets, and gives back, as plain text.
        allows_calls: Whether the model's calls are calls; else they are text.
        parallel_calls: Whether one turn may call several tools.
        sampling: Fields of `SamplingConfig` that the client sets; `max_new_tokens` among them.
        seed: The client's; None: derived from the tokens before the turn.
        n: Samples of one request.
        stop: Strings that end the turn where its text first contains one.
        previous_id: Of the Responses API: the answer that the messages follow.
        agent_id: Names a sub-agent, where the client names one.
        is_side: Whether its form shows that it is beside the work: a title, a summary for people.
        wants_log_probs, wants_ids: Whether the answer carries them.
        forced_by: Fields of the body that would force the model's output, which no engine does.
        digest: Of the body and the route, the same for the same bytes.
        is_retry: Whether its client says that it has asked so before.
    """

    api: Api
    messages: tuple[ClientMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    text_tools: frozenset[str] = frozenset()
    allows_calls: bool = True
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


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model, as a client gets it.

    Attributes:
        id: Minted here, unique in the trajectory; clients may echo it in forms of their API.
        text: Without reasoning, calls and special tokens; cut before a stop string.
        written: The text with invalid calls where the model wrote them; None where it has none of
            them.
        reasoning: None where there is none.
        calls: In order, with ids minted here; an `InvalidToolCall` is sent as text.
        finish: Why it ended.
        stop_string: The one that ended it.
        ids: Sampled, int32; those past a stop string are not among them.
        log_probs: float32, one for each of `ids`.
        top_ids, top_log_probs: For each of `ids` the most likely ones, where they were asked for.
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

    @property
    def client_text(self) -> str:
        """Its text as clients see it: calls that could not be parsed stand in it."""
        if self.written is not None:
            return self.written
        invalid = [call.raw for call in self.calls if isinstance(call, InvalidToolCall)]
        return "\n".join(part for part in (self.text, *invalid) if part)

    @property
    def valid_calls(self) -> list[ToolCall]:
        """The calls that clients can run."""
        return [call for call in self.calls if isinstance(call, ToolCall)]


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

    @property
    def sampled_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.ids) for answer in self.answers)


class GatewayError(Exception):
    """A request that is refused; each API has its own shape for it.

    Attributes:
        status: Of HTTP; SDKs are told to repeat none.
        code: A word for programs: "invalid_request", "authentication", "permission", "not_found",
            "model_not_found", "method_not_allowed", "gone", "running", "too_large",
            "context_length", "trajectory_ended", "limit", "engine", "loop_blocked". OpenAI's APIs
            have words of their own for some.
        field: Of the body, where one is at fault.
    """

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field


def refuse_ended(why: str = "the trajectory has ended") -> GatewayError:
    """What calls get that come too late; clients do not repeat it."""
    return GatewayError(403, "trajectory_ended", why)


def check_forced(call: GatewayCall, unenforced: Literal["accept", "refuse"]) -> None:
    """Refuse what would force the model, unless `gateway.unenforced` accepts it.

    Raises:
        GatewayError: It is refused.
    """
    if unenforced == "refuse" and call.forced_by:
        field = call.forced_by[0]
        why = 'nothing holds the model to it, and gateway.unenforced is "refuse"'
        raise GatewayError(400, "invalid_request", f"{field}: {why}; expected none", field)


def refuse_messages(call: GatewayCall, error: Exception) -> GatewayError:
    """The error of messages that the template, or the model, cannot take, in a client's words.

    Only chat has its messages one for one as the client sent them: elsewhere no number names one.
    """
    words = str(error.__cause__ or error)  # without what was to be done with them here
    if call.api != "chat":
        words = re.sub(r"^messages\[\d+\]", call.field, words)
    return GatewayError(400, "invalid_request", words, call.field)
