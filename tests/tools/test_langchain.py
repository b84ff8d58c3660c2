"""Tools of LangChain's as ours."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from langchain_core.tools import tool as langchain_tool
from pydantic import BaseModel, Field

from executors import call, executor_of, run
from rollout.errors import ToolError
from rollout.media.parts import MediaSource
from rollout.tools import ToolResult, langchain_tools
from rollout.worker_threads import WorkerThreads


@pytest.fixture
def anyio_backend() -> str:
    """What LangChain is written for."""
    return "asyncio"


class Place(BaseModel):
    lat: float


class Where(BaseModel):
    city: str = Field(description="The city.")
    place: Place | None = None


@langchain_tool(args_schema=Where)
def weather(city: str, place: Place | None = None) -> str:
    """Get the weather."""
    if city == "Atlantis":
        raise ValueError("no such city")
    return f"sunny in {city}"


@langchain_tool(response_format="content_and_artifact")
async def forecast(days: int) -> tuple[str, dict[str, int]]:
    """Get the forecast."""
    return "rain", {"days": days}


@langchain_tool
def picture() -> list[Any]:
    """Draw."""
    return [{"type": "image", "url": "data:"}]


@langchain_tool
def blocks() -> list[Any]:
    """Answer in blocks."""
    return [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


class Tree(BaseModel):
    children: list[Tree]


@langchain_tool
def climb(tree: Tree) -> str:
    """Climb."""
    return "up"


@pytest.mark.anyio
async def test_langchain_tools_run_sync_and_async(threads: WorkerThreads) -> None:
    shown = langchain_tools([forecast, picture, blocks])
    built = executor_of([weather, *shown], threads)
    assert built.schemas(["weather"])[0]["function"]["parameters"]["properties"] == {
        "city": {"type": "string", "description": "The city."},
        "place": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}},
                    "required": ["lat"],
                },
                {"type": "null"},
            ],
            "default": None,
        },
    }
    tools = built.open_session(uid="p", member=0)
    assert await run(
        tools,
        call("weather", city="Oslo", place={"lat": 60}),
        call("forecast", days=3),
        call("weather", city="Atlantis"),
        call("weather", town="Oslo"),
        call("picture"),
        call("blocks"),
    ) == [
        ToolResult("sunny in Oslo"),
        ToolResult("rain", data={"days": 3}),
        ToolResult("ValueError: no such city", is_error=True),
        ToolResult(
            "invalid arguments for 'weather': missing 'city'; unknown 'town' (it takes 'city', "
            "'place')",
            is_error=True,
        ),
        ToolResult(
            "", images=(MediaSource("image", "data:", where="part 0 of LangChain's answer"),)
        ),
        ToolResult("one two"),
    ]


def test_langchain_tool_that_cannot_be_one_is_refused(threads: WorkerThreads) -> None:
    with pytest.raises(ToolError) as caught:
        executor_of([climb], threads)
    assert str(caught.value) == (
        "LangChain's 'climb': Tree contains itself; a tool's parameters must have a finite shape"
    )
    with pytest.raises(ToolError, match=r"^3 is no tool of LangChain: expected a BaseTool$"):
        langchain_tools([3])


def test_langchain_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain_core.tools", None)
    with pytest.raises(ToolError, match=r"pip install 'rollout-rl\[langchain\]'$"):
        langchain_tools([weather])
