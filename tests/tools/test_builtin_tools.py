"""``tools.builtin``: shipped tools that a configuration names."""

from __future__ import annotations

from typing import get_args

import pytest

import rollout
from rollout.config.checks import BuiltinTools
from rollout.errors import ConfigError, ToolError
from rollout.testing import Scenario, tool_call
from rollout.tools.builtin import SHIPPED
from rollout.types import Message, Prompt

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Trio alone will do."""
    return "trio"


@rollout.function_tool
async def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: What.
    """
    return text.upper()


async def test_builtin_tools_are_offered_beside_those_given_and_the_first_answer_ends() -> None:
    scenario = (
        Scenario(seed=1)
        .timing(base_s=0.001)
        .reply("go", tool_call("shout", text="a"))
        .then(tool_call("calculator", expression="6 * 7"))
        .then("\n".join(tool_call("finish", answer=answer) for answer in ("42", "43")))
        .then("not reached")
    )
    seen = []

    def reward(trajectory: rollout.Trajectory) -> float:
        seen.append(dict(trajectory.extra))
        return 1.0

    config = scenario.config(tools=rollout.ToolsConfig(builtin=("calculator", "finish")))
    prompt = Prompt(
        messages=[Message(role="user", content="go")], extra={"level": 1, "answer": "7"}
    )
    async with rollout.open_rollout(config, tools=[shout], reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    (trajectory,) = batch.trajectories
    assert seen == [{"level": 1, "answer": "42"}]
    assert trajectory.outcome == "completed"
    assert trajectory.metrics["tool_calls"] == 4
    assert trajectory.metrics["tool_errors"] == 0
    said = [message.content for message in trajectory.messages if message.role == "tool"]
    assert said == ["A", "42", *["The answer is recorded."] * 2]
    assert trajectory.messages[-1].role == "tool"
    assert batch.samples[0].extra["answer"] == "42"
    assert prompt.extra == {"level": 1, "answer": "7"}


async def test_builtin_tool_that_is_given_too_is_refused() -> None:
    config = Scenario().config(tools=rollout.ToolsConfig(builtin=("finish",)))
    with pytest.raises(ToolError) as caught:
        async with rollout.open_rollout(config, tools=[rollout.tools.finish]):
            pytest.fail("the runtime opened")
    assert str(caught.value) == (
        "tools with the same name: 'finish' (rollout.tools.builtin.finish, "
        "rollout.tools.builtin.finish); give all but one of each another name, as in "
        '@function_tool("another_name")'
    )


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"builtin": ["pyton"]},
            "tools.builtin[0] = 'pyton': expected one of 'calculator', 'edit', 'finish', 'python', "
            "'search', 'shell', 'submit'",
        ),
        (
            {"builtin": ["search"]},
            "tools.search_url = None: expected a URL, for 'search' in tools.builtin",
        ),
        (
            {"search_url": "http://host/"},
            "tools.search_url = 'http://host/': expected none without 'search' in tools.builtin",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rollout.config_from_dict({"tools": settings})
    assert caught.value.faults == (fault,)


def test_names_of_the_configuration_are_those_that_are_shipped() -> None:
    names = get_args(get_args(get_args(BuiltinTools)[0])[0])
    assert sorted(names) == sorted([*SHIPPED, "search"])
