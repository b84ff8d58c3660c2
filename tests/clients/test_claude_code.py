"""Claude Code, the program, on a scripted model."""

from __future__ import annotations

from typing import Any

import pytest
from command_lines import Directory, directory, require
from through_gateway import run

from rollout.agents import AgentTask
from rollout.testing import Scenario, tool_call

__all__ = ["directory"]

pytestmark = pytest.mark.anyio

#: Nothing in its own prompts says this.
QUESTION = "Tell me about a.txt, dear robot"
#: Arguments as no serialiser writes them: it gives them back in another order, with an integer.
READ = (
    "<think>A file.\nI read it.</think>\n\nReading.\n"
    '<tool_call>\n{ "arguments" : {"timeout":60000.0,"description":"r\\u00e9ad" ,\n'
    ' "command": "cat a.txt"},'
    '"name":"Bash"}\n</tool_call>'
)
ANSWER = "It says  “héllo”."


@pytest.fixture(autouse=True)
def it_starts() -> None:
    require("claude")


def claude(task: AgentTask, directory: Directory, *arguments: str) -> str:
    """What it prints; each run is another process."""
    return directory.run(
        "claude",
        ["--dangerously-skip-permissions", *arguments],
        ANTHROPIC_BASE_URL=task.root_url,
        ANTHROPIC_API_KEY=task.api_key,
        ANTHROPIC_MODEL=task.model,
        ANTHROPIC_SMALL_FAST_MODEL=task.model,
        IS_SANDBOX="1",  # it skips no permissions for root anywhere else
    )


async def test_conversation_is_one_exact_row_beside_its_title(directory: Directory) -> None:
    """Two questions, in two processes, with parallel calls."""
    (directory.work / "a.txt").write_text("héllo\n")
    both = "\n".join(
        [
            tool_call("Bash", command="sleep 0.5; echo slow", description="First"),
            tool_call("Read", file_path=str(directory.work / "a.txt")),
        ]
    )

    def program(task: AgentTask) -> list[str]:
        return [
            claude(task, directory, "-p", QUESTION),
            claude(task, directory, "-c", "-p", "Are you sure?"),
        ]

    scenario = Scenario().reply(QUESTION, READ).then(both).then(ANSWER).then("Quite.")
    done = await run(program, scenario)
    done.assert_exact(*purposes(done, "main"))
    assert done.result == [ANSWER, "Quite."]
    assert [len(row.turns) for row in done.rows if row.purpose == "main"] == [4]


async def test_compaction_gives_four_rows(directory: Directory) -> None:
    """It forks from the turn before the last one for its summary, and continues from that."""
    (directory.work / "a.txt").write_text("héllo\n")

    def program(task: AgentTask) -> list[str]:
        return [
            claude(task, directory, "-p", QUESTION),
            claude(task, directory, "-c", "-p", "/compact"),
            claude(task, directory, "-c", "-p", "Once more, please"),
        ]

    scenario = (
        Scenario()
        .reply("Once more, please", READ)
        .then(ANSWER)
        .reply("<analysis>", "<analysis>Short.</analysis>\n<summary>It is read.</summary>")
        .reply(QUESTION, READ)
        .then(ANSWER)
    )
    done = await run(program, scenario)
    done.assert_exact(*purposes(done, "main", "branch", "branch"))
    assert len(done.rows) == 4
    assert [len(row.turns) for row in done.rows if row.purpose != "side"] == [2, 1, 2]
    assert done.result == [ANSWER, "", ANSWER]


async def test_two_parallel_sub_agents_give_four_rows(directory: Directory) -> None:
    (directory.work / "a.txt").write_text("héllo\n")
    names = ("lines", "words")
    two = "<think>Two at once.</think>I ask two.\n" + "\n".join(
        tool_call(
            "Agent",
            subagent_type="general-purpose",
            description=f"Count {name}",
            prompt=f"Kindly count the {name} of a.txt",
            run_in_background=False,
        )
        for name in names
    )
    scenario = Scenario().reply(QUESTION, two).then("One of each.")
    for name in names:
        count = tool_call("Bash", command=f"wc --{name} a.txt", description="Count")
        scenario = scenario.reply(f"Kindly count the {name}", count).then(f"One of {name}.")

    done = await run(lambda task: claude(task, directory, "-p", QUESTION), scenario)
    done.assert_exact(*purposes(done, "main", "subagent", "subagent"))
    assert len(done.rows) == 4
    assert [len(row.turns) for row in done.rows if row.purpose != "side"] == [2, 2, 2]
    assert done.result == "One of each."


def purposes(done: Any, *expected: str) -> list[str]:
    """Those, with that of the title, which is asked for beside the first question."""
    found = [row.purpose for row in done.rows]
    at = found.index("side") if "side" in found else 0
    return [*expected[:at], "side", *expected[at:]]
