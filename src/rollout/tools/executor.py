"""The tools of a runtime: checked once, offered to prompts, opened for trajectories."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollout.child_processes import ChildProcesses, NotImportedError
from rollout.errors import ToolError
from rollout.observe.tally import Tally
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.tools.attempt import ToolGate
from rollout.tools.function_tools import FunctionTool
from rollout.tools.langchain import is_langchain_tool, wrap_langchain_tool
from rollout.tools.schemas import SchemaCheck, as_openai_schema, quote_all
from rollout.tools.tool import Tool, ToolContext, ToolPolicy
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
        tally, found = tally or Tally(), [_as_tool(tool) for tool in tools]
        _refuse_equal_names(found)
        self._gates = {
            tool.name: ToolGate(tool, _make_check(tool), tool_s, tally) for tool in found
        }
        self._warned: set[str] = set()
        self._threads = threads
        self._processes = ChildProcesses(
            "rollout.tools.function_tools", max_processes=max_processes, cleanup_s=cleanup_s
        )
        self._settings = ToolSettings(
            tally, max_parallel_calls, max_response_length, truncate_side, tool_s, cleanup_s
        )
        self.opens_first = any(tool.opens_first for tool in found)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools, in the order given."""
        return tuple(self._gates)

    def names_for(self, prompt: Prompt) -> Sequence[str] | None:
        """Names of the tools that a prompt is offered.

        Raises:
            ToolError: It asks wrongly for one.
        """
        if prompt.tools is not None:
            return prompt.tools
        return [name for name, gate in self._gates.items() if gate.tool.is_offered(prompt)]

    async def prepare(self) -> None:
        """Let each tool make sure that it can answer here.

        Raises:
            ToolError: The first one that cannot says why.
        """
        for gate in self._gates.values():
            await gate.tool.prepare()
        # Only now: when a function was decorated its name led to nothing yet.
        found = [getattr(gate.tool, "function_ref", None) for gate in self._gates.values()]
        refs = [ref for ref in found if ref is not None]
        try:
            if refs:
                await self._processes.prepare(refs, self._settings.tool_s, "limits.tool_s")
        except NotImportedError as error:
            raise ToolError(f"isolation = 'process': {error}") from error

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Schemas of the tools offered, in the order of `names`; None takes all.

        Raises:
            ToolError: A name is unknown; the known ones are listed.
        """
        return [gate.tool.schema for gate in self._select(names).values()]

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
        gates, kwargs = self._select(names), tools_kwargs or {}
        for name, value in kwargs.items():
            if name not in gates and name not in self._warned:
                self._warned.add(name)
                known = f"is no tool here; known: {quote_all(self._gates)}"
                why = "is not offered to their prompt" if name in self._gates else known
                logger.warning("tools_kwargs[%r] are ignored: it %s", name, why)
            elif name in gates and not isinstance(value, Mapping):
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
        return TrajectoryTools(self._settings, gates, context, kwargs)

    async def close(self) -> None:
        """End the processes of isolated tools; shielded, bounded."""
        await self._processes.close()

    def _select(self, names: Sequence[str] | None) -> dict[str, ToolGate]:
        names = self.names if names is None else names
        if unknown := [name for name in names if name not in self._gates]:
            raise ToolError(f"unknown tools: {quote_all(unknown)}; known: {quote_all(self._gates)}")
        return {name: self._gates[name] for name in names}


def _as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """`tool` itself after a look at its name and schema, or a function as a tool."""
    if is_langchain_tool(tool):
        return wrap_langchain_tool(tool)
    if not isinstance(tool, Tool):
        return FunctionTool(tool)
    kind, name = type(tool).__name__, getattr(tool, "name", None)
    schema = as_openai_schema(getattr(tool, "schema", None), f"{kind}.schema")
    if "function" not in tool.schema or schema["function"]["name"] != name:
        raise ToolError(f"{kind}.name = {name!r}: its schema is of {schema!r:.200}")
    if not isinstance(tool.policy, ToolPolicy):
        raise ToolError(f"{kind}.policy = {tool.policy!r:.80}; expected a ToolPolicy")
    return tool


def _refuse_equal_names(tools: Sequence[Tool]) -> None:
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


def _make_check(tool: Tool) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    """Return what checks arguments, and merges the prompt's kwargs into those of functions."""
    if isinstance(tool, FunctionTool):
        return tool.check
    check = SchemaCheck(tool.name, tool.schema["function"].get("parameters"))
    return lambda arguments, kwargs: check.check(arguments)
