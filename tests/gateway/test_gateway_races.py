"""Many trajectories behind a gateway whose clients leave, whose time ends, whose engines die."""

from __future__ import annotations

import random  # noqa: TID251  (what clients do; each has a seed)
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from gateway_clients import ADD, SETTINGS, TRIALS, asked, echo, result, system, user
from harness import Recorder, balance_of
from rollout import Outcome, Prompt
from rollout.config import (
    AgentConfig,
    GatewayConfig,
    LengthsConfig,
    LimitsConfig,
    RecoveryConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.testing import Scenario, run_virtual, tool_call
from slow_cases import slow_after

if TYPE_CHECKING:
    from rollout import AgentContext
    from rollout.gateway.calls import Completion, GatewayCall
    from rollout.gateway.session import GatewaySession

SCENARIO = (
    Scenario(seed=5)
    .reply("question", "I add. " + tool_call("add", a=2, b=3), filler={"median": 20, "sigma": 1})
    .then("So.", "Or so.")
)


class Client:
    """One trajectory's, which leaves now and then, at any moment, and asks again."""

    def __init__(self, session: GatewaySession, rng: random.Random) -> None:
        self.session = session
        self.rng = rng
        self.answered = 0

    async def run(self) -> None:
        """A conversation with sub-agents, samples and second thoughts."""
        told = [system("Work"), user("question")]
        for turn in range(self.rng.randint(1, 4)):
            completion = await self.insist(asked(*told, tools=(ADD,), n=self.rng.choice([1, 1, 2])))
            answer = self.rng.choice(completion.answers)
            told.append(echo(answer))
            told += [result("5", call.id) for call in echo(answer).calls] or [user(f"more {turn}")]
            if self.rng.random() < 0.2:
                async with anyio.create_task_group() as tasks:
                    for name in "ab":
                        call = asked(system("Sub"), user("question"), agent_id=name)
                        tasks.start_soon(self.insist, call)
            if self.rng.random() < 0.2:
                told = told[:2]

    async def insist(self, call: GatewayCall) -> Completion:
        """Ask until the answer is there."""
        while True:
            completion: Completion | None = None
            with anyio.move_on_after(self.rng.choice([100.0, 100.0, 0.3, 0.02])):
                completion = await self.session.complete(call)
            if completion is not None:
                self.answered += len(completion.answers)
                if self.rng.random() < 0.8:
                    return completion
                self.session.mark_lost(completion.id)


async def converse(session: GatewaySession, context: AgentContext) -> None:
    await Client(session, random.Random(context.identity.session_id)).run()


async def converse_elsewhere(session: GatewaySession, context: AgentContext) -> None:
    """As a server does: calls come from tasks that are not the trajectory's."""
    client = Client(session, random.Random(context.identity.session_id))
    with anyio.move_on_after(context.identity.member + 1):
        await client.run()


async def crowd(recorder: Recorder, trial: Any, count: int, **sections: Any) -> None:
    TRIALS["it"] = trial
    SETTINGS.append(GatewayConfig(max_calls=40, max_branches=12))
    config = SCENARIO.config(
        agent=AgentConfig(name="through_gateway", tokenization_check="strict"),
        lengths=LengthsConfig(prompt=900, response=1500),
        scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=count, max_retries=0),
        **sections,
    )
    async with recorder.open_rollout(config) as runtime:
        prompts = [
            Prompt(messages=[{"role": "user", "content": "-"}], extra={"trial": "it"})
            for _ in range(count // 4)
        ]
        await runtime.generate(prompts)
    SETTINGS.pop()


def check_crowd(recorder: Recorder, count: int) -> Counter[str]:
    """Outcomes add up, each token is somewhere once, and nothing is left."""
    assert recorder.anomalies() == []
    (runtime,) = recorder.runtimes
    balance = balance_of(runtime)
    assert balance.is_even
    (call,) = runtime.calls
    assert len(call.delivered) == count
    for trajectory in call.delivered:
        masks = sum(int(each.transcript.mask().sum()) for each in trajectory.segments)
        assert masks == trajectory.generated_length
    return Counter(trajectory.outcome for trajectory in call.delivered)


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
def test_crowd_of_clients_that_leave_gets_whole_answers(seed: int) -> None:
    recorder = Recorder()
    engine = SimulatedEngine(replicas=3)
    run_virtual(partial(crowd, engine=engine), recorder, converse, 20, seed=seed)
    outcomes = check_crowd(recorder, 20)
    assert set(outcomes) <= {Outcome.COMPLETED, Outcome.LIMIT, Outcome.LENGTH, Outcome.FAILED}
    assert outcomes[Outcome.COMPLETED] > 10


@pytest.mark.slow
def test_thousand_trajectories_with_disconnects_deadlines_and_deaths_leave_nothing() -> None:
    recorder = Recorder()
    faulty = SCENARIO.fault(die_after_tokens=4000, replicas=(0, 1))
    engine = SimulatedEngine(replicas=6, scenario=faulty.to_dict())
    limits = LimitsConfig(trajectory_s=2.5, turn_s=2.5, generation_s=2.5, tool_s=1.0)
    run_virtual(
        partial(crowd, engine=engine, limits=limits, recovery=RecoveryConfig(policy="fail")),
        recorder,
        converse_elsewhere,
        1000,
    )
    outcomes = check_crowd(recorder, 1000)
    assert sum(outcomes.values()) == 1000
    assert {Outcome.COMPLETED, Outcome.DEADLINE, Outcome.FAILED} <= set(outcomes)
