"""`rewards.processes`: what happens to one call happens to no other, nor to the driver."""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import numpy as np
import psutil
import pytest

import isolated_rewards
import rollout
from own_processes import kill_and_wait
from race_situations import add
from rollout import Outcome, Prompt, Trajectory, function_tool
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
from slow_cases import slow_after, slow_but

pytestmark = [pytest.mark.anyio, pytest.mark.process]

SHORT = Scenario(seed=1).reply("go", "Done.")
TOOLS = Scenario(seed=1).reply("go", tool_call("add", a=2, b=3)).then("Five.")
HOLDING = Scenario(seed=1).reply("use", tool_call("hold")).then("Held.").reply("go", "Done.")
REPLACED = "before it had answered; another process takes its place"
LENGTHS = LengthsConfig(prompt=800, response=200)


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


@function_tool
def hold() -> None:
    """Have a thread for a while."""
    threading.Event().wait(1.5)


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
    tools = {id(TOOLS): [add], id(HOLDING): [hold]}.get(id(scenario), [])
    async with rollout.open_rollout(config, tools, reward, group_reward=group_reward) as runtime:
        batch: RolloutBatch = await runtime.generate(prompts)
    return batch


def user(text: str = "go", **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


async def test_reward_processes_among_many_those_that_fail_fail_alone() -> None:
    does = {4: "abort", 8: "exit", 12: "leave", 16: "hang", 20: "real-time", 24: "raise"}
    prompts = [user(extra={"does": does[at]} if at in does else {}) for at in range(30)]
    batch = await rewarded(prompts, isolated_rewards.score, processes=2, reward_s=3.0)
    failed = {at: each for at, each in enumerate(batch.trajectories) if each.reward is None}
    assert sorted(failed) == sorted(does)
    assert {each.reward for each in batch.trajectories} == {None, 1.0}
    assert not any(each.trainable for each in failed.values())
    causes = {does[at]: each.cause for at, each in failed.items() if each.cause}
    assert {what: (cause.type, cause.message) for what, cause in causes.items()} == {
        "abort": ("RewardProcessError", f"its process was killed by SIGSEGV {REPLACED}"),
        "real-time": ("RewardProcessError", f"its process was killed by signal 40 {REPLACED}"),
        "exit": ("RewardProcessError", f"its process ended with exit code 7 {REPLACED}"),
        "leave": ("SystemExit", "3"),
        "hang": (
            "LimitExceeded",
            "limits.reward_s = 3 s is over: the reward function had not returned; its process was "
            "killed, and another one takes its place",
        ),
        "raise": ("OSError", "no judge"),
    }
    assert "isolated_rewards.py" in causes["raise"].traceback
    late = failed.pop(16)
    how = (late.outcome, late.reason, late.limit_source)
    assert how == (Outcome.DEADLINE, "reward", "limits.reward_s")
    for each in failed.values():
        how = (each.outcome, each.reason, each.limit_source)
        assert how == (Outcome.FAILED, "reward", None)


async def test_reward_process_sees_the_trajectory_as_it_is() -> None:
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


async def test_reward_process_has_the_environment_and_the_paths_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "a:b")
    (one,) = (await rewarded([user()], isolated_rewards.surroundings)).trajectories
    assert one.extra["python_path"] == str(tmp_path)
    assert one.extra["path"] == [path or str(Path.cwd()) for path in sys.path]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (isolated_rewards.later, 0.25),
        (isolated_rewards.compute_score, 1.0),
        ("isolated_rewards:judge", 5.0),
        ("isolated_rewards:score_tenfold", 10.0),
    ],
)
async def test_reward_process_calls_async_functions_those_of_verl_and_what_a_name_names(
    reward: Any, expected: float
) -> None:
    (one,) = (await rewarded([user(ground_truth="Done")], reward)).trajectories
    assert (one.answer, one.reward) == ("Done.", expected)
    assert one.extra.get("pid") != os.getpid()


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


@pytest.mark.parametrize(
    ("reward", "extra", "said"),
    [
        (
            isolated_rewards.unsendable,
            {},
            "rewards[0].extra['lock'] is a object; expected plain data",
        ),
        (isolated_rewards.short, {}, "token_values of shape (1,); expected one for each of the"),
        (
            isolated_rewards.score,
            {"lock": object()},
            "trajectories[0].extra['lock'] is a object; expected plain data",
        ),
    ],
)
async def test_reward_process_cannot_be_handed_what_is_no_plain_data(
    reward: Any, extra: dict[str, Any], said: str
) -> None:
    (one,) = (await rewarded([user(extra=extra)], reward)).trajectories
    assert one.cause is not None
    assert said in one.cause.message


@dataclass(kw_only=True)
class Held:
    held: Any
    limit: ClassVar[Decimal] = Decimal(1)


def test_reward_process_is_handed_the_fields_of_a_dataclass_alone() -> None:
    assert to_plain({"given": Held(held=2)}, "extra", simplify) == {"given": {"held": 2}}


HOURS = timedelta(hours=2)
KNOT: list[Any] = []
KNOT.append(KNOT)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Decimal("0.5"), "extra['given'] is a decimal.Decimal; expected plain data"),
        (UUID(int=5), "['given'] is a uuid.UUID"),
        (date(2020, 1, 1), "['given'] is a datetime.date"),
        (datetime(2020, 1, 1), "['given'] is a datetime.datetime"),
        (HOURS, "['given'] is a datetime.timedelta"),
        (enum.Enum("Size", "SMALL").SMALL, ".Size; expected"),  # type: ignore[attr-defined]
        ([1, {"at": (2, {HOURS})}], "['given'][1]['at'][1][0] is a datetime.timedelta"),
        ({Decimal(1): 1}, "[Decimal('1')] has a key that is a Decimal"),
        (Held(held=HOURS), "['given']['held'] is a datetime.timedelta"),
        (np.array([Decimal(1)], dtype=object), "['given'][0] is a decimal.Decimal"),
        ([2**70], "['given'][0] is an int of more than 64 bits"),
        (KNOT, "extra refers to itself, or is nested more than 100 deep"),
    ],
)
def test_reward_process_is_not_handed_another_value_than_was_given(value: Any, said: str) -> None:
    with pytest.raises(NotPlainError) as caught:
        to_plain({"given": value}, "extra", simplify)
    assert said in str(caught.value)


