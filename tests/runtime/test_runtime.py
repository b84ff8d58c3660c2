"""The whole road on the simulated engine, in virtual time."""

from __future__ import annotations

import asyncio  # noqa: TID251  (agents and rewards of users run it)
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import rollout
from harness import Recorder
from rollout import AgentLoop, Outcome, Prompt, ToolResult, Trajectory, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    SamplingConfig,
    SchedulingConfig,
)
from rollout.interactions import ScriptedUser
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


def calls(name: str, arguments: str = "{}") -> str:
    return CALL % (name, arguments)


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


ADDING = (
    Scenario(seed=1)
    .reply("2 + 3", calls("add", '{"a": 2, "b": 3}'))
    .then("The sum is 5.")
    .timing(base_s=0.01, slope_s=0.0)
)


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"step": "x"}, "step = 'x': expected an integer from 0 to"),
    ({"step": -1}, "step = -1: expected an integer from 0 to"),
    ({"step": True}, "step = True: expected an integer from 0 to"),
    ({"validate": "no"}, "validate = 'no': expected True or False"),
    ({"samples": 0}, "samples = 0: expected an integer ≥ 1"),
    ({"samples": 2.0}, "samples = 2.0: expected an integer ≥ 1"),
]
BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"layout": "ragged"}, "layout = 'ragged': expected 'padded' or 'packed'"),
    ({"trim": 0}, "trim = 0: expected True, False or an integer from 1"),
    ({"trim": "yes"}, "trim = 'yes': expected True, False or an integer from 1"),
]
BAD_TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"member": True}, "member = True: expected an integer ≥ 0"),
    ({"uid": 3}, "uid = 3: expected a string"),
    ({"reason": ""}, "reason = '': expected a non-empty string"),
]


@pytest.mark.parametrize("validate", [False, True])
async def test_runtime_samples_of_a_call_make_so_many_members(validate: bool) -> None:
    scheduling = SchedulingConfig(samples_per_prompt=2, validation_samples_per_prompt=1)
    prompts = [user("2 + 3"), user("2 + 3 again")]
    async with rollout.open_rollout(ADDING.config(scheduling=scheduling), [add]) as runtime:
        batch = await runtime.generate(prompts, samples=3, validate=validate, step=1)
        usual = await runtime.generate(prompts, validate=validate, step=1)
        async with runtime.stream(prompts, samples=4, validate=validate) as trajectories:
            streamed = [trajectory async for trajectory in trajectories]
    rows = [(sample.group, sample.member) for sample in batch.samples]
    assert rows == [(group, member) for group in range(2) for member in range(3)]
    assert len(usual) == 2 * (1 if validate else 2)
    assert len(streamed) == 8
    assert batch.samples[0].seeds == usual.samples[0].seeds


async def test_runtime_bad_argument_of_a_call_starts_nothing() -> None:
    async with rollout.open_rollout(ADDING.config()) as runtime:
        for arguments, said in BAD_CALLS:
            with pytest.raises(rollout.PromptError, match=f"^{said}"):
                await runtime.generate([user("2 + 3")], **arguments)
            with pytest.raises(rollout.PromptError, match=f"^{said}"):
                async with runtime.stream([user("2 + 3")], **arguments):
                    pass
        for arguments, said in BAD_TENSORS:
            with pytest.raises(rollout.PromptError, match=f"^{said}"):
                await runtime.generate([user("2 + 3")], **arguments)
        assert runtime.statistics().admitted == 0


async def test_runtime_bad_arguments_of_a_call_are_named_at_once() -> None:
    async with rollout.open_rollout(ADDING.config()) as runtime:
        with pytest.raises(
            rollout.PromptError, match=r"^step = -1: .*\nvalidate = 1: .*\nlayout = .*\ntrim = 0: "
        ):
            await runtime.generate(
                [user("2 + 3")],
                step=-1,
                validate=1,  # type: ignore[arg-type]
                layout="wide",  # type: ignore[arg-type]
                trim=0,
            )


