"""`rewards.processes`: what happens to one call happens to no other, nor to the driver."""

from __future__ import annotations

import os
import re
import sys
import threading
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import isolated_rewards
import rollout
from own_processes import kill_and_wait
from race_situations import add
from rollout import Outcome, Prompt, Trajectory
from rollout.batch import RolloutBatch
from rollout.chat.plain_data import NotPlainError, simplify, to_plain
from rollout.config import (
    LengthsConfig,
    LimitsConfig,
    RewardsConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    SimulatedEngine,
    ToolsConfig,
)
from rollout.testing import Scenario, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.process]

SHORT = Scenario(seed=1).reply("go", "Done.")
TOOLS = Scenario(seed=1).reply("go", tool_call("add", a=2, b=3)).then("Five.")
REPLACED = "before it had answered; another process takes its place"
LENGTHS = LengthsConfig(prompt=800, response=200)


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


def children() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "rollout.scheduling.rewards.processes"
        in process.as_dict(["cmdline"], ad_value=[])["cmdline"]
    ]


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Any:
    yield
    assert not children()


def waiting(trajectory: Trajectory) -> float:
    """1, after a while."""
    threading.Event().wait(0.4)
    return 1.0


def configured(
    *,
    scenario: Scenario = SHORT,
    processes: int = 1,
    retries: int = 0,
    reward_s: float | None = 60.0,
    samples: int = 1,
    max_threads: int = 32,
) -> RolloutConfig:
    return scenario.config(
        engine=SimulatedEngine(routed_experts=True),
        lengths=LENGTHS,
        sampling=SamplingConfig(top_log_probs=2),
        limits=LimitsConfig(reward_s=reward_s),
        rewards=RewardsConfig(processes=processes, retries=retries, backoff_s=0.01),
        scheduling=SchedulingConfig(samples_per_prompt=samples),
        tools=ToolsConfig(max_threads=max_threads),
    )


async def rewarded(
    prompts: list[Prompt],
    reward: Any = None,
    *,
    scenario: Scenario = SHORT,
    group_reward: Any = None,
    **settings: Any,
) -> RolloutBatch:
    config = configured(scenario=scenario, **settings)
    async with rollout.open_rollout(config, [add], reward, group_reward=group_reward) as runtime:
        batch: RolloutBatch = await runtime.generate(prompts)
    return batch


def user(text: str = "go", **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


async def test_reward_processes_among_many_those_that_fail_fail_alone() -> None:
    does = {2: "abort", 4: "exit", 6: "leave", 8: "hang", 10: "raise"}
    prompts = [user(extra={"does": does[at]} if at in does else {}) for at in range(12)]
    batch = await rewarded(prompts, isolated_rewards.score, processes=2, reward_s=4.0)
    failed = {at: each for at, each in enumerate(batch.trajectories) if each.reward is None}
    assert sorted(failed) == sorted(does)
    assert {each.reward for each in batch.trajectories} == {None, 1.0}
    assert not any(each.trainable for each in failed.values())
    causes = {does[at]: each.cause for at, each in failed.items() if each.cause}
    assert {what: (cause.type, cause.message) for what, cause in causes.items()} == {
        "abort": ("RewardProcessError", f"its process was killed by SIGSEGV {REPLACED}"),
        "exit": ("RewardProcessError", f"its process ended with exit code 7 {REPLACED}"),
        "leave": ("SystemExit", "3"),
        "hang": (
            "LimitExceeded",
            "limits.reward_s = 4 s is over: the reward function had not returned; its process was "
            "killed, and another one takes its place",
        ),
        "raise": ("OSError", "no judge"),
    }
    assert "isolated_rewards.py" in causes["raise"].traceback
    late = failed.pop(8)
    how = (late.outcome, late.reason, late.limit_source)
    assert how == (Outcome.DEADLINE, "reward", "limits.reward_s")
    for each in failed.values():
        how = (each.outcome, each.reason, each.limit_source)
        assert how == (Outcome.FAILED, "reward", None)


async def test_reward_process_sees_the_trajectory_as_it_is_and_what_the_driver_has_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "a:b")
    prompt = user(uid="p", ground_truth={"sum": 5}, extra={"array": np.arange(3), "half": "\ud800"})
    (trajectory,) = (await rewarded([prompt], isolated_rewards.tell, scenario=TOOLS)).trajectories
    extra, transcript = trajectory.extra, trajectory.transcript
    assert trajectory.reward == 0.5
    assert extra["pid"] != os.getpid()
    assert extra["type"] == "Trajectory"
    assert (extra["uid"], extra["member"], extra["outcome"]) == ("p", 0, "completed")
    assert extra["answer"] == trajectory.answer == "Five."
    assert extra["roles"] == [each.role for each in trajectory.messages]
    assert extra["prompt"] == ["dict", {"role": "user", "content": "go"}]
    assert extra["ground_truth"] == {"sum": 5}
    assert extra["ids"] == transcript.ids().tolist()
    assert extra["log_probs"] == transcript.log_probs().tolist()
    assert extra["versions"] == transcript.weight_versions().tolist()
    assert extra["mask"] == transcript.mask().tolist()
    assert extra["top_ids"] == transcript.top_ids().tolist()
    assert extra["top_log_probs"] == transcript.top_log_probs().tolist()
    assert transcript.top_ids().shape[1] == 2
    experts = transcript.routed_experts()
    assert experts is not None
    assert extra["experts"] == experts.tolist()
    assert extra["finish_reasons"] == ["stop", "stop"]
    assert extra["session_id"] == trajectory.segments[0].session_id
    assert extra["seeds"] == list(trajectory.segments[0].seeds)
    assert extra["num_turns"] == trajectory.num_turns
    assert extra["array"] == [0, 1, 2]
    assert trajectory.segments[0].token_rewards is not None
    assert sum(trajectory.segments[0].token_rewards) == 3.0
    assert extra["python_path"] == str(tmp_path)
    assert extra["path"] == [path or str(Path.cwd()) for path in sys.path]


