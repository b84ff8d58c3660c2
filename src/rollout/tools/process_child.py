"""The process of ``isolation="process"``: runs one call after another for the driver."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.child_serving import MAX_REPLY, resolve_outcome, serve
from rollout.config.media_section import MediaConfig
from rollout.errors import MediaError
from rollout.function_refs import FunctionRef, function_at
from rollout.media import Media
from rollout.media.parts import MediaSource
from rollout.media.reading import read_media
from rollout.medium import FRAMES_MIME
from rollout.tools.attempt import describe
from rollout.tools.function_tools import FunctionTool
from rollout.tools.parameters import Parameters
from rollout.tools.policy import ToolPolicy
from rollout.tools.processes import Reply, Request
from rollout.tools.results import normalise_result

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Answer requests until standard input closes."""
    serve(lambda body: _encode(_answer(msgspec.msgpack.decode(body, type=Request))))


def _encode(reply: Reply) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(reply)
    except Exception:  # data that only this process can hold stays here; the text has its words
        encoded = msgspec.msgpack.encode(Reply({**reply.result, "data": None, "metrics": {}}))
    if len(encoded) <= MAX_REPLY:
        return encoded
    failure = f"the tool's answer has {len(encoded)} bytes; at most {MAX_REPLY}"
    return msgspec.msgpack.encode(Reply(failure=failure))


def _answer(request: Request) -> Reply:
    policy = ToolPolicy()
    for ref in request.functions:
        try:
            function, parameters, policy = _find_function(ref, request.name)
        except BaseException as error:
            return Reply(failure=f"{ref.qualname} of {ref.home}: {describe(error)}")
    if not request.name:
        return Reply()
    try:
        result = normalise_result(resolve_outcome(function(**parameters.check(request.arguments))))
        fields = {name: getattr(result, name) for name in result.__struct_fields__}
        for kind in ("images", "videos"):
            fields[kind] = tuple(map(_write_file, fields[kind]))
    except BaseException as error:
        return Reply(failure=describe(error), is_transient=policy.is_transient(error))
    del fields["audio"]  # there is none
    return Reply(fields)


def _write_file(medium: Any) -> Any:
    """A picture in pixels, or frames, as the file that the driver reads."""
    if isinstance(medium, bytes | bytearray | str | dict):
        return medium
    if not isinstance(medium, Media):
        is_frames = isinstance(medium, list | tuple) or getattr(medium, "ndim", 0) == 4
        source = MediaSource("video" if is_frames else "image", medium, where="the tool's answer")
        medium = read_media(source, MediaConfig(max_bytes=MAX_REPLY))
    if medium.mime == FRAMES_MIME:
        raise MediaError("frames do not leave the process of an isolated tool: return a video file")
    return medium.content


@functools.cache
def _find_function(
    ref: FunctionRef, name: str
) -> tuple[Callable[..., Any], Parameters, ToolPolicy]:
    found = function_at(ref)
    if isinstance(found, FunctionTool):
        return found.function, found.parameters, found.policy
    return found, Parameters(found, name, is_documented=False), ToolPolicy()
