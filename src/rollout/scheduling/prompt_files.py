"""Prompts from files, one JSON object a line or parquet, with the columns that verl's data has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import PromptError
from rollout.scheduling.arguments import find_faults
from rollout.types import Prompt

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

#: What parquet files begin with.
PARQUET_MAGIC = b"PAR1"
#: Faults that an error lists; the others are counted.
MAX_LISTED = 20
#: Columns that become the fields of a prompt which have their names.
_FIELDS = (
    *("uid", "agent_name", "data_source", "sampling", "tools", "tools_kwargs", "priority"),
    "ground_truth",
)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read the prompts of a file, in its order.

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
    try:
        content = source.read_bytes()
    except FileNotFoundError:
        raise PromptError(f"prompts file {source}: no such file") from None
    except OSError as error:
        raise PromptError(f"prompts file {source} cannot be read: {error.strerror}") from error
    is_parquet = source.suffix == ".parquet" or content.startswith(PARQUET_MAGIC)
    prompts: list[Prompt] = []
    faults: list[str] = []
    first: dict[str, str] = {}
    for name, row in _read_parquet(source, content) if is_parquet else _read_lines(content):
        try:
            prompt = read_row(row if is_parquet else _parse_line(row))
        except PromptError as error:
            faults += [f"{name}: {line}" for line in str(error).split("\n")]
            continue
        uid = prompt.uid
        if uid is not None and first.setdefault(uid, name) != name:
            faults.append(
                f"{name}: uid = {uid!r:.80}: {first[uid]} has it too; uids must be unique"
            )
        prompts.append(prompt)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        more = len(faults) - MAX_LISTED
        rest = [f"… and {more} more"] if more > 0 else []
        lines = [f"{count} in prompts file {source}:", *faults[:MAX_LISTED], *rest]
        raise PromptError("\n  ".join(lines))
    if not prompts:
        raise PromptError(f"prompts file {source} holds no prompts")
    return prompts


def _read_lines(content: bytes) -> Iterator[tuple[str, Any]]:
    # Split at line feeds only: str.splitlines would also split at separators inside strings.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", line


def _parse_line(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not readable as JSON: {error}") from None


def _read_parquet(source: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise PromptError(
            f"prompts file {source}: reading parquet needs pyarrow: pip install pyarrow"
        ) from None
    try:
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except Exception as error:  # also what a column of an odd type raises
        raise PromptError(f"prompts file {source} cannot be read as parquet: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def read_row(row: Any) -> Prompt:
    """Return the prompt that a row describes, as `read_prompts` says.

    Raises:
        PromptError: The row is wrong; a line for each fault.
    """
    if not isinstance(row, Mapping):
        raise PromptError(f"{row!r:.80}: expected an object")
    columns = {name: value for name, value in row.items() if value is not None}
    faults = [
        f"{name} = {columns[name]!r:.80}: expected an object"
        for name in ("extra_info", "reward_model")
        if not isinstance(columns.get(name, {}), Mapping)
    ]
    names = [name for name in ("prompt", "messages") if name in columns]
    if len(names) != 1:
        problem = "got both" if names else "the row has neither"
        faults.append(f"prompt, messages: expected one of them; {problem}")
    if faults:
        raise PromptError("\n".join(faults))
    messages = columns.pop(names[0])
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    fields = {name: columns.pop(name) for name in _FIELDS if name in columns}
    nested, scorer = columns.pop("extra_info", {}), dict(columns.pop("reward_model", {}))

    def merge(into: dict[str, Any], name: str, value: Any, origin: str) -> None:
        """Nothing may be lost silently where two columns say different things under one name."""
        if value is not None and into.setdefault(name, value) != value:
            faults.append(
                f"{name} = {into[name]!r:.80}: {origin}.{name} says otherwise; expected one of them"
            )

    merge(fields, "ground_truth", scorer.pop("ground_truth", None), "reward_model")
    for name, value in nested.items():
        merge(fields if name == "tools_kwargs" else columns, name, value, "extra_info")
    if scorer:
        columns["reward_model"] = scorer
    prompt = Prompt(messages=messages, extra=columns, **fields)
    faults += [*find_faults(prompt), *_find_message_faults(names[0], messages)]
    if faults:
        raise PromptError("\n".join(faults))
    return prompt


def _find_message_faults(column: str, messages: Any) -> Iterator[str]:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not (is_message and isinstance(message.get("content"), str | list | None)):
            yield f"{column}[{index}] = {message!r:.80}: expected an object with role and content"
