"""Names in prompts that are not registered: of agents, tools and simulated users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollout.agents.agent_loop import get_agent
from rollout.errors import AgentError, ConfigError, PromptError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rollout.config import AgentConfig
    from rollout.interactions import InteractionRegistry
    from rollout.types import Prompt

#: Unknown names that an error lists.
LISTED = 5


def check_names(
    prompts: Sequence[Prompt],
    agent: AgentConfig,
    tools: Collection[str],
    interactions: InteractionRegistry,
) -> None:
    """Let a call pass of which at least one prompt names nothing unknown; others are rejected.

    Args:
        agent: What prompts take that name nothing.
        tools: Names of the tools that there are.

    Raises:
        PromptError: Each prompt names an agent, a tool or an interaction that is not registered.
    """
    faults = [_fault(prompt, agent, tools, interactions) for prompt in prompts]
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


def _fault(
    prompt: Prompt,
    agent: AgentConfig,
    tools: Collection[str],
    interactions: InteractionRegistry,
) -> str:
    """What is unknown of a prompt's names; empty where nothing is."""
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
    if name:
        try:
            interactions.check(name)
        except ConfigError as error:
            return f"extra['interaction_kwargs']['name'] = {name!r:.80}: {error}"
    return ""
