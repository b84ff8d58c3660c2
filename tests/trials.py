"""Random batches under random faults, limits and cancellations; a seed determines a trial."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import attrs
import pytest

import race_situations  # noqa: F401  (its agents)
import rollout
from harness.recorder import Recorder
from rollout import AgentLoop, GroupPolicy, Prompt, Trajectory, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LimitsConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    SimulatedEngine,
    ToolsConfig,
)
from rollout.engine import DiskWeights
from rollout.engine.cores.simulated.stable import stable_share
from rollout.engine.placement.in_process import InProcess
from rollout.interactions import ScriptedUser
from rollout.testing import Scenario, run_virtual, tool_call
from rollout.tools import Tool, ToolContext, ToolSession
from rollout.types import ToolCall

T = TypeVar("T")


class Dice:
    """Named throws that a seed determines: a new throw changes no other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def share(self, name: str) -> float:
        return stable_share(self._seed, name)

    def chance(self, name: str, probability: float) -> bool:
        return self.share(name) < probability

    def pick(self, name: str, options: Sequence[T]) -> T:
        return options[int(self.share(name) * len(options))]

    def between(self, name: str, low: float, high: float) -> float:
        return round(low + (high - low) * self.share(name), 3)

    def count(self, name: str, low: int, high: int) -> int:
        return low + int(self.share(name) * (high - low + 1))


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await anyio.sleep(0.05)
    return a + b


@function_tool
async def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await anyio.sleep(seconds)
    return "rested"


@function_tool
async def broken() -> str:
    """Fail."""
    await anyio.sleep(0.01)
    raise RuntimeError("out of order")


@register_agent("impatient")
class Impatient(AgentLoop):
    """Cuts its first generation short with a scope of its own, and continues."""

    async def run(self, context: AgentContext) -> None:
        with anyio.move_on_after(0.3):
            await context.generate()
        if context.transcript.spans:
            context.observe([{"role": "user", "content": "Shorter."}])
            await context.generate()


@register_agent("stubborn")
class Stubborn(AgentLoop):
    """Speaks again where its engine fails, and crashes in the end."""

    async def run(self, context: AgentContext) -> None:
        for _ in range(2):
            try:
                await context.generate()
            except rollout.EngineError:
                await anyio.sleep(0.1)
        raise LookupError("lost my keys")


#: Agents whose words depend on time.
TIMED = ("impatient", "stubborn")


class Shelf(Tool):
    """A stateful tool that takes its time to open and to close, and gives rewards."""

    name = "shelf"
    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "shelf", "description": "Count calls.", "parameters": {}},
    }

    async def open(self, context: ToolContext) -> ToolSession:
        await anyio.sleep(0.03)
        return _ShelfSession()


class _ShelfSession(ToolSession):
    def __init__(self) -> None:
        self._calls = 0

    async def execute(self, call: ToolCall) -> Any:
        self._calls += 1
        await anyio.sleep(0.1)
        return {"calls": self._calls}, 0.5

    async def calc_reward(self) -> float:
        await anyio.sleep(0.02)
        return float(self._calls)

    async def close(self) -> None:
        await anyio.sleep(0.2)


#: Virtual seconds after which a trial hangs; none takes as long.
CEILING_S = 3000.0
TOOLS = (add, nap, broken, Shelf())
CALLS = {
    "sum": tool_call("add", a=2, b=3) + tool_call("nap", seconds=0.2) + tool_call("add", a=1, b=1),
    "hang": tool_call("nap", seconds=10_000.0),
    "fail": tool_call("broken") + tool_call("add", a="x", b=1) + tool_call("unknown"),
    "shelf": tool_call("shelf") + tool_call("shelf"),
    "invalid": "<tool_call>\n{not json}\n</tool_call>",
}
KINDS = (*CALLS, "talk", "endless", "dialogue")
BAD = ("empty", "nobody", "long", "hot")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.1, "max_new_tokens": 30},
    {"greedy": True},
    {"stop_token_ids": (ord("."),)},
    {"top_log_probs": 2},
)


