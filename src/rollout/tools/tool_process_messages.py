"""What crosses the pipe to the process of an isolated tool."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.function_refs import FunctionRef


class Request(msgspec.Struct, tag=True):
    """One call."""

    function: FunctionRef
    name: str
    arguments: dict[str, Any]


class Load(msgspec.Struct, tag=True):
    """Functions to import, before any is called."""

    functions: list[FunctionRef]


class Reply(msgspec.Struct, omit_defaults=True):
    """What came of it: the fields of a result, or what was raised.

    Attributes:
        images, videos: Encoded files, and what else crosses a pipe as it is.
        failure: What was raised, in words; empty where nothing was.
        is_transient: Whether the tool's policy calls that transient.
    """

    text: str = ""
    data: Any = None
    reward: float | None = None
    metrics: dict[str, Any] = {}
    is_error: bool = False
    end_trajectory: bool = False
    extra: dict[str, Any] = {}
    images: list[Any] = []
    videos: list[Any] = []
    failure: str = ""
    is_transient: bool = False
