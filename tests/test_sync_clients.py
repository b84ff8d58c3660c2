"""Async agents that block a loop with a sync client: answered or refused, named, and never hung."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from typing import Any

import anyio
import attrs
import pytest

import rollout
from rollout import AgentTask, Outcome, Prompt, RolloutBatch
from rollout.agents import AgentContext
from rollout.config import InProcessPlacement, LimitsConfig
from rollout.testing import Scenario
from slow_cases import slow_but

pytestmark = pytest.mark.process
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
#: Past this, a test that would hang fails.
HANG_S = 60.0
LONG = LimitsConfig(generation_s=20, tool_s=20, turn_s=20, trajectory_s=20, batch_s=60, cleanup_s=2)
SHORT = LimitsConfig(
    generation_s=0.3, tool_s=0.3, turn_s=0.5, trajectory_s=0.6, batch_s=60, cleanup_s=0.5
)
REMEDY = "use AsyncOpenAI, or another async client, or make the agent a plain def"
TRIALS: dict[str, Any] = {}


def ask_with_openai(base_url: str, key: str) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        messages = [{"role": "user", "content": "go"}]
        return client.chat.completions.create(model="rollout", messages=messages)


@rollout.agent("blocks_beside")
async def blocks_beside(task: AgentTask) -> float:
    return float(TRIALS["it"](task.base_url, task.api_key) is not None)


@rollout.agent("blocks_natively", backend="native")
async def blocks_natively(task: AgentTask) -> float:
    return float(TRIALS["it"](task.base_url, task.api_key) is not None)


@rollout.register_agent("blocks_as_a_loop")
class BlocksAsALoop(rollout.AgentLoop):
    needs_gateway = True

    async def run(self, context: AgentContext) -> None:
        async with context.gateway.open(context) as address:
            TRIALS["it"](address.base_url, address.api_key)


def finished(backend: str, trial: Callable[..., Any], *agents: str, limits: Any) -> RolloutBatch:
    """A batch of one trajectory an agent; the test fails where it hangs."""
    config = (
        Scenario(seed=1).reply("", "Well.").config(placement=InProcessPlacement(), limits=limits)
    )
    go = [{"role": "user", "content": "go"}]
    prompts = [Prompt(messages=go, agent_name=name, uid=name) for name in agents]
    batch: Future[RolloutBatch] = Future()

    async def main() -> RolloutBatch:
        async with rollout.open_rollout(config) as runtime:
            return await runtime.generate(prompts, samples=2, step=1)

    def run() -> None:
        try:
            batch.set_result(anyio.run(main, backend=backend))
        except BaseException as error:
            batch.set_exception(error)

    TRIALS["it"] = trial
    threading.Thread(target=run, name="test", daemon=True).start()
    return batch.result(HANG_S)


def outcomes(batch: RolloutBatch, agent: str) -> list[tuple[Any, Any, Any]]:
    of_agent = [each for each in batch.trajectories if each.uid == agent]
    return [(each.outcome, each.reason, each.reward) for each in of_agent]


def threads_left() -> set[str]:
    names = {"rollout-asyncio", "rollout-watchdog"}
    return names & {thread.name for thread in threading.enumerate()}


@BACKENDS
def test_async_agent_with_a_sync_client_is_answered(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = finished(backend, ask_with_openai, "blocks_beside", "single_turn", limits=LONG)
    assert outcomes(batch, "blocks_beside") == [(Outcome.COMPLETED, "", 1.0)] * 2
    assert outcomes(batch, "single_turn") == [(Outcome.COMPLETED, "", None)] * 2
    assert all(each.transcript.generated_length for each in batch.trajectories)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "rollout-asyncio" not in threads_left()


@BACKENDS
def test_async_agent_that_blocks_its_loop_is_named_again_with_its_line_and_remedy(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    def think(base_url: str, key: str) -> bool:
        return never.wait(1.3)

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        finished(backend, think, "blocks_beside", limits=LONG)
    first, again, *_ = [each for each in caplog.messages if "in think" in each]
    assert first.startswith("the event loop is blocked: agent 'blocks_beside' of trajectory 1/")
    assert f"called from {__file__}:" in first
    assert first.endswith(f"in think; {REMEDY}")
    assert again.startswith(first.partition(" of ")[0])
    assert again.endswith(f"in think; {REMEDY} (for 1 s now)")


@BACKENDS
def test_async_agent_that_never_returns_ends_by_its_limit_and_others_by_theirs(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    try:
        batch = finished(
            backend, lambda *_: release.wait(HANG_S), "blocks_beside", "single_turn", limits=SHORT
        )
    finally:
        release.set()
    ends = {(outcome, reason) for outcome, reason, _ in outcomes(batch, "blocks_beside")}
    # The first one blocks the second, which never began.
    assert ends == {(Outcome.FAILED, "unresponsive"), (Outcome.DEADLINE, "trajectory")}
    (cause,) = [each.cause for each in batch.trajectories if each.reason == "unresponsive"]
    assert f"it waits at {__file__}:" in cause.message
    assert outcomes(batch, "single_turn") == [(Outcome.COMPLETED, "", None)] * 2
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("agent", "backend"),
    slow_but(
        product(["blocks_natively", "blocks_as_a_loop"], ["asyncio", "trio"]),
        ("blocks_natively", "trio"),
        ("blocks_as_a_loop", "asyncio"),
    ),
)
def test_agent_that_blocks_the_runtimes_loop_is_refused_and_named(
    agent: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = finished(backend, ask_with_openai, agent, limits=attrs.evolve(LONG, generation_s=0.5))
    assert [ends[:2] for ends in outcomes(batch, agent)] == [(Outcome.FAILED, "agent")] * 2
    for each in batch.trajectories:
        message = each.cause.message
        assert message.startswith("the request waited for 0.5 s, since its own agent blocks the ev")
        assert f"called from {__file__}:" in message
        assert "AsyncOpenAI" in message
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "rollout-asyncio" not in threads_left()
