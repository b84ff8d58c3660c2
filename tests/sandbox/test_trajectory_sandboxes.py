"""One sandbox a trajectory: opened when it is used, shared, and closed however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import anyio
import pytest

import rollout
from rollout import AgentLoop, Outcome, Prompt, RolloutBatch, register_agent
from rollout.agents import AgentContext
from rollout.config import (
    AgentConfig,
    GroupPolicy,
    LimitsConfig,
    RewardsConfig,
    RolloutConfig,
    SandboxConfig,
    SchedulingConfig,
)
from rollout.errors import (
    ConfigError,
    SandboxLost,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox import ExecResult, Sandbox, SandboxSpec
from rollout.testing import Scenario, tool_call
from rollout.tools import ToolContext, function_tool

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
LIMITS = LimitsConfig(tool_s=5, trajectory_s=60, batch_s=600, reward_s=60, cleanup_s=2)


class FakeSandbox(Sandbox):
    """Files in a dict; ``exec`` of "die" loses it, "sleep" waits, and the rest says its words."""

    def __init__(self, spec: SandboxSpec, name: str) -> None:
        super().__init__(name, workdir=spec.workdir or "/work", env=spec.env)
        self.spec, self.store = spec, {path: str(text) for path, text in spec.files.items()}

    async def _run(self, command: Any) -> ExecResult:
        LOG.append(f"{self.id} runs {command.argv[-1]}")
        if command.argv[-1] == "die":
            raise SandboxLost(f"{self.id} has ended")
        if command.argv[-1] == "sleep":
            await anyio.sleep(1000)
        await anyio.sleep(0.01)
        return ExecResult(exit_code=0, stdout=command.argv[-1].encode())

    async def _read(self, path: str, max_bytes: int) -> bytes:
        if path not in self.store:
            raise FileNotFoundError(2, "No such file", path)
        return self.store[path].encode()

    async def _write(self, path: str, data: bytes, mode: int | None) -> None:
        self.store[path] = data.decode()

    async def _close(self) -> None:
        LOG.append(f"{self.id} closes")
        FakeProvider.open_now.discard(self.id)
        await anyio.sleep(FakeProvider.close_s)


class FakeProvider:
    """Makes `FakeSandbox`."""

    name = "fake"
    max_open = 256
    open_now: ClassVar[set[str]] = set()
    count = most = 0
    open_s = close_s = 0.0
    lack = ""

    async def check(self) -> None:
        LOG.append("check")
        if type(self).lack == "check":
            raise SandboxUnavailable("the fake has no cloud")

    async def open(self, spec: SandboxSpec) -> FakeSandbox:
        kind = type(self)
        if kind.lack == "open":
            raise SandboxUnavailable("the fake is full")
        if spec.image == "windows":
            raise SandboxUnsupported("the fake has no image 'windows'")
        if spec.image == "bug":
            raise ZeroDivisionError("in the provider")
        await anyio.sleep(kind.open_s)
        FakeProvider.count += 1
        made = FakeSandbox(spec, f"fake-{FakeProvider.count}")
        LOG.append(f"{made.id} opens")
        kind.open_now.add(made.id)
        FakeProvider.most = max(FakeProvider.most, len(kind.open_now))
        return made

    async def sweep(self) -> int:
        return 0

    async def close(self) -> None:
        assert not self.open_now
        LOG.append("provider closes")


LOG: list[str] = []
FAKE = "test_trajectory_sandboxes:FakeProvider"


@pytest.fixture(autouse=True)
def fresh_fake() -> Iterator[None]:
    LOG.clear()
    FakeProvider.open_now = set()
    FakeProvider.count = FakeProvider.most = 0
    FakeProvider.open_s = FakeProvider.close_s = 0.0
    FakeProvider.lack = ""
    yield
    assert FakeProvider.open_now == set()


@register_agent("sandbox_worker")
class Worker(AgentLoop):
    """Generates, then does in its sandbox what its prompt says in `extra["do"]`."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        for command in context.prompt.extra.get("do", ()):
            if command == "raise":
                raise ValueError("the agent's own")
            if command == "wait":
                await anyio.sleep(1000)
            elif command == "swallow":
                try:
                    await context.sandbox.exec("die")
                except SandboxLost:
                    LOG.append("swallowed")
            else:
                result = await context.sandbox.exec(command)
                context.extra["said"] = result.stdout.decode()


