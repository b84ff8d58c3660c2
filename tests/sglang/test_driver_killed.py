"""SGLang's processes end with the driver, though a fork of it lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import psutil
import pytest
from driver import command, is_alive, sglang, shares_an_engine

from own_processes import python_process
from rollout.engine import open_engines

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [shares_an_engine, pytest.mark.slow]

HERE = Path(__file__).parent
BOUND_S = 5.0


def be_a_driver(model: str) -> None:
    """Open an engine once a fork of this process has been made, such as a data loader's worker."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fork_when_there_is_a_pipe)
            async with open_engines(sglang(model)):
                print("serving", flush=True)
                await anyio.sleep_forever()

    async def fork_when_there_is_a_pipe() -> None:
        while not psutil.Process().children():
            await anyio.sleep(0.01)
        if not os.fork():
            signal.pause()

    anyio.run(main, backend="trio")


@pytest.fixture
def driver(models: list[str]) -> Iterator[subprocess.Popen[str]]:
    program = (
        f"import sys; sys.path.append({str(HERE.parent)!r}); "
        f"import test_driver_killed as t; t.be_a_driver({models[0]!r})"
    )
    with python_process(program, HERE) as driver:
        yield driver


def descendants(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """What it has started, without its fork."""
    own = command(psutil.Process(driver.pid))
    found = psutil.Process(driver.pid).children(recursive=True)
    return [process for process in found if command(process) != own]


def left_after_its_death(driver: subprocess.Popen[str]) -> list[str]:
    processes = descendants(driver)
    driver.kill()
    driver.wait()
    psutil.wait_procs(processes, timeout=BOUND_S)
    return [command(process) for process in processes if is_alive_still(process)]


def is_alive_still(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return is_alive(process)
    return False


def test_driver_killed_while_sglang_serves(driver: subprocess.Popen[str]) -> None:
    assert driver.stdout is not None
    assert driver.stdout.readline() == "serving\n"
    assert any("sglang::scheduler" in command(process) for process in descendants(driver))
    assert left_after_its_death(driver) == []


@pytest.mark.parametrize("after_s", [0.5, 2.0, 5.0, 8.0, 12.0, 16.0])
def test_driver_killed_while_sglang_starts(driver: subprocess.Popen[str], after_s: float) -> None:
    while not descendants(driver):
        threading.Event().wait(0.01)
    threading.Event().wait(after_s)
    assert left_after_its_death(driver) == []
