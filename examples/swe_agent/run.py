"""A coding agent with a shell and an editor, in containers, graded by tests it has not seen.

python examples/swe_agent/run.py [--provider docker|podman] [--tasks DIR]

`tasks/` has a task in Harbor's layout, in which SWE-bench and others can be had. A scripted
engine stands in for a model. README.md says how `rollout run` plays it, and how a model does.
"""

import argparse
import shutil
from pathlib import Path

import anyio

import rollout
from rollout.config import LengthsConfig, SandboxConfig
from rollout.environments import TaskDirectory
from rollout.testing import Scenario
from rollout.testing.scenario import tool_call
from rollout.tools import EditTool, ShellTool

TASKS = Path(__file__).parent / "tasks"
#: The first of these that is there makes the containers.
ENGINES = ("docker", "podman")
FIXED = """\
    middle = len(ordered) // 2
    if not ordered:
        raise ValueError("no values")
    return mean([ordered[middle], ordered[-middle - 1]])"""

shell, edit = ShellTool(), EditTool()
script = (
    Scenario()
    .reply("has a bug", tool_call("shell", command="ls; cat stats/__init__.py"))
    .then(
        tool_call(
            "edit",
            command="str_replace",
            path="stats/__init__.py",
            old_str="    return ordered[len(ordered) // 2]",
            new_str=FIXED,
        )
    )
    .then(
        tool_call("shell", command="python3 -c 'import stats; print(stats.median([1, 2, 3, 4]))'")
    )
    .then("`median` takes the mean of the two middle values now.")
)


def configure(provider: str) -> rollout.RolloutConfig:
    return script.config(
        sandbox=SandboxConfig(provider=provider),
        lengths=LengthsConfig(prompt=4096, response=8192),
    )


#: What `rollout run examples/swe_agent/run.py` takes.
config = configure(next(filter(shutil.which, ENGINES), ENGINES[-1]))


async def main(provider: str, directory: str) -> None:
    tasks = TaskDirectory(directory, provider=provider)
    prompts = await anyio.to_thread.run_sync(tasks.prompts)  # builds the images
    async with rollout.open_rollout(configure(provider), [shell, edit], tasks.reward) as runtime:
        batch = await runtime.generate(prompts)
    for trajectory in batch.trajectories:
        print(f"{trajectory.uid} {trajectory.outcome}, reward {trajectory.reward}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--provider", default=config.sandbox.provider)
    parser.add_argument("--tasks", default=str(TASKS))
    arguments = parser.parse_args()
    anyio.run(main, arguments.provider, arguments.tasks)