@function_tool
async def run_command(command: str, context: ToolContext) -> str:
    """Run a command.

    Args:
        command: It.
    """
    return (await context.sandbox.exec(command)).stdout.decode()


def user(uid: str = "p", **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "go"}], uid=uid, **fields)


def doing(*commands: str, uid: str = "p", **extra: Any) -> Prompt:
    return user(uid, extra={"do": commands, **extra})


def config_of(
    scenario: Scenario | None = None,
    *,
    agent: str = "sandbox_worker",
    provider: str = FAKE,
    limits: LimitsConfig = LIMITS,
    sandbox: dict[str, Any] | None = None,
    **scheduling: Any,
) -> RolloutConfig:
    scheduling.setdefault("max_failures", None)
    return (scenario or Scenario(seed=1).reply("", "ok")).config(
        agent=AgentConfig(name=agent),
        limits=limits,
        sandbox=SandboxConfig(provider=provider, **(sandbox or {})),
        scheduling=SchedulingConfig(**scheduling),
    )


async def generate(
    *prompts: Prompt, tools: Any = (), reward: Any = None, **options: Any
) -> RolloutBatch:
    async with rollout.open_rollout(config_of(**options), tools, reward) as runtime:
        batch = await runtime.generate(prompts)
        assert FakeProvider.open_now == set()  # closed when the trajectory is there
        return batch


async def score(trajectory: Any, sandbox: Any) -> float:
    """A reward that looks."""
    LOG.append("reward")
    return float((await sandbox.exec("judge")).exit_code == 0)


async def test_sandbox_unused_is_not_opened() -> None:
    batch = await generate(doing(), provider="auto")
    assert batch.trajectories[0].outcome is Outcome.COMPLETED
    assert "sandboxes" not in batch.trajectories[0].metrics
    await generate(doing())
    assert FakeProvider.count == 0


