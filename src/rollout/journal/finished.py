"""Trajectories that were saved: in a journal, which is read without engines, or with a batch."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import config_from_dict
from rollout.engine.pool.model_template import load_model_template
from rollout.journal.index import get_prompt_key, make_reader, read_journal
from rollout.journal.log_file import MAGIC_PREFIX
from rollout.journal.records import EndRecord, Key, PromptRecord, PullRecord
from rollout.journal.trajectory_record import unpack_end
from rollout.journal.values import read_prompt

if TYPE_CHECKING:
    from collections.abc import Container

    from rollout.chat.trajectory import Trajectory
    from rollout.types import Prompt


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
    read, config = make_reader(path), config_from_dict(index.header.all_config)
    load_template = cache(partial(load_model_template, config))
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
        end = read(recorded.end)
        assert isinstance(end, EndRecord)
        packed, prompt = dict(end.ends)[key], prompts[prompt_key]
        found[key] = unpack_end(packed, prompt, lambda ids: load_template().decode(ids))
    return found


def load_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories of a ``trajectories.jsonl``, or those that a journal has finished.

    In the order of the file: that of the rows where `RolloutBatch.save` wrote it. In the order of
    (group, member) `collate` makes a batch of them. Where ``rollout run`` did not come to save a
    batch, the journal is read that it left beside the path. Images and videos are there without
    their contents, which `RolloutBatch.load` has. A last record of a journal that was cut short is
    left out, with a warning.

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
