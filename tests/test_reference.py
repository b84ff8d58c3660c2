"""Pages that are written from the classes say what these say now."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollout import AgentContext, Conversation, RolloutBatch, Trajectory
from rollout.agents import AssistantTurn
from rollout.agents.turn import SampledTokens
from rollout.chat import Transcript
from rollout.chat.transcript import Span
from rollout.config import RolloutConfig, reference
from rollout.config.checks import options_of
from rollout.config.section_type import annotations_of, is_section
from rollout.types import InvalidToolCall, Message, ToolCall

DOCS = Path("docs")
configuration_reference = cache(reference.configuration_reference)


def test_configuration_reference_is_what_the_classes_say() -> None:
    written = (DOCS / "configuration-reference.md").read_text(encoding="utf-8")
    assert written == configuration_reference(), "run `make docs`"


def test_configuration_reference_explains_every_field() -> None:
    rows = {}
    for part in re.split(r"\n\n##+ (?!`\w+\.kind)", configuration_reference())[1:]:
        found = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", part, re.MULTILINE)
        rows[part.partition("\n")[0].strip("`")] = found
    for name, annotation in annotations_of(RolloutConfig).items():
        if not is_section(annotation) or name == "validation_sampling":
            continue
        options = [annotations_of(option).items() for option in options_of(annotation)]
        fields = [key for option in options for key, inner in option if not is_section(inner)]
        assert [row[0] for row in rows[name]] == fields
        for key, inner in (pair for option in options for pair in option):
            if is_section(inner):
                assert [row[0] for row in rows[f"{name}.{key}"]] == [*annotations_of(inner)]
        assert all(len(text.strip()) > 8 for *_, text in rows[name])


def public(cls: Any) -> set[str]:
    """What can be read of an object: properties, methods, and the fields of a Struct."""
    methods = {name for name, value in inspect.getmembers(cls) if not name.startswith("_")}
    fields = getattr(cls, "__struct_fields__", ())
    return methods | {name for name in fields if not name.startswith("_")}


@pytest.mark.parametrize(
    "cls",
    [
        AssistantTurn,
        SampledTokens,
        Transcript,
        Span,
        Message,
        ToolCall,
        InvalidToolCall,
        Trajectory,
        AgentContext,
        Conversation,
    ],
)
def test_what_an_agent_may_read_is_documented(cls: type) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    names = ["AgentContext", "Conversation"] if cls is AgentContext else [cls.__name__]
    sections = [page.partition(f"## `{name}`")[2].partition("\n## ")[0] for name in names]
    section = "\n".join(sections)
    assert all(sections)
    missing = {name for name in public(cls) if not re.search(rf"`(await )?{name}\b", section)}
    assert missing == set()


def test_what_an_agent_may_read_names_the_attributes_of_its_context() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^        ([a-z_, ]+): ", AgentContext.__doc__ or "", re.MULTILINE)
    names = [name for names in listed for name in names.split(", ")]
    assert names
    assert len(public(AgentContext)) > 10
    assert [name for name in names if f"`{name}`" not in page] == []
    assert RolloutBatch.__name__ in page