async def test_sandbox_is_one_for_agent_tool_and_reward_and_closes_after_it() -> None:
    @register_agent("sandbox_sharing")
    class Sharing(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            turn = await context.generate()
            await context.sandbox.write_file("a.txt", "from the agent")
            await context.call_tools(turn.calls)
            await context.generate()

    async def judge(trajectory: Any, sandbox: Any) -> float:
        LOG.append("reward")
        assert await sandbox.read_file("a.txt") == b"from the agent"
        return 0.5

    scenario = Scenario(seed=1).reply("go", tool_call("run_command", command="ls")).then("done")
    async with rollout.open_rollout(
        config_of(scenario, agent="sandbox_sharing"), [run_command], judge
    ) as runtime:
        (trajectory,) = (await runtime.generate([user()])).trajectories
        counts = runtime.statistics().sandboxes
    assert trajectory.reward == 0.5
    assert LOG[-4:] == ["fake-1 runs ls", "reward", "fake-1 closes", "provider closes"]
    assert trajectory.metrics["sandboxes"] == 1
    assert trajectory.metrics["sandbox_wait_s"] >= 0
    assert counts is not None
    assert (counts.opened, counts.closed, counts.open, counts.leaked) == (1, 1, 0, 0)


ENDINGS: dict[str, tuple[Prompt, Outcome, str]] = {
    "completed": (doing("ls"), Outcome.COMPLETED, ""),
    "raised": (doing("ls", "raise"), Outcome.FAILED, "agent"),
    "deadline": (doing("ls", "wait"), Outcome.DEADLINE, "trajectory"),
    "deadline in it": (doing("sleep"), Outcome.DEADLINE, "trajectory"),
    "lost": (doing("ls", "die"), Outcome.FAILED, "sandbox"),
    "lost and swallowed": (doing("swallow"), Outcome.FAILED, "sandbox"),
}


@both
@pytest.mark.parametrize("name", ENDINGS)
async def test_trajectory_ends_its_sandbox_is_closed(name: str) -> None:
    prompt, outcome, reason = ENDINGS[name]
    limits = LimitsConfig(trajectory_s=0.3, batch_s=600, cleanup_s=2)
    (trajectory,) = (await generate(prompt, limits=limits, max_retries=0)).trajectories
    assert (trajectory.outcome, trajectory.reason or reason) == (outcome, reason)
    assert LOG.count("fake-1 closes") == 1
    assert FakeProvider.count == 1


@both
async def test_caller_is_cancelled_sandboxes_are_closed() -> None:
    async with rollout.open_rollout(config_of()) as runtime:
        with anyio.move_on_after(0.2):
            await runtime.generate([doing("ls", "wait", uid=f"p{n}") for n in range(5)])
        assert FakeProvider.count == 5
        assert FakeProvider.open_now == set()
        assert (await runtime.generate([doing("ls")])).trajectories[0].outcome == "completed"


async def test_reward_overruns_sandbox_is_closed() -> None:
    async def late(trajectory: Any, sandbox: Any) -> float:
        await sandbox.exec("sleep")
        return 1.0

    (trajectory,) = (await generate(doing("ls"), reward=late)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.DEADLINE, "reward")
    assert LOG[-2:] == ["fake-1 closes", "provider closes"]


async def test_agent_is_unresponsive_sandbox_is_closed() -> None:
    @register_agent("sandbox_stubborn")
    class Stubborn(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            await context.sandbox.exec("ls")
            with anyio.CancelScope(shield=True):
                await anyio.sleep(100)

    (trajectory,) = (await generate(user(), agent="sandbox_stubborn")).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "unresponsive")
    assert "fake-1 closes" in LOG


@both
async def test_runtime_closes_while_one_opens_nothing_is_left() -> None:
    FakeProvider.open_s = 0.5
    async with rollout.open_rollout(config_of()) as runtime, anyio.create_task_group() as tasks:

        async def call() -> None:
            async with runtime.stream([doing("ls")]) as trajectories:
                async for _ in trajectories:
                    pass

        tasks.start_soon(call)
        await anyio.sleep(0.2)
        tasks.cancel_scope.cancel()
    assert FakeProvider.count == 0
    assert LOG[-1] == "provider closes"


async def test_close_hangs_it_is_given_up_after_cleanup_s() -> None:
    FakeProvider.close_s = 1000
    async with rollout.open_rollout(config_of()) as runtime:
        began = anyio.current_time()
        await runtime.generate([doing("ls")])
        assert anyio.current_time() - began < LIMITS.cleanup_s + 1
        counts = runtime.statistics().sandboxes
        assert counts is not None
        assert counts.leaked == 1


async def test_many_trajectories_few_sandboxes_all_are_closed() -> None:
    FakeProvider.open_s = 0.002
    prompts = [doing("ls", uid=f"p{n}") for n in range(50)]
    options = {"sandbox": {"max_open": 8}}
    async with rollout.open_rollout(config_of(**options), (), score) as runtime:
        batch = await runtime.generate(prompts)
        counts = runtime.statistics().sandboxes
    assert {t.reward for t in batch.trajectories} == {1.0}
    assert FakeProvider.most == 8
    assert counts is not None
    assert (counts.opened, counts.closed, counts.open, counts.leaked) == (50, 50, 0, 0)


async def test_wait_for_room_counts_to_the_trajectory_not_to_the_tool() -> None:
    scenario = Scenario(seed=1).reply("go", tool_call("run_command", command="ls")).then("done")

    async def slow(trajectory: Any, sandbox: Any) -> float:
        await anyio.sleep(20)
        return 1.0

    options = {"agent": "tool_agent", "sandbox": {"max_open": 1}}
    prompts = [user(f"p{n}") for n in range(2)]
    async with rollout.open_rollout(config_of(scenario, **options), [run_command], slow) as runtime:
        batch = await runtime.generate(prompts)
    assert [t.outcome for t in batch.trajectories] == ["completed"] * 2
    assert [t.metrics["tool_errors"] for t in batch.trajectories] == [0, 0]
    assert max(t.metrics["sandbox_wait_s"] for t in batch.trajectories) >= 20


async def test_command_of_a_tool_overruns_the_tool_s_time_counts() -> None:
    FakeProvider.open_s = 30
    scenario = Scenario(seed=1).reply("go", tool_call("run_command", command="sleep")).then("done")
    async with rollout.open_rollout(
        config_of(scenario, agent="tool_agent"), [run_command]
    ) as runtime:
        (trajectory,) = (await runtime.generate([user()])).trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert "timed out after 5 s (limits.tool_s)" in str(trajectory.messages)
    assert 35 <= trajectory.metrics["tool_s"] < 36


async def test_tool_loses_the_sandbox_the_trajectory_fails_and_is_run_again() -> None:
    scenario = Scenario(seed=1).reply("go", tool_call("run_command", command="die")).then("done")
    options: dict[str, Any] = {"scenario": scenario, "agent": "tool_agent", "tools": [run_command]}
    (trajectory,) = (await generate(user(), max_retries=2, **options)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "sandbox")
    assert trajectory.cause is not None
    assert (trajectory.cause.type, trajectory.cause.message) == (
        "SandboxLost",
        "fake-3 has ended",
    )
    assert (trajectory.trainable, trajectory.reward) == (False, None)
    assert trajectory.metrics["attempts"] == 3
    closes = [line for line in LOG if line.endswith(("opens", "closes"))]
    assert closes[:3] == ["fake-1 opens", "fake-1 closes", "fake-2 opens"]


async def test_sandbox_cannot_be_opened_the_trajectory_fails_by_name() -> None:
    prompts = [
        doing("ls", uid="supported"),
        doing("ls", uid="unsupported", sandbox={"image": "windows"}),
        doing("ls", uid="bug", sandbox={"image": "bug"}),
    ]
    rows = (await generate(*prompts)).trajectories
    assert [(t.outcome, t.reason) for t in rows[1:]] == [(Outcome.FAILED, "sandbox")] * 2
    causes = [t.cause and (t.cause.type, t.cause.message) for t in rows]
    assert causes == [
        None,
        ("SandboxUnsupported", "the fake has no image 'windows'"),
        ("SandboxUnavailable", "no sandbox: ZeroDivisionError: in the provider"),
    ]


async def test_named_provider_cannot_be_used_opening_says_so() -> None:
    FakeProvider.lack = "check"
    with pytest.raises(SandboxUnavailable, match="the fake has no cloud"):
        await generate(doing())
    with pytest.raises(ConfigError, match="No module named"):
        await generate(doing(), provider="missing_package.module:factory")


async def test_prompt_names_another_image_and_files_they_are_merged() -> None:
    seen: list[SandboxSpec] = []

    async def look(trajectory: Any, sandbox: Any) -> float:
        seen.append(sandbox.spec)
        return len(await sandbox.read_file("/tests/a.py"))

    given = {"image": "other", "files": {"/tests/a.py": "pass"}, "env": {"B": "2"}, "user": None}
    batch = await generate(
        doing(sandbox=given),
        reward=look,
        sandbox={"image": "base", "env": {"A": "1"}, "workdir": "/repo", "user": "me"},
    )
    assert batch.trajectories[0].reward == 4.0
    assert (seen[0].image, seen[0].workdir, seen[0].user) == ("other", "/repo", "me")
    assert seen[0].env == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"imgae": "x"}, "sandbox.imgae = 'x': unknown key"),
        ("busybox", "expected a mapping"),
    ],
)
async def test_prompt_says_wrongly_what_it_needs_it_is_refused(given: Any, words: str) -> None:
    (wrong, right) = (
        await generate(doing("ls", sandbox=given), doing("ls", uid="right"))
    ).trajectories
    assert (wrong.outcome, wrong.reason) == (Outcome.REJECTED, "bad_sandbox")
    assert wrong.cause is not None
    assert words in wrong.cause.message
    assert len(wrong.transcript) == 0
    assert right.outcome is Outcome.COMPLETED


