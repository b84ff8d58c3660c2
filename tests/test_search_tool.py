"""Search over a local corpus."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from rollout.errors import ToolError
from rollout.tools import SearchTool, ToolResult
from rollout.tools.search_tool import SearchIndex
from rollout.tools.tool import ToolContext
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads

PASSAGES = [
    {"id": "w1", "title": "Whales", "text": "Whales are mammals that live in the sea."},
    {"id": "w2", "title": "Wheat", "contents": "Wheat is a grass that feeds people."},
    {"id": 3, "text": "The blue whale is the largest of all whales; a whale breathes air."},
    {"id": "s", "title": "Straße", "text": "„Quotes“, AND, OR, NOT and * are words like others."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES) + "\n")
    return path


def found(index: SearchIndex, query: str, count: int = 10) -> list[str]:
    return [hit.id for hit in index.search(query, count)]


def test_search_returns_passages_that_share_words_best_first(corpus: Path) -> None:
    index = SearchIndex([corpus])
    assert found(index, "whale") == ["3", "w1"]
    assert found(index, "whale", 1) == ["3"]
    assert found(index, "grass or sea") == found(index, "sea grass OR")
    assert set(found(index, "grass sea")) == {"w1", "w2"}
    assert found(index, "nothing of it") != []  # words that are common elsewhere
    assert found(index, "zebra") == []
    assert found(index, "title") == []
    scores = [hit.score for hit in index.search("whale sea", 10)]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0
    index.close()


@pytest.mark.parametrize("query", ['"', "(", "a AND", "*", "NEAR(", "text:x", "'; DROP TABLE", ""])
def test_search_takes_any_query_as_words(corpus: Path, query: str) -> None:
    index = SearchIndex([corpus])
    assert isinstance(index.search(query, 5), list)
    assert found(index, "straße") == ["s"]
    assert found(index, "x" * 100_000 + " whale") == ["3", "w1"]
    index.close()


def test_search_reads_text_files_by_paragraph_and_directories_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("First of b.\n\n  \nSecond of b\nin two lines.\n")
    (tmp_path / "a.txt").write_text("One of a.")
    (tmp_path / "ignored.csv").write_text("One,of,none")
    index = SearchIndex([tmp_path])
    assert found(index, "of") == ["a.txt#1", "b.md#1", "b.md#2"]
    assert index.search("second", 1)[0].text == "Second of b\nin two lines."
    index.close()


def test_kept_index_is_used_again_until_the_corpus_changes(corpus: Path, tmp_path: Path) -> None:
    place = tmp_path / "made" / "index.sqlite"
    for _ in range(2):
        SearchIndex([corpus], place).close()
        made = place.stat().st_ino
    SearchIndex([corpus], place).close()
    assert place.stat().st_ino == made
    corpus.write_text('{"id": 9, "text": "Zebras."}\n')
    index = SearchIndex([corpus], place)
    assert found(index, "zebras whale") == ["9"]
    assert place.stat().st_ino != made
    index.close()
    place.write_text("no database")
    SearchIndex([corpus], place).close()
    assert os.listdir(place.parent) == ["index.sqlite"]


EXPECTED = 'expected {{"id": …, "text": "…"}}, with a "title" if there is one'


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ('{"id": 1}\n', "{path}, line 1: '{{\"id\": 1}}': " + EXPECTED),
        ("\n[1]\n", "{path}, line 2: '[1]': " + EXPECTED),
        ("{\n", "{path}, line 1: not JSON: Input data was truncated"),
        ('{"id": 1, "text": "a"}\n' * 2, "{path}, line 2: the id '1' occurs twice in the corpus"),
        ("\n", "corpus ['{path}']: there is no passage in it"),
    ],
)
def test_search_refuses_a_line_that_is_no_passage(tmp_path: Path, lines: str, text: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(lines)
    with pytest.raises(ToolError) as refusal:
        SearchIndex([path])
    assert str(refusal.value) == text.format(path=path)
    with pytest.raises(ToolError):
        SearchIndex([path], tmp_path / "index.sqlite")
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_search_refuses_paths_that_are_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "table.csv").touch()
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for path, text in {
        "no.jsonl": f"corpus '{tmp_path}/no.jsonl' does not exist",
        "table.csv": f"corpus '{tmp_path}/table.csv': expected one of *.jsonl, *.txt, *.md, or a "
        "directory",
        "bad.txt": f"{tmp_path}/bad.txt: not UTF-8: invalid start byte",
    }.items():
        with pytest.raises(ToolError) as refusal:
            SearchIndex([tmp_path / path])
        assert str(refusal.value) == text


def test_index_answers_several_threads(corpus: Path) -> None:
    index = SearchIndex([corpus])
    said: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: said.append(found(index, "whale"))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [["3", "w1"]] * 16
    index.close()


@pytest.mark.anyio
async def test_search_tool_shows_ids_titles_and_texts(corpus: Path) -> None:
    tool = SearchTool(corpus, top_k=1, max_top_k=2)
    threads = WorkerThreads(max_threads=1, max_abandoned=1)
    session = await tool.open(ToolContext(uid="p", member=0, threads=threads))

    async def ask(**arguments: object) -> ToolResult:
        result: ToolResult = await session.execute(ToolCall(name="search", arguments=arguments))
        return result

    one = await ask(query="sea whales")
    assert one.text == "[w1] Whales\nWhales are mammals that live in the sea."
    assert [hit.id for hit in one.data] == ["w1"]
    two = await ask(query="sea whales", top_k=2)
    assert two.text.endswith(
        "\n\n[3]\nThe blue whale is the largest of all whales; a whale breathes air."
    )
    assert await ask(query="zebra") == ToolResult("No passage has any of these words.", data=[])
    with pytest.raises(ToolError, match="top_k = 3: expected an integer from 1 to 2"):
        await ask(query="sea", top_k=3)
    with pytest.raises(ToolError, match="query = None: expected a text"):
        await ask()
    threads.close()
    tool.index.close()


def test_search_tool_refuses_impossible_numbers(corpus: Path) -> None:
    with pytest.raises(ToolError) as refusal:
        SearchTool(corpus, top_k=5, max_top_k=3)
    assert str(refusal.value) == (
        "search tool 'search': top_k = 5, max_top_k = 3; expected 1 ≤ top_k ≤ max_top_k ≤ 50"
    )


def test_search_without_full_text_search_says_what_it_needs(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without(sqlite3.Connection):
        def execute(self, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
            raise sqlite3.OperationalError("no such module: fts5")

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Without))
    with pytest.raises(ToolError) as refusal:
        SearchIndex([corpus])
    assert str(refusal.value) == (
        "search needs SQLite with full-text search (FTS5): no such module: fts5"
    )
