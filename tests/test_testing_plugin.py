"""The pytest plugin, run on small test files of its own."""

from __future__ import annotations

import ast
import gc
import math
import re
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from rollout.testing import hold_clock, run_virtual
from rollout.testing.ceiling import VirtualCeilingError
from rollout.testing.clock import VirtualClock
from rollout.testing.leaks import Belongings, leftovers
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.process

pytest_plugins = ["rollout.testing.plugin", "pytester"]
anyio_test = pytest.mark.anyio

HEADER = """
import subprocess, sys, threading, socket
import anyio, pytest, trio
from hypothesis import given, settings, strategies as st
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> Any:
    """Run a test file with the plugin, every warning an error."""
    gc.freeze()  # pytest's end looks for garbage five times, in all that this process has loaded
    pytester.makeconftest('pytest_plugins = ["rollout.testing.plugin"]')
    pytester.makeini(
        "[pytest]\nfilterwarnings = error\n"
        "addopts = --strict-markers -p no:cacheprovider -p no:langsmith_plugin -p no:xdist"
    )

    def run_file(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(HEADER + source)
        return pytester.runpytest_inprocess(*options)

    return run_file


# --- virtual time -------------------------------------------------------------------------------


@anyio_test
async def test_clock_starts_at_zero_and_sleeps_take_no_time(rollout_clock: VirtualClock) -> None:
    assert anyio.current_time() == 0.0
    await anyio.sleep(3600)
    assert rollout_clock.now == 3600.0
    rollout_clock.jump(10)
    assert anyio.current_time() == 3610.0


@anyio_test
async def test_hold_clock_keeps_time_still_while_a_thread_works() -> None:
    proceed = threading.Event()

    def work() -> str:
        assert proceed.wait(10)
        return "done"

    with anyio.move_on_after(1) as scope, hold_clock():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_set_after_idle, proceed)
            result = await anyio.to_thread.run_sync(work)
    assert result == "done"
    assert not scope.cancelled_caught
    assert anyio.current_time() == 0.0


async def _set_after_idle(event: threading.Event) -> None:
    for _ in range(10):  # the loop has had every chance to jump
        await anyio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked(0.01)
    event.set()


@anyio_test
async def test_hold_clock_blocks_may_overlap(rollout_clock: VirtualClock) -> None:
    with hold_clock():
        with rollout_clock.hold():
            assert rollout_clock.mock.autojump_threshold == math.inf
        assert rollout_clock.mock.autojump_threshold == math.inf
    assert rollout_clock.mock.autojump_threshold == 0
    with pytest.raises(KeyError), hold_clock():
        raise KeyError
    assert rollout_clock.mock.autojump_threshold == 0
    assert rollout_clock.mock.rate == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@anyio_test
async def test_hold_clock_in_real_time_changes_nothing() -> None:
    before = anyio.current_time()
    with hold_clock():
        await anyio.sleep(0.001)
    assert anyio.current_time() > before


@anyio_test
async def test_sync_tools_hold_the_clock_while_they_work() -> None:
    threads = WorkerThreads(max_threads=2, max_abandoned=1)
    proceed = threading.Event()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_set_after_idle, proceed)
            assert await threads.run("tool", proceed.wait, 10)
    assert anyio.current_time() == 0.0
    threads.close()


def test_marker_lets_time_run_away_from_threads(run: Any) -> None:
    run("""
from rollout.worker_threads import WorkerThreads

@pytest.mark.rollout(hold_threads=False)
@pytest.mark.anyio
async def test_slow():
    threads = WorkerThreads(max_threads=2, max_abandoned=1)
    proceed = threading.Event()
    with anyio.move_on_after(5) as scope:
        await threads.run("tool", proceed.wait, 10)
    assert scope.cancelled_caught
    assert anyio.current_time() == 5.0
    threads.close()
    proceed.set()
