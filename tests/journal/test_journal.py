"""The journal: what a run that died has finished comes back as it was, and the rest continues."""

from __future__ import annotations

import logging
import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

import rollout
from journal_material import (
    ADDING,
    CALLED,
    GIVEN,
    Ran,
    add,
    config_of,
    content,
    cut,
    cut_before_last_answers,
    prompts,
    record_ends,
    records_in,
    reward,
    run,
)
from rollout import (
    AgentLoop,
    ConfigError,
    GroupPolicy,
    Outcome,
    Prompt,
    PromptError,
    Reward,
    RolloutBatch,
    Tool,
    ToolSession,
    Trajectory,
    function_tool,
)
from rollout.agents import AgentContext, register_agent
from rollout.config import AgentConfig, GatewayConfig, SamplingConfig, SchedulingConfig
from rollout.journal.index import read_journal
from rollout.journal.log_file import HEAD, MAGIC
from rollout.journal.records import EndRecord, ResultsRecord, TurnRecord
from rollout.testing import run_virtual
from rollout.tools import ToolContext
from rollout.types import ToolCall


def test_resume_at_every_record_gives_what_the_whole_run_gave(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), GIVEN)
    expected = [content(each) for each in whole.trajectories]
    all_calls = len(CALLED)
    assert all_calls == 4
    for size in [0, len(MAGIC) // 2, *record_ends(path)]:
        half = cut(path, size)
        before = read_journal(half).trajectories.values()
        ended = sum(each.end is not None for each in before)
        known = records_in(half) if size > len(MAGIC) else []
        sampled = sum(len(each.ids) // 4 for each in known if isinstance(each, TurnRecord))
        answered = sum(len(each.results) for each in known if isinstance(each, ResultsRecord))
        resumed = run(config_of(half), GIVEN, resume=True)
        assert [content(each) for each in resumed.trajectories] == expected
        assert _same_tensors(resumed, whole)
        assert resumed.statistics.returned == ended
        assert resumed.tokens == whole.tokens - sampled
        assert len(CALLED) == all_calls - answered
    again = run(config_of(half), GIVEN, resume=True)
    assert (again.tokens, len(CALLED), again.statistics.returned) == (0, 0, 3)
    assert [content(each) for each in again.trajectories] == expected
    assert [each.metrics for each in again.trajectories] == [
        each.metrics for each in resumed.trajectories
    ]


def _same_tensors(one: Ran, other: Ran) -> bool:
    return all(
        np.array_equal(one.batch.tensors[key].numpy(), value.numpy(), equal_nan=True)
        for key, value in other.batch.tensors.items()
    )


def test_resume_cuts_a_torn_tail_wherever_it_ends_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), prompts("quick"))
    ends = record_ends(path)
    start, stop = ends[-3], ends[-2]  # the end of its trajectory; what follows says it is delivered
    body = start + HEAD.size
    for size in (*range(start + 1, body + 2), stop - 1):
        contents = read_journal(cut(path, size))
        assert (contents.size, contents.torn_size) == (start, size - start)
        assert [each.end for each in contents.trajectories.values()] == [None]
    for size in (start + 1, start + 9, stop - 1):
        torn = cut(path, size)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rollout.journal"):
            resumed = run(config_of(torn), prompts("quick"), resume=True)
        assert caplog.messages == [
            f"{torn}: its last {size - start} bytes, from byte {start} on, hold no whole record "
            "and are cut off: what wrote it was ended meanwhile"
        ]
        assert content(resumed.trajectories[0]) == content(whole.trajectories[0])
        assert read_journal(torn).torn_size == 0


def test_resume_of_what_is_no_journal_of_this_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"rollout journal 12\n")
    with pytest.raises(ConfigError, match="a journal of format 12; this version reads format 11"):
        run(config_of(path), prompts("quick"), resume=True)
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is no journal"):
        run(config_of(path), prompts("quick"), resume=True)


def test_open_with_a_journal_that_exists_and_no_resume_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    run(config_of(path), prompts("quick"))
    with pytest.raises(ConfigError, match="exists; expected a new file, or resume=True"):
        run(config_of(path), prompts("quick"))
    with pytest.raises(ConfigError, match=r"resume = True: expected journal\.path"):
        run(ADDING.config(), prompts("quick"), resume=True)


