"""The prompts of a call, checked before any work; a fault names field, value and expectation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rollout.agents.agent_loop import get_agent
from rollout.errors import AgentError, ConfigError, PromptError
from rollout.limits import AGENT_TIMEOUT_S
from rollout.types import Prompt
from rollout.utf8 import is_encodable

if TYPE_CHECKING:
    from rollout.config import AgentConfig
    from rollout.interactions import InteractionRegistry

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
        if first.setdefault(uid, index) != index:
            faults.append(
                f"prompts[{index}].uid = {uid!r}: the uid of prompts[{first[uid]}] "
                "too; uids must be unique within a call"
            )
    if faults:
        raise PromptError("\n".join(faults))
    return list(first)


def check_prompt(prompt: object, path: str) -> None:
    """Check one prompt.

    Raises:
        PromptError: It is none, or a field of it is wrong.
    """
    if not isinstance(prompt, Prompt):
        raise PromptError(f"{path}: expected a Prompt, got {type(prompt).__name__}")
    faults = find_faults(prompt)
    if faults:
        raise PromptError("\n".join(f"{path}.{fault}" for fault in faults))


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
    is_number = isinstance(own, int | float) and not isinstance(own, bool)
    if own is not None and not (is_number and own > 0):
        faults.append(f"extra[{AGENT_TIMEOUT_S!r}] = {own!r:.80}: expected a number > 0")
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
