"""Tools that users have already: verl's configurations and classes, LangChain's tools, files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import executors
from rollout.errors import ToolError
from rollout.tools import (
    ToolExecutor,
    ToolResult,
    TrajectoryTools,
    load_tools,
    load_verl_tools,
)
from rollout.tools.tool import open_tools
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.process
CLASSES = '''
import asyncio


class Response:
    def __init__(self, text=None, image=None, video=None):
        self.text, self.image, self.video = text, image, video


class Judge:
    """In verl's protocol, as its GSM8K tool."""

    def __init__(self, config, tool_schema):
        self.config = config
        self.tool_schema = tool_schema
        self.name = tool_schema.function.name
        self.known = set(tool_schema.function.parameters.properties)
        self.items = tool_schema.model_dump()["function"]["parameters"]["properties"]["steps"]
        self.instances = {}
        self.log = []

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        await asyncio.sleep(0)
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self.instances[instance_id] = {"truth": ground_truth, "score": 0.0}
        self.log.append("create")
        return instance_id, Response()

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["answer"] == "picture":
            return Response(text="see", image=[object()]), 0.0, {}
        instance = self.instances[instance_id]
        instance["score"] = float(parameters["answer"] == instance["truth"])
        kwargs["agent_data"].extra_fields["tries"] = len(self.log)
        self.log.append("execute")
        return Response(text=f"score {instance['score']}"), instance["score"] - 0.5, {"n": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return self.instances[instance_id]["score"]

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]
        self.log.append("release")


class BaseTool:
    def __init__(self, config, tool_schema):
        self.tool_schema = tool_schema or {"name": "plain", "parameters": {}}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0


class Plain(BaseTool):
    async def create(self, instance_id=None):
        return "its own id"

    def execute(self, instance_id, parameters):
        return f"{instance_id}, sync"


class Broken:
    def __init__(self, config, tool_schema):
        raise KeyError("url")


class Mute:
    def __init__(self, config, tool_schema):
        pass