def scenario_of(dice: Dice, *, is_calm: bool) -> Scenario:
    scenario = Scenario(
        seed=dice.count("scenario", 0, 999),
        stream_interval=dice.pick("interval", (1, 5, 16, 64)),
        weight_version=dice.count("version", 0, 3),
    )
    for kind, text in CALLS.items():
        filler = dice.count(f"{kind} filler", 0, 40)
        scenario = scenario.reply(f"<{kind}>", text, filler=filler)
        if dice.chance(f"{kind} again", 0.3):
            scenario = scenario.then(CALLS["sum"], "No more.")
        scenario = scenario.then("Done.", "That is it.")
    scenario = (
        scenario.reply("<talk>", filler={"median": 30, "sigma": 0.8, "max": 150})
        .reply("<endless>", finish="length")
        .reply("<dialogue>", "Hello.", filler=10)
        .then("Again.", "Once more.")
    )
    return scenario if is_calm else _with_faults(scenario, dice)


def _with_faults(scenario: Scenario, dice: Dice) -> Scenario:
    options: dict[str, dict[str, Any]] = {
        "death": {"die_after_tokens": dice.count("die at", 20, 600)},
        "reject": {"reject_share": dice.between("reject", 0, 0.5)},
        "double": {"duplicate_answers": dice.between("double", 0, 1)},
        "reorder": {"reordered_answers": dice.between("reorder", 0, 0.3)},
        "wrong": {"wrong_length": dice.between("wrong", 0, 0.3)},
        "lose": {"lost_aborts": dice.count("lose", 1, 4)},
        "freeze": {
            "freeze_at_s": dice.between("freeze at", 0.1, 3),
            "freeze_s": dice.between("freeze", 0.1, 15),
        },
        "late": {"start_delay_s": dice.between("late", 0, 3)},
    }
    for name, fault in options.items():
        if dice.chance(f"has {name}", 0.15):
            scenario = scenario.fault(**fault)
    if dice.chance("one only", 0.5):
        scenario = scenario.fault(replicas=(0,))
    if dice.chance("small memory", 0.2):
        scenario = scenario.kv(tokens=dice.count("kv", 1500, 4000))
    if dice.chance("small engine", 0.2):
        running, queued = dice.count("running", 1, 3), dice.count("queued", 0, 3)
        scenario = scenario.capacity(max_running=running, max_queued=queued)
    if dice.chance("slow engine", 0.2):
        scenario = scenario.timing(base_s=dice.between("base", 0, 0.05), prefill_tokens_per_s=2000)
    return scenario


def limits_of(dice: Dice, *, is_calm: bool) -> LimitsConfig:
    tool_s = dice.pick("tool_s", (0.1, 1.0, 5.0))
    if is_calm:
        return LimitsConfig(tool_s=tool_s)
    bounds: dict[str, Any] = {"batch_s": 400.0, "trajectory_s": 200.0, "turn_s": 90.0}
    for name in ("batch_s", "trajectory_s", "turn_s"):
        if dice.chance(f"short {name}", 0.25):
            bounds[name] = dice.between(name, 0.2, 6.0)
    trajectory_s = min(bounds["trajectory_s"], bounds["batch_s"])
    turn_s = min(bounds["turn_s"], trajectory_s)
    return LimitsConfig(
        batch_s=bounds["batch_s"],
        trajectory_s=trajectory_s,
        turn_s=turn_s,
        generation_s=min(turn_s, dice.pick("generation_s", (0.5, 60.0, 60.0, 60.0))),
        tool_s=min(tool_s, turn_s),
        reward_s=dice.pick("reward_s", (0.05, 5.0, 5.0)),
        cleanup_s=dice.pick("cleanup_s", (0.1, 5.0)),
    )


