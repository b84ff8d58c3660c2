"""Python functions as tools; pydantic writes their schemas and reads their arguments."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import logging
import re
import typing
from contextlib import suppress
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NotRequired, ParamSpec, TypeVar

import docstring_parser
import msgspec
import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from rollout.child_processes import ChildDiedError, ChildRaisedError, resolve_outcome
from rollout.errors import ToolError
from rollout.tools.results import ToolResult, describe_error, normalise_result
from rollout.tools.schemas import (
    MAX_FAULTS,
    SchemaCheck,
    as_openai_schema,
    inline_references,
    write_path,
)
from rollout.tools.tool import Tool, ToolContext, ToolPolicy, ToolSession, TransientError
from rollout.user_code import FunctionRef, NotImportableError, check_top_level, function_ref
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rollout.types import ToolCall

logger = logging.getLogger("rollout")
P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["native", "asyncio"]
Isolation = Literal["none", "process"]

#: Keys of ``tools_kwargs[name]`` that are for tools with verl's protocol: arguments of its methods.
METHOD_KWARGS = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"}
_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
#: What `Any` within another type is read as, so that ``list[Any]`` is told from ``list``; comments
#: are left out of schemas.
_ANYTHING: Any = Annotated[Any, pydantic.Field(json_schema_extra={"$comment": "Any"})]
_make_dict: Any = TypedDict
#: As `transformers.utils.get_json_schema` reads them at the end of a parameter's description.
_CHOICES = re.compile(r"\(choices:\s*(?P<values>\[.*?\])\)\s*\Z", re.IGNORECASE | re.DOTALL)


class _SchemaWriter(GenerateJsonSchema):
    """Writes types as `transformers.utils.get_json_schema` does, where that knows them."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        written = super().generate_inner(schema)
        for key in ("items", "additionalProperties"):
            if written.get(key) in ({}, True):  # `list` and `dict` say nothing of what they hold
                del written[key]
        for key in ("minItems", "maxItems") if "prefixItems" in written else ():
            written.pop(key, None)
        return written

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def union_schema(self, schema: Any) -> dict[str, Any]:
        written = super().union_schema(schema)
        parts = written.get("anyOf", [])
        if not parts or any(part.keys() != {"type"} for part in parts):
            return written
        types = sorted({part["type"] for part in parts})
        return {"type": types if len(types) > 1 else types[0]}

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        values = [v.value if isinstance(v, enum.Enum) else v for v in schema["expected"]]
        if not all(type(value) in _JSON_TYPES for value in values):
            return super().literal_schema(schema)
        types = list(dict.fromkeys(_JSON_TYPES[type(value)] for value in values))
        return {"type": types if len(types) > 1 else types[0], "enum": values}

    def enum_schema(self, schema: Any) -> dict[str, Any]:
        return self.literal_schema({"expected": schema["members"]})


def _mark_any(hint: Any) -> Any:
    """The type, with each `Any` within it as `_ANYTHING`."""
    arguments = typing.get_args(hint)
    marked = tuple(_ANYTHING if each is Any else _mark_any(each) for each in arguments)
    if marked == arguments:
        return hint
    origin: Any = typing.get_origin(hint)
    return (typing.Union if origin is UnionType else origin)[marked]


def _describe_type(hint: Any, description: str, default: Any) -> Any:
    """A parameter's type with its description and default, for pydantic."""
    hint = _mark_any(hint)
    if choices := _CHOICES.search(description):
        with suppress(ValueError):  # it only looks like choices
            values = json.loads(choices["values"])
            hint = Annotated[hint, pydantic.Field(json_schema_extra={"enum": values})]
            description = description[: choices.start()].strip()
    for text in (*getattr(hint, "__metadata__", ()), description):
        if isinstance(text, str) and text:
            hint = Annotated[hint, pydantic.Field(description=text)]
    if default is inspect.Parameter.empty:
        return hint
    with suppress(ValueError):  # what JSON has no word for, such as NaN, is not shown
        shown = json.loads(json.dumps(to_jsonable_python(default), allow_nan=False))
        hint = Annotated[hint, pydantic.Field(json_schema_extra={"default": shown})]
    return NotRequired[hint]


