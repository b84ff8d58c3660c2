"""The workloads: what every trajectory says, how long its tools take, and on what it runs.

Lengths are in tokens, durations in seconds. A workload is a function of its name, the number of
replicas and a seed; nothing of it depends on the policy that is measured.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs
import numpy as np

from .machines import Machine, mix_of, one_at_double_speed, one_at_half_speed

#: Ids are drawn from here, so that no two trajectories share a block by chance.
FIRST_ID, LAST_ID = 1, 2**31 - 1


@attrs.frozen
class Turn:
    """One answer of the model and what follows it.

    Attributes:
        generated: Tokens that the model samples.
        observed: Tokens that the tool's answer appends before the next turn.
        tool_s: How long the tool takes; 0 after the last turn.
    """

    generated: int
    observed: int
    tool_s: float


@attrs.define(eq=False)
class Session:
    """One trajectory.

    Attributes:
        ids: Everything that it will ever hold, packed int32: prompt, answers and observations.
        prompt_tokens: Length of the prompt that its whole group shares.
    """

    name: str
    group: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    ids: bytes = attrs.field(repr=False)

    @property
    def generated(self) -> int:
        """Tokens that it samples in all."""
        return sum(turn.generated for turn in self.turns)


@attrs.frozen
class Shape:
    """How the trajectories of a workload are drawn.

    Attributes:
        group: Members of a group, which share a prompt of `prompt` tokens.
        turns: Fewest and most turns.
        lengths: (share of the trajectories, median, sigma) of log-normal answers; a trajectory
            stays in its class.
        tool: Median and sigma of the log-normal tool times.
        observed: Tokens of an observation.
        max_generated: Longer answers are cut.
        sessions: Trajectories for each replica, so that 8 and 64 replicas are equally busy.
        in_flight: Trajectories that run at once for each replica; the next one begins when one has
            ended.
        machines: What the replicas run on, by their number.
        is_held_out: It is measured, and nothing is tuned on it.
    """

    group: int
    prompt: int
    turns: tuple[int, int]
    lengths: tuple[tuple[float, float, float], ...]
    tool: tuple[float, float]
    observed: int
    max_generated: int = 4096
    sessions: int = 32
    in_flight: int = 24
    machines: Callable[[int], tuple[Machine, ...]] = one_at_half_speed
    is_held_out: bool = False


@attrs.frozen
class Trial:
    """What every policy is measured with.

    Attributes:
        in_flight: Trajectories that run at once.
    """

    sessions: list[Session]
    machines: tuple[Machine, ...]
    in_flight: int


#: A new one comes last: the others' draws depend on their places.
WORKLOADS: dict[str, Shape] = {
    "lognormal_turns": Shape(
        group=8,
        prompt=512,
        turns=(2, 8),
        lengths=((1.0, 200.0, 0.8),),
        tool=(0.5, 0.5),
        observed=128,
    ),
    "bimodal": Shape(
        group=8,
        prompt=512,
        turns=(3, 5),
        lengths=((0.8, 100.0, 0.3), (0.2, 1000.0, 0.3)),
        tool=(0.5, 0.5),
        observed=128,
    ),
    "long_tools": Shape(
        group=8,
        prompt=1024,
        turns=(4, 8),
        lengths=((1.0, 150.0, 0.6),),
        tool=(8.0, 0.5),
        observed=256,
    ),
    "groups_of_16": Shape(
        group=16,
        prompt=8192,
        turns=(2, 4),
        lengths=((1.0, 200.0, 0.6),),
        tool=(0.5, 0.5),
        observed=128,
    ),
    "single_turns": Shape(
        group=8,
        prompt=512,
        turns=(1, 1),
        lengths=((1.0, 500.0, 1.0),),
        tool=(1.0, 0.0),
        observed=0,
        sessions=128,
        in_flight=32,
        machines=mix_of(Machine(), Machine(), Machine(slowness=2.0), Machine(slowness=4.0)),
    ),
    "single_turns_queued": Shape(
        group=4,
        prompt=2048,
        turns=(1, 1),
        lengths=((1.0, 300.0, 0.3),),
        tool=(1.0, 0.0),
        observed=0,
        sessions=96,
        machines=mix_of(
            Machine(max_running=32),
            Machine(slowness=1.3, max_running=32),
            Machine(slowness=1.6, max_running=32),
        ),
    ),
    "single_turns_two_kinds": Shape(
        group=16,
        prompt=1024,
        turns=(1, 1),
        lengths=((0.7, 200.0, 0.4), (0.3, 1500.0, 0.5)),
        tool=(1.0, 0.0),
        observed=0,
        sessions=96,
        in_flight=40,
        machines=mix_of(
            Machine(slowness=0.5, max_running=64),
            Machine(max_running=24),
            Machine(slowness=1.5, max_running=48),
            Machine(slowness=3.0),
        ),
        is_held_out=True,
    ),
    "single_turns_at_once": Shape(
        group=5,
        prompt=300,
        turns=(1, 1),
        lengths=((1.0, 400.0, 0.9),),
        tool=(1.0, 0.0),
        observed=0,
        sessions=60,
        in_flight=60,
        machines=mix_of(Machine()),
        is_held_out=True,
    ),
    "turns_on_a_mix": Shape(
        group=4,
        prompt=2000,
        turns=(1, 6),
        lengths=((1.0, 250.0, 1.0),),
        tool=(2.0, 1.0),
        observed=500,
        sessions=40,
        in_flight=28,
        machines=mix_of(
            Machine(max_running=32),
            Machine(slowness=1.8, max_running=128),
            Machine(slowness=0.7),
        ),
        is_held_out=True,
    ),
    "long_prompts": Shape(
        group=2,
        prompt=6000,
        turns=(1, 2),
        lengths=((1.0, 120.0, 0.5),),
        tool=(1.0, 0.5),
        observed=1000,
        machines=mix_of(Machine(), Machine(slowness=1.6)),
        is_held_out=True,
    ),
    "single_turns_long_prompts": Shape(
        group=1,
        prompt=8192,
        turns=(1, 1),
        lengths=((1.0, 1000.0, 0.3),),
        tool=(1.0, 0.0),
        observed=0,
        sessions=96,
        machines=one_at_double_speed,
    ),
    # Equal replicas, the normal cluster: agents of several turns, in groups, with heavy tails.
    "equal_agents": Shape(
        group=8,
        prompt=1024,
        turns=(2, 8),
        lengths=((1.0, 200.0, 1.0),),
        tool=(1.0, 1.0),
        observed=256,
        sessions=48,
        in_flight=32,
        machines=mix_of(Machine()),
    ),
    "equal_agents_queued": Shape(
        group=16,
        prompt=2048,
        turns=(2, 8),
        lengths=((0.8, 150.0, 0.6), (0.2, 900.0, 0.8)),
        tool=(0.5, 0.8),
        observed=256,
        sessions=64,
        in_flight=48,
        machines=mix_of(Machine(max_running=32)),
        is_held_out=True,
    ),
}
#: Those on which `equal_replicas_gain` is measured.
EQUAL = ("equal_agents", "equal_agents_queued")
#: Those that constants of the router were tuned on, and those that nothing was tuned on: other
#: shapes, other machines, other seeds.
TRAIN = [name for name, shape in WORKLOADS.items() if not shape.is_held_out]
TEST = [name for name, shape in WORKLOADS.items() if shape.is_held_out]
#: Added to the seeds of `TEST`.
TEST_SEEDS = 1000


def trial_of(name: str, replicas: int, seed: int) -> Trial:
    """The trajectories of a workload, members of a group adjacent, and what they run on."""
    shape = WORKLOADS[name]
    sessions = sessions_of(name, replicas, seed)
    return Trial(sessions, shape.machines(replicas), shape.in_flight * replicas)


def sessions_of(name: str, replicas: int, seed: int) -> list[Session]:
    """The trajectories of a workload, members of a group adjacent, as a batch is admitted."""
    shape = WORKLOADS[name]
    seed += TEST_SEEDS if shape.is_held_out else 0
    rng = np.random.default_rng([seed, replicas, list(WORKLOADS).index(name)])
    count = shape.sessions * replicas
    sessions = []
    for group in range(count // shape.group):
        prompt = _ids(rng, shape.prompt)
        for member in range(shape.group):
            turns = _turns(rng, shape)
            rest = sum(turn.generated + turn.observed for turn in turns)
            ids = prompt + _ids(rng, rest)
            name_ = f"{group}/{member}"
            sessions.append(Session(name_, str(group), shape.prompt, turns, ids.tobytes()))
    return sessions


def _ids(rng: np.random.Generator, count: int) -> array[int]:
    ids = array("i")
    ids.frombytes(rng.integers(FIRST_ID, LAST_ID, count, dtype=np.int32).tobytes())
    return ids


def _turns(rng: np.random.Generator, shape: Shape) -> tuple[Turn, ...]:
    fewest, most = shape.turns
    count = int(rng.integers(fewest, most + 1))
    at = int(rng.choice(len(shape.lengths), p=[share for share, _, _ in shape.lengths]))
    _, median, sigma = shape.lengths[at]
    answers = rng.lognormal(np.log(median), sigma, count).clip(1, shape.max_generated)
    tool_median, tool_sigma = shape.tool
    tools = rng.lognormal(np.log(tool_median), tool_sigma, count)
    tools[-1] = 0.0
    return tuple(
        Turn(max(1, round(answer)), shape.observed, float(tool))
        for answer, tool in zip(answers.tolist(), tools.tolist(), strict=True)
    )
