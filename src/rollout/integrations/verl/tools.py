"""Tool classes written for verl, run as they are: its protocol is looked at, verl never imported.

The protocol: ``create(instance_id, **kwargs)``, ``execute(instance_id, parameters, **kwargs)``,
``calc_reward(instance_id, **kwargs)`` and ``release(instance_id, **kwargs)``, all async. An
instance lives as long as its trajectory (in verl, one call).
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ToolError
from rollout.integrations.verl.function_tools import read_answer
from rollout.tools.schemas import as_openai_schema
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from rollout.types import ToolCall

_instances = itertools.count()

#: Of verl's models of a schema: what reads without having been written.
_DEFAULTS: Mapping[str, Any] = {
    "description": None,
    "enum": None,
    "strict": None,
    "parameters": {"type": "object", "properties": {}, "required": []},
    "properties": {},
    "required": [],
}


class VerlSchema:
    """A tool's schema as verl's classes read it: by attribute, and through `model_dump`.

    What verl's models have a default for and the schema does not say reads as None, or as empty.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (name not in self._data and name not in _DEFAULTS):
            raise AttributeError(f"the tool's schema has no {name!r}")
        value = self._data[name] if name in self._data else copy.deepcopy(_DEFAULTS[name])
        if not isinstance(value, Mapping):
            return value
        if name == "properties":
            return {key: VerlSchema(item) for key, item in value.items()}
        return VerlSchema(value)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The schema as plain data; it has no unset values to leave out."""
        return copy.deepcopy(dict(self._data))


class AgentData(msgspec.Struct, kw_only=True):
    """What `execute` gets as ``agent_data``, where it takes that.

    Attributes:
        request_id: Names the trajectory.
        tools_kwargs: The prompt's, of this tool.
        extra_fields: Shared by the tools of the trajectory.
        metrics: Of this tool's instance.
    """

    request_id: str
    tools_kwargs: Mapping[str, Any]
    extra_fields: dict[str, Any]
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)


class VerlTool(Tool):
    """A tool object with verl's protocol; under trio its methods run on asyncio.

    Args:
        tool: The object.
        schema: As in the YAML; None asks the object.
        origin: Where it was found, for messages.

    Raises:
        ToolError: It lacks `execute`, or has no schema.
    """

    def __init__(
        self, tool: Any, *, schema: Mapping[str, Any] | None = None, origin: str = ""
    ) -> None:
        self.tool = tool
        self.origin = origin or f"{type(tool).__module__}.{type(tool).__qualname__}"
        if not callable(getattr(tool, "execute", None)):
            raise ToolError(f"{self.origin} has no method execute: expected verl's tool protocol")
        self.schema = as_openai_schema(_own_schema(tool) if schema is None else schema, self.origin)
        self.name = str(self.schema["function"]["name"])

    async def open(self, context: ToolContext) -> ToolSession:
        """A session with an instance of its own, made from the prompt's ``create_kwargs``."""
        session = _VerlSession(self, context)
        await session.create()
        return session


class _VerlSession(ToolSession):
    def __init__(self, tool: VerlTool, context: ToolContext) -> None:
        self._tool = tool
        self._context = context
        self._instance_id: Any = f"{context.uid}-{context.member}-{next(_instances)}"
        self._agent_data = AgentData(
            request_id=f"{context.uid}/{context.member}",
            tools_kwargs=context.kwargs,
            extra_fields=context.state,
        )

    async def create(self) -> None:
        """Make the instance; the class may give it another id."""
        given = dict(self._context.create_kwargs)
        made = await self._run("create", **{**given, "create_kwargs": given})
        if isinstance(made, tuple):
            made = made[0] if made else None
        self._instance_id = self._instance_id if made is None else made

    async def execute(self, call: ToolCall) -> Any:
        kwargs = self._kwargs("execute_kwargs")
        answer = await self._run(
            "execute", dict(call.arguments), **{"agent_data": self._agent_data, **kwargs}
        )
        return read_answer(answer)

    async def calc_reward(self) -> float | None:
        method = getattr(type(self._tool.tool), "calc_reward", None)
        if method is None or method.__qualname__ == "BaseTool.calc_reward":
            return None  # verl's default says 0.0, and means nothing by it
        reward: float | None = await self._run("calc_reward", **self._kwargs("calc_reward_kwargs"))
        return reward

    async def close(self) -> None:
        await self._run("release", **self._kwargs("release_kwargs"))

    def _kwargs(self, name: str) -> dict[str, Any]:
        given = self._context.kwargs.get(name)
        return dict(given) if isinstance(given, Mapping) else {}

    async def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._tool.tool, name, None)
        if method is None:
            return None

        async def call() -> Any:
            answer = method(self._instance_id, *args, **_taken(method, kwargs))
            return await answer if inspect.isawaitable(answer) else answer

        return await self._context.threads.run_asyncio(f"{self._tool.name}.{name}", call)


def _taken(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def _own_schema(tool: Any) -> Any:
    get = getattr(tool, "get_openai_tool_schema", None)
    schema = get() if callable(get) else getattr(tool, "tool_schema", None)
    dump = getattr(schema, "model_dump", None)
    return dump(exclude_unset=True, exclude_none=True) if callable(dump) else schema
