"""What a tool answers: any value that a function returns becomes it, and a model reads so much."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from rollout.errors import MediaError, ToolError
from rollout.media import Media
from rollout.media.parts import (
    NO_AUDIO,
    check_answer,
    is_media_file,
    is_media_part,
    kind_of_media,
    media_part,
)
from rollout.scopes import find_exception
from rollout.types import read_message

#: Characters of an exception's message that the model sees.
MAX_MESSAGE = 500
#: What the model reads where a tool answers None.
NO_OUTPUT = "(no output)"
TruncateSide = Literal["left", "right", "middle"]

#: What stands in place of the removed text, by the side that lost it; as in verl.
MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}
#: Our names of sides by verl's, which are those of the side kept.
SIDES_BY_VERL: dict[str, TruncateSide] = {"left": "right", "right": "left", "middle": "middle"}


class ToolResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one tool call.

    Attributes:
        text: What the model reads, truncated by the executor to ``tools.max_response_length``.
        data: The answer as the tool had it, for agents and rewards; the model never sees it.
        reward: Joins the trajectory's `tool_rewards`; None where the call earned no judgement.
        metrics: Whatever the tool measured, by name. Numbers are summed over a trajectory's calls
            into its metric ``tools/TOOL/NAME``; True counts as 1.
        is_error: The call failed, and `text` says why.
        end_trajectory: The agent stops after this turn, e.g. because the task is solved.
        extra: Becomes the `extra` of its message: for agents, rewards and records.
        images: Pictures that the model sees before the text: PIL images, arrays (H, W, 3) of uint8,
            encoded files, data URLs, `rollout.Media`, or whatever else a part of a message may
            hold. One that cannot be taken makes an error observation of the answer.
        videos: The same of videos: files, or frames (T, H, W, 3).
        audio: Not supported.

    Raises:
        MediaError: It was given audio, or one picture in the place of a list.
    """

    text: str = ""
    data: Any = None
    reward: float | None = None
    metrics: Mapping[str, Any] = msgspec.field(default_factory=dict)
    is_error: bool = False
    end_trajectory: bool = False
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    audio: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.audio:
            raise MediaError(f"ToolResult.audio: {NO_AUDIO}")
        for kind, media in (("images", self.images), ("videos", self.videos)):
            if not isinstance(media, list | tuple):
                raise MediaError(f"ToolResult.{kind}: expected a list, got {type(media).__name__}")

    @property
    def has_media(self) -> bool:
        """Whether the model sees more than text."""
        return bool(self.images or self.videos)


class Answers(msgspec.Struct, gc=False):
    """The results of a turn in the order of its calls, for a journal, and the time in calls."""

    results: Sequence[ToolResult]
    seconds: float


def error_result(text: str) -> ToolResult:
    """The answer that tells the model what went wrong."""
    return ToolResult(text, is_error=True)


def describe_error(error: BaseException) -> str:
    """One short text for the model: type and message; a `ToolError` speaks for itself."""
    leaf = find_exception(error) or error
    message = read_message(leaf)
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    name = "" if isinstance(leaf, ToolError) and message else type(leaf).__name__
    return ": ".join(filter(None, (name, message)))


def normalise_result(value: Any) -> ToolResult:
    """The `ToolResult` that a returned value stands for; an error result where it stands for none.

    Text stays, bytes are read as UTF-8, numbers become their `str`, None "(no output)"; dicts,
    lists, tuples, arrays and records become JSON and are kept as `data`. A PIL image, `Media` and
    the bytes of an image's file are what the model sees, and so are those among the parts of a list
    such as ``[{"type": "text", …}, {"type": "image", …}]``. A plain tuple of a `ToolResult` or a
    text and a float is a result with its reward.

    Raises:
        MediaError: It holds an image, a video or audio within other values, or bytes.
    """
    if isinstance(value, str):
        return ToolResult(str.__str__(value))
    if isinstance(value, ToolResult):
        return check_result(value)
    if type(value) is tuple and len(value) == 2 and isinstance(value[1], float):
        result, reward = value
        if isinstance(result, ToolResult | str):
            return check_result(msgspec.structs.replace(normalise_result(result), reward=reward))
    if value is None:
        return ToolResult(NO_OUTPUT)
    if isinstance(value, numbers.Number):  # bool and NumPy scalars included
        return normalise_result(str(value))
    if isinstance(value, bytes | bytearray) and not is_media_file(value):
        return normalise_result(value.decode(errors="replace"))
    if isinstance(value, Media) or kind_of_media(value) is not None:
        return read_parts("the tool's answer", [value])
    if isinstance(value, list) and all(map(_is_part, value)) and any(map(is_media_part, value)):
        return read_parts("the tool's answer", value)
    try:
        check_answer("the tool's answer", value)
        encoded = msgspec.json.encode(value, enc_hook=_convert_plain)
        return ToolResult(msgspec.json.format(encoded, indent=0).decode(), data=value)
    except MediaError:
        raise
    except Exception as error:  # an iterator or a property of the value may raise anything
        return error_result(
            f"the tool returned {type(value).__name__}, which is not JSON ({error}); return text, "
            "a number, a dict or list of JSON values, None or a ToolResult"
        )