""").assert_outcomes(passed=1)


# --- the schedule -------------------------------------------------------------------------------


async def _race(tasks: int = 8, turns: int = 3) -> str:
    """The order in which tasks that are all ready get their turns."""
    order: list[str] = []

    async def step(name: str) -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
            order.append(name)

    async with anyio.create_task_group() as group:
        for index in range(tasks):
            group.start_soon(step, chr(97 + index))
    return "".join(order)


def test_schedule_seed_determines_the_order_of_tasks() -> None:
    orders = [run_virtual(_race, seed=seed) for seed in range(20)]
    assert orders == [run_virtual(_race, seed=seed) for seed in range(20)]
    assert len(set(orders)) > 15


RACE = """
async def order():
    order = []
    async def step(name):
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
            order.append(name)
    async with anyio.create_task_group() as group:
        for name in "abcdefgh":
            group.start_soon(step, name)
    return "".join(order)
"""


def test_plugin_gives_a_test_the_same_schedule_each_time(run: Any, tmp_path: Any) -> None:
    file = tmp_path / "orders"
    source = (
        RACE
        + f"""
@pytest.mark.anyio
async def test_one():
    with open({str(file)!r}, "a") as out:
        out.write(await order() + "\\n")

@pytest.mark.rollout(schedule_seed=5)
@pytest.mark.anyio
async def test_two():
    await test_one()
"""
    )
    for options in ((), (), ("--rollout-schedule-seed=5",), ("--rollout-schedule-seed=6",)):
        run(source, *options).assert_outcomes(passed=2)
    lines = file.read_text().split()
    by_name, marked = lines[0], lines[1]
    assert by_name != marked
    assert lines == [by_name, marked, by_name, marked, marked, marked, lines[6], marked]
    assert lines[6] not in (by_name, marked)


def test_plugin_tells_the_schedule_seed_of_a_failure(run: Any) -> None:
    result = run(
        """
@pytest.mark.anyio
async def test_fails():
    assert 1 == 2

def test_sync_fails():
    assert 1 == 2
""",
        "--rollout-schedule-seed=77",
    )
    result.assert_outcomes(failed=2)
    lines = [line for line in result.outlines if "schedule seed" in line]
    assert lines == ["schedule seed 77; again: --rollout-schedule-seed=77"]


# --- the ceiling --------------------------------------------------------------------------------


def test_deadlock_fails_with_the_tree_of_tasks(run: Any) -> None:
    result = run("""
async def waits_for_godot():
    await anyio.sleep_forever()

@pytest.mark.anyio
async def test_hangs():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits_for_godot)
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*virtual time passed the ceiling of 100000 s: the test hangs, or waits longer*",
            "*  in test_hangs (*the_tree_of_tasks.py:*)",
            "*waits_for_godot  in waits_for_godot (*the_tree_of_tasks.py:*)",
        ]
    )


