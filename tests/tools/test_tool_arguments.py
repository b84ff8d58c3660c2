"""Arguments against the schema of a tool: each fault is named, with what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.errors import ToolError
from rollout.tools import function_tool
from rollout.tools.schemas import SchemaCheck

POINT = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z]", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "nullable": True},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "nullable": True},
        "hours": {"type": "array", "items": {"type": "integer", "nullable": True}, "minItems": 1},
        "point": {**POINT, "additionalProperties": False},
        "id": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "ref": {"$ref": "#/$defs/points"},
        "nullable": {"type": "integer"},
    },
    "required": ["city"],
    "$defs": {"points": {"type": "array", "items": POINT}},
}


def find_fault(arguments: Any, parameters: Any = PARAMETERS) -> str:
    with pytest.raises(ToolError) as caught:
        SchemaCheck("weather", parameters).check(arguments)
    prefix = "invalid arguments for 'weather': "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"city": 3}, 'city: 3 is not of type "string"'),
        ({"city": "Reykjavik"}, 'city: "Reykjavik" is longer than 8 characters'),
        ({"city": "X" * 2000}, f'city: "{"X" * 239}'),
        ({"days": "3"}, 'days: "3" is not of types "null", "integer"'),
        ({"hours": [1, "2"]}, 'hours[1]: "2" is not of types "null", "integer"'),
        ({"point": {}}, "missing 'lat' in point"),
        ({"point": {"lat": 1, "lon": 2}}, "unknown 'lon' in point"),
        ({"id": "x"}, 'id: "x" is not of type "integer"; and "x" is not of type "null"'),
        ({"ref": [{"lat": None}]}, 'ref[0].lat: null is not of type "number"'),
    ],
)
def test_arguments_wrong_value_is_named(arguments: dict[str, Any], text: str) -> None:
    assert find_fault({"city": "Oslo", **arguments}) == text


def test_arguments_that_fit_are_returned() -> None:
    nothing = {"days": None, "unit": None, "hours": [1, None], "id": None, "nullable": 1}
    arguments = {"city": "Oslo", "ref": [{"lat": 1.5, "lon": 2}], **nothing}
    assert SchemaCheck("weather", PARAMETERS).check(arguments) == arguments


def test_arguments_missing_and_unknown_are_listed_with_what_there_is() -> None:
    assert find_fault({"days": "3", "town": "Oslo", "x": 1}) == (
        "missing 'city'; days: \"3\" is not of types \"null\", \"integer\"; unknown 'town', 'x' "
        "(it takes 'city', 'days', 'unit', 'hours', 'point', 'id', 'ref', 'nullable')"
    )
    assert find_fault({"a": 1}, {"properties": {}}) == "unknown 'a' (it takes none)"


def test_arguments_that_are_no_object_are_refused() -> None:
    assert find_fault([1, 2]) == "[1, 2] is no object of arguments"


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {"type": "integer"}}}]},
    ],
)
def test_arguments_further_ones_pass_where_the_schema_leaves_room(parameters: Any) -> None:
    SchemaCheck("weather", parameters).check({"b": 1})


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "str"}}},
            "tool 'weather': parameters.properties.a.type of its schema: \"str\" is not valid",
        ),
        (
            {"$ref": "https://example.com/schema.json"},
            "https://example.com/schema.json is not fetched; write the schema out",
        ),
    ],
)
def test_schema_that_is_none_is_refused(parameters: Any, text: str) -> None:
    with pytest.raises(ToolError) as caught:
        SchemaCheck("weather", parameters)
    assert text in str(caught.value)


def test_function_with_a_given_schema_is_checked_against_it() -> None:
    def weather(key, token=""):  # type: ignore[no-untyped-def]
        return key

    parameters = {"properties": {"key": {"type": "string"}}, "required": ["key"]}
    function = {"name": "weather", "parameters": parameters}
    tool = function_tool(schema=function)(weather)
    assert tool.schema == {"type": "function", "function": function}  # given without its envelope
    assert tool.check({"key": "a"}, {"token": "secret"}) == {"key": "a", "token": "secret"}
    assert tool.check({}, {"key": "fixed"}) == {"key": "fixed"}
    for arguments, fault in (
        ({"key": 1}, 'key: 1 is not of type "string"'),
        ({"key": "a", "token": "b"}, "unknown 'token' (it takes 'key')"),
    ):
        with pytest.raises(ToolError) as caught:
            tool.check(arguments, {})
        assert str(caught.value) == f"invalid arguments for 'weather': {fault}"
