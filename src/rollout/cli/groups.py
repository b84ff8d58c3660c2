"""The groups of a batch as a table: which member got what for which question."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from rollout.batch import RolloutBatch
    from rollout.chat.trajectory import Trajectory

COLUMNS = ("question", "answer", "rewards", "outcomes", "turns", "tokens")
#: A longer question is cut to this many characters.
MAX_QUESTION = 60


def group_table(batch: RolloutBatch, *, is_plain: bool) -> Table:
    """One line for each group: question, right answer, and of its members the rewards, the
    outcomes, the turns and the generated tokens.

    Args:
        batch: With the trajectories that it was made of.
        is_plain: Leave out lines and colours.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    table = Table(box=None if is_plain else box.SIMPLE_HEAD, pad_edge=False)
    groups = groupby(batch.trajectories, key=lambda row: row.group)
    rows = [_cells(list(members)) for _, members in groups]
    for title, *cells in zip(COLUMNS, *rows, strict=True):
        longest = max(cell_len(word) for cell in [title, *cells] for word in cell.split())
        table.add_column(title, overflow="fold", min_width=longest)
    for row in rows:
        table.add_row(*row)
    return table


def _cells(members: Sequence[Trajectory]) -> tuple[str, ...]:
    first = members[0]
    truth = None if first.prompt is None else first.prompt.ground_truth
    return (
        _question(first),
        "" if truth is None else str(truth),
        " ".join(_reward(row.reward) for row in members),
        ", ".join(f"{n} {name}" for name, n in Counter(map(_outcome, members)).most_common()),
        " ".join(str(row.num_turns) for row in members),
        " ".join(str(row.generated_length) for row in members),
    )


def _question(row: Trajectory) -> str:
    """What the prompt's `extra` calls its question, else the last words before the agent's."""
    prompt = row.prompt
    text = "" if prompt is None else str(prompt.extra.get("question") or _last_message(row))
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUESTION else f"{text[: MAX_QUESTION - 1]}…"


def _last_message(row: Trajectory) -> str:
    prompt = row.prompt
    last = prompt.messages[-1] if prompt is not None and prompt.messages else None
    content = last.get("content") if isinstance(last, dict) else getattr(last, "content", None)
    return content if isinstance(content, str) else ""


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.2f}"


def _outcome(row: Trajectory) -> str:
    return f"{row.outcome} ({row.reason})" if row.reason else str(row.outcome)
