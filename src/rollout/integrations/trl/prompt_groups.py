"""What TRL asks for, as prompts of ours: groups of rows that are the same prompt.

TRL repeats each prompt once for each generation, equal ones adjacent; the rows of a group can be
spread over several processes of the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.config.config_faults import Fault, config_error
from rollout.integrations.repeated_prompts import prompt_of_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Prompt

#: TRL's method that has the rows of the dataset, of which a rollout function gets the prompts.
_CALLER, _ROWS = "_generate_and_score_completions", "inputs"
#: A row's own uid may name several groups: whose seeds would be equal.
_UID = "uid"


@attrs.frozen(kw_only=True)
class PromptGroup:
    """Adjacent rows of one prompt.

    Attributes:
        first: Its first row of those of this process.
        count: How many follow each other.
        number: Of the group among those of all processes.
        member: Which of the group's rows its first one is here; others are in other processes.
    """

    first: int
    count: int
    number: int
    member: int

    @property
    def name(self) -> str:
        """Tells it from every other group, and from the rows of the same one elsewhere."""
        return f"{self.number}" if self.member == 0 else f"{self.number}.{self.member}"


def groups_of(prompts: Sequence[Any], size: int, process: int) -> list[PromptGroup]:
    """The groups of the prompts of one process, which all have as many.

    Args:
        prompts: As a rollout function gets them.
        size: Generations of each prompt.
        process: Which process this is.
    """
    begin = process * len(prompts)
    groups: list[PromptGroup] = []
    for row, prompt in enumerate(prompts):
        number, member = divmod(begin + row, size)
        if row and member and prompt == prompts[row - 1]:
            groups[-1] = attrs.evolve(groups[-1], count=groups[-1].count + 1)
        else:
            groups.append(PromptGroup(first=row, count=1, number=number, member=member))
    return groups


def dataset_rows(prompts: Sequence[Any]) -> list[Mapping[str, Any]] | None:
    """The rows of the dataset that these prompts are of; None where nobody knows them.

    TRL gives prompts alone to a rollout function, and all columns to reward functions. Tools,
    agents and rewards of ours want them too: they stand in the method that made the call.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name != _CALLER:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    rows: Any = frame.f_locals.get(_ROWS)
    if not isinstance(rows, list) or len(rows) != len(prompts):
        return None
    return rows if all(isinstance(row, Mapping) for row in rows) else None


def refuse_columns(rows: Sequence[Mapping[str, Any]], taken: Sequence[str]) -> None:
    """Raise a `ConfigError` where columns have names of lists that reward functions get."""
    text = "expected another name: reward functions get a list of this one"
    faults = [Fault(f"column {name!r}", text) for name in taken if rows and name in rows[0]]
    if faults:
        raise config_error("the dataset", faults)


def prompt_of(
    prompt: Any, columns: Mapping[str, Any], uid: str, sampling: Mapping[str, Any]
) -> Prompt:
    """A row of TRL's dataset as a prompt; columns as in files of prompts.

    Args:
        prompt: Messages, or the text of a user.
        columns: All of them; those without a meaning here become `extra`.
        uid: Names its group.
        sampling: What the trainer samples with; the row's own ``sampling`` stands over it.

    Raises:
        PromptError: A column holds something else than it should; names all that do.
    """
    row = {**columns, "prompt": prompt}
    named = row.pop(_UID, None)
    made = prompt_of_columns(row, None, sampling)
    extra = dict(made.extra) | ({} if named is None else {_UID: named})
    return msgspec.structs.replace(made, uid=uid, extra=extra)
