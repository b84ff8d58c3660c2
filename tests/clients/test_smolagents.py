"""smolagents, which tells its model of each turn in words of its own.

A turn comes back as its stripped text with ``Calling tools:`` and a Python list after it, and
tools' answers as messages of the user: nothing that the model said stands in the next request. So
each turn begins a row, in which the turns before it are what the model was told, untrained.
"""

from __future__ import annotations

from typing import Any

import pytest
import smolagents
from through_gateway import run

from rollout.agents import AgentTask
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

QUESTION = "How many people live in Zürich?"
LOOK = (
    "<think>Zürich, then.</think>I look.\n"
    '<tool_call>\n{ "name":"look_up","arguments":{"city" : "Z\\u00fcrich"}}\n</tool_call>'
)
ANSWER = "440 thousand"


class LookUp(smolagents.Tool):  # type: ignore[misc]
    """A tool as its users write them."""

    name = "look_up"
    description = "Find how many people live in a city."
    inputs = {"city": {"type": "string", "description": "Its name."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        assert city == "Zürich"
        return "440"


def model_of(task: AgentTask) -> Any:
    return smolagents.OpenAIModel(model_id=task.model, api_base=task.base_url, api_key=task.api_key)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_tool_calling_agent_gives_a_row_a_turn(streamed: bool) -> None:
    def program(task: AgentTask) -> Any:
        agent = smolagents.ToolCallingAgent(
            tools=[LookUp()], model=model_of(task), stream_outputs=streamed, verbosity_level=0
        )
        return agent.run(QUESTION)

    scenario = Scenario().reply(QUESTION, LOOK).then(tool_call("final_answer", answer=ANSWER))
    done = await run(program, scenario)
    done.assert_exact("main", "branch")
    assert done.result == ANSWER
    assert [len(row.turns) for row in done.rows] == [1, 1]


async def test_code_agent_gives_a_row_a_turn() -> None:
    """Its code ends at a stop string, which it cuts from the answer and writes again."""

    def program(task: AgentTask) -> Any:
        agent = smolagents.CodeAgent(tools=[LookUp()], model=model_of(task), verbosity_level=0)
        return agent.run(QUESTION)

    first = "Thought: I look.\n<code>\nprint(look_up(city='Zürich'))\n</code>\nObservation: 1"
    last = f"Thought: I know.\n<code>\nfinal_answer('{ANSWER}')\n</code>"
    done = await run(program, Scenario().reply(f"New task:\n{QUESTION}", first).then(last))
    done.assert_exact("main", "branch", stops=["</code>"])
    assert done.result == ANSWER
    assert done.trajectory.metrics["discarded_tokens"] > 0
