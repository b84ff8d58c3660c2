"""A coding agent: a repository in a sandbox, a shell to work in, hidden tests as the reward.

python examples/coding_agent/run.py

Each trajectory has a sandbox of its own, with the repository in it; at the end the hidden tests run
in the same sandbox. A scripted engine stands in for a model.
"""

from typing import Any

import anyio

import rollout
from rollout.config import SandboxConfig
from rollout.testing import Scenario, tool_call
from rollout.tools import ShellTool, finish

REPOSITORY = {
    "slug.py": 'def slug(title):\n    return title.lower().replace(" ", "-")\n',
    "test_slug.py": 'from slug import slug\n\nassert slug("Two Words") == "two-words"\n',
}
HIDDEN_TEST = (
    'from slug import slug\nassert slug("  Two   Words! ") == "two-words"\nprint("passed")\n'
)
MENDED = r"""cat > slug.py <<'END'
import re

def slug(title):
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))
END
python3 test_slug.py && echo fine"""
SCRIPT = (
    Scenario()
    .reply("slug", tool_call("shell", command="ls; cat slug.py"))
    .then(tool_call("shell", command=MENDED))
    .then(tool_call("finish", answer="Words are found by a pattern now."))
)


async def reward(trajectory: rollout.Trajectory, sandbox: Any) -> float:
    """What the hidden tests say of what is in the trajectory's sandbox."""
    result = await sandbox.exec(["python3", "-"], input=HIDDEN_TEST, timeout_s=60)
    return float(result.stdout == b"passed\n")


async def main() -> None:
    task = "slug.py keeps punctuation and double spaces. Mend it; test_slug.py must pass."
    prompt = rollout.Prompt(messages=[{"role": "user", "content": task}])
    config = SCRIPT.config(sandbox=SandboxConfig(files=REPOSITORY))
    tools = [ShellTool(timeout_s=60), finish]
    async with rollout.open_rollout(config, tools=tools, reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(str(call.arguments) for call in message.tool_calls)
        print(f"{message.role:<10} {(message.content or called).strip()}")
    print(f"reward     {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
