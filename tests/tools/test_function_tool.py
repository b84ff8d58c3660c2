"""`function_tool`: what the model is told of a function, and what is checked before it runs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal, Required

import annotated_types
import msgspec
import numpy as np
import pydantic
import pytest
from typing_extensions import TypedDict

from rollout.errors import ToolError
from rollout.tools import (
    FunctionTool,
    MediaError,
    ToolContext,
    ToolResult,
    function_tool,
    normalise_result,
)


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Box:
    title: str
    corner: Point


class Options(TypedDict, total=False):
    depth: Required[int]
    tag: str


@dataclasses.dataclass
class Node:
    next: Node | None = None


class Corner(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0)
    unit: Unit = Unit.CELSIUS


class Room(pydantic.BaseModel):
    corners: list[Corner]
    kind: Literal["hall", "cell"] = "hall"


NOTHING = object()


def make_function(annotation: Any, default: Any = NOTHING, **changes: Any) -> Callable[..., Any]:
    """A function of one described parameter, with these attributes."""

    def function(a: Any) -> Any:
        """Do it.

        Args:
            a: A.
        """
        return a

    function.__annotations__["a"] = annotation
    if default is not NOTHING:
        function.__defaults__ = (default,)
    for name, value in changes.items():
        setattr(function, name, value)
    return function


def show(function: Callable[..., Any]) -> dict[str, Any]:
    """What the model sees of the parameters."""
    shown: dict[str, Any] = function_tool(function).schema["function"]["parameters"]
    return shown


UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
    "required": ["x"],
}
BOX = {"title": {"type": "string"}, "corner": POINT}
DEPTH = {"depth": {"type": "integer"}, "tag": {"type": "string"}}
CORNER = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0},
        "unit": {**UNIT, "default": "celsius"},
    },
    "required": ["x"],
}
ROOM = {
    "corners": {"type": "array", "items": CORNER},
    "kind": {"type": "string", "enum": ["hall", "cell"], "default": "hall"},
}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (Annotated[Unit | None, "how hot"], {**UNIT, "nullable": True}),
        (
            Annotated[int, annotated_types.Interval(ge=1, le=9)],
            {"type": "integer", "minimum": 1, "maximum": 9},
        ),
        (
            Annotated[str, pydantic.Field(pattern="^[a-z]+$", max_length=4)],
            {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
        ),
        (Box, {"type": "object", "properties": BOX, "required": ["title", "corner"]}),
        (Options, {"type": "object", "properties": DEPTH, "required": ["depth"]}),
        (Room, {"type": "object", "properties": ROOM, "required": ["corners"]}),
    ],
)
def test_function_tool_annotation_becomes_schema(annotation: Any, schema: dict[str, Any]) -> None:
    expected = {"type": "object", "properties": {"a": {**schema, "description": "A."}}}
    assert show(make_function(annotation)) == {**expected, "required": ["a"]}


@pytest.mark.parametrize(
    ("annotation", "default", "schema"),
    [
        (str | None, None, {"type": "string", "nullable": True, "default": None}),
        (Point, Point(1.0), {**POINT, "default": {"x": 1.0, "y": 0.0}}),
        (Corner, Corner(x=1), {**CORNER, "default": {"x": 1, "unit": "celsius"}}),
        (int, object(), {"type": "integer"}),
    ],
)
def test_function_tool_default_becomes_schema(
    annotation: Any, default: Any, schema: dict[str, Any]
) -> None:
    expected = {"type": "object", "properties": {"a": {**schema, "description": "A."}}}
    assert show(make_function(annotation, default)) == expected


@function_tool
def get_weather(city: str, unit: Unit = Unit.CELSIUS, days: int = 1) -> dict[str, Any]:
    """Get the weather of a city.

    Looks at more than one source.

    Args:
        city (str): The city, e.g. "Tokyo":
            in English.
        unit: Unit of the answer.
        days: How many days
            from today.

    Returns:
        The weather.
    """
    return {"city": city, "unit": unit, "days": days}


def test_function_tool_bare_decorator_infers_the_whole_schema() -> None:
    city = {"type": "string", "description": 'The city, e.g. "Tokyo": in English.'}
    unit = {**UNIT, "description": "Unit of the answer.", "default": "celsius"}
    days = {"type": "integer", "description": "How many days from today.", "default": 1}
    schema = {
        "name": "get_weather",
        "description": "Get the weather of a city.\n\nLooks at more than one source.",
        "parameters": {
            "type": "object",
            "properties": {"city": city, "unit": unit, "days": days},
            "required": ["city"],
        },
    }
    assert get_weather.schema == {"type": "function", "function": schema}
    written = get_weather.schema["function"]["parameters"]
    assert [*written] == ["type", "properties", "required"]  # templates print them in this order
    assert [*written["properties"]["unit"]] == ["type", "enum", "description", "default"]


def test_function_tool_decorated_function_stays_callable() -> None:
    assert isinstance(get_weather, FunctionTool)
    assert get_weather("Oslo", days=2) == {"city": "Oslo", "unit": Unit.CELSIUS, "days": 2}
    assert get_weather.__name__ == "get_weather"
    assert (get_weather.__doc__ or "").startswith("Get the weather")
    assert repr(get_weather) == "<FunctionTool get_weather>"


def test_function_tool_names_by_position_keyword_and_schema() -> None:
    def now() -> str:
        """Tell the time."""
        return "noon"

    assert function_tool("clock")(now).name == "clock"
    assert function_tool(name="clock")(now).schema["function"]["name"] == "clock"
    schema = {"type": "function", "function": {"name": "watch", "parameters": {}}}
    assert function_tool(schema=schema)(now).name == "watch"
    assert show(now) == {"type": "object", "properties": {}}


def test_function_tool_given_schema_that_is_of_another_function_is_refused() -> None:
    def f(a, hidden: int = 0):  # type: ignore[no-untyped-def]
        return a

    function: dict[str, Any] = {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}
    with pytest.raises(ToolError, match=r"^function tool 'g': its schema is named 'f'"):
        function_tool("g", schema=function)(f)
    fault = "its schema has properties that are no parameters of the function: b"
    with pytest.raises(ToolError, match=f"^function tool 'f': {fault}$"):
        function_tool(schema=function)(f)


def test_function_tool_context_parameter_is_hidden_and_missing_descriptions_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def f(a: int, b: int, c: int, context: ToolContext) -> None:
        """Do it.

        Args:
            c: C.
        """

    tool = function_tool(f)
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["a", "b", "c"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'f': the model sees no description of 'a', 'b'" in record.getMessage()


def unnamed(a, b: int, /, *args, c: str, d=pydantic.Field(3), **rest):  # type: ignore[no-untyped-def]  # noqa: B008
    return a


@pytest.mark.parametrize(
    ("function", "faults"),
    [
        (
            unnamed,
            [
                "its docstring must begin with what tells the model what the tool does",
                "calls name their arguments: remove the `*`, `**` or `/` at 'a'",
                "parameter 'd' has a pydantic Field as its default",
            ],
        ),
        (make_function(int, __annotations__={}), ["parameter 'a' has no type: write `a: str`"]),
        (make_function(Node), ["a parameter has a type without a schema (Node contains itself"]),
        (make_function(slice), ["a parameter has a type without a schema"]),
        (make_function("Missing"), ["its annotations cannot be read (name 'Missing' is not"]),
        (Point, ["is neither a Tool nor a function"]),
    ],
)
def test_function_tool_unusable_function_is_refused(function: Any, faults: list[str]) -> None:
    with pytest.raises(ToolError) as caught:
        function_tool(function)
    assert [fault for fault in faults if fault not in str(caught.value)] == []


@function_tool
def draw(
    size: int,
    points: list[Point],
    units: dict[str, list[Unit]] = {},  # noqa: B006
    labels: dict[int, str] = {},  # noqa: B006
    room: Room | None = None,
) -> None:
    """Draw.

    Args:
        size: Size.
        points: Points.
        units: Units.
        labels: Labels.
        room: Room.
    """


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"size": "3"}, 'size: "3" is not of type "integer"'),
        ({"points": [{"x": "1"}]}, 'points[0].x: "1" is not of type "number"'),
        (
            {"labels": {"a": "b"}},
            "labels.a.[key]: Input should be a valid integer, unable to parse string as an integer",
        ),
        (
            {"room": {}, "colr": 1},
            "missing 'corners' in room; unknown 'colr' (it takes 'size', 'points', 'units', "
            "'labels', 'room')",
        ),
    ],
)
def test_function_tool_wrong_argument_is_named(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(ToolError) as caught:
        draw.check({"size": 1, "points": [], **arguments}, {})
    assert str(caught.value) == f"invalid arguments for 'draw': {fault}"


def test_function_tool_checked_arguments_have_the_types_of_the_function() -> None:
    room = {"corners": [{"x": 2, "unit": "fahrenheit"}]}
    arguments = {"size": 1, "points": [{"x": 1}], "units": {"a": ["celsius"]}}
    typed: dict[str, Any] = {"size": 1, "points": [Point(1.0)], "units": {"a": [Unit.CELSIUS]}}
    typed |= {"labels": {7: "b"}, "room": Room(corners=[Corner(x=2, unit=Unit.FAHRENHEIT)])}
    assert draw.check({**arguments, "labels": {"7": "b"}, "room": room}, {}) == typed
    assert repr(draw.check({"size": 3.0, "points": []}, {})["size"]) == "3"  # as JSON Schema has it
    # The prompt's kwargs may be of these types already.
    assert draw.check({"size": 1}, {"points": [Point(1.0)]})["points"] == [Point(1.0)]


# Docstrings


STYLES = {
    "google": """
    Args:
        size: How large,
            in pixels.
        names: Of what.
    """,
    "numpy": """
    Parameters
    ----------
    size : int
        How large,
        in pixels.
    names : list of str, optional
        Of what.

    Returns
    -------
    None
        Nothing.
    """,
    "rest": """
    :param size: How large,
        in pixels.
    :type size: int
    :param list names: Of what.
    :returns: Nothing.
    """,
}


@pytest.mark.parametrize("style", STYLES)
def test_function_tool_docstring_styles_say_the_same(style: str) -> None:
    def draw(size: int, names: list[str]) -> None: ...

    draw.__doc__ = f"Draw.\n\n    At any size.\n{STYLES[style]}"
    shown = function_tool(draw).schema["function"]
    assert shown["description"] == "Draw.\n\nAt any size."
    described = {
        name: each["description"] for name, each in shown["parameters"]["properties"].items()
    }
    assert described == {"size": "How large, in pixels.", "names": "Of what."}


def test_function_tool_annotations_describe_parameters() -> None:
    def f(
        a: Annotated[int, "the first"],
        b: Annotated[int, pydantic.Field(description="the second")],
    ) -> None:
        """Do it."""

    assert show(f)["properties"] == {
        "a": {"type": "integer", "description": "the first"},
        "b": {"type": "integer", "description": "the second"},
    }


# Results


class Model(pydantic.BaseModel):
    x: int


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("text", ToolResult("text")),
        (None, ToolResult("(no output)")),
        (12, ToolResult("12")),
        (2.5, ToolResult("2.5")),
        (b"caf\xc3\xa9\xff", ToolResult("café\ufffd")),
        ({"a": "é", "b": [1]}, ToolResult('{"a": "é", "b": [1]}', data={"a": "é", "b": [1]})),
        (Point(1.0), ToolResult('{"x": 1.0, "y": 0.0}', data=Point(1.0))),
        (np.arange(3), ToolResult("[0, 1, 2]", data=...)),
        ({"score": np.float32(0.5)}, ToolResult('{"score": 0.5}', data=...)),
        (Model(x=1), ToolResult('{"x": 1}', data=...)),
        (("x", 1.0), ToolResult("x", reward=1.0)),
        ((ToolResult("x", metrics={"m": 2}), 0.5), ToolResult("x", metrics={"m": 2}, reward=0.5)),
        (("Bern", 3), ToolResult('["Bern", 3]', data=("Bern", 3))),
    ],
)
def test_normalise_result_value_becomes_its_result(value: Any, result: ToolResult) -> None:
    found = normalise_result(value)
    if result.data is ...:
        assert found.data is value
        found = msgspec.structs.replace(found, data=...)
    assert found == result


EXPECTED = "return text, a number, a dict or list of JSON values, None or a ToolResult"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            1j.__class__,
            f"the tool returned type, which is not JSON (no JSON for type); {EXPECTED}",
        ),
        (
            ("x", float("nan")),
            "the tool returned the reward nan; expected a finite number or None",
        ),
        (
            ToolResult("x", metrics=[2]),  # type: ignore[arg-type]
            "the tool returned metrics [2]; expected a dict",
        ),
        (
            ToolResult(5),  # type: ignore[arg-type]
            "the tool returned the text 5; expected str",
        ),
    ],
)
def test_normalise_result_unusable_value_becomes_an_error(value: Any, text: str) -> None:
    assert normalise_result(value) == ToolResult(text, is_error=True)


def test_tool_result_media_that_are_no_list_or_audio_are_refused_by_name() -> None:
    with pytest.raises(MediaError, match=r"^ToolResult.images: expected a list, got bytes$"):
        ToolResult("see", images=b"...")  # type: ignore[arg-type]
    with pytest.raises(MediaError, match=r"^ToolResult.audio: audio is not supported"):
        ToolResult("see", audio=[b"..."])
