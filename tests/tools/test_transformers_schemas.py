"""Schemas of function tools are those of `transformers.utils.get_json_schema`.

The functions are like those of transformers' own tests. Beyond theirs, ours have defaults; and not
the result's schema, which is no part of OpenAI's form.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from rollout import function_tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def simple(x: int):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
         x: The input
    """


def no_arguments():  # type: ignore[no-untyped-def]
    """
    Test function
    """


def bare_containers(x: list, y: tuple, z: dict):  # type: ignore[no-untyped-def, type-arg]
    """
    Test function

    Args:
        x: The first input
        y: The second input
        z: The third input
    """


def union(x: int | float, y: Union[str, bool]):  # type: ignore[no-untyped-def]  # noqa: UP007
    """
    Test function

    Args:
        x: The input
        y: Another
    """


def duplicates(x: list | tuple, y: list | tuple | dict | None = None):  # type: ignore[no-untyped-def, type-arg]
    """
    Test function

    Args:
        x: The first input
        y: The second input
    """


def optional(x: int | None, y: Optional[str] = None):  # type: ignore[no-untyped-def]  # noqa: UP045
    """
    Test function

    Args:
        x: The input
        y: Another
    """


def default(x: int = 42):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
         x: The input
    """


def nested_list(x: list[list[str | int]]):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        x: The input
    """


def complex_arguments(x: list[int | float], y: int | str | None = None):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        x: The input
        y: Also the input
    """


def union_of_complex(x: str | list[str], y: Literal["a", "b"] | int | None = None):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        x: The input
        y: Also the input
    """


def returning(x: int) -> int:
    """
    Test function

    Args:
        x: The input


    Returns:
        The output
    """
    return x


def returning_none(x: int) -> None:
    """
    Test function

    Args:
        x: The first input
    """


def of_tuple(x: tuple[int, str], y: dict[str, float]):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        x: The input
        y: A mapping


    Returns:
        The output
    """


def choices(temperature_format: str):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        temperature_format: The temperature format to use (Choices: ["celsius", "fahrenheit"])


    Returns:
        The temperature
    """


def other_choices(rating: int, enabled: bool):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        rating: The rating to give (choices: [1, 2, 3])
        enabled: Whether it is enabled (choices: [true, false])
    """


def literals(  # type: ignore[no-untyped-def]
    temperature_format: Literal["celsius", "fahrenheit"],
    booleanish: Literal[True, False, 0, 1, "y", "n"] = False,
    colour: Colour = Colour.RED,
    one: Literal["x"] = "x",
):
    """
    Test function

    Args:
        temperature_format: The temperature format to use
        booleanish: A value that can be regarded as boolean
        colour: The colour
        one: The only choice


    Returns:
        The temperature
    """


def multiline(x: int, y: int):  # type: ignore[no-untyped-def]
    """
    Test function

    Args:
        x: The first input

        y: The second input. This is a longer description
           that spans multiple lines with indentation and stuff.

    Returns:
        God knows what
    """


def everything(  # type: ignore[no-untyped-def]
    x: str, y: list[str | int] | None, z: tuple[str | int, str] = (42, "hello")
) -> tuple[int, str]:
    """
    Test function with multiple args, and docstring args that we have to strip out.

    Args:
        x: The first input. It's got a big multiline
           description and also contains
           (choices: ["a", "b", "c"])

        y: The second input. It's a big list with a single-line description.

        z: The third input. It's some kind of tuple with a default arg.

    Returns:
        The output. The return description is also a big multiline
        description that spans multiple lines.
    """


class Methods:
    def instance(self, x: int):  # type: ignore[no-untyped-def]
        """
        Test function

        Args:
            x: The input
        """

    @staticmethod
    def static(x: int):  # type: ignore[no-untyped-def]
        """
        Test function

        Args:
            x: The input
        """

    @classmethod
    def of_class(cls, x: int):  # type: ignore[no-untyped-def]
        """
        Test function

        Args:
            x: The input
        """


FUNCTIONS = [
    *(simple, no_arguments, bare_containers, union, duplicates, optional, default, nested_list),
    *(complex_arguments, union_of_complex, returning, returning_none, of_tuple, choices),
    *(other_choices, literals, multiline, everything),
    *(Methods().instance, Methods.static, Methods().of_class),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: str(each.__name__))
def test_schema_of_a_function_is_that_of_transformers(function: Callable[..., Any]) -> None:
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    ours = function_tool(function).schema
    for schema in ours["function"]["parameters"]["properties"].values():
        schema.pop("default", None)
    assert ours == theirs


@pytest.mark.parametrize(
    ("function", "arguments", "is_right"),
    [
        (choices, {"temperature_format": "celsius"}, True),
        (choices, {"temperature_format": "kelvin"}, False),
        (optional, {"x": None}, True),
        (of_tuple, {"x": [1, "a"], "y": {"k": 1}}, True),
        (of_tuple, {"x": [1], "y": {}}, False),
        (union, {"x": 1, "y": 2}, False),
        (union_of_complex, {"x": ["a"], "y": None}, True),
    ],
)
def test_arguments_of_such_functions_are_checked(
    function: Callable[..., Any], arguments: dict[str, Any], is_right: bool
) -> None:
    tool = function_tool(function)
    if is_right:
        tool.check(arguments, {})
        return
    with pytest.raises(Exception, match=r"^invalid arguments for"):
        tool.check(arguments, {})
