"""The task: which key opens which door, which only a tool knows."""

from __future__ import annotations

from tiny_model import COLOURS, PROMPT, RESPONSE, answer_of, key_of, question

import rollout
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
    TransformersEngine,
)
from rollout.tools import Tool, function_tool

MEMBERS = 16


def config_for(directory: str, seed: int) -> RolloutConfig:
    """The embedded engine serves the model; the trainer has its own copy of it."""
    return RolloutConfig(
        model=ModelConfig(path=directory),
        engine=TransformersEngine(dtype="float32", max_running=len(COLOURS) * MEMBERS),
        lengths=LengthsConfig(prompt=PROMPT, response=RESPONSE),
        agent=AgentConfig(tool_format="pythonic", max_assistant_turns=2),
        scheduling=SchedulingConfig(samples_per_prompt=MEMBERS),
        seed=seed,
    )


def keys_for(seed: int) -> Tool:
    """The tool: which key opens which door is hidden in it."""

    @function_tool
    async def unlock(door: str, key: str) -> str:
        """Try a key on a door.

        Args:
            door: Its colour.
            key: Its shape.
        """
        fits = key == key_of(door, seed)
        return answer_of(door, is_open=fits)

    return unlock


def reward(trajectory: rollout.Trajectory) -> float:
    """1 where the door that the prompt names was opened."""
    wanted = answer_of(trajectory.prompt.extra["colour"], is_open=True)
    return float(any(each.content == wanted for each in trajectory.messages))


def prompts_of(step: int) -> list[rollout.Prompt]:
    """All colours."""
    return [
        rollout.Prompt(
            messages=[{"role": "user", "content": question(colour)}],
            uid=f"{step}-{colour}",
            extra={"colour": colour},
        )
        for colour in COLOURS
    ]
