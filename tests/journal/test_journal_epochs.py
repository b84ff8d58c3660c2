"""The journal of sources that end: what was told of their end, and the epochs after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from test_journal_groups import CARRY, config_of

import rollout
from journal_material import add, cut, record_ends
from rollout import GroupPolicy, Prompt, RolloutBatch, SourceEnded
from rollout.config import JournalConfig
from rollout.testing import run_virtual
from slow_cases import slow_but

#: Not each record: openings take their time.
STRIDE = 12
ENDED = ["ended", "p4", "p5"]


def six(*, has_uids: bool = True) -> list[Prompt]:
    """A list of prompts, every third of them slow."""
    texts = [f"{'go' if number % 3 else 'slow'} {number}" for number in range(6)]
    return [
        Prompt(messages=[{"role": "user", "content": text}], uid=f"p{at}" if has_uids else None)
        for at, text in enumerate(texts)
    ]


def collected(
    path: Path,
    steps: Sequence[int],
    *,
    resume: bool = False,
    has_uids: bool = True,
    policy: GroupPolicy | None = None,
) -> list[list[str]]:
    """The uids of each step, after "ended" where its source had ended."""
    source, found = six(has_uids=has_uids), []

    async def act() -> None:
        async with rollout.open_rollout(config_of(path), [add], resume=resume) as runtime:
            for step in steps:
                told = []
                try:
                    batch = await runtime.collect(source, 4, policy=policy, step=step)
                except SourceEnded as error:
                    batch, told = partial_of(error), ["ended"]
                found.append([*told, *(each.uid for each in batch.trajectories[::2])])

    run_virtual(act)
    return found


def partial_of(error: SourceEnded) -> RolloutBatch:
    assert error.partial is not None
    return error.partial


@pytest.mark.parametrize("has_uids", slow_but([True, False], True))
def test_call_that_ended_with_its_source_does_so_again_with_the_same_groups(
    tmp_path: Path, has_uids: bool
) -> None:
    path = tmp_path / "journal"
    steps = range(4)
    whole = collected(path, steps, has_uids=has_uids)
    assert [uids[0] == "ended" for uids in whole] == [False, True, False, True]
    if has_uids:
        assert whole == [["p0", "p1", "p2", "p3"], ENDED] * 2
    for size in record_ends(path)[::STRIDE]:
        half = cut(path, size)
        assert collected(half, steps, resume=True, has_uids=has_uids) == whole
        again = collected(half, steps, resume=True, has_uids=has_uids)
        assert again == whole


def test_carried_group_and_a_new_one_of_the_same_uid_differ_in_their_names() -> None:
    config = attrs.evolve(config_of(Path("unused")), journal=JournalConfig())
    first, second = six()[:3], six()

    async def act() -> list[str]:
        async with rollout.open_rollout(config, [add]) as runtime:
            await runtime.collect(first, 2, policy=CARRY)
            batch = await runtime.collect(second, 2)
            return [each.uid for each in batch.trajectories[::2]]

    assert run_virtual(act) == ["p0", "p0@2"]
