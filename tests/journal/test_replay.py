"""`rollout replay`: a recorded trajectory again, on its record alone, and where it departs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from journal_material import config_of, prompts, run
from rollout import AgentLoop, ConfigError, Prompt, Trajectory, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.cli import main
from rollout.config import AgentConfig
from rollout.runtime.replaying import find_record, replay
from rollout.testing import Scenario, run_virtual
from rollout.types import ToolCall

pytestmark = pytest.mark.process
CONFIG = """
from rollout.config import *
from rollout.testing import Scenario, tool_call

scenario = (
    Scenario(seed=1)
    .timing(base_s=0.001)
    .reply("sum", tool_call("add", a=1, b=1), filler=8)
    .then("unused")
    .then(tool_call("add", a=2, b=2))
    .then("unused")
    .then("the end")
)
config = scenario.config(
    placement=InProcessPlacement(), agent=AgentConfig(name="NAME"), seed=3,
    scheduling=SchedulingConfig(samples_per_prompt=2),
)
"""

TOOLS = """
from pathlib import Path
import rollout
from rollout.agents import register_agent

SAYS = "go on"


@rollout.function_tool
async def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    with Path("called").open("a") as file:
        file.write(f"{a} {b}\\n")
    return a + b


@register_agent("NAME")
class Adding(rollout.AgentLoop):
    async def run(self, context):
        for number in range(TURNS):
            turn = await context.generate()
            calls = [*turn.calls]
            HOOK
            if not calls:
                return
            await context.call_tools(calls)
            context.observe([{"role": "user", "content": SAYS}])
"""

RUN = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", "--tools", "tools.py"]


def write(folder: Path, name: str, *, says: str = "go on", turns: int = 5, hook: str = "") -> None:
    """The user's files; the agent of each test has a name of its own."""
    (folder / "config.py").write_text(CONFIG.replace("NAME", name))
    tools = TOOLS.replace("NAME", name).replace("go on", says).replace("TURNS", str(turns))
    (folder / "tools.py").write_text(tools.replace("HOOK", hook or "pass"))
    lines = [json.dumps({"prompt": f"sum {at}"}) for at in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def replayed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["replay", "out", "--trajectory", "prompt-1/1", "--tools", "tools.py", *options])
    output, errors = capsys.readouterr()
    return code, f"{output}{errors}".splitlines()


def test_replay_of_an_unchanged_agent_does_as_recorded_and_calls_no_tool(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "unchanged")
    assert main(RUN) == 0
    called = (folder / "called").read_text()
    journal = (folder / "out" / "trajectories.journal").read_bytes()
    for _ in range(2):
        code, lines = replayed(capsys)
        assert code == 0
        assert lines[0].startswith("replay      prompt-1/1 of step 0, from out/")
        said = [line.split(":")[0] for line in lines[1:-1]]
        assert said == [
            "step 1      turn 1 of 0/prompt-1/1",
            "step 2      calls after turn 1 of 0/prompt-1/1",
            "step 3      turn 2 of 0/prompt-1/1",
            "step 4      calls after turn 2 of 0/prompt-1/1",
            "step 5      turn 3 of 0/prompt-1/1",
        ]
        assert "add({'a': 1, 'b': 1})" in lines[2]
        assert lines[-1].startswith("as recorded 5 steps, completed")
    assert (folder / "called").read_text() == called
    assert (folder / "out" / "trajectories.journal").read_bytes() == journal


OTHER_CALLS = "calls = [type(c)(name=c.name, arguments={'a': 9, 'b': 9}) for c in calls]"
TURN_2 = r"turn 2 of 0/prompt-1/1 after \d+ tokens, which end with .*go on.*"


@pytest.mark.parametrize(
    ("name", "change", "step", "asked", "recorded"),
    [
        ("saying", {"says": "go away"}, 3, r"asks the model after .*go away.*", TURN_2),
        (
            "calling",
            {"hook": OTHER_CALLS},
            2,
            r"calls tools after \d+ tokens: add\({'a': 9, 'b': 9}\)",
            r"calls after turn 1 of 0/prompt-1/1: add\({'a': 1, 'b': 1}\)",
        ),
    ],
)
def test_replay_of_a_changed_agent_names_what_it_asks_and_what_the_record_has(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: dict[str, Any],
    step: int,
    asked: str,
    recorded: str,
) -> None:
    write(folder, f"replay_{name}")
    assert main(RUN) == 0
    write(folder, f"replay_{name}", **change)
    code, lines = replayed(capsys)
    assert code == 1
    expected = f"departs     at step {step}, from the record: {asked}; the record has {recorded}"
    assert re.fullmatch(expected, lines[-1]), lines[-1]