async def test_generate_lays_tensors_out_as_the_call_says() -> None:
    recorder = Recorder()
    lengths = LengthsConfig(prompt=500, response=300)
    prompts = [user("2 + 3"), user("something else and longer"), user(3)]
    async with recorder.open_rollout(ADDING.config(lengths=lengths), [add]) as runtime:
        usual = await runtime.generate(prompts, step=1)
        trimmed = await runtime.generate(prompts, step=1, trim=True)
        even = await runtime.generate(prompts, step=1, trim=64)
        packed = await runtime.generate(prompts, step=1, layout="packed", trim=True)
    assert recorder.anomalies() == []
    assert usual.tensors["responses"].shape == (3, 300)
    attention = usual.tensors["attention_mask"]
    prompt, response = attention[:, :500].sum(1).max(), attention[:, 500:].sum(1).max()
    assert trimmed.tensors["prompts"].shape == (3, prompt)
    assert trimmed.tensors["responses"].shape == (3, response)
    assert trimmed.tensors["input_ids"].shape == (3, prompt + response)
    assert (even.tensors["prompts"].shape[1], even.tensors["responses"].shape[1]) == (
        -(-int(prompt) // 64) * 64,
        -(-int(response) // 64) * 64,
    )
    assert packed.tensors["input_ids"].is_nested
    assert packed.tensors["input_ids"].values().tolist() == (
        usual.tensors["input_ids"][attention == 1].tolist()
    )


async def test_runtime_cancel_with_a_bad_argument_cancels_nothing() -> None:
    async with rollout.open_rollout(ADDING.config()) as runtime:
        for arguments, said in BAD_TARGETS:
            with pytest.raises(rollout.PromptError, match=f"^{said}"):
                runtime.cancel(**arguments)


@pytest.mark.parametrize("step", [0, np.int64(7)])
async def test_runtime_steps_of_trainers_are_taken(step: Any) -> None:
    async with rollout.open_rollout(ADDING.config()) as runtime:
        batch = await runtime.generate([user("2 + 3")], step=step)
        assert batch.trajectories[0].outcome is Outcome.COMPLETED


async def generate(
    scenario: Scenario,
    prompts: Sequence[Prompt],
    *,
    tools: Sequence[Any] = (),
    reward: Any = None,
    interactions: Sequence[Any] = (),
    **sections: Any,
) -> rollout.RolloutBatch:
    config = scenario.config(**sections)
    async with rollout.open_rollout(config, tools, reward, interactions) as runtime:
        batch = await runtime.generate(prompts, step=7)
        statistics = runtime.statistics()
        assert statistics.admitted == statistics.finished
        assert statistics.running == 0
    return batch


def texts(trajectory: Trajectory) -> list[tuple[str, str]]:
    transcript = trajectory.transcript
    return [
        (span.kind, bytes(i for i in transcript.span_ids(span) if i < 256).decode())
        for span in transcript.spans
    ]


async def test_tool_agent_calls_a_tool_and_answers() -> None:
    batch = await generate(ADDING, [user("What is 2 + 3?")], tools=[add])
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.num_turns == 4  # the prompt, two generations, one answer of a tool
    kinds = [kind for kind, _ in texts(trajectory)]
    assert kinds == ["prompt", "generated", "observation", "generated"]
    spoken = texts(trajectory)
    assert spoken[1][1] == calls("add", '{"a": 2, "b": 3}')
    assert "5" in spoken[2][1]
    assert spoken[3][1] == "The sum is 5."
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.answer == "The sum is 5."
    assert trajectory.metrics["tool_calls"] == 1


async def test_numbers_that_tools_measure_are_in_the_trajectorys_metrics() -> None:
    @function_tool("add")
    async def counted(a: int, b: int) -> ToolResult:
        """Add.

        Args:
            a: One number.
            b: The other.
        """
        return ToolResult(str(a + b), metrics={"digits": 1})

    batch = await generate(ADDING, [user("What is 2 + 3?")], tools=[counted])
    assert batch.samples[0].metrics["tools/add/digits"] == 1.0


async def test_generate_rows_follow_the_prompts_and_members_are_adjacent() -> None:
    batch = await generate(
        Scenario(seed=1),
        [user(f"question {i}", uid=f"q{i}") for i in range(3)],
        scheduling=SchedulingConfig(samples_per_prompt=2),
        lengths=LengthsConfig(prompt=256, response=32),
        sampling=SamplingConfig(max_new_tokens=8),
    )
    rows = [(s.uid, s.group, s.member, s.row) for s in batch.samples]
    assert rows == [(f"q{i // 2}", i // 2, i % 2, i) for i in range(6)]
    tensors = batch.tensors
    assert tensors["prompts"].shape == (6, 256)
    assert tensors["responses"].shape == (6, 32)
    assert tensors["response_mask"].sum(dim=1).tolist() == [8] * 6
    for row, trajectory in enumerate(batch.trajectories):
        transcript = trajectory.transcript
        width = transcript.response_length
        sampled = transcript.ids()[transcript.prompt_length :]
        assert tensors["responses"][row, :width].tolist() == sampled.tolist()
        log_probs = transcript.log_probs()[transcript.prompt_length :]
        assert tensors["rollout_log_probs"][row, :width].tolist() == log_probs.tolist()


async def test_generate_same_seed_gives_the_same_tokens_and_members_differ() -> None:
    def run() -> Any:
        return generate(
            Scenario(seed=3),
            [user("talk", uid="a"), user("talk", uid="b")],
            scheduling=SchedulingConfig(samples_per_prompt=2),
            sampling=SamplingConfig(max_new_tokens=16),
        )

    first, second = await run(), await run()
    assert first.tensors["input_ids"].equal(second.tensors["input_ids"])
    rows = {tuple(row.tolist()) for row in first.tensors["responses"]}
    assert len(rows) == 4


BAD_PROMPTS: list[tuple[Prompt, str, str]] = [
    (Prompt(messages=[]), "empty_prompt", "messages: expected at least one message"),
    (user("x", agent_name="nobody"), "unknown_agent", "no agent is registered as 'nobody'"),
    (user("x", sampling={"temperature": -1}), "bad_sampling", "temperature = -1"),
    (user("x", sampling={"heat": 1}), "bad_sampling", "sampling.heat: unknown key"),
    (
        user("x", extra={"interaction_kwargs": {"name": "ghost"}}),
        "unknown_interaction",
        "unknown interaction 'ghost'",
    ),
    (user("x", tools=["hammer"]), "unknown_tool", "'hammer'"),
    (user("y" * 3000), "prompt_length", "lengths.prompt = 2048"),
    (Prompt(messages=[{"content": "x"}]), "bad_message", "messages[0] has no role"),
    (user("\ud800"), "bad_message", "the messages hold '\\ud800': half of a character"),
    (user("x", sampling={"stop_token_ids": [300]}), "bad_sampling", "stop_token_ids = (300,)"),
]


async def test_bad_prompts_are_rejected_and_the_others_are_unharmed() -> None:
    prompts = [user("What is 2 + 3?"), *(prompt for prompt, _, _ in BAD_PROMPTS)]
    batch = await generate(ADDING, prompts, tools=[add])
    good, *others = batch.trajectories
    assert good.outcome is Outcome.COMPLETED
    for bad, (_, reason, said) in zip(others, BAD_PROMPTS, strict=True):
        assert (bad.outcome, bad.reason, bad.trainable) == (Outcome.REJECTED, reason, False)
        assert bad.cause is not None
        assert said in bad.cause.message
    assert batch.tensors["attention_mask"][1:].sum() == 0
    assert batch.tensors["trainable"].tolist() == [True] + [False] * len(others)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("hello", r"prompts: expected a sequence of Prompt, got str; write \[Prompt\("),
        (["hello"], r"prompts\[0\]: expected a Prompt, got str; write \[Prompt\("),
        ([{"prompt": "hello"}], "got dict; write "),
        ([user("a", uid="x"), user("b", uid="x")], r"prompts\[1\].uid = 'x': the uid of"),
        ([user("a", uid=3)], r"prompts\[0\].uid = 3: expected a string or None"),
        ([user("a", uid="\ud800")], r"prompts\[0\].uid = '\\ud800': expected a text that UTF-8"),
        ([Prompt(messages=5)], r"prompts\[0\].messages = 5: expected a text or a list of messages"),
        ([user("a", extra=[1])], r"prompts\[0\].extra = \[1\]: expected a mapping"),
    ],
)
async def test_unusable_prompts_raise_before_any_work(prompts: Any, said: str) -> None:
    async with rollout.open_rollout(Scenario(seed=1).config()) as runtime:
        with pytest.raises(rollout.PromptError, match=said):
            await runtime.generate(prompts)
        assert runtime.statistics().admitted == 0


ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: 1 / 0, "ZeroDivisionError"),
    "dict": (lambda: {"a": [1, "ü"]}, '{"a": [1, "ü"]}'),
    "huge": (lambda: "x" * 10_000_000, "...(truncated)..."),
    "exit": (lambda: (_ for _ in ()).throw(SystemExit(1)), "SystemExit"),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_odd_tool_becomes_an_observation_and_siblings_do_not_notice(kind: str) -> None:
    produce, expected = ANSWERS[kind]

    @function_tool(name="odd")
    async def odd() -> Any:
        """Do something odd."""
        return produce()

    scenario = ADDING.reply("odd", calls("odd")).then("I see.")
    batch = await generate(
        scenario,
        [user("an odd one"), user("What is 2 + 3?")],
        tools=[odd, add],
    )
    strange, normal = batch.trajectories
    assert normal.outcome is Outcome.COMPLETED
    assert strange.outcome is Outcome.COMPLETED
    assert expected in texts(strange)[2][1]
    assert strange.answer == "I see."


async def test_max_assistant_turns_reached_ends_with_that_limit() -> None:
    scenario = Scenario(seed=1).reply("go", calls("add", '{"a": 1, "b": 1}'))
    batch = await generate(
        scenario, [user("go")], tools=[add], agent=AgentConfig(max_assistant_turns=3)
    )
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.LIMIT, "turns")
    assert trajectory.limit_source == "agent.max_assistant_turns"
    assert [kind for kind, _ in texts(trajectory)].count("generated") == 3
    assert trajectory.num_turns == 3 + 2 + 1
    assert not trajectory.transcript.trailing_observation_length


