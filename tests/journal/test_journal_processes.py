"""Journals of runs with real processes, clients and disks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from forked import start_fork
from http_agents import Client, config_of, prompt_of, user
from journal_material import cut_before_end
from rollout import JournalError, Outcome, Prompt, RolloutBatch
from rollout.config import GatewayConfig, JournalConfig, LimitsConfig
from rollout.journal.index import read_journal
from rollout.testing import Scenario

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
SAID: list[list[Any]] = []


def converse(client: Client) -> None:
    """Three calls, each on top of the answer before, and one beside them."""
    messages, answers = [user("hello")], []
    for _ in range(3):
        answer = client.chat(*messages).json()
        answers.append((answer["id"], answer["choices"][0]))
        messages += [answer["choices"][0]["message"], user("and then?")]
    answers.append(client.chat(user("something else")).json()["choices"][0])
    SAID.append(answers)


def test_gateway_calls_of_a_resumed_trajectory_get_the_answers_that_they_had(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    journal = JournalConfig(path=str(path), unwritable="text")
    scenario = Scenario(seed=4).reply("", filler=12).timing(base_s=0.001)
    config = config_of(scenario, GatewayConfig(), journal=journal)

    async def act(resume: bool) -> tuple[RolloutBatch, int, Any]:
        async with rollout.open_rollout(config, resume=resume) as runtime:
            batch = await runtime.generate([prompt_of(converse)])
            statistics = runtime.statistics()
            tokens = sum(each.tokens.arrived for each in statistics.replicas)
            return batch, tokens, statistics.journal

    SAID.clear()
    first, sampled, _ = anyio.run(act, False)
    cut_before_end(path)
    second, again, statistics = anyio.run(act, True)
    assert sampled > 0
    assert again == 0
    assert statistics.recalled == 4
    assert SAID[0] == SAID[1]
    one, other = first.trajectories[0], second.trajectories[0]
    assert other.outcome is Outcome.COMPLETED
    assert [each.transcript.ids_bytes() for each in other.segments] == [
        each.transcript.ids_bytes() for each in one.segments
    ]


@pytest.mark.parametrize("fsync", ["batch", "always"])
def test_journal_written_by_its_thread_is_whole_and_resumed(tmp_path: Path, fsync: Any) -> None:
    journal = JournalConfig(path=str(tmp_path / "journal"), fsync=fsync)
    config = Scenario(seed=2).reply("", filler=20).config(journal=journal)
    prompts = [Prompt(messages=[user(str(at))]) for at in range(20)]
    with rollout.open_rollout_blocking(config) as runtime:
        first = runtime.generate(prompts)
        statistics = runtime.statistics().journal
        assert statistics is not None
        assert statistics.failure == ""
    with rollout.open_rollout_blocking(config, resume=True) as runtime:
        second = runtime.generate(prompts)
        statistics = runtime.statistics().journal
        assert statistics is not None
        assert statistics.returned == 20
    assert [each.transcript.ids_bytes() for each in second.trajectories] == [
        each.transcript.ids_bytes() for each in first.trajectories
    ]


def wait_for_end() -> None:
    """As a data loader's worker."""
    sys.stdin.read()


def test_journal_of_a_closed_runtime_is_free_while_a_forked_child_lives(tmp_path: Path) -> None:
    config = Scenario(seed=2).config(journal=JournalConfig(path=str(tmp_path / "journal")))

    async def act(resume: bool) -> subprocess.Popen[str]:
        async with rollout.open_rollout(config, resume=resume):
            return start_fork(wait_for_end, stdin=subprocess.PIPE)

    with anyio.run(act, False), anyio.run(act, True):
        pass


def test_generate_on_a_full_disk_waits_and_ends_with_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    scenario = Scenario(seed=2).reply("", filler=20)
    limits = LimitsConfig(
        batch_s=2.0, trajectory_s=2.0, turn_s=2.0, generation_s=2.0, tool_s=2.0, reward_s=2.0
    )
    config = scenario.config(journal=JournalConfig(path=str(path)), limits=limits)
    prompts = [Prompt(messages=[user(str(at))]) for at in range(4)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def act() -> None:
        async with rollout.open_rollout(config) as runtime:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1000, before[1]))
            await runtime.generate(prompts)

    try:
        with pytest.raises(JournalError, match="cannot be written: File too large") as caught:
            anyio.run(act, backend="trio")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.partial is not None
    assert {row.outcome for row in caught.value.partial.samples} == {Outcome.COMPLETED}
    assert all(each.end is None for each in read_journal(path).trajectories.values())


@pytest.mark.slow
def test_drivers_killed_at_random_moments_lose_and_repeat_nothing() -> None:
    command = [sys.executable, "benchmarks/journal.py", "--only", "kills", "--kills", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == 50
    assert figures["finished"] > 50
    assert (figures["lost"], figures["repeated"], figures["bit_equal"]) == (0, 0, True)
