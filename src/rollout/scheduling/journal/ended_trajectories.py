"""The finished trajectories of a journal, read without engines."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from rollout.agents.kept_messages import TurnReader
from rollout.chat import get_tool_parser
from rollout.config import config_from_dict
from rollout.engine.driver.model_template import template_of
from rollout.scheduling.journal.journal_reading import (
    read_journal,
    reader_of,
    say_torn,
    steps_of,
)
from rollout.scheduling.journal.packed_trajectory import prompt_of, trajectory_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.scheduling.journal.entries import EndEntry, Key, PromptEntry
    from rollout.scheduling.journal.journal_reading import Contents
    from rollout.types import Prompt


class _LateTemplate:
    """A template that is loaded once somebody reads a message."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config

    @cached_property
    def _template(self) -> ChatTemplate:
        return template_of(self._config)

    def decode(self, ids: Sequence[int]) -> str:
        """As `ChatTemplate.decode`."""
        return self._template.decode(ids)


def ended_trajectories(path: Path) -> list[Trajectory]:
    """Those that a journal has, in the order in which they were first spoken of.

    Their messages are decoded with the tokenizer of the journal's model when they are read.

    Raises:
        JournalError: It cannot be read, or is none.
    """
    return list(ended_by_key(path).values())


def ended_by_key(path: Path) -> dict[Key, Trajectory]:
    """As `ended_trajectories`, each with what it was asked for."""
    contents = read_journal(path)
    if contents.torn is not None:
        say_torn(path, contents.torn)
    if contents.header is None:
        return {}
    header, read = contents.header, reader_of(path)
    config = config_from_dict(header.all_config)
    template: Any = _LateTemplate(config)
    parser = get_tool_parser(config.agent.tool_format)
    prompts = _prompts(contents, path)
    found = {}
    for key, recorded in contents.trajectories.items():
        if recorded.end is None:
            continue
        entry = cast("EndEntry", read(recorded.end))
        prompt = prompts.get((key.step, key.uid, key.validate, key.call))
        offered = _offered(header.schemas, prompt)

        def reader(
            schemas: Sequence[Mapping[str, Any]] | None,
            offered: Sequence[Mapping[str, Any]] = offered,
        ) -> TurnReader:
            return TurnReader(template, parser, offered if schemas is None else schemas)

        _, rows = steps_of(recorded, read)
        found[key] = trajectory_of(entry.trajectory, prompt, reader, rows)
    return found


def _prompts(contents: Contents, path: Path) -> dict[Any, Prompt]:
    read = reader_of(path)
    return {
        key: prompt_of(cast("PromptEntry", read(payload)).fields)
        for key, payload in contents.prompts.items()
    }


def _offered(
    schemas: Sequence[Mapping[str, Any]], prompt: Prompt | None
) -> list[Mapping[str, Any]]:
    """Those of the tools that a prompt offers."""
    if prompt is None or prompt.tools is None:
        return list(schemas)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    return [by_name[name] for name in prompt.tools if name in by_name]
