"""What agents can do with a conversation beside speaking: ids, readers, extras, shared tools."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import rollout
from harness import Recorder
from race_situations import user
from rollout import (
    AgentContext,
    AgentError,
    InteractionTurn,
    Message,
    Outcome,
    Tool,
    ToolResult,
    ToolSession,
    Trajectory,
    function_tool,
)
from rollout.batch import RolloutBatch
from rollout.chat.reward_values import BadRewardError
from rollout.config import AgentConfig, LengthsConfig, RecoveryConfig, SimulatedEngine
from rollout.interactions import Interaction
from rollout.testing import Scenario, simulated_tokenizer, tool_call
from trial_agent import TRIALS, run_trial

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("go", "First words.", filler=10).then("Second words.")
LENGTHS = LengthsConfig(prompt=900, response=400)


async def tried(trial: Any, *, scenario: Scenario = SCENARIO, **options: Any) -> RolloutBatch:
    return await run_trial(trial, scenario, **{"lengths": LENGTHS, **options})


def ids_of(text: str) -> list[int]:
    return list(simulated_tokenizer().encode(text, add_special_tokens=False))


NEXT = "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"


async def set_history(context: AgentContext) -> None:
    context.history = "bad"
    await context.generate()


async def reward_twice(context: AgentContext) -> None:
    context.reward_turn(3e38)
    context.reward_turn(3e38)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda context: context.generate(stop_strings="a"), "generate: stop_strings = 'a'"),
        (lambda context: context.ask_user(), "ask_user: no interaction takes part"),
        (set_history, r"context\.history = 'bad'; expected 'append_only' or "),
        (reward_twice, "expected a number that float32 can hold"),
    ],
)
async def test_conversation_refuses_by_name_what_it_cannot_take(act: Any, said: str) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        assert await context.call_tools([]) == []
        with pytest.raises((AgentError, BadRewardError), match=said):
            await act(context)

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert [span.kind for span in trajectory.transcript.spans] == ["prompt", "generated"]
    rewards = trajectory.segments[0].token_rewards
    assert rewards is None or max(rewards) == pytest.approx(3e38)


@pytest.mark.parametrize("kind", [list, np.array])
async def test_observe_ids_are_in_the_transcript_as_they_are(kind: Any) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        context.observe_ids(kind(ids_of(NEXT)))
        context.observe_ids([])
        await context.generate()

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    transcript = trajectory.transcript
    assert [s.kind for s in transcript.spans] == ["prompt", "generated", "observation", "generated"]
    observed = transcript.spans[2]
    assert transcript.span_ids(observed).tolist() == ids_of(NEXT)
    assert not transcript.mask()[observed.start : observed.stop].any()
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "assistant"]
    assert str(trajectory.messages[-1].content).endswith("Second words.")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([3, -1], "observe_ids: token id -1 at position 1 is outside the engine's vocabulary of "),
        ([10**6], "observe_ids: token id 1000000 at position 0 is outside the engine's vocabu"),
        ([1.5], "observe_ids: 'float' object cannot be interpreted as an integer; expected a seq"),
    ],
)
async def test_observe_ids_that_are_none_are_refused(ids: Any, said: str) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        length = len(context.transcript)
        with pytest.raises(AgentError) as caught:
            context.observe_ids(ids)
        assert str(caught.value).startswith(said)
        assert len(context.transcript) == length

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def test_observe_ids_before_the_beginning_are_refused() -> None:
    async def trial(context: AgentContext) -> None:
        with pytest.raises(AgentError, match="observe_ids: 0/prompt-0/0 has not begun"):
            context.observe_ids([1])
        await context.generate()

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def test_observe_ids_stand_after_long_texts_that_were_observed_before() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        context.observe([{"role": "user", "content": "x" * 20_000}])
        context.observe_ids([5, 6, 7])
        await context.settle()
        assert context.transcript.ids()[-3:].tolist() == [5, 6, 7]

    lengths = LengthsConfig(prompt=900, response=30_000)
    (trajectory,) = (await tried(trial, lengths=lengths)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def test_observe_ids_keep_the_history_in_its_row() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        context.observe_ids(ids_of(NEXT))
        await context.generate()

    scenario = Scenario(seed=1).reply("go", "<think>\nHm.\n</think>\n\nA.").then("B.")
    agent = {"history": "inference_template", "tokenization_check": "strict"}
    (trajectory,) = (await tried(trial, scenario=scenario, agent=agent)).trajectories
    assert (trajectory.outcome, len(trajectory.segments)) == (Outcome.COMPLETED, 1)


async def test_on_tokens_every_reader_sees_every_chunk() -> None:
    seen: dict[str, list[tuple[int, str | None]]] = {"one": [], "two": []}

    def reader(name: str) -> Any:
        return lambda generation: seen[name].append((len(generation.ids), generation.finish_reason))

    async def trial(context: AgentContext) -> None:
        context.on_tokens += [reader("one"), reader("two")]
        await context.generate()
        context.on_tokens.pop()
        context.observe([{"role": "user", "content": "More."}])
        branch = await context.branch()
        assert branch.on_tokens == []
        await context.generate()

    scenario = Scenario(seed=1, stream_interval=4).reply("go", "Words.", filler=10).then("Second.")
    (trajectory,) = (await tried(trial, scenario=scenario)).trajectories
    first, second = (len(span) for span in trajectory.transcript.generated_spans())
    counts = [count for count, _ in seen["two"]]
    assert len(counts) >= first // 4
    assert counts == sorted(counts)
    assert seen["two"][-1] == (first, "stop")
    assert seen["one"][: len(counts)] == seen["two"]
    assert seen["one"][-1] == (second, "stop")
    assert len(seen["one"]) > len(counts)


async def test_on_tokens_reader_that_raises_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []

    def broken(generation: Any) -> None:
        raise ValueError("no")

    async def trial(context: AgentContext) -> None:
        context.on_tokens += [broken, lambda generation: seen.append(len(generation.ids))]
        await context.generate()

    scenario = Scenario(seed=1, stream_interval=4).reply("go", filler=20)
    (trajectory,) = (await tried(trial, scenario=scenario)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert seen[-1] == trajectory.transcript.generated_length
    assert len([r for r in caplog.records if "a reader of tokens raised" in r.message]) == 1


async def test_on_tokens_after_a_restart_the_tokens_are_fewer() -> None:
    seen: list[int] = []
    recorder = Recorder()

    async def trial(context: AgentContext) -> None:
        context.on_tokens.append(lambda generation: seen.append(len(generation.ids)))
        await context.generate()

    TRIALS["it"] = trial
    scenario = Scenario(seed=1).reply("go", filler=150).timing(base_s=0.02)
    config = scenario.config(
        agent=AgentConfig(name="does_a_trial"),
        engine=SimulatedEngine(replicas=2),
        recovery=RecoveryConfig(policy="restart"),
    )
    async with recorder.open_rollout(config) as runtime, anyio.create_task_group() as tasks:

        async def kill() -> None:
            await anyio.sleep(1.0)
            recorder.engines_alive()[0].kill()

        tasks.start_soon(kill)
        batch = await runtime.generate([user("go")])
    assert recorder.anomalies() == []
    drops = sum(after < before for before, after in itertools.pairwise(seen))
    assert drops == batch.trajectories[0].metrics["restarts"]
    assert seen[-1] == batch.trajectories[0].transcript.generated_length


@function_tool
async def look(at: str) -> ToolResult:
    """Look.

    Args:
        at: What.
    """
    return ToolResult(f"{at}: blue", extra={"pixels": [1, 2, 3]})


class Critic(Interaction):
    """Asks once."""

    name = "critic"

    def __init__(self) -> None:
        self.asked = 0

    async def respond(self, messages: Any) -> InteractionTurn:
        self.asked += 1
        return InteractionTurn("Sure?", is_done=self.asked > 1, extra={"mood": "doubtful"})


async def test_extra_of_tools_users_and_agents_reaches_messages_and_disk(tmp_path: Path) -> None:
    async def trial(context: AgentContext) -> None:
        turn = await context.generate()
        await context.call_tools(turn.calls)
        await context.generate()
        await context.ask_user()
        await context.generate()
        record = Message(role="user", content="A.", extra={"turn": 3})
        mapping = {"role": "user", "content": "B.", "extra": {"odd": object}}
        context.observe([record, mapping])
        await context.generate()

    TRIALS["it"] = trial
    scenario = Scenario(seed=1).reply("go", tool_call("look", at="sky")).then("Blue.")
    config = scenario.config(agent=AgentConfig(name="does_a_trial", interaction="critic"))
    prompt = user("go")
    prompt.messages[0]["extra"] = {"source": "a book"}
    rewarded: list[Trajectory] = []

    def reward(trajectory: Trajectory) -> float:
        rewarded.append(trajectory)
        return 1.0

    async with rollout.open_rollout(config, [look], reward, [Critic]) as runtime:
        batch = await runtime.generate([prompt])
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    extras = [dict(message.extra) for message in trajectory.messages]
    assert extras == [
        {"source": "a book"}, {}, {"pixels": [1, 2, 3]}, {}, {"mood": "doubtful"}, {},
        {"turn": 3}, {"odd": object}, {},
    ]  # fmt: skip
    assert rewarded[0].messages == trajectory.messages
    assert "a book" not in simulated_tokenizer().decode(trajectory.transcript.ids().tolist())
    batch.save(tmp_path)
    (loaded,) = RolloutBatch.load(tmp_path).trajectories
    assert [message.extra for message in loaded.messages[:7]] == extras[:7]
    assert loaded.messages[7].extra == {"odd": "<class 'object'>"}
    assert loaded.messages[7].content == "B."


class Counter(Tool):
    """Takes its time to open, and one call at a time."""

    name = "count"
    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "count", "description": "Count.", "parameters": {}},
    }

    def __init__(self) -> None:
        self.opened = self.running = self.most = 0

    async def open(self, context: Any) -> ToolSession:
        await anyio.sleep(0.1)
        self.opened += 1
        return CounterSession(self)


class CounterSession(ToolSession):
    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.serial = self

    async def execute(self, call: Any) -> str:
        counter = self._counter
        counter.running += 1
        counter.most = max(counter.most, counter.running)
        await anyio.sleep(0.1)
        counter.running -= 1
        return "counted"


async def test_tools_called_by_conversations_at_once_are_opened_once_and_stay_serial() -> None:
    async def trial(context: AgentContext) -> None:
        turn = await context.generate()
        branches = [await context.branch() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            for branch in (context, *branches):
                tasks.start_soon(branch.call_tools, turn.calls)

    counter = Counter()
    scenario = Scenario(seed=1).reply("go", tool_call("count"))
    (trajectory,) = (await tried(trial, scenario=scenario, tools=[counter])).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert (counter.opened, counter.most) == (1, 1)
    assert [s.messages[-1].content for s in trajectory.segments] == ["counted"] * 4


async def test_generation_cut_before_its_first_token_leaves_no_turn() -> None:
    slow = Scenario(seed=1).reply("", "Hello").timing(prefill_tokens_per_s=40.0)

    async def trial(context: AgentContext) -> None:
        with anyio.move_on_after(0.1):
            await context.generate()
        await anyio.sleep(5)
        assert (await context.generate()).content == "Hello"

    (trajectory,) = (await tried(trial, scenario=slow)).trajectories
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert (trajectory.outcome, trajectory.num_turns) == (Outcome.COMPLETED, 2)
    assert [span.kind for span in trajectory.transcript.spans] == ["prompt", "generated"]
