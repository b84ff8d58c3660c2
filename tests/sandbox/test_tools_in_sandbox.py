"""Python, shell and edit over the protocol alone: the same on every provider."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import psutil
import pytest
from sandbox_material import (
    PROVIDERS,
    directories,
    opened,
    processes_with,
    skip_where_missing,
    unique_seconds,
)

import rollout
from rollout import Trajectory
from rollout.config import (
    LengthsConfig,
    LimitsConfig,
    SandboxConfig,
    SchedulingConfig,
    ToolsConfig,
)
from rollout.errors import SandboxUnavailable, ToolError
from rollout.sandbox import Sandbox
from rollout.testing import Scenario, tool_call
from rollout.tools import (
    EditTool,
    PythonTool,
    ShellTool,
    ToolContext,
    ToolResult,
    ToolSession,
    normalise_result,
)
from rollout.tools.sandbox_tools import CAP
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads
from slow_cases import slow_but

pytestmark = [pytest.mark.anyio, pytest.mark.process]
LOST = "what earlier calls had left in Python is gone]"


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


@pytest.fixture(params=slow_but(PROVIDERS, "bubblewrap"))
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Hands:
    """The sessions of one trajectory."""

    def __init__(self, sandbox: Sandbox, context: ToolContext) -> None:
        self.sandbox = sandbox
        self._context = context
        self._sessions: dict[str, ToolSession] = {}

    async def use(self, *tools: Any) -> None:
        for tool in tools:
            self._sessions[tool.name] = await tool.open(self._context)

    async def ask(self, tool: str, **arguments: Any) -> ToolResult:
        call = ToolCall(name=tool, arguments=arguments)
        return normalise_result(await self._sessions[tool].execute(call))

    async def python(self, code: str) -> ToolResult:
        return await self.ask("python", code=code)

    async def shell(self, command: str) -> str:
        return (await self.ask("shell", command=command)).text

    def serials(self) -> list[object]:
        return [session.serial for session in self._sessions.values()]


@asynccontextmanager
async def holding(provider: str, *tools: Any, **settings: Any) -> AsyncIterator[Hands]:
    threads = WorkerThreads(max_threads=1, max_abandoned=1)
    async with opened(provider, **settings) as sandbox:
        context = ToolContext(uid="p", member=0, threads=threads, sandbox=cast("Any", sandbox))
        hands = Hands(sandbox, context)
        await hands.use(*(tools or (PythonTool(), ShellTool(), EditTool())))
        yield hands
    threads.close()


async def test_python_keeps_variables_and_shares_files_with_the_shell(provider: str) -> None:
    async with holding(provider) as hands:
        assert await hands.python("x = 20\nprint('made', x)") == ToolResult("made 20\n")
        assert await hands.python("x + 1") == ToolResult("21\n")
        await hands.python("open('note', 'w').write(str(x))")
        assert await hands.shell("cat note") == "20"
        await hands.ask("edit", command="create", path="mod.py", file_text="y = 7\n")
        assert await hands.python("import mod\nmod.y") == ToolResult("7\n")
        assert len(set(map(id, hands.serials()))) == 1, "calls of one turn run in turn"


#: Code, the end of its answer, and whether that is an error.
CELLS = [
    (
        "def f():\n    return 1 / 0\nf()",
        'Traceback (most recent call last):\n  File "<call 1>", line 3, in <module>\n'
        "    f()\n"
        '  File "<call 1>", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero",
        True,
    ),
    ("", "(no output)", False),
    ("print('a', end='')\n'b'", "a'b'\n", False),
    ("import sys\nsys.exit(3)", "SystemExit: 3", True),
    ("def f(:", "SyntaxError: invalid syntax", True),
    ("raise KeyboardInterrupt", "KeyboardInterrupt", True),
    ("import os\nos.system('echo a; echo b >&2')\nNone", "a\nb\n", False),
    ("print('\\udc80')", "?\n", False),
    ("input()", "EOFError: EOF when reading a line", True),
    ("import os\nif os.fork() == 0: print('child')\nelse: os.wait()\nNone", "child\n", False),
    (
        "import multiprocessing, pickle, dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    b: int = 1\n"
        "def double(n): return 2 * n\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print(pool.map(double, [1, 2]))\n"
        "pickle.loads(pickle.dumps(A()))",
        "[2, 4]\nA(b=1)\n",
        False,
    ),
    ("import sys\nsys.stdout.close()", "(no output)", False),
]


async def test_python_code_is_answered_as_an_interpreter_would() -> None:
    async with holding("none", PythonTool()) as hands:
        for code, text, is_error in CELLS:
            said = await hands.python(code)
            assert (said.is_error, said.text[-len(text) :]) == (is_error, text)
            assert is_error or said.text == text
            assert "ast.py" not in said.text


async def test_python_that_is_killed_cancelled_or_ends_itself_starts_anew_with_the_next_call(
    provider: str,
) -> None:
    async with holding(provider, PythonTool(timeout_s=1.0)) as hands:
        assert not (await hands.python("x = 1")).is_error
        seconds = unique_seconds()
        slow = f"import subprocess\nprint('so far')\nsubprocess.run(['sleep', '{seconds}'])"
        said = await hands.python(slow)
        assert said == ToolResult(f"so far\n[timed out after 1 s; {LOST}", is_error=True)
        assert processes_with(seconds) == []
        again = await hands.python("x")
        assert again.is_error
        assert again.text.startswith(f"[{LOST}\nTraceback")
        said = await hands.python("import os\nprint('a')\nos._exit(0)")
        assert said == ToolResult(f"a\n[the interpreter has ended; {LOST}", is_error=True)
        assert (await hands.python("import subprocess\n1")).text == f"[{LOST}\n1\n"
        seconds = unique_seconds()
        with anyio.move_on_after(0.5):
            await hands.python(f"subprocess.run(['sleep', '{seconds}'])")
        assert processes_with(seconds) == []
        assert (await hands.python("1")).text == f"[{LOST}\n1\n"
        assert await hands.python("1") == ToolResult("1\n")


async def test_python_output_is_capped_in_the_sandbox_too() -> None:
    async with holding("none", PythonTool()) as hands:
        said = await hands.python("for _ in range(10**4): print('x' * 99)")
        note = f"\n[only the first {CAP} bytes of the output are shown]"
        assert said.text == ("x" * 99 + "\n")[:100] * (CAP // 100) + "x" * (CAP % 100) + note
        children = "import os\nos.system('head -c 300000 /dev/zero | tr \"\\\\0\" y')\nNone"
        assert (await hands.python(children)).text == "y" * CAP + note
        assert await hands.python("2") == ToolResult("2\n")


async def test_python_that_the_sandbox_lacks_is_named(provider: str) -> None:
    async with holding(provider, PythonTool(python="no-such-python")) as hands:
        with pytest.raises(ToolError, match=r"cannot start in .*no-such-python.*not found"):
            await hands.python("1")


async def test_shell_keeps_directory_exports_and_functions_and_nothing_else(provider: str) -> None:
    async with holding(provider, env={"GIVEN": "1"}) as hands:
        assert await hands.shell("mkdir -p a/'b c'; cd a/b*") == "(no output)"
        assert (await hands.shell("pwd")).endswith("/a/b c\n")
        await hands.shell("export X='q\n\"$Y` z'; Y=2; unset GIVEN; cd ..")
        said = await hands.shell('printf "%s|%s|%s|" "$X" "$Y" "$GIVEN"; pwd')
        assert said.startswith('q\n"$Y` z|||')
        assert said.endswith("/a\n")
        if (await hands.shell("command -v bash >/dev/null && echo yes")) == "yes\n":
            await hands.shell("greet() { echo hello $1; }")
            assert await hands.shell("greet you") == "hello you\n"
        assert await hands.shell("echo $PATH; env | grep -c ^HOME=") != ""


async def test_shell_command_that_fails_ends_with_its_exit_code_and_keeps_what_was_changed(
    provider: str,
) -> None:
    commands = {
        "echo a; echo b >&2; echo c; exit 3": "a\nb\nc\n[exit code 3]",
        "no-such-program": "[exit code 127]",
        "if": "[exit code ",
        "set -e; cd /; false; echo never": "[exit code 1]",
        "kill -9 $$": "[exit code 137]",
    }
    async with holding(provider, ShellTool()) as hands:
        await hands.shell("export KEPT=1")
        for command, text in commands.items():
            said = await hands.ask("shell", command=command)
            assert said.is_error
            assert text in said.text
            assert said.text.splitlines()[-1].startswith("[exit code ")
            assert await hands.shell("echo $KEPT") == "1\n"
        await hands.shell("export A=1; cd /; exit 4")
        assert await hands.shell("echo $A $PWD; cat; exit 0") == "1 /\n"
        assert await hands.shell(f": {'x' * 200_000}; echo done") == "done\n", "no argument"


async def test_shell_background_job_lives_on_and_does_not_hold_its_call(provider: str) -> None:
    async with holding(provider, ShellTool()) as hands:
        with anyio.fail_after(30):
            said = await hands.shell("(while [ ! -e stop ]; do sleep 0.05; done; echo end) >log &")
        assert said == "(no output)"
        command = "touch stop; while ! grep end log; do sleep 0.05; done"
        assert await hands.shell(command) == "end\n"


async def test_shell_command_that_runs_too_long_is_killed_with_what_it_started(
    provider: str,
) -> None:
    async with holding(provider, ShellTool(timeout_s=3.0)) as hands:
        kept, killed = unique_seconds(), unique_seconds()
        await hands.shell(f"export A=1; sleep {kept} >/dev/null 2>&1 &")
        said = await hands.ask("shell", command=f"echo first; A=2; sleep {killed}")
        assert said == ToolResult("first\n[timed out after 3 s]", is_error=True)
        assert processes_with(killed) == []
        assert len(processes_with(kept)) == 1, "of an earlier call"
        assert await hands.shell("echo $A") == "1\n"


async def test_shell_output_is_capped_at_its_end() -> None:
    async with holding("none", ShellTool()) as hands:
        said = await hands.shell("yes | head -c 1000000; echo end")
    assert said.startswith(f"[only the last {CAP} bytes of the output are shown]\ny\n")
    assert said.endswith("y\nend\n")
    assert len(said) < CAP + 100


async def edit(hands: Hands, command: str, path: str = "f", **arguments: Any) -> str:
    return (await hands.ask("edit", command=command, path=path, **arguments)).text


async def test_edit_creates_views_replaces_inserts_and_keeps_the_rest(provider: str) -> None:
    async with holding(provider, EditTool()) as hands:
        text = "one\ntwo\nthree\n"
        assert await edit(hands, "create", "d/f", file_text=text) == "d/f is written: 3 lines"
        assert await edit(hands, "view", "d/f") == "     1\tone\n     2\ttwo\n     3\tthree"
        assert (
            await edit(hands, "view", "d/f", view_range=[2.0, -1]) == "     2\ttwo\n     3\tthree"
        )
        said = await edit(hands, "str_replace", "d/f", old_str="two\n", new_str="2\nII\n")
        assert said == "d/f is changed:\n     1\tone\n     2\t2\n     3\tII\n     4\tthree"
        await edit(hands, "insert", "d/f", insert_line=0.0, new_str="zero")
        await edit(hands, "insert", "d/f", insert_line=5, new_str="end\n")
        await edit(hands, "str_replace", "d/f", old_str="II\n")
        assert await hands.sandbox.read_file("d/f") == b"zero\none\n2\nthree\nend\n"
        assert "d/f" in await edit(hands, "view", ".")
        assert (await edit(hands, "view", "d")).splitlines() == ["d/", "d/f"]
        # Bytes, modes and ends of lines that are not changed stay.
        await hands.sandbox.write_file("f", b"a\r\nb\xff\r\nc", mode=0o755)
        await edit(hands, "str_replace", old_str="a\nb", new_str="x\ny")
        await edit(hands, "insert", insert_line=1, new_str="new")
        assert await hands.sandbox.read_file("f") == b"x\r\nnew\r\ny\xff\r\nc"
        await edit(hands, "insert", insert_line=4, new_str="end")
        assert (await hands.sandbox.read_file("f")).endswith(b"c\nend\r\n")
        assert (await hands.sandbox.exec("test -x f")).exit_code == 0


#: Arguments, and what their refusal says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"command": "view", "path": "nothing"}, "nothing: No such file or directory"),
    ({"command": "view", "path": "f", "view_range": [4, 5]}, "f has 3 lines"),
    ({"command": "str_replace", "path": "f", "old_str": "zzz"}, "does not occur"),
    (
        {"command": "str_replace", "path": "f", "old_str": "aa"},
        "more than once, first in line 1 and last in line 1;",
    ),
    ({"command": "insert", "path": "f", "insert_line": 9, "new_str": ""}, "3 lines"),
    ({"command": "create", "path": "f"}, "create needs file_text"),
    ({"command": "str_replace", "path": ".", "old_str": "a"}, "is a directory"),
]


async def test_edit_that_cannot_be_made_says_why_and_changes_nothing() -> None:
    async with holding("none", EditTool()) as hands:
        await hands.sandbox.write_file("f", "aaa\nb\nc")
        for arguments, text in REFUSED:
            with pytest.raises(ToolError) as refusal:
                await hands.ask("edit", **arguments)
            assert text in str(refusal.value)
            assert await hands.sandbox.read_file("f") == b"aaa\nb\nc"


async def run_hidden_tests(trajectory: Trajectory, sandbox: Any) -> float:
    async with sandbox.fresh(artifacts=["src"]) as judge:
        await judge.write_file("check.py", "from src.solution import x\nassert x == 20")
        result = await judge.exec(["python3", "check.py"], timeout_s=60)
    return float(result.exit_code == 0)


async def test_tools_of_a_trajectory_share_its_sandbox_with_its_reward() -> None:
    turns = [
        tool_call("edit", command="create", path="src/solution.py", file_text="x = 20"),
        tool_call("python", code="from src.solution import x\nopen('note', 'w').write(str(x))"),
        tool_call("shell", command="cat note; cd /; export A=1"),
        tool_call("shell", command="echo $A $PWD"),
        tool_call("edit", command="view", path="note"),
        tool_call("python", code="import time; time.sleep(100)"),
        tool_call("python", code="print(5)"),
        "done",
    ]
    scenario = Scenario(seed=1).timing(base_s=0.001).reply("go", turns[0])
    for turn in turns[1:]:
        scenario = scenario.then(turn)
    config = scenario.config(
        sandbox=SandboxConfig(provider="none"),
        limits=LimitsConfig(tool_s=3.0),
        lengths=LengthsConfig(prompt=8192, response=8192),
    )
    tools = [PythonTool(), ShellTool(), EditTool()]
    async with rollout.open_rollout(config, tools=tools, reward=run_hidden_tests) as runtime:
        (trajectory,) = (await runtime.generate([rollout.Prompt("go")])).trajectories
    assert trajectory.reward == 1.0
    said = [m.content for m in trajectory.messages if m.role == "tool"]
    assert said == [
        "src/solution.py is written: 1 lines",
        *("2\n", "20", "1 /\n", "     1\t20"),
        "timed out after 3 s (limits.tool_s)",
        f"[{LOST}\n5\n",
    ]


@pytest.mark.slow
async def test_thousand_trajectories_with_five_calls_each_leave_nothing(
    anyio_backend: str,
) -> None:
    if anyio_backend == "asyncio":
        pytest.skip("once is enough")
    await run_trajectories(1000)


async def run_trajectories(count: int) -> None:
    """Members of one prompt, each with a sandbox that keeps a variable over five calls."""
    skip_where_missing("bubblewrap")
    instant = Scenario(stream_interval=1000).timing(base_s=0, slope_s=0, prefill_tokens_per_s=None)
    scenario = instant.reply("count", tool_call("python", code="x = 1\nx"))
    for _ in range(4):
        scenario = scenario.then(tool_call("python", code="x += 1\nx"))
    config = scenario.then("done").config(
        sandbox=SandboxConfig(provider="bubblewrap"),
        scheduling=SchedulingConfig(samples_per_prompt=count, max_in_flight=8),
        limits=LimitsConfig(batch_s=7200.0),
    )
    before = len(os.listdir("/proc/self/fd"))
    async with rollout.open_rollout(config, tools=[PythonTool()]) as runtime:
        batch = await runtime.generate([rollout.Prompt("count")])
    assert {t.cause for t in batch.trajectories} == {None}
    said = {tuple(m.content for m in t.messages if m.role == "tool") for t in batch.trajectories}
    assert said == {("1\n", "2\n", "3\n", "4\n", "5\n")}
    assert psutil.Process().children(recursive=True) == []
    assert directories() == set()
    assert len(os.listdir("/proc/self/fd")) <= before + 8


async def test_tools_without_a_sandbox_are_refused_when_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.sandbox.bubblewrap.find_bwrap", lambda: "/bin/false")
    monkeypatch.setitem(sys.modules, "rollout.sandbox.sandlock", None)
    config = Scenario().config(tools=ToolsConfig(builtin=("shell",)))
    with pytest.raises(SandboxUnavailable, match="no sandbox for what models write"):
        async with rollout.open_rollout(config):
            pytest.fail("it opened")
