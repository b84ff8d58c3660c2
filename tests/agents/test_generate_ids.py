"""Agents that keep token ids themselves, and prompts that are cut to fit."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from race_situations import user
from rollout import AgentContext, AgentError, LimitExceeded, Outcome
from rollout.agents.turn import SampledTokens
from rollout.batch import RolloutBatch
from rollout.config import LengthsConfig
from rollout.testing import Scenario, simulated_tokenizer
from trial_agent import run_trial

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("go", "First words.", filler=10).then("Second words.")
NEXT = "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"
LENGTHS = LengthsConfig(prompt=900, response=400)


async def tried(trial: Any, **options: Any) -> RolloutBatch:
    return await run_trial(trial, SCENARIO, **{"lengths": LENGTHS, **options})


def ids_of(text: str) -> list[int]:
    return list(simulated_tokenizer().encode(text, add_special_tokens=False))


def rendered(text: str) -> list[int]:
    return ids_of(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", [list, np.array])
async def test_generate_ids_appends_what_is_beyond_the_transcript_as_an_observation(
    kind: Any,
) -> None:
    turns: list[SampledTokens] = []

    async def trial(context: AgentContext) -> None:
        prompt = rendered("go")
        turns.append(await context.generate_ids(kind(prompt)))
        told = [*prompt, *turns[0].ids, *ids_of(NEXT)]
        turns.append(await context.generate_ids(kind(told)))

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    transcript = trajectory.transcript
    assert [s.kind for s in transcript.spans] == ["prompt", "generated", "observation", "generated"]
    assert transcript.span_ids(transcript.spans[0]).tolist() == rendered("go")
    assert transcript.span_ids(transcript.spans[2]).tolist() == ids_of(NEXT)
    for turn, span in zip(turns, transcript.generated_spans(), strict=True):
        assert turn.ids == transcript.span_ids(span)
        assert np.array_equal(turn.log_probs, transcript.log_probs()[span.start : span.stop])
        assert turn.versions == ((0, len(turn.ids)),)
        assert (turn.finish_reason, turn.cut_by) == ("stop", None)
    assert (trajectory.num_turns, trajectory.answer[-13:]) == (4, "Second words.")


async def test_generate_ids_without_anything_new_continues_the_turn() -> None:
    async def trial(context: AgentContext) -> None:
        first = await context.generate_ids(rendered("go"), {"max_new_tokens": 4})
        assert (len(first.ids), first.finish_reason) == (4, "length")
        assert first.cut_by == "sampling.max_new_tokens"
        second = await context.generate_ids([*rendered("go"), *first.ids])
        assert len(second.ids) > 4  # the sampling was of the first alone

    (trajectory,) = (await tried(trial)).trajectories
    kinds = [span.kind for span in trajectory.transcript.spans]
    assert kinds == ["prompt", "generated", "generated"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids: [*ids[:5], 7, *ids[6:]], "that differ from the transcript's {n} at 5"),
        (lambda ids: [], "generate_ids: 0 ids that differ from the transcript's {n} at 0"),
        (lambda ids: [*ids, 10**6], "generate_ids: token id 1000000 at position {n} is outside"),
    ],
)
async def test_generate_ids_that_do_not_extend_the_transcript_are_refused(
    change: Any, said: str
) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        ids = context.transcript.ids().tolist()
        with pytest.raises(AgentError) as caught:
            await context.generate_ids(change(ids))
        assert said.format(n=len(ids)) in str(caught.value)
        assert context.transcript.ids().tolist() == ids

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"heat": 1}, "generate_ids: sampling.heat: unknown key"),
        ({"temperature": -1}, "temperature = -1"),
    ],
)
async def test_generate_ids_with_bad_sampling_is_refused(sampling: Any, said: str) -> None:
    async def trial(context: AgentContext) -> None:
        await context.begin()
        with pytest.raises(AgentError) as caught:
            await context.generate_ids(context.transcript.ids(), sampling)
        assert said in str(caught.value)
        await context.generate()

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def test_generate_ids_beyond_the_room_end_the_trajectory_as_length() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        with pytest.raises(LimitExceeded):
            await context.generate_ids([*context.transcript.ids().tolist(), *[1] * 400])

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")
    assert not trajectory.transcript.trailing_observation_length
    assert trajectory.num_turns == 2


async def test_generate_ids_with_too_long_a_prompt_is_rejected() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate_ids([5] * 901)

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "prompt_length")


async def test_subagent_ids_open_a_segment_with_their_tokens() -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        opened = await context.subagent(ids=rendered("go"))
        await opened.generate_ids(rendered("go"))

    (trajectory,) = (await tried(trial)).trajectories
    main, beside = trajectory.segments
    assert (main.purpose, beside.purpose) == ("main", "subagent")
    assert beside.transcript.ids()[: len(rendered("go"))].tolist() == rendered("go")
    assert beside.transcript.generated_length > 0


async def test_long_prompt_is_cut_on_the_left_where_the_configuration_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "x" * 300 + "go"
    lengths = LengthsConfig(prompt=100, response=200, overlong_prompts="cut")
    with caplog.at_level(logging.WARNING, "rollout.agents"):
        batch = await tried(None, prompt=user(text), agent={"name": "single_turn"}, lengths=lengths)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert batch.tensors["prompts"][0].tolist() == rendered(text)[-100:]
    cut = len(rendered(text)) - 100
    assert trajectory.metrics["cut_prompt_tokens"] == cut
    assert batch.metrics["tokens/cut_prompt"] == cut
    (record,) = caplog.records
    assert record.getMessage() == (
        f"0/prompt-0/0: the prompt has {cut} tokens too many, which it loses at its beginning "
        "(lengths.overlong_prompts = 'cut'); further ones are counted only"
    )
