"""Sub-agents of a native agent: a context of their own for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollout.agents.prompt_sampling import sampling_given
from rollout.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.agents.conversation import Conversation
    from rollout.agents.identity import Identity
    from rollout.agents.services import Services
    from rollout.agents.wording import Given
    from rollout.engine.core import SamplingParams
    from rollout.tools import TrajectoryTools
    from rollout.types import Prompt

    class Context(Protocol):
        """What is needed of an `AgentContext`, which this module is imported by."""

        @property
        def main(self) -> Conversation: ...
        @property
        def tools(self) -> TrajectoryTools: ...
        @property
        def services(self) -> Services: ...
        @property
        def prompt(self) -> Prompt: ...
        @property
        def identity(self) -> Identity: ...
        def beside(self: C, conversation: Conversation) -> C: ...


C = TypeVar("C", bound="Context")


@asynccontextmanager
async def open_segment(
    context: C,
    messages: Given,
    purpose: str,
    tools: Sequence[str | Mapping[str, Any]] | None,
    sampling: Mapping[str, Any] | SamplingParams | None,
) -> AsyncIterator[C]:
    """See `AgentContext.open_segment`."""
    offered = None if tools is None else _schemas(context, tools)
    drawn = context.main.sampling
    if sampling is not None:
        where, validate = "open_segment", context.identity.validate
        drawn = sampling_given(where, context.services, context.prompt, sampling, validate=validate)
    opened = await context.main.subagent(messages, purpose=purpose, tools=offered)
    opened.sampling = drawn
    try:
        yield context.beside(opened)
    finally:
        for each in opened.all():
            each.close()
            context.services.engines.forget(each.session_id)


def _schemas(context: Context, tools: Sequence[str | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise AgentError(f"open_segment: tools = {tools!r:.80}; expected a list")
    own = dict(zip(context.tools.names, context.tools.schemas, strict=True))
    return [_schema(each, own) for each in tools]


def _schema(tool: Any, own: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if isinstance(tool, str) and tool in own:
        return own[tool]
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return tool  # type: ignore[no-any-return]
    known = ", ".join(map(repr, own)) or "none"
    raise AgentError(
        f"open_segment: the tool {tool!r:.80} is none of the trajectory's ({known}) and no schema; "
        "expected a name, or {'type': 'function', 'function': {'name': ...}}"
    )
