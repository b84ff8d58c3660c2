"""Rewards that run hidden tests in sandboxes with real processes."""

from __future__ import annotations

from typing import Any

import pytest

import rollout
from rollout import AgentLoop, Prompt, register_agent
from rollout.agents import AgentContext
from rollout.config import AgentConfig, SandboxConfig
from rollout.errors import SandboxError
from rollout.testing import Scenario

pytestmark = [pytest.mark.anyio, pytest.mark.process]
CODES = {"right": "f = lambda n: n * n", "wrong": "f = lambda n: n + 1"}


@register_agent("hidden_coder")
class Coder(AgentLoop):
    """Writes what its prompt says."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        await context.sandbox.write_file("src/solution.py", context.prompt.extra["code"])


async def run_hidden_tests(trajectory: Any, sandbox: Any) -> float:
    async with sandbox.fresh(artifacts=["src"]) as judge:
        await judge.write_file("check.py", "from src.solution import f\nassert f(2) == 4")
        result = await judge.exec(["python3", "check.py"], timeout_s=60)
    return float(result.exit_code == 0 and b"assert" not in result.stderr)


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_hidden_tests_grade_what_each_agent_wrote() -> None:
    prompts = [Prompt(messages="go", uid=uid, extra={"code": code}) for uid, code in CODES.items()]
    config = (
        Scenario(seed=1)
        .reply("", "ok")
        .config(
            agent=AgentConfig(name="hidden_coder"),
            sandbox=SandboxConfig(provider="none"),
        )
    )
    async with rollout.open_rollout(config, (), run_hidden_tests) as runtime:
        batch = await runtime.generate(prompts)
        counts = runtime.statistics().sandboxes
    assert [t.reward for t in batch.trajectories] == [1.0, 0.0]
    assert counts is not None
    assert (counts.opened, counts.closed, counts.leaked) == (4, 4, 0)


async def grade_link(trajectory: Any, sandbox: Any) -> float:
    await sandbox.exec("ln -s src/solution.py answer.py; ln -s src folder")
    for link in ("answer.py", "folder", "folder/"):
        with pytest.raises(SandboxError, match="no regular file"):
            async with sandbox.fresh(artifacts=[link]):
                pytest.fail("it followed the link")
    return 1.0


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_artifact_that_is_a_link_is_refused() -> None:
    config = (
        Scenario(seed=1)
        .reply("", "ok")
        .config(agent=AgentConfig(name="hidden_coder"), sandbox=SandboxConfig(provider="none"))
    )
    async with rollout.open_rollout(config, (), grade_link) as runtime:
        batch = await runtime.generate([Prompt(messages="go", uid="p", extra={"code": ""})])
    assert batch.trajectories[0].reward == 1.0, batch.trajectories[0].cause
