"""Prompts from files: one JSON object a line, or parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config.config_faults import Fault, got, show
from rollout.errors import PromptError
from rollout.scheduling.prompt_columns import prompt_of_row

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from rollout.types import Prompt

#: What parquet files begin with.
PARQUET_MAGIC = b"PAR1"
#: Faults that an error lists; the others are counted.
MAX_LISTED = 20

#: Where a row stands ("line 3"), and the row, or why it is none.
Row = tuple[str, dict[str, Any] | Fault]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts of a file, in its order.

    A file that ends in ``.parquet`` or begins like one is parquet (it needs the package pyarrow);
    any other holds one JSON object a line, and its blank lines are skipped. The columns are those
    of verl's data: ``prompt`` (a string, or a list of messages) or ``messages``, ``agent_name``,
    ``data_source``, ``reward_model`` with its ``ground_truth``, ``extra_info``; and ``uid``,
    ``ground_truth``, ``priority``, ``sampling``, ``tools``, ``tools_kwargs``. Other columns and
    the content of ``extra_info`` become the prompt's `extra`. Columns and keys of ``extra_info``
    that hold nothing are absent; what else parquet adds to structs, `rollout.Prompt` drops.

    Raises:
        PromptError: The file cannot be read or holds no prompts; or rows of it are faulty, each
            of which is named by its line (in parquet its row), with field, value and expectation.
    """
    source = Path(path)
    content = _content(source)
    is_parquet = source.suffix == ".parquet" or content.startswith(PARQUET_MAGIC)
    rows = _parquet_rows(source, content) if is_parquet else _json_rows(content)
    return _prompts(source, rows)


def _content(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except FileNotFoundError:
        raise PromptError(f"prompts file {source}: no such file") from None
    except OSError as error:
        raise PromptError(f"prompts file {source} cannot be read: {error.strerror}") from error


def _prompts(source: Path, rows: Iterable[Row]) -> list[Prompt]:
    prompts: list[Prompt] = []
    faults: list[str] = []
    places: dict[str, str] = {}
    for place, row in rows:
        prompt, found = (None, [row]) if isinstance(row, Fault) else prompt_of_row(row)
        if prompt is not None:
            found = _uid_faults(prompt.uid, place, places)
            prompts.append(prompt)
        faults += [f"{place}: {_line_of(fault)}" for fault in found]
    if faults:
        raise PromptError(_listed(source, faults))
    if not prompts:
        raise PromptError(f"prompts file {source} holds no prompts")
    return prompts


def _line_of(fault: Fault) -> str:
    return str(fault) if fault.path else fault.problem


def _uid_faults(uid: str | None, place: str, places: dict[str, str]) -> list[Fault]:
    if uid is None or places.setdefault(uid, place) == place:
        return []
    return [Fault("uid", f"{places[uid]} has it too; uids must be unique", uid)]


def _listed(source: Path, faults: Sequence[str]) -> str:
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    more = len(faults) - MAX_LISTED
    rest = [f"… and {more} more"] if more > 0 else []
    return "\n  ".join([f"{count} in prompts file {source}:", *faults[:MAX_LISTED], *rest])


def _json_rows(content: bytes) -> Iterator[Row]:
    # Split at line feeds only: str.splitlines would also split at separators inside strings.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | Fault:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault("", f"byte {error.start + 1} is not UTF-8 (0x{line[error.start]:02x})")
    except json.JSONDecodeError as error:
        return Fault("", f"column {error.colno}: not valid JSON: {error.msg}")
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        return Fault("", f"not readable as JSON: {error}")
    if not isinstance(row, dict):
        return Fault("", f"{show(row)}: expected an object{got(row)}")
    if b"\\u" in line and not _is_text(row):
        return Fault(
            "", "an escape from \\ud800 to \\udfff is half of a character, which is no text"
        )
    return row


def _is_text(row: dict[str, Any]) -> bool:
    """Whether UTF-8 can hold all strings of the row; JSON can spell halves of surrogate pairs."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parquet_rows(source: Path, content: bytes) -> Iterator[Row]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise PromptError(
            f"prompts file {source}: reading parquet needs pyarrow: pip install pyarrow"
        ) from None
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(f"prompts file {source} cannot be read as parquet: {error}") from error
