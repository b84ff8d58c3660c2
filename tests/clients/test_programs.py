"""Coding agents as users train them: programs in a sandbox that reach the gateway alone."""

from __future__ import annotations

import sys

import pytest
from command_lines import NODE, PROGRAMS, require
from through_gateway import Run, run

from rollout import Prompt, SandboxUnavailable, programs, register_agent
from rollout.config import SandboxConfig
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

#: As a Markdown list begins, which is no option.
QUESTION = "- Write what you think to b.txt, dear robot"
FILES = {"a.txt": "héllo\n"}
READABLE = [str(PROGRAMS.parents[1]), str(NODE)]
SANDBOX = SandboxConfig(
    provider="bubblewrap", provider_options={"readable": READABLE}, max_processes=512, disk_mb=1024
)
PATH = f"{NODE}:/usr/local/bin:/usr/bin:/bin"

register_agent("claude_code")(
    programs.claude_code(f"{PROGRAMS}/claude", env={"PATH": PATH}, files=FILES, collect=["b.txt"])
)
register_agent("codex")(
    programs.codex(f"{PROGRAMS}/codex", env={"PATH": PATH}, files=FILES, collect=["b.txt"])
)
register_agent("mini_swe_agent")(
    programs.mini_swe_agent(
        f"{sys.prefix}/bin/mini", env={"PATH": PATH}, files=FILES, collect=["b.txt"]
    )
)


async def ask(agent: str, call: str, end: str = "Done.", sandbox: SandboxConfig = SANDBOX) -> Run:
    scenario = Scenario().reply(QUESTION, f"<think>Hm.</think>Writing.\n{call}").then(end)
    prompt = Prompt(messages=[{"role": "user", "content": QUESTION}])
    try:
        return await run(prompt, scenario, agent=agent, sandbox=sandbox)
    except SandboxUnavailable as error:
        pytest.skip(f"{agent}: {error}")


def assert_written(done: Run) -> None:
    assert done.trajectory.extra["program"]["exit_code"] == 0
    assert "Done." in done.trajectory.extra["program"]["output"]
    assert done.trajectory.extra["files"] == {"b.txt": "héllo\nö\n"}


async def test_claude_code_in_a_sandbox_is_one_exact_row() -> None:
    require("claude")
    command = "(cat a.txt; echo ö) > b.txt"
    done = await ask("claude_code", tool_call("Bash", command=command, description="Write"))
    done.assert_exact("main")
    assert_written(done)


async def test_codex_in_a_sandbox_is_one_exact_row() -> None:
    require("codex")
    done = await ask("codex", tool_call("exec_command", cmd="(cat a.txt; echo ö) > b.txt"))
    done.assert_exact("main")
    assert_written(done)


async def test_mini_swe_agent_is_one_exact_row() -> None:
    """Without a sandbox, which cannot read an interpreter in somebody's home."""
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat b.txt"
    done = await ask(
        "mini_swe_agent",
        tool_call("bash", command="(cat a.txt; echo ö) > b.txt"),
        tool_call("bash", command=submit),
        SandboxConfig(provider="none"),
    )
    done.assert_exact("main")
    assert done.trajectory.extra["program"]["exit_code"] == 0
    assert done.trajectory.extra["files"] == {"b.txt": "héllo\nö\n"}
