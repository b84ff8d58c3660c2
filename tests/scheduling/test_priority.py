"""A prompt's priority: at admission, in the pool's waiting line and in the engines' queues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import rollout
from rollout import Prompt
from rollout.config import SchedulingConfig
from rollout.errors import PromptError
from rollout.scheduling.prompt_files import read_prompts
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SLOW = Scenario(seed=1).reply("", filler=4).timing(base_s=1.0, prefill_tokens_per_s=None)
#: In the order of the call, and in the order in which they are served.
PRIORITIES = (0, -3, 0, 8, 2, 8)
SERVED = [3, 5, 4, 0, 2, 1]


def prompts() -> list[Prompt]:
    return [
        Prompt(messages=[{"role": "user", "content": f"{at}"}], uid=f"{at}", priority=priority)
        for at, priority in enumerate(PRIORITIES)
    ]


async def order_of(
    scenario: Scenario, given: list[Prompt] | None = None, **sections: Any
) -> list[int]:
    """The prompts in the order in which their trajectories end."""
    async with rollout.open_rollout(scenario.config(**sections)) as runtime:
        async with runtime.stream(given or prompts(), step=1) as trajectories:
            return [int(trajectory.uid or "") async for trajectory in trajectories]


@pytest.mark.parametrize("max_queued", [0, 64], ids=["pool", "engine"])
async def test_priority_of_a_prompt_higher_is_served_first(
    max_queued: int, rollout_clock: object
) -> None:
    # None are equal: such requests reach an engine in the order in which the loop runs their tasks.
    given = [
        msgspec.structs.replace(each, priority=3 * each.priority - at)
        for at, each in enumerate(prompts())
    ]
    order = await order_of(SLOW.capacity(max_running=1, max_queued=max_queued), given)
    first = (
        order[0] if max_queued else SERVED[0]
    )  # an idle engine begins with what reaches it first
    assert order == [first, *(at for at in SERVED if at != first)]


async def test_priority_of_a_prompt_higher_is_admitted_first(rollout_clock: object) -> None:
    assert await order_of(SLOW, scheduling=SchedulingConfig(max_in_flight=1)) == SERVED


async def test_priority_of_a_later_call_overtakes_those_that_wait(rollout_clock: object) -> None:
    order: list[str] = []
    config = SLOW.capacity(max_running=1, max_queued=0).config()
    async with rollout.open_rollout(config) as runtime:

        async def run(some: list[Prompt]) -> None:
            async with runtime.stream(some) as trajectories:
                async for trajectory in trajectories:
                    order.append(trajectory.uid)  # noqa: PERF401  (of both, as they come)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, [p for p in prompts() if p.priority <= 0])
            await anyio.sleep(0.5)
            tasks.start_soon(run, [p for p in prompts() if p.priority > 0])
    assert order == ["0", "3", "5", "4", "2", "1"]


@pytest.mark.parametrize("value", ["high", 2**31])
async def test_priority_that_is_none_is_refused_before_any_work(value: Any) -> None:
    wrong = Prompt(messages=[{"role": "user", "content": "x"}], priority=value)
    async with rollout.open_rollout(SLOW.config()) as runtime:
        with pytest.raises(PromptError) as caught:
            await runtime.generate([wrong])
        assert runtime.statistics().admitted == 0
    assert str(caught.value) == (
        f"prompts[0].priority = {value!r}: expected an integer, -2**31 + 1 to 2**31 - 1"
    )


def test_priority_is_a_column_of_prompts_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", "priority": 4}) + '\n{"prompt": "b"}\n')
    assert [prompt.priority for prompt in read_prompts(file)] == [4, 0]
    file.write_text(json.dumps({"prompt": "a", "priority": "4"}))
    with pytest.raises(PromptError, match=r"priority.*expected an integer"):
        read_prompts(file)