'''

JUDGE = """
tools:
  - class_name: verl_style_classes.Judge
    config:
      type: native
      url: http://localhost
    tool_schema:
      type: function
      function:
        name: judge
        description: Judge an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: The answer.}
            steps: {type: array, items: {type: string}}
          required: [answer]
  - class_name: verl_style_classes.Plain
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "verl_style_classes.py").write_text(CLASSES)
    yield tmp_path
    sys.modules.pop("verl_style_classes", None)


def written(directory: Path, text: str, name: str = "tools.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


@pytest.fixture
def anyio_backend() -> str:
    """verl's classes need asyncio's thread, so time is real."""
    return "trio"


@pytest.fixture
def executor(threads: WorkerThreads) -> Callable[..., ToolExecutor]:
    return lambda *tools: executors.executor_of(tools, threads, tool_s=60.0)


async def run(tools: TrajectoryTools, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    asked = [ToolCall(name=name, arguments=arguments) for name, arguments in calls]
    return await executors.run(tools, *asked)


# verl


@pytest.mark.anyio
async def test_verl_class_runs_unchanged_for_the_length_of_a_trajectory(
    executor: Callable[..., ToolExecutor], directory: Path
) -> None:
    judge, plain = load_verl_tools(written(directory, JUDGE))
    assert judge.tool.config == {"type": "native", "url": "http://localhost"}  # type: ignore[attr-defined]
    assert judge.tool.known == {"answer", "steps"}  # type: ignore[attr-defined]
    assert judge.tool.items == {"type": "array", "items": {"type": "string"}}  # type: ignore[attr-defined]
    assert judge.schema["function"]["parameters"]["properties"]["steps"] == judge.tool.items  # type: ignore[attr-defined]
    built = executor(judge, plain)
    kwargs = {"judge": {"create_kwargs": {"ground_truth": "7"}}}
    tools = built.open_session(uid="p", member=0, tools_kwargs=kwargs)
    other = built.open_session(uid="p", member=1, tools_kwargs=kwargs)
    await run(other, ("judge", {"answer": "5"}))
    assert await run(tools, ("judge", {"answer": "5"})) == [
        ToolResult("score 0.0", reward=-0.5, metrics={"n": 1})
    ]
    assert await run(tools, ("judge", {"answer": "7"})) == [
        ToolResult("score 1.0", reward=0.5, metrics={"n": 1})
    ]
    *words, shown = await run(
        tools, ("judge", {}), ("plain", {"x": 1}), ("judge", {"answer": "picture"})
    )
    assert words == [
        ToolResult("invalid arguments for 'judge': missing 'answer'", is_error=True),
        ToolResult("its own id, sync"),
    ]
    assert (shown.text, shown.reward, len(shown.images)) == ("see", 0.0, 1)
    assert await tools.calc_rewards() == [1.0]
    assert await other.calc_rewards() == [0.0]
    await tools.close()
    await other.close()
    log = judge.tool.log  # type: ignore[attr-defined]
    assert [log.count(event) for event in ("create", "execute", "release")] == [2, 3, 2]
    assert judge.tool.instances == {}  # type: ignore[attr-defined]


def test_verl_faults_of_all_entries_are_one_error(directory: Path) -> None:
    path = written(
        directory,
        """
tools:
  - just text
  - class_name: Judge
  - class_name: no_such_module.Judge
  - class_name: verl_style_classes.Nothing
  - class_name: verl_style_classes.Broken
  - class_name: verl_style_classes.Mute
  - class_name: verl_style_classes.Plain
    config: {type: mcp}
  - class_name: verl_style_classes.Plain
    config: {type: remote}
  - class_name: verl_style_classes.Plain
    config: {url: "${oc.env:URL}"}
  - class_name: verl_style_classes.Plain
    tool_schema: {parameters: {}}
""",
    )
    with pytest.raises(ToolError) as caught:
        load_verl_tools(path)
    assert str(caught.value) == f"{path}: " + "; ".join(
        [
            "tools[0] = 'just text': expected class_name, config and tool_schema",
            "tools[1].class_name = 'Judge': expected package.module.Class",
            "tools[2].class_name = 'no_such_module.Judge': ModuleNotFoundError: No module named "
            "'no_such_module'",
            "tools[3].class_name = 'verl_style_classes.Nothing': verl_style_classes has no class "
            "Nothing",
            "tools[4]: Broken raised KeyError: 'url'",
            f"tools[5]: {path}: tools[5] Mute has no method execute: expected verl's tool protocol",
            "tools[6].mcp = None: expected mcp_servers_config_path in it",
            "tools[7].config.type = 'remote': expected 'native' or 'mcp'",
            "tools[8].config.url = '${oc.env:URL}': interpolation is not resolved; write the value",
            "tools[9].tool_schema = {'parameters': {}}: expected {'type': 'function', 'function': "
            "{'name': ..., 'parameters': {...}}}",
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "tools = []; expected a list of tools"),
        ("tools: [", "no YAML: while parsing a flow node expected the node content"),
    ],
)
def test_verl_file_that_is_none_is_refused(directory: Path, text: str, message: str) -> None:
    path = written(directory, text)
    with pytest.raises(ToolError) as caught:
        load_verl_tools(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    with pytest.raises(ToolError, match=r"nowhere\.yaml: No such file or directory$"):
        load_verl_tools(directory / "nowhere.yaml")


SERVER = Path(__file__).parents[1] / "tools" / "mcp_test_server.py"


@pytest.mark.anyio
async def test_verl_entry_of_mcp_servers_is_connected(
    executor: Callable[..., ToolExecutor], directory: Path
) -> None:
    servers = {"mcpServers": {"shop": {"command": sys.executable, "args": [str(SERVER)]}}}
    config = written(directory, json.dumps(servers), "servers.json")
    path = written(
        directory,
        f"""
tools:
  - class_name: verl_style_classes.Plain
  - class_name: verl.tools.mcp_base_tool.MCPBaseTool
    config: {{type: mcp, rate_limit: 5}}
    mcp: {{mcp_servers_config_path: "{config}", tool_selected_list: [much, other]}}
""",
    )
    async with open_tools(load_verl_tools(path)) as tools:
        assert [tool.name for tool in tools] == ["plain", "much"]
        session = executor(*tools).open_session(uid="p", member=0)
        assert await run(session, ("much", {"count": 2})) == [ToolResult("xx")]
        await session.close()


def test_verl_entry_of_mcp_servers_that_is_wrong_is_refused(directory: Path) -> None:
    config = written(directory, '{"mcpServers": {"shop": {"port": 1}}}', "servers.json")
    path = written(
        directory,
        f"tools: [{{config: {{type: mcp}}, mcp: {{mcp_servers_config_path: {config}}}}}]",
    )
    with pytest.raises(ToolError, match=r"mcpServers.shop = .*: expected a url or a command"):
        load_verl_tools(path)


# Files


TOOLS = '''
import rollout