def test_clock_that_runs_for_ever_fails_at_the_marked_ceiling(run: Any) -> None:
    result = run("""
@pytest.mark.rollout(ceiling_s=50)
@pytest.mark.anyio
async def test_beats():
    while True:
        await anyio.sleep(1)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*virtual time passed the ceiling of 50 s:*"])


def test_run_virtual_below_its_ceiling_passes_results_and_errors_on() -> None:
    async def wait(seconds: float) -> float:
        await anyio.sleep(seconds)
        if seconds == 7:
            raise LookupError("seven")
        return anyio.current_time()

    assert run_virtual(wait, 9, ceiling_s=10) == 9.0
    with pytest.raises(LookupError, match="seven"):
        run_virtual(wait, 7)
    with pytest.raises(VirtualCeilingError, match=r"ceiling of 10 s"):
        run_virtual(wait, 11, ceiling_s=10)


def test_exceptions_and_skips_of_a_test_leave_as_they_are(run: Any) -> None:
    result = run("""
@pytest.mark.anyio
async def test_raises():
    with pytest.raises(ValueError, match="as it is"):
        raise ValueError("as it is")
    raise KeyError("mine")

@pytest.mark.anyio
async def test_skips():
    pytest.skip("not today")
""")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["E*KeyError: 'mine'"])
    assert "ExceptionGroup" not in result.stdout.str()


# --- leaks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "threading.Thread(target=stop.wait, name='rollout-worker', daemon=True).start()",
            "left behind: thread rollout-worker",
        ),
        (
            "leaked.append(subprocess.Popen([sys.executable, '-c', 'input()'], "
            "stdin=subprocess.PIPE))",
            "left behind: child process * (*python* -c input()), open file * (pipe:*)",
        ),
    ],
)
def test_leak_fails_the_test_and_is_named(
    run: Any, body: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.testing.leaks.PATIENCE_S", 0.1)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # which takes a second here, and finds nothing
    result = run(f"""
leaked, stop = [], threading.Event()

def test_leaks():
    {body}

@pytest.mark.rollout(allow_leaks=("threads", "processes", "files"))
def test_cleans_up():
    stop.set()
    for thing in leaked:
        if isinstance(thing, subprocess.Popen):
            thing.communicate()
        else:
            thing.close()

def test_leaves_nothing():
    with socket.socket():
        pass
""")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines([words])


def test_leak_that_is_allowed_passes(run: Any) -> None:
    run("""
kept = []

@pytest.mark.rollout(allow_leaks=["files"])
def test_keeps():
    kept.append(socket.socket())

def test_closes():
    kept.pop().close()
""").assert_outcomes(passed=2)


def test_task_left_behind_fails_on_trio(run: Any) -> None:
    result = run("""
@pytest.mark.anyio
async def test_spawns():
    trio.lowlevel.spawn_system_task(trio.sleep, 5)
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*left behind: task trio.sleep*"])


def test_task_left_behind_fails_on_asyncio(run: Any) -> None:
    result = run("""
import asyncio

@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_spawns():
    global task
    task = asyncio.create_task(asyncio.sleep(60), name="orphan")
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*left behind: task orphan*"])


def test_ending_thread_is_given_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # which takes a second here, and finds nothing
    before = Belongings()
    stop = threading.Event()
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    threading.Thread(target=stop.wait, name="rollout-worker").start()
    assert leftovers(before) == []
    timer.join()


# --- the guide ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_example_of_the_guide_passes(pytester: pytest.Pytester) -> None:
    guide = Path(__file__).parents[1] / "docs" / "testing.md"
    example, *others = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    pytester.makepyfile(example)
    # In a process of its own: pytester forgets what a run imported, and torch loads only once.
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    for other in others:
        compile(other, "testing.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# --- odds and ends ------------------------------------------------------------------------------


def test_hypothesis_test_gets_guards_in_every_example(run: Any) -> None:
    result = run(
        RACE
        + """
orders = set()

@given(n=st.integers(0, 5))
@settings(max_examples=5, deadline=None)
@pytest.mark.anyio
async def test_orders(n):
    start = anyio.current_time()
    await anyio.sleep(n)
    assert anyio.current_time() - start == n
    orders.add(await order())

def test_one_order():
    assert len(orders) == 1

@pytest.mark.rollout(ceiling_s=3)
@given(n=st.sampled_from([10]))
@settings(max_examples=5, deadline=None, database=None)
@pytest.mark.anyio
async def test_waits(n):
    await anyio.sleep(n)
"""
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*virtual time passed the ceiling of 3 s:*"])


def test_parametrized_backend_runs_the_test_there(run: Any) -> None:
    run(
        """
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.anyio
async def test_runs(anyio_backend):
    assert anyio.get_current_task().name
    assert anyio.current_time() > 1  # no virtual clock

@pytest.mark.anyio
async def test_virtual(anyio_backend_name):
    assert anyio_backend_name == "trio"
    assert anyio.current_time() == 0
"""
    ).assert_outcomes(passed=3)


def test_async_fixtures_share_the_clock_of_their_test(run: Any) -> None:
    run("""
@pytest.fixture
async def warm():
    await anyio.sleep(5)
    yield "warm"
    await anyio.sleep(5)

@pytest.mark.anyio
async def test_runs(warm, rollout_clock):
    assert (warm, rollout_clock.now) == ("warm", 5.0)
""").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("sead=1", "marker rollout: unknown 'sead'; known: schedule_seed, ceiling_s, *"),
        ("allow_leaks=['sockets']", "marker rollout: allow_leaks has 'sockets'; known: threads, *"),
    ],
)
def test_marker_with_unknown_words_is_refused(run: Any, marker: str, words: str) -> None:
    result = run(f"""
@pytest.mark.rollout({marker})
def test_x():
    pass
""")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{words}*".replace("[", "[[]")])
