"""Sub-agents of a native agent: a context of their own for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollout.agents.prompt_sampling import sampling_of, top_log_probs_fault
from rollout.engine.core import SamplingParams
from rollout.errors import AgentError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.agents.conversation import Conversation
    from rollout.agents.identity import Identity
    from rollout.agents.services import Services
    from rollout.agents.wording import Given
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
    drawn = context.main.sampling if sampling is None else _sampling(context, sampling)
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


def _sampling(context: Context, sampling: Mapping[str, Any] | SamplingParams) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling
    if not isinstance(sampling, Mapping):
        raise AgentError(f"open_segment: sampling = {sampling!r:.80}; expected a mapping")
    services = context.services
    overrides = {**context.prompt.sampling, **sampling}
    try:
        drawn = sampling_of(services.config, overrides, validate=context.identity.validate)
    except ConfigError as error:
        raise AgentError(f"open_segment: {error}") from error
    fault = top_log_probs_fault(drawn.top_log_probs, services.engines.info)
    if fault:
        raise AgentError(f"open_segment: {fault}")
    return drawn