def test_resume_of_another_run_is_refused_naming_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    run(config_of(path, journal={"prompts": "one"}), prompts("quick"))
    other = config_of(path, sampling=SamplingConfig(temperature=0.5), journal={"prompts": "one"})
    with pytest.raises(ConfigError) as caught:
        run(other, prompts("quick"), resume=True)
    assert str(caught.value) == (
        f"journal.path = {str(path)!r}: is the journal of another run; expected the same, or "
        "another journal:\n  sampling.temperature = 1.0 there, 0.5 here"
    )
    groups = SchedulingConfig(groups=GroupPolicy(oversample=1.5))
    model = attrs.evolve(ADDING.config().model, chat_template_kwargs={"x": 1})
    others: list[tuple[dict[str, Any], str]] = [
        ({"scheduling": groups}, "scheduling.groups.oversample = 1.0 there, 1.5 here$"),
        ({"journal": {"prompts": "two"}}, "journal.prompts = 'one' there, 'two'"),
        ({"model": model}, "model.chat_template_kwargs.x = nothing there, 1 here$"),
    ]
    for sections, said in others:
        other = config_of(path, **{"journal": {"prompts": "one"}, **sections})
        with pytest.raises(ConfigError, match=rf"another run; (?s:.*)\n  {said}"):
            run(other, prompts("quick"), resume=True)
    changed = [Prompt(messages=[{"role": "user", "content": "another"}], uid="quick")]
    with pytest.raises(PromptError) as refused:
        run(config_of(path, journal={"prompts": "one"}), changed, resume=True)
    assert str(refused.value) == (
        f"prompts[0] (uid 'quick'): is not the prompt of the journal {path}; differs in messages"
    )


def test_resume_with_another_transport_of_the_gateway_is_the_same_run(tmp_path: Path) -> None:
    run(config_of(tmp_path / "journal"), prompts("quick"))
    gateway = GatewayConfig(public_url="https://here", max_connections=9, idle_s=5.0, write_s=5.0)
    run(config_of(tmp_path / "journal", gateway=gateway), prompts("quick"), resume=True)


def test_resume_with_another_chat_template_in_its_file_is_refused(tmp_path: Path) -> None:
    path, template = tmp_path / "journal", tmp_path / "chat.jinja"
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template.write_text(text)
    model = attrs.evolve(ADDING.config().model, chat_template=str(template))
    config = config_of(path, model=model)
    (first,) = run(config, prompts("quick"), tools=()).trajectories
    (again,) = run(config, prompts("quick"), tools=(), resume=True).trajectories
    assert content(again) == content(first)
    template.write_text(text.replace("\n", "\n\n", 1))
    with pytest.raises(ConfigError, match=r"another run; .*\n  vocabulary and chat template ="):
        run(config, prompts("quick"), tools=(), resume=True)


