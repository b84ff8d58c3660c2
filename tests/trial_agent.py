"""A function of a test as an agent: `run_trial`."""

from __future__ import annotations

from typing import Any

from harness import Recorder
from race_situations import user
from rollout import AgentContext, AgentLoop, Prompt, RolloutBatch, register_agent
from rollout.config import AgentConfig
from rollout.testing import Scenario

TRIALS: dict[str, Any] = {}


@register_agent("does_a_trial")
class DoesATrial(AgentLoop):
    """Does what its test says."""

    async def run(self, context: AgentContext) -> None:
        await TRIALS["it"](context)


async def run_trial(
    trial: Any,
    scenario: Scenario,
    *,
    prompt: Prompt | None = None,
    tools: Any = (),
    agent: Any = None,
    **sections: Any,
) -> RolloutBatch:
    """Have `trial(context)` drive a trajectory; every token of its is accounted for."""
    TRIALS["it"] = trial
    recorder = Recorder()
    settings = AgentConfig(**{"name": "does_a_trial", **(agent or {})})
    config = scenario.config(agent=settings, **sections)
    async with recorder.open_rollout(config, tools) as runtime:
        batch: RolloutBatch = await runtime.generate([prompt or user("go")])
    assert recorder.anomalies() == []
    return batch
