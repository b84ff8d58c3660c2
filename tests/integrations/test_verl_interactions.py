"""Interaction classes with verl's protocol, unchanged."""

from __future__ import annotations

import asyncio  # noqa: TID251  (the users' own code)
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.errors import ConfigError
from rollout.interactions import VerlInteraction, load_verl_interactions
from rollout.testing import Scenario
from rollout.types import Message, Outcome, Prompt


@pytest.fixture
def anyio_backend() -> str:
    """Classes of verl run in asyncio's thread, in real time."""
    return "trio"


class Quiz:
    """As people write them for verl: one object, instances in a dict, asyncio inside."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.name = config.get("name", "quiz")
        self.instances: dict[str, dict[str, Any]] = {}
        self.finalized: list[str] = []
        self.seen: list[list[dict[str, Any]]] = []

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        await asyncio.sleep(0)
        assert instance_id is not None
        self.instances[instance_id] = {"ground_truth": ground_truth, **kwargs}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        await asyncio.sleep(0)
        self.seen.append(messages)
        is_right = self.instances[instance_id]["ground_truth"] in messages[-1]["content"]
        return is_right, "Try again.", float(is_right), {"level": kwargs.get("level")}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.finalized.append(instance_id)


@pytest.mark.anyio
async def test_class_of_verl_runs_unchanged() -> None:
    quiz = Quiz({})
    scenario = Scenario(seed=1).reply("capital", "Lyon").then("Paris")
    config = scenario.config(agent=rollout.AgentConfig(interaction="quiz"))
    prompt = Prompt(
        messages=[Message(role="user", content="the capital?")],
        uid="p",
        ground_truth="Paris",
        extra={"interaction_kwargs": {"name": "quiz", "level": 3}},
    )
    async with rollout.open_rollout(config, interactions=[VerlInteraction(quiz)]) as runtime:
        batch = await runtime.generate([prompt, rollout.Prompt(**{**vars_of(prompt), "uid": "q"})])
    for sample in batch.samples:
        assert sample.outcome is Outcome.COMPLETED
        assert sample.turn_scores == [0.0, 1.0]
        assert sample.extra["level"] == 3
    assert sorted(quiz.finalized) == sorted(quiz.instances)
    assert len(quiz.finalized) == 2
    assert quiz.seen[0] == [
        {"role": "user", "content": "the capital?"},
        {"role": "assistant", "content": "Lyon"},
    ]


def vars_of(prompt: Prompt) -> dict[str, Any]:
    return {name: getattr(prompt, name) for name in prompt.__struct_fields__}


class Short(Quiz):
    """A base class's own signature, without an instance; and an answer of another shape."""

    async def finalize_interaction(self) -> None:  # type: ignore[override]
        self.finalized.append("")

    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        return "no tuple"


@pytest.mark.anyio
async def test_answer_of_another_shape_fails_its_trajectory_alone() -> None:
    quiz = Short({"name": "short"})
    config = Scenario(seed=1).config(agent=rollout.AgentConfig(interaction="short"))
    prompt = Prompt(messages=[Message(role="user", content="hello")], uid="p")
    async with rollout.open_rollout(config, interactions=[VerlInteraction(quiz)]) as runtime:
        async with runtime.stream([prompt]) as trajectories:
            (trajectory,) = [each async for each in trajectories]
    assert trajectory.outcome is Outcome.FAILED
    assert trajectory.cause is not None
    assert trajectory.cause.message == (
        "interaction 'short': generate_response returned 'no tuple'; expected (should_terminate, "
        "response, score, data)"
    )
    assert quiz.finalized == [""]


def test_object_without_a_name_is_refused() -> None:
    nameless = Quiz({"name": ""})
    with pytest.raises(
        ConfigError, match=r"Quiz has no name; give one: VerlInteraction\(…, name=…\)"
    ):
        VerlInteraction(nameless)
    assert VerlInteraction(nameless, name="quiz").name == "quiz"


TEACHERS = """
class TeacherInteraction:
    def __init__(self, config):
        self.config = config

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 1.0, {}

class Broken:
    def __init__(self, config):
        raise KeyError("level")

class Silent:
    def __init__(self, config):
        pass
"""


def test_configuration_of_verl_names_its_users(tmp_path: Path) -> None:
    (tmp_path / "verl_teachers.py").write_text(TEACHERS)
    file = tmp_path / "interactions.yaml"
    file.write_text(
        "interaction:\n"
        "  - {name: strict, class_name: verl_teachers.TeacherInteraction, config: {level: 3}}\n"
        "  - {class_name: verl_teachers.TeacherInteraction}\n"
    )
    strict, teacher = load_verl_interactions(file)
    assert (strict.name, teacher.name) == ("strict", "teacher")
    assert strict._interaction.config == {"level": 3, "name": "strict"}
    assert teacher._interaction.config == {"name": "teacher"}


def test_configuration_of_verl_with_faults_names_them_all(tmp_path: Path) -> None:
    (tmp_path / "verl_teachers.py").write_text(TEACHERS)
    file = tmp_path / "interactions.yaml"
    file.write_text(
        "interaction:\n"
        "  - teacher\n"
        "  - {class_name: Teacher}\n"
        "  - {class_name: verl_teachers.Nobody}\n"
        "  - {class_name: verl_teachers.Broken}\n"
        "  - {class_name: verl_teachers.Silent}\n"
        "  - {class_name: verl_teachers.TeacherInteraction, config: {a: ['${b}']}}\n"
        "  - {class_name: verl_teachers.TeacherInteraction, name: 4}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_verl_interactions(file)
    assert str(caught.value) == (
        f"{file}: interaction[0] = 'teacher': expected name, class_name and config; "
        "interaction[1].class_name = 'Teacher': expected package.module.Class; "
        "interaction[2].class_name = 'verl_teachers.Nobody': verl_teachers has no class Nobody; "
        "interaction[3]: Broken raised KeyError: 'level'; "
        "interaction[4]: verl_teachers.Silent has no method generate_response: expected verl's "
        "interaction protocol; "
        "interaction[5].config.a[0] = '${b}': interpolation is not resolved; write the value; "
        "interaction[6].name = 4: expected text"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interaction: []", "interaction = []; expected a list of interactions"),
        (None, "No such file or directory"),
    ],
)
def test_file_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "interactions.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_verl_interactions(file)
    assert str(caught.value) == f"{file}: {message}"
