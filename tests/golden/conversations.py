"""Kinds of golden runs that no time cuts: tools, lengths, segments, users, rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

import rollout
from golden.material import (
    STAGES,
    Checker,
    Notebook,
    add,
    choose,
    config_of,
    fail,
    pay,
    scenario_of,
    stage_tools,
    trial,
    user,
)
from golden.rows import call_of
from golden.stage import Stage
from rollout import (
    AgentConfig,
    EnvironmentAgent,
    Group,
    LengthsConfig,
    LimitExceeded,
    Message,
    Prompt,
    Reward,
    SamplingConfig,
    SchedulingConfig,
    SimulatedEngine,
    ToolsConfig,
    Trajectory,
    register_agent,
)
from rollout.agents import ToolAgent
from rollout.interactions import ScriptedUser, Verifier
from rollout.testing import hold_clock, tool_call

if TYPE_CHECKING:
    from rollout import AgentContext

Calls = list[dict[str, Any]]
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"trim": True},
    {"trim": 64},
    {"layout": "packed"},
)

TURNS = (
    tool_call("add", a=2, b=3) + "\n" + tool_call("add", a=20, b=30),
    tool_call("note", line="one") + "\n" + tool_call("note", line="two"),
    tool_call("fail", why="no luck"),
    tool_call("add", a="x", b=3),
    tool_call("multiply", a=1),
    'Broken: <tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>',
    "Three. " + "\n".join(tool_call("add", a=1, b=n) for n in range(3)),
    tool_call("pay", amount=0.5) + "\n" + tool_call("note", line="é ☃"),
    # The first ends after the second.
    tool_call("after", event="second", count=1) + tool_call("note_event", event="second"),
)


async def tools(seed: int) -> Calls:
    """Turns of parallel, serial, failing and invalid calls."""
    turns = [choose(seed, f"turn {n}", TURNS) for n in range(4)]
    scenario = (
        scenario_of(seed)
        .reply("go", *turns[:2], filler=5)
        .then(*turns[2:])
        .then("The end.", "Done.")
    )
    config = config_of(
        scenario,
        agent=AgentConfig(max_parallel_calls=2),
        scheduling=SchedulingConfig(samples_per_prompt=2),
        tools=ToolsConfig(max_response_length=40, truncate_side=choose(seed, "side", SIDES)),
    )
    given = [add, fail, pay, Notebook(), *stage_tools(Stage())]
    used = [tool.name for tool in given if any(f'"{tool.name}"' in turn for turn in turns)]
    prompts = [
        user("go", uid="all", tools=used, tools_kwargs={"note": {"title": "T"}}),
        user("go on", tools=["add", "note"]),
    ]
    async with rollout.open_rollout(config, given) as runtime:
        layout = choose(seed, "layout", LAYOUTS)
        return [call_of("generate", await runtime.generate(prompts, **layout))]


SIDES = ("left", "right", "middle")


async def lengths(seed: int) -> Calls:
    """Every length that can end a turn or a trajectory."""
    scenario = (
        scenario_of(seed)
        .reply("talk", filler=200, finish=choose(seed, "finish", ("stop", "length")))
        .reply("call", tool_call("add", a=10**60, b=1), filler=seed)
        .then("The end.")
    )
    bounds: dict[str, Any] = {"prompt": 700, "response": 180}
    kind = seed % 6
    if kind == 0:
        bounds["turn"] = 40
    elif kind == 1:
        scenario = scenario.capacity(context_length=620)
    elif kind == 2:
        bounds |= {"prompt": 300, "overlong_prompts": "cut"}
    elif kind == 3:
        bounds["prompt"] = 300
    elif kind == 4:
        bounds["response"] = 190 + seed
    config = config_of(
        scenario,
        lengths=LengthsConfig(**bounds),
        sampling=SamplingConfig(max_new_tokens=60 if kind == 5 else None),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    prompts = [user("talk"), user("call"), user("talk", tools=[])]
    async with rollout.open_rollout(config, [add]) as runtime:
        return [call_of("generate", await runtime.generate(prompts))]


async def turn_limits(seed: int) -> Calls:
    """Every count that ends a trajectory."""
    scenario = (
        scenario_of(seed)
        .reply("sum", tool_call("add", a=1, b=1) + tool_call("add", a=2, b=2), filler=4)
        .reply("wrong", tool_call("add", a="x", b=1), tool_call("multiply"), filler=4)
        .reply("fail", tool_call("fail", why="no"), filler=4)
    )
    bound, count = (
        ("max_assistant_turns", 2),
        ("max_user_turns", 1),
        ("max_tool_calls", 5),
        ("max_consecutive_invalid_calls", 2),
        ("max_consecutive_errors", 3),
        ("max_tool_calls", 2),
    )[seed % 6]
    given: dict[str, Any] = {"max_assistant_turns": 4, bound: count}
    config = config_of(
        scenario,
        agent=AgentConfig(**given),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    prompts = [user("sum"), user("wrong"), user("fail")]
    async with rollout.open_rollout(config, [add, fail]) as runtime:
        return [call_of("generate", await runtime.generate(prompts, trim=True))]


PLAN = [{"role": "user", "content": "helper: plan"}]


@trial
async def branches(context: AgentContext) -> None:
    """From the end, from earlier, from within a turn; a branch of a branch."""
    await context.generate()
    first = context.transcript.spans[-1]
    ways = [await context.branch() for _ in range(2)]
    early = await context.branch(context.transcript.prompt_length)
    within = await context.branch(first.start + 3, purpose="within")
    for number, way in enumerate(ways):
        way.observe([{"role": "user", "content": f"way {number}"}])
    async with anyio.create_task_group() as tasks:
        for conversation in (*ways, early, within):
            tasks.start_soon(conversation.generate)
    nested = await ways[0].branch()
    nested.observe([{"role": "user", "content": "deeper"}])
    await nested.generate()
    ways[1].reward, early.trainable = 0.5, False
    nested.reward_turn(0.75)
    context.observe([{"role": "user", "content": "main"}])
    await context.generate()


@trial
async def subagents(context: AgentContext) -> None:
    """Conversations of their own, and sub-agents with loops of their own, at once."""
    await context.generate()
    helper = await context.subagent(PLAN)
    side = await context.subagent([{"role": "user", "content": "title"}], purpose="side")

    async def run_child(number: int) -> None:
        async with context.open_segment(
            [Message(role="user", content=f"helper {number}")],
            tools=["add"],
            sampling={"temperature": 0.5 + number},
        ) as child:
            await ToolAgent().run(child)
            child.reward = number / 4

    # Opened one after the other: seeds are named by the order.
    await run_child(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(helper.generate)
        tasks.start_soon(side.generate)
    await run_child(1)
    side.trainable = False
    context.reward_turn(0.125)
    context.observe([{"role": "user", "content": f"main: {helper.messages[-1].content}"}])
    await context.generate()
    context.reward, context.extra["helpers"] = 1.0, 2


@trial
async def tokens(context: AgentContext) -> None:
    """Ids as they are, and other sampling for a turn."""
    await context.begin()
    context.observe_ids([104, 105, 10])
    sampled = await context.generate_ids([*context.transcript.ids().tolist()])
    context.extra["cut_by"] = sampled.cut_by
    context.observe([{"role": "user", "content": "way main"}])
    context.sampling = {"temperature": 0.25, "max_new_tokens": 9}
    await context.generate()
    context.end(rollout.Outcome.COMPLETED, "as planned")


async def segments(seed: int) -> Calls:
    """Branches and sub-agents, one row each."""
    scenario = (
        scenario_of(seed)
        .reply("helper", tool_call("add", a=1, b=seed), "No call.", filler=3)
        .then("Found.")
        .reply("title", "A title.", "Another.")
        .reply("way", filler={"median": 12, "sigma": 0.6, "max": 40})
        .reply("", filler=14)
    )
    name = ("branches", "subagents")[seed % 2]
    config = config_of(
        scenario,
        agent=AgentConfig(name="golden_trials"),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    reward = score if choose(seed, "reward", (True, False)) else None
    async with rollout.open_rollout(config, [add, pay], reward) as runtime:
        layout = choose(seed, "layout", LAYOUTS)
        prompts = [user("go", extra={"trial": name}), user("start", extra={"trial": "branches"})]
        return [call_of(name, await runtime.generate(prompts, **layout))]


async def score(trajectory: Trajectory) -> float:
    """Of the length of all that was sampled."""
    return trajectory.generated_length / 128


@trial
async def notes(context: AgentContext) -> None:
    """Continues with notes twice; in a segment too."""
    for number in range(2):
        await context.generate()
        await context.compact([{"role": "user", "content": f"Notes {number}: {'x' * number}."}])
    async with context.open_segment(PLAN) as child:
        await child.generate()
        await child.compact([{"role": "user", "content": "Notes of the helper."}])
        await child.generate()
    await context.generate()
    context.reward_turn(0.5)


async def compaction(seed: int) -> Calls:
    """What is longer than its row."""
    scenario = (
        scenario_of(seed)
        .reply("little room", "Notes: three of five done.", "Notes: three of five, nearly.")
        .reply("three of five", tool_call("add", a=4, b=5), filler=6)
        .then("All done.")
        .reply("work", tool_call("add", a=1, b=1), filler=60 + seed)
        .reply("", filler=12)
    )
    name = ("compacting_agent", "golden_trials")[seed % 2]
    config = config_of(
        scenario,
        agent=AgentConfig(name=name, compaction_room=500, max_compactions=1 + seed % 3),
        lengths=LengthsConfig(prompt=900, response=900),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    async with rollout.open_rollout(config, [add], score) as runtime:
        prompts = [user("the work", extra={"trial": "notes"})]
        return [call_of(name, await runtime.generate(prompts, trim=True))]


async def sampling(seed: int) -> Calls:
    """Seeds, temperatures, steps and validation; who samples what does not depend on the batch."""
    scenario = scenario_of(seed).reply("", filler={"median": 24, "sigma": 0.7, "max": 60})
    config = config_of(
        scenario.capacity(max_running=choose(seed, "running", (2, 256))),
        engine=SimulatedEngine(replicas=1 + seed % 2, routed_experts=seed % 4 == 3),
        agent=AgentConfig(name="single_turn"),
        sampling=SamplingConfig(temperature=choose(seed, "temperature", (1.0, 0.7))),
        validation_sampling=SamplingConfig(temperature=0.2)
        if seed % 3
        else SamplingConfig(greedy=True),
        scheduling=SchedulingConfig(
            samples_per_prompt=3,
            max_in_flight=choose(seed, "in flight", (2, 1024)),
        ),
    )
    prompts = [
        user("one"),
        user("two", sampling={"temperature": 0.25, "max_new_tokens": 20}, priority=1),
        Prompt(
            messages=[
                {"role": "system", "content": "Be short."},
                Message(role="user", content="three ☃"),
                {"role": "assistant", "content": "earlier"},
                {"role": "user", "content": "and?"},
            ],
            uid="chat",
            sampling={"greedy": True},
        ),
    ]
    async with rollout.open_rollout(config) as runtime:
        return [
            call_of("generate", await runtime.generate(prompts, trim=True)),
            call_of("next", await runtime.generate(prompts[:2], samples=1, layout="packed")),
            call_of("step 7", await runtime.generate(prompts[:1], step=7, trim=True)),
            call_of("validate", await runtime.generate(prompts, validate=True, trim=True)),
        ]


class Countdown:
    """An environment with a reward for each step."""

    async def reset(self, prompt: Prompt) -> str:
        self.left = 3
        return "Count down."

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.left -= 1
        return f"{self.left} left.", len(action) / 32, self.left == 0, {"last": self.left}


register_agent("golden_countdown")(EnvironmentAgent(Countdown))


async def users(seed: int) -> Calls:
    """Simulated users with scores, and environments."""
    scenario = (
        scenario_of(seed)
        .reply("sum", tool_call("add", a=1, b=2), "It is 4.", filler=4)
        .then("It is 3.", "It is 5.")
        .reply("", filler={"median": 12, "sigma": 0.5, "max": 30})
    )
    config = config_of(
        scenario,
        agent=AgentConfig(interaction="checker", max_user_turns=6),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    scripted = ScriptedUser(["More.", "And?"], scores=[0.5, None])
    interactions = [Checker, scripted, Verifier(max_attempts=2)]

    def named(name: str) -> dict[str, Any]:
        return {"interaction_kwargs": {"name": name}}

    prompts = [
        user("sum", ground_truth="3"),
        user("sum of it", ground_truth="3", extra=named("verifier")),
        user("talk", ground_truth="zz", extra=named("scripted")),
        user("play", agent_name="golden_countdown", extra={"level": seed}),
    ]
    async with rollout.open_rollout(config, [add], interactions=interactions) as runtime:
        layout = choose(seed, "layout", LAYOUTS)
        return [call_of("generate", await runtime.generate(prompts, **layout))]


async def scored(trajectory: Trajectory) -> Any:
    """Every form of a reward, by the prompt."""
    transcript = trajectory.transcript
    length = transcript.generated_length
    match trajectory.prompt.extra["form"] if trajectory.prompt is not None else None:
        case "tokens":
            values = [at / 64 for at in range(transcript.response_length)]
            return Reward(value=length / 64, token_values=values, extra={"seen": length})
        case "turns":
            return Reward(value=1.0, turn_values=[0.5] * transcript.turns)
        case "mapping":
            return {"score": length / 32, "detail": "long" if length > 30 else "short"}
        case "bool":
            return length % 2 == 0
        case "raises":
            if trajectory.member:
                raise RuntimeError("no judge")
            return 0.5
    return None


def plain_score(trajectory: Trajectory) -> float:
    """A sync function, in a thread."""
    return len(trajectory.answer) / 16


def verl_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """As for verl, in a thread."""
    return float(ground_truth in solution_str) + len(solution_str) / 256 + extra_info["num_turns"]


async def ranked(group: Group) -> list[Any]:
    """Ranks of members by length; the last member is left without."""
    lengths = [t.generated_length for t in group.trajectories]
    ranks: list[Any] = [float(sorted(lengths).index(length)) for length in lengths]
    return [*ranks[:-1], None]


async def rewards(seed: int) -> Calls:
    """Rewards of all forms."""
    scenario = (
        scenario_of(seed)
        .reply("go", tool_call("add", a=1, b=2), "None.", filler=8)
        .then("It is 3.", "It is four.")
    )
    forms = ("tokens", "turns", "mapping", "bool", "raises")
    prompts = [
        user("go", uid=form, ground_truth="3", extra={"form": form})
        for form in forms[: 5 if seed % 4 == 0 else 4]
    ]
    reward: Any = (scored, plain_score, verl_score, scored)[seed % 4]
    group_reward = ranked if seed % 4 == 3 or seed > 5 else None
    is_sync = seed % 4 in (1, 2)
    if is_sync:  # the clock stands still for threads, and so the engine takes no time
        scenario = scenario.timing(base_s=0.0, slope_s=0.0, prefill_tokens_per_s=None)
    config = config_of(scenario, scheduling=SchedulingConfig(samples_per_prompt=3))
    async with rollout.open_rollout(config, [add], reward, group_reward=group_reward) as runtime:
        if is_sync:
            with hold_clock():
                batch = await runtime.generate(prompts, trim=True)
        else:
            batch = await runtime.generate(prompts, trim=True)
        return [call_of("generate", batch)]


async def failures(seed: int) -> Calls:
    """Agents that raise, prompts that cannot be run, and too many of them."""
    stage = STAGES["it"] = Stage()
    is_too_many = seed % 2 == 1
    config = config_of(
        scenario_of(seed).reply("", filler=10),
        agent=AgentConfig(name="golden_trials"),
        scheduling=SchedulingConfig(
            samples_per_prompt=2, max_failures=1 if is_too_many else None, max_failure_share=0.0
        ),
    )
    fine = "waits" if is_too_many else "ends"
    prompts = [
        user("go", extra={"trial": "raises"}),
        user("fine", extra={"trial": fine}),
        Prompt(messages=[{"content": "no role"}], extra={"trial": fine}),
        user("nobody", agent_name="golden_nobody"),
    ]
    if not is_too_many:
        stage.note("waiting")
        stage.note("waiting")
    batch, error = None, None
    async with rollout.open_rollout(config) as runtime:
        try:
            batch = await runtime.generate(prompts[: 2 if is_too_many else 4], trim=True)
        except LimitExceeded as exceeded:
            batch, error = exceeded.partial, exceeded
    assert batch is not None
    return [call_of("generate", batch, error)]


@trial
async def raises(context: AgentContext) -> None:
    """After a turn, once others wait."""
    await context.generate()
    await STAGES["it"].until("waiting", 2)
    raise RuntimeError("the agent's own")


@trial
async def waits(context: AgentContext) -> None:
    """For ever, after a turn."""
    await context.generate()
    await STAGES["it"].pass_gate("waiting")


@trial
async def ends(context: AgentContext) -> None:
    """As it says, after a turn."""
    await context.generate()
    context.end(rollout.Outcome.LIMIT, "enough")