async def test_max_user_turns_reached_ends_with_that_limit() -> None:
    scenario = Scenario(seed=1).reply("go", calls("add", '{"a": 1, "b": 1}'))
    batch = await generate(scenario, [user("go")], tools=[add], agent=AgentConfig(max_user_turns=2))
    (trajectory,) = batch.trajectories
    assert trajectory.limit_source == "agent.max_user_turns"
    assert [kind for kind, _ in texts(trajectory)].count("observation") == 2


async def test_response_length_reached_in_a_generation_cuts_it() -> None:
    batch = await generate(
        Scenario(seed=1).reply("", filler=500),
        [user("talk")],
        lengths=LengthsConfig(prompt=256, response=40),
    )
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")
    assert trajectory.transcript.response_length == 40
    assert batch.tensors["response_mask"].sum() == 40


async def test_observation_leaves_no_room_it_is_not_appended() -> None:
    scenario = Scenario(seed=1).reply("go", calls("add", '{"a": 1, "b": 1}'))
    room = len(calls("add", '{"a": 1, "b": 1}')) + 10
    batch = await generate(
        scenario,
        [user("go")],
        tools=[add],
        lengths=LengthsConfig(prompt=2048, response=room),
    )
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")
    assert [kind for kind, _ in texts(trajectory)] == ["prompt", "generated"]


