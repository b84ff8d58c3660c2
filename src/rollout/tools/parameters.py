"""The parameters of a tool function: what the model reads of them, and what a call may give.

pydantic reads the annotations: a `TypeAdapter` a parameter writes its schema and checks its values.
"""

from __future__ import annotations

import enum
import inspect
import json
import logging
import re
import typing
from typing import Annotated, Any, Literal

import docstring_parser
import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from rollout.errors import ToolError
from rollout.tools.schemas import (
    MAX_EXPECTED,
    ArgumentsError,
    inline_references,
    quote_all,
    show,
)
from rollout.tools.tool import ToolContext

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("rollout")

#: Faults of pydantic's that only mean another type.
_EXPECTED = {
    **{f"{name}_type": name for name in ("int", "float", "bool", "list", "dict")},
    **dict.fromkeys(("model_type", "dataclass_type"), "dict"),
    "string_type": "str",
    "tuple_type": "list",
    "none_required": "null",
}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
#: As `transformers.utils.get_json_schema` reads them at the end of a parameter's description.
_CHOICES = re.compile(r"\(choices:\s*(?P<values>\[.*?\])\)\s*\Z", re.IGNORECASE | re.DOTALL)


class _SchemaWriter(GenerateJsonSchema):
    """Writes types as `transformers.utils.get_json_schema` does, where that knows them."""

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def union_schema(self, schema: Any) -> dict[str, Any]:
        written = super().union_schema(schema)
        parts = written.get("anyOf", [])
        if not parts or any(part.keys() != {"type"} for part in parts):
            return written
        return {"type": _one_or_all(sorted({part["type"] for part in parts}))}

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        values = [v.value if isinstance(v, enum.Enum) else v for v in schema["expected"]]
        return _write_choices(values) or super().literal_schema(schema)

    def enum_schema(self, schema: Any) -> dict[str, Any]:
        values = [member.value for member in schema["members"]]
        return _write_choices(values) or super().enum_schema(schema)

    def list_schema(self, schema: Any) -> dict[str, Any]:
        return _drop(super().list_schema(schema), items={})

    def tuple_schema(self, schema: Any) -> dict[str, Any]:
        written = _drop(super().tuple_schema(schema), items={})
        size = len(written.get("prefixItems", ()))
        return _drop(written, minItems=size, maxItems=size) if size else written

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return _drop(super().dict_schema(schema), additionalProperties=True)


def _write_choices(values: list[Any]) -> dict[str, Any]:
    """The schema of these values; empty where they are no JSON scalars."""
    if not all(type(value) in _TYPES for value in values):
        return {}
    names = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    return {"type": _one_or_all(names), "enum": values}


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _drop(schema: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The schema without keys that only write down what counts anyway."""
    return {k: v for k, v in schema.items() if not (k in defaults and v == defaults[k])}


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
        schema: The JSON Schema of the arguments object.

    Raises:
        ToolError: It lists everything that must be written first.
    """

    def __init__(self, function: Callable[..., Any], tool: str, *, is_documented: bool) -> None:
        self._tool = tool
        self._adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
        self.schema: dict[str, Any] = {"type": "object", "properties": {}}
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
                    self._add(raw, hint, descriptions.get(name, ""))
                except (TypeError, ValueError, pydantic.PydanticUserError) as error:
                    why = str(error).partition(". ")[0]
                    faults.append(
                        f"parameter {name!r} has the type {hint!r}, which has no schema ({why}): "
                        "use str, int, float, bool, list, dict, Literal, an Enum or a dataclass"
                    )
        if faults:
            raise ToolError(f"function tool {tool!r}: " + "; ".join(faults))
        properties = self.schema["properties"]
        undescribed = [name for name in properties if "description" not in properties[name]]
        if is_documented and undescribed:
            logger.warning(
                "function tool %r: the model sees no description of %s: write one under `Args:` in "
                "the docstring",
                *(tool, quote_all(undescribed)),
            )

    def _add(self, raw: inspect.Parameter, hint: Any, description: str) -> None:
        """Add a parameter.

        Raises:
            TypeError: The type, or one within it, contains itself.
            pydantic.PydanticUserError: JSON has no word for it.
        """
        choices = _CHOICES.search(description)
        if choices is not None:
            hint = Literal[tuple(json.loads(choices["values"]))]
            description = description[: choices.start()].strip()
        for text in getattr(hint, "__metadata__", ()):
            if isinstance(text, str):
                hint = Annotated[hint, pydantic.Field(description=text)]
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hint)
        schema = inline_references(adapter.json_schema(schema_generator=_SchemaWriter))
        if description:
            schema["description"] = description
        if raw.default is raw.empty:
            self.schema.setdefault("required", []).append(raw.name)
        else:
            try:
                schema["default"] = adapter.dump_python(raw.default, mode="json", warnings="none")
            except ValueError:  # an object that JSON has no word for: just optional
                schema.pop("default", None)
        self._adapters[raw.name], self.schema["properties"][raw.name] = adapter, schema

    @property
    def names(self) -> set[str]:
        """Names of all that a call may give."""
        return set(self._adapters)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments as the function's types (an Enum member, a dataclass, …).

        Strict: text is never taken for a number, nor a bool.

        Raises:
            ArgumentsError: It names each missing, unknown and wrong argument.
        """
        checked: dict[str, Any] = {}
        faults: list[str] = []
        unknown: list[str] = []
        for name, value in arguments.items():
            adapter = self._adapters.get(name)
            if adapter is not None:
                try:
                    checked[name] = _read_value(adapter, value)
                except pydantic.ValidationError as error:
                    faults.append(self._describe_fault(name, value, error))
            elif self.takes_others:
                checked[name] = value
            else:
                unknown.append(name)
        missing = [name for name in self.schema.get("required", ()) if name not in arguments]
        if missing:
            faults.append(f"missing {quote_all(missing)}")
        if unknown:
            taken = quote_all(self._adapters) or "none"
            faults.append(f"unknown {quote_all(unknown)} (it takes {taken})")
        if faults:
            raise ArgumentsError(self._tool, faults)
        return checked

    def _describe_fault(self, name: str, value: Any, error: pydantic.ValidationError) -> str:
        """What is wrong with one argument, in words for a model."""
        first, *others = error.errors(include_url=False, include_context=False)
        if any(each["loc"] and each["loc"][:-1] == first["loc"][:-1] for each in others):
            schema = self.schema["properties"][name]  # a union's
            return f"{name} = {show(value)}: expected {show(schema, MAX_EXPECTED)}"
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
        found, expected = first["input"], _EXPECTED.get(first["type"])
        problem = first["msg"][:1].lower() + first["msg"][1:]
        if expected is not None:
            kind = "null" if found is None else type(found).__name__
            problem = f"expected {expected}, got {kind}"
        return f"{name}{''.join(steps)} = {show(found)}: {problem}"


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
