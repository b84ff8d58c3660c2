"""`rollout check-template` tells people what a chat template does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chat_material import source, tokenizer
from rollout.cli import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process


def checked(
    family: str, template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and output for a family's tokenizer with `template`."""
    tokenizer("bytes").save_pretrained(tmp_path)
    file = tmp_path / f"{family}.jinja"
    file.write_text(template, encoding="utf-8")
    code = main(["check-template", str(tmp_path), "--chat-template", str(file)])
    return code, capsys.readouterr().out


def row(output: str, scene: str) -> list[str]:
    """The first line of a scene's row, cell by cell."""
    line = next(line for line in output.splitlines() if line.startswith(f"│ {scene} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_check_template_table_shows_boundaries_and_drift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = checked("qwen3", source("qwen3"), tmp_path, capsys)
    assert code == 0
    assert "turns end   with <|endoftext|> or <|im_end|>" in output
    inserted = r"'\n<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n'"
    assert row(output, "plain") == ["plain", "yes", "", "", "identical"]
    assert row(output, "multi-turn") == [
        "multi-turn", "yes", inserted, "'<|im_end|>'", "identical",
    ]  # fmt: skip
    assert row(output, "reasoning")[-1] == "reasoning_stripped"
    scenes = ("system", "tool call", "parallel tool calls", "unicode", "empty content")
    assert [row(output, scene)[1] for scene in scenes] == ["yes"] * 5
    assert (
        "reasoning: the transcript differs from its full rendering (reasoning_stripped)" in output
    )


def test_check_template_that_cannot_append_says_why_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = "{{ messages | length }} messages\n" + source("chatml")
    code, output = checked("counting", counting, tmp_path, capsys)
    assert code == 1
    assert row(output, "plain")[1] == "yes"
    assert row(output, "multi-turn")[1].startswith("no: the chat template cannot be used")


def test_check_template_of_the_simulated_model_needs_no_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check-template", "simulated"]) == 0
    assert row(capsys.readouterr().out, "tool call")[1] == "yes"


def test_check_template_file_that_cannot_be_used_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.jinja"
    assert main(["check-template", "simulated", "--chat-template", str(file)]) == 2
    assert f"chat template {file} cannot be read: " in capsys.readouterr().err
    file.write_text("{% for m in messages %}\n{{ m.content }", encoding="utf-8")
    assert main(["check-template", "simulated", "--chat-template", str(file)]) == 2
    assert f"chat template {file}, line 2: not valid Jinja: " in capsys.readouterr().err


def test_check_template_without_a_tokenizer_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-template", str(tmp_path)]) == 2
    assert f"the tokenizer of {tmp_path} cannot be loaded: " in capsys.readouterr().err
