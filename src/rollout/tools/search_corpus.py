"""The passages of a corpus, read from files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ToolError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

_LINES = (".jsonl",)
_TEXTS = (".txt", ".md")
_PARAGRAPH = re.compile(r"\n\s*\n")


class Passage(msgspec.Struct, frozen=True):
    """A piece of the corpus that is found as a whole."""

    id: str
    title: str
    text: str


def corpus_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that these paths name, those of directories in the order of their names.

    Raises:
        ToolError: A path does not exist or is of no known kind, or there is no file.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix in _LINES + _TEXTS)
        elif not path.exists():
            raise ToolError(f"corpus {str(path)!r} does not exist")
        elif path.suffix not in _LINES + _TEXTS:
            expected = ", ".join(f"*{suffix}" for suffix in _LINES + _TEXTS)
            raise ToolError(f"corpus {str(path)!r}: expected one of {expected}, or a directory")
        else:
            found.append(path)
    if not found:
        raise ToolError(f"corpus {[str(path) for path in paths]}: there is no file in it")
    return found


def corpus_stamp(files: Sequence[Path]) -> str:
    """Changes when a file is another one, or has changed."""
    digest = hashlib.sha256()
    for file in files:
        facts = file.stat()
        digest.update(f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read_passages(files: Sequence[Path]) -> Iterator[Passage]:
    """All passages, one after another.

    Raises:
        ToolError: A file cannot be read, a line is no passage, or two passages share an id.
    """
    seen: set[str] = set()
    for file in files:
        for place, passage in _passages_of(file):
            if passage.id in seen:
                raise ToolError(f"{place}: the id {passage.id!r} occurs twice in the corpus")
            seen.add(passage.id)
            yield passage
    if not seen:
        raise ToolError(f"corpus {[str(file) for file in files]}: there is no passage in it")


def _passages_of(file: Path) -> Iterator[tuple[str, Passage]]:
    read = _lines_of if file.suffix in _LINES else _paragraphs_of
    try:
        yield from read(file)
    except OSError as error:
        raise ToolError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ToolError(f"{file}: not UTF-8: {error.reason}") from error


def _lines_of(file: Path) -> Iterator[tuple[str, Passage]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{file}, line {number}"
                yield place, _passage(line, place)


def _passage(line: str, place: str) -> Passage:
    try:
        entry: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ToolError(f"{place}: not JSON: {error}") from error
    text = entry.get("text", entry.get("contents")) if isinstance(entry, dict) else None
    key = entry.get("id") if isinstance(entry, dict) else None
    title = entry.get("title") or "" if isinstance(entry, dict) else None
    if not (isinstance(text, str) and isinstance(key, str | int) and isinstance(title, str)):
        raise ToolError(
            f'{place}: {line.strip()!r:.80}: expected {{"id": …, "text": "…"}}, with a "title" '
            f"if there is one"
        )
    return Passage(str(key), title, text)


def _paragraphs_of(file: Path) -> Iterator[tuple[str, Passage]]:
    paragraphs = filter(str.strip, _PARAGRAPH.split(file.read_text(encoding="utf-8")))
    for number, paragraph in enumerate(paragraphs, start=1):
        yield str(file), Passage(f"{file.name}#{number}", "", paragraph.strip())
