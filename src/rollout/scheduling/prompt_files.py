"""Prompts from files, one JSON object a line or parquet, with the columns that verl's data has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config.config_faults import Fault, got, show
from rollout.errors import PromptError
from rollout.scheduling.prompts import PRIORITY, is_priority
from rollout.types import Prompt

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

#: What parquet files begin with.
PARQUET_MAGIC = b"PAR1"
#: Faults that an error lists; the others are counted.
MAX_LISTED = 20

#: Where a row stands ("line 3"), and the row, or why it is none.
Row = tuple[str, dict[str, Any] | Fault]

NESTED = "extra_info"
#: Keys of `extra_info` that verl means for tools and users; they may stand beside it as well.
LIFTED = ("tools_kwargs", "interaction_kwargs")


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_object_of_objects(value: Any) -> bool:
    """Whether it is one; of a tool that has nothing, Arrow says None."""
    return _is_object(value) and all(isinstance(each, Mapping | None) for each in value.values())


#: What a column must hold where it holds anything: in words, and as a predicate.
_COLUMNS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "uid": ("a string", _is_string),
    "agent_name": ("a string", _is_string),
    "data_source": ("a string", _is_string),
    "reward_model": ("an object", _is_object),
    NESTED: ("an object", _is_object),
    "priority": (PRIORITY, is_priority),
    "sampling": ("an object", _is_object),
    "tools": ("a list of names of tools", _is_list_of_strings),
    "tools_kwargs": ("an object with one object for each tool", _is_object_of_objects),
    "interaction_kwargs": ("an object", _is_object),
}
#: Columns that become fields of a prompt; every other one travels in its `extra`.
_OWN = ("prompt", "messages", "ground_truth", *_COLUMNS)


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
    rows = _read_parquet(source, content) if is_parquet else _read_json(content)
    prompts: list[Prompt] = []
    faults: list[str] = []
    first: dict[str, str] = {}
    for place, row in rows:
        prompt, found = (None, [row]) if isinstance(row, Fault) else read_row(row)
        if prompt is not None:
            prompts.append(prompt)
            uid = prompt.uid
            if uid is not None and first.setdefault(uid, place) != place:
                found = [Fault("uid", f"{first[uid]} has it too; uids must be unique", uid)]
        faults += [f"{place}: {fault if fault.path else fault.problem}" for fault in found]
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        more = len(faults) - MAX_LISTED
        rest = [f"… and {more} more"] if more > 0 else []
        lines = [f"{count} in prompts file {source}:", *faults[:MAX_LISTED], *rest]
        raise PromptError("\n  ".join(lines))
    if not prompts:
        raise PromptError(f"prompts file {source} holds no prompts")
    return prompts


def _read_json(content: bytes) -> Iterator[Row]:
    # Split at line feeds only: str.splitlines would also split at separators inside strings.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse_line(line)


def _parse_line(line: bytes) -> dict[str, Any] | Fault:
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


def _read_parquet(source: Path, content: bytes) -> Iterator[Row]:
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


def read_row(row: Mapping[str, Any]) -> tuple[Prompt | None, list[Fault]]:
    """Return the prompt that a row describes, or None and everything that is wrong with the row.

    A column that is None is absent. Columns without a meaning here go to `extra`, beside what
    `extra_info` holds.
    """
    columns = {name: value for name, value in row.items() if value is not None}
    faults = [*_check_messages(columns), *_check_types("", columns)]
    nested = columns.get(NESTED, {})
    if isinstance(nested, Mapping):
        nested = {name: value for name, value in nested.items() if value is not None}
        lifted = {name: nested[name] for name in LIFTED if name in nested}
        faults += _check_types(f"{NESTED}.", lifted)
    faults = faults or [*_check_contradictions(columns, nested)]
    return (None, faults) if faults else (_make_prompt(columns, nested), [])


def _check_messages(columns: Mapping[str, Any]) -> Iterator[Fault]:
    names = [name for name in ("prompt", "messages") if name in columns]
    if len(names) != 1:
        problem = "expected one of them" + (", got both" if names else "; the row has neither")
        yield Fault("prompt, messages", problem)
        return
    (name,) = names
    value = columns[name]
    if isinstance(value, str) and name == "prompt":
        return
    if not isinstance(value, list):
        wanted = "a string or a list of messages" if name == "prompt" else "a list of messages"
        yield Fault(name, f"expected {wanted}{got(value)}", value)
        return
    for index, message in enumerate(value):
        path = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            yield Fault(path, f"expected an object with role and content{got(message)}", message)
            continue
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            yield Fault(f"{path}.role", f"expected a string{got(role)}", role)
        if not isinstance(content, str | list | None):
            yield Fault(f"{path}.content", f"expected a string{got(content)}", content)


def _check_types(prefix: str, columns: Mapping[str, Any]) -> Iterator[Fault]:
    for name, (expected, accepts) in _COLUMNS.items():
        if name in columns and not accepts(columns[name]):
            value = columns[name]
            # Of a list or an object, what is wrong may be inside.
            kind = "" if isinstance(value, list | Mapping) else got(value)
            yield Fault(f"{prefix}{name}", f"expected {expected}{kind}", value)


def _check_contradictions(columns: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[Fault]:
    """Find columns that say different things under one name: nothing may be lost silently."""
    for name, value in nested.items():
        beside = columns.get(name, value) if name not in _OWN or name in LIFTED else value
        if beside != value:
            yield Fault(name, f"{NESTED}.{name} says otherwise; expected one of them", beside)
    scored = columns.get("reward_model", {}).get("ground_truth")
    beside = columns.get("ground_truth", scored)
    if scored is not None and beside != scored:
        problem = "reward_model.ground_truth says otherwise; expected one of them"
        yield Fault("ground_truth", problem, beside)


def _make_prompt(columns: Mapping[str, Any], nested: Mapping[str, Any]) -> Prompt:
    messages = columns.get("prompt", columns.get("messages"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    scorer = dict(columns.get("reward_model", {}))
    truth = scorer.pop("ground_truth", None)
    extra = {name: value for name, value in columns.items() if name not in _OWN}
    extra |= nested
    lifted = extra.pop("tools_kwargs", {})
    if scorer:
        extra["reward_model"] = scorer
    if "interaction_kwargs" in columns:
        extra["interaction_kwargs"] = columns["interaction_kwargs"]
    named = ("uid", "agent_name", "sampling", "tools", "data_source", "priority")
    return Prompt(
        messages=messages,
        tools_kwargs=columns.get("tools_kwargs", lifted),
        ground_truth=columns.get("ground_truth", truth),
        extra=extra,
        **{name: columns[name] for name in named if name in columns},
    )
