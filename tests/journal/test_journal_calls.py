"""What each call had comes back in that call, whatever else the run did beside and between."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

import rollout
from journal_material import records_in
from rollout import (
    Group,
    GroupPolicy,
    JournalError,
    Outcome,
    Prompt,
    RolloutConfig,
)
from rollout.config import AgentConfig, JournalConfig, LimitsConfig, SchedulingConfig
from rollout.journal.records import DeliveredRecord
from rollout.testing import Scenario, run_virtual, tool_call

SCENARIO = (
    Scenario(seed=1)
    .reply("slow", "word " * 60)
    .reply("pick", tool_call("pick"))
    .then("the end")
    .reply("", "at once", filler={"median": 40, "sigma": 1.0, "max": 300})
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def config(
    path: Path, agent: str = "tool_agent", scenario: Scenario = SCENARIO, **scheduling: Any
) -> RolloutConfig:
    return scenario.config(
        agent=AgentConfig(name=agent),
        journal=JournalConfig(path=str(path)),
        scheduling=SchedulingConfig(**{"samples_per_prompt": 2, **scheduling}),
        seed=5,
    )


def user(text: str, uid: str) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], uid=uid)


def loader(*slow: int) -> Iterator[Prompt]:
    for at in range(60):
        yield user("slow" if at in slow else f"go {at}", f"p{at}")


def uids(batch: Any) -> list[str]:
    return [each.uid for each in batch.trajectories if each.member == 0]


def sampled(runtime: Any) -> int:
    return sum(each.tokens.arrived for each in runtime.statistics().replicas)


def test_two_collects_at_once_get_their_own_batches_again(tmp_path: Path) -> None:
    policy = GroupPolicy(oversample=3.0, surplus="carry")

    def ran(*, resume: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def act() -> None:
            source = loader()
            async with rollout.open_rollout(config(tmp_path / "j"), resume=resume) as runtime:

                async def one(step: int) -> None:
                    batch = await runtime.collect(source, 3, policy=policy, step=step)
                    found[str(step)] = [each.transcript.ids_bytes() for each in batch.trajectories]

                for first in (0, 2):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(one, first)
                        tasks.start_soon(one, first + 1)

        run_virtual(act)
        return found

    first = ran(resume=False)
    assert ran(resume=True) == first


def collected(path: Path, source: Iterator[Prompt], *, resume: bool, **options: Any) -> Any:
    """Two steps: their rows, and how many tokens were sampled."""
    policies, groups = options.pop("policies"), options.pop("groups")
    rows: list[Any] = []

    async def act() -> None:
        scenario = options.pop("scenario", SCENARIO)
        own = config(path, options.pop("agent", "single_turn"), scenario, max_in_flight=8)
        async with rollout.open_rollout(own, resume=resume, **options) as runtime:
            for step, policy in enumerate(policies):
                batch = await runtime.collect(source, groups, policy=policy, step=step)
                rows.append([(t.uid, t.member, t.outcome, t.reason) for t in batch.trajectories])
            rows.append(sampled(runtime))

    run_virtual(act)
    return rows


DROP = GroupPolicy(group_s=1.0, on_group_deadline="drop")
KEEP = GroupPolicy(oversample=2.0, group_s=1.0, on_group_deadline="keep")
DONE, CUT_OFF = (Outcome.COMPLETED, ""), (Outcome.DEADLINE, "group")


@pytest.mark.parametrize(
    ("policy", "groups", "slow", "ends"),
    [
        pytest.param(DROP, 3, [1], [[DONE] * 4] * 2, id="returned_one_group_less"),
        pytest.param(DROP, 2, [0, 1], [[], [DONE] * 2], id="returned_nothing"),
        # Of two that were cut off, the other is for a call that would drop it.
        pytest.param(KEEP, 1, [0, 1], [[CUT_OFF] * 2] * 2, id="kept_what_the_next_would_drop"),
    ],
)
def test_collect_whose_groups_met_their_deadline_gives_the_same_again(
    tmp_path: Path, policy: GroupPolicy, groups: int, slow: list[int], ends: list[Any]
) -> None:
    given: dict[str, Any] = {"policies": [policy, DROP], "groups": groups}
    source = loader(*slow)
    first = collected(tmp_path / "j", source, resume=False, **given)
    assert [[row[2:] for row in rows] for rows in first[:2]] == ends
    following = next(source)
    for _ in range(2):
        source = loader(*slow)
        again = collected(tmp_path / "j", source, resume=True, **given)
        assert again[:2] == first[:2]
        assert again[2] == 0
        assert next(source) == following


def test_collect_has_written_what_it_gave_when_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "j"
    policy = GroupPolicy(oversample=4.0, surplus="carry")

    async def act() -> None:
        scenario = Scenario(seed=1).reply("", filler={"median": 60, "sigma": 1.2, "max": 600})
        own = config(path, "single_turn", scenario.timing(base_s=0.002), max_in_flight=8)
        async with rollout.open_rollout(own) as runtime:
            taken = uids(await runtime.collect(loader(), 2, policy=policy, step=0))
            died = path.with_name("died")
            died.write_bytes(path.read_bytes())
        marks = [each for each in records_in(died) if isinstance(each, DeliveredRecord)]
        given = [(each.delivered_in, sorted({key.uid for key in each.keys})) for each in marks]
        assert given == [((0, 0), sorted(taken))]
        again = config(died, "single_turn", scenario.timing(base_s=0.002), max_in_flight=8)
        async with rollout.open_rollout(again, resume=True) as runtime:
            assert uids(await runtime.collect(loader(), 2, policy=policy, step=0)) == taken

    anyio.run(act, backend="asyncio")


def test_collect_that_cannot_write_what_it_gives_ends_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups had ended in the call before: nothing else of them is to be written."""
    write, full = os.write, [False]

    def written(descriptor: int, parts: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, parts)

    monkeypatch.setattr(os, "write", written)
    scenario = Scenario(seed=1).reply("", "at once", filler=5).timing(base_s=0.01)
    own = config(tmp_path / "j", "single_turn", scenario)
    own = attrs.evolve(own, limits=LimitsConfig(batch_s=30.0))
    policy = GroupPolicy(oversample=2.0, surplus="carry")

    async def act(*, resume: bool) -> list[list[str]]:
        source, given = loader(), []
        async with rollout.open_rollout(own, resume=resume) as runtime:
            for step in range(3):
                if step == 1 and not resume:
                    full[0] = True
                    with pytest.raises(JournalError, match="No space left on device") as failed:
                        await runtime.collect(source, 2, policy=policy, step=step)
                    full[0], batch = False, failed.value.partial
                else:
                    batch = await runtime.collect(source, 2, policy=policy, step=step)
                given.append(uids(batch))
        return given

    first = run_virtual(lambda: act(resume=False))
    assert len({uid for each in first for uid in each}) == 6
    assert run_virtual(lambda: act(resume=True)) == first


