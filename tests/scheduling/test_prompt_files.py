"""Prompts from JSON lines and parquet."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout import Prompt, PromptError
from rollout.scheduling.prompt_files import read_prompts

ASKED = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def faults_of(file: Path) -> list[str]:
    """The lines of the error below its heading."""
    with pytest.raises(PromptError) as caught:
        read_prompts(file)
    heading, *lines = str(caught.value).split("\n  ")
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    assert heading == f"{count} in prompts file {file}:"
    return lines


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_prompt_files_list_becomes_the_messages(file: Path, column: str) -> None:
    asked = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert read_prompts(write(file, {column: asked})) == [Prompt(messages=asked)]


def test_prompt_files_verl_columns_become_fields_and_extra(file: Path) -> None:
    row = {
        "prompt": ASKED,
        "agent_name": "tool_agent",
        "data_source": "gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {
            "index": 7,
            "tools_kwargs": {"grade": {"truth": "4"}},
            "interaction_kwargs": {"name": "teacher"},
        },
    }
    assert read_prompts(write(file, row)) == [
        Prompt(
            messages=ASKED,
            agent_name="tool_agent",
            data_source="gsm8k",
            ground_truth="4",
            tools_kwargs={"grade": {"truth": "4"}},
            extra={
                "ability": "math",
                "index": 7,
                "interaction_kwargs": {"name": "teacher"},
                "reward_model": {"style": "rule"},
            },
        )
    ]


def test_prompt_files_own_columns_become_fields(file: Path) -> None:
    fields = {
        "uid": "a",
        "sampling": {"temperature": 0.2},
        "tools": ["add"],
        "tools_kwargs": {"add": {"a": 1}},
        "ground_truth": [4, None],
    }
    row = {"prompt": "2+2?", **fields, "agent_name": None, "interaction_kwargs": {"name": "t"}}
    assert read_prompts(write(file, row)) == [
        Prompt(messages=ASKED, **fields, extra={"interaction_kwargs": {"name": "t"}})
    ]


def test_prompt_files_blank_lines_and_bom_are_skipped(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b\xe2\x80\xa8c"}')
    said = [prompt.messages[0]["content"] for prompt in read_prompts(file)]  # type: ignore[index]
    assert said == ["a", "b\u2028c"]


def test_prompt_files_every_faulty_line_is_named(file: Path) -> None:
    file.write_bytes(
        b'{"prompt": 7}\n'
        b"\n"
        b"{bad\n"
        b"[1]\n"
        b'{"prompt": "\xff"}\n'
        b'{"prompt": "a", "extra_info": 3}\n'
        b'{"prompt": "a", "messages": []}\n'
        b'{"uid": "a"}\n'
        b'{"prompt": [{"role": "user", "content": 1}, 5, {"content": "x"}]}\n'
        b'{"prompt": "\\ud800"}\n'
        b'{"prompt": "a", "extra_info": {"tools_kwargs": {"add": 1}}}\n'
        b'{"prompt": "a", "tools": ["a", 2]}\n'
    )
    lists = "expected a text or a list of messages"
    shape = "expected an object with role and content"
    assert faults_of(file) == [
        f"line 1: messages = 7: {lists}",
        "line 3: not readable as JSON: JSON is malformed: object keys must be strings (byte 1)",
        "line 4: [1]: expected an object",
        "line 5: not readable as JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid "
        "start byte",
        "line 6: extra_info = 3: expected an object",
        "line 7: prompt, messages: expected one of them; got both",
        "line 8: prompt, messages: expected one of them; the row has neither",
        f"line 9: prompt[0] = {{'role': 'user', 'content': 1}}: {shape}",
        f"line 9: prompt[1] = 5: {shape}",
        f"line 9: prompt[2] = {{'content': 'x'}}: {shape}",
        "line 10: not readable as JSON: Input data was truncated",
        "line 11: tools_kwargs['add'] = 1: expected a mapping",
        "line 12: tools[1] = 2: expected a string",
    ]


def test_prompt_files_same_uid_names_both_lines(file: Path) -> None:
    write(file, {"prompt": "a", "uid": "x"}, {"prompt": "b"}, {"prompt": "c", "uid": "x"})
    assert faults_of(file) == ["line 3: uid = 'x': line 1 has it too; uids must be unique"]


def test_prompt_files_contradicting_columns_are_refused(file: Path) -> None:
    write(
        file,
        {"prompt": "a", "index": 1, "extra_info": {"index": 2}},
        {"prompt": "a", "ground_truth": "4", "reward_model": {"ground_truth": "5"}},
    )
    assert faults_of(file) == [
        "line 1: index = 1: extra_info.index says otherwise; expected one of them",
        "line 2: ground_truth = '4': reward_model.ground_truth says otherwise; "
        "expected one of them",
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_prompt_files_without_prompts_are_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(PromptError, match=f"^prompts file {file} holds no prompts$"):
        read_prompts(file)


def test_prompt_files_missing_file_is_named(file: Path) -> None:
    with pytest.raises(PromptError, match=f"^prompts file {file}: no such file$"):
        read_prompts(file)


@pytest.mark.parametrize("name", ["prompts.parquet", "prompts.data"])
def test_prompt_files_parquet_becomes_plain_data_without_empty_keys(
    tmp_path: Path, name: str
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "2+2?"}],
            "reward_model": {"ground_truth": "4"},
            "extra_info": {"index": 1, "tools_kwargs": {"add": {"a": 1}}, "scores": [0.5, 1.0]},
        },
        {
            "prompt": [{"role": "user", "content": "2+2?"}],
            "reward_model": {"ground_truth": "4"},
            "extra_info": {"index": 2, "tools_kwargs": {"sub": {"b": 2}}},
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    assert read_prompts(tmp_path / name) == [
        Prompt(
            messages=ASKED,
            ground_truth="4",
            tools_kwargs={"add": {"a": 1}},
            extra={"index": 1, "scores": [0.5, 1.0]},
        ),
        Prompt(
            messages=ASKED, ground_truth="4", tools_kwargs={"sub": {"b": 2}}, extra={"index": 2}
        ),
    ]


def test_prompt_files_faulty_parquet_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    rows = [{"prompt": "a", "uid": "x"}, {"prompt": None, "uid": "y"}, {"prompt": "a", "uid": "x"}]
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert faults_of(file) == [
        "row 2: prompt, messages: expected one of them; the row has neither",
        "row 3: uid = 'x': row 1 has it too; uids must be unique",
    ]


def test_prompt_files_broken_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(PromptError, match=f"^prompts file {file} cannot be read as parquet: "):
        read_prompts(file)


def test_prompt_files_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PromptError) as caught:
        read_prompts(file)
    assert str(caught.value) == (
        f"prompts file {file}: reading parquet needs pyarrow: pip install pyarrow"
    )
