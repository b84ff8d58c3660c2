"""A driver that is killed and resumed, in a process of its own; what it sees, it says in ``seen``.

python killed_driver.py groups|gateway DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx

import rollout
from rollout import AgentLoop, AgentTask, GroupPolicy, Prompt, RolloutConfig, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import AgentConfig, JournalConfig, LengthsConfig, SchedulingConfig
from rollout.testing import Scenario
from rollout.types import ToolCall

STEPS, GROUPS, MEMBERS = 6, 2, 2
QUESTIONS, CONVERSATIONS = 5, 3
SCENARIO = Scenario(seed=3).reply("", filler=30).timing(base_s=0.002, slope_s=0.001)
DIRECTORY = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


def see(**fields: Any) -> None:
    """One line, whole, at once."""
    with (DIRECTORY / "seen").open("a") as file:
        file.write(json.dumps(fields) + "\n")


@register_agent("noting")
class Noting(AgentLoop):
    """Every third prompt has three times the turns of others."""

    async def run(self, context: AgentContext) -> None:
        """Speak and note, in turns."""
        turns = 9 if int(context.prompt.uid or 0) % 3 == 0 else 3
        for turn in range(turns):
            await context.generate()
            if turn + 1 < turns:
                name = f"{context.identity.session_id}/{turn}"
                await context.call_tools([ToolCall(name="note", arguments={"name": name})])


@function_tool
async def note(name: str) -> str:
    """Note a turn.

    Args:
        name: Which.
    """
    see(call=name)
    return "noted"


@rollout.agent("asking_over_http")
async def asking_over_http(task: AgentTask) -> None:
    """Asks the gateway, each time on top of all that was said."""
    headers = {"authorization": f"Bearer {task.api_key}"}
    messages = [*task.messages]
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers=headers) as client:
        for number in range(QUESTIONS):
            body = {"model": task.model, "messages": messages}
            answered = await client.post(f"{task.base_url}/chat/completions", json=body)
            answer = answered.raise_for_status().json()
            see(conversation=task.prompt.uid, number=number, answer=answer)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]


def config_of(agent: str, **scheduling: Any) -> RolloutConfig:
    """One simulated engine."""
    return SCENARIO.config(
        agent=AgentConfig(name=agent),
        lengths=LengthsConfig(prompt=1024, response=4096),
        journal=JournalConfig(path=str(DIRECTORY / "journal"), unwritable="text"),
        scheduling=SchedulingConfig(**scheduling),
        seed=5,
    )


def prompts() -> Iterator[Prompt]:
    """Endless."""
    number = 0
    while True:
        yield Prompt(messages=[{"role": "user", "content": f"go {number}"}], uid=str(number))
        number += 1


async def groups() -> None:
    """Steps that carry what is unfinished."""
    policy = GroupPolicy(oversample=3.0, surplus="carry")
    config = config_of("noting", samples_per_prompt=MEMBERS, max_in_flight=8)
    source = prompts()
    async with rollout.open_rollout(config, [note], resume=True) as runtime:
        for step in range(STEPS):
            batch = await runtime.collect(source, GROUPS, policy=policy, step=step)
            see(step=step, rows=[content_of(each) for each in batch.trajectories])
            see(carried=runtime.statistics().carried)


def content_of(trajectory: Any) -> list[Any]:
    """What must come back bit for bit."""
    transcript = trajectory.transcript
    packed = (transcript.ids_bytes(), transcript.log_probs().tobytes(), transcript.mask().tobytes())
    return [trajectory.uid, trajectory.member, trajectory.outcome, *(p.hex() for p in packed)]


async def gateway() -> None:
    """Conversations of a function that speaks HTTP."""
    source = prompts()
    given = [next(source) for _ in range(CONVERSATIONS)]
    async with rollout.open_rollout(config_of("asking_over_http"), resume=True) as runtime:
        batch = await runtime.generate(given, samples=1, step=0)
        see(step=0, rows=[content_of(each) for each in batch.trajectories])


if __name__ == "__main__":
    anyio.run({"groups": groups, "gateway": gateway}[sys.argv[1]], backend="trio")
