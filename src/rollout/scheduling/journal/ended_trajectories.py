"""The finished trajectories of a journal, read without engines."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from rollout.agents.kept_messages import TurnReader
from rollout.chat import get_tool_parser
from rollout.config import config_from_dict
from rollout.engine.pool.model_template import load_model_template
from rollout.errors import JournalError
from rollout.scheduling.journal.journal_reading import (
    PromptKey,
    logger,
    read_journal,
    reader_of,
    say_damaged,
    say_torn,
    steps_of,
)
from rollout.scheduling.journal.packed_prompt import prompt_of
from rollout.scheduling.journal.packed_trajectory import trajectory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from pathlib import Path

    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.scheduling.journal.entries import EndEntry, Entry, Key, PromptEntry
    from rollout.scheduling.journal.frames import Damage
    from rollout.scheduling.journal.journal_reading import Contents, Payload, Recorded
    from rollout.scheduling.journal.packed_trajectory import ReaderOf
    from rollout.types import Prompt

    Read = Callable[[Payload], Entry]


class _LateTemplate:
    """A template that is loaded once somebody reads a message."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config

    @cached_property
    def _template(self) -> ChatTemplate:
        return load_model_template(self._config)

    def decode(self, ids: Sequence[int]) -> str:
        """As `ChatTemplate.decode`."""
        return self._template.decode(ids)


class _Prompts(dict[PromptKey, "Prompt | None"]):
    """Those of a journal, each read when it is first asked for; None where it is lost."""

    def __init__(self, contents: Contents, read: Read) -> None:
        super().__init__()
        self._payloads, self._read = contents.prompts, read

    def __missing__(self, key: PromptKey) -> Prompt | None:
        payload = self._payloads.get(key)
        entry = None if payload is None else cast("PromptEntry", self._read(payload))
        self[key] = prompt = None if entry is None else prompt_of(entry.fields)
        return prompt


def ended_trajectories(path: Path) -> list[Trajectory]:
    """Those that a journal has, in the order in which they were first spoken of.

    Their messages are decoded with the tokenizer of the journal's model when they are read. Of a
    file that is damaged those that are there whole; a warning says how many are not.

    Raises:
        JournalError: It cannot be read, or is none.
    """
    return list(ended_by_key(path).values())


def ended_by_key(path: Path, known: Container[Key] = ()) -> dict[Key, Trajectory]:
    """As `ended_trajectories`, each with what it was asked for; without those that are known."""
    contents = read_journal(path, skips_damage=True)
    if contents.torn is not None:
        say_torn(path, contents.torn)
    if contents.damages:
        say_damaged(path, contents)
    if contents.header is None:
        if contents.damages:
            raise JournalError(f"{path}: is damaged: its first record, of the run, is lost")
        return {}
    header, read = contents.header, reader_of(path)
    config = config_from_dict(header.all_config)
    template: Any = _LateTemplate(config)
    parser = get_tool_parser(config.agent.tool_format)
    prompts = _Prompts(contents, read)
    found, lost = {}, 0
    for key, recorded in contents.trajectories.items():
        if recorded.end is None or key in known:
            continue
        prompt = prompts[key.step, key.uid, key.validate, key.call]
        offered = _offered(header.schemas, prompt)

        def reader(
            schemas: Sequence[Mapping[str, Any]] | None,
            offered: Sequence[Mapping[str, Any]] = offered,
        ) -> TurnReader:
            return TurnReader(template, parser, offered if schemas is None else schemas)

        if contents.damages and not _is_whole(recorded, contents.damages, read):
            lost += 1
            continue
        found[key] = _made(recorded, read, prompt, reader)
    if lost:
        logger.warning("%s: %d finished trajectories are left out: parts are missing", path, lost)
    return found


def _made(recorded: Recorded, read: Read, prompt: Prompt | None, reader: ReaderOf) -> Trajectory:
    assert recorded.end is not None
    entry = cast("EndEntry", read(recorded.end))
    _, rows = steps_of(recorded, read)
    return trajectory_of(entry.trajectory, prompt, reader, rows)


def _is_whole(recorded: Recorded, damages: Sequence[Damage], read: Read) -> bool:
    """Whether all of a finished trajectory is there, though parts of the file are not."""
    if _is_doubtful(recorded, damages):
        return False
    unread: Any = None  # nobody reads its messages
    try:
        made = _made(recorded, read, None, lambda _: unread)
    except LookupError:  # its end tells of turns that are not there
        return False
    return all(each.is_whole for each in made.transcripts)


def _is_doubtful(recorded: Recorded, damages: Sequence[Damage]) -> bool:
    """Whether it may have begun again from its start in a place that is lost, and ended there."""
    if recorded.end is None or not recorded.turns:
        return False
    last, end = recorded.turns[-1].start, recorded.end.start
    return any(last < each.start < end for each in damages)


def _offered(
    schemas: Sequence[Mapping[str, Any]], prompt: Prompt | None
) -> list[Mapping[str, Any]]:
    """Those of the tools that a prompt offers."""
    if prompt is None or prompt.tools is None:
        return list(schemas)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    return [by_name[name] for name in prompt.tools if name in by_name]