async def test_interaction_scripted_user_answers_with_mask_zero() -> None:
    scenario = Scenario(seed=1).reply("start", "First answer.").then("Second answer.")
    batch = await generate(
        scenario,
        [user("start")],
        interactions=[ScriptedUser(["Try again."], name="critic")],
        agent=AgentConfig(interaction="critic"),
    )
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    spoken = texts(trajectory)
    assert [kind for kind, _ in spoken] == ["prompt", "generated", "observation", "generated"]
    assert "Try again." in spoken[2][1]
    assert trajectory.answer == "Second answer."
    masked = trajectory.transcript.ids()[trajectory.transcript.mask()]
    assert b"Try again." not in bytes(int(i) for i in masked if i < 256)


async def test_reward_async_is_computed_while_others_generate() -> None:
    seen: list[str] = []

    async def reward(trajectory: Trajectory) -> float:
        await anyio.sleep(1.0)
        seen.append(trajectory.uid)
        return float(len(trajectory.answer))

    scenario = (
        Scenario(seed=1)
        .reply("short", "ok")
        .reply("long", filler=400)
        .timing(base_s=0.01, slope_s=0.0)
    )
    batch = await generate(
        scenario, [user("long one", uid="long"), user("short", uid="short")], reward=reward
    )
    assert seen == ["short", "long"]
    assert [t.reward for t in batch.trajectories][1] == 2.0
    assert batch.metrics["reward/mean"] > 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "the reward function returned None; expected a number or a Reward"),
        (float("nan"), "the reward function returned nan; expected a finite number"),
        (
            {"points": 1},
            "the reward function returned {'points': 1}; expected a mapping to have a score",
        ),
    ],
)
async def test_reward_is_no_number_trajectory_fails_without_a_reward(value: Any, said: str) -> None:
    async def reward(trajectory: Trajectory) -> Any:
        return value

    batch = await generate(ADDING, [user("What is 2 + 3?")], tools=[add], reward=reward)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "reward")
    assert trajectory.cause is not None
    assert trajectory.cause.message == said
    assert trajectory.reward is None
    assert not trajectory.trainable
    assert trajectory.answer == "The sum is 5."


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5)])
async def test_reward_with_extra_reaches_the_sample(value: Any) -> None:
    async def reward(trajectory: Trajectory) -> rollout.Reward:
        return rollout.Reward(value=value, extra={"style": 2})

    batch = await generate(ADDING, [user("What is 2 + 3?")], tools=[add], reward=reward)
    assert batch.samples[0].reward == 0.5
    assert batch.samples[0].extra["style"] == 2


