"""The code of `docs/observe.md` runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from report_runs import MadeUpRun

PAGE = Path(__file__).parents[2] / "docs" / "observe.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
#: What a reader of the page has: a configuration, beside the results of a run.
CONFIG = """
from rollout.testing import Scenario, tool_call

config = Scenario(seed=1).reply("", tool_call("nothing", x=1)).then("Certainly.").config()
"""
#: What a block writes, in some of its lines.
SAID = {
    0: r"^\d+\.\d+ \d+$",
    1: r"^ToolEnded\(.*^nothing .*unknown tool",
    2: "",
}


def test_every_block_of_the_page_is_known() -> None:
    assert len(BLOCKS) == len(SAID)


@pytest.mark.parametrize("at", SAID)
def test_block_of_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    MadeUpRun(groups=1).write(tmp_path / "results")
    (tmp_path / "config.py").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}

    exec(compile(BLOCKS[at], PAGE.name, "exec"), names)

    assert re.search(SAID[at], capsys.readouterr().out, re.M | re.S)
