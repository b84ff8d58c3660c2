"""Python functions as tools: ``@function_tool``."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from rollout.errors import ToolError
from rollout.function_refs import (
    FunctionRef,
    NotImportableError,
    check_top_level,
    function_ref,
)
from rollout.tools.argument_checks import SchemaCheck
from rollout.tools.docstrings import parse_docstring
from rollout.tools.parameters import inspect_parameters
from rollout.tools.schema import as_openai_schema
from rollout.tools.tool import METHOD_KWARGS, Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.tools.policy import ToolPolicy
    from rollout.tools.results import ToolResult
    from rollout.types import ToolCall

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class FunctionTool(Tool, Generic[P, R]):
    """A function that models can call, and that stays callable from Python.

    Args:
        function: Sync (runs in a worker thread) or async (runs on the event loop).
        name: What the model calls it; None takes the schema's name, else the function's.
        schema: Shown in place of the inferred one; parameters that it leaves out may come from
            the prompt's ``tools_kwargs``. What it lists beyond the function's parameters reaches
            its ``**kwargs``.
        policy: How its calls are run; None takes the defaults.
        backend: "asyncio" for an async function that needs asyncio: under trio it runs on one
            asyncio thread of the runtime, and cancellation and deadlines reach it there.
        isolation: "process" runs each call in a child process, which a deadline or a cancellation
            kills with its group: for code that holds the interpreter, as only threads of their own
            interpreter can be stopped. The function must be importable; arguments and results
            cross as plain data.
        stateful: See `Tool.stateful`; None: where it takes a `ToolContext`.

    Attributes:
        never_waits: Whether a call ends in the step of the event loop in which it begins.

    Raises:
        ToolError: It lists everything that must be written for a model to use the function.
    """

    __name__: str  # set by update_wrapper, as are __doc__, __module__ and __wrapped__

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        schema: dict[str, Any] | None = None,
        policy: ToolPolicy | None = None,
        backend: Literal["native", "asyncio"] = "native",
        isolation: Literal["none", "process"] = "none",
        stateful: bool | None = None,
    ) -> None:
        functools.update_wrapper(self, _checked_function(function))
        if schema is not None:
            schema = as_openai_schema(schema, f"schema of function tool {function.__name__!r}")
        self.name = name or _name_in(schema) or function.__name__
        self.function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._backend = _checked_choice(self.name, "backend", backend, ("native", "asyncio"))
        self.never_waits = self._backend == "native" and _never_waits(function)
        self.parameters = inspect_parameters(function, self.name, is_documented=schema is None)
        takes_context = self.parameters.context_name is not None
        self.stateful = takes_context if stateful is None else bool(stateful)
        isolated = _checked_choice(self.name, "isolation", isolation, ("none", "process"))
        self._is_isolated = isolated == "process"
        if self._is_isolated:
            self.never_waits = False
            _importable(self.name, check_top_level, function)
            if self.parameters.context_name is not None:
                raise ToolError(
                    f"function tool {self.name!r}: isolation = 'process' cannot hand over the "
                    f"ToolContext: remove the parameter {self.parameters.context_name!r}"
                )
        self._schema_check: SchemaCheck | None = None
        self.schema = self._inferred() if schema is None else self._checked(schema)
        if policy is not None:
            self.policy = policy

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, unchecked."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<FunctionTool {self.name}>"

    def unused_kwargs(self, kwargs: Mapping[str, Any]) -> list[str]:
        """What trainers give tools with verl's protocol, unless the function can look for it."""
        if self.parameters.context_name is not None:
            return []
        return sorted(METHOD_KWARGS.intersection(kwargs) - self._known)

    async def prepare(self) -> None:
        """See `Tool.prepare`: when it was decorated, its name led to nothing yet."""
        _ = self.function_ref

    async def open(self, context: ToolContext) -> ToolSession:
        """A session that calls the function; the prompt's kwargs override the model's arguments."""
        return self.session(context)

    def session(self, context: ToolContext) -> ToolSession:
        """`open`, which has nothing to wait for.

        Raises:
            ToolError: The prompt's kwargs name no parameter.
        """
        unknown = sorted(set(context.kwargs) - self._known - METHOD_KWARGS)
        if unknown and not self.parameters.takes_others:
            raise ToolError(
                f"tools_kwargs of {self.name!r} name no parameter of it: {', '.join(unknown)}; "
                f"expected some of: {', '.join(sorted(self._known)) or 'none'}"
            )
        return _FunctionSession(self, context)

    def check(self, arguments: Any, kwargs: Mapping[str, Any]) -> None:
        """Let right arguments pass, the prompt's kwargs in place of the model's.

        Raises:
            ArgumentsError: It names each missing, unknown and wrong one, and what was expected.
        """
        if type(arguments) is not dict and not isinstance(arguments, Mapping):
            SchemaCheck(self.name, None).check(arguments)
        shown = given = arguments
        if kwargs:
            fixed = self.fixed(kwargs)
            names = () if self._schema_check is None else self._schema_check.names
            shown = {**arguments, **{name: fixed[name] for name in names if name in fixed}}
            given = {**arguments, **fixed}
        if self._schema_check is not None:
            self._schema_check.check(shown)
        self.parameters.validated(given)

    def fixed(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that a prompt's kwargs give; `**kwargs` of the function take the others."""
        if self.parameters.takes_others:
            return {n: v for n, v in kwargs.items() if n in self._known or n not in METHOD_KWARGS}
        return {name: value for name, value in kwargs.items() if name in self._known}

    @functools.cached_property
    def function_ref(self) -> FunctionRef | None:
        """Where its process finds the function; None: it runs in none.

        Raises:
            ToolError: The function's name leads to something else.
        """
        if not self._is_isolated:
            return None
        return _importable(self.name, function_ref, self.function, self._is_it)

    def _is_it(self, found: Any) -> bool:
        return self.function is (found.function if isinstance(found, FunctionTool) else found)

    @functools.cached_property
    def _known(self) -> set[str]:
        return {parameter.name for parameter in self.parameters}

    def run(self, arguments: dict[str, Any], context: ToolContext) -> Coroutine[Any, Any, Any]:
        """What the function returns for checked arguments, to be awaited.

        Cancellation abandons its thread.
        """
        if self.parameters.context_name is not None:
            arguments[self.parameters.context_name] = context
        function: Any = self.function
        if self._is_async and self._backend != "asyncio":
            coroutine: Coroutine[Any, Any, Any] = function(**arguments)
            return coroutine
        return self._run_elsewhere(functools.partial(function, **arguments), context)

    async def _run_elsewhere(self, call: Callable[[], Any], context: ToolContext) -> Any:
        """In a thread, or on the loop that runs what needs asyncio."""
        if self._is_async:
            return await context.threads.run_asyncio(self.name, call)
        result = await context.threads.run(self.name, call)
        # An async function in a sync wrapper: the wrapper ran in the thread, the rest is ours.
        return await result if inspect.isawaitable(result) else result

    def _inferred(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": parse_docstring(self.function.__doc__).description,
            "parameters": self.parameters.schema(),
        }
        return {"type": "function", "function": function}

    def _checked(self, schema: dict[str, Any]) -> dict[str, Any]:
        if _name_in(schema) != self.name:
            raise ToolError(
                f"function tool {self.name!r}: its schema is named {_name_in(schema)!r}; expected "
                f"the same name"
            )
        shown = schema.get("function", {}).get("parameters", {}).get("properties", {})
        unknown = [name for name in shown if name not in self._known]
        if unknown and not self.parameters.takes_others:
            raise ToolError(
                f"function tool {self.name!r}: its schema has properties that are no parameters "
                f"of the function: {', '.join(unknown)}"
            )
        self._schema_check = SchemaCheck(self.name, schema["function"].get("parameters"))
        return schema


class _FunctionSession(ToolSession):
    __slots__ = ("_context", "_tool")

    def __init__(self, tool: FunctionTool[Any, Any], context: ToolContext) -> None:
        self._tool = tool
        self._context = context

    def execute(self, call: ToolCall) -> Coroutine[Any, Any, Any]:
        arguments = call.arguments
        if self._context.kwargs:
            arguments = {**arguments, **self._tool.fixed(self._context.kwargs)}
        if self._tool.function_ref is not None:
            return self._run_in_process(self._tool.function_ref, dict(arguments))
        return self._tool.run(self._tool.parameters.check(arguments), self._context)

    async def _run_in_process(self, ref: FunctionRef, arguments: dict[str, Any]) -> ToolResult:
        processes = self._context.processes
        if processes is None:
            raise ToolError(f"{self._tool.name}: this ToolContext has no processes to run in")
        return await processes.run(self._tool.name, ref, arguments)


def _name_in(schema: dict[str, Any] | None) -> str | None:
    return None if schema is None else schema.get("function", {}).get("name")


def _checked_choice(tool: str, option: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        known = " or ".join(map(repr, choices))
        raise ToolError(f"function tool {tool!r}: {option} = {value!r}; expected {known}")
    return str(value)


def _importable(tool: str, look: Callable[..., T], *args: Any) -> T:
    try:
        return look(*args)
    except NotImportableError as error:
        raise ToolError(f"function tool {tool!r}: isolation = 'process' {error}") from None


def _never_waits(function: Any) -> bool:
    """Whether it is an async function with no ``await`` in it: then there is none to suspend it."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_flags & inspect.CO_COROUTINE:
        return False
    return all(not each.opname.startswith("YIELD") for each in dis.get_instructions(code))


def _checked_function(function: Any) -> Callable[..., Any]:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ToolError(
            f"{function!r:.200} is neither a Tool nor a function: write a function around it, or a "
            f"subclass of Tool"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolError(f"function tool {function.__name__!r} yields: return one value instead")
    return function


@overload
def function_tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def function_tool(
    name: str | None = None,
    /,
    *,
    schema: dict[str, Any] | None = None,
    policy: ToolPolicy | None = None,
    backend: Literal["native", "asyncio"] = "native",
    isolation: Literal["none", "process"] = "none",
    stateful: bool | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


@overload
def function_tool(
    *,
    name: str | None = None,
    schema: dict[str, Any] | None = None,
    policy: ToolPolicy | None = None,
    backend: Literal["native", "asyncio"] = "native",
    isolation: Literal["none", "process"] = "none",
    stateful: bool | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def function_tool(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Make a function a tool: ``@function_tool``, ``@function_tool("name")`` or with keywords.

    The schema is inferred: types from the annotations (str, int, float, bool, None, list, tuple,
    dict, Literal, Enum, Optional and other unions, `typing.Annotated` with `msgspec.Meta`,
    dataclasses, attrs classes, TypedDicts, Structs), descriptions from the docstring and its
    ``Args:`` section, defaults from the signature. A parameter annotated `ToolContext` receives
    the trajectory's context and is hidden from the model. Arguments are checked against the
    annotations before the function runs. The other options are those of `FunctionTool`.

    Raises:
        ToolError: It lists everything that must be written for a model to use the function.
    """
    if isinstance(function, str):
        function, name = None, function
    make: Callable[..., Any] = functools.partial(FunctionTool, name=name, **options)
    return make if function is None else make(function)