@pytest.mark.parametrize(
    ("value", "number"), [(False, 0.0), (np.bool_(True), 1.0), ({"score": True, "style": 2}, 1.0)]
)
async def test_reward_bool_is_a_number_and_a_mapping_has_it_as_its_score(
    value: Any, number: float
) -> None:
    async def reward(trajectory: Trajectory) -> Any:
        return value

    batch = await generate(ADDING, [user("What is 2 + 3?")], tools=[add], reward=reward)
    assert batch.samples[0].reward == number
    assert type(batch.samples[0].reward) is float
    assert batch.samples[0].extra == ({"style": 2} if isinstance(value, dict) else {})
    assert batch.tensors["rewards"].tolist() == [number]


async def wait_for_a_cancelled_task() -> None:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task


async def leave() -> None:
    raise SystemExit(3)


ACCIDENTS = {"CancelledError": wait_for_a_cancelled_task, "SystemExit": leave}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", ACCIDENTS)
async def test_foreign_code_has_an_accident_only_its_trajectory_fails(kind: str) -> None:
    @register_agent(f"accident {kind}")
    class Accident(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await ACCIDENTS[kind]()

    async def reward(trajectory: Trajectory) -> float:
        if trajectory.uid == "judged":
            await ACCIDENTS[kind]()
        return 1.0

    prompts = [
        user("x", agent_name=f"accident {kind}"),
        user("What is 2 + 3?", uid="judged"),
        user("What is 2 + 3?"),
    ]
    batch = await generate(ADDING, prompts, tools=[add], reward=reward)
    agent, judged, normal = batch.trajectories
    assert (agent.outcome, agent.reason) == (Outcome.FAILED, "agent")
    assert (judged.outcome, judged.reason, judged.reward) == (Outcome.FAILED, "reward", None)
    assert agent.cause is not None
    assert judged.cause is not None
    assert agent.cause.type == judged.cause.type == kind
    assert (normal.outcome, normal.reward) == (Outcome.COMPLETED, 1.0)


async def test_agent_cannot_be_made_only_its_trajectory_fails() -> None:
    @register_agent("unmakeable")
    class Unmakeable(AgentLoop):
        def __init__(self) -> None:
            raise LookupError("no parts")

        async def run(self, context: AgentContext) -> None:
            raise NotImplementedError

    batch = await generate(
        ADDING, [user("x", agent_name="unmakeable"), user("What is 2 + 3?")], tools=[add]
    )
    failed, normal = batch.trajectories
    assert normal.outcome is Outcome.COMPLETED
    assert failed.outcome is Outcome.FAILED
    assert failed.cause is not None
    assert failed.cause.message == "no parts"


async def test_cancel_one_member_keeps_its_tokens_and_generate_returns() -> None:
    config = (
        Scenario(seed=1)
        .reply("", filler=1000)
        .timing(base_s=0.01, slope_s=0.0)
        .config(scheduling=SchedulingConfig(samples_per_prompt=2))
    )
    async with rollout.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:

            async def cancel_later() -> None:
                await anyio.sleep(2.0)
                assert runtime.cancel("p", 1, reason="surplus") == 1
                assert runtime.cancel("p", 1, reason="again") == 0

            tasks.start_soon(cancel_later)
            batch = await runtime.generate([user("go", uid="p")])
    kept, cut = batch.trajectories
    assert kept.outcome is Outcome.COMPLETED
    assert (cut.outcome, cut.reason) == (Outcome.CANCELLED, "surplus")
    assert cut.metrics["total_s"] == pytest.approx(2.0, abs=0.01)  # to the end of a step
    assert 100 < cut.transcript.generated_length < 250
    assert next(iter(cut.transcript.generated_spans())).finish_reason == "abort"


async def test_cancel_members_that_wait_for_a_place_end_without_tokens() -> None:
    config = (
        Scenario(seed=1)
        .reply("", filler=100)
        .config(scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=1))
    )
    async with rollout.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.lowlevel.checkpoint)

            async def cancel_soon() -> None:
                await anyio.sleep(0.1)
                assert runtime.statistics().running == 1
                runtime.cancel()

            tasks.start_soon(cancel_soon)
            batch = await runtime.generate([user("go")])
    assert {t.outcome for t in batch.trajectories} == {Outcome.CANCELLED}
    assert [len(t.transcript) > 0 for t in batch.trajectories] == [True, False, False, False]


