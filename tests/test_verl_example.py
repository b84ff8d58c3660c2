"""The GSM8K-style example: verl's configuration, class and rows, on a simulated engine."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import rollout
from rollout.testing import Scenario, tool_call
from rollout.tools import load_verl_tools
from rollout.types import Outcome

EXAMPLE = Path(__file__).parents[1] / "examples" / "verl_tools" / "run.py"


@pytest.fixture
def anyio_backend() -> str:
    """The class needs asyncio's thread, so time is real."""
    return "trio"


@pytest.mark.anyio
async def test_verl_example_rewards_what_its_tool_scored() -> None:
    example = runpy.run_path(str(EXAMPLE))
    scenario = (
        Scenario(seed=1)
        .reply("Tom has 3 pens", tool_call("calc_gsm8k_reward", answer="8"))
        .then(tool_call("calc_gsm8k_reward", answer="7"))
        .then("7")
        .reply("A box holds", tool_call("calc_gsm8k_reward", answer="9"))
        .then("9")
        .timing(base_s=0.001, slope_s=0.0, prefill_tokens_per_s=None)
    )
    tools = load_verl_tools(example["TOOLS"])
    async with rollout.open_rollout(
        scenario.config(), tools=tools, reward=example["reward"]
    ) as runtime:
        batch = await runtime.generate(example["prompts"]())
    right, wrong = batch.samples
    assert (right.uid, right.outcome, right.reward) == ("gsm8k-0", Outcome.COMPLETED, 1.0)
    assert right.tool_rewards == [-0.05, 0.0, 1.0]
    assert (wrong.uid, wrong.outcome, wrong.reward) == ("gsm8k-1", Outcome.COMPLETED, 0.0)
    assert wrong.tool_rewards == [-0.05, 0.0]
    assert tools[0].tool.instances == {}  # type: ignore[attr-defined]
