"""The real SGLang leaves nothing in shared memory, however its engine ends."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from driver import ask, command, is_alive, processes, prompts, schedulers, sglang, shares_an_engine

from rollout.engine import open_engines
from rollout.engine.cores.sglang.shared_memory import list_shared_files
from rollout.engine.driver.generation import Generation
from rollout.errors import EngineError

pytestmark = [pytest.mark.anyio, shares_an_engine]


async def until_as_before(before: set[str]) -> None:
    """What ends by force is cleared away by its guardian, a moment later."""
    with anyio.fail_after(60):
        while not list_shared_files() <= before:
            await anyio.sleep(0.01)


@pytest.mark.slow
async def test_closed_engine_whose_scheduler_was_killed_before(models: list[str]) -> None:
    before, known = list_shared_files(), set(schedulers())
    async with open_engines(sglang(models[0])) as pool:
        assert list_shared_files() > before
        (scheduler,) = set(schedulers()) - known
        scheduler.kill()
        while pool.statistics()[0].starts < 2:
            await anyio.sleep(0.05)
        await ask(pool, prompts(1)[0], Generation())
    await until_as_before(before)


async def test_killed_engine(models: list[str]) -> None:
    before = list_shared_files()
    known = set(processes())
    async with open_engines(sglang(models[0])) as pool:
        (engine,) = (
            process
            for process in set(processes()) - known
            if "rollout.engine.process.child" in command(process)
        )
        while_alive = list_shared_files() - before
        engine.kill()
        while pool.statistics()[0].starts < 2:
            await anyio.sleep(0.05)
        assert not list_shared_files() & while_alive
    await until_as_before(before)


async def test_start_that_fails(tmp_path: Path) -> None:
    before = list_shared_files()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError):
        async with open_engines(sglang(str(tmp_path))):
            pytest.fail("opened")
    await until_as_before(before)


@pytest.mark.parametrize(
    "after_s", [6.0, *(pytest.param(each, marks=pytest.mark.slow) for each in (2.0, 4.0, 9.0))]
)
async def test_start_that_is_cancelled(after_s: float, models: list[str]) -> None:
    before, known = list_shared_files(), set(processes())
    with anyio.move_on_after(after_s):
        async with open_engines(sglang(models[0])):
            pass
    await until_as_before(before)
    assert [p for p in set(processes()) - known if is_alive(p)] == []
