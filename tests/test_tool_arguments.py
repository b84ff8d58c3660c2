"""Arguments against the schema of a tool: each fault is named, with what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.errors import ToolError
from rollout.tools import function_tool
from rollout.tools.argument_checks import ArgumentsError, SchemaCheck

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z]", "maxLength": 8},
        "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "hours": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
        "id": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "ref": {"$ref": "#/$defs/point"},
    },
    "required": ["city"],
    "$defs": {"point": {"type": "array", "items": {"type": "number"}}},
}


def fault(arguments: Any, parameters: Any = PARAMETERS) -> str:
    with pytest.raises(ArgumentsError) as caught:
        SchemaCheck("weather", parameters).check(arguments)
    prefix = "invalid arguments for 'weather': "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"city": 3}, "city = 3: expected string, got number"),
        ({"city": "oslo"}, 'city = "oslo": expected text that matches "^[A-Z]"'),
        ({"city": "Reykjavik"}, 'city = "Reykjavik": expected at most 8 characters'),
        ({"days": "3"}, 'days = "3": expected integer or null, got string'),
        ({"days": True}, "days = true: expected integer or null, got boolean"),
        ({"days": 0}, "days = 0: expected a number >= 1"),
        ({"days": 15}, "days = 15: expected a number <= 14"),
        ({"unit": "kelvin"}, 'unit = "kelvin": expected one of ["celsius","fahrenheit"]'),
        ({"hours": []}, "hours = []: expected at least 1 items"),
        ({"hours": [1, "2"]}, 'hours[1] = "2": expected integer, got string'),
        ({"place": {}}, "missing 'lat' in place"),
        ({"place": {"lat": 1, "lon": 2}}, "unknown 'lon' in place"),
        ({"id": "x"}, 'id = "x": expected {"anyOf":[{"type":"integer"},{"type":"null"}]}'),
        ({"ref": [1, None]}, "ref[1] = null: expected number, got null"),
        ({"city": "X" * 200}, f'city = "{"X" * 79}…: expected at most 8 characters'),
    ],
)
def test_arguments_wrong_value_is_named(arguments: dict[str, Any], text: str) -> None:
    assert fault({"city": "Oslo", **arguments}) == text


def test_arguments_missing_and_unknown_are_listed_with_what_there_is() -> None:
    assert fault({"days": "3", "town": "Oslo", "x": 1}) == (
        "days = \"3\": expected integer or null, got string; missing 'city'; unknown 'town', 'x' "
        "(it takes 'city', 'days', 'unit', 'hours', 'place', 'id', 'ref')"
    )
    assert fault({"a": 1}, {"type": "object", "properties": {}}) == "unknown 'a' (it takes none)"
    many = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(20)}}
    assert fault({f"a{n}": n for n in range(20)}, many).endswith("; and 12 more")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([1, 2], "arguments = [1,2]: expected an object, got array"),
        ("city", 'arguments = "city": expected an object, got string'),
        (None, "arguments = null: expected an object, got null"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, text: str) -> None:
    assert fault(arguments) == text

    @function_tool("weather")
    def tool(city: str) -> None:
        """Do it.

        Args:
            city: City.
        """

    with pytest.raises(ArgumentsError) as caught:
        tool.check(arguments, {})
    assert str(caught.value) == f"invalid arguments for 'weather': {text}"


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^b": {}}, "properties": {"a": {}}},
    ],
)
def test_arguments_further_ones_pass_where_the_schema_leaves_room(parameters: Any) -> None:
    SchemaCheck("weather", parameters).check({"b": 1})


def test_arguments_of_the_prompt_that_are_no_json_are_judged_by_their_type() -> None:
    assert fault({"city": "Oslo", "days": object()}) == (
        'days = "<object>": expected integer or null, got string'
    )


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "str"}}},
            "tool 'weather': parameters.properties.a.type of its schema: \"str\" is not valid "
            "under any of the schemas listed in the 'anyOf' keyword; expected a JSON Schema",
        ),
        (
            {"$ref": "https://example.com/schema.json"},
            "tool 'weather': parameters of its schema: Resource 'https://example.com/schema.json' "
            "is not present in a registry and retrieving it failed: ValueError: "
            "https://example.com/schema.json is not fetched; write the schema out; expected a JSON "
            "Schema",
        ),
    ],
)
def test_schema_that_is_none_is_refused(parameters: Any, text: str) -> None:
    with pytest.raises(ToolError) as caught:
        SchemaCheck("weather", parameters)
    assert str(caught.value) == text


def test_function_with_a_given_schema_is_checked_against_it() -> None:
    def look_up(key, depth=1, token=""):  # type: ignore[no-untyped-def]
        return key

    schema = {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["key"],
        },
    }
    tool = function_tool(schema=schema)(look_up)
    assert tool.schema == {"type": "function", "function": schema}  # given without its envelope
    tool.check({"key": "a"}, {"token": "secret"})
    tool.check({}, {"key": "fixed"})
    for arguments, text in (
        ({"key": 1}, "key = 1: expected string, got number"),
        ({"key": "a", "token": "b"}, "unknown 'token' (it takes 'key', 'depth')"),
        ({}, "missing 'key'"),
    ):
        with pytest.raises(ArgumentsError) as caught:
            tool.check(arguments, {})
        assert str(caught.value) == f"invalid arguments for 'look_up': {text}"


def test_schema_without_a_name_is_refused() -> None:
    with pytest.raises(ToolError) as caught:
        function_tool(schema={"parameters": {}})(lambda: None)
    assert str(caught.value) == (
        "schema of function tool '<lambda>' = {'parameters': {}}: expected {'type': 'function', "
        "'function': {'name': ..., 'parameters': {...}}}"
    )
