"""A driver on real embedded engines that is killed and resumed: one batch, saved at its end.

    python -m journal_cases.driver_to_kill DIRECTORY

Each call of its tool is a line of ``calls``, written before the call is answered.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

import rollout
from rollout import AgentLoop, Prompt, Trajectory, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import (
    AgentConfig,
    JournalConfig,
    LengthsConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
)
from rollout.types import ToolCall

#: Of a trajectory.
TURNS = 4
GROUPS, MEMBERS = 4, 3
FACTS = ("rivers", "winter", "bread", "trains")


@register_agent("asking_again")
class AskingAgain(AgentLoop):
    """Has the model speak, and a tool count, in turns."""

    async def run(self, context: AgentContext) -> None:
        """Four turns of the model with three answers between them."""
        for turn in range(TURNS):
            said = await context.generate()
            if turn + 1 < TURNS:
                name = f"{context.identity.session_id}/{turn}"
                call = ToolCall(name="note", arguments={"name": name, "size": len(said.text)})
                await context.call_tools([call])


def config_of(directory: Path) -> RolloutConfig:
    """One engine in a process of its own; short turns."""
    return RolloutConfig(
        engine=rollout.TransformersEngine(replicas=1),
        agent=AgentConfig(name="asking_again"),
        lengths=LengthsConfig(prompt=256, response=512, turn=12),
        sampling=SamplingConfig(temperature=1.0),
        scheduling=SchedulingConfig(max_in_flight=6),
        journal=JournalConfig(path=str(directory / "journal")),
        seed=11,
    )


def prompts() -> list[Prompt]:
    """One for each group."""
    return [
        Prompt(messages=[{"role": "user", "content": f"Say a word about {fact}."}], uid=fact)
        for fact in FACTS[:GROUPS]
    ]


def reward(trajectory: Trajectory) -> float:
    """Something that the tokens decide."""
    return float(sum(trajectory.transcript.ids().tolist()) % 1000) / 7


async def run(directory: Path) -> None:
    """Run what is left of the batch, and save it."""

    @function_tool
    async def note(name: str, size: int) -> str:
        """Note a turn.

        Args:
            name: Which.
            size: How long it was.
        """
        with (directory / "calls").open("a") as file:
            file.write(name + "\n")
        return f"noted {size}"

    config = config_of(directory)
    async with rollout.open_rollout(config, [note], reward, resume=True) as runtime:
        batch = await runtime.generate(prompts(), samples=MEMBERS, step=5)
        batch.save(directory / "batch", overwrite=True)  # killed while it saved


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]), backend="trio")
