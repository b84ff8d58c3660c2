"""`SearchTool`: what a retriever finds, and what the model reads where it does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executors import call, executor_of, run
from http_endpoint import Endpoint
from rollout.errors import ToolError
from rollout.tools import SearchTool, ToolResult
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Real time: a thread waits for the answer, which is the same on both."""
    return "trio"


@pytest.fixture
def retriever() -> Iterator[Endpoint]:
    with Endpoint() as endpoint:
        yield endpoint


async def ask(tool: SearchTool, threads: WorkerThreads, **arguments: Any) -> ToolResult:
    session = executor_of([tool], threads).open_session(uid="p", member=0)
    (result,) = await run(session, call("search", **arguments))
    await session.close()
    return result


OWLS = {"document": {"id": "7", "title": "Owls", "contents": "They hunt at night."}, "score": 2.5}


async def test_search_shows_what_the_retriever_finds(
    retriever: Endpoint, threads: WorkerThreads
) -> None:
    retriever.answers = [
        (200, {"result": [[OWLS, {"document": {"text": "Larks sing."}, "score": 1.0}]]}),
        (200, {"result": [[{"contents": "A document alone."}]]}),
        (200, {"result": [[]]}),
    ]
    tool = SearchTool(retriever.url, top_k=2, max_top_k=5)
    found = await ask(tool, threads, query="night")
    assert found.text == "[7] Owls\nThey hunt at night.\n\n[2]\nLarks sing."
    assert found.data[0] == OWLS
    assert (await ask(tool, threads, query="x", top_k=5)).text == "[1]\nA document alone."
    assert await ask(tool, threads, query="y") == ToolResult("No passage was found.", data=[])
    assert (await ask(tool, threads, query="q", top_k=6)).text == (
        "invalid arguments for 'search': top_k: 6 is greater than the maximum of 5"
    )
    assert retriever.asked == [
        {"queries": [query], "topk": count, "return_scores": True}
        for query, count in (("night", 2), ("x", 5), ("y", 2))
    ]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(503, {}), (429, {}), (200, {"result": [[OWLS]]})], "[7] Owls"),  # asked again
        ([(404, {})], "the retriever answered HTTP 404 Not Found"),
        ([(200, "<html>")], "the retriever gave no list of results (JSONDecodeError"),
        ([(200, {"hits": []})], "the retriever gave no list of results (KeyError"),
        ([(200, {"result": [["text"]]})], "the retriever gave no list of results (AttributeError"),
    ],
)
async def test_search_asks_a_busy_retriever_again_and_says_what_is_wrong_with_another(
    retriever: Endpoint, threads: WorkerThreads, answers: Any, text: str
) -> None:
    retriever.answers = list(answers)
    found = await ask(SearchTool(retriever.url), threads, query="night")
    assert found.text.startswith(text)
    assert found.is_error == text.startswith("the retriever")
    assert retriever.answers == []


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nowhere", {}, "url = 'nowhere': expected an http or https URL"),
        (
            "http://host/",
            {"top_k": 5, "max_top_k": 3},
            "top_k = 5: expected an integer from 1 to max_top_k = 3",
        ),
    ],
)
def test_search_tool_that_cannot_be_is_refused(url: str, options: Any, message: str) -> None:
    with pytest.raises(ToolError) as refusal:
        SearchTool(url, **options)
    assert str(refusal.value) == f"search tool 'search': {message}"
