"""Calls of tools and their errors are counted alike in metrics, report, summary and status line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

import rollout
from journal_material import cut, record_ends
from rollout import AgentConfig, AgentLoop, Prompt, RolloutBatch, function_tool
from rollout.agents import AgentContext
from rollout.cli.summary import summary_lines
from rollout.config import JournalConfig, LimitsConfig, ObserveConfig
from rollout.errors import EngineError
from rollout.observe.report import write_report
from rollout.testing import Scenario, run_virtual, tool_call
from rollout.tools import Tool, ToolPolicy, ToolSession, TransientError
from slow_cases import slow_after


@function_tool
async def works(x: int = 0) -> str:
    """Answer.

    Args:
        x: A number.
    """
    await anyio.sleep(0.1)
    return "fine"


@function_tool
async def raises() -> str:
    """Raise."""
    raise ValueError("no such row")


@function_tool(policy=ToolPolicy(timeout_s=1))
async def is_late() -> str:
    """Take too long."""
    await anyio.sleep(100)
    return ""


@function_tool(policy=ToolPolicy(retries=2, backoff_s=0.1))
async def is_retried() -> str:
    """Fail as if another time it might not."""
    raise TransientError("not now")


class Closed(Tool):
    name = "closed"
    schema: ClassVar = {"type": "function", "function": {"name": "closed", "parameters": {}}}

    async def open(self, context: Any) -> ToolSession:
        raise OSError("no port")


@rollout.register_agent("delegates_calls")
class Delegates(AgentLoop):
    """Each turn's calls are made by an agent of its own, and two at once."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(self.delegate, context)

    async def delegate(self, context: AgentContext) -> None:
        async with context.open_segment([{"role": "user", "content": "task raises."}]) as other:
            turn = await other.generate()
            await other.call_tools(turn.calls)


ATTEMPTS: dict[str, int] = {}


@rollout.register_agent("is_tried_again")
class IsTriedAgain(AgentLoop):
    """Its first attempt calls a tool, and fails as if the engine had."""

    async def run(self, context: AgentContext) -> None:
        uid = context.identity.uid
        ATTEMPTS[uid] = ATTEMPTS.get(uid, 0) + 1
        turn = await context.generate()
        await context.call_tools(turn.calls)
        if ATTEMPTS[uid] == 1:
            raise EngineError("lost")


TOOLS: tuple[Any, ...] = (works, raises, is_late, is_retried, Closed())
#: Calls of one turn, how many are counted of them, and how many of those as errors.
KINDS = {
    "works": (tool_call("works"), 1, 0),
    "raises": (tool_call("raises") + tool_call("works"), 2, 1),
    "late": (tool_call("is_late"), 1, 1),
    "retried": (tool_call("is_retried"), 1, 1),
    "unknown": (tool_call("nothing") + tool_call("works"), 2, 1),
    "parsed": ("<tool_call>{</tool_call>" + tool_call("works"), 2, 1),
    "many": (tool_call("works") * 6, 6, 2),
    "closed": (tool_call("closed") * 2, 2, 2),
}


def config(directory: Path, journal: Path | None = None) -> Any:
    scenario = Scenario(seed=1).timing(base_s=0.01)
    for kind, (text, _, _) in KINDS.items():
        scenario = scenario.reply(f"task {kind}.", text).then("Done.")
    return scenario.config(
        agent=AgentConfig(name="tool_agent", tool_format="hermes", max_parallel_calls=4),
        limits=LimitsConfig(generation_s=20, turn_s=40, tool_s=30, cleanup_s=2),
        observe=ObserveConfig(path=str(directory)),
        **({"journal": JournalConfig(path=str(journal))} if journal else {}),
    )


def prompts(kinds: Sequence[str], agent: str | None = None) -> list[Prompt]:
    return [
        Prompt(messages=[{"role": "user", "content": f"task {each}."}], uid=each, agent_name=agent)
        for each in kinds
    ]


def data_of(directory: Path) -> Any:
    """What the page of a run holds."""
    page = write_report(directory).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    return json.loads(data)


def counts_of(batch: RolloutBatch, status: int, directory: Path) -> tuple[int, int]:
    """Calls and errors, on which all agree."""
    batch.save(directory)
    metrics, data = batch.metrics, data_of(directory)
    calls, errors = int(metrics["tool_calls"]), int(metrics["tool_errors"])
    by_tool = {each["name"]: (each["calls"], each["errors"]) for each in data["tools"]}
    assert by_tool == {
        name[5:-6]: (value, metrics[f"{name[:-6]}/errors"])
        for name, value in metrics.items()
        if name.startswith("tool/") and name.endswith("/calls")
    }
    assert sum(each for each, _ in by_tool.values()) == calls
    assert sum(each for _, each in by_tool.values()) == errors
    said = f"{errors} error{'s' * (errors != 1)}" if errors else "no errors"
    assert ["tool calls", str(calls), said] in data["summary"]
    (line,) = [each for each in summary_lines(batch, 1, directory) if each.startswith("tools")]
    assert line.startswith(f"tools     {calls} call{'s' * (calls != 1)}, {said}")
    assert status == calls
    return calls, errors


def run(settings: Any, given: Sequence[Prompt], *, resume: bool = False) -> tuple[Any, int]:
    async def body() -> tuple[Any, int]:
        async with rollout.open_rollout(settings, TOOLS, resume=resume) as runtime:
            batch = await runtime.generate(given)
            return batch, runtime.statistics().tool_calls

    return run_virtual(body)


@pytest.mark.parametrize("kind", slow_after(4, KINDS))
def test_calls_that_fail_are_counted_alike_everywhere(kind: str, tmp_path: Path) -> None:
    batch, status = run(config(tmp_path), prompts([kind]))
    assert counts_of(batch, status, tmp_path) == KINDS[kind][1:]


def test_calls_of_subagents_and_of_earlier_attempts_are_counted_alike_everywhere(
    tmp_path: Path,
) -> None:
    given = [*prompts(["works"], "delegates_calls"), *prompts(["raises"], "is_tried_again")]
    batch, status = run(config(tmp_path), given)
    assert ATTEMPTS.pop("raises") == 2
    # Two agents with two calls each; two attempts of two.
    assert counts_of(batch, status, tmp_path) == (8, 4)


def test_calls_of_a_resumed_run_are_counted_alike_everywhere(tmp_path: Path) -> None:
    kinds = list(KINDS)
    before, whole = tmp_path / "journal", tmp_path / "whole"
    expected = counts_of(*run(config(whole, before), prompts(kinds)), whole)
    ends = record_ends(before)
    half = cut(before, ends[int(0.6 * len(ends))])
    resumed = run(config(tmp_path / "resumed", half), prompts(kinds), resume=True)
    assert counts_of(*resumed, tmp_path / "resumed") == expected
