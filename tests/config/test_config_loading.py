"""Sources of a configuration: Python, TOML, YAML, modules; and what is said of unusable ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from rollout.config import (
    RolloutConfig,
    SamplingConfig,
    load_config,
)
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "conf").glob("*.py"))
TEMPERATURE = RolloutConfig(sampling=SamplingConfig(temperature=0.5))
FILES = {
    "config.toml": "[sampling]\ntemperature = 0.5\n",
    "config.yaml": "sampling:\n  temperature: 0.5\n",
    "config.yml": "sampling: {temperature: 0.5}\n",
    "config.py": (
        "from rollout.config import *\n"
        "config = RolloutConfig(sampling=SamplingConfig(temperature=0.5))\n"
    ),
}


def error_text(source: Any, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own; modules imported from it are forgotten again."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None)
        if path and Path(path).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_config_shipped_file_loads_from_path_and_module(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert isinstance(config, RolloutConfig)
    assert load_config(f"conf/{path.name}") == config
    assert load_config(f"conf.{path.stem}") == config


@pytest.mark.parametrize("name", FILES)
def test_config_file_loads_as_path_or_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert load_config(path) == load_config(str(path)) == TEMPERATURE


def test_config_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "empty.yaml") == RolloutConfig()


def test_config_module_loads_by_name_and_as_object(in_tmp_path: Path) -> None:
    (in_tmp_path / "rollout_settings").mkdir()
    (in_tmp_path / "rollout_settings" / "half.py").write_text(FILES["config.py"])
    assert load_config("rollout_settings.half") == TEMPERATURE
    assert str(in_tmp_path) not in sys.path
    module = ModuleType("settings")
    module.config = TEMPERATURE  # type: ignore[attr-defined]
    assert load_config(module) is TEMPERATURE


def test_config_python_file_runs_once_and_replaces_no_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "json.py"  # a name that would clash
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "from rollout.config import RolloutConfig\n"
        "@dataclasses.dataclass\n"
        "class Run:\n"
        "    seed: int = 3\n"
        "print(__file__)\n"
        "config = RolloutConfig(seed=Run().seed)\n"
    )
    before = dict(sys.modules)
    assert load_config(path).seed == 3
    assert capsys.readouterr().out == f"{path}\n"
    assert before.items() <= sys.modules.items()
    assert list(tmp_path.iterdir()) == [path]  # no cache of bytecode beside it
    path.write_text(path.read_text().replace("seed: int = 3", "seed: int = 4"))
    assert load_config(path).seed == 4


def test_config_python_file_builds_on_a_sibling_module(in_tmp_path: Path) -> None:
    (in_tmp_path / "rollout_base.py").write_text(FILES["config.py"])
    (in_tmp_path / "config.py").write_text(
        "import attrs\nfrom rollout_base import config as base\nconfig = attrs.evolve(base, seed=1)"
    )
    config = load_config("config.py")
    assert (config.seed, config.sampling.temperature) == (1, 0.5)


def test_config_faulty_module_is_refused_again_when_imported_already(in_tmp_path: Path) -> None:
    (in_tmp_path / "rollout_faulty.py").write_text(FILES["config.py"].replace("=0.5", "='0.5'"))
    line = "sampling.temperature = '0.5': expected a number ≥ 0, got a string"
    expected = f"1 fault in the configuration rollout_faulty:\n  {line}"
    assert error_text("rollout_faulty") == expected
    assert error_text("rollout_faulty") == expected
    assert error_text(sys.modules["rollout_faulty"]) == expected


BROKEN = {
    "missing.toml": (None, ": cannot be read: No such file or directory"),
    "missing.py": (None, ": cannot be read: No such file or directory"),
    "latin.toml": (b"a = '\xe9'", ": not UTF-8: invalid continuation byte at byte 5"),
    "syntax.toml": (b"a = 1\nb =\n", ", line 2, column 4: not valid TOML: Invalid value"),
    "end.toml": (b"a = ", ": not valid TOML: Invalid value (at end of document)"),
    "deep.toml": (b"a = " + b"[" * 5000, ": not valid TOML: nested too deeply"),
    "syntax.yaml": (
        b"a: [1\nb",
        ", line 2, column 2: not valid YAML: expected ',' or ']', but got '<stream end>'",
    ),
    "twice.yaml": (
        b"limits:\n  tool_s: 1\n  tool_s: 2\n",
        ", line 3, column 3: not valid YAML: the key 'tool_s' is written twice",
    ),
    "object.yaml": (
        b"model: !!python/object:os.system {}\n",
        ", line 1, column 8: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system'",
    ),
    "date.yaml": (b"seed: 2024-13-45\n", ": not valid YAML: month must be in 1..12"),
    "syntax.py": (b"x = 1\ny = (\n", ", line 2: not valid Python: '(' was never closed"),
    "raises.py": (b"def f():\n    return {}['seed']\nf()\n", ", line 2: KeyError: 'seed'"),
    "exits.py": (b"import sys\nsys.exit('a\\nb')\n", ", line 2: SystemExit: a b"),
    "imports.py": (
        b"import rollout.nowhere\n",
        ", line 1: ModuleNotFoundError: No module named 'rollout.nowhere'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_config_unusable_file_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    content, problem = BROKEN[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert error_text(path) == f"1 fault in the configuration {path}:\n  {path}{problem}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\n", "config: missing; expected config = RolloutConfig(...)"),
        (
            "config = {'seed': 1}\n",
            "config = {'seed': 1}: expected config = RolloutConfig(...), got a mapping",
        ),
    ],
)
def test_config_module_without_a_config_is_refused(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "c.py"
    path.write_text(text)
    assert error_text(path) == f"1 fault in the configuration {path}:\n  {line}"


def test_config_module_that_does_not_exist_is_named() -> None:
    assert error_text("rollout.nowhere.at_all") == (
        "1 fault in the configuration rollout.nowhere.at_all:\n"
        "  rollout.nowhere.at_all: there is no module 'rollout.nowhere'"
    )


def test_config_source_of_unknown_kind_is_refused() -> None:
    assert error_text("my config.json") == (
        "1 fault in the call of load_config:\n"
        "  source = 'my config.json': expected a file ending in .py, .toml, .yaml or .yml, the "
        "dotted name of a module, or a module"
    )
    assert error_text({"seed": 1}).endswith("or a module, got a mapping")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "sampling: {temperature: 1e-3}",
            "sampling.temperature = '1e-3': expected a number ≥ 0, got a string; "
            "YAML reads 1e-3 as a string, write 1.0e-3",
        ),
        (
            "limits: {batch_s: None}",
            "limits.batch_s = 'None': expected a number > 0 or None, got a string; "
            "YAML writes None as null",
        ),
        (
            "agent: {tool_format: no}",
            "agent.tool_format = False: expected a non-empty string, got a boolean; "
            "YAML reads yes, no, on and off as booleans, so quote such a word",
        ),
        (
            "engine: &a {kind: custom, core: 'a:B', options: {x: *a}}",
            "engine.options = {'x': {'kind': 'custom', 'core': 'a:B', 'options': {...}}}: "
            "expected a mapping that does not hold itself",
        ),
    ],
)
def test_config_surprise_of_yaml_is_explained(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert error_text(path) == f"1 fault in the configuration {path}:\n  {line}"


def test_config_yaml_merge_key_is_no_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "sampling: &s {temperature: 0.5, top_k: 3}\nvalidation_sampling: {<<: *s, top_k: 1}\n"
    )
    assert load_config(path).validation_sampling == SamplingConfig(temperature=0.5, top_k=1)


def test_config_none_in_toml_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[limits]\nbatch_s = 'None'\n")
    assert error_text(path) == (
        f"1 fault in the configuration {path}:\n"
        "  limits.batch_s = 'None': expected a number > 0 or None, got a string; TOML has no "
        "None: use YAML or Python, or the override limits.batch_s=None"
    )
    assert load_config(path, ["limits.batch_s=None"]).limits.batch_s is None
