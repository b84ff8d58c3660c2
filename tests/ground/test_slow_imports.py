"""Rewards and tools whose processes import for too long: which, and what to do."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rollout
from rollout import ConfigError, ToolError
from rollout.config import LimitsConfig, RewardsConfig
from rollout.testing import Scenario
from slow_cases import slow_after

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture(params=slow_after(1, ["trio", "asyncio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


#: Slow in a process of its own alone, and in the module's own line or in one that it imports.
REWARDS = """
import os
import time

import rollout

if os.getpid() != {here}:
    {slow}


def score(trajectory):
    return 1.0


@rollout.function_tool(isolation="process")
def shout(word: str) -> str:
    '''Say it loudly.

    Args:
        word: What is said.
    '''
    return word.upper()
"""
REMEDY = (
    "; raise the limit, import what is slow within the function, and put what a script starts "
    'under `if __name__ == "__main__":`'
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    def make(slow: str) -> Any:
        (tmp_path / "slow_rewards.py").write_text(REWARDS.format(here=os.getpid(), slow=slow))
        (tmp_path / "heavy.py").write_text("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "slow_rewards", raising=False)
        return importlib.import_module("slow_rewards")

    return make


async def refusal(limit_s: float, *, tools: Any = (), reward: Any = None) -> str:
    config = Scenario(seed=1).config(
        limits=LimitsConfig(reward_s=limit_s, tool_s=limit_s),
        rewards=RewardsConfig(processes=1 if reward else 0),
    )
    with pytest.raises((ConfigError, ToolError)) as caught:
        async with rollout.open_rollout(config, tools, reward):
            pytest.fail("opened")
    return str(caught.value)


async def test_reward_process_that_imports_too_long_says_which_and_what_to_do(
    module: Callable[[str], Any], tmp_path: Path
) -> None:
    said = await refusal(1.0, reward=module("time.sleep(60)").score)
    assert said == (
        f"rewards.processes: score of {tmp_path / 'slow_rewards.py'} was not imported within "
        f"limits.reward_s = 1 s, by a new process of {sys.executable}{REMEDY}"
    )


async def test_import_of_a_tool_that_never_lets_a_thread_run_is_ended_too(
    module: Callable[[str], Any], tmp_path: Path
) -> None:
    said = await refusal(1.0, tools=[module("import heavy").shout])
    assert said == (
        f"isolation = 'process': shout of {tmp_path / 'slow_rewards.py'} was not imported within "
        f"limits.tool_s = 1 s, by a new process of {sys.executable}{REMEDY}"
    )