def config_of(dice: Dice, *, is_calm: bool = False) -> RolloutConfig:
    """The trial's configuration; the calm one has no faults and nothing that cuts."""
    turns = None if is_calm else dice.pick("turns", (1, 3, 8))
    response = 4000 if is_calm or dice.chance("long", 0.7) else dice.count("response", 20, 600)
    return scenario_of(dice, is_calm=is_calm).config(
        engine=SimulatedEngine(
            replicas=1 if is_calm else dice.count("replicas", 1, 3),
            routed_experts=dice.chance("experts", 0.2),
        ),
        agent=AgentConfig(
            max_assistant_turns=turns or 8,
            max_tool_calls=None if is_calm else dice.pick("calls", (2, 256)),
            max_consecutive_errors=None if is_calm else dice.pick("errors", (2, 16)),
            max_parallel_calls=dice.pick("parallel", (1, 2, 8)),
        ),
        tools=ToolsConfig(max_response_length=dice.pick("answer", (20, 4096))),
        sampling=SamplingConfig(
            max_new_tokens=160, top_log_probs=dice.pick("top", (0, 0, 0, 1, 3))
        ),
        # Without the bound, so that some generations end by being ended alone.
        validation_sampling=SamplingConfig(greedy=True, max_new_tokens=None),
        lengths=LengthsConfig(prompt=2000, response=response),
        limits=limits_of(dice, is_calm=is_calm),
        scheduling=SchedulingConfig(
            samples_per_prompt=dice.count("samples", 1, 3),
            validation_samples_per_prompt=2,
            max_in_flight=1024 if is_calm else dice.pick("in flight", (1, 3, 1024)),
            max_retries=0 if is_calm else dice.pick("retries", (0, 2, 10)),
            max_failures=None if is_calm else dice.pick("failures", (0, 16, None)),
            on_deadline="partial" if is_calm else dice.pick("at end", ("partial", "drop", "raise")),
            trainable=dice.pick(
                "trainable", (("completed", "length", "limit"), ("completed", "deadline"))
            ),
        ),
    )


def prompts_of(dice: Dice, call: int = 0) -> list[Prompt]:
    prompts = []
    for index in range(dice.count(f"prompts {call}", 1, 4)):
        name = f"{call}.{index}"
        kind = dice.pick(f"kind {name}", KINDS)
        fields: dict[str, Any] = {}
        if kind == "dialogue":
            fields["extra"] = {"interaction_kwargs": {"name": "critic"}}
        if dice.chance(f"timed {name}", 0.1):
            fields["agent_name"] = dice.pick(f"agent {name}", TIMED)
        elif dice.chance(f"tree {name}", 0.15):
            fields["agent_name"] = "tree"
        if dice.chance(f"own sampling {name}", 0.3):
            fields["sampling"] = dice.pick(f"sampling {name}", SAMPLING)
        messages = [{"role": "user", "content": f"<{kind}> {name}"}]
        if dice.chance(f"bad {name}", 0.08):
            bad = dice.pick(f"how {name}", BAD)
            messages = [] if bad == "empty" else messages
            fields |= {"agent_name": "nobody"} if bad == "nobody" else {}
            fields |= {"sampling": {"temperature": -1}} if bad == "hot" else {}
            messages = [{"role": "user", "content": "x" * 9000}] if bad == "long" else messages
        prompts.append(Prompt(messages=messages, uid=name, **fields))
    return prompts


def reward_of(dice: Dice) -> Any:
    kind = dice.pick("reward", ("none", "quick", "slow", "failing"))

    async def reward(trajectory: Trajectory) -> float:
        if kind == "slow":
            await anyio.sleep(dice.between("reward takes", 0, 0.2))
        if kind == "failing" and trajectory.member == 1:
            raise ValueError("cannot say")
        return float(len(trajectory.answer))

    return None if kind == "none" else reward


ACTS = (
    "generate",
    "validate",
    "two",
    "cancel caller",
    "cancel some",
    "stream",
    "slow stream",
    "leave stream",
    "close",
    "close stream",
    "pause",
    "pause and cancel",
)