def check_result(result: ToolResult) -> ToolResult:
    """The result with plain text, dicts and numbers; an error where a field is none such."""
    # What methods of theirs raise, they raise here, within the call, and not where it is counted.
    check_answer("ToolResult.text", result.text)
    reward = read_reward(result.reward)
    for name, value, expected, is_right in (
        ("the text", result.text, "str", isinstance(result.text, str)),
        ("metrics", result.metrics, "a dict", isinstance(result.metrics, Mapping)),
        ("extra", result.extra, "a dict", isinstance(result.extra, Mapping)),
        ("the reward", result.reward, "a finite number or None", reward == result.reward),
    ):
        if not is_right:
            return error_result(f"the tool returned {name} {value!r:.80}; expected {expected}")
    return msgspec.structs.replace(
        result,
        text=str.__str__(result.text),
        reward=reward,
        is_error=bool(result.is_error),
        end_trajectory=bool(result.end_trajectory),
        metrics={
            str(key): each if type(each) is int or (number := read_reward(each)) is None else number
            for key, each in result.metrics.items()
        },
        extra={str(name): value for name, value in result.extra.items()},
    )


def read_reward(value: Any) -> float | None:
    """`value` as a finite float; None where it is no such number (a bool is none)."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer past what a float holds
            return float(value) if math.isfinite(value) else None
    return None


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and (value.get("type") == "text" or is_media_part(value))


def read_parts(where: str, parts: Iterable[Any], separator: str = "\n") -> ToolResult:
    """The result in parts of a content: texts and media; a `MediaError` of anything else."""
    texts, media = list[str](), dict[str, list[Any]](image=[], video=[])
    for at, part in enumerate(parts):
        if (found := media_part(f"part {at} of {where}", part)) is not None:
            media[found.kind].append(found)
        elif isinstance(part, str) or part.get("type") == "text":
            texts.append(part if isinstance(part, str) else part["text"])
        else:
            raise MediaError(
                f"{where} holds a part of type {part.get('type')!r}; return text, or "
                "ToolResult(images=…, videos=…)"
            )
    images, videos = map(tuple, media.values())
    return ToolResult(separator.join(texts), images=images, videos=videos)


def _convert_plain(value: Any) -> Any:
    """A pydantic model, an array or one of its scalars as plain data, without media in it."""
    check_answer("the tool's answer", value)
    if isinstance(value, BaseModel):
        plain = value.model_dump(mode="json")
    elif callable(getattr(value, "tolist", None)):
        plain = value.tolist()
    else:
        raise NotImplementedError(f"no JSON for {type(value).__name__}")
    check_answer("the tool's answer", plain)
    return plain


def truncate_text(
    text: str,
    limit: int,
    side: TruncateSide,
    *,
    unit: Literal["characters", "tokens"] = "characters",
    tokenizer: Any = None,
    convention: Literal["rollout", "seed"] = "rollout",
) -> str:
    """`text` itself where it fits, else `limit` of its units and a marker.

    Args:
        limit: Largest number of units kept, at least 0; the marker comes on top.
        side: Where text is removed. "left" keeps the tail, "right" the head, "middle" both ends,
            with the odd unit at the head.
        unit: "characters" are Unicode code points; "tokens" are those of `tokenizer`, which has
            the methods ``encode(text, add_special_tokens=...)`` and ``decode(ids)``.
        convention: "seed" swaps "left" and "right", as verl names them: after the side kept.

    A `ValueError` where an argument is none of the above.
    """
    for name, value, choices in (
        ("side", side, ("left", "right", "middle")),
        ("unit", unit, ("characters", "tokens")),
        ("convention", convention, ("rollout", "seed")),
    ):
        if value not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"{name} = {value!r}: expected {', '.join(others)} or {last}")
    if limit < 0:
        raise ValueError(f"limit = {limit}: expected 0 or more")
    if unit == "tokens" and tokenizer is None:
        raise ValueError("unit = 'tokens' needs a tokenizer")
    side = SIDES_BY_VERL[side] if convention == "seed" else side
    units: Any = text if unit == "characters" else tokenizer.encode(text, add_special_tokens=False)
    if len(units) <= limit:
        return text
    tail = {"left": limit, "right": 0, "middle": limit // 2}[side]
    ends = [units[: limit - tail], units[len(units) - tail :]]
    if unit == "tokens":  # what is left of a character that was cut is none
        ends = [str(tokenizer.decode(ids)).strip("\ufffd") if ids else "" for ids in ends]
    return MARKERS[side].join(ends)
