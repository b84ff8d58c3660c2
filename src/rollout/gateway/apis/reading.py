"""Bodies to values: what every API refuses in the same way, with the field at fault.

What cannot be served raises a `GatewayError`, here and in the modules of the APIs.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec

from rollout.gateway.calls import Api, ClientMessage, GatewayCall, GatewayError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

#: Values within values, in what reaches templates and comparisons.
MAX_DEPTH = 64
#: Messages of one request with their calls and images; each costs the loop some microseconds.
MAX_ITEMS = 10_000
#: JSON values of one body, and of its calls' arguments; each costs about a microsecond.
MAX_VALUES = 300_000
MAX_TOOLS = 1024
MAX_STOP_IDS = 1024
#: Strings that end a turn, of one request.
MAX_STOPS = 64
MAX_TOP_LOG_PROBS = 20
MAX_SAMPLES = 128

Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
Penalty = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Repetition = Annotated[float, msgspec.Meta(gt=0, le=100)]
Tokens = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
StopIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_IDS)]
Stop = Annotated[str, msgspec.Meta(min_length=1)]
StopList = Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)]
Stops = Stop | StopList
Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
TopLogProbs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOG_PROBS)]

_PATH = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_ONE_OF = re.compile(r"^Expected `str` matching regex '\^\((.*)\)\$'$")
#: In the system prompt of a coding agent's call for the title of a session.
_TITLE = re.compile(r"\btitle generator\b", re.IGNORECASE)
_ANY = msgspec.json.Decoder(Any)
#: Types of parts that are text, in whatever API.
_TEXTS = ("text", "input_text", "output_text", "summary_text", "refusal")
#: What leaves the model free in its output.
_FREE = (None, "text", "auto", "none")


def match_one(*names: str) -> msgspec.Meta:
    """Match strings that are one of these; the error of another one lists them.

    Not for a field that may hold a dict or list too: msgspec 0.22 frees the pattern as if it were a
    type, and Python ends in a segmentation fault.
    """
    return msgspec.Meta(pattern=f"^({'|'.join(names)})$")


def make_error(message: str, field: str | None = None) -> GatewayError:
    """The error of a request that cannot be served."""
    return GatewayError(400, "invalid_request", message, field)


def refuse(field: str, message: str) -> NoReturn:
    """Refuse a field of the body."""
    raise make_error(f"{field}: {message}", field)


def check_values(*texts: bytes) -> None:
    """Refuse JSON of more than `MAX_VALUES` values, before they take time and memory."""
    bare = (text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts)
    # Every second part stands outside strings; so many values have no more strings than that.
    outside = b"".join(b"".join(text.split(b'"', 6 * MAX_VALUES)[::2]) for text in bare)
    if sum(map(outside.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise make_error(f"expected at most {MAX_VALUES:,} JSON values")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, within: str = "") -> T:
    """The value of a body, or of a part of one that stands at `within`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        problem, path = split_problem(error)
        dot = "." if within and path and not path.startswith("[") else ""
        field = f"{within}{dot}{path}"
        raise make_error(f"{field}: {problem}" if field else problem, field or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise make_error(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise make_error(f"{within or 'the body'}: nested too deeply", within or None) from None


def split_problem(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong with a value, and where it stands; "" where the error names none."""
    found = _PATH.match(str(error))
    problem, path = (found[1], found[2]) if found else (str(error), "")
    if choices := _ONE_OF.match(problem):
        problem = f"expected one of {choices[1].replace('|', ', ')}"
    return problem, path


def decode_value(raw: bytes | msgspec.Raw, field: str) -> Any:
    """The value of a part of the body, nested no deeper than `MAX_DEPTH`."""
    return check_depth(decode(_ANY, raw, field), field)


def check_depth(value: Any, field: str) -> Any:
    """Refuse a value that is nested deeper than `MAX_DEPTH`; returns it."""
    if is_too_deep(value):
        refuse(field, f"nested too deeply; expected at most {MAX_DEPTH} levels")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether a value has more than `MAX_DEPTH` levels."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [v.values() if isinstance(v, dict) else v for v in level if type(v) in (dict, list)]
        level = [each for values in inner for each in values]
        depth += 1
    return depth > MAX_DEPTH


def read_arguments(text: str, field: str) -> Any:
    """The JSON value of a call's arguments; the text itself where it is no JSON."""
    try:
        return check_depth(_ANY.decode(text), field)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text if text else {}
    except RecursionError:
        raise make_error(f"{field}: nested too deeply", field) from None


class FunctionTool(msgspec.Struct):
    """A function that may be called, in whatever API."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")


def make_schema(
    tool: FunctionTool, field: str, parameters_name: str = "parameters"
) -> Mapping[str, Any]:
    """A function as `GatewayCall.tools` has it."""
    if not tool.name:
        refuse(f"{field}.name", "expected a name")
    parameters = decode_value(tool.parameters, f"{field}.{parameters_name}")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{field}.{parameters_name}", "expected a JSON schema, an object")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


class Part(msgspec.Struct):
    """A part of a content, in whatever API."""

    type: str = ""  # a text may leave it out
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    video_url: Any = None
    source: Any = None


def make_message(
    role: str, content: str | Sequence[Part] | None, field: str, first: int = 0, **more: Any
) -> ClientMessage:
    """A message of a content: its texts joined, and all its parts where it shows images.

    Args:
        role: Whose it is.
        content: What stands at `field`, from its part `first` on.
        field: Where it stands.
        first: The number of its first part.
        more: Other fields of the message.
    """
    if content is None or isinstance(content, str):
        return ClientMessage(role=role, text=content or "", **more)
    parts = [_read_part(part, f"{field}[{at}]") for at, part in enumerate(content, first)]
    text = "\n".join(part for part in parts if isinstance(part, str))
    if all(isinstance(part, str) for part in parts):
        return ClientMessage(role=role, text=text, **more)
    if role not in ("user", "tool"):
        refuse(field, "images may stand in messages of users and tools only")
    return ClientMessage(role=role, text=text, parts=tuple(filter(None, parts)), **more)


def _read_part(part: Part, field: str) -> str | Mapping[str, Any]:
    if part.type in _TEXTS or (not part.type and part.text is not None):
        return part.text or part.refusal or ""
    return make_media_part(part.type, part.image_url or part.video_url or part.source, field)


def make_media_part(kind: str, value: Any, field: str) -> Mapping[str, Any]:
    """A part of a content that shows an image or a video.

    Args:
        kind: Its type, as the API calls it.
        value: A URL, ``{"url": …}``, or ``{"type": "base64", "media_type": …, "data": …}``.
        field: Where it stands.
    """
    known = _MEDIA.get(kind)
    if known is None:
        served = "audio is not served" if "audio" in kind else "only text and images are served"
        refuse(f"{field}.type", f"{kind!r}: {served}")
    if isinstance(value, dict) and value.get("type") == "base64":
        mime, data = value.get("media_type"), value.get("data")
        if not (isinstance(mime, str) and isinstance(data, str)):
            refuse(field, "expected media_type and data")
        return {"type": known, known: f"data:{mime};base64,{data}"}
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        refuse(field, "expected a URL, or base64 with its media_type")
    return {"type": known, known: url}


#: Names of parts with media, and theirs in messages of prompts.
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}


def read_type(form: Any) -> Any:
    """Of a ``{"type": …}``, or the word alone that stands for it."""
    return form.get("type") if isinstance(form, dict) else form


def list_forcing(**forms: Any) -> tuple[str, ...]:
    """The names of those of a client's ``{"type": …}`` that would force the model's output."""
    return tuple(name for name, form in forms.items() if read_type(form) not in _FREE)


class SamplingFields(msgspec.Struct):
    """How turns are sampled, in whatever API."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    stop_token_ids: StopIds | None = None
    seed: int | None = None

    def list_sampling(self, **more: Any) -> dict[str, Any]:
        """The fields of `SamplingConfig` that the client sets; `more` are the API's own."""
        values = {name: getattr(self, name) for name in SamplingFields.__struct_fields__} | more
        del values["seed"]  # not the configuration's
        if self.top_k == 0:
            values["top_k"] = -1  # all, as elsewhere
        return {name: value for name, value in values.items() if value not in (None, ())}

    def convert_seed(self) -> int | None:
        """A seed that engines take."""
        return None if self.seed is None else self.seed % 2**63


class Body(SamplingFields):
    """Fields that bodies of every API have, and those that no engine here can honour."""

    model: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    functions: Any = None
    background: bool | None = None
    conversation: Any = None

    def make_call(
        self,
        api: Api,
        body: bytes,
        headers: Mapping[str, str],
        *,
        messages: tuple[ClientMessage, ...],
        stop: str | list[str] | None,
        max_new_tokens: int | None,
        top_log_probs: int | None = None,
        is_title: bool = False,
        **own: Any,
    ) -> GatewayCall:
        """The call that a body asks for.

        Args:
            api: Which has the body.
            body: Its bytes.
            headers: Of the request.
            messages: The conversation.
            stop: Strings that end a turn.
            max_new_tokens, top_log_probs: Of the sampling.
            is_title: Whether a coding agent wants a title for people to read.
            own: Other fields of the call.
        """
        for name, why in _IMPOSSIBLE.items():
            if getattr(self, name):
                refuse(name, why)
        agent_id = headers.get("x-openai-subagent") or headers.get("x-claude-code-agent-id")
        system = "".join(each.text[:2000] for each in messages[:1] if each.role == "system")
        digest = hashlib.blake2b(body, digest_size=16, person=api.encode())
        digest.update(b"\0%s" % (agent_id or "").encode())
        call = GatewayCall(
            api=api,
            messages=messages,
            sampling=self.list_sampling(max_new_tokens=max_new_tokens, top_log_probs=top_log_probs),
            seed=self.convert_seed(),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            agent_id=agent_id,
            is_side=not own.get("tools") and (is_title or _TITLE.search(system) is not None),
            wants_ids=bool(self.return_token_ids),
            digest=digest.digest(),
            is_retry=headers.get("x-stainless-retry-count", "").strip("0").isdecimal(),
            **own,
        )
        count = sum(1 + len(each.calls) + len(each.parts) for each in messages)
        if not 0 < count <= MAX_ITEMS:
            refuse(call.field, f"expected 1 to {MAX_ITEMS:,} messages, calls and images")
        names = {tool["function"]["name"] for tool in call.tools}
        if len(names) < len(call.tools) or len(names) > MAX_TOOLS:
            refuse("tools", f"expected at most {MAX_TOOLS}, each of another name")
        return call


_TOOL_CHOICES = ("auto", "none", "required")


class OpenAIBody(Body):
    """Fields that OpenAI's APIs share beside these."""

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stop: Stops | None = None
    top_logprobs: TopLogProbs | None = None

    def __post_init__(self) -> None:
        # A dict may stand there too: no `match_one`.
        if isinstance(self.tool_choice, str) and self.tool_choice not in _TOOL_CHOICES:
            refuse("tool_choice", f"expected one of {', '.join(_TOOL_CHOICES)}")


_IMPOSSIBLE = {
    "min_tokens": "engines end a turn where the model does; expected 0 or none",
    "ignore_eos": "engines end a turn where the model does; expected false",
    "logit_bias": "no engine here changes logits; expected none",
    "functions": "not served; expected tools",
    "background": "not served; expected false",
    "conversation": "not served; expected previous_response_id",
}