@contextmanager
def _network(dice: Dice) -> Iterator[None]:
    """Engines behind connections with latency and short reads, in some trials."""
    slow = partial(
        InProcess,
        latency_s=dice.pick("latency", (0.0, 0.0, 0.001, 0.03)),
        max_read=dice.pick("max read", (None, None, 7, 100)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.engine.pool.opening.InProcess", slow)
        yield


@attrs.define
class Trial:
    """One trial: what its callers do."""

    seed: int

    @property
    def dice(self) -> Dice:
        return Dice(self.seed)

    @property
    def act(self) -> str:
        return self.dice.pick("act", ACTS)

    async def run(self, recorder: Recorder) -> None:
        dice = self.dice
        try:
            with _network(dice):
                await self._run(recorder, dice)
        except* rollout.RolloutError:
            pass  # a named error is a way for a call to end; the recorder has noted it

    async def _run(self, recorder: Recorder, dice: Dice) -> None:
        async with anyio.create_task_group() as tasks:
            async with self._open(recorder, config_of(dice)) as runtime:
                if dice.chance("kill", 0.2):
                    tasks.start_soon(self._kill, recorder)
                act = getattr(self, "_" + self.act.replace(" ", "_"))
                await act(runtime, tasks)

    async def run_calmly(self, recorder: Recorder) -> None:
        """The same prompts, with nothing that disturbs or cuts them."""
        async with self._open(recorder, config_of(self.dice, is_calm=True)) as runtime:
            for call in range(2 if self.act in ("two", "cancel caller") else 1):
                validate = self.act == "validate"
                with suppress(rollout.PromptError):  # nobody whom its prompts name is registered
                    await runtime.generate(
                        prompts_of(self.dice, call), step=call, validate=validate
                    )

    def _open(self, recorder: Recorder, config: RolloutConfig) -> Any:
        critic = ScriptedUser(["Try again."], name="critic", scores=[0.5])
        return recorder.open_rollout(config, TOOLS, reward_of(self.dice), [critic])

    async def _kill(self, recorder: Recorder) -> None:
        await anyio.sleep(self.dice.between("killed at", 0, 3))
        for core in recorder.engines_alive()[:1]:
            core.kill()

    async def _generate(self, runtime: Any, tasks: Any) -> None:
        await runtime.generate(prompts_of(self.dice), step=0)

    async def _validate(self, runtime: Any, tasks: Any) -> None:
        await runtime.generate(prompts_of(self.dice), step=0, validate=True)

    async def _two(self, runtime: Any, tasks: Any) -> None:
        async with anyio.create_task_group() as both:
            for call in range(2):
                both.start_soon(self._quietly, runtime, call)

    async def _quietly(self, runtime: Any, call: int) -> None:
        try:
            await runtime.generate(prompts_of(self.dice, call), step=call)
        except rollout.RolloutError:
            return

    async def _cancel_caller(self, runtime: Any, tasks: Any) -> None:
        with anyio.move_on_after(self.dice.between("cancelled at", 0, 4)):
            await self._generate(runtime, tasks)
        await self._quietly(runtime, 1)  # the runtime must be as good as new

    async def _cancel_some(self, runtime: Any, tasks: Any) -> None:
        async def cancel() -> None:
            for turn in range(2):
                await anyio.sleep(self.dice.between(f"cancel {turn}", 0, 2))
                uid = self.dice.pick(f"whom {turn}", (None, "0.0", "0.1"))
                member = self.dice.pick(f"member {turn}", (None, 0, 1))
                runtime.cancel(uid, member, reason=f"reason {turn}")

        async with anyio.create_task_group() as both:
            both.start_soon(cancel)
            await self._quietly(runtime, 0)

    async def _stream(self, runtime: Any, tasks: Any) -> None:
        async with runtime.stream(prompts_of(self.dice), step=0) as trajectories:
            async for _ in trajectories:
                pass

    async def _slow_stream(self, runtime: Any, tasks: Any) -> None:
        async with runtime.stream(prompts_of(self.dice), step=0) as trajectories:
            async for _ in trajectories:
                await anyio.sleep(self.dice.between("slow", 0, 2))

    async def _leave_stream(self, runtime: Any, tasks: Any) -> None:
        left = self.dice.count("leave after", 0, 3)
        async with runtime.stream(prompts_of(self.dice), step=0) as trajectories:
            while left:
                left -= 1
                try:
                    await trajectories.receive()
                except anyio.EndOfStream:
                    return

    async def _close(self, runtime: Any, tasks: Any) -> None:
        tasks.start_soon(self._quietly, runtime, 0)
        await anyio.sleep(self.dice.between("closed at", 0, 3))

    async def _close_stream(self, runtime: Any, tasks: Any) -> None:
        async def consume() -> None:
            try:
                await self._slow_stream(runtime, tasks)
            except rollout.RolloutError:
                return

        tasks.start_soon(consume)
        await anyio.sleep(self.dice.between("closed at", 0, 3))

    async def _pause_and_cancel(self, runtime: Any, tasks: Any) -> None:
        async def pause() -> None:
            await anyio.sleep(self.dice.between("paused at", 0, 1))
            runtime.admission.pause()
            await anyio.sleep(self.dice.between("cancelled at", 0, 1))
            runtime.cancel(reason="enough")

        async with anyio.create_task_group() as both:
            both.start_soon(pause)
            await self._quietly(runtime, 0)
            both.cancel_scope.cancel()

    async def _pause(self, runtime: Any, tasks: Any) -> None:
        async def pause() -> None:
            await anyio.sleep(self.dice.between("paused at", 0, 1))
            runtime.admission.pause()
            await anyio.sleep(self.dice.between("paused for", 0, 5))
            runtime.admission.resume()

        async with anyio.create_task_group() as both:
            both.start_soon(pause)
            await self._quietly(runtime, 0)


def policy_of(dice: Dice, call: int, **fields: Any) -> GroupPolicy:
    """What a call of groups wants."""
    if dice.chance("some members", 0.3):
        fields["members"] = 1
    if dice.chance(f"late groups {call}", 0.3):
        fields["group_s"] = dice.between(f"group_s {call}", 0.2, 6.0)
        fields["on_group_deadline"] = dice.pick(f"late {call}", ("keep", "drop", "refill"))
    if dice.chance(f"choosy {call}", 0.3):
        fields["accept"] = lambda group: dice.share(f"takes {group.uid}") < 0.7
    return GroupPolicy(
        oversample=dice.pick(f"oversample {call}", (1.0, 1.5, 3.0)),
        refill_failed=dice.chance(f"refill {call}", 0.5),
        max_refused=dice.pick(f"refused {call}", (1, None)),
        **fields,
    )


class GroupTrial(Trial):
    """One trial of a trainer that takes groups."""

    @property
    def act(self) -> str:
        return self.dice.pick(
            "act of groups", ("collect", "carry", "stream groups", "two trainers")
        )

    async def _collect(self, runtime: Any, tasks: Any) -> None:
        async with self._disturbed(runtime):
            await self._collect_all(runtime, "cancel")

    @asynccontextmanager
    async def _disturbed(self, runtime: Any) -> AsyncIterator[None]:
        """Other calls take places meanwhile, and somebody cancels what runs or is carried."""
        async with anyio.create_task_group() as others:
            others.start_soon(self._take_places, runtime)
            others.start_soon(self._cancel, runtime)
            yield

    async def _take_places(self, runtime: Any) -> None:
        for call in (7, 8):
            await anyio.sleep(self.dice.between(f"others {call}", 0, 4))
            if self._has_others:
                await self._quietly(runtime, call)

    @property
    def _has_others(self) -> bool:
        return self.dice.chance("others", 0.4)

    async def _cancel(self, runtime: Any) -> None:
        for turn in range(2):
            await anyio.sleep(self.dice.between(f"cancel {turn}", 0, 6))
            if self.dice.chance(f"cancels {turn}", 0.3):
                uid = self.dice.pick(f"whom {turn}", (None, None, "0.0", "0.1"))
                member = self.dice.pick(f"member {turn}", (None, None, 0, 1))
                runtime.cancel(uid, member, reason=f"reason {turn}")

    async def _carry(self, runtime: Any, tasks: Any) -> None:
        tasks.start_soon(self._change_weights, runtime)
        async with self._disturbed(runtime):
            await self._collect_all(runtime, "carry")
        if self.dice.chance("discard", 0.5):
            await runtime.discard_carried()

    async def _two_trainers(self, runtime: Any, tasks: Any) -> None:
        """They have a source each, or one of both."""
        tasks.start_soon(self._change_weights, runtime)
        first = iter(prompts_of(self.dice))
        second = first if self.dice.chance("one source", 0.5) else iter(prompts_of(self.dice, 5))
        async with self._disturbed(runtime), anyio.create_task_group() as both:
            for number, source in enumerate((first, second)):
                surplus = self.dice.pick(f"surplus {number}", ("cancel", "carry", "carry"))
                both.start_soon(self._collect_from, runtime, surplus, source, 10 * number)

    async def _collect_all(self, runtime: Any, surplus: str) -> None:
        await self._collect_from(runtime, surplus, iter(prompts_of(self.dice)))

    async def _collect_from(
        self, runtime: Any, surplus: str, source: Iterator[Prompt], first: int = 0
    ) -> None:
        """Steps of a trainer until the prompts are used up, or nearly."""
        for call in range(first, first + self.dice.count(f"calls {first}", 1, 4)):
            policy = policy_of(self.dice, call, surplus=surplus)
            groups = self.dice.count(f"groups {call}", 1, 2)
            try:
                with anyio.move_on_after(self.dice.pick(f"patience {call}", (2.0, 1000.0, 1000.0))):
                    await runtime.collect(source, groups, policy=policy, step=0)
            except rollout.RolloutError:
                continue
            await anyio.sleep(self.dice.between(f"training {call}", 0, 3))

    async def _change_weights(self, runtime: Any) -> None:
        limits = runtime.config.limits
        if min(limits.generation_s, limits.turn_s) < 10 or self._has_others:
            return  # the time of an update is not theirs, and who watches from outside cannot tell
        for version in range(10, 13):
            await anyio.sleep(self.dice.between(f"weights {version}", 0, 3))
            try:
                if self.dice.chance(f"sleeps {version}", 0.3):
                    await runtime.sleep()
                    await anyio.sleep(0.5)
                    await runtime.wake_up()
                await runtime.update_weights(version=version, source=DiskWeights("."))
            except rollout.RolloutError:
                return

    async def _stream_groups(self, runtime: Any, tasks: Any) -> None:
        source = iter(prompts_of(self.dice))
        surplus = self.dice.pick("surplus", ("cancel", "carry"))
        tasks.start_soon(self._change_weights, runtime)
        async with self._disturbed(runtime):
            await self._stream_twice(runtime, source, surplus)

    async def _stream_twice(self, runtime: Any, source: Any, surplus: Any) -> None:
        for call in range(2):
            policy = policy_of(self.dice, call, surplus=surplus)
            left = self.dice.count(f"leave after {call}", 0, 3)
            try:
                async with runtime.stream_groups(source, policy=policy, step=0) as groups:
                    async for _ in groups:
                        await anyio.sleep(self.dice.between("slow", 0, 1))
                        left -= 1
                        if left <= 0:
                            break
            except rollout.RolloutError:
                continue


def findings(
    seed: int, *, schedule_seed: int = 0, kind: type[Trial] = Trial
) -> tuple[list[str], Recorder]:
    """What is wrong with a trial, and who watched it; an error or a hang is a finding too."""
    recorder = Recorder()
    try:
        run_virtual(kind(seed).run, recorder, seed=schedule_seed, ceiling_s=CEILING_S)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], recorder
    return recorder.anomalies(), recorder
