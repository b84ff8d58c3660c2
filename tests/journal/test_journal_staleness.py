"""The age of groups that a resumption continues: that of the oldest weights that sampled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from test_journal_groups import CARRY, config_of, loader
from test_journal_groups import run as collected

import rollout
from journal_material import add, content, records_in
from rollout import Group, Outcome, Trajectory
from rollout.engine import DiskWeights
from rollout.journal.records import TurnRecord
from rollout.testing import run_virtual

#: Carried by the first process: each has one recorded turn, before a long one.
SLOW = ["p0", "p3"]


@attrs.define
class Streamed:
    """What a stream gave.

    Attributes:
        groups: In the order in which they were taken.
        ages: By how many versions the weights were newer than the oldest ones of each then.
        restarted: Carried groups that began again.
        statistics: Of the journal.
    """

    groups: list[Group] = attrs.field(factory=list)
    ages: list[int] = attrs.field(factory=list)
    restarted: int = 0
    statistics: Any = None

    @property
    def uids(self) -> list[str]:
        return [group.uid for group in self.groups]

    def named(self, uid: str) -> Group:
        return next(group for group in self.groups if group.uid == uid)


def streamed(
    path: Path, version: int, count: int, *, step: int = 1, start: int = 4, resume: bool = True
) -> Streamed:
    """A stream of a process that begins with these weights; the version rises for each 2 groups.

    Its source stands at `start`: where step 0 of another process has left it.
    """
    told = Streamed()

    async def act() -> None:
        async with rollout.open_rollout(config_of(path), [add], resume=resume) as runtime:
            await runtime.update_weights(version=version, source=DiskWeights("."))
            async with runtime.stream_groups(
                loader(start), policy=CARRY, step=step, max_staleness=1, groups_per_step=2
            ) as groups:
                now = version
                async for group in groups:
                    assert group.min_version is not None
                    told.groups.append(group)
                    told.ages.append(now - group.min_version)
                    if len(told.groups) == count:
                        break
                    if len(told.groups) % 2 == 0:
                        now += 1
                        await runtime.update_weights(version=now, source=DiskWeights("."))
                told.restarted = int(groups.metrics()["groups/restarted"])
            told.statistics = runtime.statistics().journal

    run_virtual(act)
    return told


def runs_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Version and number of its sampled tokens, in order; those of one version together."""
    found: dict[int, int] = {}
    for span in trajectory.transcript.generated_spans():
        for version, count in span.versions:
            found[version] = found.get(version, 0) + count
    return list(found.items())


def carried(path: Path) -> dict[tuple[str, int], int]:
    """Have p0 and p3 carried by a process with weights 0; how many tokens are recorded of each."""
    assert collected(config_of(path), [0]).uids == [["p1", "p1", "p2", "p2"]]
    turns = [each for each in records_in(path) if isinstance(each, TurnRecord)]
    assert {version for each in turns for version, _ in each.versions} == {0}
    found = {(e.key.uid, e.key.member): len(e.ids) // 4 for e in turns if e.key.uid in SLOW}
    assert len(found) == 4
    return found


def test_carried_group_of_old_weights_begins_again_after_a_resumption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    carried(path)
    told = streamed(path, version=2, count=4)
    assert told.restarted == 2
    assert caplog.text.count("older than max_staleness allows") == 1
    assert max(told.ages) <= 1
    assert set(SLOW) <= set(told.uids)
    for group in told.groups:
        for trajectory in group.trajectories:
            assert trajectory.outcome is Outcome.COMPLETED
            assert min(version for version, _ in runs_of(trajectory)) >= 2
    assert told.statistics.continued == told.statistics.returned == 0


def test_carried_group_of_weights_that_are_new_enough_continues_from_its_recorded_tokens(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    recorded = carried(path)
    told = streamed(path, version=1, count=6)
    assert told.restarted == 0
    # The last version at which these can be taken is 1: before all others, though they are slow.
    assert sorted(told.uids[:2]) == SLOW
    assert told.ages[:2] == [1, 1]
    assert max(told.ages) == 1
    for uid in SLOW:
        for trajectory in told.named(uid).trajectories:
            had = recorded[uid, trajectory.member]
            rest = trajectory.transcript.generated_length - had
            assert runs_of(trajectory) == [(0, had), (1, rest)]
            versions = trajectory.transcript.weight_versions().tolist()
            assert [each for each in versions if each >= 0] == [0] * had + [1] * rest
            assert trajectory.generated_length == had + rest > had > 0
    assert told.statistics.continued == 4


def test_group_that_its_caller_had_is_given_again_however_old_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = streamed(path, version=0, count=2, start=0, resume=False)
    again = streamed(path, version=7, count=4, start=0)
    assert sorted(again.uids[:2]) == sorted(first.uids)
    for group in first.groups:
        said = [content(each) for each in group.trajectories]
        assert [content(each) for each in again.named(group.uid).trajectories] == said
    assert again.restarted == 2  # p0 and p3, which nobody had
    assert again.ages[:2] == [7, 7]
    assert max(again.ages[2:]) <= 1


def test_groups_that_the_journal_gives_again_leave_the_stream_its_budget(tmp_path: Path) -> None:

    async def act(version: int, count: int) -> list[int]:
        ages = []
        async with rollout.open_rollout(config_of(tmp_path / "j"), [add], resume=True) as runtime:
            await runtime.update_weights(version=version, source=DiskWeights("."))
            async with runtime.stream_groups(
                loader(1), step=0, max_staleness=1, groups_per_step=2
            ) as groups:
                for taken in range(1, count + 1):
                    with anyio.fail_after(600):
                        group = await anext(groups)
                    assert group.min_version is not None
                    ages.append(version - group.min_version)
                    if taken % 2 == 0:
                        version += 1
                        await runtime.update_weights(version=version, source=DiskWeights("."))
        return ages

    run_virtual(act, 1, 8)
    assert max(run_virtual(act, 5, 14)[8:]) <= 1
