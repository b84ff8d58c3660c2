"""The process of ``isolation="process"``: runs one call after another for the driver."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.media_parts import MediaSource
from rollout.chat.media_reading import read_media
from rollout.child_serving import MAX_REPLY, resolve_outcome, serve
from rollout.config.media_section import MediaConfig
from rollout.errors import MediaError
from rollout.function_refs import FunctionRef, function_at
from rollout.media import Media
from rollout.medium import FRAMES_MIME
from rollout.tools.attempt import describe
from rollout.tools.function import FunctionTool
from rollout.tools.parameters import Parameters, inspect_parameters
from rollout.tools.policy import ToolPolicy
from rollout.tools.results import normalise_result
from rollout.tools.tool_process_messages import Load, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Answer requests until standard input closes."""
    serve(lambda body: _encoded(_reply(msgspec.msgpack.decode(body, type=Request | Load))))


def _encoded(reply: Reply) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(reply)
    except Exception:  # data that only this process can hold stays here; the text has its words
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(reply, data=None, metrics={}))
    if len(encoded) <= MAX_REPLY:
        return encoded
    failure = f"the tool's answer has {len(encoded)} bytes; at most {MAX_REPLY}"
    return msgspec.msgpack.encode(Reply(failure=failure))


def _reply(message: Request | Load) -> Reply:
    return _loaded(message) if isinstance(message, Load) else _answer(message)


def _loaded(message: Load) -> Reply:
    for function in message.functions:
        try:
            function_at(function)
        except BaseException as error:
            return Reply(failure=f"{function.qualname} of {function.home}: {describe(error)}")
    return Reply()


def _answer(request: Request) -> Reply:
    policy = ToolPolicy()
    try:
        function, parameters, policy = _resolved(request.function, request.name)
        answer = resolve_outcome(function(**parameters.check(request.arguments)))
        result = normalise_result(answer)
        images, videos = list(map(_file_of, result.images)), list(map(_file_of, result.videos))
    except BaseException as error:
        return Reply(failure=describe(error), is_transient=policy.is_transient(error))
    return Reply(
        text=result.text,
        data=result.data,
        reward=result.reward,
        metrics=dict(result.metrics),
        is_error=result.is_error,
        end_trajectory=result.end_trajectory,
        extra=dict(result.extra),
        images=images,
        videos=videos,
    )


def _file_of(given: Any) -> Any:
    """A picture in pixels, or frames, as the file that the driver reads."""
    if isinstance(given, bytes | bytearray | str | dict):
        return given
    medium = given
    if not isinstance(given, Media):
        is_frames = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4
        source = MediaSource("video" if is_frames else "image", given, where="the tool's answer")
        medium = read_media(source, MediaConfig(max_bytes=MAX_REPLY))
    if medium.mime == FRAMES_MIME:
        raise MediaError("frames do not leave the process of an isolated tool: return a video file")
    return medium.content


@functools.cache
def _resolved(ref: FunctionRef, name: str) -> tuple[Callable[..., Any], Parameters, ToolPolicy]:
    found = function_at(ref)
    if isinstance(found, FunctionTool):
        return found.function, found.parameters, found.policy
    return found, inspect_parameters(found, name, is_documented=False), ToolPolicy()
