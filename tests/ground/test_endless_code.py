"""Code that cannot be stopped ends with the process of the command line, and is named."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING

import pytest

from forked import rollout_command
from rollout import Outcome, RolloutBatch
from slow_cases import slow_but

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = {
    "shields": "with anyio.CancelScope(shield=True):\n            await anyio.sleep_forever()",
    "swallows in a child": (
        "async with anyio.create_task_group() as tasks:\n            tasks.start_soon(swallow)"
    ),
}


@pytest.mark.parametrize(
    ("how", "backend"),
    slow_but(
        product(ENDLESS, ("trio", "asyncio")),
        ("shields", "trio"),
        ("swallows in a child", "asyncio"),
    ),
)
def test_command_line_code_that_cannot_be_stopped_ends_with_the_process(
    how: str, backend: str, tmp_path: Path
) -> None:
    (tmp_path / "agents.py").write_text(
        f"""
import anyio
import rollout

async def swallow():
    while True:
        try:
            await anyio.sleep_forever()
        except BaseException:
            pass

@rollout.register_agent("endless")
class Endless(rollout.AgentLoop):
    async def run(self, context):
        await context.generate()
        {ENDLESS[how]}
"""
    )
    (tmp_path / "config.py").write_text(
        """
import attrs
from rollout.config import *
from rollout.testing import Scenario

limits = LimitsConfig(generation_s=1, turn_s=1, tool_s=1, trajectory_s=1, cleanup_s=0.5)
config = Scenario(seed=1).reply("", "Well.").config(placement=InProcessPlacement(), limits=limits)
"""
    )
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "go", "agent_name": "endless"}\n{"prompt": "go", "agent_name": "single_turn"}\n'
    )
    arguments = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out"]
    arguments += ["--agents", "agents.py", "--backend", backend]
    pipe = subprocess.PIPE
    process = rollout_command(*arguments, cwd=tmp_path, stdout=pipe, stderr=pipe)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("error: agent Endless at ")
    assert last.endswith("did not end within limits.cleanup_s = 0.5 s; the results are in out")
    trajectories = RolloutBatch.load(tmp_path / "out").trajectories
    ends = {(each.outcome, each.reason) for each in trajectories}
    assert ends == {(Outcome.FAILED, "unresponsive"), (Outcome.COMPLETED, "")}


SWALLOWS = {
    "plain": "await swallow()",
    "in a scope": "with anyio.CancelScope():\n            await swallow()",
    "in a task group": "async with anyio.create_task_group():\n            await swallow()",
}


@pytest.mark.parametrize(
    ("how", "backend"),
    slow_but(
        product(SWALLOWS, ("trio", "asyncio")), ("plain", "asyncio"), ("in a task group", "trio")
    ),
)
def test_process_ends_after_code_that_swallows_its_cancellation(how: str, backend: str) -> None:
    program = f"""
import anyio
import rollout
from rollout.config import LimitsConfig
from rollout.testing import Scenario

async def swallow():
    while True:
        try:
            await anyio.sleep_forever()
        except BaseException:
            pass

@rollout.register_agent("swallows")
class Swallows(rollout.AgentLoop):
    async def run(self, context):
        {SWALLOWS[how]}

async def main():
    limits = LimitsConfig(generation_s=1, turn_s=1, tool_s=1, trajectory_s=1, cleanup_s=0.5)
    config = Scenario(seed=1).reply("", "Well.").config(limits=limits)
    prompts = [rollout.Prompt("go", agent_name=name) for name in ("swallows", "single_turn")]
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate(prompts)
    print([(each.outcome.value, each.reason) for each in batch.trajectories])

anyio.run(main, backend={backend!r})
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('failed', 'unresponsive'), ('completed', '')]\n"
