"""The journal of groups: what a call had comes back in it, and what was left is continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import pytest

import rollout
from journal_material import add, content, cut, record_ends, records_in
from rollout import AgentLoop, Group, GroupPolicy, Prompt, PromptError, RolloutConfig, Trajectory
from rollout.config import AgentConfig, JournalConfig, SchedulingConfig
from rollout.errors import RolloutError
from rollout.journal.call_log import CallLog
from rollout.journal.index import read_journal
from rollout.journal.records import EndRecord, TurnRecord
from rollout.runtime.collation import Collation
from rollout.testing import Scenario, run_virtual, tool_call
from rollout.types import Message

SCENARIO = (
    Scenario(seed=1)
    .reply("slow", tool_call("add", a=1, b=1), filler=20)
    .then("word " * 200)
    .reply("", tool_call("add", a=1, b=1), filler=20)
    .then("the end")
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)
#: Not each record: openings take their time.
STRIDE = 5
CARRY = GroupPolicy(oversample=2.0, surplus="carry")
CANCEL = GroupPolicy(oversample=2.0, surplus="cancel")


def config_of(path: Path, **scheduling: Any) -> RolloutConfig:
    return SCENARIO.config(
        agent=AgentConfig(name="tool_agent"),
        journal=JournalConfig(path=str(path)),
        scheduling=SchedulingConfig(samples_per_prompt=2, **scheduling),
        seed=5,
    )


def loader(start: int = 0, *, has_uids: bool = True) -> Iterator[Prompt]:
    """Endless; every third prompt is slow."""
    number = start
    while True:
        text = f"slow {number}" if number % 3 == 0 else f"go {number}"
        uid = f"p{number}" if has_uids else None
        yield Prompt(messages=[{"role": "user", "content": text}], uid=uid)
        number += 1


class Run:
    """What the steps of one process gave, and how many tokens engines sampled for it."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.uids: list[list[str]] = []
        self.tokens = 0
        self.statistics: Any = None


def run(
    config: RolloutConfig,
    steps: Sequence[int],
    source: Iterator[Prompt] | None = None,
    *,
    resume: bool = False,
    policy: GroupPolicy | None = CARRY,
    group_reward: Any = None,
    reward: Any = None,
) -> Run:
    given, ran = source or loader(), Run()

    async def act() -> None:
        async with rollout.open_rollout(
            config, [add], reward, group_reward=group_reward, resume=resume
        ) as runtime:
            for step in steps:
                own = policy if step == 0 else None
                batch = await runtime.collect(given, 2, policy=own, step=step)
                ran.batches.append([content(each) for each in batch.trajectories])
                ran.uids.append([each.uid for each in batch.trajectories])
            statistics = runtime.statistics()
            ran.tokens = sum(each.tokens.arrived for each in statistics.replicas)
            ran.statistics = statistics.journal

    run_virtual(act)
    return ran


@pytest.mark.parametrize("policy", [None, CARRY, CANCEL])
def test_collect_resumed_at_every_record_gives_again_what_a_call_had(
    tmp_path: Path, policy: GroupPolicy | None
) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), [0, 1], policy=policy)
    for size in record_ends(path)[::STRIDE]:
        half = cut(path, size)
        recorded = read_journal(half)
        had = {pull.delivered_in for pull in recorded.pulls.values()}
        resumed = run(config_of(half), [0, 1], resume=True, policy=policy)
        for step, batch in enumerate(whole.batches):
            if step in had:
                assert resumed.batches[step] == batch
        uids = [uid for step in resumed.uids for uid in step]
        assert len(set(uids)) == len(uids) / 2 == 4
    again = run(config_of(path), [0, 1], resume=True, policy=policy)
    assert again.batches == whole.batches


