"""Bodies to values: what every API refuses in the same way, with the field at fault.

What cannot be served raises a `GatewayError`, here and in the modules of the APIs.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar

import msgspec

from rollout.gateway.calls import ClientMessage, GatewayCall, GatewayError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

#: Values within values, in what reaches templates and comparisons.
MAX_DEPTH = 64
#: Messages of one request with their parts and calls; each costs the loop some microseconds.
MAX_ITEMS = 10_000
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
StopIds = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_IDS)]
Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
TopLogProbs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOG_PROBS)]

_PATH = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
#: In the system prompt of a coding agent's call for the title of a session.
_TITLE = re.compile(r"\btitle generator\b", re.IGNORECASE)
_ANY = msgspec.json.Decoder(Any)


def make_error(message: str, field: str | None = None) -> GatewayError:
    """The error of a request that cannot be served."""
    return GatewayError(400, "invalid_request", message, field)


def refuse(field: str, message: str) -> NoReturn:
    """Refuse a field of the body."""
    raise make_error(f"{field}: {message}", field)


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
    return (found[1], found[2]) if found else (str(error), "")


def refuse_many(messages: Sequence[Any], field: str, *inner: str) -> None:
    """Refuse a conversation of more messages, parts and calls than one request may have.

    Args:
        messages: As they were decoded.
        field: Where they stand.
        inner: Fields of messages, and of their parts, that hold parts or calls, or text.
    """
    count, level = 0, messages
    while level and count <= MAX_ITEMS:
        count += len(level)
        values = [getattr(each, name, None) for each in level[:MAX_ITEMS] for name in inner]
        level = [each for value in values if isinstance(value, list) for each in value]
    if count > MAX_ITEMS:
        refuse(field, f"more than {MAX_ITEMS:,} messages, parts and calls")


def decode_value(raw: bytes | msgspec.Raw, field: str) -> Any:
    """The value of a part of the body, nested no deeper than `MAX_DEPTH`."""
    value = decode(_ANY, raw, field)
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
        _ANY.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text if text else {}
    except RecursionError:
        pass
    return decode_value(text.encode(errors="replace"), field)


class FunctionTool(msgspec.Struct):
    """A function that may be called, in whatever API."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")


def make_schema(tool: FunctionTool, field: str) -> Mapping[str, Any]:
    """A function as `GatewayCall.tools` has it."""
    if not tool.name:
        refuse(f"{field}.name", "expected a name")
    parameters = decode_value(tool.parameters, f"{field}.parameters")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{field}.parameters", "expected a JSON schema, an object")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def choose_tool(name: str, tools: Sequence[Mapping[str, Any]], field: str) -> str:
    """The name of a tool that the client wants called."""
    if name not in {tool["function"]["name"] for tool in tools}:
        refuse(field, f"no tool is named {name!r}")
    return name


class Content(NamedTuple):
    """The content of a message.

    Attributes:
        text: Its texts, joined.
        parts: As `ClientMessage.parts`.
    """

    text: str
    parts: tuple[str | Mapping[str, Any], ...] = ()


def join_parts(parts: Sequence[str | Mapping[str, Any]]) -> Content:
    """Texts, and images among them, as a message has them."""
    text = "\n".join(part for part in parts if isinstance(part, str))
    if all(isinstance(part, str) for part in parts):
        return Content(text)
    return Content(text, tuple(part for part in parts if part))


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


def check_stops(stop: str | list[str] | None, field: str) -> tuple[str, ...]:
    """Strings that end a turn."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        refuse(field, f"{len(stops)} strings; expected at most {MAX_STOPS}")
    if "" in stops:
        refuse(field, "expected strings that are not empty")
    return stops


def convert_top_k(top_k: int | None) -> int | None:
    """As engines take it: 0 means all, as elsewhere."""
    return -1 if top_k == 0 else top_k


def convert_seed(seed: int | None) -> int | None:
    """A seed that engines take."""
    return None if seed is None else seed % 2**63


def digest_body(api: str, body: bytes) -> bytes:
    """The same for the same body in the same API."""
    return hashlib.blake2b(body, digest_size=16, person=api.encode()).digest()


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether a client marks a request as repeated, as OpenAI's and Anthropic's SDKs do."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and bool(count.strip("0"))


def asks_for_title(messages: Sequence[ClientMessage]) -> bool:
    """Whether a coding agent wants a title for people to read."""
    first = messages[0] if messages else None
    return first is not None and first.role == "system" and bool(_TITLE.search(first.text[:2000]))


def is_free(form: object) -> bool:
    """Whether a ``{"type": …}`` of a client leaves the model free in its output."""
    return not isinstance(form, dict) or form.get("type") in (None, "text", "auto", "none")


def check_call(call: GatewayCall) -> GatewayCall:
    """A call that has a message."""
    if not call.messages:
        refuse(call.field, "expected one message or more")
    return call


class Body(msgspec.Struct):
    """Fields that bodies of every API have, and those that no engine here can honour."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: int | None = None
    return_token_ids: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None

    def refuse_impossible(self) -> None:
        """Raise for those that cannot be honoured and are set."""
        for name, why in _IMPOSSIBLE.items():
            if getattr(self, name):
                refuse(name, why)

    def list_sampling(self, **more: Any) -> dict[str, Any]:
        """The fields of `SamplingConfig` that the client sets; `more` are the API's own."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": convert_top_k(self.top_k),
            "min_p": self.min_p,
            **more,
        }
        return {name: value for name, value in values.items() if value is not None}


class OpenAIBody(Body):
    """Fields that OpenAI's APIs share beside these."""

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    stop: str | list[str] | None = None
    top_logprobs: TopLogProbs | None = None

    def list_sampling(self, **more: Any) -> dict[str, Any]:
        """As every API's, and the penalties."""
        return super().list_sampling(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            **more,
        )

    def list_forcing(self, **forms: Any) -> tuple[str, ...]:
        """The fields that would force the model: the choice among tools, or one of these forms."""
        is_chosen = self.tool_choice == "required" or not is_free(self.tool_choice)
        forcing = [name for name, form in forms.items() if not is_free(form)]
        return (*(["tool_choice"] if is_chosen else []), *forcing)

    def read_choice(self, tools: Sequence[Mapping[str, Any]], name: Any, field: str) -> str:
        """The choice among tools; `name` is that of the one at `field`, where it names one."""
        if isinstance(self.tool_choice, str):
            if self.tool_choice not in ("auto", "none", "required"):
                expected = "expected 'auto', 'none', 'required' or a function"
                refuse("tool_choice", f"{self.tool_choice!r}; {expected}")
            return self.tool_choice
        return choose_tool(name, tools, field) if isinstance(name, str) else "auto"


_IMPOSSIBLE = {
    "min_tokens": "engines end a turn where the model does; expected 0 or none",
    "ignore_eos": "engines end a turn where the model does; expected false",
    "logit_bias": "no engine here changes logits; expected none",
}
