"""One trajectory's code, whatever it raises, assigns or swallows, harms that trajectory only."""

from __future__ import annotations

import asyncio  # noqa: TID251
import logging
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
import trio

import rollout
from rollout import AgentLoop, Group, Outcome, Prompt, RolloutBatch, Trajectory, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import LimitsConfig, SchedulingConfig, ToolsConfig
from rollout.errors import RolloutError
from rollout.interactions import Interaction, InteractionTurn
from rollout.testing import Scenario, tool_call
from rollout.tools import Tool, ToolContext, ToolPolicy, ToolResult, ToolSession

pytestmark = [
    pytest.mark.anyio,
    # Python's word on code that swallowed even its closing.
    pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
]

BOTH = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
LIMITS = LimitsConfig(
    generation_s=20, tool_s=10, turn_s=40, trajectory_s=60, batch_s=500, cleanup_s=2, reward_s=10
)
OK = Scenario(seed=1).reply("", "ok")


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


def word_of(prompt: Prompt | None) -> str:
    assert prompt is not None
    return str(prompt.messages[0]["content"])  # type: ignore[index]


class Rough(BaseException):
    """As PyO3 raises where Rust code panics."""


class Speechless(Exception):
    """Cannot even say what happened."""

    def __str__(self) -> str:
        raise LookupError


RAISERS: dict[str, Callable[[], BaseException]] = {
    "base exception": lambda: Rough("rough"),
    "group": lambda: BaseExceptionGroup("group", [ValueError("x"), Rough("rough")]),
    "speechless": Speechless,
    "system exit": lambda: SystemExit(3),
    "asyncio's cancellation": asyncio.CancelledError,
    "trio's cancellation": lambda: trio.Cancelled._create(source="unknown"),
}


