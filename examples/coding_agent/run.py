"""A coding agent: a repository in a sandbox, a shell to work in, hidden tests as the reward.

python examples/coding_agent/run.py

Each trajectory has a sandbox of its own. The first call of `shell` finds the repository there; at
the end the hidden tests run in the same sandbox. A scripted engine stands in for a model.
"""

import base64
from typing import Any

import anyio

import rollout
from rollout.testing import Scenario, tool_call
from rollout.tools import SandboxLimits, ShellTool, ToolContext, ToolSession, finish

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


class RepositoryShell(ShellTool):
    """A shell in a repository, judged by hidden tests."""

    async def open(self, context: ToolContext) -> ToolSession:
        return RepositorySession(await super().open(context))


class RepositorySession(ToolSession):
    """Puts the repository there before the first call, and runs the hidden tests after the last."""

    def __init__(self, shell: ToolSession) -> None:
        self._shell = shell
        self._is_ready = False
        self.serial = shell.serial

    async def execute(self, call: rollout.ToolCall) -> Any:
        if not self._is_ready:
            self._is_ready = True
            for path, text in REPOSITORY.items():
                encoded = base64.b64encode(text.encode()).decode()
                await self._run(f"echo {encoded} | base64 -d > {path}")
        return await self._shell.execute(call)

    async def calc_reward(self) -> float:
        encoded = base64.b64encode(HIDDEN_TEST.encode()).decode()
        said = await self._run(f"echo {encoded} | base64 -d | python3 -")
        return float(said.text.strip() == "passed")

    async def close(self) -> None:
        await self._shell.close()

    async def _run(self, command: str) -> Any:
        call = rollout.ToolCall(name="shell", arguments={"command": command})
        return await self._shell.execute(call)


shell = RepositoryShell(limits=SandboxLimits(timeout_s=60, cpu_s=60))


def reward(trajectory: rollout.Trajectory) -> float:
    """What the hidden tests said; 0 where nothing was tried."""
    return trajectory.tool_rewards[-1] if trajectory.tool_rewards else 0.0


async def main() -> None:
    task = "slug.py keeps punctuation and double spaces. Mend it; test_slug.py must pass."
    prompt = rollout.Prompt(messages=[{"role": "user", "content": task}])
    async with rollout.open_rollout(SCRIPT.config(), tools=[shell, finish], reward=reward) as it:
        batch = await it.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(str(call.arguments) for call in message.tool_calls)
        print(f"{message.role:<10} {(message.content or called).strip()}")
    print(f"reward     {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
