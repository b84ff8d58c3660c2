"""What callers give, checked before any work; a fault names field, value and expectation."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any

from rollout.agents.agent_loop import get_agent
from rollout.chat.trajectory import Group
from rollout.config import GroupPolicy
from rollout.errors import AgentError, ConfigError, PromptError
from rollout.limits import AGENT_TIMEOUT_S
from rollout.tensor_layout import layout_faults
from rollout.types import Prompt
from rollout.utf8 import is_encodable, is_name

if TYPE_CHECKING:
    from rollout.config import AgentConfig
    from rollout.interactions import InteractionRegistry

#: The largest step, and number of groups: what trainers and engines keep numbers in.
MAX_STEP = 2**63 - 1
#: Added to errors of callers who give rows of a data set, or texts.
HOW_TO_PROMPT = (
    'write [Prompt("a question")], [Prompt(messages=row["prompt"], ground_truth=...) for row in '
    "rows], or rollout.read_prompts(path) for a file of rows"
)
#: The priorities that every engine can tell apart, whichever sign it gives them.
MOST_PRIORITY = 2**31 - 1
#: Unknown names that an error lists.
LISTED = 5
#: What each field of a prompt must be, and in words.
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "uid": ((str, type(None)), "a string or None"),
    "agent_name": ((str, type(None)), "a string or None"),
    "data_source": ((str, type(None)), "a string or None"),
    "sampling": ((Mapping,), "a mapping"),
    "tools_kwargs": ((Mapping,), "a mapping"),
    "extra": ((Mapping,), "a mapping"),
    "tools": ((list, tuple, type(None)), "a list or None"),
    "messages": ((list, tuple), "a text or a list of messages"),
    "priority": ((int,), "an integer, -2**31 + 1 to 2**31 - 1"),
}


# Of calls.


def check_call(
    step: Any, validate: Any, samples: Any, layout: Any = "padded", trim: Any = False
) -> tuple[int | None, int | None]:
    """Check the arguments of `generate` and `stream`; a `PromptError` names all faults.

    Returns:
        Step and samples; None: as calls and configuration say.
    """
    faults = []
    if step is not None and not (_is_natural(step) and int(step) <= MAX_STEP):
        faults.append(f"step = {step!r:.80}: expected an integer from 0 to {MAX_STEP}, or None")
    if not isinstance(validate, bool):
        faults.append(f"validate = {validate!r:.80}: expected True or False")
    if samples is not None and not (_is_natural(samples) and int(samples)):
        faults.append(f"samples = {samples!r:.80}: expected an integer ≥ 1, or None")
    _raise(faults + layout_faults(layout, trim))
    return None if step is None else int(step), None if samples is None else int(samples)


def check_group_call(
    source: Any, policy: Any, groups: Any, max_staleness: Any, groups_per_step: Any
) -> None:
    """Check the arguments of `collect` and `stream_groups`, without pulling.

    Raises:
        PromptError: The source is none; or others are wrong, all of which it names.
    """
    is_iterable = isinstance(source, AsyncIterable | Iterable)
    if not is_iterable:
        with suppress(TypeError):
            iter(source)  # asks for nothing, where it has its items by number
            is_iterable = True
    if isinstance(source, Prompt | str | bytes | Mapping) or not is_iterable:
        raise PromptError(
            f"source: expected an iterable or async iterable of Prompt, got {type(source).__name__}"
        )
    faults = []
    if not isinstance(policy, GroupPolicy | None):
        faults.append(f"policy = {policy!r:.80}: expected a GroupPolicy, or None")
    steps = 1 if groups_per_step is None else groups_per_step
    for name, value in (("groups", groups), ("groups_per_step", steps)):
        if not (_is_natural(value) and 0 < int(value) <= MAX_STEP):
            faults.append(f"{name} = {value!r:.80}: expected an integer ≥ 1 and at most {MAX_STEP}")
    if max_staleness is not None and not _is_natural(max_staleness):
        faults.append(f"max_staleness = {max_staleness!r:.80}: expected an integer ≥ 0, or None")
    if (max_staleness is None) != (groups_per_step is None):
        faults.append(
            f"max_staleness = {max_staleness!r:.80}, groups_per_step = {groups_per_step!r:.80}: "
            "expected both, or neither"
        )
    _raise(faults)


def check_groups(groups: Any, layout: Any, trim: Any) -> None:
    """Check the arguments of `make_batch`; a `PromptError` names all faults."""
    faults = layout_faults(layout, trim)
    if not isinstance(groups, Sequence) or isinstance(groups, str | bytes):
        faults.append(f"groups = {groups!r:.80}: expected a list of the groups that a stream gave")
    else:
        faults += [
            f"groups[{at}] = {each!r:.80}: expected a Group"
            for at, each in enumerate(groups)
            if not isinstance(each, Group)
        ]
    _raise(faults)


def check_target(uid: Any, member: Any, reason: Any) -> None:
    """Check the arguments of `cancel`; a `PromptError` names all faults."""
    faults = []
    if not isinstance(uid, str | None):
        faults.append(f"uid = {uid!r:.80}: expected a string, or None for every prompt")
    if member is not None and not _is_natural(member):
        faults.append(f"member = {member!r:.80}: expected an integer ≥ 0, or None for every one")
    if not is_name(reason):
        faults.append(f"reason = {reason!r:.80}: expected a non-empty string in UTF-8")
    _raise(faults)


def _is_natural(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _raise(faults: list[str]) -> None:
    if faults:
        raise PromptError("\n".join(faults))


# Prompts.


def check_prompts(prompts: Sequence[Prompt]) -> list[str]:
    """Check the prompts of a call, and return the uid of each.

    Raises:
        PromptError: Something is no `Prompt`, or two share a uid; nothing has been started.
    """
    if isinstance(prompts, Prompt | str | bytes) or not isinstance(prompts, Sequence):
        found = type(prompts).__name__
        raise PromptError(f"prompts: expected a sequence of Prompt, got {found}; {HOW_TO_PROMPT}")
    faults = [
        f"prompts[{index}]: expected a Prompt, got {type(prompt).__name__}"
        for index, prompt in enumerate(prompts)
        if not isinstance(prompt, Prompt)
    ]
    if faults:
        raise PromptError("\n".join(faults) + f"; {HOW_TO_PROMPT}")
    first: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        faults += [f"prompts[{index}].{fault}" for fault in find_faults(prompt)]
        uid = f"prompt-{index}" if prompt.uid is None else prompt.uid
        if isinstance(uid, str) and first.setdefault(uid, index) != index:
            faults.append(
                f"prompts[{index}].uid = {uid!r}: the uid of prompts[{first[uid]}] "
                "too; uids must be unique within a call"
            )
    _raise(faults)
    return list(first)


def check_prompt(prompt: object, path: str) -> None:
    """Check one prompt.

    Raises:
        PromptError: It is none, or a field of it is wrong.
    """
    if not isinstance(prompt, Prompt):
        raise PromptError(f"{path}: expected a Prompt, got {type(prompt).__name__}")
    _raise([f"{path}.{fault}" for fault in find_faults(prompt)])


def find_faults(prompt: Prompt) -> list[str]:
    """List what is wrong with the fields of a prompt."""
    faults = []
    for field, (types, expected) in _FIELDS.items():
        value = getattr(prompt, field)
        if not isinstance(value, types) or isinstance(value, bool):
            faults.append(f"{field} = {value!r:.80}: expected {expected}")
        elif isinstance(value, int) and abs(value) > MOST_PRIORITY:
            faults.append(f"{field} = {value}: expected {expected}")
        elif isinstance(value, str) and not is_encodable(value):
            faults.append(f"{field} = {value!r:.80}: expected a text that UTF-8 can hold")
    own = prompt.extra.get(AGENT_TIMEOUT_S) if isinstance(prompt.extra, Mapping) else None
    is_number = isinstance(own, float) or (isinstance(own, int) and own < 2**1023)  # a float's most
    if own is not None and not (is_number and not isinstance(own, bool) and own > 0):
        expected = "expected a number > 0 that a float can hold"
        faults.append(f"extra[{AGENT_TIMEOUT_S!r}] = {own!r:.80}: {expected}")
    if isinstance(prompt.tools_kwargs, Mapping):
        faults += [
            f"tools_kwargs[{name!r}] = {kwargs!r:.80}: expected a mapping"
            for name, kwargs in prompt.tools_kwargs.items()
            if not isinstance(kwargs, Mapping)
        ]
    if isinstance(prompt.tools, list | tuple):
        faults += [
            f"tools[{index}] = {name!r:.80}: expected a string"
            for index, name in enumerate(prompt.tools)
            if not isinstance(name, str)
        ]
    return faults


def check_names(
    prompts: Sequence[Prompt],
    agent: AgentConfig,
    tools: Collection[str],
    interactions: InteractionRegistry,
) -> None:
    """Refuse a call each of whose prompts names something unknown; else those are rejected later.

    Args:
        agent: What prompts take that name no agent.
        tools: Names of the tools that there are.

    Raises:
        PromptError: Each prompt names an agent, a tool or an interaction that is not registered.
    """
    faults = [_find_unknown(prompt, agent, tools, interactions) for prompt in prompts]
    if not faults or not all(faults):
        return
    counts = Counter(faults)
    lines = [
        f"\n  prompts[{faults.index(fault)}].{fault}"
        + (f" (and {count - 1:,} further prompts)" if count > 1 else "")
        for fault, count in counts.most_common(LISTED)
    ]
    more = len(counts) - len(lines)
    rest = f"\n  and {more:,} further names" if more else ""
    raise PromptError(f"no prompt can run, since nobody registered:{''.join(lines)}{rest}")


def _find_unknown(
    prompt: Prompt, agent: AgentConfig, tools: Collection[str], interactions: InteractionRegistry
) -> str:
    """Describe the first unknown name of a prompt; empty where there is none."""
    try:
        get_agent(prompt.agent_name or agent.name)
    except AgentError as error:
        return f"agent_name = {prompt.agent_name!r}: {error}"
    unknown = [name for name in prompt.tools or () if name not in tools]
    if unknown:
        known = ", ".join(map(repr, tools)) or "none"
        return f"tools: no tool is called {unknown[0]!r}; known: {known}"
    kwargs = prompt.extra.get("interaction_kwargs")
    name = kwargs.get("name") if isinstance(kwargs, Mapping) else None
    try:
        if name:
            interactions.check(name)
    except ConfigError as error:
        return f"extra['interaction_kwargs']['name'] = {name!r:.80}: {error}"
    return ""
