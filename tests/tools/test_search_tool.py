"""`SearchTool`: what a retriever finds, and what the model reads where it does not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from executors import call, executor_of, run
from rollout.errors import ToolError
from rollout.tools import SearchTool, ToolResult
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a thread waits for the answer."""
    return str(request.param)


class Retriever(ThreadingHTTPServer):
    """Answers requests as it was told, and keeps what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/retrieve"


class Handler(BaseHTTPRequestHandler):
    server: Retriever

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(json.loads(body))
        status, answer = self.server.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with Retriever() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def ask(tool: SearchTool, threads: WorkerThreads, **arguments: Any) -> ToolResult:
    session = executor_of([tool], threads).open_session(uid="p", member=0)
    (result,) = await run(session, call("search", **arguments))
    await session.close()
    return result


OWLS = {"document": {"id": "7", "title": "Owls", "contents": "They hunt at night."}, "score": 2.5}


async def test_search_shows_what_the_retriever_finds(
    retriever: Retriever, threads: WorkerThreads
) -> None:
    retriever.answers = [
        (200, {"result": [[OWLS, {"document": {"text": "Larks sing."}, "score": 1.0}]]}),
        (200, {"result": [[{"contents": "A document alone."}]]}),
        (200, {"result": [[]]}),
    ]
    tool = SearchTool(retriever.url, top_k=2)
    found = await ask(tool, threads, query="night")
    assert found.text == "[7] Owls\nThey hunt at night.\n\n[2]\nLarks sing."
    assert found.data[0] == OWLS
    bare = await ask(tool, threads, query="x", top_k=5)
    assert bare.text == "[1]\nA document alone."
    assert await ask(tool, threads, query="y") == ToolResult("No passage was found.", data=[])
    assert retriever.asked[:2] == [
        {"queries": ["night"], "topk": 2, "return_scores": True},
        {"queries": ["x"], "topk": 5, "return_scores": True},
    ]


async def test_search_tries_again_where_the_retriever_is_busy(
    retriever: Retriever, threads: WorkerThreads
) -> None:
    retriever.answers = [(503, {}), (200, {"result": [[OWLS]]})]
    found = await ask(SearchTool(retriever.url), threads, query="night")
    assert not found.is_error
    assert len(retriever.asked) == 2


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (404, {}, "the retriever answered HTTP 404 Not Found"),
        (200, b"<html>", "the retriever gave no list of results (JSONDecodeError"),
        (200, {"hits": []}, "the retriever gave no list of results (KeyError"),
        (200, {"result": [["text"]]}, "the retriever gave no list of results (AttributeError"),
    ],
)
async def test_search_says_what_is_wrong_with_the_retriever(
    retriever: Retriever, threads: WorkerThreads, status: int, answer: Any, text: str
) -> None:
    retriever.answers = [(status, answer)]
    found = await ask(SearchTool(retriever.url), threads, query="night")
    assert found.is_error
    assert found.text.startswith(text)
    assert len(retriever.asked) == 1


async def test_search_arguments_are_checked(retriever: Retriever, threads: WorkerThreads) -> None:
    tool = SearchTool(retriever.url, top_k=1, max_top_k=2)
    assert (await ask(tool, threads, query="q", top_k=3)).text == (
        "invalid arguments for 'search': top_k: 3 is greater than the maximum of 2"
    )
    assert retriever.asked == []


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nowhere", {}, "search tool 'search': url = 'nowhere'; expected an http or https URL"),
        (
            "http://host/",
            {"top_k": 5, "max_top_k": 3},
            "search tool 'search': top_k = 5, max_top_k = 3; expected 1 ≤ top_k ≤ max_top_k",
        ),
    ],
)
def test_search_tool_that_cannot_be_is_refused(url: str, options: Any, message: str) -> None:
    with pytest.raises(ToolError) as refusal:
        SearchTool(url, **options)
    assert str(refusal.value) == message