@rollout.function_tool
def judge(text: str) -> str:
    """Judge.

    Args:
        text: Text.
    """
    return text


@rollout.function_tool("plain")
async def other() -> str:
    """Answer."""
    return "plain"
'''


def test_files_and_configurations_merge_and_collisions_are_one_error(
    executor: Callable[..., ToolExecutor], directory: Path
) -> None:
    file = written(directory, TOOLS, "my_tools.py")
    config = written(directory, JUDGE)
    tools = load_tools(file)
    assert [tool.name for tool in tools] == ["judge", "plain"]
    assert executor(*tools).names == ("judge", "plain")
    with pytest.raises(ToolError) as caught:
        executor(*tools, *load_verl_tools(config))
    home = f"rollout file {file}"
    assert str(caught.value) == (
        f"tools with the same name: 'judge' ({home}.judge, {config}: tools[0] Judge), 'plain' "
        f"({home}.other, {config}: tools[1] Plain); give all but one of each another name, as in "
        f'@function_tool("another_name")'
    )


@pytest.fixture
def verl_package(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers functions as verl's does, with one of another module in it."""
    folder = directory / "verl" / "tools"
    folder.mkdir(parents=True)
    (folder / "function_tool.py").write_text(
        """
from types import SimpleNamespace

FUNCTION_TOOL_REGISTRY = {}


def function_tool(name):
    def register(function):
        if name in FUNCTION_TOOL_REGISTRY:
            raise ValueError(f"{name} is registered already")
        FUNCTION_TOOL_REGISTRY[name] = SimpleNamespace(fn=function)
        return function

    return register


@function_tool("foreign")
def foreign() -> str:
    pass
"""
    )
    monkeypatch.syspath_prepend(str(directory))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.mark.anyio
async def test_functions_of_verls_own_registry_are_found(
    executor: Callable[..., ToolExecutor], directory: Path, verl_package: None
) -> None:
    path = written(
        directory,
        '''
from verl.tools.function_tool import function_tool


class Response:
    text, image, video = "3", None, None


@function_tool("adder")
def add(a: int, b: list[int]) -> str:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return Response(), 0.5


@function_tool("waiter")
async def wait() -> tuple:
    """Wait."""
    return (Response(),)
''',
        "registered.py",
    )
    tools = load_tools(path)
    assert [tool.name for tool in tools] == ["adder", "waiter"]
    assert tools[0].schema["function"]["parameters"]["properties"]["b"] == {
        "type": "array",
        "items": {"type": "integer"},
        "description": "B.",
    }
    session = executor(*tools).open_session(uid="p", member=0)
    assert await run(session, ("adder", {"a": 1, "b": [2]}), ("waiter", {})) == [
        ToolResult("3", reward=0.5),
        ToolResult("3"),
    ]


def test_functions_of_verls_own_registry_are_loaded_again_from_an_edited_file(
    directory: Path, verl_package: None
) -> None:
    text = '''
import rollout
from verl.tools.function_tool import function_tool

@function_tool("first")
def first() -> str:
    """One."""
    return "1"

@rollout.function_tool
def second() -> str:
    """Two."""
    return "2"
'''
    path = written(directory, text, "twice.py")
    for _ in range(2):
        assert [tool.name for tool in load_tools(path)] == ["second", "first"]
    written(directory, text.replace("One.", "The first."), "twice.py")
    (_, first) = load_tools(path)
    assert first.schema["function"]["description"] == "The first."
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY  # type: ignore[import-not-found]

    assert set(FUNCTION_TOOL_REGISTRY) == {"foreign", "first"}
