"""The README's program does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked import python_script

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


@pytest.mark.slow
@pytest.mark.model
def test_readme_program_calls_its_tool_and_earns_rewards(program: Path) -> None:
    assert float(check_output(program)) > 0.5


def test_readme_program_on_a_scripted_engine_is_what_it_is_on_the_model(program: Path) -> None:
    text = program.read_text("utf-8")
    config = "rollout.RolloutConfig(  # the embedded model, in a process of its own"
    assert config in text
    text = text.replace(config, SCRIPTED).replace("prompt=768", "prompt=4096")  # ids are bytes
    program.write_text("from rollout import testing\n" + text, "utf-8")
    assert check_output(program) == "1.00"


SCRIPTED = """(
    rollout.Scenario(seed=1)
    .reply("17 + 25", testing.tool_call("add", a=17, b=25)).then("The answer is 42.")
    .reply("408 + 77", testing.tool_call("add", a=408, b=77)).then("The answer is 485.")
).config("""


def check_output(program: Path) -> str:
    """The mean reward that it prints, beside all else that the page promises."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with python_script(program, **streams) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert '{"name": "add", "arguments"' in output
    assert re.search(r"assistant +The answer is \d+", output)
    assert re.search(r"response_mask +\(8, 256\)", output)
    (reward,) = re.findall(r"mean reward ([\d.]+)", output)
    return str(reward)
