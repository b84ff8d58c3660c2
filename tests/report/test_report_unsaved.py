"""The report of a run whose trajectories were not saved: what its events say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

import observed
from report_runs import MadeUpRun, data_of, page_of
from rollout import GroupPolicy, open_rollout
from rollout.config import ObserveConfig, SchedulingConfig
from rollout.errors import RolloutError
from rollout.testing import Scenario, run_virtual


def test_report_of_a_call_that_raised_says_what_failed_without_trajectories(
    tmp_path: Path,
) -> None:
    config = observed.SCENARIO.config(
        observe=ObserveConfig(path=str(tmp_path)),
        scheduling=SchedulingConfig(samples_per_prompt=10),
    )

    async def reward(trajectory: object) -> float:
        raise RuntimeError("no judge")

    async def body() -> None:
        async with open_rollout(config, [observed.add], reward) as runtime:
            with pytest.raises(RolloutError, match="trajectories failed"):
                await runtime.generate(observed.prompts("a please sum", "b please sum"), step=3)

    run_virtual(body)
    data = data_of(page_of(tmp_path))

    found = {each["kind"]: each for each in data["findings"]}
    calls, failures = found["failed_calls"], found["failures"]
    assert calls["title"] == "1 call of 1 ended with an error"
    assert "1 × generate() of step 3 raised LimitExceeded: " in calls["text"]
    assert failures["filter"] == ""
    assert failures["text"].endswith("\n20 × failed (reward): RuntimeError: no judge")
    assert data["summary"][0] == ["trajectories", "20", "of 2 prompts"]
    assert any("Trajectories were not saved" in note for note in data["notes"])


def test_report_names_every_cause_of_failure_with_its_count(tmp_path: Path) -> None:
    long = "x" * 1000

    async def reward(trajectory: Any) -> float:
        number = trajectory.group
        if number < 12:
            raise RuntimeError(f"cause {number // 2} {long}")
        return 1.0

    async def body() -> None:
        async with open_rollout(observed.SCENARIO.config(), [observed.add], reward) as runtime:
            batch = await runtime.generate(observed.prompts(*map(str, range(40))))
            batch.save(tmp_path)

    run_virtual(body)
    (failures,) = [
        each for each in data_of(page_of(tmp_path))["findings"] if each["kind"] == "failures"
    ]
    causes = failures["text"].splitlines()[1:]
    assert [each.partition(" × ")[2] for each in causes] == [
        f"failed (reward): RuntimeError: cause {number} {long}" for number in range(6)
    ]
    assert len({each.partition(" × ")[0] for each in causes}) == 1


def test_report_of_events_alone_says_what_was_looked_at(tmp_path: Path) -> None:
    directory = MadeUpRun().write(tmp_path)
    (directory / "trajectories.jsonl").unlink()

    data = data_of(page_of(directory))

    assert data["findings"] == []
    assert data["looked_for"].startswith("Nothing stands out: ")
    assert data["summary"][0] == ["trajectories", "40", "of 10 prompts"]


def test_report_of_groups_says_how_many_were_asked_for_and_leaves_out_carried_time(
    tmp_path: Path,
) -> None:
    scenario = Scenario(seed=1).reply("a ", filler=500).reply("", filler=20).timing(base_s=0.01)
    config = scenario.config(
        observe=ObserveConfig(path=str(tmp_path)),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    carry = GroupPolicy(surplus="carry", oversample=2.0)

    async def body() -> None:
        async with open_rollout(config) as runtime:
            await runtime.collect(observed.prompts("a go", "b go"), 1, policy=carry, step=4)
            assert runtime.statistics().carried > 0
            await anyio.sleep(200.0)
            await runtime.collect([], 1, step=5)

    run_virtual(body)
    data = data_of(page_of(tmp_path))

    assert ["collect()", "step 5, 1 group"] in data["run"]
    assert sum(seconds for _, seconds in data["spent"]) < 100.0
