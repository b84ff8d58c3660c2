"""`print(trajectory)`: what was said and trained, for every trajectory there is."""

from __future__ import annotations

import io
import pickle  # noqa: TID251  (as user code may)
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rollout
from race_situations import add, user
from rollout import AgentContext, AgentLoop, Outcome, Prompt, Trajectory, register_agent
from rollout.cli.transcript_view import print_transcript
from rollout.config import AgentConfig, JournalConfig, RewardsConfig
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

SCENARIO = (
    Scenario(seed=1)
    .reply("question", tool_call("add", a=2, b=3))
    .then("It is 5.")
    .reply("title", "A title.")
)


@register_agent("prints_segments")
class Segments(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await context.call_tools((await context.generate()).calls)
        branch = await context.branch()
        async with context.open_segment([{"role": "user", "content": "title"}]) as child:
            await child.generate()
        await context.generate()
        await branch.generate()


async def generated(prompt: Prompt, **options: Any) -> rollout.RolloutBatch:
    async with rollout.open_rollout(SCENARIO.config(**options), [add]) as runtime:
        batch: rollout.RolloutBatch = await runtime.generate([prompt])
    return batch


async def test_printed_trajectory_is_the_transcript_that_the_demo_prints() -> None:
    batch = await generated(user("question"))
    (trajectory,) = batch.trajectories
    assert batch.decode is not None
    console = Console(file=io.StringIO(), width=80)
    print_transcript(console, trajectory.transcript, batch.decode)
    assert f"{trajectory}\n" == console.file.getvalue()  # type: ignore[attr-defined]
    assert "[trained] " in str(trajectory)
    assert "It is 5." in str(trajectory)
    assert repr(trajectory) == (
        f"<Trajectory prompt-0/0: completed, no reward, 1 segment, "
        f"{trajectory.generated_length} tokens sampled>"
    )


async def test_printed_trajectory_shows_every_segment_and_where_it_departs() -> None:
    batch = await generated(user("question"), agent=AgentConfig(name="prints_segments"))
    (trajectory,) = batch.trajectories
    assert trajectory.cause is None
    text = str(trajectory)
    assert text.startswith("[segment 0: main]\n[prompt, not trained] ")
    position = trajectory.segments[1].parent[1]  # type: ignore[index]
    assert f"\n[segment 1: branch, from token {position} of segment 0]\n" in text
    assert "\n[segment 2: subagent" in text
    assert text.count("It is 5.") == 2
    assert text.count("A title.") == 1


async def test_printed_trajectory_without_a_tokenizer_is_its_messages() -> None:
    (trajectory,) = (await generated(user("question"))).trajectories
    sent = pickle.loads(pickle.dumps(trajectory))
    said = [
        "[user]\nquestion",
        '[assistant]\n\n{"name": "add", "arguments": {"a": 2, "b": 3}}',
        "[tool]\n5",
        "[assistant]\nIt is 5.",
    ]
    assert str(sent) == "\n".join(said)


async def test_printed_trajectory_that_failed_or_was_rejected_says_what_is_known() -> None:
    failed = (await generated(Prompt("question", agent_name="prints_nothing"))).trajectories[0]
    assert failed.outcome is Outcome.FAILED
    assert str(failed) == "[user]\nquestion\n[failed] (agent) RuntimeError: no"
    rejected = (await generated(Prompt([], extra={"a": 1}))).trajectories[0]
    assert str(rejected).startswith("[rejected] (empty_prompt) ")
    made = Trajectory(uid="a", group=0, member=0, outcome=Outcome.REJECTED, prompt=None)
    assert str(made)
    assert repr(made) == "<Trajectory a/0: rejected, no reward, 1 segment, 0 tokens sampled>"


@register_agent("prints_nothing")
class Failing(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        raise RuntimeError("no")


def noting(trajectory: Trajectory) -> rollout.Reward:
    return rollout.Reward(1.0, extra={"shown": str(trajectory), "again": repr(trajectory)})


async def test_printed_trajectory_of_a_reward_and_of_a_journal(tmp_path: Path) -> None:
    journal = JournalConfig(path=str(tmp_path / "run.journal"))
    config = SCENARIO.config(journal=journal, rewards=RewardsConfig())
    async with rollout.open_rollout(config, [add], reward=noting) as runtime:
        (trajectory,) = (await runtime.generate([user("question")], step=1)).trajectories
    assert trajectory.extra["shown"] == str(trajectory)
    (loaded,) = rollout.load_trajectories(tmp_path / "run.journal")
    assert str(loaded) == str(trajectory)
