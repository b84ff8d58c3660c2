"""The parameters of a tool function: what the model reads of them, and what a call may give."""

from __future__ import annotations

import inspect
import json
import logging
import re
import typing
from typing import Annotated, Any, Literal

import docstring_parser
import msgspec
import pydantic
from pydantic.fields import FieldInfo

from rollout.errors import ToolError
from rollout.tools.argument_checks import MAX_EXPECTED, ArgumentsError, quote_all, show
from rollout.tools.schemas import write_schema
from rollout.tools.tool import ToolContext

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("rollout")

#: Faults of pydantic's that only mean another type.
_EXPECTED = {
    "int_type": "int",
    "float_type": "float",
    "string_type": "str",
    "bool_type": "bool",
    "list_type": "list",
    "tuple_type": "list",
    "dict_type": "dict",
    "model_type": "dict",
    "dataclass_type": "dict",
    "none_required": "null",
}
#: As `transformers.utils.get_json_schema` reads them at the end of a parameter's description.
_CHOICES = re.compile(r"\(choices:\s*(?P<values>\[.*?\])\)\s*\Z", re.IGNORECASE | re.DOTALL)


class Parameter(msgspec.Struct, frozen=True):
    """One argument that the model may give.

    Attributes:
        adapter: Reads its values.
        schema: What the model reads about it.
        is_required: Whether a call must give it.
    """

    adapter: pydantic.TypeAdapter[Any]
    schema: dict[str, Any]
    is_required: bool


class Parameters:
    """The parameters of one function, but for an injected `ToolContext`.

    Args:
        function: Whose annotations and docstring say what they are.
        tool: Its name, for messages.
        is_documented: Whether there must be a docstring and annotations. Where the schema is
            given by hand a parameter without one takes any value.

    Attributes:
        description: What the docstring says before its sections.
        context_name: The parameter that receives the `ToolContext`, or None.
        takes_others: Whether the function takes arguments of other names too, as ``**kwargs``; they
            are the schema's to check.

    Raises:
        ToolError: It lists everything that must be written first.
    """

    def __init__(self, function: Callable[..., Any], tool: str, *, is_documented: bool) -> None:
        self._tool = tool
        self._by_name: dict[str, Parameter] = {}
        self.context_name: str | None = None
        self.takes_others = False
        self.description, descriptions = parse_docstring(function.__doc__)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except Exception as error:  # names that annotations use may be anything, also missing
            raise ToolError(
                f"function tool {tool!r}: its annotations cannot be read ({error}): define or "
                "import their names at module level, not under TYPE_CHECKING"
            ) from error
        faults: list[str] = []
        if is_documented and not self.description:
            faults.append("its docstring must begin with what tells the model what the tool does")
        for name, raw in inspect.signature(function).parameters.items():
            if hints.get(name) is ToolContext:
                self.context_name = name
            elif raw.kind is raw.VAR_KEYWORD and not is_documented:
                self.takes_others = True
            elif fault := _find_fault(raw, is_documented=is_documented):
                faults.append(fault)
            else:
                hint = Any if raw.annotation is raw.empty else hints[name]
                try:
                    self._by_name[name] = _make_parameter(raw, hint, descriptions.get(name, ""))
                except (TypeError, ValueError, pydantic.PydanticUserError) as error:
                    why = str(error).partition(". ")[0]
                    faults.append(
                        f"parameter {name!r} has the type {hint!r}, which has no schema ({why}): "
                        "use str, int, float, bool, list, dict, Literal, an Enum or a dataclass"
                    )
        if faults:
            raise ToolError(f"function tool {tool!r}: " + "; ".join(faults))
        undescribed = [n for n, each in self._by_name.items() if "description" not in each.schema]
        if is_documented and undescribed:
            logger.warning(
                "function tool %r: the model sees no description of %s: write one under `Args:` in "
                "the docstring",
                *(tool, quote_all(undescribed)),
            )

    @property
    def names(self) -> set[str]:
        """Names of all that a call may give."""
        return set(self._by_name)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments object."""
        properties = {name: each.schema for name, each in self._by_name.items()}
        required = [name for name, each in self._by_name.items() if each.is_required]
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        return {**schema, "required": required} if required else schema

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments as the function's types (an Enum member, a dataclass, …).

        Strict: text is never taken for a number, nor a bool.

        Raises:
            ArgumentsError: It names each missing, unknown and wrong argument.
        """
        checked: dict[str, Any] = {}
        faults: list[str] = []
        for name, value in arguments.items():
            parameter = self._by_name.get(name)
            if parameter is not None:
                try:
                    checked[name] = _read_value(parameter.adapter, value)
                except pydantic.ValidationError as error:
                    faults.append(_describe_fault(name, parameter, value, error))
            elif self.takes_others:
                checked[name] = value
        missing = [
            n for n, each in self._by_name.items() if each.is_required and n not in arguments
        ]
        unknown = [n for n in arguments if n not in self._by_name and not self.takes_others]
        faults += [f"missing {quote_all(missing)}"] if missing else []
        if unknown:
            taken = quote_all(self._by_name) or "none"
            faults.append(f"unknown {quote_all(unknown)} (it takes {taken})")
        if faults:
            raise ArgumentsError(self._tool, faults)
        return checked


