"""Four fixed workloads: what every trajectory says and how long its tools take.

Lengths are in tokens, durations in seconds. A workload is a function of its name, the number of
replicas and a seed; nothing of it depends on the policy that is measured.
"""

from __future__ import annotations

from array import array

import attrs
import numpy as np

#: Trajectories for each replica, so that 8 and 64 replicas are equally busy.
SESSIONS_PER_REPLICA = 32
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
    """

    group: int
    prompt: int
    turns: tuple[int, int]
    lengths: tuple[tuple[float, float, float], ...]
    tool: tuple[float, float]
    observed: int
    max_generated: int = 4096


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
}


def sessions_of(name: str, replicas: int, seed: int) -> list[Session]:
    """The trajectories of a workload, members of a group adjacent, as a batch is admitted."""
    shape = WORKLOADS[name]
    rng = np.random.default_rng([seed, replicas, list(WORKLOADS).index(name)])
    count = SESSIONS_PER_REPLICA * replicas
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
