"""Prompts that a trainer sends n times each, as groups of n members."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.batch.metrics import batch_metrics
from rollout.errors import ConfigError, PromptError
from rollout.scheduling.prompt_files import read_row
from rollout.scopes import open_task_group
from rollout.types import Prompt

if TYPE_CHECKING:
    from rollout.batch import RolloutBatch
    from rollout.chat.trajectory import Trajectory
    from rollout.runtime.blocking import BlockingRollout

PromptOf = Callable[[Mapping[str, Any]], Prompt]
#: Sampling settings that trainers name otherwise than `sampling` does.
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "max_generate_length": "max_new_tokens",
}
_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
)
#: Settings of the trainers' servers that change no token here, whatever they are.
_OF_TEXT = (
    "logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "no_stop_trim",
    "detokenize",
)


@attrs.frozen(kw_only=True)
class Repeated:
    """Prompts as groups, and where their members stand in what the trainer sent.

    Attributes:
        prompts: One for each group.
        places: Of each group, where its members stand, in the order of the trainer.
    """

    prompts: Sequence[Prompt]
    places: Sequence[Sequence[int]]

    def renamed(self, uids: Sequence[str]) -> Repeated:
        """The same, with these uids: one for each group."""
        prompts = [
            msgspec.structs.replace(prompt, uid=uid)
            for prompt, uid in zip(self.prompts, uids, strict=True)
        ]
        return attrs.evolve(self, prompts=prompts)

    async def run(
        self, runtime: BlockingRollout, *, step: int | None, validate: bool
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Every member of every group: in the order of the trainer, and figures of the whole.

        Groups of one size are one call; cancellation ends them all.

        Raises:
            As `RolloutRuntime.generate`.
        """
        found: dict[int, Trajectory] = {}
        batches: list[RolloutBatch] = []
        by_size: dict[int, list[int]] = {}
        for at, members in enumerate(self.places):
            by_size.setdefault(len(members), []).append(at)

        async def run_those(size: int, groups: list[int]) -> None:
            prompts = [self.prompts[at] for at in groups]
            batch: RolloutBatch = await runtime.agenerate(
                prompts, samples=size, step=step, validate=validate, layout="packed"
            )
            batches.append(batch)
            for each in batch.trajectories:
                found[self.places[groups[each.group]][each.member]] = each

        async with open_task_group() as tasks:
            calls = [tasks.start_soon(run_those, *each) for each in by_size.items()]
            for call in calls:
                await call.wait()
        trajectories = [found[at] for at in sorted(found)]
        return trajectories, _whole_metrics(trajectories, [batch.metrics for batch in batches])


def _whole_metrics(
    trajectories: Sequence[Trajectory], calls: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Figures of all trajectories; of what only their calls know, the loop's lag, the largest."""
    if len(calls) == 1:
        return dict(calls[0])
    largest: dict[str, float] = {}
    for name, value in (pair for call in calls for pair in call.items()):
        largest[name] = max(value, largest.get(name, value))
    return largest | batch_metrics(trajectories, {})


def grouped(
    keys: Sequence[Hashable], prompt_at: Callable[[int], Prompt], names: Mapping[Hashable, str]
) -> Repeated:
    """Prompts by the keys of their groups, in the order in which those appear.

    Args:
        keys: Of each prompt that the trainer sent; members of a group share one.
        prompt_at: The prompt at such a place.
        names: The uid of a group by its key; one that has none is numbered.
    """
    places: dict[Hashable, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(key, []).append(at)
    prompts = [
        msgspec.structs.replace(prompt_at(members[0]), uid=names.get(key, f"prompt-{number}"))
        for number, (key, members) in enumerate(places.items())
    ]
    return Repeated(prompts=prompts, places=list(places.values()))


def prompt_of_columns(
    columns: Mapping[str, Any],
    prompt_of: PromptOf | None,
    sampling: Mapping[str, Any],
) -> Prompt:
    """One row of a trainer's data as a prompt, sampled as the trainer says.

    Raises:
        PromptError: A column is none of what it may be; names it.
    """
    if prompt_of is not None:
        prompt = prompt_of(columns)
        if not isinstance(prompt, Prompt):
            raise PromptError(f"prompt_of returned {prompt!r:.80}; expected a Prompt")
    else:
        try:
            prompt = read_row(columns)
        except PromptError as error:
            faults = "; ".join(str(error).split("\n"))
            raise PromptError(f"a row of the trainer's data: {faults}") from None
    return msgspec.structs.replace(prompt, sampling={**sampling, **prompt.sampling})


def sampling_of_trainer(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A trainer's sampling settings as a prompt's; the seed is ours.

    Raises:
        ConfigError: One has no equal here; names it.
    """
    translated: dict[str, Any] = {}
    for name, value in given.items():
        ours = name if name in _SAME_NAMES else _OTHER_NAMES.get(name)
        if value is None or name in _OF_TEXT:
            continue
        if ours is None:
            _refuse(name, value, where)
        elif ours == "top_k" and isinstance(value, Real):  # what is none is refused with its name
            translated[ours] = value if float(value) > 0 else -1
        else:
            translated[ours] = value
    return translated


def _refuse(name: str, value: Any, where: str) -> None:
    """Settings of other names are refused, unless their value changes nothing."""
    with suppress(TypeError, ValueError):  # what cannot be compared is not neutral
        is_neutral = (name == "min_tokens" and value <= 1) or (name == "n" and value == 1)
        if is_neutral or value in ([], (), {}, False):
            return
    expected = "engines here have no such setting; expected it unset"
    raise ConfigError(f"{where}.{name} = {value!r:.100}: {expected}")
