"""Trajectories that were saved: in a journal, which is read without engines, or with a batch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.agents.kept_messages import TurnReader
from rollout.chat import get_tool_parser
from rollout.config import config_from_dict
from rollout.engine.pool.model_template import load_model_template
from rollout.journal.index import get_prompt_key, make_reader, read_journal
from rollout.journal.log_file import MAGIC_PREFIX
from rollout.journal.records import EndRecord, Key, PromptRecord, PullRecord
from rollout.journal.trajectory_record import unpack_end
from rollout.journal.values import read_prompt

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.types import Prompt


class _LateTemplate:
    """A template that is loaded once somebody reads a message."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config

    @cached_property
    def _template(self) -> ChatTemplate:
        return load_model_template(self._config)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See `ChatTemplate.stop_token_ids`."""
        return self._template.stop_token_ids

    def token_ids(self, names: Iterable[str]) -> tuple[int, ...]:
        """See `ChatTemplate.token_ids`."""
        return self._template.token_ids(names)

    def decode(self, ids: Sequence[int]) -> str:
        """See `ChatTemplate.decode`."""
        return self._template.decode(ids)


def read_finished(path: Path, known: Container[Key] = ()) -> dict[Key, Trajectory]:
    """Read the trajectories that a journal has finished, in the order of their first records.

    Images and videos are without their contents. Messages are decoded with the tokenizer of the
    journal's model once they are read.

    Args:
        known: Those that are left out.

    Raises:
        JournalError: It cannot be read, is no journal, or is damaged.
    """
    index = read_journal(path)
    index.warn_of_tail(path, "left out")
    if index.header is None:
        return {}
    read, schemas = make_reader(path), index.header.schemas
    config = config_from_dict(index.header.all_config)
    template: Any = _LateTemplate(config)
    parser = get_tool_parser(config.agent.tool_format)
    found: dict[Key, Trajectory] = {}
    prompts: dict[Any, Prompt] = {}
    for key, recorded in index.trajectories.items():
        if recorded.end is None or key in known:
            continue
        prompt_key = get_prompt_key(key)
        if prompt_key not in prompts:
            record = read(index.prompts[prompt_key])
            assert isinstance(record, PromptRecord | PullRecord)
            prompts[prompt_key] = read_prompt(record.fields, uid=key.uid)
        offered = _choose_offered(schemas, prompts[prompt_key])

        def make_turn_reader(
            own: Sequence[Mapping[str, Any]] | None,
            offered: Sequence[Mapping[str, Any]] = offered,
        ) -> TurnReader:
            return TurnReader(template, parser, offered if own is None else own)

        end = read(recorded.end)
        assert isinstance(end, EndRecord)
        found[key] = unpack_end(dict(end.ends)[key], prompts[prompt_key], make_turn_reader)
    return found


def _choose_offered(
    schemas: Sequence[Mapping[str, Any]], prompt: Prompt
) -> list[Mapping[str, Any]]:
    """Return the schemas of the tools that a prompt offers."""
    if prompt.tools is None:
        return list(schemas)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    return [by_name[name] for name in prompt.tools if name in by_name]


def load_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories of a ``trajectories.jsonl``, or those that a journal has finished.

    In the order of the file: that of the rows where `RolloutBatch.save` wrote it. In the order of
    (group, member) `collate` makes a batch of them. Where ``rollout run`` did not come to save a
    batch, the journal is read that it left beside the path. Images and videos are there without
    their contents, which `RolloutBatch.load` has. A last line or record that was cut short is left
    out, with a warning.

    Args:
        path: One of these, or the directory of them.

    Raises:
        RolloutError: The file cannot be read, or a line describes no trajectory; names it.
    """
    from rollout.batch.storage import JOURNAL, TRAJECTORIES, read_trajectories  # imports torch

    path = Path(path)
    if path.is_dir():
        path /= TRAJECTORIES
    beside = path.with_name(JOURNAL)
    if not path.exists() and path.name == TRAJECTORIES and beside.exists():
        path = beside
    return list(read_finished(path).values()) if _is_journal(path) else read_trajectories(path)


def _is_journal(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX
    except OSError:
        return False  # which reading it says better
