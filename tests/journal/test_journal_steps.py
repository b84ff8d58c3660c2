"""Several calls of one step at once, beside a journal: each has keys of its own, and is resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from journal_material import records_in
from rollout import AgentContext, Outcome, Prompt, PromptError, RolloutConfig, RolloutRuntime
from rollout.config import AgentConfig, JournalConfig
from rollout.journal.records import EndRecord, PromptRecord
from rollout.testing import Scenario, run_virtual

#: More members than are made on the event loop itself, of which a test says how many those are.
MANY = 30
Ids = dict[str, list[bytes]]


@rollout.register_agent("at_once")
class AtOnce(rollout.AgentLoop):
    async def run(self, context: AgentContext) -> None:
        context.end(Outcome.COMPLETED, "enough")


def config_of(path: Path, agent: AgentConfig | None = None) -> RolloutConfig:
    scenario = Scenario(seed=1).reply("", "ok", filler=3).timing(base_s=0.0, slope_s=0.0)
    return scenario.config(
        agent=agent or AgentConfig(), journal=JournalConfig(path=str(path)), seed=5
    )


def half_of(name: str, count: int, uid: Callable[[int], str | None]) -> list[Prompt]:
    """Prompts that take a moment to be written down, by their texts."""
    return [
        Prompt(messages=[{"role": "user", "content": f"{name} {n}"}], uid=uid(n), extra={"n": [n]})
        for n in range(count)
    ]


async def tokens_of(runtime: RolloutRuntime, prompts: list[Prompt], *, step: int) -> list[bytes]:
    batch = await runtime.generate(prompts, samples=1, step=step)
    return [each.transcript.ids_bytes() for each in batch.trajectories]


def keys_of(path: Path) -> tuple[list[Any], list[Any]]:
    """Those of the prompts and of the ends that a journal holds."""
    entries = records_in(path)
    prompts = [e.group for e in entries if isinstance(e, PromptRecord)]
    return prompts, [key for e in entries if isinstance(e, EndRecord) for key, _ in e.ends]


def test_large_calls_of_one_step_at_once_have_keys_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.runtime.runtime.MANY_MEMBERS", MANY - 10)
    path = tmp_path / "journal"
    halves = [half_of(name, MANY, lambda n: None) for name in "ab"]

    async def act(resume: bool) -> int:
        config = config_of(path, AgentConfig(name="at_once"))
        async with rollout.open_rollout(config, resume=resume) as runtime:
            async with anyio.create_task_group() as tasks:
                for half in halves:
                    tasks.start_soon(partial(tokens_of, runtime, half, step=3))
            statistics = runtime.statistics()
            assert statistics.journal is not None
            return statistics.journal.returned

    assert anyio.run(act, False) == 0
    prompts, ends = keys_of(path)
    assert len(set(prompts)) == len(prompts) == 2 * MANY
    assert len(set(ends)) == len(ends) == 2 * MANY
    assert anyio.run(act, True) == 2 * MANY


@pytest.mark.parametrize("order", ["abc", "bca"])
def test_calls_of_one_step_are_resumed_in_any_order(tmp_path: Path, order: str) -> None:
    halves = {name: half_of(name, 3, lambda n: f"p{n}") for name in "abc"}

    async def act(order: Sequence[str], resume: bool) -> tuple[Ids, int]:
        found: Ids = {}
        async with rollout.open_rollout(config_of(tmp_path / "j"), resume=resume) as runtime:
            for name in order:
                found[name] = await tokens_of(runtime, halves[name], step=0)
            return found, sum(each.tokens.arrived for each in runtime.statistics().replicas)

    first, _ = run_virtual(act, "abc", False)
    again, sampled = run_virtual(act, order, True)
    assert (again, sampled) == (first, 0)
    twice, sampled = run_virtual(act, [*order, *order], True)
    assert twice == first  # the same seeds
    assert sampled > 0
    prompts, ends = keys_of(tmp_path / "j")
    assert len(set(prompts)) == len(prompts) == len(set(ends)) == len(ends) == 18


def test_call_of_one_step_with_other_prompts_than_the_journal_is_refused(tmp_path: Path) -> None:
    halves = {name: half_of(name, 2, lambda n: f"p{n}") for name in ("a", "b", "other")}

    async def act(*order: str, resume: bool = True) -> Ids:
        found: Ids = {}
        async with rollout.open_rollout(config_of(tmp_path / "j"), resume=resume) as runtime:
            for name in order:
                found[name] = await tokens_of(runtime, halves[name], step=0)
        return found

    run_virtual(lambda: act("a", "b", resume=False))
    for order in (["other"], ["b", "other"], ["a", "other"]):
        with pytest.raises(PromptError, match=r"is not the prompt of the journal .*differs in"):
            run_virtual(act, *order)
    assert run_virtual(act, "b", "a", "other").keys() == {"a", "b", "other"}