def test_replay_of_what_is_not_there_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "missing")
    assert main(RUN) == 0
    assert main(["replay", "out", "--trajectory", "prompt-7/0", "--tools", "tools.py"]) == 2
    assert main(["replay", "out", "--trajectory", "prompt-1"]) == 2
    assert main(["replay", "no", "--trajectory", "prompt-1/0"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-3:][0].startswith(
        "error: --trajectory prompt-7/0: is not in out/trajectories.journal; it has prompt-"
    )
    assert errors[-2] == ("error: --trajectory prompt-1: expected UID/MEMBER, such as prompt-3/0")


def test_replay_of_a_rejected_trajectory_is_as_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "rejecting")
    rows = [{"prompt": "sum 0"}, {"prompt": "sum 1", "sampling": {"stop_token_ids": [10**9]}}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(RUN)
    code, lines = replayed(capsys)
    assert (code, lines[-1][:38]) == (0, "as recorded 0 steps, rejected (bad_sam")


@pytest.mark.slow
def test_replay_stops_in_a_debugger_on_the_terminal_that_it_was_started_from(
    folder: Path,
) -> None:
    write(folder, "debugged")
    assert main(RUN) == 0
    write(folder, "debugged", hook="breakpoint()")
    options = ["replay", "out", "--trajectory", "prompt-1/1", "--tools", "tools.py"]
    done = subprocess.run(
        [sys.executable, "-m", "rollout", *options],
        input="p context.identity.member\np calls\nc\nc\nc\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # Ray, where a test before has started it in this process, sets a debugger of its own.
        env={name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"},
    )
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 1\n" in done.stdout
    assert "name='add'" in done.stdout
    assert "as recorded 5 steps, completed" in done.stdout
    assert "blocked" not in done.stderr


FUNCTION_AGENT = """
import httpx
import rollout
from rollout.config import *
from rollout.testing import Scenario

config = Scenario(seed=1).reply("sum", "First.").then("Second.").config(
    placement=InProcessPlacement(), agent=AgentConfig(name="NAME"), seed=3
)


@rollout.agent("NAME")
async def by_http(task):
    headers = {"authorization": f"Bearer {task.api_key}"}
    messages = list(task.messages)
    async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as client:
        for more in ("go on", None):
            got = await client.post(
                f"{task.base_url}/chat/completions",
                json={"model": task.model, "messages": messages},
            )
            messages += [got.json()["choices"][0]["message"], {"role": "user", "content": more}]
    return 0.5
"""


def test_replay_of_a_function_agent_serves_it_the_record_through_the_gateway(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("h11")
    source = FUNCTION_AGENT.replace("NAME", "by_http")
    (folder / "config.py").write_text(source)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "sum"}))
    assert main(["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out"]) == 0

    def again() -> tuple[int, list[str]]:
        capsys.readouterr()
        command = ["replay", "out", "--trajectory", "prompt-0/0", "--config", "config.py"]
        code = main(command)
        return code, capsys.readouterr().out.splitlines()

    code, lines = again()
    assert code == 0, lines
    said = [line.split(":")[0] for line in lines[1:3]]
    assert said == ["step 1      turn 1 of 0/prompt-0/0", "step 2      turn 2 of 0/prompt-0/0"]
    assert lines[3:] == [
        "as recorded 2 steps, completed",
        "reward      not asked for in a replay; recorded was 0.5",
    ]

    (folder / "config.py").write_text(source.replace("go on", "go away"))
    code, lines = again()
    assert code == 1
    asked, _, recorded = lines[-1].partition("; the record has turn 2 of 0/prompt-0/0 after ")
    assert asked.startswith("departs     at step 2, from the record: asks the model after ")
    assert "go away" in asked
    assert "go on" in recorded


def told(trajectory: Trajectory) -> list[Any]:
    """What tools said in each conversation."""
    return [
        (segment.session_id, message.content)
        for segment in trajectory.segments
        for message in segment.messages
        if message.role == "tool"
    ]


def test_replay_gives_conversations_that_are_alike_each_its_own_answer(tmp_path: Path) -> None:
    numbers = count()

    @function_tool(stateful=False)
    async def ask() -> str:
        """Answer something new; the first is done last."""
        number = next(numbers)
        await anyio.sleep(0.5 if number else 2.0)
        return f"answer {number}"

    @register_agent("journal_twins")
    class _Twins(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            start = [{"role": "user", "content": "same"}]
            twins = [await context.subagent(start) for _ in range(2)]

            async def work(twin: Any, wait_s: float) -> None:
                await anyio.sleep(wait_s)
                await twin.generate()
                await twin.call_tools([ToolCall(name="ask", arguments={})])
                await twin.generate()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work, twins[0], 0.0)
                tasks.start_soon(work, twins[1], 0.3)

    scenario = Scenario(seed=1).reply("same", "hi there").reply("", "hi", filler=5)
    config = config_of(tmp_path / "j", scenario, agent=AgentConfig(name="journal_twins"))
    whole = run(config, prompts("x"), tools=[ask], reward=None)
    again = run_virtual(partial(replay, find_record(tmp_path / "j", "x", 0)))
    assert (again.departure, again.is_beyond) == ("", False)
    assert told(again.trajectory) == told(whole.trajectories[0])


def test_record_of_a_name_that_several_calls_have_is_refused_until_one_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"

    async def act() -> None:
        async with rollout.open_rollout(config_of(path)) as runtime:
            for text, validate in (("train", False), ("again", False), ("validation", True)):
                given = Prompt(messages=[{"role": "user", "content": text}], uid="a")
                await runtime.generate([given], samples=1, step=0, validate=validate)

    run_virtual(act)

    def text(**which: Any) -> Any:
        return find_record(path, "a", 0, **which).prompt.messages[0]["content"]

    with pytest.raises(ConfigError) as refused:
        text(step=0)
    assert str(refused.value) == (
        f"--trajectory a/0: is in {path} 2 times; add --step 0 --call 0 or --step 0 --call 1"
    )
    assert [text(call=0), text(call=1), text(validate=True)] == ["train", "again", "validation"]
