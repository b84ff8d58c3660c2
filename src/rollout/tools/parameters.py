"""The parameters of a tool function: the schema that the model reads, and the function's own types.

pydantic reads the annotations, as those of a TypedDict: it writes the schema and makes the values.
"""

from __future__ import annotations

import enum
import inspect
import json
import logging
import re
import typing
from contextlib import suppress
from typing import Annotated, Any, Literal, NotRequired

import docstring_parser
import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from rollout.errors import ToolError
from rollout.tools.schemas import ArgumentsError, inline_references, quote_all, write_path
from rollout.tools.tool import METHOD_KWARGS, ToolContext

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("rollout")

_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_make_dict: Any = TypedDict
#: As `transformers.utils.get_json_schema` reads them at the end of a parameter's description.
_CHOICES = re.compile(r"\(choices:\s*(?P<values>\[.*?\])\)\s*\Z", re.IGNORECASE | re.DOTALL)


class _SchemaWriter(GenerateJsonSchema):
    """Writes types as `transformers.utils.get_json_schema` does, where that knows them."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value

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
        if not all(type(value) in _JSON_TYPES for value in values):
            return super().literal_schema(schema)
        types = dict.fromkeys(_JSON_TYPES[type(value)] for value in values)
        return {"type": _one_or_all(list(types)), "enum": values}

    def enum_schema(self, schema: Any) -> dict[str, Any]:
        return self.literal_schema({"expected": schema["members"]})

    def list_schema(self, schema: Any) -> dict[str, Any]:
        return {k: v for k, v in super().list_schema(schema).items() if v != {}}

    def tuple_schema(self, schema: Any) -> dict[str, Any]:
        written = {k: v for k, v in super().tuple_schema(schema).items() if v != {}}
        if "prefixItems" in written:  # which say how many there are
            written = {k: v for k, v in written.items() if k not in ("minItems", "maxItems")}
        return written

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return {k: v for k, v in super().dict_schema(schema).items() if v is not True}


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


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
        schema: The JSON Schema of the arguments object.

    Raises:
        ToolError: It lists everything that must be written first.
    """

    def __init__(self, function: Callable[..., Any], tool: str, *, is_documented: bool) -> None:
        self._tool = tool
        self.context_name: str | None = None
        self._takes_others = False  # as `**kwargs`
        self.description, descriptions = parse_docstring(function.__doc__)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except Exception as error:  # names that annotations use may be anything, also missing
            raise ToolError(
                f"function tool {tool!r}: its annotations cannot be read ({error}): define or "
                "import their names at module level, not under TYPE_CHECKING"
            ) from error
        faults: list[str] = []
        fields: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        if is_documented and not self.description:
            faults.append("its docstring must begin with what tells the model what the tool does")
        for name, raw in inspect.signature(function).parameters.items():
            if hints.get(name) is ToolContext:
                self.context_name = name
            elif raw.kind is raw.VAR_KEYWORD and not is_documented:
                self._takes_others = True
            elif fault := _find_fault(raw, is_documented=is_documented):
                faults.append(fault)
            else:
                fields[name] = _describe_type(hints.get(name, Any), descriptions.get(name, ""))
                if raw.default is not raw.empty:
                    fields[name], defaults[name] = NotRequired[fields[name]], raw.default
        try:
            self._adapter = pydantic.TypeAdapter[dict[str, Any]](_make_dict("Arguments", fields))
            written = self._adapter.json_schema(schema_generator=_SchemaWriter)
            self.schema = inline_references(written)
        except (TypeError, pydantic.PydanticUserError) as error:
            why = str(error).partition("\n")[0].partition(". ")[0]
            faults.append(
                f"a parameter has a type without a schema ({why}): use str, int, float, bool, "
                "list, dict, Literal, an Enum or a dataclass"
            )
        if faults:
            raise ToolError(f"function tool {tool!r}: " + "; ".join(faults))
        properties = self.schema["properties"]
        for name, default in defaults.items():
            with suppress(ValueError):  # what JSON has no word for, such as NaN, is not shown
                text = json.dumps(to_jsonable_python(default), allow_nan=False)
                properties[name]["default"] = json.loads(text)
        undescribed = [name for name in properties if "description" not in properties[name]]
        if is_documented and undescribed:
            logger.warning(
                "function tool %r: the model sees no description of %s: write one under `Args:` in "
                "the docstring",
                *(tool, quote_all(undescribed)),
            )

    def takes(self, name: str) -> bool:
        """Whether a call may give an argument of this name."""
        if name in self.schema["properties"]:
            return True
        return self._takes_others and name not in METHOD_KWARGS

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that fit the schema as the function's types (an Enum member, a dataclass, …).

        Raises:
            ArgumentsError: One has no value of its type.
        """
        known = self.schema["properties"]
        others = {name: value for name, value in arguments.items() if name not in known}
        try:
            return others | self._adapter.validate_python(arguments)
        except pydantic.ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
            texts = [f"{write_path(each['loc'])}: {each['msg']}" for each in faults]
            raise ArgumentsError(self._tool, texts) from None


def _describe_type(hint: Any, description: str) -> Any:
    """A parameter's type with its description, for pydantic."""
    if choices := _CHOICES.search(description):
        with suppress(ValueError):  # it only looks like choices
            hint = Literal[tuple(json.loads(choices["values"]))]
            description = description[: choices.start()].strip()
    for text in (*getattr(hint, "__metadata__", ()), description):
        if isinstance(text, str) and text:
            hint = Annotated[hint, pydantic.Field(description=text)]
    return hint


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
