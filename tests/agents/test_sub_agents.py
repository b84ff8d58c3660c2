"""Contexts of their own for sub-agents, compaction, and the agent that compacts by itself."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from harness import Recorder
from race_situations import add, nap, user
from rollout import (
    AgentContext,
    AgentError,
    ConfigError,
    EnvironmentAgent,
    LimitExceeded,
    Outcome,
    RolloutBatch,
    function_tool,
)
from rollout.agents import CompactingAgent, ToolAgent
from rollout.chat.trajectory import Parent
from rollout.config import AgentConfig, LengthsConfig
from rollout.interactions import ScriptedUser
from rollout.testing import Scenario, tool_call
from trial_agent import run_trial

pytestmark = pytest.mark.anyio

RESEARCH = [{"role": "user", "content": "You are a researcher."}]
CALL = tool_call("add", a=2, b=3)
SCENARIO = (
    Scenario(seed=1)
    .reply("researcher", CALL)
    .then("Found: 5.")
    .reply("critic", "Bad.")
    .reply("Notes:", "Continued.")
    .reply("question", "The main answer.")
    .then("The end.")
)
LENGTHS = LengthsConfig(prompt=1500, response=700)


async def tried(trial: Any, **options: Any) -> RolloutBatch:
    options = {"lengths": LENGTHS, "tools": [add, nap], **options}
    return await run_trial(trial, SCENARIO, prompt=user("question"), **options)


async def test_segment_refuses_a_reward_that_is_no_number() -> None:
    async def trial(context: AgentContext) -> None:
        async with context.open_segment(RESEARCH) as child:
            await child.generate()
            child.reward = 1e39  # more than tensors hold

    (trajectory,) = (await tried(trial)).trajectories
    assert trajectory.outcome is Outcome.FAILED
    assert "reward = 1e+39: expected a finite number" in trajectory.cause.message


async def test_open_segment_runs_an_agent_loop_as_it_is() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        async with context.open_segment(RESEARCH, tools=["add"]) as child:
            assert isinstance(child, AgentContext)
            assert [m.content for m in child.messages] == ["You are a researcher."]
            await ToolAgent().run(child)
            child.reward = 0.5
            found = child.messages[-1].content
        context.observe([{"role": "user", "content": f"Consider: {found}"}])
        await context.generate()
        context.reward = 1.0

    batch = await tried(trial)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    main, child = trajectory.segments
    assert [m.content for m in main.messages] == [
        "question",
        "The main answer.",
        "Consider: Found: 5.",
        "The end.",
    ]
    assert (child.purpose, child.session_id) == ("subagent", "0/prompt-0/0#0")
    assert [m.role for m in child.messages] == ["user", "assistant", "tool", "assistant"]
    assert [s.reward for s in batch.samples] == [1.0, 0.5]
    lengths = [t.prompt_length for t in trajectory.transcripts]
    assert lengths[0] > lengths[1]  # the other one is offered one tool of two


async def test_environment_is_played_in_an_opened_segment() -> None:
    class Desk:
        async def reset(self, prompt: Any) -> str:
            return "Bad or good?"

        async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return "Thanks.", 0.25, True, {"said": action}

    async def trial(context: AgentContext) -> None:
        await context.generate()
        critic = [{"role": "user", "content": "You are a critic."}]
        async with context.open_segment(critic) as child:
            await EnvironmentAgent(Desk).run(child)

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    main, child = trajectory.segments
    said = [m.content for m in child.messages]
    assert said == ["You are a critic.", "Bad or good?", "Bad."]
    assert (main.reward, child.reward, trajectory.extra) == (None, 0.25, {"said": "Bad."})


async def test_open_segment_several_at_once_have_seeds_and_limits_of_one_trajectory() -> None:
    async def trial(context: AgentContext) -> None:
        async def work(messages: Any, purpose: str, ready: anyio.Event) -> None:
            async with context.open_segment(messages, purpose) as child:
                ready.set()
                await ToolAgent().run(child)

        async with anyio.create_task_group() as tasks:
            for messages, purpose in ((RESEARCH, "subagent"), (critic, "judge")):
                ready = anyio.Event()
                tasks.start_soon(work, messages, purpose, ready)
                await ready.wait()
        await context.generate()

    critic = [{"role": "user", "content": "You are a critic."}]
    (trajectory,) = (await tried(trial)).trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert [each.purpose for each in trajectory.segments] == ["main", "subagent", "judge"]
    assert len({seed for each in trajectory.segments for seed in each.seeds}) == 4


async def test_open_segment_tools_that_are_not_offered_are_unknown_there() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        own = {"type": "function", "function": {"name": "look", "parameters": {}}}
        async with context.open_segment(RESEARCH, tools=[own, "nap"]) as child:
            turn = await child.generate()
            (result,) = await child.call_tools(turn.calls)
            assert result.text == "unknown tool 'add'; known tools: 'nap'"

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def test_open_segment_sampling_is_its_own() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        whole = context.sampling
        async with context.open_segment(RESEARCH, sampling={"max_new_tokens": 2}) as child:
            assert (await child.generate()).cut_by == "sampling.max_new_tokens"
            assert child.sampling.temperature == whole.temperature
        async with context.open_segment(RESEARCH, sampling=whole) as child:
            assert (await child.generate()).cut_by is None
        assert context.sampling == whole

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": ["dig"]}, "open_segment: the tool 'dig' is none of the trajectory's ('add', 'n"),
        ({"sampling": {"heat": 1}}, "open_segment: sampling.heat: unknown key"),
        ({"purpose": ""}, "purpose = ''; expected a non-empty string"),
    ],
)
async def test_open_segment_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    async def trial(context: AgentContext) -> None:
        with pytest.raises(AgentError) as caught:
            async with context.open_segment(RESEARCH, **arguments):
                pass
        assert message in str(caught.value).replace(": expected", "; expected", 1)
        await context.generate()

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert len(trajectory.segments) == 1


async def test_compact_next_row_begins_with_the_messages() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        await context.compact([{"role": "user", "content": "Notes: question."}])
        assert [m.content for m in context.messages] == ["Notes: question."]
        assert await context.check_tokens() is None
        await context.generate()
        context.reward_turn(0.5)

    batch = await tried(trial)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    first, second = trajectory.segments
    assert (second.purpose, second.session_id) == ("compaction", first.session_id)
    assert second.parent == Parent(0, second.parent.position)
    assert trajectory.transcript is second.transcript
    assert [m.content for m in first.messages] == ["question", "The main answer."]
    assert [m.content for m in second.messages] == ["Notes: question.", "Continued."]
    masks = batch.tensors["response_mask"]
    generated = [t.generated_length for t in trajectory.transcripts]
    assert masks.sum(dim=1).tolist() == generated
    assert all(generated)
    assert batch.tensors["token_rewards"].sum(dim=1).tolist()[1] == 0.5
    assert len({*first.seeds, *second.seeds}) == 2


async def test_compact_in_a_segment_continues_that_segment() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        async with context.open_segment(RESEARCH) as child:
            await child.generate()
            await child.compact([{"role": "user", "content": "Notes: question."}])
            await child.generate()

    (trajectory,) = (await tried(trial)).trajectories
    assert [s.purpose for s in trajectory.segments] == ["main", "subagent", "compaction"]
    assert trajectory.main_index == 0
    assert trajectory.answer == "The main answer."


async def test_compact_messages_that_do_not_fit_change_nothing_but_the_outcome() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        with pytest.raises(AgentError, match="unknown role"):
            await context.compact([{"role": "wizard", "content": "x"}])
        with pytest.raises(LimitExceeded, match=r"lengths.prompt = 1500"):
            await context.compact([{"role": "user", "content": "x" * 2000}])

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.prompt")
    assert len(trajectory.segments) == 1


async def test_keep_room_lengths_are_the_agents_to_judge() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        room = context.room
        context.keep_room(room - 40)
        assert context.room == 40
        with pytest.raises(LimitExceeded):
            context.observe([{"role": "user", "content": "y" * 100}])
        context.keep_room(0)
        context.observe([{"role": "user", "content": "y" * 100}])
        assert (await context.generate()).cut_by is None

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


@pytest.mark.parametrize("tokens", [75.5, -5000])
async def test_keep_room_that_is_no_count_is_refused(tokens: Any) -> None:
    async def trial(context: AgentContext) -> None:
        await context.begin()
        room = context.room
        with pytest.raises(AgentError, match=r"keep_room: tokens = .*; expected an integer"):
            context.keep_room(tokens)
        assert context.room == room
        await context.generate()

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


WORK = (
    Scenario(seed=2)
    .reply("little room", "Notes: three of five done.")
    .reply("three of five", tool_call("add", a=4, b=5))
    .then("All done.")
    .reply("work", tool_call("add", a=1, b=1), filler=150)
)


@function_tool
async def read(name: str) -> str:
    """Read a file.

    Args:
        name: Which one.
    """
    return f"{name} " * 200


async def compacted(
    scenario: Scenario = WORK, *, interactions: Any = (), response: int = 1300, **agent: Any
) -> Any:
    recorder = Recorder()
    agent.setdefault("compaction_room", 500)
    config = scenario.config(
        agent=AgentConfig(name="compacting_agent", **agent),
        lengths=LengthsConfig(prompt=1600, response=response),
    )
    async with recorder.open_rollout(config, [add, read], interactions=interactions) as runtime:
        batch = await runtime.generate([user("the work")])
    assert recorder.anomalies() == []
    masks = batch.tensors["response_mask"].sum(dim=1).tolist()
    assert masks == [t.generated_length for t in batch.trajectories[0].transcripts]
    return batch.trajectories[0]


async def test_compacting_agent_sums_up_and_continues() -> None:
    trajectory = await compacted()
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.answer == "All done."
    assert [s.purpose for s in trajectory.segments] == ["main", "compaction"]
    first, second = (s.messages for s in trajectory.segments)
    assert "little room left" in first[-2].content
    assert first[-1].content == "Notes: three of five done."
    assert [m.content for m in second][:1] == ["the work"]
    assert second[1].content.startswith("Your notes on the work so far")
    assert "Notes: three of five done." in second[1].content
    assert [m.role for m in second[2:]] == ["assistant", "tool", "assistant"]


async def test_compacting_agent_answers_that_do_not_fit_come_after_the_summary() -> None:
    scenario = (
        Scenario(seed=2)
        .reply("little room", "Notes: nothing yet.")
        .reply("nothing yet", "All done.")
        .reply("work", tool_call("read", name="a"), filler=80)
    )
    trajectory = await compacted(scenario, response=1000)
    assert trajectory.outcome is Outcome.COMPLETED
    second = trajectory.segments[1].messages[1].content
    said = 'Your last calls were answered after you had written them:\n\nread({"name":"a"}): a a '
    assert said in second


async def test_compacting_agent_words_of_a_user_that_do_not_fit_come_after_the_summary() -> None:
    scenario = (
        Scenario(seed=2)
        .reply("little room", "Notes: nothing yet.")
        .reply("nothing yet", "All done.")
        .reply("work", "Is it good?", filler=150)
    )
    critic = ScriptedUser(["No. " + "So bad. " * 20], name="critic")
    trajectory = await compacted(
        scenario, response=800, interactions=[critic], interaction="critic"
    )
    assert trajectory.outcome is Outcome.COMPLETED
    assert "Your last words were answered after you had written them:\n\nNo. So bad." in (
        trajectory.segments[1].messages[1].content
    )


async def test_compacting_agent_after_its_last_summary_ends_by_the_length() -> None:
    scenario = (
        Scenario(seed=2)
        .reply("little room", "Notes: work.")
        .reply("work", tool_call("add", a=1, b=1), filler=150)
    )
    trajectory = await compacted(scenario, max_compactions=2)
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")
    assert [s.purpose for s in trajectory.segments] == ["main", "compaction", "compaction"]


async def test_compacting_agent_of_a_segment_keeps_what_that_began_with() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        async with context.open_segment(RESEARCH, tools=[]) as child:
            await CompactingAgent().run(child)
        context.observe([{"role": "user", "content": "Go on."}])
        await context.generate()

    scenario = (
        Scenario(seed=2)
        .reply("Sum up", "Notes: none.")
        .reply("researcher", "Found. " * 30)
        .reply("question", "The main answer.")
        .then("The end.")
    )
    lengths, agent = LengthsConfig(prompt=600, response=180), {"compaction_room": 80}
    agent |= {"compaction_prompt": "Sum up"}
    batch = await run_trial(trial, scenario, prompt=user("question"), lengths=lengths, agent=agent)
    (trajectory,) = batch.trajectories
    compacted = [s for s in trajectory.segments if s.purpose == "compaction"]
    assert compacted
    assert {s.messages[0].content for s in compacted} == {"You are a researcher."}


async def test_open_segment_and_compact_refuse_what_are_no_messages() -> None:
    given: Any = None  # what a function without `return` gives

    async def trial(context: AgentContext) -> None:
        await context.generate()
        with pytest.raises(AgentError, match=r"messages.* must be a"):
            await context.compact(given)
        with pytest.raises(AgentError, match=r"messages.* must be a"):
            async with context.open_segment(given):
                pass

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


def test_compacting_agent_room_must_be_less_than_the_response() -> None:
    with pytest.raises(ConfigError, match=r"agent.compaction_room .*less than lengths.response"):
        Scenario().config(
            agent=AgentConfig(name="compacting_agent", compaction_room=300),
            lengths=LengthsConfig(prompt=100, response=300),
        )