@register_agent("raising")
class Raising(AgentLoop):
    """Speaks, then does what its prompt names."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        word = word_of(context.prompt)
        if word in RAISERS:
            raise RAISERS[word]()
        if word in SPOILERS:
            SPOILERS[word](context)


SPOILERS: dict[str, Callable[[Any], object]] = {
    "deadline": lambda context: setattr(context, "deadline", None),
    "extra": lambda context: setattr(context, "extra", None),
    "messages": lambda context: setattr(context, "messages", 5),
    "scores": lambda context: context.turn_scores.append("good"),
    "outcome": lambda context: context.end("finished", "because"),
    "reward": lambda context: setattr(context, "reward", "good"),
}


async def generate(
    prompts: list[Prompt], *, tools: Any = (), reward: Any = None, **options: Any
) -> RolloutBatch:
    scenario = options.pop("scenario", OK)
    interactions = options.pop("interactions", ())
    options.setdefault("limits", LIMITS)
    config = scenario.config(**options)
    async with rollout.open_rollout(config, tools, reward, interactions) as runtime:
        batch = await runtime.generate(prompts, step=1)
        statistics = runtime.statistics()
        assert statistics.admitted == statistics.finished == len(prompts)
        return batch


def outcomes(batch: RolloutBatch) -> list[str]:
    return [sample.outcome for sample in batch.samples]


def among_calm(words: Iterable[str], **fields: Any) -> list[Prompt]:
    """A calm prompt before each that is not, and one at the end."""
    return [user(text, **fields) for word in words for text in ("calm", word)] + [user("calm")]


@BOTH
async def test_agent_raises_anything_its_trajectory_alone_fails(anyio_backend: str) -> None:
    batch = await generate(among_calm(RAISERS, agent_name="raising"))
    assert outcomes(batch) == ["completed", "failed"] * len(RAISERS) + ["completed"]
    for failed in batch.trajectories[1::2]:
        assert failed.reason == "agent"
        assert failed.cause is not None
        calm = batch.trajectories[0]
        assert failed.transcript.generated_length == calm.transcript.generated_length


async def test_agent_assigns_anything_to_its_context_its_trajectory_alone_fails() -> None:
    batch = await generate(among_calm(SPOILERS, agent_name="raising"))
    assert outcomes(batch) == ["completed", "failed"] * len(SPOILERS) + ["completed"]
    assert {each.reason for each in batch.trajectories[1::2]} == {"agent"}
    batch.tensors  # noqa: B018  (it can be laid out)


@pytest.mark.parametrize("is_sync", [False, True])
async def test_reward_raises_anything_its_trajectory_alone_fails(is_sync: bool) -> None:
    def reward(trajectory: Trajectory) -> float:
        word = word_of(trajectory.prompt)
        if word in RAISERS:
            raise RAISERS[word]()
        return 1.0

    async def reward_async(trajectory: Trajectory) -> float:
        return reward(trajectory)

    batch = await generate(among_calm(RAISERS), reward=reward if is_sync else reward_async)
    assert outcomes(batch) == ["completed", "failed"] * len(RAISERS) + ["completed"]
    assert [t.reward for t in batch.trajectories] == [1.0, None] * len(RAISERS) + [1.0]
    for failed in batch.trajectories[1::2]:
        assert failed.reason == "reward"
        assert failed.transcript.generated_length > 0


@pytest.mark.parametrize("field", ["metrics", "transcript"])
async def test_reward_assigns_anything_to_the_trajectory_nobody_is_harmed(field: str) -> None:
    async def reward(trajectory: Trajectory) -> float:
        setattr(trajectory, field, None)
        return 0.5

    batch = await generate([user("one"), user("two")], reward=reward)
    assert outcomes(batch) == ["completed", "completed"]
    assert [t.reward for t in batch.trajectories] == [0.5, 0.5]
    assert all(t.metrics["reward_s"] == 0 for t in batch.trajectories)


@pytest.mark.parametrize("is_group", [False, True])
async def test_reward_puts_anything_into_metrics_nobody_is_harmed(
    is_group: bool, tmp_path: Path
) -> None:
    def reward(trajectory: Trajectory) -> float:
        trajectory.metrics.update({"judge": "good", "generation_s": None, 5: 1.0})  # type: ignore[dict-item]
        return 0.5

    def group_reward(group: rollout.Group) -> list[float]:
        return [reward(each) for each in group.trajectories]

    rewards: Any = {"group_reward": group_reward} if is_group else {"reward": reward}
    async with rollout.open_rollout(OK.config(limits=LIMITS), **rewards) as runtime:
        batch = await runtime.generate([user("one")])
    (one,) = batch.trajectories
    assert (one.outcome, one.reward) == ("completed", 0.5)
    assert all(isinstance(each, int | float) for each in one.metrics.values())
    batch.save(tmp_path / "batch")
    assert rollout.RolloutBatch.load(tmp_path / "batch").samples[0].outcome == "completed"


class Reading(AgentLoop):
    """Has a reader of its tokens that raises, where its prompt says so."""

    async def run(self, context: AgentContext) -> None:
        def read(generation: Any) -> None:
            raise RAISED[word_of(context.prompt)]

        if word_of(context.prompt) in RAISED:
            context.on_tokens.append(read)
        await context.generate()


RAISED = {"exit": SystemExit(3), "rough": Rough("x")}


@pytest.mark.parametrize("word", RAISED)
async def test_reader_of_tokens_raises_anything_nobody_is_harmed(word: str) -> None:
    register_agent("reading")(Reading)
    batch = await generate([user(each, agent_name="reading") for each in ("calm", word)])
    assert outcomes(batch) == ["completed", "completed"]


async def stay() -> None:
    """Wait, whatever anybody says."""
    while True:
        try:
            await anyio.sleep(3600)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)  # virtual time stands still while code spins


async def spin() -> None:
    """Wait, and spin once cancelled."""
    while True:
        try:
            await anyio.sleep(3600)
        except BaseException:
            continue


async def stay_shielded() -> None:
    """Wait where no cancellation arrives."""
    with anyio.CancelScope(shield=True):
        await anyio.sleep(200)


async def begin_children_again() -> None:
    """Begin tasks, whatever becomes of the ones before."""
    while True:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 3600)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)


STAYING: dict[str, Callable[[], Any]] = {
    "stay": stay,
    "stay_shielded": stay_shielded,
    "spin": spin,
    "begin_children_again": begin_children_again,
}


@register_agent("staying")
class Staying(AgentLoop):
    """Speaks, then waits as its prompt says."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        await STAYING[word_of(context.prompt)]()