@pytest.mark.parametrize("has_uids", [True, False])
def test_collect_resumed_continues_what_was_carried_before_anything_else(
    tmp_path: Path, has_uids: bool
) -> None:
    path = tmp_path / "journal"
    at_once = run(config_of(tmp_path / "one"), [0, 1], loader(has_uids=has_uids))
    first = run(config_of(path), [0], loader(has_uids=has_uids))
    name = "p{}" if has_uids else "prompt-{}"
    assert first.uids == [[name.format(1)] * 2 + [name.format(2)] * 2]
    sampled = sum(len(e.ids) // 4 for e in records_in(path) if isinstance(e, TurnRecord))
    second = run(config_of(path), [1], loader(4, has_uids=has_uids), resume=True)
    assert at_once.uids[1] == second.uids[0] == [name.format(0)] * 2 + [name.format(3)] * 2
    ids = [[each["ids"] for each in ran.batches[-1]] for ran in (at_once, second)]
    assert ids[0] == ids[1]
    assert sampled
    assert second.statistics.returned + second.statistics.continued > 0
    third = run(config_of(path), [2], loader(4, has_uids=has_uids), resume=True)
    assert not set(third.uids[0]) & {uid for ran in (first, second) for uid in ran.uids[0]}


def test_collect_resumed_after_a_death_samples_no_recorded_turn_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), [0, 1], policy=None)
    for size in record_ends(path)[::STRIDE]:
        half = cut(path, size)
        known = records_in(half)
        sampled = sum(len(each.ids) // 4 for each in known if isinstance(each, TurnRecord))
        resumed = run(config_of(half), [0, 1], resume=True, policy=None)
        assert resumed.batches == whole.batches
        assert resumed.tokens == whole.tokens - sampled


def ranked(group: Group) -> list[float | None]:
    RANKED.append(group.uid)
    return [float(each.transcript.generated_length) for each in group.trajectories]


RANKED: list[str] = []


def test_group_reward_of_a_recorded_group_is_not_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), [0, 1], policy=None, group_reward=ranked)
    assert all(each["reward"] for batch in whole.batches for each in batch)
    for size in record_ends(path)[::STRIDE]:
        half = cut(path, size)
        ended = {k.uid for k, each in read_journal(half).trajectories.items() if each.end}
        RANKED.clear()
        resumed = run(config_of(half), [0, 1], resume=True, policy=None, group_reward=ranked)
        assert resumed.batches == whole.batches
        assert sorted({*RANKED, *ended}) == ["p0", "p1", "p2", "p3"]
        assert not ended & {*RANKED}


def test_rewarded_group_that_is_carried_is_in_the_journal_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    alike = (each for each in loader() if int((each.uid or "p0")[1:]) % 3)  # they end together
    run(config_of(path), [0, 1], alike, policy=CARRY, group_reward=ranked)
    records = [each for each in records_in(path) if isinstance(each, EndRecord)]
    ended = [key for each in records for key, _ in each.ends]
    assert Counter(each.uid for each in ended) == {"p1": 2, "p2": 2, "p4": 2, "p5": 2}
    assert {each.step for each in ended} == {0}


