"""`function_tool`: what the model is told of a function, and what is checked before it runs."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal, NamedTuple, Required

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
from rollout.tools.parameters import parse_docstring
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Grade(enum.Enum):
    TOP = "top"
    LOW = "low"


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


class Tree(pydantic.BaseModel):
    children: list[Tree]


def property_of(annotation: Any, default: Any = msgspec.UNSET) -> dict[str, Any]:
    def tool(value: Any) -> None:
        """Do it.

        Args:
            value: V.
        """

    tool.__annotations__["value"] = annotation
    if default is not msgspec.UNSET:
        tool.__defaults__ = (default,)
    schema = function_tool(tool).schema["function"]["parameters"]
    assert schema.get("required", []) == (["value"] if default is msgspec.UNSET else [])
    found = dict(schema["properties"]["value"])
    assert found.pop("description") == "V."
    return found


POINT_SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
    "required": ["x"],
}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (None, {"type": "null"}),
        (Any, {}),
        (Literal[2, 1], {"type": "integer", "enum": [2, 1]}),
        (
            list[Literal["b", "a"]],
            {"type": "array", "items": {"type": "string", "enum": ["b", "a"]}},
        ),
        (
            Annotated[Grade | None, "how well"],
            {"type": "string", "enum": ["top", "low"], "nullable": True},
        ),
        (
            Annotated[int, annotated_types.Interval(ge=1, le=9)],
            {"type": "integer", "minimum": 1, "maximum": 9},
        ),
        (
            Annotated[str, pydantic.Field(pattern="^[a-z]+$", max_length=4)],
            {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
        ),
        (Annotated[float, annotated_types.Gt(0)], {"type": "number", "exclusiveMinimum": 0}),
        (
            list[Annotated[int, annotated_types.Interval(ge=1, le=3)]],
            {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}},
        ),
        (
            Annotated[int | None, pydantic.Field(ge=1, description="how many")],
            {"type": "integer", "minimum": 1, "nullable": True},
        ),
        (Point, POINT_SCHEMA),
        (
            Box,
            {
                "type": "object",
                "properties": {"title": {"type": "string"}, "corner": POINT_SCHEMA},
                "required": ["title", "corner"],
            },
        ),
        (
            Options,
            {
                "type": "object",
                "properties": {"depth": {"type": "integer"}, "tag": {"type": "string"}},
                "required": ["depth"],
            },
        ),
    ],
)
def test_function_tool_annotation_becomes_schema(annotation: Any, schema: dict[str, Any]) -> None:
    assert property_of(annotation) == schema


@pytest.mark.parametrize(
    ("annotation", "default", "schema"),
    [
        (int, 3, {"type": "integer", "default": 3}),
        (str | None, None, {"type": "string", "nullable": True, "default": None}),
        (list[str], ["q"], {"type": "array", "items": {"type": "string"}, "default": ["q"]}),
        (
            Unit,
            Unit.CELSIUS,
            {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        ),
        (Point, Point(1.0), {**POINT_SCHEMA, "default": {"x": 1.0, "y": 0.0}}),
        (int, object(), {"type": "integer"}),
    ],
)
def test_function_tool_default_becomes_schema(
    annotation: Any, default: Any, schema: dict[str, Any]
) -> None:
    assert property_of(annotation, default) == schema


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
    assert get_weather.name == "get_weather"
    assert get_weather.schema == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.\n\nLooks at more than one source.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {
                        "type": "string",
                        "description": 'The city, e.g. "Tokyo": in English.',
                    },
                    "unit": {
                        "type": "string",
                        "enum": ["celsius", "fahrenheit"],
                        "description": "Unit of the answer.",
                        "default": "celsius",
                    },
                    "days": {
                        "type": "integer",
                        "description": "How many days from today.",
                        "default": 1,
                    },
                },
                "required": ["city"],
            },
        },
    }


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
    assert function_tool(now).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {},
    }


def test_function_tool_given_schema_is_shown_as_it_is() -> None:
    schema = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }

    def f(a, hidden: int = 0):  # type: ignore[no-untyped-def]
        return a

    tool = function_tool(schema=schema)(f)
    assert tool.schema is schema
    assert tool.parameters.check({"a": "anything"}) == {"a": "anything"}

    schema["function"]["parameters"]["properties"]["b"] = {}  # type: ignore[index]
    with pytest.raises(ToolError) as caught:
        function_tool(schema=schema)(f)
    assert str(caught.value) == (
        "function tool 'f': its schema has properties that are no parameters of the function: b"
    )


def test_function_tool_schema_of_another_name_is_refused() -> None:
    def f() -> None:
        """Do it."""

    schema = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(ToolError) as caught:
        function_tool("f", schema=schema)(f)
    assert str(caught.value) == "function tool 'f': its schema is named 'g'; expected the same name"


def test_function_tool_context_parameter_is_hidden() -> None:
    def f(a: int, context: ToolContext) -> None:
        """Do it.

        Args:
            a: A.
        """

    tool = function_tool(f)
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["a"]
    assert tool.parameters.context_name == "context"


def test_function_tool_every_fault_is_reported_at_once() -> None:
    def f(a, b: int, /, *args, c: str, **rest):  # type: ignore[no-untyped-def]
        return a

    with pytest.raises(ToolError) as caught:
        function_tool(f)
    assert str(caught.value) == (
        "function tool 'f': its docstring must begin with what tells the model what the tool "
        "does; a is positional-only, and calls name their arguments: remove the `/`; b is "
        "positional-only, and calls name their arguments: remove the `/`; *args has no schema: "
        "write `args: list[...]` instead; **rest has no schema: write `rest: dict[str, ...]` "
        "instead"
    )


def test_function_tool_without_descriptions_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def f(a: int, b: int, c: int) -> None:
        """Do it.

        Args:
            c: C.
        """

    tool = function_tool(f)
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["a", "b", "c"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'f': the model sees no description of 'a', 'b'" in record.getMessage()


def refused(**changes: Any) -> Any:
    """A function of one described parameter, with these attributes."""

    def function(a: int) -> None:
        """Do it.

        Args:
            a: A.
        """

    for name, value in changes.items():
        setattr(function, name, value)
    return function


def yielding():  # type: ignore[no-untyped-def]
    """Do it."""
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            refused(__name__="unannotated", __annotations__={}),
            "function tool 'unannotated': parameter 'a' has no type: write `a: str` or what it is",
        ),
        (
            refused(__name__="undescribed", __doc__="\nArgs:\n    a: A.\n"),
            "function tool 'undescribed': its docstring must begin with what tells the model what "
            "the tool does",
        ),
        (
            refused(__name__="with_field", __defaults__=(pydantic.Field(3),)),
            "function tool 'with_field': parameter 'a' has a pydantic Field as its default: write "
            "`a: Annotated[..., Field(...)] = ...`",
        ),
        (
            refused(__name__="recursive", __annotations__={"a": Node}),
            f"function tool 'recursive': parameter 'a' has the type {Node!r}, which has no schema "
            f"(Node contains itself; a tool's parameters must have a finite shape): use str, int, "
            f"float, bool, list, dict, Literal, an Enum or a dataclass",
        ),
        (
            refused(__name__="climb", __annotations__={"a": Tree}),
            f"function tool 'climb': parameter 'a' has the type {Tree!r}, which has no schema "
            f"(Tree contains itself; a tool's parameters must have a finite shape): use str, int, "
            f"float, bool, list, dict, Literal, an Enum or a dataclass",
        ),
        (
            refused(__name__="unknown_type", __annotations__={"a": slice}),
            "function tool 'unknown_type': parameter 'a' has the type <class 'slice'>, which has "
            "no schema (Unable to generate pydantic-core schema for <class 'slice'>): use str, "
            "int, float, bool, list, dict, Literal, an Enum or a dataclass",
        ),
        (
            refused(__name__="unresolved", __annotations__={"a": "Missing"}),
            "function tool 'unresolved': its annotations cannot be read (name 'Missing' is not "
            "defined): define or import their names at module level, not under TYPE_CHECKING",
        ),
        (yielding, "function tool 'yielding' yields: return one value instead"),
        (
            3,
            "3 is neither a Tool nor a function: write a function around it, or a subclass of Tool",
        ),
        (
            Point,
            f"{Point!r} is neither a Tool nor a function: write a function around it, or a "
            f"subclass of Tool",
        ),
    ],
)
def test_function_tool_unusable_function_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        function_tool(function)
    assert str(caught.value) == message


def check(tool: FunctionTool[..., Any], **arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        tool.parameters.check(arguments)
    prefix = f"invalid arguments for {tool.name!r}: "
    text = str(caught.value)
    assert text.startswith(prefix)
    return text.removeprefix(prefix)


@function_tool
def draw(
    size: int,
    points: list[Point],
    units: dict[str, list[Unit]] = {},  # noqa: B006
    colour: Literal["red", "blue"] = "red",
    labels: dict[int, str] = {},  # noqa: B006
    scale: Annotated[float, pydantic.Field(gt=0)] = 1.0,
) -> None:
    """Draw.

    Args:
        size: Size.
        points: Points.
        units: Units.
        colour: Colour.
        labels: Labels.
        scale: Scale.
    """


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"size": "3"}, 'size = "3": expected int, got str'),
        ({"size": True}, "size = true: expected int, got bool"),
        ({"size": 3.5}, "size = 3.5: expected int, got float"),
        ({"size": None}, "size = null: expected int, got null"),
        (
            {"points": [{"x": "1"}]},
            'points[0].x = "1": expected float, got str',
        ),
        ({"points": "[]"}, 'points = "[]": expected list, got str'),
        (
            {"units": {"a": ["kelvin"]}},
            "units.a[0] = \"kelvin\": input should be 'celsius' or 'fahrenheit'",
        ),
        (
            {"colour": "green"},
            "colour = \"green\": input should be 'red' or 'blue'",
        ),
        (
            {"labels": {"a": "b"}},
            'labels.a.[key] = "a": input should be a valid integer, unable to parse string as an '
            "integer",
        ),
        ({"scale": -1}, "scale = -1: input should be greater than 0"),
        ({"size": "x" * 200}, f'size = "{"x" * 79}…: expected int, got str'),
    ],
)
def test_function_tool_wrong_argument_is_named(arguments: dict[str, Any], fault: str) -> None:
    assert check(draw, **{"size": 1, "points": [], **arguments}) == fault


def test_function_tool_missing_unknown_and_wrong_arguments_are_listed_together() -> None:
    assert check(draw, size="3", colr="red") == (
        "size = \"3\": expected int, got str; missing 'points'; unknown 'colr' (it takes "
        "'size', 'points', 'units', 'colour', 'labels', 'scale')"
    )
    assert check(function_tool(lambda_like), a=1) == "unknown 'a' (it takes none)"


def lambda_like() -> None:
    """Do it."""


def test_function_tool_checked_arguments_have_the_types_of_the_function() -> None:
    checked = draw.parameters.check(
        {"size": 1, "points": [{"x": 1}], "units": {"a": ["celsius"]}, "labels": {"7": "b"}}
    )
    assert checked == {
        "size": 1,
        "points": [Point(1.0)],
        "units": {"a": [Unit.CELSIUS]},
        "labels": {7: "b"},
    }


def context(threads: WorkerThreads, **kwargs: Any) -> ToolContext:
    return ToolContext(uid="p", member=0, threads=threads, kwargs=kwargs)


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.anyio
async def test_function_tool_prompt_kwargs_override_the_models(threads: WorkerThreads) -> None:
    session = await get_weather.open(context(threads, days=5))
    arguments = get_weather.check({"city": "Oslo", "days": 1}, {"days": 5})
    call = ToolCall(name="get_weather", arguments=arguments)
    assert await session.execute(call) == {"city": "Oslo", "unit": Unit.CELSIUS, "days": 5}


PROPERTIES = {name: {"type": "string"} for name in ("query", "site")}
OPEN = {
    "type": "function",
    "function": {"name": "search", "parameters": {"properties": PROPERTIES}},
}


@pytest.mark.anyio
async def test_function_tool_schema_of_its_own_reaches_the_kwargs(threads: WorkerThreads) -> None:
    @function_tool(schema=OPEN)
    async def search(query: str, **options: Any) -> dict[str, Any]:
        return {"query": query, **options}

    assert search.schema == OPEN
    session = await search.open(context(threads, locale="de"))
    arguments = {"query": "q", "site": "s"}
    call = ToolCall(name="search", arguments=search.check(arguments, {"locale": "de"}))
    assert await session.execute(call) == {**arguments, "locale": "de"}


def test_function_tool_docstring_sections_are_told_apart() -> None:
    description, parameters = parse_docstring(
        """Summary: with a colon.

        Note that this stays.

        Args:
            a: First.

                second paragraph
            b (dict[str, int], optional): Second: with colon.
            *rest: Others.

        Raises:
            ValueError: Never.
        """
    )
    assert description == "Summary: with a colon.\n\nNote that this stays."
    assert parameters == {
        "a": "First. second paragraph",
        "b": "Second: with colon.",
        "rest": "Others.",
    }
    assert parse_docstring(None) == ("", {})


circular: list[Any] = []
circular.append(circular)


class Model(pydantic.BaseModel):
    x: int


class Measured(NamedTuple):
    name: str
    value: float


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("text", ToolResult("text")),
        (None, ToolResult("(no output)")),
        (12, ToolResult("12")),
        (2.5, ToolResult("2.5")),
        (True, ToolResult("True")),
        (b"caf\xc3\xa9\xff", ToolResult("café\ufffd")),
        ({"a": "é", "b": [1]}, ToolResult('{"a": "é", "b": [1]}', data={"a": "é", "b": [1]})),
        ([1, "x"], ToolResult('[1, "x"]', data=[1, "x"])),
        (Point(1.0), ToolResult('{"x": 1.0, "y": 0.0}', data=Point(1.0))),
        (np.arange(3), ToolResult("[0, 1, 2]", data=...)),
        ({"score": np.float32(0.5)}, ToolResult('{"score": 0.5}', data=...)),
        (Model(x=1), ToolResult('{"x": 1}', data=...)),
        (("x", 1.0), ToolResult("x", reward=1.0)),
        ((ToolResult("x", metrics={"m": 2}), 0.5), ToolResult("x", metrics={"m": 2}, reward=0.5)),
        (("Bern", 3), ToolResult('["Bern", 3]', data=("Bern", 3))),
        ((46.9, 7.4), ToolResult("[46.9, 7.4]", data=(46.9, 7.4))),
        (Measured("x", 0.5), ToolResult('["x", 0.5]', data=("x", 0.5))),
        (("x", 0.5, {"m": 2}), ToolResult('["x", 0.5, {"m": 2}]', data=("x", 0.5, {"m": 2}))),
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
            {(1, 2): 3},
            f"the tool returned dict, which is not JSON (no JSON for tuple); {EXPECTED}",
        ),
        (
            circular,
            "the tool returned list, which is not JSON (maximum recursion depth exceeded while "
            f"serializing an object); {EXPECTED}",
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
            "the tool returned a ToolResult whose text is int; expected str",
        ),
        (
            ToolResult("x", reward="1"),  # type: ignore[arg-type]
            "the tool returned the reward '1'; expected a finite number or None",
        ),
    ],
)
def test_normalise_result_unusable_value_becomes_an_error(value: Any, text: str) -> None:
    assert normalise_result(value) == ToolResult(text, is_error=True)


def test_normalise_result_number_too_long_to_write_becomes_an_error() -> None:
    result = normalise_result(10**5000)
    assert result.is_error
    assert result.text.startswith("the tool returned a number that cannot be written out: ")


# Docstrings of other styles, foreign constraints, pydantic


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
    schema = function_tool(draw).schema["function"]
    assert schema["description"] == "Draw.\n\nAt any size."
    described = {
        name: value["description"] for name, value in schema["parameters"]["properties"].items()
    }
    assert described == {"size": "How large, in pixels.", "names": "Of what."}


def test_function_tool_prose_that_looks_like_a_section_stays_prose() -> None:
    text = "Search.\n\n:param without an end\n"
    assert parse_docstring(text)[0].startswith("Search.")
    assert parse_docstring("Search: find it.\n\nNote: slow.")[0].startswith("Search: find")


def test_function_tool_annotations_describe_parameters() -> None:
    def f(
        a: Annotated[int, "the first"],
        b: Annotated[int, pydantic.Field(description="the second")],
    ) -> None:
        """Do it."""

    properties = function_tool(f).schema["function"]["parameters"]["properties"]
    assert properties == {
        "a": {"type": "integer", "description": "the first"},
        "b": {"type": "integer", "description": "the second"},
    }


class Corner(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0)
    unit: Unit = Unit.CELSIUS


class Room(pydantic.BaseModel):
    corners: list[Corner]
    kind: Literal["hall", "cell"] = "hall"


def test_function_tool_pydantic_models_are_inlined_and_made() -> None:
    def build(room: Room, corner: Corner = Corner(x=1)) -> None:  # noqa: B008
        """Build.

        Args:
            room: Room.
            corner: Corner.
        """

    tool = function_tool(build)
    corner = {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": 0},
            "unit": {
                "type": "string",
                "enum": ["celsius", "fahrenheit"],
                "default": "celsius",
            },
        },
        "required": ["x"],
    }
    assert tool.schema["function"]["parameters"]["properties"] == {
        "room": {
            "type": "object",
            "properties": {
                "corners": {"type": "array", "items": corner},
                "kind": {"type": "string", "enum": ["hall", "cell"], "default": "hall"},
            },
            "required": ["corners"],
            "description": "Room.",
        },
        "corner": {
            **corner,
            "description": "Corner.",
            "default": {"x": 1, "unit": "celsius"},
        },
    }
    checked = tool.parameters.check({"room": {"corners": [{"x": 2, "unit": "fahrenheit"}]}})
    assert checked == {"room": Room(corners=[Corner(x=2, unit=Unit.FAHRENHEIT)])}
    assert check(tool, room={"corners": [{"x": "2"}]}) == (
        'room.corners[0].x = "2": expected int, got str'
    )
    assert check(tool, room={"corners": []}, corner={}) == "corner.x = {}: field required"


def test_tool_result_audio_is_refused_by_name() -> None:
    with pytest.raises(MediaError) as caught:
        ToolResult("see", audio=[b"..."])
    assert str(caught.value) == "ToolResult.audio: audio is not supported; images and videos are"
    assert ToolResult("see", audio=[]) == ToolResult("see", audio=[])


def test_tool_result_with_something_else_than_a_list_of_images_is_refused() -> None:
    with pytest.raises(MediaError) as caught:
        ToolResult("see", images=b"...")  # type: ignore[arg-type]
    assert str(caught.value) == "ToolResult.images: expected a list, got bytes"
