"""Codex, the program, on a scripted model."""

from __future__ import annotations

import pytest
from command_lines import Directory, directory, require
from through_gateway import run

from rollout.agents import AgentTask
from rollout.testing import Scenario, tool_call

__all__ = ["directory"]

pytestmark = pytest.mark.anyio

#: Nothing in its own prompts says this.
QUESTION = "Tell me about a.txt, dear robot"
#: Arguments as no serialiser writes them.
READ = (
    "<think>A file.\nI read it.</think>\n\nReading.\n"
    '<tool_call>\n{ "arguments" : {"max_output_tokens":1000 ,\n'
    '"cmd": "cat a.txt; echo \\u00e9\\/"}, "name":"exec_command"}\n</tool_call>'
)
ANSWER = "It says  “héllo”."


@pytest.fixture(autouse=True)
def it_starts() -> None:
    require("codex")


def codex(task: AgentTask, directory: Directory, *arguments: str) -> str:
    """What it prints; each run is another process."""
    provider = f'{{name="gateway", base_url="{task.base_url}", env_key="KEY"}}'
    options = ["-c", f"model_providers.gateway={provider}", "-c", 'model_provider="gateway"']
    options += ["-m", task.model, "--skip-git-repo-check"]
    options += ["--dangerously-bypass-approvals-and-sandbox"]
    return directory.run("codex", ["exec", *options, *arguments], KEY=task.api_key)


async def test_conversation_is_one_exact_row(directory: Directory) -> None:
    """Two questions, in two processes, with parallel calls of its shell."""
    (directory.work / "a.txt").write_text("héllo\n")
    both = "\n".join(
        [
            tool_call("exec_command", cmd="sleep 0.5; echo slow"),
            tool_call("exec_command", cmd="ls"),
        ]
    )

    def program(task: AgentTask) -> list[str]:
        return [
            codex(task, directory, QUESTION),
            codex(task, directory, "resume", "--last", "Are you sure?"),
        ]

    scenario = Scenario().reply(QUESTION, READ).then(both).then(ANSWER).then("Quite.")
    done = await run(program, scenario)
    done.assert_exact("main")
    assert done.result == [ANSWER, "Quite."]
    assert len(done.rows[0].turns) == 4
    assert "héllo\né/" in done.story()


async def test_compaction_gives_three_rows(directory: Directory) -> None:
    """It asks for a sum without tools, and begins again with what users said and the sum."""
    (directory.work / "a.txt").write_text("héllo\n")
    limit = ["-c", "model_auto_compact_token_limit=1000"]
    scenario = (
        Scenario()
        .reply("CONTEXT CHECKPOINT COMPACTION", "It is read, and says héllo.")
        .reply("It is read, and says", ANSWER)
        .reply(QUESTION, READ)
    )
    done = await run(lambda task: codex(task, directory, *limit, QUESTION), scenario)
    done.assert_exact("main", "branch", "branch")
    assert [len(row.turns) for row in done.rows] == [1, 1, 1]
    assert done.result == ANSWER


async def test_two_parallel_sub_agents_have_rows_of_their_own(directory: Directory) -> None:
    """They have the tools and the system prompt of the main agent; a header tells them apart."""
    (directory.work / "a.txt").write_text("héllo\n")
    names = ("lines", "words")
    two = "<think>Two at once.</think>I ask two.\n" + "\n".join(
        tool_call("multi_agent_v1__spawn_agent", message=f"Kindly count the {name} of a.txt")
        for name in names
    )
    # Nobody can script the ids with which it would wait for them.
    both = "until [ -e lines ] && [ -e words ]; do sleep 0.2; done; sleep 3"
    wait = tool_call("exec_command", cmd=both, yield_time_ms=30_000)
    scenario = Scenario().reply(QUESTION, two).then(wait).then("One of each.")
    for name in names:
        count = tool_call("exec_command", cmd=f"wc --{name} a.txt | tee {name}")
        scenario = scenario.reply(f"Kindly count the {name}", count).then(f"One of {name}.")

    done = await run(lambda task: codex(task, directory, QUESTION), scenario)
    done.assert_exact("main", "subagent", "subagent")
    assert done.result == "One of each."
    assert [len(row.turns) for row in done.rows] == [3, 2, 2]
    for name in names:
        assert f"One of {name}." in done.story()