def _read_value(adapter: pydantic.TypeAdapter[Any], value: Any) -> Any:
    """The value in the function's type, which it may have already.

    Raises:
        pydantic.ValidationError: It stands for none.
    """
    try:
        return adapter.validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        try:
            text = json.dumps(value)  # as JSON an enum is its value, and a dataclass a dict
        except (TypeError, ValueError, RecursionError):  # of tools_kwargs, which hold any object
            raise error from None
        return adapter.validate_json(text, strict=True)


def _describe_fault(
    name: str, parameter: Parameter, value: Any, error: pydantic.ValidationError
) -> str:
    """What is wrong with one argument, in words for a model."""
    first, *others = error.errors(include_url=False, include_context=False)
    if any(each["loc"][:-1] == first["loc"][:-1] and each["loc"] for each in others):  # a union's
        return f"{name} = {show(value)}: expected {show(parameter.schema, MAX_EXPECTED)}"
    steps = [f"[{s}]" if isinstance(s, int) else f".{s}" for s in first["loc"]]
    found, expected = first["input"], _EXPECTED.get(first["type"])
    problem = first["msg"][:1].lower() + first["msg"][1:]
    if expected is not None:
        problem = f"expected {expected}, got {'null' if found is None else type(found).__name__}"
    return f"{name}{''.join(steps)} = {show(found)}: {problem}"


def _find_fault(raw: inspect.Parameter, *, is_documented: bool) -> str:
    """Why a parameter cannot be one of a tool, by its form alone; "" where it can."""
    name = raw.name
    if raw.kind is raw.VAR_POSITIONAL:
        return f"*{name} has no schema: write `{name}: list[...]` instead"
    if raw.kind is raw.VAR_KEYWORD:
        return f"**{name} has no schema: write `{name}: dict[str, ...]` instead"
    if raw.kind is raw.POSITIONAL_ONLY:
        return f"{name} is positional-only, and calls name their arguments: remove the `/`"
    if isinstance(raw.default, FieldInfo):
        field = f"write `{name}: Annotated[..., Field(...)] = ...`"
        return f"parameter {name!r} has a pydantic Field as its default: {field}"
    if is_documented and raw.annotation is raw.empty:
        return f"parameter {name!r} has no type: write `{name}: str` or what it is"
    return ""


def _make_parameter(raw: inspect.Parameter, hint: Any, description: str) -> Parameter:
    choices = _CHOICES.search(description)
    if choices is not None:
        hint = Literal[tuple(json.loads(choices["values"]))]
        description = description[: choices.start()].strip()
    texts = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, str)]
    for text in texts:
        hint = Annotated[hint, pydantic.Field(description=text)]
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hint)
    schema = write_schema(adapter)
    if description:
        schema["description"] = description
    is_required = raw.default is raw.empty
    if not is_required:
        try:
            schema["default"] = adapter.dump_python(raw.default, mode="json", warnings="none")
        except ValueError:  # an object that JSON has no word for: just optional
            schema.pop("default", None)
    return Parameter(adapter, schema, is_required)


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """What stands before the sections, and the parameters' descriptions, their lines joined.

    Google, NumPy and reST style are read.
    """
    clean = inspect.cleandoc(text or "")
    try:
        # It takes a section in the first line for prose.
        parsed = docstring_parser.parse(f"\n{clean}")
    except docstring_parser.ParseError:  # prose that looks like a section and is none
        return clean, {}
    parameters = {
        name.strip().lstrip("*"): " ".join((item.description or "").split())
        for item in parsed.params
        for name in item.arg_name.split(",")  # NumPy documents several in one entry
    }
    return (parsed.description or "").strip(), parameters
