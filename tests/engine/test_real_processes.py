"""A tool of which a thread never returns, in a process that is to end all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

STUCK = """
import anyio, threading, rollout
from rollout import LimitsConfig, Prompt, function_tool
from rollout.testing import Scenario, tool_call

@function_tool
def stuck() -> str:
    "Never return."
    threading.Event().wait()
    return ""

async def main():
    config = Scenario(seed=1).reply("go", tool_call("stuck")).then("gave up").config(
        limits=LimitsConfig(tool_s=0.2)
    )
    async with rollout.open_rollout(config, [stuck]) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "go"}])])
        print(batch.trajectories[0].answer, runtime.statistics().abandoned_threads, flush=True)

anyio.run(main, backend="%s")
print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_tool_thread_never_returns_close_and_exit_are_not_delayed(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK % backend],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "gave up {'stuck': 1}\nclosed\n"
