"""Functions registered with verl: its registry takes each name from one file only."""

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


@function_tool
async def look(what: str):
    """Looks at something.

    Args:
        what: Its name.
    """
    if what == "nothing":
        raise ValueError("there is nothing")
    return "seen " * 40 + what, 0.5
