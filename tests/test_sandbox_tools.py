"""The Python and shell tools, as trajectories use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
import trio

import rollout
from executors import executor_of
from rollout.config import LimitsConfig, SchedulingConfig
from rollout.errors import ToolError
from rollout.limits import Deadline
from rollout.testing import Scenario, tool_call
from rollout.testing.schedule import schedule_seed
from rollout.tools import (
    PythonTool,
    SandboxLimits,
    ShellTool,
    Tool,
    ToolResult,
    TrajectoryTools,
)
from rollout.tools.sandbox import METHODS, Isolation, find_isolation, sandbox_isolation
from rollout.tools.sandbox.process import SandboxProcess
from rollout.types import Prompt, ToolCall
from rollout.worker_threads import WorkerThreads
from sandboxes import PATIENT, directories, processes_with, spec_of

pytestmark = pytest.mark.anyio
GONE = "; what earlier calls had left is gone]"


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left(own_temporary_directory: None) -> Iterator[None]:
    before = directories()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert directories() <= before


async def best() -> Isolation:
    """The method that "auto" takes here; the test is skipped where there is none."""
    return (await spec_of("auto")).method


@asynccontextmanager
async def opened(*tools: Tool, tool_s: float = 60.0) -> AsyncIterator[TrajectoryTools]:
    """These tools in the hands of one trajectory."""
    threads = WorkerThreads(max_threads=4, max_abandoned=4)
    session = executor_of(tools, threads, tool_s=tool_s, cleanup_s=30.0).open_session(
        uid="p", member=0
    )
    try:
        yield session
    finally:
        await session.close()
        threads.close()


async def ask(tools: TrajectoryTools, name: str, **arguments: object) -> ToolResult:
    call = ToolCall(name=name, arguments=arguments)
    (result,) = await tools.run([call], turn_deadline=Deadline.after(600, "limits.turn_s"))
    return result


async def test_stateful_python_keeps_variables_and_shares_files_with_the_shell() -> None:
    await best()
    async with opened(PythonTool(limits=PATIENT), ShellTool(limits=PATIENT)) as tools:
        assert await ask(tools, "python", code="x = 20\nprint('made', x)") == ToolResult(
            "made 20\n"
        )
        assert await ask(tools, "python", code="x + 1") == ToolResult("21\n")
        await ask(tools, "python", code="open('note', 'w').write(str(x))")
        assert await ask(tools, "shell", command="cat note; echo; pwd | wc -l") == ToolResult(
            "20\n1\n"
        )
        failed = await ask(tools, "shell", command="ls nothing")
        assert failed.is_error
        assert failed.text.endswith("No such file or directory\n[exit code 2]")
        assert await ask(tools, "python", code="x") == ToolResult("20\n")
        assert len(psutil.Process().children()) == 1, "one sandbox for both"


async def test_one_shot_python_starts_every_call_in_an_empty_directory() -> None:
    await best()
    async with opened(PythonTool(is_stateful=False, limits=PATIENT)) as tools:
        code = "import os\nx = 1\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.listdir()"
        assert await ask(tools, "python", code=code) == ToolResult("['a']\n")
        assert await ask(tools, "python", code="import os\nos.listdir()") == ToolResult("[]\n")
        said = await ask(tools, "python", code="x")
    assert said == ToolResult(
        'Traceback (most recent call last):\n  File "<call 1>", line 1, in <module>\n    x\n'
        "NameError: name 'x' is not defined",
        is_error=True,
    )


@pytest.mark.parametrize(
    ("code", "text", "is_error"),
    [
        ("", "(no output)", False),
        ("print('a', end='')\n'b'", "a'b'\n", False),
        ("import sys\nsys.exit()", "(no output)", False),
        ("import sys\nsys.exit(3)", "SystemExit: 3", True),
        ("import sys\nsys.exit('why')", "why", True),
        (
            "def f(:",
            '  File "<call 1>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax',
            True,
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", True),
        ("import sys\nprint('x', file=sys.stderr)", "x\n", False),
        ("print('\\udc80')", "?\n", False),
        ("print(len('\ud800'))", "1\n", False),
        ("print('a\0b')", "source code string cannot contain null bytes", True),
        ("input()", "EOFError: EOF when reading a line", True),
        ("__name__, __import__('sys').argv", "('__main__', [''])\n", False),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n    b: int = 1\nA()",
            "A(b=1)\n",
            False,
        ),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded", True),
        ("import os\nif os.fork() == 0: print('child')\nelse: os.wait()\nNone", "child\n", False),
    ],
)
async def test_python_code_is_answered_as_an_interpreter_would(
    code: str, text: str, is_error: bool
) -> None:
    await best()
    async with opened(PythonTool(limits=PATIENT)) as tools:
        said = await ask(tools, "python", code=code)
    assert said.is_error == is_error
    assert said.text.endswith(text)
    assert "ast.py" not in said.text


async def test_wrong_arguments_are_answered_without_a_process() -> None:
    await best()
    async with opened(PythonTool(), ShellTool()) as tools:
        for name, arguments in (("python", {}), ("python", {"code": 1}), ("shell", {"code": "ls"})):
            said = await ask(tools, name, **arguments)
            assert said.is_error
        assert psutil.Process().children() == []


async def test_call_that_the_executor_times_out_takes_its_processes_with_it() -> None:
    await best()
    async with opened(PythonTool(limits=PATIENT), tool_s=2.0) as tools:
        said = await ask(tools, "python", code="import time\ntime.sleep(1000)")
        assert said == ToolResult("timed out after 2 s (limits.tool_s)", is_error=True)
        assert psutil.Process().children(recursive=True) == []


async def test_cancelled_trajectory_leaves_no_process() -> None:
    await best()
    with anyio.CancelScope() as scope:
        async with opened(PythonTool(limits=PATIENT)) as tools, anyio.create_task_group() as tasks:
            await ask(tools, "python", code="1")
            tasks.start_soon(lambda: ask(tools, "python", code="while True: pass"))
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    assert psutil.Process().children(recursive=True) == []


async def test_parallel_calls_of_one_trajectory_wait_for_one_another() -> None:
    await best()
    add = ToolCall(
        name="python",
        arguments={"code": "import time\nx = globals().get('x', 0)\ntime.sleep(0.01)\nx += 1\nx"},
    )
    async with opened(PythonTool(limits=PATIENT)) as tools:
        turn = Deadline.after(600, "limits.turn_s")
        results = await tools.run([add] * 4, turn_deadline=turn)
    assert [result.text for result in results] == ["1\n", "2\n", "3\n", "4\n"]


@pytest.mark.parametrize("seed", range(4))
def test_parallel_calls_of_one_sandbox_run_as_written_under_any_schedule(
    seed: int,
) -> None:
    async def main() -> list[str]:
        await best()
        calls = [
            ToolCall(name="python", arguments={"code": "open('log', 'w').write('a')"}),
            ToolCall(name="shell", arguments={"command": "echo -n b >> log"}),
            ToolCall(name="python", arguments={"code": "n = 1\nopen('log', 'a').write('c')"}),
            ToolCall(name="shell", arguments={"command": "cat log"}),
            ToolCall(name="python", arguments={"code": "n += 1\nn"}),
        ]
        async with opened(PythonTool(limits=PATIENT), ShellTool(limits=PATIENT)) as tools:
            turn = Deadline.after(600, "limits.turn_s")
            return [result.text for result in await tools.run(calls, turn_deadline=turn)]

    with schedule_seed(seed):
        texts = trio.run(main)
    assert texts == ["1\n", "(no output)", "1\n", "abc", "2\n"]


async def test_readable_paths_and_the_interpreters_packages_can_be_used(tmp_path: Path) -> None:
    await best()
    await anyio.Path(tmp_path, "data.txt").write_text("ours")
    await anyio.Path(tmp_path).chmod(
        0o755
    )  # pytest makes it private, and programs inside are not root
    path = str(tmp_path / "data.txt")
    tool = PythonTool(limits=PATIENT, readable=[tmp_path])
    async with opened(tool) as tools:
        said = await ask(tools, "python", code=f"import msgspec\nopen({path!r}).read()")
        assert said == ToolResult("'ours'\n")
        written = await ask(tools, "python", code=f"open({path!r}, 'a')")
        assert written.is_error


async def test_tool_without_isolation_refuses_to_start_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacks = {
        "namespaces": "unshare: Operation not permitted",
        "bubblewrap": "there is no program bwrap",
        "landlock": "landlock_create_ruleset: Function not implemented",
    }
    for method, fault in lacks.items():
        monkeypatch.setitem(sandbox_isolation._known, (method, sys.executable), fault)
    why = (
        "no isolation for programs that models write: namespaces: unshare: Operation not permitted "
        "(needs user namespaces, or root that may mount); bubblewrap: there is no program bwrap "
        "(needs the package bubblewrap, and user namespaces); landlock: landlock_create_ruleset: "
        "Function not implemented (needs Landlock and seccomp, of Linux 6.12 or newer); mend one "
        'of these, or accept isolation="none", where programs can do what the driver can'
    )
    async with opened(PythonTool()) as tools:
        said = await ask(tools, "python", code="1")
    assert said == ToolResult(f"could not open 'python': {why}", is_error=True)
    with pytest.raises(ToolError) as refusal:
        async with rollout.open_rollout(Scenario().config(), tools=[PythonTool()]):
            pytest.fail("the runtime opened")
    assert str(refusal.value) == f"tool 'python': {why}"
    async with opened(PythonTool(isolation="none", limits=PATIENT)) as tools:
        assert await ask(tools, "python", code="1") == ToolResult("1\n")


async def test_probe_of_an_isolation_that_does_not_hold_says_what_does_not() -> None:
    spec = await spec_of("auto")
    fault = await sandbox_isolation._fault(msgspec.structs.replace(spec, method="none"))
    assert fault is not None
    assert fault.startswith("does not hold: the limit on processes, files outside /")
    assert fault.endswith(", the network")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: PythonTool(isolation="docker"),  # type: ignore[arg-type]
            "isolation = 'docker': expected one of 'auto', 'namespaces', 'bubblewrap', "
            "'landlock', 'none'",
        ),
        (lambda: PythonTool(readable=["/no/such"]), "readable: '/no/such' does not exist"),
        (
            lambda: SandboxLimits(timeout_s=0),
            "SandboxLimits.timeout_s = 0: expected seconds ≥ 0.1",
        ),
        (
            lambda: SandboxLimits(memory_mb=1.5),  # type: ignore[arg-type]
            "SandboxLimits.memory_mb = 1.5: expected an integer ≥ 64",
        ),
    ],
)
async def test_wrong_settings_are_refused(make: object, text: str) -> None:
    with pytest.raises(ToolError) as refusal:
        make()  # type: ignore[operator]
    assert str(refusal.value) == text


async def test_interpreter_that_does_not_run_is_named() -> None:
    spec = await spec_of("auto")
    with pytest.raises(ToolError, match="cannot run '/no/python': No such file or directory"):
        await SandboxProcess.start(msgspec.structs.replace(spec, python="/no/python"))
    report = await find_isolation("auto", msgspec.structs.replace(spec, python="/bin/false"))
    assert report.method is None
    assert report.missing["landlock"] == "the sandbox ended"


DRIVER = """
import anyio, json, sys
from rollout.tools.sandbox import SandboxLimits, SandboxProcess, SandboxSpec

