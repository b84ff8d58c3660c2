"""Schemas of function tools are those of `transformers.utils.get_json_schema`.

The functions are like those of transformers' own tests. Beyond theirs, ours have defaults; and not
the result's schema, which is no part of OpenAI's form.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from rollout import function_tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


Booleanish = Literal[True, False, 0, 1, "y", "n"]
#: Parameters of functions, each with its type, its description, and its default where it has one.
PARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "no_arguments": {},
    "bare_containers": {"x": (list, "First"), "y": (tuple, "Second"), "z": (dict, "Third")},
    "default": {"x": (int, "The input", 42)},
    "nested_list": {"x": (list[list[str | int]], "The input")},
    "union_of_complex": {
        "x": (str | list[str], "The input"),
        "y": (Literal["a", "b"] | int | None, "Also the input", None),
    },
    "of_anything": {
        "x": (list[Any], "A list"),
        "y": (dict[str, Any], "A mapping"),
        "z": (Optional[list[dict[str, Any]]], "Mappings"),  # noqa: UP045
        "u": (dict[str, Any] | list[Any] | int, "One of them"),
        "v": (dict[str, list], "Bare lists"),  # type: ignore[type-arg]
        "w": (tuple[Any, int], "A pair"),
        "a": (Any, "Anything"),
    },
    "of_tuple": {"x": (tuple[int, str], "The input"), "y": (dict[str, float], "A mapping")},
    "choices": {"unit": (str, 'The unit (Choices: ["celsius", "fahrenheit"])')},
    "other_choices": {
        "rating": (int, "The rating to give (choices: [1, 2, 3])"),
        "enabled": (bool, "Whether it is enabled (choices: [true, false])"),
    },
    "literals": {
        "unit": (Literal["celsius", "fahrenheit"], "The unit"),
        "booleanish": (Booleanish, "A value that can be regarded as boolean", False),
        "colour": (Colour, "The colour", Colour.RED),
        "one": (Literal["x"], "The only choice", "x"),
    },
    "multiline": {
        "x": (int, "The first input\n"),
        "y": (int, "The second input. This is a longer\n       description, with indentation."),
    },
    "everything": {
        "x": (str, 'The first input. It\'s a big\n       multiline (choices: ["a", "b", "c"])\n'),
        "y": (list[str | int] | None, "The second input. It's a big list.\n"),
        "z": (tuple[str | int, str], "The third input, with a default.", (42, "hello")),
    },
}


def make(name: str) -> Callable[..., Any]:
    """A function with these parameters and a docstring in Google's style."""

    def function(*args: Any, **kwargs: Any) -> None: ...

    described = "".join(f"        {n}: {each[1]}\n" for n, each in PARAMETERS[name].items())
    arguments = f"\n    Args:\n{described}" if described else ""
    function.__name__ = name
    function.__doc__ = f"\n    Test function\n{arguments}\n    Returns:\n        The output\n    "
    function.__annotations__ = {n: each[0] for n, each in PARAMETERS[name].items()}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                n,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=each[0],
                default=each[2] if len(each) > 2 else inspect.Parameter.empty,
            )
            for n, each in PARAMETERS[name].items()
        ]
    )
    return function


def returning(x: int) -> int:
    """
    Test function

    Args:
        x: The input

    Returns:
        The output
    """
    return x


class Methods:
    def instance(self, x: int):  # type: ignore[no-untyped-def]
        """
        Test function

        Args:
            x: The input
        """

    of_class = classmethod(instance)
    static = staticmethod(returning)


FUNCTIONS = [
    *map(make, PARAMETERS),
    *(returning, Methods().instance, Methods.static, Methods.of_class),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: str(each.__name__))
def test_schema_of_a_function_is_that_of_transformers(function: Callable[..., Any]) -> None:
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    ours = function_tool(function).schema
    for schema in ours["function"]["parameters"]["properties"].values():
        schema.pop("default", None)
    assert ours == theirs
