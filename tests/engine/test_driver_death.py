"""An engine ends within five seconds of its driver, whatever either was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fake_core import CountingCore
from own_processes import python_process
from pools import make_pool
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.pool.pool import EnginePool
from slow_cases import slow_but

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
BOUND_S = 5.0

# The test module is imported by drivers of its own, and its cores by their engines.


def start_child(notes: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    # As servers do that a core may start: a session of its own, with a child there.
    server = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None
    worker = int(server.stdout.readline())
    notes.write_text(f"{os.getpid()} {child.pid} {server.pid} {worker}")


class ParentCore(CountingCore):
    """Starts a process, and says which."""

    def __init__(self, *, notes: str, **options: Any) -> None:
        super().__init__(**options)
        self._notes = Path(notes)

    async def start(self) -> None:
        start_child(self._notes)


class SlowStartCore(ParentCore):
    """Never finishes loading."""

    async def start(self) -> None:
        await super().start()
        await anyio.sleep_forever()


class ClosingCore(ParentCore):
    """Notes that it was closed, and not only killed."""

    async def aclose(self) -> None:
        self._notes.write_text("closed")


def pool_of(core: str, notes: str) -> EnginePool:
    core = f"test_driver_death:{core}"
    return make_pool(core, {"notes": notes}, placement=LocalProcess(), start_timeout_s=60)


def be_a_driver(core: str, notes: str, backend: str, is_forking: bool) -> None:
    """Open an engine; a fork of this process, such as a data loader's worker, lives longer."""

    def fork() -> None:
        if is_forking and not os.fork():
            signal.pause()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fork_when_it_starts)
            async with pool_of(core, notes).serving():
                print("serving", flush=True)
                await anyio.sleep_forever()

    async def fork_when_it_starts() -> None:
        while not os.path.exists(notes):  # noqa: ASYNC240
            await anyio.sleep(0.01)
        fork()
        print("started", flush=True)

    anyio.run(main, backend=backend)


def driver_of(
    core: str, notes: Path, backend: str = "asyncio", *, is_forking: bool = True
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A driver of one engine, which may fork before."""
    call = f"t.be_a_driver{core, str(notes), backend, is_forking}"
    program = f"import sys; sys.path.insert(0, '..'); import test_driver_death as t; {call}"
    return python_process(program, HERE)


def await_line(driver: subprocess.Popen[str], line: str) -> None:
    assert driver.stdout is not None
    while (said := driver.stdout.readline()) != f"{line}\n":
        assert said, "the driver ended"


def processes_of(notes: Path) -> list[psutil.Process]:
    """The engine, and what it has started."""
    return [psutil.Process(int(pid)) for pid in notes.read_text().split()]


def alive_after(processes: list[psutil.Process], seconds: float = BOUND_S) -> list[psutil.Process]:
    """Which of them have not ended; a zombie has, and waits for the process that adopted it."""
    alive = psutil.wait_procs(processes, timeout=seconds)[1]
    return [each for each in alive if status_of(each) != psutil.STATUS_ZOMBIE]


def status_of(process: psutil.Process) -> str:
    return str(process.as_dict(["status"], ad_value=psutil.STATUS_ZOMBIE)["status"])


@pytest.mark.parametrize(
    ("core", "line", "backend"),
    [("ParentCore", "serving", "trio"), ("SlowStartCore", "started", "asyncio")],
)
def test_driver_killed_whose_fork_lives_engine_and_its_children_end(
    core: str, line: str, backend: str, tmp_path: Path
) -> None:
    with driver_of(core, tmp_path / "notes", backend) as driver:
        await_line(driver, line)
        processes = processes_of(tmp_path / "notes")
        assert os.getsid(processes[0].pid) == processes[0].pid, "a Ctrl-C reaches the driver alone"
        driver.kill()
        driver.wait()
        assert alive_after(processes) == []


@pytest.mark.slow
@pytest.mark.parametrize("after_s", slow_but([0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2], 0.2))
def test_driver_killed_at_any_moment_of_the_start_no_engine_is_left(
    after_s: float, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    with driver_of("ParentCore", notes) as driver:
        itself, begun = psutil.Process(driver.pid), set[psutil.Process]()
        while not begun:
            begun = {child for child in itself.children() if is_engine(child)}
        threading.Event().wait(after_s)
        driver.kill()
        driver.wait()
        assert alive_after([*begun]) == []
        pids = notes.read_text().split() if notes.exists() else []
        found = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
        assert alive_after(found) == []


def is_engine(process: psutil.Process) -> bool:
    return "rollout.engine.channel.child" in process.as_dict(["cmdline"], ad_value=[])["cmdline"]


def test_driver_dies_before_it_says_what_to_run_the_child_ends(tmp_path: Path) -> None:
    """A fork of the driver holds the pipe: the child sees that its parent has changed."""
    program = (
        "import os, signal, subprocess\n"
        "from rollout.engine.placement.engine_process import child_command\n"
        "command = child_command(None)\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)\n"
        "os.fork() or signal.pause()\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with python_process(program, HERE) as driver:
        assert driver.stdout is not None
        child = psutil.Process(int(driver.stdout.readline()))
        while not child.num_threads() or "child" not in " ".join(child.cmdline()):
            threading.Event().wait(0.01)
        threading.Event().wait(1.0)  # its interpreter starts meanwhile
        driver.kill()
        driver.wait()
        assert alive_after([child]) == []


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", slow_but(["trio", "asyncio"], "asyncio"))
async def test_close_while_a_fork_holds_the_pipe_closes_the_core(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with pool_of("ClosingCore", str(notes)).serving():
        (engine,) = (child for child in psutil.Process().children() if is_engine(child))
        holders = hold_open(os.readlink(f"/proc/{engine.pid}/fd/0"))
    assert notes.read_text() == "closed"
    for holder in holders:
        holder.kill()
        holder.wait()


def hold_open(pipe: str) -> list[subprocess.Popen[bytes]]:
    """Processes that have our ends of it open."""
    ends = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    ours = [int(fd) for fd in ends if os.readlink(f"/proc/self/fd/{fd}") == pipe]
    assert ours
    return [subprocess.Popen(["sleep", "1000"], pass_fds=[fd]) for fd in ours]