def test_resume_with_other_tools_warns_of_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @function_tool(name="add")
    async def add_two(a: int, b: int) -> int:
        """Add, and say it otherwise.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    path = tmp_path / "journal"
    run(config_of(path), prompts("quick"))
    run(config_of(path), prompts("quick"), resume=True)
    assert "other schemas" not in caplog.text
    run(config_of(path), prompts("quick"), tools=[add_two], resume=True)
    assert f"{path}: these tools have other schemas than before: add;" in caplog.text


def test_extra_as_text_is_written_so_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def attaching(trajectory: Trajectory) -> Reward:
        return Reward(value=1.0, extra={"odd": {1, 2}})

    config = config_of(tmp_path / "journal", journal={"unwritable": "text"})
    with caplog.at_level(logging.WARNING, "rollout.journal"):
        whole = run(config, prompts("quick"), reward=attaching).trajectories[0]
    assert (whole.outcome, whole.extra) == (Outcome.COMPLETED, {"odd": {1, 2}})
    assert "is written as text" in caplog.text
    resumed = run(config, prompts("quick"), reward=attaching, resume=True).trajectories[0]
    assert (resumed.reward, resumed.extra) == (1.0, {"odd": "{1, 2}"})


def test_extra_of_plain_data_comes_back_exactly(tmp_path: Path) -> None:
    extra = {
        "moment": datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=2))),
        "keys": {None: 1, 2: b"", (3, "x"): 0.5},
        "nothing": None,
        "numbers": [1, -(2**63), 2**64 - 1, 0.1, -0.0, math.inf, True],
        "pair": (1, ("a", b"\x00")),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.float64(0.1),
    }
    path = tmp_path / "journal"
    run(config_of(path), prompts("quick"), reward=lambda _: Reward(value=0.1, extra=extra))
    resumed = run(config_of(path), prompts("quick"), reward=None, resume=True)
    found = dict(resumed.trajectories[0].extra)
    array = found.pop("array")
    assert (array.dtype, array.shape, array.tolist()) == (
        np.float32,
        (2, 3),
        [[0, 1, 2], [3, 4, 5]],
    )
    lists = {"pair": [1, ["a", b"\x00"]], "scalar": 0.1}
    assert found == {key: value for key, value in (extra | lists).items() if key != "array"}
    assert type(found["scalar"]) is float
    assert resumed.trajectories[0].reward == 0.1


class Counter(Tool):
    """Adds up what it is called with."""

    name = "add"
    schema = add.schema

    def __init__(self, session: type[CounterSession]) -> None:
        self._session = session

    async def open(self, context: ToolContext) -> ToolSession:
        return self._session()


class CounterSession(ToolSession):
    def __init__(self) -> None:
        self.total = 0

    async def execute(self, call: ToolCall) -> str:
        CALLED.append((call.arguments["a"], call.arguments["b"]))
        self.total += call.arguments["a"] + call.arguments["b"]
        return str(self.total)

    async def calc_reward(self) -> float:
        return float(self.total)


def test_resume_of_a_stateful_tool_begins_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), prompts("sum"), tools=[Counter(CounterSession)])
    assert whole.trajectories[0].tool_rewards == [6.0]
    half = cut_before_last_answers(path, ResultsRecord)
    resumed = run(config_of(half), prompts("sum"), tools=[Counter(CounterSession)], resume=True)
    assert CALLED == [(1, 1), (2, 2)]
    assert (resumed.statistics.restarted, resumed.statistics.recalled) == (1, 0)
    assert content(resumed.trajectories[0]) == content(whole.trajectories[0])
    again = read_journal(half).trajectories.popitem()[1]
    assert again.start == 1


def test_resume_with_an_agent_that_asks_otherwise_is_counted_and_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = ["first"]

    @register_agent("changing")
    class Changing(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            context.observe([{"role": "user", "content": said[0]}])
            await context.generate()

    path = tmp_path / "journal"
    agent = AgentConfig(name="changing")
    run(config_of(path, agent=agent), prompts("quick"))
    half = cut_before_last_answers(path, EndRecord)
    said[0] = "second"
    with caplog.at_level(logging.WARNING, "rollout.journal"):
        resumed = run(config_of(half, agent=agent), prompts("quick"), resume=True)
    assert (resumed.statistics.departed, resumed.statistics.recalled) == (1, 1)
    assert "asked otherwise than before it was resumed: 1 of its recorded answers" in caplog.text
    assert resumed.trajectories[0].outcome is Outcome.COMPLETED
    fresh = run(config_of(tmp_path / "fresh", agent=agent), prompts("quick"))
    assert content(resumed.trajectories[0]) == content(fresh.trajectories[0])


def test_resume_of_side_by_side_conversations_recalls_each(tmp_path: Path) -> None:
    @register_agent("forking")
    class Forking(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            one = await context.subagent([{"role": "user", "content": "quick one"}])
            other = await context.branch()
            other.observe([{"role": "user", "content": "quick other"}])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.generate)
                tasks.start_soon(other.generate)
            await context.compact([{"role": "user", "content": "quick again"}])
            await context.generate()

    path = tmp_path / "journal"
    agent = AgentConfig(name="forking")
    whole = run(config_of(path, agent=agent), prompts("quick"))
    assert len(whole.trajectories[0].segments) == 4
    for size in record_ends(path):
        half = cut(path, size)
        turns = sum(isinstance(each, TurnRecord) for each in records_in(half))
        resumed = run(config_of(half, agent=agent), prompts("quick"), resume=True)
        assert content(resumed.trajectories[0]) == content(whole.trajectories[0])
        assert resumed.statistics.departed == 0
        assert resumed.statistics.recalled == (0 if resumed.statistics.returned else turns)


def test_stream_resumed_yields_the_same_and_marks_what_was_delivered(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def act(resume: bool) -> list[Trajectory]:
        async with (
            rollout.open_rollout(config_of(path), [add], reward, resume=resume) as runtime,
            runtime.stream(GIVEN, step=3) as trajectories,
        ):
            seen = []
            async for each in trajectories:
                seen.append(each)
                known = read_journal(path).trajectories.values()
                assert sum(recorded.end is not None for recorded in known) >= len(seen)
            return seen

    first = run_virtual(act, False)
    recorded = read_journal(path).trajectories
    assert all(each.is_delivered for each in recorded.values())
    assert {key.step for key in recorded} == {3}
    again = run_virtual(act, True)
    by_uid = {each.uid: content(each) for each in first}
    assert {each.uid: content(each) for each in again} == by_uid


def test_trajectories_ended_by_a_closing_runtime_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def act() -> None:
        async with (
            rollout.open_rollout(config_of(path), [add], reward) as runtime,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(runtime.generate, prompts("sum"))
            while not CALLED:
                await anyio.sleep(0.1)
            await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()

    CALLED.clear()
    run_virtual(act)
    (recorded,) = read_journal(path).trajectories.values()
    assert recorded.end is None
    assert recorded.answers
    resumed = run(config_of(path), prompts("sum"), resume=True)
    assert resumed.statistics.recalled == len(recorded.answers)
    assert resumed.trajectories[0].outcome is Outcome.COMPLETED


def test_resume_without_announcing_the_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def act(resume: bool, version: int | None) -> RolloutBatch:
        async with rollout.open_rollout(config_of(path), [add], resume=resume) as runtime:
            if version is not None:
                source = rollout.DiskWeights(path=str(tmp_path))
                await runtime.update_weights(version=version, source=source)
            return await runtime.generate(prompts("quick"), step=len(path.read_bytes()))

    run_virtual(act, False, 8)
    with pytest.raises(ConfigError) as refused:
        run_virtual(act, True, None)
    assert str(refused.value) == (
        f"journal.path = {str(path)!r}: its last tokens are of weights of version 8, the engines "
        "have version 0; announce the weights to continue with: update_weights(version=8, "
        "source=...)"
    )
    batch = run_virtual(act, True, 8)
    assert set(batch.trajectories[0].transcript.weight_versions().tolist()) == {-1, 8}