class Source:
    """Endless prompts that name it; `count` were pulled."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        uid = f"{self.name}{self.count}"
        self.count += 1
        return user("slow" if self.count % 3 == 1 else f"go {uid}", uid)


def test_collects_of_one_step_from_two_sources_get_their_own_groups_again(tmp_path: Path) -> None:
    async def act(steps: int) -> list[tuple[list[str], int]]:
        sources, given = (Source("a"), Source("b")), []
        own = config(tmp_path / "j", "single_turn")
        async with rollout.open_rollout(own, resume=True) as runtime:
            for step in range(steps):
                for source in sources:
                    batch = await runtime.collect(source, 2, step=step)
                    given.append((uids(batch), source.count))
        return given

    expected = [
        ([f"{name}{2 * step}", f"{name}{2 * step + 1}"], 2 * step + 2)
        for step in range(3)
        for name in "ab"
    ]
    for steps in (2, 3, 3):
        assert run_virtual(act, steps) == expected[: 2 * steps]


def test_calls_of_one_step_from_one_source_get_their_own_groups_again(tmp_path: Path) -> None:
    policy = GroupPolicy(oversample=2.0, surplus="carry")

    async def act() -> tuple[list[list[str]], int, int]:
        source, given = Source("p"), []
        own = config(tmp_path / "j", max_in_flight=16)
        async with rollout.open_rollout(own, resume=True) as runtime:
            given.append(uids(await runtime.collect(source, 3, policy=policy, step=0)))
            given.append(uids(await runtime.collect(source, 1, policy=policy, step=0)))
            async with runtime.stream_groups(source, policy=policy, step=0) as groups:
                given.append([(await anext(groups)).uid for _ in range(2)])
            return given, source.count, sampled(runtime)

    *first, tokens = run_virtual(act)
    assert len({uid for each in first[0] for uid in each}) == 6
    assert tokens > 0
    assert run_virtual(act) == (*first, 0)


def test_collect_that_was_cancelled_and_made_again_is_one_call_to_a_resumption(
    tmp_path: Path,
) -> None:
    async def act(after_s: float) -> list[tuple[list[str], int]]:
        source, given = Source("p"), []
        async with rollout.open_rollout(config(tmp_path / "j"), resume=True) as runtime:
            while len(given) < 3:
                with anyio.move_on_after(after_s):
                    batch = await runtime.collect(source, 2, step=len(given))
                    given.append((uids(batch), source.count))
                after_s = math.inf
        return given

    first = run_virtual(act, 0.1)
    assert len({uid for each, _ in first for uid in each}) == 6
    assert run_virtual(act, math.inf) == first


def epoch(step: int) -> list[Prompt]:
    """The list of a step: of six prompts, that come again and again, three."""
    return [user(f"go {at}", f"p{at}") for at in range(3 * (step % 2), 3 * (step % 2) + 3)]


def test_lists_of_steps_come_again_in_later_epochs_after_a_resumption(tmp_path: Path) -> None:
    given = config(tmp_path / "j", agent="single_turn", samples_per_prompt=1)

    def ran(steps: range, *, resume: bool) -> None:
        async def act() -> None:
            async with rollout.open_rollout(given, resume=resume) as runtime:
                for step in steps:
                    batch = await runtime.collect(epoch(step), 3, step=step)
                    assert uids(batch) == [each.uid for each in epoch(step)]

        run_virtual(act)

    ran(range(3), resume=False)
    ran(range(3, 8), resume=True)


def test_stream_polled_with_cancellation_loses_no_group_to_its_journal(tmp_path: Path) -> None:
    fast = Scenario(seed=1).reply("", filler=5).timing(base_s=0.001, slope_s=0.0)
    given = config(tmp_path / "j", "single_turn", fast)
    names = [f"p{at}" for at in range(3)]

    async def act() -> list[str]:
        got: list[str] = []
        async with rollout.open_rollout(given) as runtime:
            async with runtime.stream_groups([user("go", name) for name in names]) as groups:
                group: Group | None = None
                while True:
                    with anyio.move_on_after(0) as scope:
                        group = await groups.receive()
                    if scope.cancelled_caught:
                        await anyio.sleep(0.001)
                    elif group is None:
                        break
                    else:
                        got.append(group.uid)
            assert groups.metrics()["groups/accepted"] == len(got)
        return got

    assert sorted(anyio.run(act, backend="asyncio")) == names
    delivered = [e for e in records_in(tmp_path / "j") if isinstance(e, DeliveredRecord)]
    assert len(delivered) == len(names)


def test_resumption_that_has_everything_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    given = [user("a", "a"), user("b", "b")]

    async def act(*, resume: bool) -> None:
        async with rollout.open_rollout(config(path), resume=resume) as runtime:
            await runtime.generate(given, step=0)
            await runtime.generate(given, step=0, validate=True)
            async with runtime.stream(given, step=1) as trajectories:
                _ = [each async for each in trajectories]
            await runtime.collect(loader(), 2, step=2)

    run_virtual(lambda: act(resume=False))
    whole = path.read_bytes()
    run_virtual(lambda: act(resume=True))
    assert path.read_bytes() == whole


def test_stream_that_was_opened_twice_in_its_step_is_resumed_by_one_without_a_gap(
    tmp_path: Path,
) -> None:
    scenario = Scenario(seed=1).reply("", "at once", filler=20).timing(base_s=0.01, slope_s=0.0)
    own = config(tmp_path / "j", scenario=scenario, max_in_flight=4)

    async def act(*counts: int) -> list[str]:
        source, given = loader(), []
        async with rollout.open_rollout(own, resume=True) as runtime:
            for count in counts:
                async with runtime.stream_groups(source, step=0) as groups:
                    given.extend([(await anext(groups)).uid for _ in range(count)])
        return given

    first = run_virtual(act, 2, 4)
    for counts in ([12], [3, 9]):
        again = run_virtual(act, *counts)
        assert again[:2] == first[:2]
        assert sorted(again) == sorted(f"p{at}" for at in range(sum(counts)))
