"""Trajectories that were saved, of a batch or in a journal. Importing this imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollout.batch.storage import JOURNAL, TRAJECTORIES, read_trajectories
from rollout.scheduling.journal.ended_trajectories import ended_trajectories
from rollout.scheduling.journal.frames import MAGIC_OF_ANY

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory


def load_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories of a ``trajectories.jsonl``, or those that a journal has finished.

    In the order of the file: that of the rows where `RolloutBatch.save` wrote it. In the order of
    (group, member) `collate` makes a batch of them. Where ``rollout run`` did not come to save a
    batch, the journal is read that it left beside the path. Images and videos are there without
    their contents, which `RolloutBatch.load` has. A last line or record that was cut short is left
    out, with a warning, and so are trajectories of a damaged journal that miss a part.

    Args:
        path: One of these, or the directory of them.

    Raises:
        RolloutError: The file cannot be read, or a line describes no trajectory; names it.
    """
    path = Path(path)
    if path.is_dir():
        path /= TRAJECTORIES
    beside = path.with_name(JOURNAL)
    if not path.exists() and path.name == TRAJECTORIES and beside.exists():
        path = beside
    return ended_trajectories(path) if _is_journal(path) else read_trajectories(path)


def _is_journal(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC_OF_ANY)) == MAGIC_OF_ANY
    except OSError:
        return False  # which reading it says better
