"""Examples over real SDKs and frameworks: each conversation is one row of the engine's own ids.

Needs `openai`, `anthropic`, `openai-agents`, `pydantic-ai-slim[openai]` and `langgraph`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from harness import Recorder

ROOT = Path(__file__).parents[2]
#: What stands between the prompt and the end, by role; frameworks put a system message before it.
TURNS = ["user", "assistant", "tool", "assistant"]
EXAMPLES = {
    "anthropic_sdk": TURNS,
    "openai_sdk": TURNS,
    "openai_agents": ["system", *TURNS],
    "pydantic_ai": ["system", *TURNS],
    "langgraph_agent": ["system", *TURNS, "tool", "assistant"],
}


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", ROOT / "examples" / name / "run.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    said = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name / "run.py")],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == "rows 1, reward 1"


@pytest.mark.filterwarnings("default")  # those of packages are theirs
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_conversations_are_rows_of_exact_tokens(name: str, backend: str) -> None:
    example = load(name)
    question = "What is 6 times 7?" if name == "langgraph_agent" else "What is the weather?"
    agent = "react" if name == "langgraph_agent" else name

    async def main() -> Any:
        recorder = Recorder()
        prompts = [
            rollout.Prompt(
                messages=[{"role": "user", "content": question}],
                ground_truth="84" if name == "langgraph_agent" else "19",
                agent_name=agent,
                uid=f"{at}",
            )
            for at in range(4)
        ]
        async with recorder.open_rollout(example.SCRIPT.config()) as runtime:
            batch = await runtime.generate(prompts)
        assert recorder.anomalies() == []  # the ids are those that the engine says it sampled
        return batch

    batch = anyio.run(main, backend=backend)
    assert len(batch) == 4
    for trajectory in batch.trajectories:
        assert trajectory.cause is None
        assert trajectory.outcome == "completed"
        assert [m.role for m in trajectory.messages] == EXAMPLES[name]
        if name != "langgraph_agent":
            assert trajectory.reward == 1.0
    generated = sum(t.generated_length for t in batch.trajectories)
    assert int(batch.tensors["response_mask"].sum()) == generated > 0
