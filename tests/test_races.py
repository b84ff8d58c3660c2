"""Every checkpoint of ten situations, times everything that can happen at it."""

from __future__ import annotations

from math import ceil

import anyio
import pytest

import rollout
from harness.races import INJECTIONS, RacesFoundError, explore, replay
from harness.recorder import Recorder
from race_situations import SITUATIONS
from rollout.config import SchedulingConfig
from rollout.testing import Scenario, run_virtual

#: Share of a situation's runs that CI makes with three of the injections, less of those that take
#: longest; the seed chooses which.
SHARE = dict.fromkeys(SITUATIONS, 0.002) | {
    "slow consumer": 0.0005,
    "changing replicas": 0.001,
    "close during start-up": 0.004,
    "groups collected": 0.001,
    "groups carried": 0.001,
    "groups streamed": 0.001,
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation_share_of_three_injections_keeps_every_invariant(name: str) -> None:
    number = list(SITUATIONS).index(name)
    three = [INJECTIONS[(number + offset) % len(INJECTIONS)] for offset in (0, 4, 8)]
    done = explore(SITUATIONS[name], injections=three, share=SHARE[name], seed=1)
    assert done.runs == ceil(SHARE[name] * sum(done.steps.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_situation_every_injection_at_every_step_keeps_every_invariant(name: str) -> None:
    done = explore(SITUATIONS[name])
    assert list(done.steps) == list(INJECTIONS)
    assert done.runs == sum(done.steps.values())


#: How many trajectories each call of a situation hands over, and how those end.
UNDISTURBED = {
    "sub-agents and compaction": [(1, {"completed"})],
    "environment": [(2, {"completed"})],
    "single turn": [(6, {"length"})],
    "tool agent with parallel calls": [(2, {"completed"})],
    "scripted user": [(2, {"completed"})],
    "slow consumer": [(22, {"completed"})],
    "consumer that leaves": [(1, {"completed"}), (2, {"completed"})],
    "close during start-up": [(2, {"cancelled"})],
    "changing replicas": [(6, {"completed"}), (3, {"completed"})],
    "tree of conversations": [(1, {"completed"})],
    "groups collected": [(4, {"completed"}), (2, {"completed"})],
    "groups carried": [(2, {"completed"}), (4, {"completed"})],
    "groups streamed": [(8, {"completed"})],
    "rewards of groups": [(9, {"completed", "cancelled"})],
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation_undisturbed_does_what_its_name_says(name: str) -> None:
    recorder = Recorder()
    run_virtual(SITUATIONS[name], recorder)
    calls = [call for each in recorder.runtimes for call in each.calls]
    ends = [(len(c.delivered), {str(t.outcome) for t in c.delivered}) for c in calls]
    assert ends == UNDISTURBED[name]


async def leaky(recorder: Recorder) -> None:
    """Swallows the cancellation of its caller, which is a fault of the situation's own."""
    config = Scenario(seed=1).reply("", filler=20).config(scheduling=SchedulingConfig())
    async with recorder.open_rollout(config) as runtime:
        prompt = rollout.Prompt(messages=[{"role": "user", "content": "x"}])
        try:
            await runtime.generate([prompt])
        except anyio.get_cancelled_exc_class():
            raise LookupError("swallowed") from None


def test_explore_fault_is_found_and_can_be_replayed_alone() -> None:
    with pytest.raises(RacesFoundError, match="replay") as caught:
        explore(leaky, injections=("cancel",), share=0.04, seed=3)
    assert "LookupError('swallowed')" in str(caught.value)
    race = caught.value.races[0]
    assert replay(leaky, race.injection, step=race.step, seed=race.seed) == list(race.anomalies)
