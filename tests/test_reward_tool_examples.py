"""The examples whose tools give the reward, on a simulated engine: ours, and a class of verl's."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.testing import Scenario, tool_call
from rollout.tools import load_tools, load_verl_tools
from rollout.types import Outcome

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def anyio_backend() -> str:
    """verl's class needs asyncio's thread, so time is real."""
    return "trio"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What its ``run.py`` defines."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    monkeypatch.delitem(sys.modules, "preprocess", raising=False)
    return runpy.run_path(str(EXAMPLES / name / "run.py"))


async def generated(run: dict[str, Any], tools: Any, tool: str) -> rollout.RolloutBatch:
    """A first trajectory that is right at the second try, and others that are wrong."""
    scenario = (
        Scenario(seed=1)
        .reply("Tom has 3 pens", tool_call(tool, answer="8"))
        .then(tool_call(tool, answer="7"))
        .then("7")
        .reply("A box holds", tool_call(tool, answer="9"))
        .then("9")
        .reply("A farm sells", tool_call(tool, answer="9"))
        .then("9")
        .timing(base_s=0.001, slope_s=0.0, prefill_tokens_per_s=None)
    )
    async with rollout.open_rollout(
        scenario.config(), tools=tools, reward=run["reward"]
    ) as runtime:
        return await runtime.generate(run["prompts"]())


@pytest.mark.anyio
async def test_verl_example_rewards_what_its_tool_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    run = example("verl_tools", monkeypatch)
    tools: Any = load_verl_tools(run["TOOLS"])
    right, wrong = (await generated(run, tools, "calc_gsm8k_reward")).samples
    assert (right.uid, right.outcome, right.reward) == ("problem-0", Outcome.COMPLETED, 1.0)
    assert right.tool_rewards == [-0.05, 0.0, 1.0]
    assert (wrong.uid, wrong.outcome, wrong.reward) == ("problem-1", Outcome.COMPLETED, 0.0)
    assert wrong.tool_rewards == [-0.05, 0.0]
    assert tools[0].tool.instances == {}


@pytest.mark.anyio
async def test_gsm8k_example_trains_on_preprocessed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = example("gsm8k", monkeypatch)
    prompts = run["prompts"]()
    assert [prompt.agent_name for prompt in prompts] == ["tool_agent"] * 3
    assert [prompt.ground_truth for prompt in prompts] == ["7", "12", "1234"]
    assert prompts[2].tools_kwargs == {"check_answer": {"create_kwargs": {"ground_truth": "1234"}}}
    tools = load_tools(EXAMPLES / "gsm8k" / "reward_tool.py")
    right, *wrong = (await generated(run, tools, "check_answer")).samples
    assert right.tool_rewards == [-0.05, 0.0, 1.0]
    assert right.reward == pytest.approx(0.95)
    assert [sample.tool_rewards for sample in wrong] == [[-0.05, 0.0]] * 2
    assert [sample.outcome for sample in (right, *wrong)] == [Outcome.COMPLETED] * 3
