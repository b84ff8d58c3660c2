"""The tools of a runtime: checked once, offered to prompts, opened for trajectories."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.errors import ToolError
from rollout.observe.tally import Tally
from rollout.tools.argument_checks import SchemaCheck
from rollout.tools.function_tools import FunctionTool
from rollout.tools.langchain import LangChainTool, is_langchain_tool
from rollout.tools.policy import ToolGate, ToolPolicy
from rollout.tools.processes import ToolProcesses
from rollout.tools.tool import Tool
from rollout.tools.tool_runtime import Check, ToolRuntime
from rollout.tools.trajectory_tools import TrajectoryTools

if TYPE_CHECKING:
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.tools.truncate import TruncateSide
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
        self._tools = _by_name([_as_tool(tool) for tool in tools])
        self._chooses = any(
            type(tool).is_offered is not Tool.is_offered for tool in self._tools.values()
        )
        self._warned: set[tuple[str, object]] = set()
        self._processes = ToolProcesses(max_processes=max_processes, cleanup_s=cleanup_s)
        self._runtime = ToolRuntime(
            checks={name: _make_check(tool) for name, tool in self._tools.items()},
            gates={name: ToolGate(name, tool.policy) for name, tool in self._tools.items()},
            threads=threads,
            processes=self._processes,
            tally=tally or Tally(),
            max_parallel_calls=max_parallel_calls,
            max_response_length=max_response_length,
            truncate_side=truncate_side,
            tool_s=tool_s,
            cleanup_s=cleanup_s,
        )
        self.opens_first = any(tool.opens_first for tool in self._tools.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools, in the order given."""
        return tuple(self._tools)

    def names_for(self, prompt: Prompt) -> Sequence[str] | None:
        """Names of the tools that a prompt is offered; None: all.

        Raises:
            ToolError: It asks wrongly for one.
        """
        if prompt.tools is not None or not self._chooses:
            return prompt.tools
        return tuple(name for name, tool in self._tools.items() if tool.is_offered(prompt))

    async def prepare(self) -> None:
        """Let each tool make sure that it can answer here.

        Raises:
            ToolError: The first one that cannot says why.
        """
        for tool in self._tools.values():
            await tool.prepare()
        tools = [tool for tool in self._tools.values() if isinstance(tool, FunctionTool)]
        refs = [tool.function_ref for tool in tools if tool.function_ref is not None]
        if refs:
            await self._processes.prepare(refs, self._runtime.tool_s)

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Schemas of the tools offered, in the order of `names`; None takes all.

        Raises:
            ToolError: A name is unknown; the known ones are listed.
        """
        return [tool.schema for tool in self._offered(names).values()]

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

        Of `tools_kwargs`, what no tool here takes is ignored; a warning says so, once.

        Raises:
            ToolError: `names` name an unknown tool, or the kwargs of one are no mapping.
        """
        tools = self._offered(names)
        kwargs = self._choose_kwargs(tools_kwargs, tools) if tools_kwargs else {}
        return TrajectoryTools(
            self._runtime,
            tools,
            uid=uid,
            member=member,
            kwargs=kwargs,
            extra={} if extra is None else extra,
            prompt=prompt,
            sandbox=sandbox,
        )

    def _choose_kwargs(
        self, tools_kwargs: Mapping[str, Mapping[str, Any]], tools: Mapping[str, Tool]
    ) -> dict[str, Mapping[str, Any]]:
        """Those of the kwargs that are for one of `tools`."""
        useful = {name: value for name, value in tools_kwargs.items() if name in tools}
        for name in [name for name in tools_kwargs if name not in tools]:
            is_known = name in self._tools
            known = f"known: {_listed(self._tools)}"
            why = "is not offered to their prompt" if is_known else f"is no tool here; {known}"
            self._warn_once((name, is_known), f"tools_kwargs[{name!r}] are ignored: it {why}")
        for name, value in useful.items():
            if not isinstance(value, Mapping):
                raise ToolError(f"tools_kwargs[{name!r}] = {value!r:.80}; expected a mapping")
            for key in tools[name].unused_kwargs(value):
                text = f"tools_kwargs[{name!r}][{key!r}] is ignored: this tool has no use for it"
                self._warn_once((name, key), text)
        return useful

    def _warn_once(self, what: tuple[str, object], text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s (said once, whatever the number of prompts)", text)

    async def close(self) -> None:
        """End the processes of isolated tools; shielded, bounded."""
        await self._processes.close()

    def _offered(self, names: Sequence[str] | None) -> dict[str, Tool]:
        if names is None:
            return self._tools
        unknown = [name for name in names if name not in self._tools]
        if unknown:
            raise ToolError(f"unknown tools: {_listed(unknown)}; known: {_listed(self._tools)}")
        return {name: self._tools[name] for name in names}


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """`tool` itself after a look at its name and schema, or a function as a tool."""
    if is_langchain_tool(tool):
        return LangChainTool(tool)
    if not isinstance(tool, Tool):
        return FunctionTool(tool)
    name, schema = getattr(tool, "name", None), getattr(tool, "schema", None)
    if not isinstance(name, str) or not name:
        raise ToolError(f"{type(tool).__name__}.name = {name!r}; expected a name for the model")
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") != name:
        raise ToolError(
            f"tool {name!r}: its schema is {schema!r:.200}; expected "
            f"{{'type': 'function', 'function': {{'name': {name!r}, ...}}}}"
        )
    if not isinstance(tool.policy, ToolPolicy):
        raise ToolError(f"tool {name!r}: policy = {tool.policy!r:.80}; expected a ToolPolicy")
    return tool


def _make_check(tool: Tool) -> Check:
    if isinstance(tool, FunctionTool):
        return tool.check
    check = SchemaCheck(tool.name, tool.schema["function"].get("parameters"))
    return lambda arguments, kwargs: check.check(arguments)


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    homes: dict[str, list[str]] = {}
    for tool in tools:
        homes.setdefault(tool.name, []).append(_home(tool))
    collisions = [
        f"{name!r} ({', '.join(found)})" for name, found in homes.items() if len(found) > 1
    ]
    if collisions:
        raise ToolError(
            f"tools with the same name: {', '.join(collisions)}; give all but one of each another "
            f'name, as in @function_tool("another_name")'
        )
    return {tool.name: tool for tool in tools}


def _home(tool: Tool) -> str:
    """Where a tool was written, for messages."""
    source: Any = getattr(tool, "origin", None) or (
        tool if isinstance(tool, FunctionTool) else type(tool)
    )
    return source if isinstance(source, str) else f"{source.__module__}.{source.__qualname__}"
