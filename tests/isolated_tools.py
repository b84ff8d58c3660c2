"""Functions that run in processes of their own; `test_isolated_tools` is about them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout.tools import ToolPolicy, TransientError, function_tool


@function_tool(isolation="process")
def whoami(text: str = "me") -> dict[str, Any]:
    """Name the process.

    Args:
        text: Text.
    """
    print("this must not disturb the pipe")
    return {"text": text, "pid": os.getpid()}


@function_tool(isolation="process")
async def asynchronous() -> tuple[str, float]:
    """Answer from a loop."""
    return "async", 0.5


@function_tool(isolation="process")
def hold_the_interpreter(marker: str) -> str:
    """Match for a very long time without ever letting another thread run.

    Args:
        marker: File that is made first.
    """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(marker).write_text(f"{os.getpid()} {child.pid}")
    re.match(r"(a+)+$", "a" * 60 + "b")
    return "never"


@function_tool(isolation="process")
def die() -> None:
    """End the process."""
    os._exit(7)


REST = {
    "name": "rest",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}},
}


@function_tool(isolation="process", schema=REST)
def rest(a: int, **others: object) -> dict[str, object]:
    return {"a": a, **others}


@function_tool(isolation="process", policy=ToolPolicy(retries=1, backoff_s=0.01))
def flaky(kind: str) -> str:
    """Raise.

    Args:
        kind: What.
    """
    if kind == "transient":
        raise TransientError("try later")
    raise ValueError("no such row")


def plain(x: int) -> int:
    return x + 1


def loud(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(x: int) -> str:
        return f"{function(x)}!"

    return wrapped


plain_and_loud = loud(plain)