def test_generate_with_a_group_reward_is_resumed_group_by_group(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    source = loader()
    given = [next(source) for _ in range(4)]

    def generated(at: Path, resume: bool) -> list[dict[str, Any]]:
        async def act() -> list[Trajectory]:
            async with rollout.open_rollout(
                config_of(at), [add], group_reward=ranked, resume=resume
            ) as runtime:
                return list((await runtime.generate(given)).trajectories)

        return [content(each) for each in run_virtual(act)]

    whole = generated(path, False)
    for size in record_ends(path)[::STRIDE]:
        half = cut(path, size)
        ended = {k.uid for k, each in read_journal(half).trajectories.items() if each.end}
        RANKED.clear()
        assert generated(half, True) == whole
        assert sorted([*RANKED, *ended]) == ["p0", "p1", "p2", "p3"]


def test_stream_groups_resumed_yields_what_it_had_yielded_first(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def streamed(at: Path, count: int, resume: bool) -> list[Group]:
        async def act() -> list[Group]:
            found = []
            async with (
                rollout.open_rollout(config_of(at), [add], resume=resume) as runtime,
                runtime.stream_groups(loader(), policy=CARRY, step=3) as groups,
            ):
                async for group in groups:
                    found.append(group)
                    if len(found) == count:
                        break
            return found

        return run_virtual(act)

    first = streamed(path, 3, False)
    again = streamed(path, 5, True)
    names = [group.uid for group in first]
    assert {group.uid for group in again[:3]} == set(names)
    told = {group.uid: [content(each) for each in group.trajectories] for group in again}
    for group in first:
        assert [content(each) for each in group.trajectories] == told[group.uid]
    assert len(told) == 5


@pytest.mark.slow
def test_streamed_groups_have_the_numbers_again_that_they_had(tmp_path: Path) -> None:
    """Those that were begun before them, and were not taken, begin again in the next step."""
    path = tmp_path / "journal"

    def streamed(resume: bool) -> list[tuple[str, int, int]]:
        async def act() -> list[tuple[str, int, int]]:
            found, source = [], loader()
            async with rollout.open_rollout(config_of(path), [add], resume=resume) as runtime:
                for step in range(3):
                    async with runtime.stream_groups(source, policy=CANCEL, step=step) as groups:
                        async for group in groups:
                            found += [(t.uid, t.member, t.group) for t in group.trajectories]
                            break
            return found

        return run_virtual(act)

    first = streamed(resume=False)
    numbers = {uid: number for uid, _, number in first}
    assert numbers == {uid: int(uid[1:]) for uid in numbers}
    assert len(numbers) == 3
    for _ in range(2):
        assert streamed(resume=True) == first


def test_collect_of_refused_groups_is_not_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def fast(group: Group) -> bool:
        return not group.uid.endswith(("0", "3"))

    policy = GroupPolicy(accept=fast)
    whole = run(config_of(path), [0], policy=policy)
    assert whole.uids == [["p1", "p1", "p2", "p2"]]
    second = run(config_of(path), [0, 1], resume=True)
    assert second.uids == [*whole.uids, ["p3", "p3", "p4", "p4"]]


def test_collect_of_a_prompt_that_cannot_be_written_is_refused_by_field(tmp_path: Path) -> None:
    given = iter([Prompt(messages=[{"role": "user", "content": "go"}], extra={"x": object()})])
    with pytest.raises(PromptError, match=r"source: prompt 0\.extra\['x'\] is a object; expected"):
        run(config_of(tmp_path / "journal"), [0], given)


@pytest.mark.parametrize("has_uids", [True, False])
def test_second_source_resumed_gives_each_of_its_prompts_once(
    tmp_path: Path, has_uids: bool
) -> None:
    path = tmp_path / "journal"

    def six(step: int) -> Iterator[Prompt]:
        return islice(loader(10 * step, has_uids=has_uids), 6)

    def streamed(resume: bool) -> list[str]:
        async def act() -> list[str]:
            asked = []
            async with rollout.open_rollout(config_of(path), [add], resume=resume) as runtime:
                for step in range(2):
                    async with runtime.stream_groups(six(step), policy=CARRY, step=step) as groups:
                        taken = 0
                        async for group in groups:
                            asked.append(group.prompt.messages[0]["content"])
                            taken += 1
                            if step == 1 and taken == 2 and not resume:
                                return asked
            return asked

        return run_virtual(act)

    assert len(streamed(False)) == 8
    given = [each.messages[0]["content"] for step in range(2) for each in six(step)]
    assert sorted(streamed(True)) == sorted(given)


def test_prompt_begun_again_after_a_resumption_has_no_tokens_of_its_first_beginning(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path / "journal", max_in_flight=4)
    config = attrs.evolve(config, agent=AgentConfig(name="in_turn"))
    begun: Counter[str] = Counter()
    late: set[int] = set()

    @rollout.register_agent("in_turn")
    class InTurn(AgentLoop):
        async def run(self, context: Any) -> None:
            uid = context.prompt.uid
            begun[uid] += 1
            if uid == "p0" and begun[uid] in late:
                await anyio.sleep(5.0)
            await context.generate()

    def streamed(late_ones: set[int], last: str, *, resume: bool = True) -> dict[str, list[bytes]]:
        """What step 1 gives up to this group; so many beginnings of p0 come late in the process."""
        found: dict[str, list[bytes]] = {}
        begun.clear()
        late.clear()
        late.update(late_ones)

        async def act() -> None:
            async with rollout.open_rollout(config, [add], resume=resume) as runtime:
                source = loader()
                for step, end in enumerate(("p1", last)):
                    async with runtime.stream_groups(source, step=step) as groups:
                        async for group in groups:
                            if step:
                                ids = [t.transcript.ids_bytes() for t in group.trajectories]
                                found[group.uid] = ids
                            await anyio.sleep(1.0)
                            if group.uid == end:
                                break

        run_virtual(act)
        return found

    streamed({2, 4}, "p2", resume=False)  # p0 is under way in both steps, and its first member ends
    had = streamed({1}, "p0")  # step 0 takes it from the journal, and cancels it
    again = streamed(set(), "p0")
    assert again["p0"] == had["p0"]
    records = [e for e in records_in(tmp_path / "journal") if isinstance(e, EndRecord)]
    keys = [key for each in records for key, _ in each.ends]
    assert len(keys) == len({*keys})


def test_uid_of_a_refused_group_that_comes_again_after_a_resumption_is_another_group(
    tmp_path: Path,
) -> None:
    def is_fast(group: Group) -> bool:
        return "slow" not in group.prompt.messages[0]["content"]

    def source() -> Iterator[Prompt]:
        for uid, text in (("same", "slow"), ("b", "go"), ("c", "go"), ("same", "go"), ("d", "go")):
            yield Prompt(messages=[{"role": "user", "content": text}], uid=uid)

    path, policy = tmp_path / "journal", GroupPolicy(accept=is_fast)
    first = run(config_of(path), [0], source(), policy=policy)
    assert first.uids == [["b", "b", "c", "c"]]
    second = run(config_of(path), [0, 0], source(), resume=True, policy=policy)
    assert second.uids == [*first.uids, ["same", "same", "d", "d"]]


def test_order_of_groups_given_again_is_not_that_of_a_validation_of_the_same_names(
    tmp_path: Path,
) -> None:
    def both(*, resume: bool) -> Any:
        async def act() -> Any:
            async with rollout.open_rollout(
                config_of(tmp_path / "j"), [add], resume=resume
            ) as runtime:
                given = list(islice(loader(), 3))
                batch = await runtime.collect(iter(given), 3, step=0)
                await runtime.generate(given[::-1], step=0, validate=True)
                return [each.uid for each in batch.trajectories]

        return run_virtual(act)

    first = both(resume=False)
    assert first != first[::-1]
    assert both(resume=True) == first


def test_messages_of_groups_that_are_resumed_are_what_their_source_gave(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def given() -> Iterator[Prompt]:
        for each in loader():
            content = each.messages[0]["content"]  # type: ignore[index]
            yield msgspec.structs.replace(each, messages=[Message(role="user", content=content)])

    async def reward(trajectory: Trajectory) -> float:
        assert trajectory.prompt is not None
        (message,) = trajectory.prompt.messages
        assert isinstance(message, Message)
        return float(len(message.content or ""))

    whole = run(config_of(path), [0, 1], given(), reward=reward)
    for size in record_ends(path)[::STRIDE]:
        resumed = run(config_of(cut(path, size)), [0, 1], given(), resume=True, reward=reward)
        rows = [row for batch in resumed.batches for row in batch]
        assert {row["outcome"] for row in rows} == {"completed"}
        assert all(type(row["prompt"].messages[0]) is Message for row in rows)
    assert len(whole.batches) == 2


def closed_after(seconds: float, config: RolloutConfig, take: Any) -> RolloutError:
    """What a call of groups ends with whose runtime another task closes after that time."""

    async def call(runtime: rollout.RolloutRuntime, errors: list[RolloutError]) -> None:
        try:
            await take(runtime)
        except RolloutError as error:
            errors.append(error)

    async def main() -> RolloutError:
        errors: list[RolloutError] = []
        async with anyio.create_task_group() as tasks:
            async with rollout.open_rollout(config, [add]) as runtime:
                tasks.start_soon(call, runtime, errors)
                await anyio.sleep(seconds)
        return errors[0]

    return run_virtual(main, ceiling_s=1000.0)


def test_collect_that_lays_its_batch_out_as_the_runtime_is_closed_does_not_wait_for_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(*args: Any, **keywords: Any) -> Any:
        await anyio.sleep(60.0)
        return await batch(*args, **keywords)

    batch, config = Collation.batch, config_of(tmp_path / "journal")
    monkeypatch.setattr(Collation, "batch", slowly)
    error = closed_after(50.0, config, lambda runtime: runtime.collect(loader(), 1, step=0))
    assert str(error) == "the runtime was closed, and its journal with it"
    assert error.partial is not None
    assert {sample.uid for sample in error.partial.samples} == {"p0"}
    monkeypatch.undo()
    assert run(config, [0], resume=True, policy=None).uids[0][:2] == ["p0", "p0"]


@pytest.mark.slow
def test_stream_of_groups_on_a_full_disk_ends_with_its_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def take(runtime: rollout.RolloutRuntime) -> None:
        async with runtime.stream_groups(loader()) as groups:
            await anyio.sleep(20.0)
            monkeypatch.setattr("os.write", refuse)
            async for _ in groups:
                pass

    error = closed_after(50.0, config_of(tmp_path / "journal"), take)
    assert str(error) == "the runtime was closed while this call was running"


def test_task_that_waits_for_a_group_gets_the_one_that_another_is_cancelled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def source() -> AsyncIterator[Prompt]:
        yield next(loader())
        await anyio.sleep(1000.0)

    async def slowly(*args: Any) -> Any:
        await anyio.sleep(5.0)
        return await wait(*args)

    async def main() -> None:
        async with (
            rollout.open_rollout(config_of(tmp_path / "journal"), [add]) as runtime,
            runtime.stream_groups(source()) as groups,
            anyio.create_task_group() as tasks,
        ):

            async def take(seconds: float, expected: list[str]) -> None:
                with anyio.move_on_after(seconds):
                    found.append((await anext(groups)).uid)
                assert found == expected

            await anyio.sleep(20.0)
            tasks.start_soon(take, 3.0, [])
            await anyio.sleep(1.0)
            tasks.start_soon(take, 10.0, ["p0"])

    found: list[str] = []
    wait = CallLog.wait_written
    monkeypatch.setattr(CallLog, "wait_written", slowly)
    run_virtual(main)
