"""Trajectories as trees: a main conversation, branches of it, and sub-agents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from harness import Recorder, balance_of
from race_situations import RESEARCH, add, user
from rollout import AgentError, LimitExceeded, Outcome, Trajectory
from rollout.batch import RolloutBatch
from rollout.chat.trajectory import Parent
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    RecoveryConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.seeds import derive_seed
from rollout.testing import Scenario, run_virtual, tool_call
from trial_agent import run_trial

if TYPE_CHECKING:
    from rollout.agents import AgentContext

pytestmark = pytest.mark.anyio

CALL = tool_call("add", a=2, b=3)
SCENARIO = (
    Scenario(seed=1)
    .reply("another way", "First branch.", "Or so.", filler=20)
    .reply("the opposite", "Second branch.", "Or not.", filler=30)
    .reply("researcher", CALL)
    .then("Found: 5.")
    .reply("question", "The main answer.", filler=10)
    .then("The end.")
)


LENGTHS = LengthsConfig(prompt=1200, response=600)


def says(text: str, **extra: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **({"extra": extra} if extra else {})}]


def config(agent: str = "tree", scenario: Scenario = SCENARIO, **sections: Any) -> Any:
    sections.setdefault("scheduling", SchedulingConfig(samples_per_prompt=2))
    return scenario.config(
        agent=AgentConfig(name=agent),
        engine=SimulatedEngine(replicas=2),
        lengths=LENGTHS,
        **sections,
    )


async def grow(recorder: Recorder, reward: Any = None) -> RolloutBatch:
    async with recorder.open_rollout(config(), [add], reward=reward) as runtime:
        batch: RolloutBatch = await runtime.generate([user("question")], step=3)
    return batch


async def grown(batch_reward: float = 1.0) -> tuple[RolloutBatch, Trajectory]:
    recorder = Recorder()
    batch = await grow(recorder, lambda trajectory: batch_reward)
    assert recorder.anomalies() == []
    (runtime,) = recorder.runtimes
    balance = balance_of(runtime)
    assert balance.is_even
    assert balance.transcripts == sum(t.generated_length for t in batch.trajectories)
    return batch, batch.trajectories[0]


async def test_tree_of_segments_rows_are_adjacent_and_samples_say_which() -> None:
    batch, trajectory = await grown()
    assert trajectory.outcome is Outcome.COMPLETED
    assert len(batch) == 8
    main, first, second, worker = trajectory.segments
    fork = len(main.transcript.spans[0]) + len(main.transcript.spans[1])
    assert [(s.member, s.row, s.segment, s.purpose) for s in batch.samples] == [
        (member, 4 * member + at, at, purpose)
        for member in range(2)
        for at, purpose in enumerate(("main", "branch", "retry", "subagent"))
    ]
    prompt = main.transcript.prompt_length
    assert [s.parent for s in batch.samples[:4]] == [None, (0, fork), (0, prompt), (0, fork)]
    assert trajectory.transcript is main.transcript
    assert [each.purpose for each in trajectory.segments] == ["main", "branch", "retry", "subagent"]
    assert first.transcript.ids_bytes().startswith(main.transcript.ids_bytes()[: 4 * fork])
    assert second.transcript.ids_bytes().startswith(main.transcript.ids_bytes()[: 4 * prompt])
    assert worker.messages[0].content == "You are a researcher."
    assert [m.role for m in worker.messages] == ["system", "user", "assistant", "tool", "assistant"]


async def test_tree_of_segments_each_sampled_token_is_trained_in_one_row() -> None:
    batch, trajectory = await grown()
    tensors = batch.tensors
    masks, log_probs = tensors["response_mask"], tensors["rollout_log_probs"]
    assert int(masks.sum()) == batch.metrics["tokens/generated"]
    first = trajectory.segments[1]
    position = first.parent.position - first.transcript.prompt_length  # type: ignore[union-attr]
    assert position > 0
    assert int(masks[1, :position].sum()) == 0
    assert float(log_probs[1, :position].abs().sum()) == 0.0
    assert tensors["weight_versions"][1, :position].tolist() == [-1] * position
    own = int(masks[1].sum())
    assert own == first.transcript.generated_length > 0
    assert (
        tensors["responses"][1, :position].tolist() == tensors["responses"][0, :position].tolist()
    )


async def test_tree_of_segments_rewards_and_trainable_fall_back_to_the_trajectory() -> None:
    batch, _ = await grown(batch_reward=0.5)
    assert batch.tensors["rewards"][:4].tolist() == [0.5, 0.25, 0.5, 0.5]
    assert batch.tensors["trainable"][:4].tolist() == [True, True, True, False]
    assert [s.reward for s in batch.samples[:4]] == [0.5, 0.25, 0.5, 0.5]
    assert [s.trainable for s in batch.samples[:4]] == [True, True, True, False]


async def test_tree_of_segments_seeds_and_sessions_derive_from_the_segment() -> None:
    batch, trajectory = await grown()
    assert [s.session_id for s in trajectory.segments] == [
        "3/prompt-0/0", "3/prompt-0/0#0", "3/prompt-0/0#1", "3/prompt-0/0#2",
    ]  # fmt: skip
    main = [derive_seed(1, 3, "prompt-0", 0, turn) for turn in range(2)]
    opened = [[derive_seed(1, 3, "prompt-0", 0, str(at), 0)] for at in range(3)]
    opened[2].append(derive_seed(1, 3, "prompt-0", 0, "2", 1))
    assert [s.seeds for s in trajectory.segments] == [main, *opened]
    assert [s.seeds for s in batch.samples[:4]] == [main, *opened]


async def test_tree_of_segments_comes_back_from_disk(tmp_path: Path) -> None:
    batch, _ = await grown()
    batch.save(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert loaded.samples == batch.samples
    for here, there in zip(batch.trajectories, loaded.trajectories, strict=True):
        assert there.transcript is there.segments[0].transcript
        for one, two in zip(here.segments, there.segments, strict=True):
            assert one.transcript.spans == two.transcript.spans
            assert one.transcript.ids_bytes() == two.transcript.ids_bytes()
            assert one.transcript.log_probs().tobytes() == two.transcript.log_probs().tobytes()
            for name in ("parent", "purpose", "trainable", "reward", "session_id", "seeds"):
                assert getattr(one, name) == getattr(two, name)
            assert [(m.role, m.content) for m in one.messages] == [
                (m.role, m.content) for m in two.messages
            ]
    assert isinstance(loaded.samples[1].parent, Parent)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tree_of_segments_on_asyncio_says_the_same() -> None:
    recorder = Recorder()
    found = await grow(recorder)
    assert recorder.anomalies() == []
    expected = Recorder()
    await anyio.to_thread.run_sync(run_virtual, grow, expected)
    (call,) = expected.runtimes[0].calls
    assert call.batch is not None
    rows = [[(s.seeds, s.transcript.ids_bytes()) for s in t.segments] for t in found.trajectories]
    assert rows == [
        [(s.seeds, s.transcript.ids_bytes()) for s in t.segments] for t in call.batch.trajectories
    ]


async def test_tree_of_segments_branches_generate_at_once() -> None:
    recorder = Recorder()
    await grow(recorder)
    (call,) = recorder.runtimes[0].calls
    first, second = (call.generations[f"3/prompt-0/0#{at}"][0] for at in range(2))
    assert first.ended is not None
    assert second.ended is not None
    assert max(first.started, second.started) < min(first.ended, second.ended)


def text(ids: Any) -> str:
    from rollout.testing import simulated_tokenizer

    return str(simulated_tokenizer().decode(list(ids), clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("seed", range(3))
def test_tree_of_segments_says_the_same_under_any_schedule(seed: int) -> None:
    found = []
    for schedule in (0, seed + 1):
        recorder = Recorder()
        run_virtual(grow, recorder, seed=schedule)
        assert recorder.anomalies() == []
        (call,) = recorder.runtimes[0].calls
        assert call.batch is not None
        found.append(
            [
                (s.session_id, s.parent, s.purpose, s.seeds, s.transcript.ids_bytes())
                for t in call.batch.trajectories
                for s in t.segments
            ]
        )
    assert found[0] == found[1]


async def tried(trial: Any, scenario: Scenario = SCENARIO, **sections: Any) -> Trajectory:
    options = {"engine": SimulatedEngine(replicas=2), "lengths": LENGTHS, **sections}
    prompt = user("question", extra={"trial": "it"})
    batch = await run_trial(trial, scenario, prompt=prompt, tools=[add], **options)
    (trajectory,) = batch.trajectories
    return trajectory


async def test_branch_from_the_end_of_a_turn_does_not_end_it_twice() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        branch = await context.branch()
        branch.observe(says("another way"))
        context.observe(says("another way"))
        await branch.generate()

    main, branch = (await tried(trial)).segments
    observed = main.transcript.ids_bytes()
    assert branch.transcript.ids_bytes()[: len(observed)] == observed
    assert "<|im_end|>\n<|im_end|>" not in text(branch.transcript.ids())


async def test_branch_within_a_turn_continues_it() -> None:
    scenario = Scenario(seed=1).reply("question", "One two three four five six seven.")
    turns = []

    async def trial(context: AgentContext) -> None:
        whole = await context.generate()
        start = context.transcript.prompt_length
        branch = await context.branch(start + 8)
        nested = await branch.branch(start + 4)
        turns.extend([whole, await branch.generate(), await nested.generate()])
        assert branch.messages[-1].content == turns[1].content

    main, branch, nested = (await tried(trial, scenario)).segments
    whole, turn, nested_turn = turns
    assert (branch.parent, nested.parent) == (
        (0, main.transcript.prompt_length + 8),
        (1, main.transcript.prompt_length + 4),
    )
    assert turn.text.startswith(whole.text[:8])
    assert nested_turn.text.startswith(whole.text[:4])
    assert turn.text == text(branch.transcript.ids()[main.transcript.prompt_length :])
    assert [span.kind for span in branch.transcript.spans] == ["prompt", "observation", "generated"]


@pytest.mark.parametrize("position", [0, 10_000, 3])
async def test_branch_elsewhere_is_refused(position: Any) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        with pytest.raises(AgentError, match=rf"branch: position = {position!r}"):
            await context.branch(position)

    assert (await tried(trial)).outcome is Outcome.COMPLETED


async def test_conversation_used_while_it_generates_is_refused() -> None:
    async def trial(context: AgentContext) -> None:
        await context.begin()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(context.generate)
            await anyio.sleep(0.01)
            for use in (lambda: context.observe(says("x")), lambda: context.observe_ids([1])):
                with pytest.raises(AgentError, match="is generating; wait for its turn"):
                    use()
            with pytest.raises(AgentError, match="is generating; wait for its turn"):
                await context.generate()
            branch = await context.branch()  # of what there is
            await branch.generate()

    trajectory = await tried(trial)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.segments[1].parent == (0, trajectory.transcript.prompt_length)


async def test_subagent_that_does_not_fit_leaves_the_trajectory_to_its_agent() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        with pytest.raises(
            LimitExceeded, match=r"the prompt has 1.* tokens; lengths.prompt = 1200"
        ):
            await context.subagent(says("x" * 1300))
        with pytest.raises(AgentError, match=r"subagent: messages.0.: unknown role 'nobody'"):
            await context.subagent([{"role": "nobody", "content": "x"}])
        worker = await context.subagent(RESEARCH)
        with pytest.raises(LimitExceeded, match=r"an observation of .* tokens does not fit"):
            worker.observe(says("y" * 700))

    trajectory = await tried(trial)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [each.purpose for each in trajectory.segments] == ["main", "subagent"]


async def test_failure_of_an_engine_runs_the_whole_tree_again() -> None:
    recorder = Recorder()
    async with (
        recorder.open_rollout(
            config(
                scenario=SCENARIO.timing(base_s=0.02),
                scheduling=SchedulingConfig(samples_per_prompt=4, max_retries=9),
                recovery=RecoveryConfig(policy="fail"),
            ),
            [add],
        ) as runtime,
        anyio.create_task_group() as tasks,
    ):

        async def kill() -> None:
            await anyio.sleep(1.0)
            recorder.engines_alive()[0].kill()

        tasks.start_soon(kill)
        batch = await runtime.generate([user("question")], step=3)
    assert recorder.anomalies() == []
    assert max(t.metrics["attempts"] for t in batch.trajectories) > 1
    assert [len(t.segments) for t in batch.trajectories] == [4] * 4
    (watched,) = recorder.runtimes
    balance = balance_of(watched)
    assert balance.is_even
    assert balance.discarded > 0


async def test_subagent_with_tools_of_its_own_is_offered_and_reads_those() -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    async def trial(context: AgentContext) -> None:
        await context.generate()
        worker = await context.subagent(RESEARCH, tools=[look])
        bare = await context.subagent(RESEARCH, tools=[])
        heir = await (await worker.branch()).subagent(RESEARCH)
        assert [t["function"]["name"] for t in worker.renderer.reader.schemas] == ["look"]
        assert [t["function"]["name"] for t in heir.renderer.reader.schemas] == ["look"]
        for each in (worker, bare, heir):
            await each.generate()

    rows = (await tried(trial)).segments
    heads = [text(each.transcript.ids()).partition("<|im_start|>user")[0] for each in rows]
    tools = [[name for name in ("add", "look") if f'"name": "{name}"' in head] for head in heads]
    assert tools == [["add"], ["look"], ["look"], ["look"], []]


async def test_branch_that_is_told_what_does_not_fit_is_not_opened() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        with pytest.raises(LimitExceeded, match=r"lengths\.response"):
            await context.branch(messages=says("x" * 2000))
        branch = await context.branch(messages=says("another way"))
        assert branch.user_turns == 1
        await branch.generate()
        assert len(list(context.all())) == 2

    trajectory = await tried(trial)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    kinds = [span.kind for span in trajectory.segments[1].transcript.spans]
    assert kinds == ["prompt", "observation", "observation", "generated"]
