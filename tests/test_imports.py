"""What importing loads, and what it must not."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

from slow_cases import slow_after

pytestmark = pytest.mark.process
HEAVY = {"torch", "transformers", "tensordict", "numpy", "attrs", "cattrs", "trio", "anyio"}


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(said_by(script).split())


def said_by(script: str, *arguments: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_rollout_loads_nothing_heavy() -> None:
    assert not loaded_by("import rollout") & HEAVY


def test_engine_side_loads_msgspec_and_anyio_only() -> None:
    loaded = loaded_by(
        "import rollout.engine.channel.child, rollout.engine.cores.simulated.simulated_core"
    )
    assert not loaded & (HEAVY - {"anyio"})


def test_public_names_are_importable_and_torch_stays_out_until_a_batch() -> None:
    names = "RolloutConfig, Prompt, function_tool, open_rollout"
    modules = (
        "chat, rollout.engine.model_files, rollout.engine.cores.transformers, "
        "rollout.integrations.trainer_rows"
    )
    code = f"import rollout.{modules}; from rollout import {names}"
    assert not loaded_by(code) & {"torch", "transformers"}


@pytest.mark.parametrize("trainer", slow_after(1, ["openrlhf", "skyrl", "slime", "verifiers"]))
def test_adapter_is_importable_without_its_trainer_and_without_torch(trainer: str) -> None:
    assert not loaded_by(f"import rollout.integrations.{trainer}") & {"torch", "anyio", trainer}


SOURCE = Path(__file__).parents[1] / "src"
ADAPTERS = SOURCE / "rollout/integrations"
TRAINERS = {"openrlhf", "prime_rl", "skyrl", "slime", "trl", "verifiers", "verl", "vllm", "sglang"}


def test_adapters_import_no_trainer_but_their_own() -> None:
    for path in ADAPTERS.rglob("*.py"):
        own = path.relative_to(ADAPTERS).parts[0]
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        named = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert {name.partition(".")[0] for name in named} & TRAINERS <= {own}, path


def test_every_public_name_resolves() -> None:
    import rollout

    for name in rollout.__all__:
        assert getattr(rollout, name) is not None
    with pytest.raises(AttributeError, match="module 'rollout' has no attribute 'nothing'"):
        rollout.nothing  # type: ignore[attr-defined]  # noqa: B018


STUBS = [".".join(path.parent.relative_to(SOURCE).parts) for path in SOURCE.rglob("*.pyi")]


@pytest.mark.parametrize("package", sorted(STUBS))
def test_names_that_are_imported_lazily_are_exported_to_type_checkers(package: str) -> None:
    module = importlib.import_module(package)
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    exported = {
        alias.asname  # a stub exports what it imports by the same name, spelled twice
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert exported == set(module.__all__)


PACKAGES = ("", ".agents", ".batch", ".chat", ".config", ".engine", ".interactions", ".tools")


def test_every_public_class_and_function_has_help_and_a_signature() -> None:
    for package in PACKAGES:
        module = importlib.import_module(f"rollout{package}")
        shown = [getattr(module, name) for name in module.__all__]
        shown = [value for value in shown if inspect.isclass(value) or inspect.isroutine(value)]
        assert shown
        for value in shown:
            assert pydoc.render_doc(value)
            assert inspect.signature(value).parameters is not None


#: Opens a runtime, and says what is imported after that, and on which thread the rest was.
OPENING = """
import sys, threading
import anyio, rollout
from rollout.testing import Scenario

large = {"torch", "torch._dynamo", "tensordict", "transformers"}
loop, loaded_on_loop = threading.get_ident(), []

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if threading.get_ident() == loop and name in large:
            loaded_on_loop.append(name)

async def main():
    config = Scenario(seed=1).reply("", "ok").config()
    prompt = rollout.Prompt(messages=[{"role": "user", "content": "hi"}])
    async with rollout.open_rollout(config) as runtime:
        print(*sorted(large & sys.modules.keys()))
        before = set(sys.modules)
        batch = await runtime.generate([prompt])
        assert batch.tensors.batch_size[0] == 1
        print(*sorted(set(sys.modules) - before), *loaded_on_loop)

sys.meta_path.insert(0, Watcher())
anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.slow  # a new interpreter imports all of it
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_opening_imports_off_the_loop_all_that_the_first_batch_needs(backend: str) -> None:
    assert said_by(OPENING, backend) == "tensordict torch torch._dynamo transformers\n\n"
