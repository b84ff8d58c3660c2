"""Scripts whose processes import them again: what they start belongs under the guard."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forked import python_script
from slow_cases import slow_after, slow_but

pytestmark = pytest.mark.process
SCRIPT = '''
import sys

import anyio

import rollout
from rollout.config import LimitsConfig, RewardsConfig
from rollout.testing import Scenario, tool_call

print("imported", flush=True)
{first}

def score(trajectory):
    return 1.0


@rollout.function_tool(isolation="process")
def shout(word: str) -> str:
    """Say it loudly.

    Args:
        word: What is said.
    """
    return word.upper()


WHAT, FACE, BACKEND = {what!r}, {face!r}, {backend!r}
SCENARIO = Scenario(seed=1).reply("go", tool_call("shout", word="hi")).then("Done.")
CONFIG = SCENARIO.config(
    limits=LimitsConfig(reward_s=300),
    rewards=RewardsConfig(processes=1 if WHAT == "reward" else 0),
)
OPTIONS = {{"tools": [shout] if WHAT == "tool" else [], "reward": score}}
PROMPTS = [rollout.Prompt(messages=[{{"role": "user", "content": "go"}}])]


async def train():
    async with rollout.open_rollout(CONFIG, **OPTIONS) as runtime:
        return await runtime.generate(PROMPTS)


def main():
    if FACE == "blocking":
        with rollout.open_rollout_blocking(CONFIG, backend=BACKEND, **OPTIONS) as runtime:
            batch = runtime.generate(PROMPTS)
    else:
        batch = anyio.run(train, backend=BACKEND)
    (trajectory,) = batch.trajectories
    said = [message.content for message in trajectory.messages]
    print("outcome", trajectory.outcome, trajectory.reward, said)


{end}
'''
GUARD = 'put what the script starts under `if __name__ == "__main__":`'


def run(path: Path, what: str, face: str, backend: str, end: str, first: str = "") -> str:
    script = path / "train.py"
    script.write_text(SCRIPT.format(what=what, face=face, backend=backend, end=end, first=first))
    ran = python_script(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = ran.communicate(timeout=60)
    return output + errors


@pytest.mark.parametrize("backend", slow_but(["trio", "asyncio"], "asyncio"))
@pytest.mark.parametrize("face", slow_but(["async", "blocking"], "async"))
@pytest.mark.parametrize("what", slow_but(["reward", "tool"], "reward"))
def test_script_without_guard_ends_at_once_and_names_the_guard(
    tmp_path: Path, what: str, face: str, backend: str
) -> None:
    said = run(tmp_path, what, face, backend, "main()")
    error = {"reward": "ConfigError: rewards.processes", "tool": "ToolError: isolation"}[what]
    last = said.splitlines()[-1]
    assert error in last
    assert GUARD in last
    assert "train.py" in last
    assert said.count("imported\n") == 2


@pytest.mark.parametrize("what", slow_but(["reward", "tool"], "tool"))
def test_script_with_guard_works(tmp_path: Path, what: str) -> None:
    said = run(tmp_path, what, "async", "asyncio", "if __name__ == '__main__':\n    main()")
    assert "outcome completed 1.0" in said
    assert ("'HI'" in said) == (what == "tool")


@pytest.mark.parametrize("what", slow_but(["reward", "tool"], "reward"))
@pytest.mark.parametrize(
    ("first", "words"),
    slow_after(
        1,
        [
            ("import os\nif __name__ != '__main__': os._exit(9)", "exit code 9"),
            ("if __name__ != '__main__': 1 / 0", "ZeroDivisionError: division by zero"),
            ("if __name__ != '__main__': sys.exit(3)", "SystemExit: 3"),
        ],
    ),
)
def test_script_whose_import_fails_otherwise_is_told_so(
    tmp_path: Path, what: str, first: str, words: str
) -> None:
    said = run(tmp_path, what, "blocking", "trio", "if __name__ == '__main__': main()", first)
    assert words in said.splitlines()[-1]
