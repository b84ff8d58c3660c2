"""Journals of runs with real processes, clients and disks."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from cut_journals import cut_before_end
from http_agents import Client, config_of, prompt_of, user
from rollout import JournalError, Outcome, Prompt, RolloutBatch, function_tool
from rollout.config import GatewayConfig, JournalConfig, LimitsConfig
from rollout.scheduling.journal.entries import AnswersEntry, decode
from rollout.scheduling.journal.frames import Frame, frames, records_of
from rollout.scheduling.journal.journal_reading import read_journal
from rollout.testing import Scenario, tool_call
from test_journal import config_of as journal_of
from test_journal import prompts, run

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]
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


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_gateway_calls_of_a_resumed_trajectory_get_the_answers_that_they_had(
    tmp_path: Path, backend: str
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
    first, sampled, _ = anyio.run(act, False, backend=backend)
    cut_before_end(path)
    second, again, statistics = anyio.run(act, True, backend=backend)
    assert sampled > 0
    assert again == 0
    assert statistics.recalled == 4
    assert SAID[0] == SAID[1]
    one, other = first.trajectories[0], second.trajectories[0]
    assert other.outcome is Outcome.COMPLETED
    assert [each.transcript.ids_bytes() for each in other.segments] == [
        each.transcript.ids_bytes() for each in one.segments
    ]


@pytest.mark.parametrize("fsync", ["never", "batch", "always"])
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


def test_turn_and_what_tools_answer_at_once_are_one_record_and_resumed(tmp_path: Path) -> None:
    path, called = tmp_path / "journal", list[str]()

    @function_tool
    async def look(name: str) -> str:
        """Look something up.

        Args:
            name: What.
        """
        called.append(name)
        return f"{name} is é"

    scenario = Scenario(seed=2)
    for at in range(40):
        calls = [tool_call("look", name=f"{at}.{turn}") for turn in range(3)]
        scenario = (
            scenario.reply(f"this is {at}", calls[0]).then(calls[1]).then(calls[2]).then("so")
        )
    config = scenario.config(journal=JournalConfig(path=str(path)))
    prompts = [Prompt(messages=[user(f"this is {at}")]) for at in range(40)]
    with rollout.open_rollout_blocking(config, [look]) as runtime:
        first = runtime.generate(prompts)
    data = memoryview(path.read_bytes())
    whole = [each for each in frames(data) if isinstance(each, Frame)]
    records = [decode(record) for each in whole for _, record in records_of(each)]
    known = read_journal(path).trajectories.values()
    assert sum(len(each.answers) for each in known) == 120
    assert sum(isinstance(each, AnswersEntry) for each in records) < 60
    cut_before_end(path)
    answered = sum(len(each.answers) for each in read_journal(path).trajectories.values())
    with rollout.open_rollout_blocking(config, [look], resume=True) as runtime:
        second = runtime.generate(prompts)
    assert len(called) == 240 - answered
    for one, other in zip(first.trajectories, second.trajectories, strict=True):
        assert one.transcript.ids_bytes() == other.transcript.ids_bytes()
        assert one.transcript.log_probs_bytes() == other.transcript.log_probs_bytes()
        assert list(one.messages) == list(other.messages)


def test_generate_on_a_full_disk_waits_and_ends_with_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    scenario = Scenario(seed=2).reply("", filler=200)
    limits = LimitsConfig(
        batch_s=3.0, trajectory_s=3.0, turn_s=3.0, generation_s=3.0, tool_s=3.0, reward_s=3.0
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


FORKING = """
import os, sys
from pathlib import Path
import anyio
import rollout
from test_journal import config_of, prompts

async def act():
    async with rollout.open_rollout(config_of(Path(sys.argv[1]))) as runtime:
        await runtime.generate(prompts("quick"), step=0)
        if not os.fork():
            sys.stdin.read()
            os._exit(0)
        os.kill(os.getpid(), 9)

anyio.run(act)
"""


def test_journal_of_a_killed_driver_is_resumed_while_a_child_that_it_forked_lives(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(path)]
    driver = subprocess.Popen(command, cwd=Path(__file__).parent, stdin=subprocess.PIPE)
    with driver:  # which closes its input at the end, and so ends the child
        assert driver.wait(60) == -signal.SIGKILL
        [found] = run(journal_of(path), prompts("quick"), reward=None, resume=True).trajectories
        assert found.outcome is Outcome.COMPLETED
