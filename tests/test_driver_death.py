"""An engine ends within five seconds of its driver, whatever either was doing."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fake_core import CountingCore
from own_processes import python_process
from rollout.engine.pool.pool import EnginePool
from rollout.engine.guardian import SHARED, is_alive, name_of, remove_at_end
from rollout.engine.placement.local_process import LocalProcess, child_command
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.routing import Router
from slow_cases import slow_but

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
BOUND_S = 5.0

# The test module is imported by drivers of its own, and its cores by their engines.


def start_child(notes: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    notes.write_text(f"{os.getpid()} {child.pid}")


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


class StuckStartCore(ParentCore):
    """Loads for ever in a library that holds the interpreter's lock."""

    async def start(self) -> None:
        await super().start()
        ctypes.PyDLL(None).sleep(1000)


class StuckCore(ParentCore):
    """Serves, and is then stuck in a library that holds the interpreter's lock."""

    async def start(self) -> None:
        await super().start()
        threading.Timer(1.0, lambda: ctypes.PyDLL(None).sleep(1000)).start()


class StoppedCore(ParentCore):
    """Serves, and is then stopped, as by a debugger."""

    async def start(self) -> None:
        await super().start()
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()


class ClosingCore(ParentCore):
    """Notes that it was closed, and not only killed."""

    async def aclose(self) -> None:
        self._notes.write_text("closed")


class SharingCore(ParentCore):
    """Leaves in shared memory what it has in use, and has what it writes down removed."""

    async def start(self) -> None:
        share_files(self._notes)


def share_files(notes: Path) -> None:
    start_child(notes)
    used = share(f"{SHARED}/rollout-test-used-{os.getpid()}")
    written = share(f"{SHARED}/rollout-test-written-{os.getpid()}")
    remove_at_end(written)
    with open(notes, "a") as file:
        file.write(f"\n{used}\n{written}")


class SharingStartCore(SharingCore):
    """The same, and never finishes loading."""

    async def start(self) -> None:
        await super().start()
        await anyio.sleep_forever()


mapped: list[mmap.mmap] = []


def share(path: str) -> str:
    """A file that this process has mapped, under another name at first, as semaphores are."""
    with open(f"{path}~", "w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        mapped.append(mmap.mmap(file.fileno(), 0))
    os.rename(f"{path}~", path)
    return path


def pool_of(core: str, notes: str) -> EnginePool:
    return EnginePool(
        placement=LocalProcess(),
        specs=[CoreSpec(f"test_driver_death:{core}", {"notes": notes})],
        router=Router(),
        start_timeout_s=60,
    )


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
    program = f"import test_driver_death as t; t.be_a_driver{core, str(notes), backend, is_forking}"
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


CASES = {
    "serving": ("ParentCore", "serving"),
    "starting": ("SlowStartCore", "started"),
    "stuck while starting": ("StuckStartCore", "started"),
}


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("serving", "trio"),
        ("starting", "asyncio"),
        *(
            pytest.param(case, backend, marks=pytest.mark.slow)
            for case, backend in (
                ("serving", "asyncio"),
                ("starting", "trio"),
                ("stuck while starting", "asyncio"),
                ("stuck while starting", "trio"),
            )
        ),
    ],
)
def test_driver_killed_whose_fork_lives_engine_and_its_children_end(
    case: str, backend: str, tmp_path: Path
) -> None:
    core, line = CASES[case]
    with driver_of(core, tmp_path / "notes", backend) as driver:
        await_line(driver, line)
        processes = processes_of(tmp_path / "notes")
        driver.kill()
        driver.wait()
        assert alive_after(processes) == []


@pytest.mark.slow
@pytest.mark.parametrize("core", ["StuckCore", "StoppedCore"])
@pytest.mark.parametrize("is_forking", [True, False])
def test_driver_killed_engine_that_cannot_act_ends(
    core: str, is_forking: bool, tmp_path: Path
) -> None:
    with driver_of(core, tmp_path / "notes", is_forking=is_forking) as driver:
        await_line(driver, "serving")
        processes = processes_of(tmp_path / "notes")
        threading.Event().wait(1.5)  # until it is stuck
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


@pytest.mark.parametrize(
    ("core", "line", "is_driver"),
    [("SharingCore", "serving", False), ("SharingStartCore", "started", True)],
)
def test_engine_that_ends_by_force_leaves_nothing_in_shared_memory(
    core: str, line: str, is_driver: bool, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    with driver_of(core, notes) as driver:
        await_line(driver, line)
        while len(notes.read_text().splitlines()) < 3:
            threading.Event().wait(0.01)
        pids, used, written = notes.read_text().splitlines()
        assert os.path.exists(used)
        assert os.path.exists(written)
        if is_driver:
            driver.kill()
        else:
            os.kill(int(pids.split()[0]), signal.SIGKILL)
        # Of an engine that is killed only what it wrote down is known.
        await_gone([written, used] if is_driver else [written])
    with suppress(FileNotFoundError):
        os.unlink(used)


def await_gone(paths: list[str]) -> None:
    for _ in range(100 * round(BOUND_S)):
        if not any(map(os.path.exists, paths)):
            return
        threading.Event().wait(0.01)
    pytest.fail(f"{paths} are still there")


def test_engine_killed_what_it_has_started_ends(tmp_path: Path) -> None:
    with driver_of("ParentCore", tmp_path / "notes") as driver:
        await_line(driver, "serving")
        engine, child = processes_of(tmp_path / "notes")
        driver.send_signal(signal.SIGSTOP)  # it is not the driver that cleans up
        engine.kill()
        assert alive_after([child]) == []


@pytest.mark.parametrize("is_before", [True, False])
def test_driver_dies_before_it_says_what_to_run_the_child_ends(is_before: bool) -> None:
    stranger = subprocess.Popen(["sleep", "1000"])
    command = [*child_command(None)[:-1], name_of(stranger.pid)]
    if is_before:
        stranger.kill()
        stranger.wait()
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        if not is_before:
            stranger.kill()
            stranger.wait()
        assert child.wait(BOUND_S + 5) == 0  # its interpreter starts meanwhile
    finally:
        child.kill()
        child.communicate()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
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


# --- names of processes


def test_name_of_a_process_is_its_own_as_long_as_it_lives() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    name = name_of(child.pid)
    number, start, namespace = name.split()
    assert is_alive(name)
    assert not is_alive(f"{number} {int(start) + 1} {namespace}"), "the number was used again"
    assert is_alive(f"{number} {int(start) + 1} pid:[1]"), "nobody here can tell"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(name), "a zombie"
    child.wait()
    assert not is_alive(name)


def test_name_of_a_process_without_proc_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.guardian._facts", lambda _: None)
    name = name_of(os.getpid())
    assert is_alive(name)
    child = subprocess.Popen(["true"])
    gone = name_of(child.pid)
    child.wait()
    assert not is_alive(gone)