async def check_given_up(word: str, caplog: pytest.LogCaptureFixture) -> None:
    config = OK.config(limits=LIMITS)
    async with rollout.open_rollout(config, (), lambda trajectory: 1.0) as runtime:
        started = anyio.current_time()
        batch = await runtime.generate([user("calm"), user(word, agent_name="staying")])
        assert 62 <= anyio.current_time() - started < 62.5  # trajectory_s + cleanup_s
        assert runtime.statistics().unresponsive == 1
        again = await runtime.generate([user("calm")])  # the runtime is as good as before
    assert outcomes(again) == ["completed"]
    calm, given_up = batch.trajectories
    assert (calm.outcome, calm.reward) == (Outcome.COMPLETED, 1.0)
    assert (given_up.outcome, given_up.reason) == (Outcome.FAILED, "unresponsive")
    assert (given_up.trainable, given_up.reward) == (False, None)
    assert given_up.transcript.generated_length > 0
    assert given_up.cause is not None
    assert given_up.cause.message.startswith(
        "agent Staying did not end within limits.cleanup_s = 2 s of its cancellation and was given "
        "up; it waits at "
    )
    assert "test_containment.py:" in given_up.cause.message
    assert given_up.cause.message in caplog.text


@pytest.mark.parametrize("word", ["stay", "stay_shielded", "begin_children_again"])
async def test_agent_swallows_cancellation_it_is_given_up_after_cleanup_s(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    await check_given_up(word, caplog)


QUICK = LimitsConfig(
    generation_s=0.3, tool_s=0.1, turn_s=0.4, trajectory_s=0.5, batch_s=60, cleanup_s=0.1
)


REAL = [
    ("trio", "spin"),  # virtual time would stand still
    ("asyncio", "spin"),
    ("asyncio", "stay"),
    # on a loaded machine asyncio is still ending the last of these children
    pytest.param("asyncio", "begin_children_again", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("anyio_backend", "word"), REAL)
async def test_agent_swallows_cancellation_in_real_time_it_is_given_up(
    anyio_backend: str, word: str
) -> None:
    async with rollout.open_rollout(OK.config(limits=QUICK)) as runtime:
        batch = await runtime.generate([user("calm"), user(word, agent_name="staying")])
        assert runtime.statistics().unresponsive == 1
    assert [(t.outcome, t.reason) for t in batch.trajectories] == [
        ("completed", ""),
        ("failed", "unresponsive"),
    ]


@register_agent("in_a_thread")
class InAThread(AgentLoop):
    """Waits for a thread that trio cannot leave."""

    release = threading.Event()

    async def run(self, context: AgentContext) -> None:
        await anyio.to_thread.run_sync(self.release.wait)


@BOTH
async def test_agent_waits_for_a_thread_nobody_waits_with_it(anyio_backend: str) -> None:
    InAThread.release.clear()
    try:
        async with rollout.open_rollout(OK.config(limits=QUICK)) as runtime:
            batch = await runtime.generate([user("calm"), user("x", agent_name="in_a_thread")])
            InAThread.release.set()  # closing waits for it
        assert [(t.outcome, t.reason) for t in batch.trajectories] == [
            ("completed", ""),
            ("failed", "unresponsive"),
        ]
    finally:
        InAThread.release.set()


CALLS = Scenario(seed=1).reply("calm", "ok")


def calling(*names: str) -> Scenario:
    """Turns that call tools side by side, then a last word."""
    calls = "".join(tool_call(name) for name in names)
    return CALLS.reply("call", calls).then("done")


@function_tool
async def patient() -> str:
    """Wait."""
    await stay()
    return ""


TIMED_OUT = "timed out after 10 s (limits.tool_s)"


def answers(trajectory: Trajectory) -> list[Any]:
    """What the model reads of its calls."""
    return [each.content for each in trajectory.messages if each.role == "tool"]


@function_tool
async def quick() -> str:
    """Answer."""
    return "quick"


@pytest.mark.parametrize("names", [("patient", "quick"), ("patient", "patient")])
async def test_tool_swallows_cancellation_its_own_call_times_out(
    names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    started = anyio.current_time()
    batch = await generate(
        [user("calm"), user("call")], scenario=calling(*names), tools=[patient, quick]
    )
    assert 12 <= anyio.current_time() - started < 15  # tool_s + cleanup_s, and the generations
    assert outcomes(batch) == ["completed", "completed"]
    assert answers(batch.trajectories[1]) == [TIMED_OUT if n == "patient" else n for n in names]
    named = re.findall(r"tool 'patient' of trajectory \S+/\d+ did not end within", caplog.text)
    assert len(named) >= names.count("patient")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tool_swallows_cancellation_on_asyncio_its_own_call_times_out(
    anyio_backend: str,
) -> None:
    limits = LimitsConfig(
        generation_s=2, tool_s=0.1, turn_s=5, trajectory_s=10, batch_s=60, cleanup_s=0.1
    )
    batch = await generate(
        [user("calm"), user("call")],
        scenario=calling("patient", "quick"),
        tools=[patient, quick],
        limits=limits,
    )
    assert outcomes(batch) == ["completed", "completed"]
    assert answers(batch.trajectories[1])[0] == "timed out after 0.1 s (limits.tool_s)"


@register_agent("impatient_with_code")
class Impatient(AgentLoop):
    """Waits for its tools, or its user, for 3 s."""

    async def run(self, context: AgentContext) -> None:
        await context.begin()
        turn = await context.generate()
        with anyio.move_on_after(3):
            await (context.call_tools(turn.calls) if turn.calls else context.ask_user())
        await anyio.sleep(1)


@pytest.mark.parametrize(
    ("agent", "turn_s", "outcome"),
    [("tool_agent", 10, "deadline"), ("impatient_with_code", 40, "completed")],
)
async def test_tool_swallows_the_cancellation_of_its_turn_it_is_named_and_counted(
    agent: str, turn_s: float, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = attrs.evolve(LIMITS, turn_s=turn_s, generation_s=10)
    queued = function_tool("patient", policy=ToolPolicy(max_concurrency=1))(stay)
    config = calling("patient", "quick").config(limits=limits)
    async with rollout.open_rollout(config, [queued, quick]) as runtime:
        batch = await runtime.generate([user("call", agent_name=agent)])
        assert runtime.statistics().unresponsive == 1
    assert outcomes(batch) == [outcome]
    assert len(re.findall(r"tool 'patient' of trajectory \S+/\d+ did not end", caplog.text)) >= 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tool_swallows_the_cancellation_of_its_trajectory_that_fails(
    anyio_backend: str,
) -> None:
    limits = LimitsConfig(
        generation_s=1, tool_s=1, turn_s=1, trajectory_s=1, batch_s=60, cleanup_s=0.1
    )
    batch = await generate(
        [user("calm"), user("call")], scenario=calling("patient"), tools=[patient], limits=limits
    )
    stuck = batch.trajectories[1]
    assert outcomes(batch) == ["completed", "failed"]
    assert stuck.reason == "unresponsive"
    assert stuck.cause is not None
    assert stuck.cause.message.startswith("tool 'patient' of trajectory ")


class Stubborn(Tool):
    """Swallows cancellation in one of its methods."""

    def __init__(self, name: str, where: str, closed: list[str]) -> None:
        self.name = name
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": "x", "parameters": {"type": "object"}},
        }
        self._where = where
        self._closed = closed

    async def open(self, context: ToolContext) -> ToolSession:
        if self._where == "open":
            await stay()
        return StubbornSession(self.name, self._where, self._closed)


class StubbornSession(ToolSession):
    def __init__(self, name: str, where: str, closed: list[str]) -> None:
        self._name = name
        self._where = where
        self._closed = closed

    async def execute(self, call: Any) -> ToolResult:
        return ToolResult("fine")

    async def calc_reward(self) -> float | None:
        if self._where == "calc_reward":
            await stay()
        return 1.0

    async def close(self) -> None:
        self._closed.append(self._name)
        if self._where == "close":
            await stay()


@pytest.mark.parametrize(
    ("where", "seconds"), [("open", 12), ("calc_reward", 12), ("close", 4)]
)  # tool_s or cleanup_s, and cleanup_s
async def test_tool_swallows_cancellation_elsewhere_others_are_closed(
    where: str, seconds: float
) -> None:
    closed: list[str] = []
    tools = [
        Stubborn("first", "", closed),
        Stubborn("second", where, closed),
        Stubborn("third", "", closed),
    ]
    names = ("first", "third", "second") if where == "open" else ("first", "second", "third")
    started = anyio.current_time()
    batch = await generate([user("calm"), user("call")], scenario=calling(*names), tools=tools)
    assert seconds <= anyio.current_time() - started < seconds + 3
    stuck = batch.trajectories[1]
    if where == "open":
        assert outcomes(batch) == ["completed", "completed"]
        assert f"could not open 'second': {TIMED_OUT}" in answers(stuck)
    else:
        assert (stuck.outcome, stuck.reason) == (Outcome.FAILED, "unresponsive")
        assert stuck.cause is not None
        assert stuck.cause.message.startswith(f"{where} of tool 'second' did not end within")
    assert closed == (["third", "first"] if where == "open" else ["third", "second", "first"])


class SlowToClose(StubbornSession):
    async def close(self) -> None:
        await anyio.sleep(1)
        await super().close()


class Lasting(Stubborn):
    async def open(self, context: ToolContext) -> ToolSession:
        return SlowToClose(self.name, "", self._closed)


@register_agent("calls_and_stays")
class CallsAndStays(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await context.call_tools((await context.generate()).calls)
        await anyio.sleep(15)  # longer than tool_s, within which the session was opened


async def test_session_open_for_longer_than_a_call_may_take_is_closed_in_full() -> None:
    closed: list[str] = []
    prompts = [user("call", agent_name="calls_and_stays")]
    tools = [Lasting("lasting", "", closed)]
    batch = await generate(prompts, scenario=calling("lasting"), tools=tools)
    assert outcomes(batch) == ["completed"]
    assert closed == ["lasting"]


class StubbornUser(Interaction):
    """Answers never."""

    name = "stubborn"

    async def respond(self, messages: Any) -> InteractionTurn:
        await stay()
        raise AssertionError

    async def finish(self) -> None:
        await stay()


async def test_simulated_user_swallows_cancellation_it_is_given_up() -> None:
    prompts = [user("x", extra={"interaction_kwargs": {"name": "stubborn"}})]
    started = anyio.current_time()
    batch = await generate(prompts, interactions=[StubbornUser])
    assert anyio.current_time() - started < 47  # turn_s + cleanup_s, and twice cleanup_s
    assert [t.reason for t in batch.trajectories] == ["unresponsive"]


async def test_reward_swallows_cancellation_it_is_given_up() -> None:
    async def reward(trajectory: Trajectory) -> float:
        if word_of(trajectory.prompt) == "stay":
            await stay()
        return 1.0

    batch = await generate([user("calm"), user("stay")], reward=reward)
    assert [t.reward for t in batch.trajectories] == [1.0, None]
    stuck = batch.trajectories[1]
    assert stuck.outcome is Outcome.FAILED
    assert stuck.cause is not None
    assert stuck.cause.message.startswith("the reward function did not end within")


async def test_group_reward_swallows_the_cancellation_of_its_caller_it_is_named_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def reward(group: Group) -> list[float]:
        await stay()
        return [1.0]

    config = OK.config(limits=LIMITS)
    async with rollout.open_rollout(config, group_reward=reward) as runtime:
        with anyio.move_on_after(5):
            await runtime.collect([user("calm")], 1)
        assert runtime.statistics().unresponsive == 1
    assert "the group reward function did not end within" in caplog.text


async def test_caller_is_cancelled_stubborn_code_holds_it_for_cleanup_s_only() -> None:
    async with rollout.open_rollout(OK.config(limits=LIMITS)) as runtime:
        with anyio.move_on_after(5) as scope:
            await runtime.generate([user("stay", agent_name="staying") for _ in range(3)])
        assert scope.cancelled_caught
        assert anyio.current_time() == pytest.approx(scope.deadline + 2, abs=0.01)
        runtime.cancel()
        assert runtime.statistics().outcomes == {"failed": 3}  # they were unresponsive


async def test_runtime_cancel_stubborn_code_is_given_up_and_others_keep_their_reason() -> None:
    batches = []
    async with rollout.open_rollout(OK.config(limits=LIMITS)) as runtime:
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                prompts = [user("stay", agent_name="staying"), user("x", agent_name="waiting")]
                batches.append(await runtime.generate(prompts))

            tasks.start_soon(call)
            await anyio.sleep(3)
            assert runtime.cancel(reason="enough") == 2
            started = anyio.current_time()
        assert anyio.current_time() == pytest.approx(started + 2, abs=0.01)
    assert [t.reason for t in batches[0].trajectories] == ["unresponsive", "enough"]


@register_agent("waiting")
class Waiting(AgentLoop):
    """Speaks, then waits."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        await anyio.sleep_forever()


async def test_runtime_is_closed_stubborn_code_of_other_tasks_holds_it_for_cleanup_s() -> None:
    errors = []

    async with anyio.create_task_group() as tasks:

        async def call(runtime: Any) -> None:
            try:
                await runtime.generate([user("stay", agent_name="staying"), user("calm")])
            except RolloutError as error:
                errors.append(error)

        async with rollout.open_rollout(OK.config(limits=LIMITS)) as runtime:
            tasks.start_soon(call, runtime)
            await anyio.sleep(3)
            started = anyio.current_time()
        assert anyio.current_time() - started < 3
    assert [t.reason for t in errors[0].partial.trajectories] == ["unresponsive", ""]


async def test_runtime_is_closed_generate_of_another_task_keeps_every_trajectory() -> None:
    errors = []
    scenario = Scenario(seed=1).reply("", filler=1000).timing(base_s=0.01, slope_s=0.0)
    config = scenario.config(scheduling=SchedulingConfig(max_in_flight=16))

    async with anyio.create_task_group() as tasks:

        async def call(runtime: Any) -> None:
            try:
                await runtime.generate([user(str(i)) for i in range(60)])
            except RolloutError as error:
                errors.append(error)

        async with rollout.open_rollout(config) as runtime:
            tasks.start_soon(call, runtime)
            await anyio.sleep(4)
    partial = errors[0].partial
    assert len(partial.samples) == 60
    assert {(s.outcome, s.reason) for s in partial.samples} == {("cancelled", "closed")}
    with_tokens = sum(t.transcript.generated_length > 0 for t in partial.trajectories)
    assert with_tokens == 16


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_sync_tool_that_hangs_leaves_few_threads_however_often_it_is_called(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    @function_tool
    def hang() -> str:
        """Hang."""
        release.wait()
        return ""

    caplog.set_level(logging.ERROR)
    limits = LimitsConfig(generation_s=60, tool_s=0.1, turn_s=60, trajectory_s=60, batch_s=600)
    config = calling("hang").config(
        limits=limits,
        tools=ToolsConfig(max_threads=2, max_abandoned_threads=3),
        scheduling=SchedulingConfig(samples_per_prompt=8),
    )
    async with rollout.open_rollout(config, [hang]) as runtime:
        for _ in range(4):
            batch = await runtime.generate([user("call")])
            assert set(outcomes(batch)) == {"completed"}
        # Threads that run while the cap is reached can still be left: one less than max_threads.
        assert 3 <= runtime.statistics().abandoned_threads["hang"] <= 4
    release.set()


@register_agent("sleeping")
class Sleeping(AgentLoop):
    """Never ends by itself."""

    async def run(self, context: AgentContext) -> None:
        await anyio.sleep_forever()


@BOTH
async def test_cancellation_of_a_caller_reaches_agents_one_after_the_other(
    anyio_backend: str,
) -> None:
    """On asyncio too no scope reaches all of them at once, and each ends as cancelled."""
    count = 60
    prompts = [user("x", agent_name="sleeping") for _ in range(count)]
    sections = {"limits": LIMITS, "scheduling": SchedulingConfig(samples_per_prompt=1)}
    async with rollout.open_rollout(OK.config(**sections)) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: runtime.generate(prompts))
            while runtime.statistics().running < count:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        found = {kind: number for kind, number in runtime.statistics().outcomes.items() if number}
        assert found == {"cancelled": count}


@register_agent("swallows_and_returns")
class SwallowsAndReturns(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await context.generate()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            pass


async def test_agent_swallows_its_limit_and_returns_the_limit_is_its_outcome() -> None:
    batch = await generate([user("x", agent_name="swallows_and_returns")])
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.DEADLINE
    assert trajectory.limit_source == "limits.trajectory_s"
    assert trajectory.generated_length
