"""The house: what imports what, and that it points down only."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[1] / "src"

#: From the ground up; a floor imports those before it. A path's first match counts.
FLOORS = (
    "ground",
    "config",
    "media",
    # Events and figures, which everything emits; what is made of them is above scheduling.
    "observe.event_base",
    "observe.trajectory_event_types",
    "observe.engine_event_types",
    "observe.events",
    "observe.explanation",
    "observe.event_stream",
    "observe.event_file",
    "observe.batch_events",
    "observe.timeline",
    "observe.tally",
    "observe.blocking_code",
    "observe.loop_lag",
    "observe.written_values",
    "observe.user_spans",
    "chat",
    # A model's files and its tokenizer, with which saved tokens are read.
    "engine.quiet",
    "engine.gguf_conversion",
    "engine.cores.simulated.vocabulary",
    "engine.model_files",
    "batch",
    "engine.weights",
    "engine.core",
    "engine.weight_broadcasting",
    "engine.cores",
    "engine.channel",
    "engine.placement",
    "engine.routing",
    "engine.pool",
    "engine",
    "interactions",
    "sandbox",
    "tools",
    "environments",
    "agents",
    "scheduling",
    "journal",
    "observe",
    "runtime",
    "gateway",
    "integrations",
    "cli",
    "__main__",
    "testing",
)
#: What an engine's process needs beside its core.
ENGINE_SIDE = ("engine.channel", "engine.core", "engine.weights")
ENGINE_SIDE_PACKAGES = {"rollout", "msgspec", "anyio"}

Graph = dict[str, set[str]]


@functools.cache
def import_graph(source: Path) -> Graph:
    """Modules below a directory, each with those that it imports, also for types or in functions.

    What a package exports by its stub is none: `tools` and `interactions` export verl's readers,
    which lie above. The face of the whole package, which exports from every floor, is left out.
    """
    paths = {_module_name(path, source): path for path in source.rglob("*.py")}
    graph = {name: imports_of(path, paths) - {name} for name, path in paths.items()}
    del graph["rollout"]
    return graph


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, known: object) -> set[str]:
    """Those of `known` that a file imports."""
    found: set[str] = set()
    source = path.read_text(encoding="utf-8")
    # Expressions, which are most nodes, import by this word alone.
    walk = ast.walk if "import_module" in source else statements
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if name in known}  # type: ignore[operator]
            found |= modules | ({node.module} if names - modules else set())
        elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return {name for name in found if name in known}  # type: ignore[operator]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield from statements(inner)


def _last_name(function: ast.expr) -> str | None:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)


def floor_of(module: str) -> int:
    inner = module.removeprefix("rollout").removeprefix(".")
    for number, floor in enumerate(FLOORS):
        if inner == floor or inner.startswith(f"{floor}."):
            return number
    assert "." not in inner, f"{module}: of no floor"
    return 0


def faults(source: Path) -> list[str]:
    """Imports that point up, and circles; each names its files."""
    graph = import_graph(source)
    found = [
        f"{module} imports {other}, of a floor above"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if (other == "rollout" and floor_of(module) < FLOORS.index("cli"))
        or floor_of(other) > floor_of(module)
    ]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("a circle: " + " -> ".join(reversed(error.args[1])))
    return found


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Keeps its tests in one process, which reads all files once."""
    return import_graph(SOURCE)


@pytest.mark.usefixtures("graph")
def test_layout_imports_point_down_and_close_no_circle() -> None:
    assert faults(SOURCE) == []


def test_layout_no_module_is_longer_than_600_lines() -> None:
    lengths = {path: len(path.read_bytes().splitlines()) for path in SOURCE.rglob("*.py")}
    assert [f"{path}: {length}" for path, length in lengths.items() if length > 600] == []


def plant(tmp_path: Path, **files: str) -> Path:
    for name, text in {"rollout": "", **files}.items():
        path = tmp_path / name.replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path, *path.parents):
            if folder != tmp_path and tmp_path in folder.parents:
                (folder / "__init__.py").touch()
        (path / "__init__.py").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "statement",
    [
        "from rollout.agents import AgentLoop",
        "import rollout.agents",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollout import agents",
        "def late():\n    from rollout.agents import AgentLoop",
        "import importlib\ndef late():\n    importlib.import_module('rollout.agents')",
    ],
)
def test_layout_upward_import_is_found(tmp_path: Path, statement: str) -> None:
    source = plant(tmp_path, rollout__chat=statement, rollout__agents="")
    assert faults(source) == ["rollout.chat imports rollout.agents, of a floor above"]


def test_layout_circle_is_found(tmp_path: Path) -> None:
    source = plant(
        tmp_path,
        rollout__chat="",
        rollout__chat__template="from rollout.chat.encoding import encode",
        rollout__chat__encoding="def late():\n    from rollout.chat import template",
    )
    (fault,) = faults(source)
    assert fault.startswith("a circle: ")
    assert "rollout.chat.template -> rollout.chat.encoding" in fault + " -> rollout.chat.encoding"
    assert "rollout.chat.encoding" in fault


def test_layout_engine_side_needs_msgspec_and_anyio(graph: Graph) -> None:
    paths = {_module_name(path, SOURCE): path for path in SOURCE.rglob("*.py")}
    side = {
        name
        for name in graph
        if any(f"{name}.".startswith(f"rollout.{part}.") for part in ENGINE_SIDE)
    }
    reached, waiting = set[str](), list(side)
    while waiting:
        name = waiting.pop()
        if name in reached or ".cores." in name or name == "rollout":
            continue
        reached.add(name)
        waiting += graph[name]
    packages = {
        f"{name}: {package}"
        for name in reached
        for package in packages_of(paths[name])
        if package not in sys.stdlib_module_names and package not in ENGINE_SIDE_PACKAGES
    }
    assert packages == set()
    assert "rollout.errors" in reached


def packages_of(path: Path) -> set[str]:
    """Packages that a file imports when it is imported itself."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)
    return found


def test_layout_user_files_are_executed_in_one_place() -> None:
    def executes(path: Path) -> bool:
        source = path.read_bytes()
        calls = ast.walk(ast.parse(source)) if b"exec(" in source else ()
        names = (node.func for node in calls if isinstance(node, ast.Call))
        return any(isinstance(name, ast.Name) and name.id == "exec" for name in names)

    found = {_module_name(path, SOURCE) for path in SOURCE.rglob("*.py") if executes(path)}
    # The others run the model's own code, within the sandbox.
    assert found == {
        "rollout.user_code",
        "rollout.sandbox.inside.python_session",
    }


def test_layout_kinds_of_engines_are_told_apart_where_they_are_opened_only() -> None:
    kinds = re.compile(
        r"isinstance\([^)]*Engine\b|case (Transformers|Simulated|SGLang|Http|Custom)E"
    )
    found = {_module_name(path, SOURCE) for path in SOURCE.rglob("*.py") if _asks(path, kinds)}
    assert found == {"rollout.engine.pool.opening"}


def _asks(path: Path, kinds: re.Pattern[str]) -> bool:
    return kinds.search(path.read_text(encoding="utf-8")) is not None
