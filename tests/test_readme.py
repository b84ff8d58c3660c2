"""The README's program does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    path = tmp_path / "sixty_seconds.py"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.slow
def test_readme_program_passes_strict_type_checks(program: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.model
def test_readme_program_calls_its_tool_and_earns_rewards(program: Path) -> None:
    command = [sys.executable, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    (reward,) = re.findall(r"mean reward ([\d.]+)", found.stdout)
    assert float(reward) > 0.5
    assert '{"name": "add", "arguments"' in found.stdout
    assert re.search(r"assistant +The answer is \d+", found.stdout)
    assert re.search(r"response_mask +\(8, 256\)", found.stdout)
