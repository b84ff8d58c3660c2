"""One object with state for each trajectory, whose public methods are tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread

from rollout.chat.messages import template_messages
from rollout.chat.reward_values import BadRewardError, finite_number
from rollout.errors import ToolError
from rollout.tools.function_tools import FunctionTool
from rollout.tools.tool import Tool, ToolContext, ToolPolicy, ToolProvider, ToolSession
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from rollout.types import Prompt, ToolCall

Factory = Callable[[], Any]
Backend = Literal["asyncio", "native"]

#: Methods that the runtime calls, and no model.
_OWN = frozenset(("reset", "get_reward", "close"))
#: The column that names a prompt's environment, where there are several.
_COLUMN = "environment"


class ToolSet(ToolProvider):
    """Gives each trajectory an object of its own, whose public methods are the model's tools.

    Stands among the tools of `open_rollout`: ``tools=[ToolSet(Wordle)]``. The object inherits
    nothing of ours; what TRL calls an environment is one. Every public method, also an inherited or
    a static one, is a tool, as a function would be by `function_tool`; names with a leading
    underscore, properties and class methods are none. Nor are these, each of which may be missing,
    be sync (it runs in a worker thread) or async:

    - ``reset(**row)``: called before the agent begins, with the columns of the prompt's row:
      ``prompt`` (its messages), ``uid``, ``ground_truth``, ``data_source``, and those of its
      `extra`, which stand in for one of the same name. It gets those that it has a parameter for;
      with ``**kwargs`` all. The text that it returns is appended to the prompt's last message (or a
      list of content parts; None for nothing). It has as long as the trajectory. What it raises
      fails the trajectory.
    - ``get_reward() -> float``: called once the agent has ended. It joins the trajectory's
      `tool_rewards`, and is its reward where neither the agent nor `open_rollout` has another. What
      it raises fails the trajectory.
    - ``close()``: called at the end, whatever that is, within ``limits.cleanup_s``.

    Calls of one turn run one after another, in the model's order; where all tools of an object are
    async, at the same time. What a tool raises is an error that the model reads.

    Args:
        environment: Makes an object without arguments, such as its class; or several by name, where
            the column ``environment`` of each prompt's row names its own. Of a function, one object
            is made and closed as the runtime opens, for its methods to be read.
        backend: Where async methods run on a runtime of trio's: "asyncio" on the runtime's asyncio
            thread; "native" on trio itself.
        policy: How calls are run; None takes the defaults.

    Raises:
        ToolError: An argument is wrong.
    """

    def __init__(
        self,
        environment: Factory | Mapping[str, Factory],
        *,
        backend: Backend = "asyncio",
        policy: ToolPolicy | None = None,
    ) -> None:
        named = environment if isinstance(environment, Mapping) else {"": environment}
        if not named or not all(map(callable, named.values())):
            raise ToolError(
                f"ToolSet: environment = {environment!r:.80}; expected what makes an object for "
                "each trajectory, such as its class, or a mapping of names to such"
            )
        if backend not in ("asyncio", "native"):
            raise ToolError(f"ToolSet: backend = {backend!r}; expected 'asyncio' or 'native'")
        self.factories: dict[str, Factory] = dict(named)
        self.backend: Backend = backend
        #: The tools of each environment, by name.
        self.functions: dict[str, dict[str, FunctionTool[..., Any]]] = {}
        self.policy = ToolPolicy() if policy is None else policy

    async def __aenter__(self) -> list[Tool]:
        """The tools of all its environments; a name that several have is one tool.

        Raises:
            ToolError: A method cannot be a tool, an environment has none, or two have tools of one
                name that differ.
        """
        tools: dict[str, _MethodTool] = {}
        for environment, factory in self.factories.items():
            kind = factory if isinstance(factory, type) else await _probe(factory)
            self.functions[environment] = read_functions(kind)
            for function in self.functions[environment].values():
                tool = tools.setdefault(function.name, _MethodTool(self, function))
                if tool.schema != function.schema:
                    raise ToolError(
                        f"ToolSet: environment[{environment!r}] has a tool {function.name!r} that "
                        "another one has with another description or other parameters; expected "
                        "equal ones, or another name"
                    )
        return list(tools.values())

    def name_for(self, prompt: Prompt | None) -> str:
        """Which of its environments a prompt has; a `ToolError` where its row names none."""
        name = prompt.extra.get(_COLUMN) if prompt and "" not in self.factories else ""
        if name not in self.factories:
            known = ", ".join(map(repr, self.factories))
            raise ToolError(f"ToolSet: extra[{_COLUMN!r}] = {name!r:.80}; expected one of {known}")
        return str(name)


class _MethodTool(Tool):
    """A method of the same name of each environment that has one."""

    opens_first = True

    def __init__(self, tool_set: ToolSet, function: FunctionTool[..., Any]) -> None:
        self.name, self.schema, self.policy = function.name, function.schema, tool_set.policy
        self._tool_set = tool_set

    def is_offered(self, prompt: Prompt) -> bool:
        """Whether the prompt's environment has it."""
        return self.name in self._tool_set.functions[self._tool_set.name_for(prompt)]

    async def open(self, context: ToolContext) -> ToolSession:
        """A session; the first one of the trajectory makes the object, and closes it."""
        key = f"{__name__}.{id(self._tool_set)}"
        is_first = key not in context.state
        if is_first:
            name = self._tool_set.name_for(context.prompt)
            factory = self._tool_set.factories[name]
            title = getattr(factory, "__qualname__", "environment of a ToolSet")
            instance = await context.threads.run(title, factory)
            context.state[key] = _Environment(self._tool_set, name, instance, context)
        session = _FirstSession if is_first else _MethodSession
        return session(self.name, context.state[key], context)


