"""The tools of a runtime: checked once, offered to prompts, opened for trajectories."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollout.child_processes import ChildProcesses, NotImportedError
from rollout.errors import ToolError
from rollout.observe.tally import Tally
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.tools.function_tools import FunctionTool
from rollout.tools.langchain import is_langchain_tool, wrap_langchain_tool
from rollout.tools.policy import ToolGate, ToolPolicy
from rollout.tools.schemas import SchemaCheck, quote_all
from rollout.tools.tool import Tool, ToolContext
from rollout.tools.trajectory_tools import ToolSettings, TrajectoryTools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.tools.results import TruncateSide
    from rollout.types import Prompt
    from rollout.worker_threads import WorkerThreads

logger = logging.getLogger("rollout.tools")


class ToolExecutor:
    """Holds the tools of a runtime; owns no task. Close its sessions, then the executor.

    Args:
        tools: `Tool` objects; plain functions are wrapped by `function_tool`, tools of LangChain
            by `langchain_tools`.
        threads: Where sync functions run; stays the caller's.
        max_parallel_calls: Calls of one turn that run; the others are answered unexecuted.
        max_response_length: Longest text of a result, in characters, before the marker.
        truncate_side: Where longer texts lose their characters; see `truncate_text`.
        tool_s: Seconds for one call, and for opening one tool; None for no limit.
        cleanup_s: Seconds for closing one session.
        max_processes: Calls with ``isolation="process"`` that run at once.
        tally: Counts the calls; None where nobody reads that.

    Attributes:
        opens_first: Whether trajectories open tools before their agent begins.

    Raises:
        ToolError: A function cannot be a tool, a schema is none, or names collide (all are named).
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        threads: WorkerThreads,
        max_parallel_calls: int,
        max_response_length: int,
        truncate_side: TruncateSide,
        tool_s: float | None,
        cleanup_s: float,
        max_processes: int = 8,
        tally: Tally | None = None,
    ) -> None:
        self._tools = _key_by_name([_as_tool(tool) for tool in tools])
        self._warned: set[str] = set()
        self._threads = threads
        self._processes = ChildProcesses(
            "rollout.tools.function_tools", max_processes=max_processes, cleanup_s=cleanup_s
        )
        self._settings = ToolSettings(
            {name: _make_gate(tool, tool_s) for name, tool in self._tools.items()},
            tally or Tally(),
            *(max_parallel_calls, max_response_length, truncate_side, tool_s, cleanup_s),
        )
        self.opens_first = any(tool.opens_first for tool in self._tools.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools, in the order given."""
        return tuple(self._tools)

    def names_for(self, prompt: Prompt) -> Sequence[str] | None:
        """Names of the tools that a prompt is offered.

        Raises:
            ToolError: It asks wrongly for one.
        """
        if prompt.tools is not None:
            return prompt.tools
        return [name for name, tool in self._tools.items() if tool.is_offered(prompt)]

    async def prepare(self) -> None:
        """Let each tool make sure that it can answer here.

        Raises:
            ToolError: The first one that cannot says why.
        """
        for tool in self._tools.values():
            await tool.prepare()
        found = [getattr(tool, "function_ref", None) for tool in self._tools.values()]
        if refs := [ref for ref in found if ref is not None]:
            try:
                await self._processes.prepare(refs, self._settings.tool_s, "limits.tool_s")
            except NotImportedError as error:
                raise ToolError(f"isolation = 'process': {error}") from error

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Schemas of the tools offered, in the order of `names`; None takes all.

        Raises:
            ToolError: A name is unknown; the known ones are listed.
        """
        return [tool.schema for tool in self._select(names).values()]

    def open_session(
        self,
        *,
        uid: str,
        member: int,
        names: Sequence[str] | None = None,
        tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
        prompt: Prompt | None = None,
        sandbox: TrajectorySandbox | None = None,
    ) -> TrajectoryTools:
        """The tools of one trajectory; each is opened at its first call. The caller closes them.

        `tools_kwargs` of tools that the trajectory is not offered are ignored; a warning says so,
        once for each name.

        Raises:
            ToolError: `names` name an unknown tool, or the kwargs of one are no mapping.
        """
        tools, kwargs = self._select(names), tools_kwargs or {}
        for name, value in kwargs.items():
            if name not in tools and name not in self._warned:
                self._warned.add(name)
                known = f"is no tool here; known: {quote_all(self._tools)}"
                why = "is not offered to their prompt" if name in self._tools else known
                logger.warning("tools_kwargs[%r] are ignored: it %s", name, why)
            elif name in tools and not isinstance(value, Mapping):
                raise ToolError(f"tools_kwargs[{name!r}] = {value!r:.80}; expected a mapping")
        context = ToolContext(
            uid=uid,
            member=member,
            threads=self._threads,
            prompt=prompt,
            processes=self._processes,
            extra={} if extra is None else extra,
            sandbox=sandbox or TrajectorySandbox(),
        )
        return TrajectoryTools(self._settings, tools, context, kwargs)

    async def close(self) -> None:
        """End the processes of isolated tools; shielded, bounded."""
        await self._processes.close()

    def _select(self, names: Sequence[str] | None) -> dict[str, Tool]:
        if names is None:
            return self._tools
        unknown = [name for name in names if name not in self._tools]
        if unknown:
            raise ToolError(f"unknown tools: {quote_all(unknown)}; known: {quote_all(self._tools)}")
        return {name: self._tools[name] for name in names}


def _as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """`tool` itself after a look at its name and schema, or a function as a tool."""
    if is_langchain_tool(tool):
        return wrap_langchain_tool(tool)
    if not isinstance(tool, Tool):
        return FunctionTool(tool)
    name, schema = getattr(tool, "name", None), getattr(tool, "schema", None)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ToolError(f"{type(tool).__name__}.name = {name!r}; expected a name for the model")
    if not isinstance(function, Mapping) or function.get("name") != name:
        expected = f"{{'type': 'function', 'function': {{'name': {name!r}, ...}}}}"
        raise ToolError(f"tool {name!r}: its schema is {schema!r:.200}; expected {expected}")
    if not isinstance(tool.policy, ToolPolicy):
        raise ToolError(f"tool {name!r}: policy = {tool.policy!r:.80}; expected a ToolPolicy")
    return tool


def _key_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    homes: dict[str, list[str]] = {}
    for tool in tools:
        home: Any = tool if isinstance(tool, FunctionTool) else type(tool)
        origin = getattr(tool, "origin", f"{home.__module__}.{home.__qualname__}")
        homes.setdefault(tool.name, []).append(origin)
    if collisions := [f"{name!r} ({', '.join(at)})" for name, at in homes.items() if len(at) > 1]:
        raise ToolError(
            f"tools with the same name: {', '.join(collisions)}; give all but one of each another "
            f'name, as in @function_tool("another_name")'
        )
    return {tool.name: tool for tool in tools}


def _make_gate(tool: Tool, tool_s: float | None) -> ToolGate:
    if isinstance(tool, FunctionTool):
        return ToolGate(tool.name, tool.check, tool.policy, tool_s)
    check = SchemaCheck(tool.name, tool.schema["function"].get("parameters"))
    return ToolGate(tool.name, lambda model, _: check.check(model), tool.policy, tool_s)