async def test_generate_cancelled_by_its_caller_passes_through_and_runtime_stays_usable() -> None:
    config = ADDING.reply("", filler=1000).config()
    async with rollout.open_rollout(config, [add]) as runtime:
        with anyio.move_on_after(1.0) as scope:
            await runtime.generate([user("endless")])
        assert scope.cancelled_caught
        batch = await runtime.generate([user("What is 2 + 3?")])
        assert batch.trajectories[0].outcome is Outcome.COMPLETED
        await anyio.sleep(0.1)
        assert all(r.in_flight == r.zombies == 0 for r in runtime.statistics().replicas)
        statistics = runtime.statistics()
        assert statistics.outcomes == {"cancelled": 1, "completed": 1}


async def test_max_in_flight_bounds_what_runs_at_once() -> None:
    most = 0
    async with rollout.open_rollout(
        Scenario(seed=1)
        .reply("", "ok")
        .config(scheduling=SchedulingConfig(samples_per_prompt=20, max_in_flight=3))
    ) as runtime:

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, runtime.statistics().running)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await runtime.generate([user("go")])
            tasks.cancel_scope.cancel()
    assert most == 3


async def test_stream_yields_in_the_order_of_ends_and_leaving_cancels_the_rest() -> None:
    config = (
        Scenario(seed=1)
        .reply("quick", "ok")
        .reply("slow", filler=1500)
        .timing(base_s=0.01, slope_s=0.0)
        .config()
    )
    async with rollout.open_rollout(config) as runtime:
        prompts = [user("slow one", uid="slow"), user("quick one", uid="quick")]
        async with runtime.stream(prompts) as trajectories:
            async for trajectory in trajectories:
                assert trajectory.uid == "quick"
                break
        await anyio.sleep(0.1)
        statistics = runtime.statistics()
        assert statistics.admitted == statistics.finished == 2
        assert all(r.in_flight == 0 for r in statistics.replicas)


