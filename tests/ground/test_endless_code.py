"""Code that cannot be stopped ends with the process of the command line, and is named."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from forked import python_program, rollout_command
from rollout import Outcome, RolloutBatch
from slow_cases import slow_but

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from pathlib import Path

#: Code that ends in no way but with its process.
ENDLESS = """
import anyio
import rollout

async def swallow():
    while True:
        try:
            await anyio.sleep_forever()
        except BaseException:
            pass

@rollout.register_agent("shields")
class Shields(rollout.AgentLoop):
    async def run(self, context):
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()

@rollout.register_agent("swallows_in_a_child")
class Child(rollout.AgentLoop):
    async def run(self, context):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(swallow)
"""
#: Code that is stopped, after which the process ends by itself.
SWALLOWS = """
@rollout.register_agent("swallows")
class Plain(rollout.AgentLoop):
    async def run(self, context):
        await swallow()

@rollout.register_agent("swallows_in_a_scope")
class Scope(rollout.AgentLoop):
    async def run(self, context):
        with anyio.CancelScope():
            await swallow()

@rollout.register_agent("swallows_in_a_task_group")
class Group(rollout.AgentLoop):
    async def run(self, context):
        async with anyio.create_task_group():
            await swallow()
"""


@pytest.mark.parametrize("backend", slow_but(["trio", "asyncio"], "trio"))
def test_command_line_code_that_cannot_be_stopped_ends_with_the_process(
    backend: str, tmp_path: Path
) -> None:
    (tmp_path / "agents.py").write_text(ENDLESS)
    (tmp_path / "config.py").write_text(
        """
import attrs
from rollout.config import *
from rollout.testing import Scenario

limits = LimitsConfig(generation_s=1, turn_s=1, tool_s=1, trajectory_s=1, cleanup_s=0.5)
config = Scenario(seed=1).reply("", "Well.").config(placement=InProcessPlacement(), limits=limits)
"""
    )
    names = ("shields", "swallows_in_a_child", "single_turn")
    prompts = [json.dumps({"prompt": "go", "agent_name": name}) for name in names]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    arguments = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out"]
    arguments += ["--agents", "agents.py", "--backend", backend]
    pipe = subprocess.PIPE
    process = rollout_command(*arguments, cwd=tmp_path, stdout=pipe, stderr=pipe)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("error: agent ")
    assert "agent Shields at " in last
    assert "agent Child at " in last
    assert last.endswith("did not end within limits.cleanup_s = 0.5 s; the results are in out")
    trajectories = RolloutBatch.load(tmp_path / "out").trajectories
    ends = [(each.outcome, each.reason) for each in trajectories]
    assert ends == [(Outcome.FAILED, "unresponsive")] * 2 + [(Outcome.COMPLETED, "")]


@pytest.mark.parametrize("backend", slow_but(["trio", "asyncio"], "asyncio"))
def test_process_ends_after_code_that_swallows_its_cancellation(backend: str) -> None:
    program = f"""
{ENDLESS}
{SWALLOWS}
from rollout.config import LimitsConfig
from rollout.testing import Scenario

async def main():
    limits = LimitsConfig(generation_s=1, turn_s=1, tool_s=1, trajectory_s=1, cleanup_s=0.5)
    config = Scenario(seed=1).reply("", "Well.").config(limits=limits)
    names = ["swallows", "swallows_in_a_scope", "swallows_in_a_task_group", "single_turn"]
    prompts = [rollout.Prompt("go", agent_name=name) for name in names]
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate(prompts)
    print([(each.outcome.value, each.reason) for each in batch.trajectories])

anyio.run(main, backend={backend!r})
"""
    process = python_program(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    ends = [("failed", "unresponsive")] * 3 + [("completed", "")]
    assert output == f"{ends}\n"