async def sync_free_reward(trajectory: Any, sandbox: Any) -> float:
    return 1.0


async def test_rewards_that_can_have_no_sandbox_are_refused() -> None:
    async def of_group(group: Any, sandbox: Any = None) -> list[float]:
        return []

    def sync(trajectory: Any, sandbox: Any) -> float:
        return 1.0

    def opened(config: RolloutConfig | None = None, **options: Any) -> Any:
        return rollout.open_rollout(config or config_of(), **options)

    processes = Scenario(seed=1).config(rewards=RewardsConfig(processes=1))
    for runtime, words in (
        (opened(processes, reward=sync_free_reward), "rewards.processes = 0, not 1"),
        (opened(group_reward=of_group), "group_reward = .*of_group.*names sandbox"),
        (opened(reward=sync), "is not async"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with runtime:
                pass


async def test_fresh_sandbox_gets_the_artifacts_and_nothing_else() -> None:
    async def judge(trajectory: Any, sandbox: Any) -> float:
        await sandbox.write_file("answer.txt", "42")
        await sandbox.write_file("evil.txt", "1")
        async with sandbox.fresh(artifacts=["answer.txt"]) as other:
            assert other.id != sandbox.id
            assert await other.read_file("answer.txt") == b"42"
            with pytest.raises(FileNotFoundError):
                await other.read_file("evil.txt")
        with pytest.raises(SandboxLost):
            await other.exec("ls")
        with pytest.raises(FileNotFoundError):
            async with sandbox.fresh(artifacts=["missing"]):
                pass
        return 1.0

    # With room for one, since a judge must not wait for its own trajectory.
    batch = await generate(doing("ls"), reward=judge, sandbox={"max_open": 1})
    assert batch.trajectories[0].reward == 1.0, batch.trajectories[0].cause
    assert batch.trajectories[0].metrics["sandboxes"] == 2


async def test_carried_trajectory_keeps_its_sandbox_and_explain_names_it() -> None:
    @register_agent("sandbox_carried")
    class Carried(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.sandbox.write_file("kept", "yes")
            await context.generate()
            context.extra["kept"] = (await context.sandbox.read_file("kept")).decode()

    scenario = (
        Scenario(seed=1)
        .reply("slow", filler=3000)
        .reply("", filler=20)
        .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
    )
    config = config_of(
        scenario,
        agent="sandbox_carried",
        groups=GroupPolicy(surplus="carry", oversample=2.0),
    )
    words = ("slow", "quick", "quick", "quick")
    source = iter(
        Prompt(messages=[{"role": "user", "content": word}], uid=f"p{n}")
        for n, word in enumerate(words)
    )
    async with rollout.open_rollout(config) as runtime:
        first = await runtime.collect(source, 1, step=0)
        assert [t.uid for t in first.trajectories] == ["p1"]
        (waiting,) = runtime.explain().carried
        assert waiting.sandbox in FakeProvider.open_now
        assert f"p0/0 with sandbox {waiting.sandbox}" in str(runtime.explain())
        second = await runtime.collect(source, 1, step=1, policy=GroupPolicy(oversample=1.0))
        (kept,) = second.trajectories
        assert (kept.uid, kept.extra["kept"]) == ("p0", "yes")
        assert waiting.sandbox not in FakeProvider.open_now


async def test_sandbox_opens_explain_says_that_it_is_waited_for() -> None:
    FakeProvider.open_s = 30
    async with rollout.open_rollout(config_of()) as runtime, anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.generate, [doing("ls")])
        await anyio.sleep(10)
        assert "its sandbox, for" in str(runtime.explain())