def _find_fault(raw: inspect.Parameter, *, is_documented: bool) -> str:
    """Why a parameter cannot be one of a tool, by its form alone; "" where it can."""
    if raw.kind not in (raw.POSITIONAL_OR_KEYWORD, raw.KEYWORD_ONLY):
        return f"calls name their arguments: remove the `*`, `**` or `/` at {raw.name!r}"
    if isinstance(raw.default, FieldInfo):
        field = f"write `{raw.name}: Annotated[..., Field(...)] = ...`"
        return f"parameter {raw.name!r} has a pydantic Field as its default: {field}"
    if is_documented and raw.annotation is raw.empty:
        return f"parameter {raw.name!r} has no type: write `{raw.name}: str` or what it is"
    return ""


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """What stands before the sections, and the parameters' descriptions; in any known style."""
    clean = inspect.cleandoc(text or "")
    try:  # with a blank line, since a section in the first line is taken for prose
        parsed = docstring_parser.parse(f"\n{clean}")
    except docstring_parser.ParseError:  # prose that looks like a section and is none
        return clean, {}
    parameters = {
        name.strip().lstrip("*"): " ".join((item.description or "").split())
        for item in parsed.params
        for name in item.arg_name.split(",")  # NumPy documents several in one entry
    }
    return (parsed.description or "").strip(), parameters


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
            kills with its group: for code that holds the interpreter. The function must be
            importable; arguments and results cross as plain data.
        stateful: See `Tool.stateful`; None: where it takes a `ToolContext`.

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
        backend: Backend = "native",
        isolation: Isolation = "none",
        stateful: bool | None = None,
    ) -> None:
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            raise ToolError(
                f"{function!r:.200} is neither a Tool nor a function: write a function around it, "
                "or a subclass of Tool"
            )
        functools.update_wrapper(self, function)
        if schema is not None:
            schema = as_openai_schema(schema, f"schema of function tool {function.__name__!r}")
        self.name = name or (function.__name__ if schema is None else schema["function"]["name"])
        self.function: Callable[P, R] = function
        self.policy = policy or self.policy
        self.backend, self._is_isolated = backend, isolation == "process"
        #: The parameter that receives the `ToolContext`; and whether there is a ``**kwargs``.
        self.context_name, self._takes_others = "", False
        self.schema = schema or {"type": "function", "function": {"name": self.name}}
        self._properties = self._read_parameters(is_documented=schema is None)
        self.stateful = bool(self.context_name) if stateful is None else stateful
        if fault := self._find_fault(backend, isolation):
            raise self._make_error(fault)
        self._schema_check = SchemaCheck(self.name, self.schema["function"].get("parameters"))

    def _read_parameters(self, *, is_documented: bool) -> Collection[str]:
        """Read the function's parameters; with `is_documented` they make the tool's schema.

        Else the schema is given, and a parameter without an annotation takes any value.
        """
        description, descriptions = parse_docstring(self.function.__doc__)
        try:
            hints = typing.get_type_hints(self.function, include_extras=True)
        except Exception as error:  # names that annotations use may be anything, also missing
            advice = "define or import their names at module level, not under TYPE_CHECKING"
            text = f"its annotations cannot be read ({error}): {advice}"
            raise self._make_error(text) from error
        faults, fields = list[str](), dict[str, Any]()
        if is_documented and not description:
            faults.append("its docstring must begin with what tells the model what the tool does")
        for name, raw in inspect.signature(self.function).parameters.items():
            if hints.get(name) is ToolContext:
                self.context_name = name
            elif raw.kind is raw.VAR_KEYWORD and not is_documented:
                self._takes_others = True
            elif fault := _find_fault(raw, is_documented=is_documented):
                faults.append(fault)
            else:
                hint, text = hints.get(name, Any), descriptions.get(name, "")
                fields[name] = _describe_type(hint, text, raw.default)
        try:
            self._adapter = pydantic.TypeAdapter[dict[str, Any]](_make_dict("Arguments", fields))
            written = inline_references(self._adapter.json_schema(schema_generator=_SchemaWriter))
        except (TypeError, pydantic.PydanticUserError) as error:
            why = str(error).partition("\n")[0].partition(". ")[0]
            known = "str, int, float, bool, list, dict, Literal, an Enum or a dataclass"
            faults.append(f"a parameter has a type without a schema ({why}): use {known}")
        if faults:
            raise self._make_error("; ".join(faults))
        if is_documented:
            self.schema["function"] |= {"description": description, "parameters": written}
            shown = written["properties"].items()
            if bare := ", ".join(repr(name) for name, each in shown if "description" not in each):
                advice = f"the model sees no description of {bare}: write one under `Args:`"
                logger.warning("function tool %r: %s in the docstring", self.name, advice)
        return fields

    def _takes(self, name: str) -> bool:
        """Whether a call may give an argument of this name."""
        return name in self._properties or (self._takes_others and name not in METHOD_KWARGS)

    def _find_fault(self, backend: str, isolation: str) -> str:
        """Why the function cannot be a tool with these options; "" where it can."""
        function, shown = self.function, self.schema["function"]
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return "it yields: return one value instead"
        if backend not in typing.get_args(Backend) or isolation not in typing.get_args(Isolation):
            known = "expected native or asyncio, and none or process"
            return f"backend = {backend!r}, isolation = {isolation!r}; {known}"
        if self._is_isolated:
            try:
                check_top_level(function)
            except NotImportableError as error:
                return f"isolation = 'process' {error}"
            if self.context_name:
                why = "cannot hand over the ToolContext: remove the parameter"
                return f"isolation = 'process' {why} {self.context_name!r}"
        if shown["name"] != self.name:
            return f"its schema is named {shown['name']!r}; expected the same name"
        properties = (shown.get("parameters") or {}).get("properties", ())
        if unknown := ", ".join(name for name in properties if not self._takes(name)):
            return f"its schema has properties that are no parameters of the function: {unknown}"
        return ""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, unchecked."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<FunctionTool {self.name}>"

    async def open(self, context: ToolContext) -> ToolSession:
        """See `Tool.open`; a `ToolError` where the prompt's kwargs name no parameter."""
        names = context.kwargs.keys() - METHOD_KWARGS
        if unknown := ", ".join(sorted(n for n in names if not self._takes(n))):
            why = f"name no parameter of it: {unknown}; expected some of: "
            why += ", ".join(sorted(self._properties)) or "none"
            raise ToolError(f"tools_kwargs of {self.name!r} {why}")
        return _FunctionSession(self, context)

    def check(self, arguments: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the function gets, in its types unless it runs in a process.

        The prompt's kwargs override the model's. A `ToolError` names what is wrong with each.
        """
        fixed = {name: value for name, value in kwargs.items() if self._takes(name)}
        merged = self._schema_check.check(arguments, fixed) | fixed
        typed = self._read_arguments(merged)
        return merged if self._is_isolated else typed

    def _read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that fit the schema as the function's types: an Enum member, a dataclass, …"""
        others = {name: arguments[name] for name in arguments.keys() - self._properties}
        try:
            return others | self._adapter.validate_python(arguments)
        except Exception as error:  # the arguments' own types may raise anything
            text = describe_error(error)
            if isinstance(error, pydantic.ValidationError):
                faults = error.errors(include_url=False, include_context=False)
                texts = [f"{write_path(e['loc'])}: {e['msg']}" for e in faults[:MAX_FAULTS]]
                text = "; ".join([*texts, "and more"] if len(faults) > MAX_FAULTS else texts)
            raise ToolError(f"invalid arguments for {self.name!r}: {text}") from error

    @functools.cached_property
    def function_ref(self) -> FunctionRef | None:
        """Where its process finds the function; None: it runs in none."""
        if not self._is_isolated:
            return None
        try:
            return function_ref(
                self.function, lambda found: self.function is getattr(found, "function", found)
            )
        except NotImportableError as error:
            raise self._make_error(f"isolation = 'process' {error}") from None

    def _make_error(self, text: str) -> ToolError:
        return ToolError(f"function tool {self.name!r}: {text}")


class _FunctionSession(ToolSession):
    __slots__ = ("_context", "_tool")

    def __init__(self, tool: FunctionTool[Any, Any], context: ToolContext) -> None:
        self._tool, self._context = tool, context

    async def execute(self, call: ToolCall) -> Any:
        """Call the function, where it runs, with arguments that `check` returned."""
        tool, context, arguments = self._tool, self._context, call.arguments
        if tool.function_ref is not None:
            return await self._run_isolated(tool.function_ref, arguments)
        if tool.context_name:
            arguments = {**arguments, tool.context_name: context}
        function = functools.partial(tool.function, **arguments)
        if not is_async(function):  # which has a thread, where a long answer holds nobody up
            function = functools.partial(_answer_here, function)
        return await context.threads.call(tool.name, function, backend=tool.backend)

    async def _run_isolated(self, ref: FunctionRef, arguments: Mapping[str, Any]) -> ToolResult:
        name, processes = self._tool.name, self._context.processes
        if processes is None:
            raise ToolError(f"{name}: this ToolContext has no processes to run in")
        try:
            body = msgspec.msgpack.encode((name, arguments))
        except (TypeError, ValueError, OverflowError) as error:  # tools_kwargs hold any object
            raise ToolError(f"{name}: its arguments are not plain data: {error}") from error
        try:
            async with processes.worker() as child:
                reply = await child.ask(ref, body)
                return msgspec.msgpack.decode(reply, type=ToolResult)
        except ChildDiedError as error:
            raise ToolError(f"the process of {name!r} {error}") from None
        except ChildRaisedError as error:
            is_transient = error.cause.type == TransientError.__qualname__
            raise (TransientError if is_transient else ToolError)(error.cause.message) from None


@typing.overload
def function_tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@typing.overload
def function_tool(
    positional_name: str | None = None, /, *, name: str | None = None, **options: Any
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def function_tool(function: Any = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Make a function a tool: ``@function_tool``, ``@function_tool("name")`` or with keywords.

    The schema is that of `transformers.utils.get_json_schema`, without the result's: types from
    the annotations, which may also be dataclasses and pydantic models, with constraints in
    `typing.Annotated`; descriptions from the docstring; defaults from the signature. A parameter
    annotated `ToolContext` receives the trajectory's context and is hidden from the model. The
    other options are those of `FunctionTool`, and so is the `ToolError`.
    """
    if isinstance(function, str):
        function, name = None, function
    make: Callable[..., Any] = functools.partial(FunctionTool, name=name, **options)
    return make if function is None else make(function)


def _answer_here(function: Callable[[], Any]) -> Any:
    value = function()
    return value if inspect.isawaitable(value) else normalise_result(value)


def answer(found: Any, body: bytes) -> bytes:
    """In a child process: a call's `ToolResult`, encoded; `found` is the function, or its tool."""
    name, arguments = msgspec.msgpack.decode(body)
    tool = found if isinstance(found, FunctionTool) else _make_tool(found, name)
    try:
        result = normalise_result(resolve_outcome(tool.function(**tool._read_arguments(arguments))))
    except BaseException as error:
        is_transient = tool.policy.is_transient(error)
        raise (TransientError if is_transient else ToolError)(describe_error(error)) from None
    try:
        return msgspec.msgpack.encode(result)
    except Exception:  # data that only this process can hold stays here; the text has its words
        return msgspec.msgpack.encode(msgspec.structs.replace(result, data=None, metrics={}))


@functools.cache
def _make_tool(function: Any, name: str) -> FunctionTool[Any, Any]:
    return FunctionTool(function, schema={"name": name})
