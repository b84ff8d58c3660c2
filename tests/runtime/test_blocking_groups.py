"""Groups for callers without a loop: the calls are the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Literal

import pytest

import rollout
from rollout import GroupPolicy, Prompt
from rollout.config import AgentConfig, SchedulingConfig
from rollout.errors import SourceEnded
from rollout.testing import Scenario


def config() -> rollout.RolloutConfig:
    return (
        Scenario(seed=1)
        .reply("", filler=5)
        .timing(base_s=0.0005, slope_s=0.0, prefill_tokens_per_s=1e9)
        .config(
            agent=AgentConfig(name="single_turn"),
            scheduling=SchedulingConfig(samples_per_prompt=2, max_in_flight=4),
        )
    )


def endless(threads: list[int]) -> Iterator[Prompt]:
    for index in itertools.count():
        threads.append(threading.get_ident())
        yield Prompt(messages=[{"role": "user", "content": "go"}], uid=f"p{index}")


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_blocking_calls_take_groups_and_leave_the_source(
    backend: Literal["trio", "asyncio"],
) -> None:
    threads: list[int] = []
    source = endless(threads)
    with rollout.open_rollout_blocking(config(), backend=backend) as runtime:
        batch = runtime.collect(source, 3)
        seen = {t.uid for t in batch.trajectories}
        assert len(batch.trajectories) == 6
        with runtime.stream_groups(source, policy=GroupPolicy(surplus="carry")) as groups:
            for group in itertools.islice(groups, 4):
                assert group.uid not in seen
                seen.add(group.uid)
            assert groups.metrics()["groups/accepted"] == 4
        runtime.discard_carried()
        with pytest.raises(SourceEnded):
            runtime.collect([], 100)  # more than other calls have left
        assert runtime.statistics().running == 0
    assert threading.get_ident() not in threads
