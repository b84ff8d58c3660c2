"""Shipped tools: calculator, finish, submit and search; and all that are shipped by their names."""

import ast
import json
import math
import operator
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from rollout.config.checks import Rule, Url
from rollout.errors import ToolError
from rollout.tools.function_tools import FunctionTool, function_tool
from rollout.tools.results import ToolResult, error_result
from rollout.tools.sandbox_tools import EditTool, PythonTool, ShellTool
from rollout.tools.tool import Tool, ToolContext, ToolPolicy, TransientError, check_options

#: The shipped tools that need no settings.
SHIPPED = ("calculator", "edit", "finish", "python", "shell", "submit")
Number = int | float
MAX_EXPRESSION = 1000
#: Bits of an exact integer: some 1200 digits.
MAX_BITS = 4096
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})


def is_shipped(names: str) -> bool:
    """Whether these names, separated by commas, all are shipped tools that need no settings."""
    return all(name in SHIPPED for name in names.split(","))


def make_shipped(
    names: Sequence[str], *, search_url: str = "", max_pictures: int = 0
) -> list[Tool]:
    """One tool for each name of `SHIPPED`, or ``search``, which asks the retriever at the URL."""
    python, shell = PythonTool(max_pictures=max_pictures), ShellTool(max_pictures=max_pictures)
    made = {tool.name: tool for tool in (calculator, EditTool(), finish, python, shell, submit)}
    return [made[name] if name in made else SearchTool(search_url) for name in names]


@function_tool
async def finish(answer: str, context: ToolContext) -> ToolResult:
    """End the task with your final answer.

    Args:
        answer: The final answer.
    """
    if context.state.setdefault(f"{__name__}.answer", answer) is answer:  # the first one
        context.extra["answer"] = answer  # for rewards
    return ToolResult("The answer is recorded.", data=answer, end_trajectory=True)


#: `finish` by another name.
submit = function_tool("submit")(finish.function)


@function_tool
async def calculator(expression: str) -> ToolResult:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, e.g. "(3 + 4) * 5".
    """
    try:
        return ToolResult(format_number(calculate(expression)))
    except ValueError as error:
        return error_result(f"cannot calculate {expression!r:.100}: {error}")


def calculate(expression: str) -> Number:
    """Calculate the value of an arithmetic expression, with Python's precedence.

    Operators: ``+ - * / // % **`` and parentheses, also written ``× · ÷ −`` and, for power, ``^``.
    Integers stay exact, also through ``/`` where it leaves no rest.

    A `ValueError` where it is none, divides by zero, has no real value, is nested too deep for
    Python, or passes a bound: 1000 characters, integers of 4096 bits.
    """
    if (size := len(expression)) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {size} characters; at most {MAX_EXPRESSION}")
    text = " ".join(expression.translate(_SPELLINGS).split())
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (MemoryError, RecursionError):
        raise ValueError("nested too deep") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None


def format_number(value: Number) -> str:
    """A plain number: all digits of an int, 15 significant ones of a float (``0.3``, ``12``)."""
    return str(value) if isinstance(value, int) else format(value + 0.0, ".15g")  # -0.0 is 0.0


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as result) if not isinstance(result, bool):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_evaluate(left), _evaluate(right))
        case ast.Tuple():
            raise ValueError("write numbers without commas")
        case _:
            raise ValueError(f"{ast.unparse(node)!r:.80} is no arithmetic")
    if isinstance(result, complex):
        raise ValueError("a negative number to a fractional power is not real")
    if result.bit_length() > MAX_BITS if isinstance(result, int) else not math.isfinite(result):
        raise OverflowError
    return result


def _divide(left: Number, right: Number) -> Number:
    are_exact = isinstance(left, int) and isinstance(right, int)
    return left // right if are_exact and right and left % right == 0 else left / right


def _raise_power(left: Number, right: Number) -> Any:
    are_exact = isinstance(left, int) and isinstance(right, int)
    if are_exact and abs(left) > 1 and int(left).bit_length() * right > 2 * MAX_BITS:
        raise OverflowError  # before it is computed
    return left**right


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _raise_power,
}


class SearchTool(FunctionTool[..., ToolResult]):
    """Answers a query with the passages of a retriever; `ToolResult.data` lists its documents.

    The retriever takes ``POST {"queries": [query], "topk": n, "return_scores": true}`` and answers
    ``{"result": [[{"document": {"id", "contents"}, "score"}, …]]}``, or with documents alone.

    Args:
        url: Of the retriever.
        name, description: What the model calls it, and reads about it; None takes ours.
        top_k, max_top_k: Passages where the model asks for no number, and most that it can ask for.
        timeout_s: Of one request; one that fails is made again, twice.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "search",
        top_k: int = 3,
        max_top_k: int = 10,
        description: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        rule = Rule(f"an integer from 1 to max_top_k = {max_top_k}", lambda n: 1 <= n <= max_top_k)
        check_options(f"search tool {name!r}", url=(Url, url), top_k=(Annotated[int, rule], top_k))
        self.url, self.top_k, self.timeout_s = url, top_k, timeout_s
        query = {"type": "string", "description": "What to look for, in a few words."}
        count: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": max_top_k}
        count |= {"default": top_k, "description": "How many passages."}
        parameters = {"type": "object", "properties": {"query": query, "top_k": count}}
        text = description or "Search for passages about the query, the best first."
        schema = {"name": name, "description": text, "parameters": parameters}
        parameters["required"] = ["query"]
        super().__init__(self.search, schema=schema, policy=ToolPolicy(retries=2))

    def search(self, query: str, top_k: int | None = None) -> ToolResult:
        """The passages that the retriever finds; a `TransientError` where it does not answer."""
        body = {"queries": [query], "topk": top_k or self.top_k, "return_scores": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                found = list(json.loads(answer.read(16 * 2**20))["result"][0])
            passages = []
            for number, each in enumerate(found, 1):
                document = each.get("document", each)
                title = f" {document['title']}" if document.get("title") else ""
                text = document.get("contents", document.get("text", ""))
                passages.append(f"[{document.get('id', number)}]{title}\n{text}")
        except urllib.error.HTTPError as error:
            error.close()
            kind = TransientError if error.code >= 500 or error.code == 429 else ToolError
            raise kind(f"the retriever answered HTTP {error.code} {error.reason}") from None
        except OSError as error:
            raise TransientError(f"the retriever does not answer: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ToolError(f"the retriever gave no list of results ({error!r:.100})") from error
        return ToolResult("\n\n".join(passages) or "No passage was found.", data=found)