async def test_stream_ends_by_itself_when_all_have_ended() -> None:
    async with rollout.open_rollout(Scenario(seed=1).reply("", "ok").config()) as runtime:
        async with runtime.stream([user(str(i)) for i in range(40)]) as trajectories:
            ended = [trajectory.uid async for trajectory in trajectories]
        assert sorted(ended) == sorted(f"prompt-{i}" for i in range(40))


async def test_validation_samples_as_validation_sampling_says() -> None:
    config = Scenario(seed=1).config(
        validation_sampling=SamplingConfig(greedy=True, max_new_tokens=3),
        sampling=SamplingConfig(max_new_tokens=5),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    async with rollout.open_rollout(config) as runtime:
        training = await runtime.generate([user("x")])
        validation = await runtime.generate([user("x")], validate=True)
    assert [t.transcript.generated_length for t in training.trajectories] == [5, 5]
    assert [t.transcript.generated_length for t in validation.trajectories] == [3]


async def test_close_while_another_task_generates_that_call_learns_it() -> None:
    errors: list[rollout.RolloutError] = []

    async def call(runtime: Any) -> None:
        try:
            await runtime.generate([user("slow"), user("quick")])
        except rollout.RolloutError as error:
            errors.append(error)

    config = Scenario(seed=1).reply("quick", "ok").reply("", filler=1000).config()
    async with anyio.create_task_group() as tasks:
        async with rollout.open_rollout(config) as runtime:
            tasks.start_soon(call, runtime)
            await anyio.sleep(1.0)
        with pytest.raises(rollout.RolloutError, match="the runtime is closed"):
            await runtime.generate([user("late")])
    assert str(errors[0]) == "the runtime was closed while this call was running"
    assert errors[0].partial is not None
    ends = [(s.outcome, s.reason) for s in errors[0].partial.samples]
    assert ends == [("cancelled", "closed"), ("completed", "")]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"agent": AgentConfig(name="nobody")}, "agent.name = 'nobody': no agent is registered"),
        ({"agent": AgentConfig(tool_format="latin")}, "agent.tool_format = 'latin': unknown"),
        ({"agent": AgentConfig(interaction="ghost")}, "agent.interaction = 'ghost': not among"),
        (
            {"validation_sampling": SamplingConfig(stop_token_ids=(300,))},
            r"validation_sampling.stop_token_ids = \(300,\); expected ids in \[0, 259\)",
        ),
    ],
)
async def test_open_unknown_name_is_a_config_error(sections: Any, said: str) -> None:
    with pytest.raises(rollout.ConfigError, match=said):
        async with rollout.open_rollout(Scenario(seed=1).config(**sections)):
            pytest.fail("opened")


def test_config_of_another_type_is_refused() -> None:
    async def main() -> None:
        async with rollout.open_rollout({"seed": 1}):  # type: ignore[arg-type]
            pytest.fail("opened")

    with pytest.raises(
        rollout.ConfigError, match=r"a RolloutConfig, got dict; rollout\.config_from"
    ):
        anyio.run(main)


@pytest.mark.parametrize("name", ["tools", "interactions"])
def test_what_is_no_sequence_is_refused_by_name(name: str) -> None:
    async def main() -> None:
        async with rollout.open_rollout(Scenario(seed=1).config(), **{name: "python"}):  # type: ignore[arg-type]
            pytest.fail("opened")

    with pytest.raises(rollout.ConfigError, match=f"^{name} = .*: expected a sequence"):
        anyio.run(main)