async def main():
    limits = SandboxLimits(timeout_s=600, cpu_s=600)
    spec = SandboxSpec(method=sys.argv[1], limits=limits, bubblewrap=sys.argv[2])
    sandbox = await SandboxProcess.start(spec)
    sleep = f"import subprocess\\np = subprocess.Popen(['sleep', {sys.argv[3]!r}])"
    print((await sandbox.call("python", sleep, is_fresh=False)).status, flush=True)
    await sandbox.call("python", "while True: pass", is_fresh=False)

anyio.run(main)
"""


@pytest.mark.parametrize("method", METHODS)
def test_driver_that_is_killed_leaves_no_process_and_no_directory(method: Isolation) -> None:
    spec = anyio.run(spec_of, method)
    token = f"{os.getpid()}{METHODS.index(method)}000001"
    before = directories()
    command = [sys.executable, "-c", DRIVER, method, spec.bubblewrap, token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ok\n"
        below = psutil.Process(driver.pid).children(recursive=True)
        assert processes_with(token)
        os.kill(driver.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []
    assert [p for p in processes_with(token) if p.status() != psutil.STATUS_ZOMBIE] == []
    assert directories() <= before


async def test_trajectories_with_five_calls_each_leave_nothing(anyio_backend: str) -> None:
    await run_trajectories(24)


@pytest.mark.full
async def test_thousand_trajectories_with_five_calls_each_leave_nothing(
    anyio_backend: str,
) -> None:
    if anyio_backend == "asyncio":
        pytest.skip("once is enough")
    await run_trajectories(1000)


async def run_trajectories(count: int) -> None:
    """Members of one prompt, each with a sandbox that keeps a variable over five calls."""
    await best()
    instant = Scenario(stream_interval=1000).timing(base_s=0, slope_s=0, prefill_tokens_per_s=None)
    scenario = instant.reply("count", tool_call("python", code="x = 1\nx"))
    for _ in range(4):
        scenario = scenario.then(tool_call("python", code="x += 1\nx"))
    scenario = scenario.then("done")
    config = scenario.config(
        scheduling=SchedulingConfig(samples_per_prompt=count, max_in_flight=8),
        limits=LimitsConfig(batch_s=7200.0),
    )
    before = len(os.listdir("/proc/self/fd"))
    prompt = Prompt(messages=[{"role": "user", "content": "count"}])
    async with rollout.open_rollout(config, tools=[PythonTool(limits=PATIENT)]) as runtime:
        batch = await runtime.generate([prompt])
        assert psutil.Process().children(recursive=True) == []
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # the loop's own, at most
    said = [
        [message.content for message in row.messages if message.role == "tool"]
        for row in batch.trajectories
    ]
    assert said == [["1\n", "2\n", "3\n", "4\n", "5\n"]] * count
    assert {row.outcome for row in batch.samples} == {"completed"}
    json.dumps(batch.metrics)
