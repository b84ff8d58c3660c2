"""Objects with state as tools: what an environment written for TRL relies on holds unchanged."""

from __future__ import annotations

import asyncio  # noqa: TID251  (as environments written for TRL do)
import functools
import json
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from rollout import Outcome, Prompt, Trajectory
from rollout.config import AgentConfig, LimitsConfig
from rollout.testing import Scenario
from rollout.testing.scenario import tool_call
from rollout.tools import load_tools

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
#: Code on the asyncio thread takes real time.
real = pytest.mark.parametrize("anyio_backend", ["asyncio"])


class Wordle:
    """As it would be given to TRL: no import of ours."""

    made: list[Wordle]

    def __init__(self) -> None:
        self.log: list[Any] = ["new"]
        type(self).made.append(self)

    def reset(self, **row: Any) -> str | None:
        self.log.append(("reset", row))
        self.secret: str = row["secret"]
        return f" It has {len(self.secret)} letters."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: The guessed word.

        Returns:
            What is right in it.
        """
        self.log.append(word)
        if len(word) != len(self.secret):
            raise ValueError("wrong length")
        return "".join(a if a == b else "_" for a, b in zip(word, self.secret, strict=True))

    async def hint(self) -> str:
        """Ask for the first letter."""
        await asyncio.sleep(0)
        self.log.append("hint")
        return self.secret[0]

    def get_reward(self) -> float:
        self.log.append("reward")
        return 1.0 if self.secret in self.log else 0.25

    def _secret(self) -> str:
        return self.secret

    @property
    def letters(self) -> int:
        return len(self.secret)


@pytest.fixture(autouse=True)
def forget() -> None:
    Wordle.made = []


def user(text: str = "Guess it.", uid: str = "p", **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], uid=uid, **fields)


PLAYED = Scenario(seed=1).reply("Guess", tool_call("guess", word="abc") + tool_call("hint"))
PLAYED = (
    PLAYED.then(tool_call("guess", word="tool"))
    .then("done")
    .timing(base_s=0.001, slope_s=0.0, prefill_tokens_per_s=1e9)
)
LIMITS = LimitsConfig(
    generation_s=20, tool_s=10, turn_s=40, trajectory_s=60, batch_s=500, cleanup_s=2
)


async def play(
    tools: Any,
    *prompts: Prompt,
    scenario: Scenario = PLAYED,
    samples: int = 1,
    **options: Any,
) -> list[Trajectory]:
    config = scenario.config(limits=LIMITS, **options)
    prompts = prompts or (user(extra={"secret": "tool"}),)
    async with rollout.open_rollout(config, [tools]) as runtime:
        return list((await runtime.generate(list(prompts), samples=samples)).trajectories)


@both
async def test_environment_of_trl_is_reset_played_and_rewarded_unchanged() -> None:
    (trajectory,) = await play(rollout.ToolSet(Wordle))
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    (wordle,) = Wordle.made
    row = {
        "prompt": [{"role": "user", "content": "Guess it."}],
        "uid": "p",
        "ground_truth": None,
        "data_source": None,
        "secret": "tool",
    }
    assert wordle.log == ["new", ("reset", row), "abc", "hint", "tool", "reward"]
    said = [(message.role, message.content) for message in trajectory.messages]
    assert said[0] == ("user", "Guess it. It has 4 letters.")
    assert said[2] == ("tool", "ValueError: wrong length")
    assert [text for role, text in said if role == "tool"][1:] == ["t", "tool"]
    assert (trajectory.reward, trajectory.tool_rewards) == (1.0, [1.0])
    assert trajectory.prompt is not None
    assert trajectory.prompt.messages[-1]["content"] == "Guess it. It has 4 letters."  # type: ignore[index]


async def test_tool_set_schemas_are_those_of_its_public_methods() -> None:
    async with rollout.ToolSet(Wordle) as tools:
        schemas = {tool.name: tool.schema["function"] for tool in tools}
    assert list(schemas) == ["guess", "hint"]
    assert schemas["guess"]["parameters"]["properties"]["word"]["type"] == "string"
    assert schemas["guess"]["parameters"]["required"] == ["word"]
    assert "Guess the word." in schemas["guess"]["description"]


@real
async def test_tool_set_gives_each_member_of_a_group_its_own_object() -> None:
    trajectories = await play(rollout.ToolSet(Wordle), samples=3)
    assert len(Wordle.made) == 3
    assert [each.reward for each in trajectories] == [1.0] * 3
    assert all(wordle.log.count("reward") == 1 for wordle in Wordle.made)


@real
async def test_tool_set_reset_that_raises_fails_its_trajectory_by_name() -> None:
    prompts = [user(uid="bad"), user(uid="good", extra={"secret": "tool"})]
    bad, good = await play(rollout.ToolSet(Wordle), *prompts)
    assert (bad.outcome, bad.cause and bad.cause.type) == (Outcome.FAILED, "KeyError")
    assert bad.cause is not None
    assert "in reset" in bad.cause.traceback
    assert good.reward == 1.0


class Counter:
    """Says what became of it."""

    made: list[Counter] = []  # noqa: RUF012
    reward: Any = 0.5
    closing = True

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.made.append(self)

    def reset(self, start: int, step: int = 2) -> Any:
        self.log.append((start, step))
        self.count = start

    @staticmethod
    def double(number: int) -> int:
        """Double it.

        Args:
            number: What is doubled.
        """
        return 2 * number

    def add(self) -> int:
        """Count on."""
        seen = self.count
        self.log.append("add")
        self.count = seen + 1
        return self.count

    async def get_reward(self) -> Any:
        if isinstance(self.reward, Exception):
            raise self.reward
        return self.reward

    async def close(self) -> None:
        self.log.append("close")


ADDS = Scenario(seed=1).reply("Count", tool_call("add") * 3 + tool_call("double", number=4))
ADDS = ADDS.then("done").timing(base_s=0.001, slope_s=0.0, prefill_tokens_per_s=1e9)


async def count(tool_set: rollout.ToolSet, **options: Any) -> Trajectory:
    Counter.made.clear()
    prompt = user("Count.", extra={"start": 5, "other": 1})
    (trajectory,) = await play(tool_set, prompt, scenario=ADDS, **options)
    return trajectory


@both
async def test_tool_set_reset_gets_the_columns_it_names_and_calls_run_in_order() -> None:
    trajectory = await count(rollout.ToolSet(Counter))
    assert Counter.made[0].log == [(5, 2), "add", "add", "add", "close"]
    said = [message.content for message in trajectory.messages if message.role == "tool"]
    assert (said, trajectory.reward) == (["6", "7", "8", "8"], 0.5)
    assert trajectory.messages[0].content == "Count."


@real
@pytest.mark.parametrize("reward", [ValueError("no judge"), None])
async def test_tool_set_reward_that_is_none_fails_its_trajectory(
    reward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counter, "reward", reward)
    trajectory = await count(rollout.ToolSet(Counter))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FAILED, None)
    assert trajectory.cause is not None
    assert {"ValueError": "no judge"}.get(trajectory.cause.type, "get_reward of Counter returned")
    assert Counter.made[0].log[-1] == "close"


@real
async def test_tool_set_of_a_function_is_made_once_more_for_its_methods() -> None:
    trajectory = await count(rollout.ToolSet(functools.partial(Counter)))
    assert [made.log[-1] for made in Counter.made] == ["close", "close"]
    assert trajectory.reward == 0.5


class Other:
    """No reset, no reward, and a tool that `Counter` has too."""

    def add(self) -> int:
        """Count on."""
        return 0


@real
async def test_tool_set_of_several_takes_the_one_that_the_row_names() -> None:
    tool_set = rollout.ToolSet({"count": Counter, "other": Other})
    rows = [{"environment": "count", "start": 5}, {"environment": "other"}, {"environment": "x"}]
    prompts = [user("Count.", uid=str(n), extra=extra) for n, extra in enumerate(rows)]
    counted, other, rejected = await play(tool_set, *prompts, scenario=ADDS)
    said = [
        [message.content for message in each.messages if message.role == "tool"]
        for each in (counted, other)
    ]
    assert said[0] == ["6", "7", "8", "8"]
    assert said[1][:3] == ["0", "0", "0"]
    assert "unknown tool 'double'; known tools: 'add'" in str(said[1][3])
    assert (counted.reward, other.reward) == (0.5, None)
    assert (rejected.outcome, rejected.reason) == (Outcome.REJECTED, "unknown_tool")
    assert rejected.cause is not None
    assert "expected one of 'count', 'other'" in rejected.cause.message


class Pair:
    def add(self, by: int) -> int:
        """Count on."""
        return by


class Nothing:
    """Has no tools."""

    def reset(self) -> None: ...


class Undocumented:
    def add(self, by) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        (Other(), "expected what makes an object for each trajectory"),
        ({"a": 3}, r"environment = \{'a': 3\}; expected what makes"),
        ({"a": Other, "b": Pair}, "'add' that another one has"),
        (Nothing, "Nothing has no public method"),
        (Undocumented, "Undocumented.add: "),
    ],
)
async def test_tool_set_that_cannot_be_says_why(environment: Any, fault: str) -> None:
    with pytest.raises(rollout.ToolError, match=fault):
        async with rollout.ToolSet(environment):
            pass


class Slow:
    """Waits for ever, somewhere."""

    where = ""
    closed = 0

    async def reset(self) -> str:
        await self._wait("reset")
        return ""

    async def look(self) -> str:
        """Look around."""
        await self._wait("look")
        return "seen"

    async def close(self) -> None:
        type(self).closed += 1

    async def _wait(self, where: str) -> None:
        if where == self.where:
            await anyio.sleep_forever()


SLOW = Scenario(seed=1).reply("Guess", tool_call("look")).then("done")


@pytest.mark.parametrize("where", ["reset", "look"])
async def test_tool_set_that_hangs_meets_its_limit_and_is_closed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "where", where)
    monkeypatch.setattr(Slow, "closed", 0)
    tool_set = rollout.ToolSet(Slow, backend="native")
    (trajectory,) = await play(tool_set, scenario=SLOW)
    if where == "reset":
        assert trajectory.outcome == Outcome.DEADLINE
        assert trajectory.limit_source == "limits.trajectory_s"
    else:
        assert trajectory.outcome == Outcome.COMPLETED
        assert "timed out after 10 s (limits.tool_s)" in str(trajectory.messages[2].content)
    assert Slow.closed == 1


class Look:
    """Its calls meet each other."""

    def __init__(self) -> None:
        self.inside = 0
        self.met = anyio.Event()

    async def look(self) -> str:
        """Look around."""
        self.inside += 1
        if self.inside == 2:
            self.met.set()
        await self.met.wait()
        return "met"


async def test_tool_set_of_async_methods_answers_calls_of_a_turn_at_once() -> None:
    scenario = Scenario(seed=1).reply("Guess", tool_call("look") * 2).then("done")
    (trajectory,) = await play(rollout.ToolSet(Look, backend="native"), scenario=scenario)
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["met", "met"]


@real
async def test_tool_set_is_begun_for_a_function_that_speaks_http() -> None:
    @rollout.agent("http_with_tool_set")
    def says(task: rollout.AgentTask) -> None:
        task.extra["asked"] = task.messages[-1]["content"]
        body = json.dumps({"model": task.model, "messages": task.messages}).encode()
        headers = {"authorization": f"Bearer {task.api_key}", "content-type": "application/json"}
        url = f"{task.base_url}/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()

    agent = AgentConfig(name="http_with_tool_set")
    (trajectory,) = await play(rollout.ToolSet(Wordle), agent=agent)
    assert trajectory.extra["asked"] == "Guess it. It has 4 letters."
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.25)


async def test_tool_set_is_not_begun_for_a_prompt_that_is_offered_none_of_it() -> None:
    (trajectory,) = await play(rollout.ToolSet(Wordle), user(tools=[]))
    assert Wordle.made == []
    assert trajectory.messages[0].content == "Guess it."


async def test_tool_set_blocks_are_appended_to_content_of_either_form() -> None:
    class Blocks(Other):
        def reset(self, prompt: Any) -> list[dict[str, str]]:
            return [{"type": "text", "text": " Now."}]

    parts = Prompt(
        messages=[rollout.Message(role="user", content="Count.")],
        uid="q",
    )
    listed = Prompt(
        messages=[{"role": "user", "content": [{"type": "text", "text": "Count."}]}], uid="r"
    )
    for prompt in (user("Count."), parts, listed):
        (trajectory,) = await play(rollout.ToolSet(Blocks), prompt, scenario=ADDS)
        assert trajectory.messages[0].content == "Count. Now."


def test_tool_set_at_the_top_of_a_file_is_among_its_tools(tmp_path: Path) -> None:
    file = tmp_path / "tools_with_set.py"
    file.write_text("import rollout\nclass A:\n    pass\nones = rollout.ToolSet(A)\n")
    (found,) = load_tools(file)
    assert isinstance(found, rollout.ToolSet)
