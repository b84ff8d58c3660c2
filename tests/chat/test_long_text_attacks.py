"""Texts of megabytes against real processes: what they cost, and who has to wait for them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import rollout
from rollout import Outcome, Prompt, RolloutConfig
from rollout.clocks import monotonic
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LimitsConfig,
)
from rollout.interactions import ScriptedUser

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.process]

WORDS = "the quick brown fox, 12 jumped over; "
MEGABYTE = WORDS * (10**6 // len(WORDS))
QUICKSTART = str(Path(__file__).parents[2] / "conf" / "quickstart.py")


class Command:
    """`rollout run` on a file of prompts, and the most memory that it had."""

    def __init__(self, directory: Path, rows: list[dict[str, Any]], *options: str) -> None:
        prompts = directory / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        program = "import sys; from rollout.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "run", QUICKSTART, "--prompts", str(prompts)]
        self.process = subprocess.Popen(
            [*command, "--out", str(directory / "out"), *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.peak = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        process = psutil.Process(self.process.pid)
        while self.process.poll() is None:
            with process.oneshot():
                self.peak = max(self.peak, process.memory_info().rss)
            self._is_over.wait(0.02)

    def wait_for(self, words: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if words in line:
                return
        pytest.fail(f"{words!r} was never said")


def test_run_prompt_line_of_50_megabytes_costs_little_and_its_siblings_end(tmp_path: Path) -> None:
    rows = [{"prompt": MEGABYTE * 50, "uid": "long"}]
    rows += [{"prompt": "Say hello.", "uid": f"short-{at}"} for at in range(3)]
    command = Command(tmp_path, rows, "--samples", "4")
    command.process.communicate(timeout=300)
    assert command.process.returncode == 1  # some were rejected
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    outcomes = [(row["uid"], row["outcome"]) for row in map(json.loads, lines)]
    assert outcomes[:4] == [("long", "rejected")] * 4
    assert {outcome for _, outcome in outcomes[4:]} <= {"completed", "length"}
    assert command.peak < 1.5e9


def test_run_prompt_line_of_50_megabytes_leaves_sigterm_answered(tmp_path: Path) -> None:
    rows = [{"prompt": MEGABYTE * 50, "uid": f"long-{at}"} for at in range(2)]
    command = Command(tmp_path, rows, "--samples", "8")
    command.wait_for("running")
    sent = monotonic()
    command.process.send_signal(signal.SIGTERM)
    command.process.communicate(timeout=120)
    # Saving 16 rows of 50 MB takes most of it.
    assert monotonic() - sent < 40
    assert command.process.returncode == 128 + signal.SIGTERM


@rollout.register_agent("chats")
class Chats(rollout.AgentLoop):
    """Lets the model and the user speak in turns, whatever they say."""

    async def run(self, context: rollout.AgentContext) -> None:
        for _ in range(4):
            await context.generate()
            await context.ask_user()


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_user_who_says_five_megabytes_stops_no_sibling(backend: str) -> None:
    async def main() -> Any:
        users = [
            ScriptedUser([MEGABYTE * 5], name="verbose"),
            ScriptedUser(["Go on."] * 4, name="brief"),
        ]
        asked = [{"role": "user", "content": "Tell me a story."}]
        verbose = {"interaction_kwargs": {"name": "verbose"}}
        prompts = [Prompt(messages=asked, uid="long", extra=verbose)]
        prompts += [Prompt(messages=asked, uid=f"short-{at}") for at in range(3)]
        config = RolloutConfig(
            lengths=LengthsConfig(prompt=256, response=512, turn=16),
            limits=LimitsConfig(trajectory_s=60),
            agent=AgentConfig(name="chats", interaction="brief"),
            seed=7,
        )
        async with rollout.open_rollout(config, interactions=users) as runtime:
            await runtime.generate(prompts[1:2])  # imports, and the form of a user's turn
            return await runtime.generate(prompts)

    batch = anyio.run(main, backend=backend)
    long, *short = batch.samples
    assert (long.outcome, long.limit_source) == (Outcome.LENGTH, "lengths.response")
    assert {row.outcome for row in short} <= {Outcome.COMPLETED, Outcome.LENGTH}
    assert batch.metrics["loop_lag_s/max"] < 1
