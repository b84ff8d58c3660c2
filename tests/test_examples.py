"""Every example runs as its first lines say, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from forked import python_script
from slow_cases import slow_but

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]
#: Examples of packages that this environment has not: tests/clients runs them.
OF_CLIENTS = {"anthropic_sdk", "langgraph_agent", "openai_agents", "openai_sdk", "pydantic_ai"}
#: Examples of trainers: tests/trainers runs them.
OF_TRAINERS = {"trl_grpo"}
ALL = sorted(path.parent.name for path in ROOT.glob("examples/*/run.py"))
#: That of loggers: tests/trace_backends runs it.
OF_LOGGERS = {"loggers"}
#: That of containers: tests/environments runs it, `make test-sandboxes` in containers.
OF_CONTAINERS = {"swe_agent"}
EXAMPLES = sorted({*ALL} - OF_CLIENTS - OF_TRAINERS - OF_LOGGERS - OF_CONTAINERS)
#: A line that a run prints, where it is known beforehand.
SAYS = {
    "code_interpreter": r"computed 571, said 'There are \\boxed{571}.': 1",
    "coding_agent": "reward     1",
    "compaction": "answer: In Aix, in October 1748.",
    "image_tool": "position_ids (4, 3, 3072)",
    "tool_set": "reward 1.0",
    "local_search": "reward 1.0",
    "hidden_tests": "right completed, reward 1.0",
    "environment": "steps [0.1, 0.0, 0.1, 0.0, 1.0], reward 1.2",
    "program": "rows 1, reward 1",
    "python_sandbox": "reward     1",
    "training_modes": "modes: 3, versions: 6",
}


#: Examples that take overrides, and what spares them the embedded model.
SIMULATED = ("engine.kind=simulated", "model.path=simulated", "placement.kind=in_process")
OVERRIDES = {
    "grpo": ("--steps", "1"),
    "gsm8k": (*SIMULATED, "lengths.prompt=4096"),
    "mcp_tools": SIMULATED,
    "verifier": SIMULATED,
    "verl_tools": SIMULATED,
}


@pytest.mark.parametrize("name", slow_but(EXAMPLES, "environment"))
def test_example_runs(name: str) -> None:
    run_example(name, OVERRIDES.get(name, ()))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", sorted(OVERRIDES.keys() - {"grpo"}))
def test_example_runs_on_the_embedded_model(name: str) -> None:
    run_example(name, ())


def run_example(name: str, overrides: tuple[str, ...]) -> None:
    if name == "image_tool" and not find_spec("torchvision"):
        pytest.skip("torchvision is not installed")
    place = ROOT / "examples" / name
    paths = [str(place), os.environ.get("PYTHONPATH", "")]
    with python_script(
        place / "run.py",
        *overrides,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert output.strip()
    assert SAYS.get(name, output.splitlines()[-1]) in output.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_grpo_learns_which_key_opens_which_door(backend: str, tmp_path: Path) -> None:
    run_example("grpo", ("--seed", "2", "--backend", backend, "--out", str(tmp_path)))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["last_tenth"] >= 0.9
    assert result["last_tenth"] >= result["first_tenth"] + 0.5
    assert result["ratio_max_error"] <= 1e-4
    assert (tmp_path / "curves.png").stat().st_size > 10_000