class _Environment:
    """The object of one trajectory."""

    def __init__(self, tool_set: ToolSet, name: str, instance: Any, context: ToolContext) -> None:
        self.name, self.instance, self.title = name, instance, type(instance).__name__
        self.functions = tool_set.functions[name]
        is_serial = not all(is_async(each.function) for each in self.functions.values())
        self.serial = self if is_serial else None
        self._backend, self._threads = tool_set.backend, context.threads

    def has(self, name: str) -> bool:
        """Whether the object has this method."""
        return callable(getattr(self.instance, name, None))

    async def call(self, name: str, **arguments: Any) -> Any:
        """What a method returns, wherever it runs."""
        what, method = f"{name} of {self.title}", getattr(self.instance, name)
        call = partial(method, **arguments)
        return await self._threads.call(what, call, backend=self._backend)


class _MethodSession(ToolSession):
    def __init__(self, name: str, environment: _Environment, context: ToolContext) -> None:
        self.serial = environment.serial
        self._name, self._environment, self._context = name, environment, context

    async def execute(self, call: ToolCall) -> Any:
        function = self._environment.functions.get(self._name)
        if function is None:
            raise ToolError(f"{self._name!r}: {self._environment.title} has no such method")
        arguments = function._read_arguments(call.arguments)
        if function.context_name:
            arguments[function.context_name] = self._context
        return await self._environment.call(self._name, **arguments)


class _FirstSession(_MethodSession):
    """Of the tool that was opened first: the object's own methods are called here, once each."""

    decides_reward = True

    async def begin(self) -> Any:
        environment = self._environment
        if not environment.has("reset"):
            return None
        columns = _choose_columns(environment, self._context)
        observation = await environment.call("reset", **columns)
        if observation is None or isinstance(observation, str | list):
            return observation
        raise ToolError(
            f"reset of {environment.title} returned {observation!r:.80}; expected a text, a list "
            "of content parts or None"
        )

    async def calc_reward(self) -> float | None:
        if not self._environment.has("get_reward"):
            return None
        value = await self._environment.call("get_reward")
        try:
            return finite_number(value, f"get_reward of {self._environment.title}")
        except BadRewardError as error:
            raise ToolError(str(error)) from None

    async def close(self) -> None:
        if self._environment.has("close"):
            await self._environment.call("close")


def _choose_columns(environment: _Environment, context: ToolContext) -> dict[str, Any]:
    """The columns of the prompt's row that `reset` has a parameter for."""
    row: dict[str, Any] = {"uid": context.uid}
    if context.prompt is not None:
        prompt = context.prompt
        row["prompt"] = template_messages(prompt.messages)
        row |= {"ground_truth": prompt.ground_truth, "data_source": prompt.data_source}
        row |= prompt.extra
    if environment.name:
        row.pop(_COLUMN, None)
    parameters = inspect.signature(environment.instance.reset).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return row
    return {name: row[name] for name in parameters if name in row}


def read_functions(kind: type) -> dict[str, FunctionTool[..., Any]]:
    """The public methods of a class as function tools; a `ToolError` where one cannot be one."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in _OWN:
            continue
        is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        function = method if is_static else MethodType(method, kind)  # which takes `self` away
        try:
            found[name] = FunctionTool(function, name=name)
        except ToolError as error:
            raise ToolError(f"ToolSet: {kind.__name__}.{name}: {error}") from error
    if not found:
        raise ToolError(f"ToolSet: {kind.__name__} has no public method that could be a tool")
    return found


async def _probe(factory: Factory) -> type:
    """The class of what a function makes; the object is closed again."""
    instance = factory()
    close: Any = getattr(instance, "close", None)
    if callable(close):  # on asyncio, whatever runs here
        run = partial(anyio.run, close) if is_async(close) else close
        await anyio.to_thread.run_sync(run)
    return type(instance)
