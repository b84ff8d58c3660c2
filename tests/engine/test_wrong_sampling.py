"""What an agent puts into `sampling` that no engine can read fails its trajectory, and no other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness import Recorder
from race_situations import user
from rollout import AgentContext, AgentLoop, Outcome, Prompt, register_agent
from rollout.config import AgentConfig, SchedulingConfig
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("question", "word " * 30).timing(base_s=0.05)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({}, "sampling.seed = 1.5: expected `int | null`, got `float`"),
    "temperature": (
        {"temperature": "hot"},
        "sampling.temperature = 'hot': expected `float`, got `str`",
    ),
    "nan": ({"temperature": float("nan")}, "sampling.temperature = nan: expected `float` >= 0.0"),
    "long": ({"top_k": 2**70}, f"sampling.top_k = {2**70}: expected `int` <= 2147483647"),
    "stops": ({"stop_token_ids": 5}, "sampling.stop_token_ids = 5: expected `array`, got `int`"),
}


@register_agent("asks_wrongly")
class AsksWrongly(AgentLoop):
    """Assigns what its prompt says, which the types of it forbid."""

    async def run(self, context: AgentContext) -> None:
        name = context.prompt.uid
        fields = WRONG[name][0] if name in WRONG else {}
        context.sampling = msgspec.structs.replace(context.sampling, **fields)
        await context.begin()
        await context.generate(seed=1.5 if name == "seed" else 3)


async def test_sampling_of_a_wrong_type_fails_its_own_trajectory_and_names_the_field() -> None:
    recorder = Recorder()
    config = SCENARIO.config(
        agent=AgentConfig(name="asks_wrongly"), scheduling=SchedulingConfig(max_retries=2)
    )
    prompts = [
        Prompt(messages=user("question").messages, uid=uid) for uid in ("right", *WRONG, "other")
    ]
    async with recorder.open_rollout(config) as runtime:
        batch = await runtime.generate(prompts)
        assert runtime.statistics().recoveries.resumed == 0
    assert recorder.anomalies() == []
    for trajectory in batch.trajectories:
        if trajectory.uid not in WRONG:
            assert trajectory.outcome is Outcome.COMPLETED
            continue
        assert trajectory.cause is not None
        found = (trajectory.outcome, trajectory.reason, trajectory.cause.message)
        assert found == (Outcome.FAILED, "sampling", WRONG[trajectory.uid][1])
        assert trajectory.metrics["attempts"] == 1
