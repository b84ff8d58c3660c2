"""Sampling from less than the whole distribution is said once, and counted."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

import rollout
from rollout import AgentLoop, Prompt, register_agent
from rollout.agents import AgentContext
from rollout.config import AgentConfig, SamplingConfig, SchedulingConfig
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("", filler=12).timing(base_s=0.01, slope_s=0.0)
METRIC = "sampling/truncated_share"


@register_agent("samples_in_ways")
class SamplesInWays(AgentLoop):
    """Two turns, the second as its prompt says."""

    async def run(self, context: AgentContext) -> None:
        way = context.prompt.extra.get("way")
        await context.generate()
        context.observe([{"role": "user", "content": "More."}])
        if way == "assigns":
            context.sampling = msgspec.structs.replace(context.sampling, top_p=0.5)
        if way == "ids":
            await context.settle()
            await context.generate_ids(list(context.transcript.ids()), {"min_p": 0.25})
        elif way == "opens":
            go = [{"role": "user", "content": "Go."}]
            async with context.open_segment(go, sampling={"top_k": 7}) as other:
                await other.generate()
        elif way == "aside":
            go = [{"role": "user", "content": "Go."}]
            async with context.open_segment(go, sampling={"top_k": 7}) as other:
                other.trainable = False
                await other.generate()
        else:
            await context.generate()


def config(agent: str = "samples_in_ways", **sections: Any) -> Any:
    return SCENARIO.config(
        agent=AgentConfig(name=agent),
        scheduling=SchedulingConfig(samples_per_prompt=2),
        **sections,
    )


def go(uid: str = "p0", sampling: Any = None, **extra: Any) -> Prompt:
    message = {"role": "user", "content": "Go."}
    return Prompt(messages=[message], uid=uid, sampling=sampling or {}, extra=extra)


async def told(
    caplog: pytest.LogCaptureFixture, whole: Any, *prompts: Prompt, **call: Any
) -> tuple[list[str], float | None]:
    """The warnings of a runtime that generates these prompts twice, and its metric."""
    with caplog.at_level(logging.WARNING, "rollout"):
        async with rollout.open_rollout(whole) as runtime:
            for step in range(2):
                batch = await runtime.generate(list(prompts), step=step, **call)
                assert {t.outcome for t in batch.trajectories} == {"completed"}
    texts = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [text for text in texts if "truncated" in text], batch.metrics.get(METRIC)


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
async def test_setting_of_the_configuration_is_said_once_and_counted(
    caplog: pytest.LogCaptureFixture, name: str, value: float
) -> None:
    bent = config(sampling=SamplingConfig(**{name: value}))
    warnings, share = await told(caplog, bent, go("a"), go("b"))
    assert len(warnings) == 1
    assert f"{name} = {value:g} (sampling.{name})" in warnings[0]
    assert share == 1.0


async def test_setting_of_a_prompt_is_said_and_counted_with_its_own_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [go("a", {"top_p": 0.9, "top_k": 3}), go("b"), go("c", {"top_p": 0.8})]
    warnings, share = await told(caplog, config(), *prompts)
    assert len(warnings) == 1
    assert "top_k = 3 (the prompt's sampling), top_p = 0.9 (the prompt's sampling)" in warnings[0]
    assert share is not None
    assert 0.5 < share < 0.8


@pytest.mark.parametrize(
    ("way", "said"), [("assigns", "top_p = 0.5"), ("ids", "min_p = 0.25"), ("opens", "top_k = 7")]
)
async def test_setting_of_an_agent_is_said_and_counted(
    caplog: pytest.LogCaptureFixture, way: str, said: str
) -> None:
    warnings, share = await told(caplog, config(), go(way=way))
    assert len(warnings) == 1
    assert f"{said} (the agent, or a client of the gateway)" in warnings[0]
    assert share is not None
    assert 0.2 < share < 0.8


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(top_p=1.0, top_k=-1, min_p=0.0),
        SamplingConfig(greedy=True, top_p=0.5),
    ],
)
async def test_sampling_from_the_whole_distribution_says_nothing(
    caplog: pytest.LogCaptureFixture, sampling: SamplingConfig
) -> None:
    assert await told(caplog, config(sampling=sampling), go()) == ([], None)


async def test_validation_and_rows_that_are_not_trained_say_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    validation = config(validation_sampling=SamplingConfig(top_p=0.5))
    assert await told(caplog, validation, go(), validate=True) == ([], None)
    assert await told(caplog, config(), go(way="aside")) == ([], None)


async def test_another_parameter_is_said_too_and_each_runtime_says_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [go("a", {"top_p": 0.9}), go("b", {"min_p": 0.1}), go("c", {"top_p": 0.8})]
    warnings, _ = await told(caplog, config(), *prompts)
    assert sorted(("top_p" in each.partition("expected")[0]) for each in warnings) == [False, True]
    caplog.clear()
    warnings, _ = await told(caplog, config(), *prompts)
    assert len(warnings) == 2
