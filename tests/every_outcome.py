"""What trainers are tested with: trajectories of every outcome, made by hand and by a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rollout import AgentLoop, DiskWeights, Outcome, Prompt, Trajectory, function_tool
from rollout.agents import register_agent
from rollout.chat import Transcript
from rollout.chat.trajectory import Parent, Segment
from rollout.config import AgentConfig, LimitsConfig, SimulatedEngine
from rollout.integrations.trainer_rows import TrainerRows, trainer_rows
from rollout.integrations.trainer_settings import TrainerSettings
from rollout.testing import Scenario, tool_call

EOS = 2
LAYERS, TOP_K = 2, 2


def transcript(
    *, turns: int = 2, prompt: int = 4, finish: str = "stop", experts: bool = True
) -> Transcript:
    """A prompt, then turns with an observation between two; the second is of two versions."""
    made = Transcript()
    made.append_prompt(range(10, 10 + prompt))
    for turn in range(turns):
        if turn:
            made.append_observation([50, 51, 52])
        versions = [(7, 3)] if turn == 0 else [(7, 1), (8, 2)]
        ids = [60 + turn, 61 + turn, EOS]
        made.append_generated(ids, [-0.5, -0.25, -0.125], versions=versions, finish_reason=finish)
    if experts:
        known = np.ones((len(made) - 1, LAYERS, TOP_K), dtype=np.int16)
        made.append_routed_experts(known)
    return made


def every_outcome() -> list[Trajectory]:
    """Two groups of four: every outcome, tool spans, two segments, two versions, no reward."""
    main = transcript()
    side = Segment(transcript=transcript(turns=1, prompt=3), parent=Parent(0, 4), purpose="side")
    unrun = Transcript()
    begun = Transcript()
    begun.append_prompt(range(10, 13))
    rows: list[dict[str, Any]] = [
        {
            "outcome": Outcome.COMPLETED,
            "reward": 1.0,
            "segments": [Segment(transcript=main), side],
        },
        {"outcome": Outcome.LENGTH, "reward": 0.0, "transcript": transcript(finish="length")},
        {"outcome": Outcome.LIMIT, "reason": "turns", "reward": 0.5, "transcript": transcript()},
        {"outcome": Outcome.DEADLINE, "reward": 0.25, "transcript": transcript(experts=False)},
        {"outcome": Outcome.CANCELLED, "trainable": False, "transcript": transcript(turns=1)},
        {"outcome": Outcome.FAILED, "trainable": False, "transcript": begun},
        {"outcome": Outcome.REJECTED, "trainable": False, "transcript": unrun},
        {"outcome": Outcome.COMPLETED, "reward": 1.0, "transcript": transcript(turns=3)},
    ]
    return [
        Trajectory(uid=f"group-{at // 4}", group=at // 4, member=at % 4, num_turns=3, **row)
        for at, row in enumerate(rows)
    ]


@function_tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return f"{at} is there"


@register_agent("every_outcome")
class EveryOutcome(AgentLoop):
    """Ends as its prompt says."""

    async def run(self, context: Any) -> None:
        """Two turns with a tool between them, on two weight versions; then the end."""
        ending = context.prompt.extra["ending"]
        turn = await context.generate()
        if ending == "failed":
            raise RuntimeError("the tool is gone")
        await context.call_tools(turn.calls)
        if ending == "completed":
            weights = DiskWeights(str(Path(__file__).parent))  # what is there makes no difference
            await context.services.engines.update_weights(8, weights, "in_place")
            side = await context.subagent([{"role": "user", "content": "title"}], purpose="side")
            await side.generate()
        await context.generate()
        if ending != "completed":
            context.end(Outcome(ending), "as asked")


#: In the order in which `ENDINGS` are asked for; a rejected one has an empty prompt.
ENDINGS = ("completed", "length", "limit", "deadline", "cancelled", "failed", "rejected")


async def reward(trajectory: Trajectory) -> float:
    """By the number of turns."""
    return trajectory.num_turns / 4


def messages(ending: str) -> list[dict[str, str]]:
    """A conversation of its own for each ending."""
    return [] if ending == "rejected" else [{"role": "user", "content": f"consult, {ending}"}]


def settings(**changes: Any) -> TrainerSettings:
    """What runs it, on an engine of ours."""
    scenario = (
        Scenario(seed=1, weight_version=7)
        .experts(layers=LAYERS, top_k=TOP_K, count=8)
        .reply("consult", tool_call("look", at="x"))
        .then("found")
        .reply("title", "A title.")
    )
    config = scenario.config(
        engine=SimulatedEngine(routed_experts=True), agent=AgentConfig(name="every_outcome")
    )
    given = {"config": config, "tools": [look], "reward": reward, "engines": "config"}
    return TrainerSettings(**(given | changes))


def rows() -> TrainerRows:
    """`every_outcome` as rows."""
    return trainer_rows(every_outcome(), eos_token_id=EOS)


def prompt_for(ending: str) -> Prompt:
    """A prompt that has the agent end so."""
    return Prompt(messages=messages(ending), extra={"ending": ending})


def single_turn(*, generation_s: float | None = None, **changes: Any) -> TrainerSettings:
    """One turn, on a trainer's engine."""
    limits = LimitsConfig() if generation_s is None else LimitsConfig(generation_s=generation_s)
    config = Scenario(seed=1).config(agent=AgentConfig(name="single_turn"), limits=limits)
    return settings(config=config, tools=[], **changes)
