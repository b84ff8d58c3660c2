"""Search over a local corpus, with SQLite's full-text index."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ToolError
from rollout.tools.results import ToolResult
from rollout.tools.search_corpus import Passage, corpus_files, corpus_stamp, read_passages
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.types import ToolCall
    from rollout.worker_threads import WorkerThreads

#: Words of a query that count; more cost time and find no better passages.
MAX_WORDS = 64
MAX_PASSAGES = 50
_BATCH = 1000
#: Raise it when the layout of the index changes.
_LAYOUT = "1"
_WORD = re.compile(r"\w+")


class Hit(msgspec.Struct, frozen=True):
    """A passage that was found.

    Attributes:
        id: The passage's id in the corpus.
        score: Okapi BM25 with SQLite's constants (k1 = 1.2, b = 0.75); higher is better.
        title, text: The passage.
    """

    id: str
    score: float
    title: str
    text: str


class SearchIndex:
    """Passages, found by the words they share with a query and ranked by BM25.

    Use is safe from several threads; `close` is the caller's.

    Args:
        corpus: Files or directories: ``*.jsonl`` with a passage in each line (``id``, ``text`` or
            ``contents``, optional ``title``), ``*.txt`` and ``*.md`` with a passage in each
            paragraph, whose id is ``name.txt#3``.
        path: A file to keep the index in; made when it is missing or the corpus has changed.
            None keeps it in memory.

    Raises:
        ToolError: A file cannot be read or has a line that is no passage, two passages share an
            id, there is none at all, or this Python's SQLite has no full-text search.
    """

    def __init__(
        self,
        corpus: Sequence[str | os.PathLike[str]],
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        files = corpus_files(corpus)
        self._lock = threading.Lock()
        if path is None:
            self._database = _new_database(":memory:")
            _fill(self._database, read_passages(files), "")
        else:
            self._database = _kept_database(Path(path), files)

    def search(self, query: str, count: int) -> list[Hit]:
        """The best `count` passages, the best first; equals in the order of the corpus."""
        words = dict.fromkeys(word.lower() for word in _WORD.findall(query))
        if not words or count < 1:
            return []
        expression = " OR ".join(f'"{word}"' for word in list(words)[:MAX_WORDS])
        with self._lock:
            rows = self._database.execute(
                "SELECT id, -bm25(passages, 0, 1, 1) AS score, title, text FROM passages "
                "WHERE passages MATCH ? ORDER BY score DESC, rowid LIMIT ?",
                (expression, count),
            ).fetchall()
        return [Hit(*row) for row in rows]

    def close(self) -> None:
        """Let go of the index."""
        self._database.close()


def _new_database(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False)
    try:
        database.execute(
            "CREATE VIRTUAL TABLE passages USING fts5"
            "(id UNINDEXED, title, text, tokenize = 'porter unicode61')"
        )
        database.execute("CREATE TABLE about (stamp TEXT)")
    except sqlite3.OperationalError as error:
        database.close()
        raise ToolError(f"search needs SQLite with full-text search (FTS5): {error}") from error
    return database


def _fill(database: sqlite3.Connection, passages: Iterator[Passage], stamp: str) -> None:
    try:
        with database:
            while batch := [row for row, _ in zip(passages, range(_BATCH), strict=False)]:
                rows = [(row.id, row.title, row.text) for row in batch]
                database.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
            database.execute("INSERT INTO about VALUES (?)", (stamp,))
            database.execute("INSERT INTO passages(passages) VALUES ('optimize')")
    except BaseException:
        database.close()
        raise


def _kept_database(path: Path, files: Sequence[Path]) -> sqlite3.Connection:
    """The index at `path`, if it is one of these files as they are now, or a new one there."""
    stamp = f"{_LAYOUT} {corpus_stamp(files)}"
    if not (path.exists() and _stamp_of(path) == stamp):
        half_made = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(_new_database(str(half_made))) as database:
                _fill(database, read_passages(files), stamp)
            half_made.replace(path)
        except (OSError, sqlite3.Error) as error:
            raise ToolError(f"search index {str(path)!r}: {error}") from error
        finally:
            half_made.unlink(missing_ok=True)
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)


def _stamp_of(path: Path) -> str | None:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT stamp FROM about").fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else row[0]


class SearchTool(Tool):
    """Answers a query with passages of a local corpus; `ToolResult.data` lists the hits.

    The index is made when the tool is, and is shared by all trajectories.

    Args:
        corpus: See `SearchIndex`; one path or several.
        name: What the model calls it.
        index: See `SearchIndex.path`.
        top_k: Passages where the model asks for no number.
        max_top_k: Most that it can ask for.
        description: What the model reads about it; None takes ours.

    Raises:
        ToolError: See `SearchIndex`.
    """

    stateful = False

    def __init__(
        self,
        corpus: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        name: str = "search",
        index: str | os.PathLike[str] | None = None,
        top_k: int = 3,
        max_top_k: int = 10,
        description: str | None = None,
    ) -> None:
        if not 1 <= top_k <= max_top_k <= MAX_PASSAGES:
            raise ToolError(
                f"search tool {name!r}: top_k = {top_k}, max_top_k = {max_top_k}; expected "
                f"1 ≤ top_k ≤ max_top_k ≤ {MAX_PASSAGES}"
            )
        self.name = name
        self.top_k = top_k
        self.max_top_k = max_top_k
        self.schema = _schema(name, description or _DESCRIPTION, top_k, max_top_k)
        paths = [corpus] if isinstance(corpus, str | os.PathLike) else corpus
        self.index = SearchIndex(paths, index)

    async def open(self, context: ToolContext) -> ToolSession:
        """See `Tool.open`."""
        return _SearchSession(self, context.threads)


class _SearchSession(ToolSession):
    def __init__(self, tool: SearchTool, threads: WorkerThreads) -> None:
        self._tool = tool
        self._threads = threads

    async def execute(self, call: ToolCall) -> Any:
        """Search in a worker thread."""
        query, count = call.arguments.get("query"), call.arguments.get("top_k", self._tool.top_k)
        most = self._tool.max_top_k
        if not isinstance(query, str):
            raise ToolError(f"query = {query!r:.80}: expected a text")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
            raise ToolError(f"top_k = {count!r:.80}: expected an integer from 1 to {most}")
        hits = await self._threads.run(self._tool.name, self._tool.index.search, query, count)
        if not hits:
            return ToolResult("No passage has any of these words.", data=[])
        return ToolResult("\n\n".join(map(_shown, hits)), data=hits)


def _shown(hit: Hit) -> str:
    title = f" {hit.title}" if hit.title else ""
    return f"[{hit.id}]{title}\n{hit.text}"


_DESCRIPTION = "Search the corpus for passages that share words with the query, the best first."


def _schema(name: str, description: str, top_k: int, max_top_k: int) -> dict[str, Any]:
    properties = {
        "query": {"type": "string", "description": "What to look for, in a few words."},
        "top_k": {
            "type": "integer",
            "description": "How many passages.",
            "default": top_k,
            "minimum": 1,
            "maximum": max_top_k,
        },
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["query"],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
