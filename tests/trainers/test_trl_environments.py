"""What TRL's trainer takes as `environment_factory` is a `ToolSet`, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("trl", reason="TRL is not installed here: .venv-trl has it")

import trl
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl_material import save_model, trainer_of

from rollout import Prompt, ToolSet
from rollout.runtime import open_rollout_blocking
from rollout.testing import Scenario, tool_call

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
ROW = {"prompt": [{"role": "user", "content": "Open the safe."}], "code": "2741"}


class Lock:
    @staticmethod
    def count(digits: str) -> int:
        """
        Count digits.

        Args:
            digits: The digits.

        Returns:
            How many there are.
        """
        return len(digits)


class Safe(Lock):
    """As TRL's documentation writes them: it inherits nothing of TRL's or ours."""

    def reset(self, **row: Any) -> str:
        self._code, self._tries = row["code"], 0
        assert row["prompt"][-1]["content"] == "Open the safe."
        return f" The code has {len(self._code)} digits."

    def try_code(self, digits: str, times: int = 1) -> str:
        """
        Try to open the safe.

        Args:
            digits: The code to try.
            times: How often.

        Returns:
            What happens.
        """
        if not digits.isdigit():
            raise ValueError("only digits")
        self._tries += times
        self.is_open = digits == self._code
        return "It opens." if self.is_open else "Nothing."

    async def knock(self) -> str:
        """
        Knock.

        Returns:
            The answer.
        """
        self._tries += 1
        return "Hollow."

    @property
    def is_new(self) -> bool:
        raise AssertionError("a property is no tool")

    @classmethod
    def make(cls) -> Safe:
        raise AssertionError("a class method is no tool")

    def get_reward(self) -> float:
        return self.is_open / self._tries


CALLS = [
    ("try_code", {"digits": "x"}),
    ("knock", {}),
    ("count", {"digits": "27"}),
    ("try_code", {"digits": "2741", "times": 2}),
]


TURNS = [tool_call(name, **arguments) for name, arguments in CALLS] + ["It is open."]


def describe(schema: dict[str, Any]) -> tuple[Any, ...]:
    """What both say of a tool; ours has defaults too, theirs what it returns."""
    function = schema["function"]
    properties = function["parameters"]["properties"]
    arguments = {name: (each["type"], each["description"]) for name, each in properties.items()}
    required = function["parameters"].get("required", [])
    return function["name"], function["description"], arguments, required


async def describe_tool_set() -> list[tuple[Any, ...]]:
    async with ToolSet(Safe) as tools:
        return [describe(tool.schema) for tool in tools]


def test_trl_environment_is_a_tool_set_unchanged(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path))
    tokenizer.chat_template = TEMPLATE.read_text()
    options = {"tokenizer": tokenizer, "environment_factory": Safe}
    room = {"max_completion_length": 2048}
    trainer = trainer_of(tmp_path, None, [dict(ROW)], None, arguments=room, **options)
    prompts: list[str] = []

    def generate(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        """The next turn of each member, in place of the model's."""
        turn = tokenizer.encode(TURNS[len(prompts)] + tokenizer.eos_token)
        prompts.append(tokenizer.decode(prompt_ids[0]))
        return [turn] * len(prompt_ids), None

    trainer._generate_single_turn = generate
    trainer.train()
    (logged,) = [each for each in trainer.state.log_history if "reward" in each]

    script = Scenario(seed=1).reply("Open the safe", TURNS[0])
    for turn in TURNS[1:]:
        script = script.then(turn)
    extra = {"code": ROW["code"]}
    with open_rollout_blocking(script.config(), tools=[ToolSet(Safe)]) as runtime:
        (ours,) = runtime.generate([Prompt(messages=ROW["prompt"], extra=extra)]).trajectories

    theirs = [describe(get_json_schema(tool)) for tool in trainer.tools]
    assert anyio.run(describe_tool_set) == theirs
    assert ours.reward == pytest.approx(1 / 3)
    assert logged["reward"] == logged["rewards/Safe/mean"] == pytest.approx(1 / 3, abs=1e-4)
    said = [each.content for each in ours.messages if each.role in ("user", "tool")]
    assert said[0] == "Open the safe. The code has 4 digits."
    assert said[1:] == ["ValueError: only digits", "Hollow.", "2", "It opens."]
    for text in (said[0], *said[2:]):  # an error is worded otherwise, as the docs say
        assert text in prompts[-1]
