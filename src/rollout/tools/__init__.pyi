# ruff: isort: skip_file
from rollout.errors import MediaError as MediaError
from rollout.integrations.verl import (
    VerlMultiTurn as VerlMultiTurn,
    load_verl_multi_turn as load_verl_multi_turn,
    load_verl_tools as load_verl_tools,
)
from rollout.tools.builtin import (
    SearchTool as SearchTool,
    calculator as calculator,
    finish as finish,
    submit as submit,
)
from rollout.tools.executor import ToolExecutor as ToolExecutor, TrajectoryTools as TrajectoryTools
from rollout.tools.function_tools import (
    FunctionTool as FunctionTool,
    function_tool as function_tool,
)
from rollout.tools.langchain import langchain_tools as langchain_tools
from rollout.tools.loading import load_tools as load_tools
from rollout.tools.mcp import connect_mcp as connect_mcp
from rollout.tools.results import (
    ToolResult as ToolResult,
    normalise_result as normalise_result,
    truncate_text as truncate_text,
)
from rollout.tools.sandbox_tools import (
    EditTool as EditTool,
    PythonTool as PythonTool,
    ShellTool as ShellTool,
)
from rollout.tools.tool import (
    Tool as Tool,
    ToolContext as ToolContext,
    ToolPolicy as ToolPolicy,
    ToolSession as ToolSession,
    TransientError as TransientError,
)
