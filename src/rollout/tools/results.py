"""What a tool answers, and how any value that a function returns becomes such an answer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from typing import Any

import msgspec

from rollout.chat.media_parts import NO_AUDIO, media_part
from rollout.errors import MediaError
from rollout.media import Media
from rollout.media.refusals import check_answer, is_media_file, is_media_part, kind_of_media
from rollout.tools.pydantic_types import plain_data

#: What the model reads where a tool answers None.
NO_OUTPUT = "(no output)"
_NO_MEDIA: tuple[Any, ...] = ()
#: Of each tool that a trajectory has called its name, and then these: how many calls, errors,
#: seconds altogether and of the longest. One tuple of all costs a fifth of a dict.
CallSums = tuple[Any, ...]
_SUMS = ("calls", "errors", "seconds", "seconds_max")
_NO_CALLS: CallSums = ("", 0, 0, 0.0, 0.0)

_EXPECTED = "return text, a number, a dict or list of JSON values, None or a ToolResult"


class _Text(msgspec.Struct, frozen=True):
    """Holds the one field that may be given by position."""

    text: str = ""


class ToolResult(_Text, frozen=True, kw_only=True):
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

    data: Any = None
    reward: float | None = None
    metrics: Mapping[str, Any] = msgspec.field(default_factory=dict)
    is_error: bool = False
    end_trajectory: bool = False
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    images: Sequence[Any] = _NO_MEDIA
    videos: Sequence[Any] = _NO_MEDIA
    audio: Sequence[Any] = _NO_MEDIA

    def __post_init__(self) -> None:
        if self.images is _NO_MEDIA and self.videos is _NO_MEDIA and self.audio is _NO_MEDIA:
            return
        if self.audio is not None and (not isinstance(self.audio, Sized) or len(self.audio)):
            raise MediaError(f"ToolResult.audio: {NO_AUDIO}")
        for kind in ("images", "videos"):
            given = getattr(self, kind)
            if not isinstance(given, list | tuple):
                raise MediaError(f"ToolResult.{kind}: expected a list, got {type(given).__name__}")

    @property
    def has_media(self) -> bool:
        """Whether the model sees more than text."""
        return bool(self.images or self.videos)


def show_something(results: Iterable[ToolResult]) -> bool:
    """Whether the model sees more than text in one of them."""
    for result in results:  # noqa: SIM110  (each turn; a generator takes four times as long)
        if result.images or result.videos:
            return True
    return False


def error_result(text: str) -> ToolResult:
    """The answer that tells the model what went wrong."""
    return ToolResult(text, is_error=True)


def normalise_result(value: Any) -> ToolResult:
    """The `ToolResult` that a returned value stands for; an error result where it stands for none.

    Text stays, bytes are read as UTF-8, numbers and bools become their `str`, None becomes
    "(no output)", dicts, lists, arrays and records (dataclasses, attrs, Structs, pydantic models)
    become JSON and are kept as `data`. A PIL image, `Media` and the bytes of an image's file are
    what the model sees, and so are those among the parts of a list such as
    ``[{"type": "text", …}, {"type": "image", …}]``. A tuple is ``(value, reward)`` or ``(value,
    reward, metrics)``, as in verl; so a tool that means a pair of values returns a list.

    Raises:
        MediaError: It holds an image, a video or audio within other values, or bytes.
    """
    if isinstance(value, tuple):
        return _from_tuple(value)
    if isinstance(value, ToolResult):
        return _checked(value)
    if isinstance(value, str):
        return ToolResult(value)
    if value is None:
        return ToolResult(NO_OUTPUT)
    if isinstance(value, numbers.Number):  # bool and NumPy scalars included
        return _from_number(value)
    if isinstance(value, bytes | bytearray) and not is_media_file(value):
        return ToolResult(value.decode(errors="replace"))
    return _shown(value) or _from_json(value)


def _shown(value: Any) -> ToolResult | None:
    """The result in what is a picture, or in parts of which one is; None of anything else."""
    if isinstance(value, Media):
        is_image = value.kind == "image"
        return ToolResult(images=[value]) if is_image else ToolResult(videos=[value])
    if kind_of_media(value) is not None:
        return ToolResult(images=[value])
    if not isinstance(value, list) or not all(map(_is_part, value)):
        return None
    held = [media_part(f"part {at} of the tool's answer", part) for at, part in enumerate(value)]
    images = [each for each in held if each is not None and each.kind == "image"]
    videos = [each for each in held if each is not None and each.kind == "video"]
    if not (images or videos):
        return None
    said = [part["text"] for part in value if part.get("type") == "text"]
    return ToolResult("\n".join(said), images=images, videos=videos)


def _is_part(value: object) -> bool:
    """Whether it is a part of a content: text, an image or a video."""
    if not isinstance(value, Mapping):
        return False
    if value.get("type") == "text":
        return isinstance(value.get("text"), str)
    return is_media_part(value)


def _from_number(value: Any) -> ToolResult:
    try:
        return ToolResult(str(value))
    except ValueError as error:  # Python refuses to write out thousands of digits
        return error_result(f"the tool returned a number that cannot be written out: {error}")


def _from_json(value: Any) -> ToolResult:
    try:
        check_answer("the tool's answer", value)
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=0).decode()
    except MediaError:
        raise
    except Exception as error:  # an iterator or a property of the value may raise anything
        kind = type(value).__name__
        return error_result(f"the tool returned {kind}, which is not JSON ({error}); {_EXPECTED}")
    return ToolResult(text, data=value)


def _plain(value: Any) -> Any:
    """`plain_data` without media in it."""
    check_answer("the tool's answer", value)
    plain = plain_data(value)
    check_answer("the tool's answer", plain)
    return plain


def _from_tuple(value: tuple[Any, ...]) -> ToolResult:
    if len(value) not in (2, 3):
        return error_result(
            f"the tool returned a tuple of {len(value)} items; expected (result, reward) or "
            f"(result, reward, metrics)"
        )
    if isinstance(value[0], tuple):
        return error_result("the tool returned a tuple within a tuple as its result; " + _EXPECTED)
    result = normalise_result(value[0])
    reward = result.reward if value[1] is None else value[1]
    metrics = value[2] if len(value) == 3 and value[2] is not None else result.metrics
    return _checked(msgspec.structs.replace(result, reward=reward, metrics=metrics))


def _checked(result: ToolResult) -> ToolResult:
    if not isinstance(result.text, str):
        check_answer("ToolResult.text", result.text)
        kind = type(result.text).__name__
        return error_result(f"the tool returned a ToolResult whose text is {kind}; expected str")
    for name in ("metrics", "extra"):
        value = getattr(result, name)
        if not isinstance(value, Mapping):
            return error_result(f"the tool returned {name} {value!r:.80}; expected a dict")
        if type(value) is not dict:
            result = msgspec.structs.replace(result, **{name: dict(value)})
    if result.reward is None or (type(result.reward) is float and math.isfinite(result.reward)):
        return result
    reward = as_reward(result.reward)
    if reward is None:
        return error_result(
            f"the tool returned the reward {result.reward!r:.80}; expected a finite number or None"
        )
    return msgspec.structs.replace(result, reward=reward)


def as_reward(value: Any) -> float | None:
    """`value` as a finite float; None where it is no such number (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer past what a float holds
        return None
    return number if math.isfinite(number) else None


def add_metrics(sums: dict[str, float], tool: str, metrics: Mapping[str, Any]) -> None:
    """Add what one call measured to a trajectory's sums; what is no finite number stays out."""
    for name, value in metrics.items():
        number = float(value) if isinstance(value, bool) else as_reward(value)
        if number is not None:
            key = f"tools/{tool}/{name}"
            sums[key] = sums.get(key, 0.0) + number


def with_call(sums: CallSums, tool: str, result: ToolResult | None, seconds: float) -> CallSums:
    """A trajectory's sums and one more call of a tool; without a result, it was cancelled."""
    at = sums.index(tool) if tool in sums else len(sums)
    end = at + 1 + len(_SUMS)
    _, calls, errors, total, longest = sums[at:end] or _NO_CALLS
    is_error = result is None or result.is_error
    counted = (tool, calls + 1, errors + is_error, total + seconds, max(longest, seconds))
    return (*sums[:at], *counted, *sums[end:])


def with_error(sums: CallSums, tool: str) -> CallSums:
    """The same where a counted call of a tool was an error after all."""
    at = sums.index(tool) + 1 + _SUMS.index("errors")
    return (*sums[:at], sums[at] + 1, *sums[at + 1 :])


def named_sums(sums: CallSums) -> dict[str, float]:
    """The sums of each tool as ``tool/TOOL/{calls,errors,seconds,seconds_max}``."""
    size = 1 + len(_SUMS)
    return {
        name: float(number)
        for at in range(0, len(sums), size)
        for name, number in zip(_names_of_sums(sums[at]), sums[at + 1 : at + size], strict=True)
    }


@lru_cache(256)
def _names_of_sums(tool: str) -> tuple[str, ...]:
    """The same objects for all trajectories."""
    return tuple(f"tool/{tool}/{name}" for name in _SUMS)