async def test_reward_process_calls_async_functions_and_those_of_verl() -> None:
    prompt = user(ground_truth="Done")
    (one,) = (await rewarded([prompt], isolated_rewards.compute_score)).trajectories
    assert (one.answer, one.reward) == ("Done.", 1.0)
    assert one.extra["pid"] != os.getpid()


async def test_group_reward_in_processes_fails_its_own_group_alone() -> None:
    prompts = [user(extra={"does": "exit"}), user()]
    batch = await rewarded(
        prompts, group_reward=isolated_rewards.rank, samples=3, scenario=Scenario(seed=1)
    )
    dead, fine = batch.trajectories[:3], batch.trajectories[3:]
    assert [each.reason for each in dead] == ["group_reward"] * 3
    assert all(each.cause and "exit code 7" in each.cause.message for each in dead)
    lengths = [len(each.answer) for each in fine]
    assert [each.reward for each in fine] == [float(sorted(lengths).index(n)) for n in lengths]


async def test_reward_process_that_died_is_asked_again_where_retries_say_so(
    tmp_path: Path,
) -> None:
    prompt = user(extra={"path": str(tmp_path / "called")})
    (one,) = (await rewarded([prompt], isolated_rewards.slow_then_right, retries=1)).trajectories
    assert (one.outcome, one.reward, one.cause) == (Outcome.COMPLETED, 1.0, None)


@dataclass(kw_only=True)
class Held:
    held: Any


HOURS = timedelta(hours=2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Decimal("0.5"), "extra['given'] is a decimal.Decimal; expected plain data"),
        (datetime(2020, 1, 1), "['given'] is a datetime.datetime"),
        ([1, {"at": (2, {HOURS})}], "['given'][1]['at'][1][0] is a datetime.timedelta"),
        ({Decimal(1): 1}, "[Decimal('1')] has a key that is a Decimal"),
        (Held(held=HOURS), "['given']['held'] is a datetime.timedelta"),
    ],
)
def test_reward_process_is_not_handed_another_value_than_was_given(value: Any, said: str) -> None:
    with pytest.raises(NotPlainError) as caught:
        to_plain({"given": value}, "extra", simplify)
    assert said in str(caught.value)


async def test_reward_process_hands_over_what_msgpack_can_hold_and_may_die_while_it_idles() -> None:
    given = {
        "moment": datetime(2020, 1, 1, 12, tzinfo=timezone(HOURS)),
        "outcome": Outcome.COMPLETED,
        "keys": {1: 2, None: 3, (1, 2): 3.5},
        "data": Held(held=[1, "\ud800"]),
    }
    extras = [{"given": given}, {"does": "hold"}, {"lock": object()}]
    async with rollout.open_rollout(configured(), reward=isolated_rewards.score) as runtime:
        batch = await runtime.generate([user(extra=extra) for extra in extras])
        (child,) = children()
        await kill_and_wait(child)
        again = await runtime.generate([user(), user()])
    assert [each.reward for each in again.trajectories] == [1.0, 1.0]
    echo, unsendable, lock = batch.trajectories
    assert echo.extra["echo"] == {**given, "data": {"held": [1, "\ufffd"]}}
    for one, what in ((unsendable, "rewards[0]"), (lock, "trajectories[0]")):
        assert one.cause is not None
        assert f"{what}.extra['lock'] is a object; expected plain data" in one.cause.message


async def test_reward_that_a_file_holds_is_named_by_it_also_an_object(tmp_path: Path) -> None:
    source = (
        "class Judge:\n    def __call__(self, trajectory):\n        return 0.5\njudge = Judge()\n"
    )
    (tmp_path / "rewards.py").write_text(source)
    (one,) = (await rewarded([user()], f"{tmp_path}/rewards.py:judge")).trajectories
    assert one.reward == 0.5


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda trajectory: 1.0, "needs a function that its process can import: move <lambda>"),
        (
            isolated_rewards.score_tenfold,
            "needs a function that its process finds by its name: isolated_rewards.score leads to",
        ),
        ("isolated_rewards:nothing", "isolated_rewards has no 'nothing'"),
    ],
)
async def test_reward_that_no_process_can_import_is_refused_before_anything_starts(
    reward: Any, said: str
) -> None:
    with pytest.raises(rollout.ConfigError, match=re.escape(said)):
        await rewarded([user()], reward)


async def test_reward_that_waits_for_a_thread_has_all_its_time_once_it_is_called() -> None:
    batch = await rewarded([user()] * 4, waiting, processes=0, max_threads=1, reward_s=1.0)
    assert [each.reward for each in batch.trajectories] == [1.0] * 4


@pytest.mark.slow
async def test_async_rewards_of_a_process_are_all_awaited_on_one_loop() -> None:
    does = ["", "leave", "", ""]
    given = [user(extra={"does": each}) for each in does]
    batch = await rewarded(given, isolated_rewards.on_one_loop)
    assert [t.reward for t in batch.trajectories] == [1.0, None, 1.0, 1.0]
    assert [t.cause.type for t in batch.trajectories if t.cause] == ["SystemExit"]


async def test_reward_whose_module_fails_in_the_process_is_refused_when_the_runtime_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "import os\n"
        f"if os.getpid() != {os.getpid()}:\n    raise RuntimeError('not in a child')\n"
        "def score(trajectory):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(rollout.ConfigError, match="imported in its process: RuntimeError: not in"):
        await rewarded([user()], "only_here:score")
