"""Examples over real SDKs and frameworks run, and each conversation is one row.

Needs `openai`, `anthropic`, `openai-agents`, `pydantic-ai-slim[openai]` and `langgraph`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["anthropic_sdk", "openai_sdk", "openai_agents", "pydantic_ai", "langgraph_agent"]
)
def test_example_runs(name: str) -> None:
    said = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name / "run.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == "rows 1, reward 1"
