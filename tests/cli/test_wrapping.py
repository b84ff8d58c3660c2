"""Output for people breaks between words, whatever the width of their terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from forked import rollout_command
from rollout.batch import collate
from rollout.chat import Transcript
from rollout.chat.trajectory import Trajectory
from rollout.cli.check_template import check_template
from rollout.cli.groups import group_table
from rollout.cli.wrapping import wrapped
from rollout.config import LengthsConfig
from rollout.types import Outcome, Prompt

pytestmark = pytest.mark.process


@given(st.lists(st.text("abc,.…日", min_size=1, max_size=12), min_size=1), st.integers(20, 100))
def test_wrapped_keeps_every_word_whole_and_within_the_width(words: list[str], width: int) -> None:
    lines = wrapped(" ".join(words), width).split("\n")
    assert " ".join(lines).split() == words
    assert all(cell_len(line) <= width for line in lines)


def test_wrapped_text_stands_beside_its_label() -> None:
    assert wrapped("outcomes  12 completed, 3 failed (reward), 1 length", 30) == (
        "outcomes  12 completed, 3\n          failed (reward), 1\n          length"
    )
    assert wrapped("a word  or two", 8) == "a word  or\n        two"


@pytest.mark.parametrize("width", [40, 100])
def test_check_template_breaks_no_word_at_any_width(width: int) -> None:
    wide, narrow = io.StringIO(), io.StringIO()
    check_template("simulated", Console(file=wide, width=400))
    check_template("simulated", Console(file=narrow, width=width))
    known = set(re.findall(r"<\|\w+\|>|\w+", wide.getvalue()))
    known |= {"inserted"}  # what its column is called below one another
    assert set(re.findall(r"<\|\w+\|>|\w+", narrow.getvalue())) <= known
    lines = narrow.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= max(width, 47)  # the longest refusal has a long word


def test_group_table_breaks_no_word_at_80_columns() -> None:
    rows = [
        Trajectory(
            uid="p",
            group=0,
            member=member,
            transcript=Transcript(),
            outcome=Outcome.LIMIT,
            reason="invalid_calls",
            reward=-12345.678,
            prompt=Prompt(
                messages=[], ground_truth="-1234567890", extra={"question": "what " * 20}
            ),
        )
        for member in range(8)
    ]
    shown = io.StringIO()
    console = Console(file=shown, width=80)
    console.print(group_table(collate(rows, LengthsConfig(), 0), is_plain=True))
    words = shown.getvalue().split()
    assert words.count("-12345.68") == 8
    assert "(invalid_calls)" in words
    assert "-1234567890" in words


def in_terminal(columns: int, *arguments: str, cwd: Path) -> str:
    """What ``rollout …`` shows in a terminal of so many columns."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("COLUMNS", None)
    streams = {"stdin": inner, "stdout": inner, "stderr": inner}
    with rollout_command(*arguments, cwd=cwd, env=environment, **streams):
        os.close(inner)
        shown = b""
        try:
            while piece := os.read(terminal, 65536):
                shown += piece
        except OSError:  # how Linux says that the other side is closed
            pass
    os.close(terminal)
    return shown.decode().replace("\r\n", "\n")


def test_cli_output_in_a_terminal_of_80_columns_breaks_no_word(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        "from rollout.config import *\nfrom rollout.testing import Scenario\n"
        "config = Scenario(seed=1).config(placement=InProcessPlacement())\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "agent_name": "c"}')
    summary = in_terminal(
        80, "run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", cwd=tmp_path
    )
    check = in_terminal(80, "check", "config.py", cwd=tmp_path)
    assert "files     out: tensors.safetensors, samples.jsonl, trajectories.jsonl,\n" in summary
    assert "          metrics.json, meta.json, events.jsonl, trajectories.journal\n" in summary
    lines = [*summary[summary.index("rows  ") :].splitlines(), *check.splitlines()]
    assert [line for line in lines if cell_len(line) > 80] == []
