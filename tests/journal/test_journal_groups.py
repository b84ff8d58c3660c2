"""The journal of groups: what a call had comes back in it, and what was left is continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from journal_material import add, content, cut, record_ends, records_in
from rollout import Group, GroupPolicy, Prompt, RolloutConfig, Trajectory
from rollout.config import AgentConfig, JournalConfig, SchedulingConfig
from rollout.errors import SourceEnded
from rollout.journal.index import read_journal
from rollout.journal.records import EndRecord, TurnRecord
from rollout.testing import Scenario, run_virtual, tool_call

SCENARIO = (
    Scenario(seed=1)
    .reply("slow", tool_call("add", a=1, b=1), filler=20)
    .then("word " * 80)
    .reply("", tool_call("add", a=1, b=1), filler=20)
    .then("the end")
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)
#: Not each record: openings take their time.
STRIDE = 13
CARRY = GroupPolicy(oversample=2.0, surplus="carry")


def config_of(path: Path, **scheduling: Any) -> RolloutConfig:
    return SCENARIO.config(
        agent=AgentConfig(name="tool_agent"),
        journal=JournalConfig(path=str(path)),
        scheduling=SchedulingConfig(**{"samples_per_prompt": 2, "max_in_flight": 64, **scheduling}),
        seed=5,
    )


def loader(start: int = 0) -> Iterator[Prompt]:
    """Endless; every third prompt is slow."""
    number = start
    while True:
        text = f"slow {number}" if number % 3 == 0 else f"go {number}"
        yield Prompt(messages=[{"role": "user", "content": text}], uid=f"p{number}")
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


@pytest.mark.parametrize("policy", [None, CARRY])
def test_collect_resumed_at_every_record_gives_again_what_a_call_had(
    tmp_path: Path, policy: GroupPolicy | None
) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), [0, 1], policy=policy)
    for size in record_ends(path)[STRIDE::STRIDE]:
        half = cut(path, size)
        recorded, known = read_journal(half), records_in(half)
        had = {pull.delivered_in.step for pull in recorded.pulls.values() if pull.delivered_in}
        resumed = run(config_of(half), [0, 1], resume=True, policy=policy)
        if policy is None:
            turns = [each for each in known if isinstance(each, TurnRecord)]
            assert resumed.tokens == whole.tokens - sum(len(each.ids) // 4 for each in turns)
        for step, batch in enumerate(whole.batches):
            if step in had:
                assert resumed.batches[step] == batch
        uids = [uid for step in resumed.uids for uid in step]
        assert len(set(uids)) == len(uids) / 2 == 4
    again = run(config_of(path), [0, 1], resume=True, policy=policy)
    assert again.batches == whole.batches


def test_collect_resumed_leaves_the_source_where_it_stood(tmp_path: Path) -> None:
    config = config_of(tmp_path / "journal")
    pulled: list[int] = []  # after each step
    uids: list[list[str]] = []

    async def act(steps: int) -> None:
        seen = 0

        def source() -> Iterator[Prompt]:
            nonlocal seen
            for prompt in loader():
                seen += 1
                yield prompt

        prompts = source()
        async with rollout.open_rollout(config, [add], resume=True) as runtime:
            for step in range(steps):
                batch = await runtime.collect(prompts, 2, policy=CARRY, step=step)
                if step == len(pulled):
                    pulled.append(seen)
                    uids.append([each.uid for each in batch.trajectories[::2]])
                assert (seen, [each.uid for each in batch.trajectories[::2]]) == (
                    pulled[step],
                    uids[step],
                )

    for steps in (2, 4):
        run_virtual(partial(act, steps))
    assert len({uid for step in uids for uid in step}) == 2 * len(uids)


def test_collect_resumed_continues_what_was_carried_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    at_once = run(config_of(tmp_path / "one"), [0, 1])
    first = run(config_of(path), [0])
    assert first.uids == [["p1"] * 2 + ["p2"] * 2]
    second = run(config_of(path), [1], loader(4), resume=True)
    assert at_once.uids[1] == second.uids[0] == ["p0"] * 2 + ["p3"] * 2
    ids = [[each["ids"] for each in ran.batches[-1]] for ran in (at_once, second)]
    assert ids[0] == ids[1]
    assert second.statistics.returned + second.statistics.continued > 0
    third = run(config_of(path), [2], loader(4), resume=True)
    assert not set(third.uids[0]) & {uid for ran in (first, second) for uid in ran.uids[0]}


def ranked(group: Group) -> list[float | None]:
    RANKED.append(group.uid)
    return [float(each.transcript.generated_length) for each in group.trajectories]


RANKED: list[str] = []


def test_group_reward_of_a_recorded_group_is_not_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = run(config_of(path), [0, 1], policy=None, group_reward=ranked)
    assert all(each["reward"] for batch in whole.batches for each in batch)
    for size in record_ends(path)[STRIDE::STRIDE]:
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
    for size in record_ends(path)[STRIDE::STRIDE]:
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


def test_collect_resumed_gives_what_it_gave_whatever_accept_says_now(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def fast(group: Group) -> bool:
        return not group.uid.endswith(("0", "3"))

    policy = GroupPolicy(accept=fast)
    whole = run(config_of(path), [0], policy=policy)
    assert whole.uids == [["p1", "p1", "p2", "p2"]]
    asked: list[str] = []
    policy = GroupPolicy(accept=lambda group: asked.append(group.uid) or False)
    second = run(config_of(path), [0, 1], resume=True, policy=policy)
    assert second.uids == [*whole.uids, ["p3", "p3", "p4", "p4"]]
    assert asked == []


def epochs(path: Path, *, resume: bool = False) -> list[list[str]]:
    """The uids of four steps, after "ended" where the source, a list of six, had ended."""
    source, found = list(islice(loader(), 6)), []

    async def act() -> None:
        async with rollout.open_rollout(config_of(path), [add], resume=resume) as runtime:
            for step in range(4):
                told: list[str] = []
                try:
                    batch: Any = await runtime.collect(source, 4, step=step)
                except SourceEnded as error:
                    batch, told = error.partial, ["ended"]
                found.append([*told, *(each.uid for each in batch.trajectories[::2])])

    run_virtual(act)
    return found


def test_call_that_ended_with_its_source_does_so_again_with_the_same_groups(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    whole = epochs(path)
    assert whole == [["p0", "p1", "p2", "p3"], ["ended", "p4", "p5"]] * 2
    for size in record_ends(path)[60::60]:
        assert epochs(cut(path, size), resume=True) == whole


def test_stream_resumed_pulls_nothing_before_its_consumer_wants_more(tmp_path: Path) -> None:
    async def act(steps: int) -> list[list[str]]:
        prompts, found = loader(1), []
        config = config_of(tmp_path / "journal", max_in_flight=2)
        async with rollout.open_rollout(config, [add], resume=True) as runtime:
            for step in range(steps):
                async with runtime.stream_groups(prompts, step=step) as groups:
                    found.append([(await anext(groups)).uid for _ in range(2)])
                await anyio.sleep(5)
        return found

    before = run_virtual(lambda: act(2))
    found = run_virtual(lambda: act(4))
    assert found[:2] == before
    assert sorted(uid for step in found for uid in step) == sorted(f"p{at}" for at in range(1, 9))
