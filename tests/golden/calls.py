"""Kinds of golden runs about calls: groups, carried work, limits of time, cancelling, weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import rollout
from golden.material import (
    STAGES,
    STUCK,
    WAIT,
    add,
    config_of,
    endless,
    held_config_of,
    scenario_of,
    stage_tools,
    user,
)
from golden.rows import call_of
from golden.stage import HELD_TOKENS, HeldCore, Stage, elapse
from rollout import (
    AgentConfig,
    ChannelConfig,
    DiskWeights,
    Group,
    GroupPolicy,
    LimitExceeded,
    LimitsConfig,
    RecoveryConfig,
    SchedulingConfig,
    SimulatedEngine,
    Trajectory,
)
from rollout.testing import tool_call

if TYPE_CHECKING:
    from rollout import RolloutBatch, RolloutRuntime

Calls = list[dict[str, Any]]
#: The simulated engine takes whatever is there.
WEIGHTS = DiskWeights(str(Path(__file__).parent))
#: Past a limit, and before any other.
PAST_S = 1.0
#: Time jumps on asyncio: silence meanwhile says nothing.
PATIENT = ChannelConfig(heartbeat_timeout_s=1e6)


def new_stage() -> Stage:
    """That of the run, for its tools, agents and engines."""
    stage = HeldCore.stage = STAGES["it"] = Stage()
    return stage


async def score(trajectory: Trajectory) -> float:
    """Of the length of all that was sampled; says that the trajectory has ended."""
    STAGES["it"].note("ended")
    STAGES["it"].note(f"ended {trajectory.uid}")
    return trajectory.generated_length / 128


async def groups(seed: int) -> Calls:
    """Groups that are refused, cut short, restarted; the order in which they end is given."""
    stage = new_stage()
    scenario = (
        scenario_of(seed)
        .reply("slow", STUCK, filler=6)
        .reply("", filler={"median": 14, "sigma": 0.5, "max": 40})
    )
    kind = seed % 4
    policies: tuple[dict[str, Any], ...] = (
        {"accept": accept_even},
        {"members": 2},
        {"accept": accept_even, "max_refused": 1},
        {"group_s": 50.0, "on_group_deadline": ("keep", "drop", "refill")[seed // 4 % 3]},
    )

    def text_of(number: int) -> str:
        if kind == 1:
            return "go"
        return "slow" if kind == 3 and number == 1 else "go"

    config = config_of(
        scenario,
        channel=PATIENT,
        scheduling=SchedulingConfig(
            samples_per_prompt=3 if kind == 1 else 2,
            max_in_flight=3 if kind == 1 else 2,
        ),
    )
    policy, source = GroupPolicy(**policies[kind]), endless(text_of)
    reward = (score_in_order, score_alone, score_in_order, score)[kind]
    async with rollout.open_rollout(config, stage_tools(stage), reward) as runtime:
        async with anyio.create_task_group() as tasks:
            if kind == 3:
                tasks.start_soon(pass_limit, runtime, stage, "stuck", 50.0)
            calls = [
                await collected(runtime, source, 3, step, policy=policy)
                for step in range(1 if kind == 2 else 2)
            ]
    return calls


async def score_alone(trajectory: Trajectory) -> float:
    """The third member of a group ends last, and is not waited for."""
    stage = STAGES["it"]
    if trajectory.member == 2:
        await stage.pass_gate("never")
    return trajectory.generated_length / 128


def accept_even(group: Group) -> bool:
    """By what was sampled."""
    return sum(t.generated_length for t in group.trajectories) % 2 == 0


async def collected(
    runtime: RolloutRuntime, source: Any, wanted: int, step: int, **options: Any
) -> dict[str, Any]:
    """A call of `collect`; where it fails, what there was."""
    batch: RolloutBatch | None
    try:
        batch, error = await runtime.collect(source, wanted, step=step, trim=True, **options), None
    except LimitExceeded as exceeded:
        batch, error = exceeded.partial, exceeded
    assert batch is not None
    return call_of(f"collect step {step}", batch, error)


async def carried(seed: int) -> Calls:
    """What runs at the end of a call continues in the next one, under other weights."""
    stage = new_stage()
    scenario = scenario_of(seed, stream_interval=HELD_TOKENS)
    is_held = seed % 2 == 1  # within a generation, or between two turns
    event = "seen" if is_held else "gate"
    scenario = (
        scenario.reply("user\nlate", tool_call("after", event=event, count=4), filler=4)
        .then("Late.", "Later.")
        .reply("hold", filler=20 + seed)
        .reply("user\ngate", WAIT, filler=10)
        .then(tool_call("add", a=seed, b=1), "No more.")
        .then("The end.")
        .reply("", filler=10)
    )
    make = held_config_of if is_held else config_of
    config = make(
        scenario,
        agent=AgentConfig(name="golden_watched"),
        scheduling=SchedulingConfig(
            samples_per_prompt=2, groups=GroupPolicy(surplus="carry", oversample=2.0)
        ),
    )
    first = "hold" if is_held else "gate"
    source = endless(lambda number: first if number < 2 else "late" if number < 4 else "go")
    once = GroupPolicy(oversample=1.0)
    async with rollout.open_rollout(config, [add, *stage_tools(stage)], score) as runtime:
        calls = [await collected(runtime, source, 2, 0)]
        if seed % 4 > 1:
            await runtime.sleep()
        await runtime.update_weights(version=seed + 1, source=WEIGHTS)
        if seed % 4 > 1:
            await runtime.wake_up()
        stage.open("gate")
        stage.open("held")
        calls.append(await collected(runtime, source, 2, 1, policy=once))
        await runtime.update_weights(version=seed + 2, source=WEIGHTS)
        calls.append(await collected(runtime, source, 1, 2, policy=once))
    return calls


async def streamed_groups(seed: int) -> Calls:
    """Asynchronous training: groups as old as may be."""
    stage = new_stage()
    staleness, each = seed % 3, 1 + seed % 2
    scenario = (
        scenario_of(seed)
        .reply("", tool_call("add", a=1, b=2), "Nothing.", filler={"median": 8, "max": 30})
        .then("It is 3.")
    )
    config = config_of(
        scenario, scheduling=SchedulingConfig(samples_per_prompt=2, max_in_flight=64)
    )
    source, calls = endless(lambda number: f"question {number}"), []
    async with rollout.open_rollout(config, [add], score_in_order) as runtime:
        async with runtime.stream_groups(
            source, step=3, max_staleness=staleness, groups_per_step=each
        ) as stream:
            for version in range(1, 4):
                # All that may begin under these weights has ended under them.
                await stage.until("ended", 2 * each * (staleness + version))
                taken = [await anext(stream) for _ in range(each)]
                call = call_of(f"version {version - 1}", await runtime.make_batch(taken))
                call["versions"] = [[group.min_version, group.max_version] for group in taken]
                calls.append(call)
                await runtime.update_weights(version=version, source=WEIGHTS)
    return calls


async def score_in_order(trajectory: Trajectory) -> float:
    """Groups of two end in the order of their prompts."""
    number = int(trajectory.uid.removeprefix("p"))
    if number:
        await STAGES["it"].until(f"ended p{number - 1}", 2)
        await anyio.wait_all_tasks_blocked()  # their rewards are called, and reach their group now
    return await score(trajectory)


#: Name, limits, seconds.
LIMITS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tool_s", {"tool_s": 30.0}),
    ("turn_s", {"tool_s": None, "turn_s": 40.0}),
    ("trajectory_s", {"tool_s": None, "turn_s": None, "trajectory_s": 50.0}),
    ("batch_s", {"tool_s": None, "turn_s": None, "trajectory_s": None, "batch_s": 60.0}),
    ("generation_s", {"generation_s": 20.0}),
    ("reward_s", {"reward_s": 25.0}),
    ("batch_s", {"tool_s": None, "turn_s": None, "trajectory_s": None, "batch_s": 60.0}),
    ("batch_s", {"tool_s": None, "turn_s": None, "trajectory_s": None, "batch_s": 60.0}),
)


async def deadlines(seed: int) -> Calls:
    """Each limit of time, while everything waits."""
    stage, (name, limits) = new_stage(), LIMITS[seed % 8]
    is_held = name == "generation_s"
    stuck = tool_call("add", a=1, b=seed) if name == "reward_s" else STUCK
    scenario = (
        scenario_of(seed, stream_interval=HELD_TOKENS)
        .reply("hold", filler=30)
        .reply("stuck", stuck + tool_call("add", a=2, b=3), filler=6)
        .then("In spite of it.")
        .reply("", filler={"median": 12, "max": 30})
    )
    on_deadline = {6: "drop", 7: "raise"}.get(seed, "partial")
    make = held_config_of if is_held else config_of
    config = make(
        scenario,
        agent=AgentConfig(name="golden_watched"),
        limits=LimitsConfig(**limits),
        channel=PATIENT,
        scheduling=SchedulingConfig(
            samples_per_prompt=2,
            on_deadline=on_deadline,
            trainable=("completed", "length", "limit", "deadline")[: 4 if seed % 4 else 3],
        ),
    )
    prompts = [user("hold" if is_held else "stuck"), user("quick")]
    reward = slow_score if name == "reward_s" else score
    gate = "seen" if is_held else "stuck"
    batch, error = None, None
    async with rollout.open_rollout(config, [add, *stage_tools(stage)], reward) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pass_limit, runtime, stage, gate, limits[name])
            try:
                batch = await runtime.generate(prompts, trim=True)
            except LimitExceeded as exceeded:
                batch, error = exceeded.partial, exceeded
        assert batch is not None
        calls = [call_of(name, batch, error)]
        stage.open("stuck")
        stage.open("held")
        calls.append(call_of("afterwards", await runtime.generate([user("go")], trim=True)))
    return calls


async def pass_limit(runtime: RolloutRuntime, stage: Stage, gate: str, limit_s: float) -> None:
    """Once two members wait at a gate, and two others have ended, let a limit pass."""
    await stage.until(gate, 2)
    while runtime.statistics().outcomes.get("completed", 0) < 2:
        await anyio.sleep(0.01)
    await elapse(limit_s + PAST_S)


async def slow_score(trajectory: Trajectory) -> float:
    """Does not come back for those that are stuck."""
    if trajectory.uid == "prompt-0":
        await STAGES["it"].pass_gate("stuck")
    return await score(trajectory)


async def cancelled(seed: int) -> Calls:
    """By the runtime, by the caller, and by leaving a stream."""
    stage = new_stage()
    is_held = seed in (3, 6)
    scenario = (
        scenario_of(seed, stream_interval=HELD_TOKENS)
        .reply("hold", filler=40)
        .reply("wait", WAIT, filler=8)
        .then("Went on.")
        .reply("", filler=10)
    )
    make = held_config_of if is_held else config_of
    config = make(
        scenario,
        agent=AgentConfig(name="golden_watched"),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    word, gate = ("hold", "seen") if is_held else ("wait", "gate")
    prompts = [user(f"{word} {n}", uid=f"p{n}") for n in range(3)]
    targets: tuple[dict[str, Any], ...] = ({"uid": "p1"}, {"uid": "p2", "member": 1}, {})
    target = targets[(seed + seed // 6) % 3]
    calls = []
    async with rollout.open_rollout(config, stage_tools(stage), score) as runtime:

        async def cancel() -> None:
            await stage.until(gate, 6)
            count = runtime.cancel(**target, reason=f"test {seed}")
            while runtime.statistics().outcomes.get("cancelled", 0) < count:
                await anyio.sleep(0.01)
            stage.open("gate")
            stage.open("held")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            if seed % 4 == 1:
                async with runtime.stream(prompts, step=5) as trajectories:
                    ended = [trajectory async for trajectory in trajectories]
                ended.sort(key=lambda t: (t.uid, t.member))
                batch = rollout.collate(ended, config.lengths, 256, trim=True)
            else:
                batch = await runtime.generate(prompts, trim=True)
        calls.append(call_of(f"cancel {target}", batch))
        with anyio.CancelScope() as scope:  # the caller's own

            async def leave() -> None:
                await stage.until("ended", stage.counts["ended"] + 1)
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave)
                await runtime.generate([user("never", uid="n")], samples=8)
        assert scope.cancelled_caught
        calls.append(call_of("afterwards", await runtime.generate(prompts[:1], step=9, trim=True)))
    return calls


async def streamed(seed: int) -> Calls:
    """Trajectories in the order in which they end, and the rest cancelled by leaving."""
    stage = new_stage()
    count = 3
    scenario = scenario_of(seed)
    for number in range(count):
        place = (number * 2 + seed) % count
        scenario = scenario.reply(
            f"number {number}", tool_call("after", event="taken", count=place), filler=7
        ).then("My turn.", "It is my turn.")
    scenario = scenario.reply("", STUCK, filler=5)
    config = config_of(scenario)
    prompts = [user(f"number {n}", uid=f"p{n}") for n in range(count)] + [user("stuck", uid="s")]
    ended: list[Trajectory] = []
    async with rollout.open_rollout(config, stage_tools(stage), score) as runtime:
        async with runtime.stream(prompts, step=seed) as trajectories:
            async for trajectory in trajectories:
                ended.append(trajectory)
                stage.note("taken")
                if len(ended) == count:
                    break
        lengths = config.lengths
        layout = "packed" if seed % 2 else "padded"
        call = call_of("stream", rollout.collate(ended, lengths, 256, layout, trim=True))
        again = await runtime.generate(prompts[:1], step=seed, trim=True)
        return [call, call_of("afterwards", again)]


async def weights(seed: int) -> Calls:
    """Weights that change under what runs."""
    stage = new_stage()
    is_held = seed % 2 == 0
    scenario = (
        scenario_of(seed, stream_interval=HELD_TOKENS, weight_version=seed)
        .reply("hold", filler=30 + seed)
        .reply("", WAIT, filler=10)
        .then(tool_call("wait", gate="second"), filler_free(seed))
        .then("The end.")
    )
    make = held_config_of if is_held else config_of
    config = make(
        scenario,
        agent=AgentConfig(name="golden_watched"),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    mode: Any = (
        "abort_and_resume" if is_held else ("in_place", "abort_and_resume", "wait")[seed % 3]
    )
    prompts = [user(f"{'hold' if is_held else 'go'} {n}") for n in range(2)]
    async with rollout.open_rollout(config, stage_tools(stage), score) as runtime:

        async def update() -> None:
            await stage.until("seen" if is_held else "gate", 4)
            await runtime.update_weights(version=seed + 5, source=WEIGHTS, mode=mode)
            stage.open("gate")
            stage.open("held")
            stage.open("second")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update)
            batch = await runtime.generate(prompts, trim=True)
        await runtime.sleep(level=1 + seed % 2)
        await runtime.wake_up()
        again = await runtime.generate(prompts, samples=1, step=8, trim=True)
        return [call_of(mode, batch), call_of("afterwards", again)]


def filler_free(seed: int) -> str:
    """An answer without a call."""
    return f"Nothing more in {seed}."


async def lost_replicas(seed: int) -> Calls:
    """Engines that die, garble and repeat; the tokens are those that one engine would give."""
    new_stage()
    scenario = (
        scenario_of(seed)
        .reply("sum", tool_call("add", a=1, b=2), "None.", filler=20)
        .then("It is 3.")
        .reply("", filler={"median": 30, "max": 60})
    )
    faults: dict[str, Any] = (
        {"die_after_tokens": 30 + 20 * seed, "replicas": (0,)},
        {"duplicate_answers": 1.0},
        {"die_after_tokens": 30 + 20 * seed, "replicas": (1,)},
        {"die_after_tokens": 30 + 20 * seed, "replicas": (0,)},
    )[seed % 4]
    config = config_of(
        scenario.fault(**faults),
        engine=SimulatedEngine(replicas=2),
        recovery=RecoveryConfig(backoff_s=1000.0),  # it dies once
        scheduling=SchedulingConfig(samples_per_prompt=4),
    )
    prompts = [user("sum"), user("talk")]
    async with rollout.open_rollout(config, [add], score) as runtime:
        return [call_of("generate", await runtime.generate(prompts, trim=True))]
