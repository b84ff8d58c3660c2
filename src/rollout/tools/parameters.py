"""The parameters of a tool function: what the model is told, and what is checked before a call."""

from __future__ import annotations

import inspect
import logging
import re
import typing
from typing import Any

import msgspec

from rollout.errors import ToolError
from rollout.tools.annotations import description_in, with_meta
from rollout.tools.argument_checks import MAX_EXPECTED, ArgumentsError, quoted, shown
from rollout.tools.docstrings import Docstring, parse_docstring
from rollout.tools.pydantic_types import is_field, joined_models, of_joined, plain_data, to_model
from rollout.tools.schema import schema_of
from rollout.tools.tool import ToolContext

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("rollout")

#: How msgspec words a fault: what is wrong, and where within the argument.
_FAULT = re.compile(r"(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One argument that the model may give.

    Attributes:
        annotation: Its type, as msgspec reads it.
        default: What the function takes where it is not given.
        description: What the model reads about it.
        is_joined: The type is a root model around the one that the function has.
    """

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty
    description: str = ""
    is_joined: bool = False

    @property
    def is_required(self) -> bool:
        """Whether a call must give it."""
        return self.default is inspect.Parameter.empty


class Parameters:
    """The parameters of one function, but for an injected `ToolContext`.

    Attributes:
        context_name: The parameter that receives the `ToolContext`, or None.
        takes_others: Whether the function takes arguments of other names too, as ``**kwargs``; they
            are the schema's to check.
    """

    def __init__(
        self,
        tool: str,
        parameters: Sequence[Parameter],
        context_name: str | None = None,
        *,
        takes_others: bool = False,
    ) -> None:
        self.context_name = context_name
        self.takes_others = takes_others
        self._tool = tool
        self._joined = {p.name for p in parameters if p.is_joined}
        self._by_name = {parameter.name: parameter for parameter in parameters}
        self._struct = msgspec.defstruct(
            "Arguments",
            # Which of them were given is known from the call; the default here is never read.
            [(p.name, p.annotation, *(() if p.is_required else (None,))) for p in parameters],
            kw_only=True,
            forbid_unknown_fields=not takes_others,
        )

    def __iter__(self) -> typing.Iterator[Parameter]:
        return iter(self._by_name.values())

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments object."""
        return {
            "type": "object",
            "properties": {parameter.name: _property(parameter) for parameter in self},
            "required": [parameter.name for parameter in self if parameter.is_required],
        }

    def validated(self, arguments: Mapping[str, Any]) -> msgspec.Struct:
        """Right arguments as the fields of a Struct, which has also those that are not given.

        Raises:
            ArgumentsError: As `check`.
        """
        try:
            return msgspec.convert(arguments, self._struct, str_keys=True, dec_hook=to_model)
        except msgspec.ValidationError:
            raise ArgumentsError(self._tool, self._faults(arguments)) from None

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments as the function's types (an Enum member, a dataclass, …).

        Strict: text is never taken for a number, nor a bool.

        Raises:
            ArgumentsError: It names each missing, unknown and wrong argument.
        """
        checked = self.validated(arguments)
        found = {
            name: getattr(checked, name) if name in self._by_name else value
            for name, value in arguments.items()
        }
        for name in self._joined:
            if name in found:
                found[name] = of_joined(found[name])
        return found

    def _faults(self, arguments: Mapping[str, Any]) -> list[str]:
        faults = [
            fault
            for name, value in arguments.items()
            if name in self._by_name
            and (fault := _type_fault(name, value, self._by_name[name].annotation))
        ]
        missing = [p.name for p in self if p.is_required and p.name not in arguments]
        unknown = [
            name for name in arguments if name not in self._by_name and not self.takes_others
        ]
        faults += [f"missing {quoted(missing)}"] if missing else []
        faults += [f"unknown {quoted(unknown)} (it takes {self._taken()})"] if unknown else []
        return faults

    def _taken(self) -> str:
        return quoted(self._by_name) if self._by_name else "none"


def _property(parameter: Parameter) -> dict[str, Any]:
    schema = schema_of(parameter.annotation)
    if parameter.description:
        schema["description"] = parameter.description
    if not parameter.is_required:
        try:
            schema["default"] = msgspec.to_builtins(
                parameter.default, str_keys=True, enc_hook=plain_data
            )
        except (
            TypeError,
            ValueError,
            NotImplementedError,
        ):  # an object that JSON has no word for: just optional
            schema.pop("default", None)
    return schema


def _type_fault(name: str, value: Any, annotation: Any) -> str:
    """What is wrong with one argument, in words for a model; empty where nothing is."""
    try:
        msgspec.convert(value, annotation, str_keys=True, dec_hook=to_model)
    except msgspec.ValidationError as error:
        found = _FAULT.fullmatch(str(error))
        assert found is not None  # every text matches
        problem = found["problem"].replace("`", "")
        problem = problem[:1].lower() + problem[1:]
        place = f" in a key of {name}" if found["key"] else f" at {name}"
        where = place + found["path"] if found["key"] or found["path"] else ""
        fault = f"{name} = {shown(value)}: {problem}{where}"
        if problem.startswith(("expected", "input should")):
            return fault
        return f"{fault} (expected {shown(schema_of(annotation), MAX_EXPECTED)})"
    return ""


def inspect_parameters(
    function: Callable[..., Any], tool: str, *, is_documented: bool = True
) -> Parameters:
    """The parameters of `function`, from its annotations and its docstring.

    One warning names the parameters that the docstring does not describe: a model then sees their
    names and types only. With ``is_documented=False`` (the schema is given by hand) neither a
    docstring nor annotations are required: a parameter without one takes any value, and
    ``**kwargs`` whatever else the schema lists.

    Raises:
        ToolError: It lists everything that must be written first.
    """
    docstring = parse_docstring(function.__doc__)
    hints = _hints(function, tool)
    faults: list[str] = []
    if is_documented and not docstring.description and docstring.parameters:
        faults.append("its docstring does not tell the model what the tool does: begin with that")
    elif is_documented and not docstring.description:
        faults.append("it has no docstring: write one that tells the model what the tool does")
    found: list[Parameter] = []
    context_name = None
    takes_others = False
    for name, raw in inspect.signature(function).parameters.items():
        if hints.get(name) is ToolContext:
            context_name = name
            continue
        if raw.kind is raw.VAR_KEYWORD and not is_documented:
            takes_others = True
            continue
        parameter = _parameter(raw, hints.get(name, raw.empty), docstring)
        faults += _faults_of(raw, parameter, hints.get(name), is_documented)
        found.append(parameter)
    if faults:
        raise ToolError(f"function tool {tool!r}: " + "; ".join(faults))
    undescribed = [parameter.name for parameter in found if not parameter.description]
    if is_documented and undescribed:
        logger.warning(
            "function tool %r: the model sees no description of %s: write one under `Args:` in "
            "the docstring",
            tool,
            quoted(undescribed),
        )
    return Parameters(tool, found, context_name, takes_others=takes_others)


def _hints(function: Callable[..., Any], tool: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # names that annotations use may be anything, also missing
        raise ToolError(
            f"function tool {tool!r}: its annotations cannot be read ({error}): define or import "
            f"their names at module level, not under TYPE_CHECKING"
        ) from error


def _parameter(raw: inspect.Parameter, annotation: Any, docstring: Docstring) -> Parameter:
    joined = joined_models(annotation)
    return Parameter(
        name=raw.name,
        annotation=Any if annotation is raw.empty else joined or with_meta(annotation),
        is_joined=joined is not None,
        default=raw.default,
        description=docstring.parameters.get(raw.name) or description_in(annotation),
    )


def _faults_of(
    raw: inspect.Parameter, parameter: Parameter, annotation: Any, is_documented: bool
) -> list[str]:
    name = raw.name
    if raw.kind in (raw.VAR_POSITIONAL, raw.VAR_KEYWORD):
        star = "*" if raw.kind is raw.VAR_POSITIONAL else "**"
        kind = "list[...]" if star == "*" else "dict[str, ...]"
        return [f"{star}{name} has no schema: write `{name}: {kind}` instead"]
    if raw.kind is raw.POSITIONAL_ONLY:
        return [f"{name} is positional-only, and calls name their arguments: remove the `/`"]
    faults = []
    if is_field(raw.default):
        faults.append(
            f"parameter {name!r} has a pydantic Field as its default: write "
            f"`{name}: Annotated[..., Field(...)] = ...`"
        )
    if is_documented and raw.annotation is raw.empty:
        faults.append(f"parameter {name!r} has no type: write `{name}: str` or what it is")
    elif is_documented or raw.annotation is not raw.empty:
        faults += _unsupported(parameter, annotation)
    return faults


def _unsupported(parameter: Parameter, annotation: Any) -> list[str]:
    try:
        schema_of(parameter.annotation)
    except (TypeError, RecursionError) as error:
        reason = str(error).partition(" - type ")[0]
        if reason.startswith("Generating JSON schema for custom types"):
            reason = "JSON has no word for it"
        return [
            f"parameter {parameter.name!r} has the type {annotation!r}, which has no schema "
            f"({reason}): use str, int, float, bool, list, dict, Literal, an Enum or a "
            f"dataclass"
        ]
    return []
