"""Tools with which a model ends its trajectory and gives its answer."""

from rollout.tools.function_tools import function_tool
from rollout.tools.results import ToolResult
from rollout.tools.tool import ToolContext

#: Where the answer is in the trajectory's `extra`.
ANSWER_KEY = "answer"


@function_tool
async def finish(answer: str, context: ToolContext) -> ToolResult:
    """End the task with your final answer.

    Args:
        answer: The final answer.
    """
    context.extra.setdefault(ANSWER_KEY, answer)  # for rewards; a second one changes nothing
    return ToolResult("The answer is recorded.", data=answer, end_trajectory=True)


@function_tool
async def submit(answer: str, context: ToolContext) -> ToolResult:
    """Submit your final answer; the task ends with it.

    Args:
        answer: The final answer.
    """
    return await finish(answer, context)
