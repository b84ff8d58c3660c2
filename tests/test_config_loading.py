"""Sources of a configuration: Python, TOML, YAML, modules; and what is said of unusable ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from rollout.config import (
    HttpEngine,
    InProcessPlacement,
    RolloutConfig,
    SamplingConfig,
    config_from_dict,
    load_config,
)
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]
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


@pytest.mark.parametrize("name", ["empty.toml", "empty.yaml"])
def test_config_empty_file_means_the_defaults(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("# nothing yet\n")
    assert load_config(tmp_path / name) == RolloutConfig()


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
    (in_tmp_path / "above.py").write_text(
        "import attrs\n"
        "from rollout_faulty import config as base\n"
        "config = attrs.evolve(base, seed=1)\n"
    )
    assert error_text("above.py") == f"1 fault in the configuration above.py:\n  {line}"


def test_config_faults_of_python_sections_in_no_config_are_reported_too(tmp_path: Path) -> None:
    path = tmp_path / "c.py"
    path.write_text(
        "from rollout.config import *\n"
        "spare = LengthsConfig(prompt='a')\n"
        "config = RolloutConfig(seed='b')\n"
        "config.nothing\n"
    )
    assert error_text(path) == (
        f"3 faults in the configuration {path}:\n"
        "  lengths.prompt = 'a': expected an integer ≥ 1, got a string\n"
        "  seed = 'b': expected an integer ≥ 0 or None, got a string\n"
        f"  {path}, line 4: AttributeError: 'RolloutConfig' object has no attribute 'nothing'"
    )


def test_config_loaded_within_a_python_config_keeps_its_lines(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("seed = -1\n[tools]\nmax_threads = 0\n")
    path = tmp_path / "c.py"
    path.write_text(
        "from pathlib import Path\nfrom rollout.config import load_config\n"
        "config = load_config(Path(__file__).with_name('base.toml'))\n"
    )
    assert error_text(path) == (
        f"2 faults in the configuration {path}:\n"
        f"  {path}, line 3: tools.max_threads = 0: expected an integer ≥ 1\n"
        f"  {path}, line 3: seed = -1: expected an integer ≥ 0 or None"
    )


BROKEN = {
    "missing.toml": (None, ": cannot be read: No such file or directory"),
    "missing.yaml": (None, ": cannot be read: No such file or directory"),
    "missing.py": (None, ": cannot be read: No such file or directory"),
    "latin.toml": (b"a = '\xe9'", ": not UTF-8: invalid continuation byte at byte 5"),
    "syntax.toml": (b"a = 1\nb =\n", ", line 2, column 4: not valid TOML: Invalid value"),
    "end.toml": (b"a = ", ": not valid TOML: Invalid value (at end of document)"),
    "twice.toml": (
        b"[limits]\ntool_s = 1\ntool_s = 2\n",
        ", line 3, column 11: not valid TOML: Cannot overwrite a value",
    ),
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
    "digits.toml": (
        b"seed = " + b"9" * 5000,
        ": not valid TOML: Exceeds the limit (4300 digits) for integer string conversion: "
        "value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    "moment.yaml": (
        b"seed: !!timestamp abc",
        ": not valid YAML: 'NoneType' object has no attribute 'groupdict'",
    ),
    "bool.yaml": (b"seed: !!bool abc", ": not valid YAML: 'abc'"),
    "int.yaml": (b'seed: !!int ""', ": not valid YAML: string index out of range"),
    "escape.yaml": (
        b'seed: "\\UFFFFFFFF"',
        ": not valid YAML: Python int too large to convert to C int",
    ),
    "unreadable.py": (
        b"class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
        ", line 3: E: (its message cannot be shown)",
    ),
    "cancelled.py": (
        b"import asyncio\nraise asyncio.CancelledError('a')\n",
        ", line 2: CancelledError: a",
    ),
    "base.py": (b"class B(BaseException): pass\nraise B('b')\n", ", line 2: B: b"),
    "group.py": (
        b"raise BaseExceptionGroup('c', [GeneratorExit()])\n",
        ", line 1: BaseExceptionGroup: c (1 sub-exception)",
    ),
    "nul\0.toml": (None, ": cannot be read: embedded null byte"),
    "syntax.py": (b"x = 1\ny = (\n", ", line 2: not valid Python: '(' was never closed"),
    "raises.py": (
        b"def f():\n    return {}['seed']\nf()\n",
        ", line 2: KeyError: 'seed'",
    ),
    "exits.py": (b"import sys\nsys.exit('a\\nb')\n", ", line 2: SystemExit: a b"),
    "imports.py": (
        b"import rollout.nowhere\n",
        ", line 1: ModuleNotFoundError: No module named 'rollout.nowhere'",
    ),
    "opens.py": (
        b"open('/nowhere/at/all')\n",
        ", line 1: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'",
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


def test_config_package_that_fails_is_named_with_its_line(in_tmp_path: Path) -> None:
    package = in_tmp_path / "rollout_failing"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\nraise ValueError('no')\n")
    (package / "half.py").write_text(FILES["config.py"])
    assert error_text("rollout_failing.half") == (
        "1 fault in the configuration rollout_failing.half:\n"
        f"  {package / '__init__.py'}, line 2: ValueError: no"
    )


def test_config_module_that_does_not_exist_is_named() -> None:
    assert error_text("rollout.nowhere.at_all") == (
        "1 fault in the configuration rollout.nowhere.at_all:\n"
        "  rollout.nowhere.at_all: there is no module 'rollout.nowhere'"
    )


@pytest.mark.parametrize(
    ("source", "shown"),
    [("my config.json", "'my config.json'"), ("conf/quickstart", "'conf/quickstart'"), ("", "''")],
)
def test_config_source_of_unknown_kind_is_refused(source: str, shown: str) -> None:
    assert error_text(source) == (
        "1 fault in the call of load_config:\n"
        f"  source = {shown}: expected a file ending in .py, .toml, .yaml or .yml, the dotted "
        "name of a module, or a module"
    )


def test_config_source_of_wrong_type_is_refused() -> None:
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
            "limits: {cleanup_s: 1.5e3}",
            "limits.cleanup_s = '1.5e3': expected a number > 0, got a string; "
            "YAML reads 1.5e3 as a string, write 1.5e+3",
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
        ("seed: true", "seed = True: expected an integer ≥ 0 or None, got a boolean"),
        (
            "model: {path: 2024-01-31}",
            "model.path = datetime.date(2024, 1, 31): expected a "
            "non-empty string, got a value of type date",
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


def test_config_yaml_written_as_suggested_loads(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("sampling: {temperature: 1.0e-3}\nlimits: {cleanup_s: 1.5e+3, batch_s: null}\n")
    config = load_config(path)
    assert config.sampling.temperature == 0.001
    assert config.limits.cleanup_s == 1500.0
    assert config.limits.batch_s is None


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


def test_config_of_paths_that_do_not_exist_is_built(tmp_path: Path) -> None:
    config = config_from_dict(
        {"model": {"path": "/nowhere", "chat_template": "/no"}, "placement": {"python": "/no/py"}}
    )
    assert config.model.path == "/nowhere"
    http = RolloutConfig(engine=HttpEngine(urls=("http://a",)), placement=InProcessPlacement())
    assert http.engine.replicas == 1
