"""What importing loads, and what it must not."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "tensordict", "numpy", "attrs", "cattrs", "trio", "anyio"}


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_rollout_loads_nothing_heavy() -> None:
    assert not loaded_by("import rollout") & HEAVY


def test_engine_side_loads_msgspec_and_anyio_only() -> None:
    loaded = loaded_by(
        "import rollout.engine.process.child, rollout.engine.cores.simulated.simulated_core"
    )
    assert not loaded & (HEAVY - {"anyio"})


@pytest.mark.parametrize("name", ["RolloutConfig", "Prompt", "function_tool", "open_rollout"])
def test_public_names_are_importable_and_torch_stays_out_until_a_batch(name: str) -> None:
    assert "torch" not in loaded_by(f"from rollout import {name}")


def test_every_public_name_resolves() -> None:
    import rollout

    for name in rollout.__all__:
        assert getattr(rollout, name) is not None
    with pytest.raises(AttributeError, match="module 'rollout' has no attribute 'nothing'"):
        rollout.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", ["DiskWeights", "DistributedWeights", "TensorWeights"])
def test_weights_and_the_model_resolver_are_importable_from_rollout(name: str) -> None:
    import rollout
    from rollout.engine import model_files, weights

    assert getattr(rollout, name) is getattr(weights, name)
    assert rollout.resolve_model is model_files.resolve_model


PACKAGES = ("", ".agents", ".batch", ".chat", ".config", ".engine", ".interactions", ".tools")


@pytest.mark.parametrize("package", [f"rollout{name}" for name in PACKAGES])
def test_every_public_class_and_function_has_help_and_a_signature(package: str) -> None:
    module = importlib.import_module(package)
    shown = [getattr(module, name) for name in module.__all__]
    shown = [value for value in shown if inspect.isclass(value) or inspect.isroutine(value)]
    assert shown
    for value in shown:
        assert pydoc.render_doc(value)
        assert inspect.signature(value).parameters is not None


def test_trajectory_signature_names_its_transcript() -> None:
    import rollout

    assert "transcript: rollout.chat.transcript.Transcript" in str(
        inspect.signature(rollout.Trajectory)
    )