async def test_reward_process_and_its_driver_hand_over_what_msgpack_can_hold() -> None:
    given = {
        "moment": datetime(2020, 1, 1, 12, tzinfo=timezone(HOURS)),
        "outcome": Outcome.COMPLETED,
        "keys": {1: 2, None: 3, (1, 2): 3.5},
        "data": Held(held=[1, "\ud800"]),
    }
    (one,) = (await rewarded([user(extra={"given": given})], isolated_rewards.echo)).trajectories
    assert one.extra["echo"] == {**given, "data": {"held": [1, "\ufffd"]}}


@pytest.mark.parametrize("processes", [0, 1])
async def test_reward_that_a_file_holds_is_named_by_it(tmp_path: Path, processes: int) -> None:
    (tmp_path / "rewards.py").write_text("def score(trajectory):\n    return 0.5\n")
    reward = f"{tmp_path}/rewards.py:score"
    (one,) = (await rewarded([user()], reward, processes=processes)).trajectories
    assert one.reward == 0.5


UNIMPORTABLE = [
    (
        lambda trajectory: 1.0,
        "reward: rewards.processes = 1 needs a function that its process can import: move "
        "<lambda> to the top level of a module, or name it as 'package.module:name'",
    ),
    (
        isolated_rewards.judge,
        "reward: rewards.processes = 1 needs a function that its process can import: move "
        "Judge to the top level of a module, or name it as 'package.module:name'",
    ),
    (
        isolated_rewards.score_tenfold,
        "reward: rewards.processes = 1 needs a function that its process finds by its name: "
        "isolated_rewards.score leads to score (isolated_rewards, line 21)",
    ),
    (
        isolated_rewards.first_renamed,
        "reward: rewards.processes = 1 needs a function that its process finds by its name: "
        "isolated_rewards.renamed leads to renamed (isolated_rewards, line 181)",
    ),
    (
        isolated_rewards.vanished,
        "reward: rewards.processes = 1 needs a function that its process finds by its name: "
        "isolated_rewards.vanished_one leads to None; set",
    ),
    (
        "isolated_rewards:nothing",
        "reward = 'isolated_rewards:nothing': isolated_rewards has no 'nothing'",
    ),
    ("no.such:name", "reward = 'no.such:name': ModuleNotFoundError: No module named 'no"),
    ("a b:c", "reward = 'a b:c': ModuleNotFoundError: No module named 'a b'"),
]


@pytest.mark.parametrize(("reward", "said"), slow_after(3, UNIMPORTABLE))
async def test_reward_that_no_process_can_import_is_refused_before_anything_starts(
    reward: Any, said: str
) -> None:
    with pytest.raises(rollout.ConfigError) as caught:
        await rewarded([user()], reward)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("decorator", ["", "from decorators import kept\n@kept\n"])
async def test_reward_of_a_module_loaded_from_a_file_is_found_there_decorated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decorator: str
) -> None:
    (tmp_path / "decorators.py").write_text(
        "import functools\n"
        "def kept(function):\n"
        "    return functools.wraps(function)(lambda *args: function(*args))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "by_hand.py"
    path.write_text(f"{decorator}def score(trajectory):\n    return 0.5\n")
    spec = importlib.util.spec_from_file_location("loaded_by_hand", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if decorator:
        monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (one,) = (await rewarded([user()], module.score)).trajectories
    assert one.reward == 0.5


async def test_reward_whose_process_was_copied_by_it_has_the_one_reply_that_is_its_own() -> None:
    given = [user(extra={"value": at, "does": "fork" if at == 1 else ""}) for at in range(4)]
    batch = await rewarded(given, isolated_rewards.copied)
    assert [t.reward for t in batch.trajectories] == [0.0, 1.0, 2.0, 3.0]


async def test_reward_process_that_died_while_it_idled_fails_no_reward() -> None:
    config = configured()
    async with rollout.open_rollout(config, reward=isolated_rewards.score) as runtime:
        await runtime.generate([user()])
        (child,) = children()
        await kill_and_wait(child)
        batch = await runtime.generate([user(), user()])
        assert [each.reward for each in batch.trajectories] == [1.0, 1.0]


async def test_reward_that_waits_for_a_thread_has_all_its_time_once_it_is_called() -> None:
    batch = await rewarded([user()] * 4, waiting, processes=0, max_threads=1, reward_s=1.0)
    assert [each.reward for each in batch.trajectories] == [1.0] * 4


@pytest.mark.slow
async def test_reward_process_is_asked_in_time_though_a_tool_has_the_only_thread() -> None:
    prompts = [user("use"), user()]
    batch = await rewarded(
        prompts, isolated_rewards.score, scenario=HOLDING, max_threads=1, reward_s=1.0
    )
    assert [each.reward for each in batch.trajectories] == [1.0, 1.0]


@pytest.mark.slow
async def test_reward_process_reads_a_long_trajectory_in_time() -> None:
    prompt = user(extra={"pages": b"x" * 30_000_000})
    (one,) = (await rewarded([prompt], isolated_rewards.score, reward_s=6.0)).trajectories
    assert one.reward == 1.0


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
