"""Trajectories become rows that any trainer can take, and a policy says how."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout
from rollout import AgentLoop, Outcome, Prompt, Trajectory, function_tool
from rollout.agents import register_agent
from rollout.batch import collate
from rollout.chat import Transcript
from rollout.chat.trajectory import Parent, Segment
from rollout.config import AgentConfig, LengthsConfig, SchedulingConfig, SimulatedEngine
from rollout.errors import ConfigError, RolloutError
from rollout.integrations.trainer_rows import RowPolicy, TrainerRow, TrainerRows, trainer_rows
from rollout.testing import Scenario, tool_call

EOS = 2
LENGTHS = LengthsConfig(prompt=1024, response=400)


@function_tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return f"{at} is there"


@register_agent("rows_tree")
class Tree(AgentLoop):
    """A main conversation, and a title beside it that nobody is to learn from."""

    async def run(self, context: Any) -> None:
        await context.generate()
        side = await context.subagent([{"role": "user", "content": "title"}], purpose="side")
        await side.generate()
        side.trainable = False


SCENARIO = (
    Scenario(seed=1)
    .experts(layers=2, top_k=2, count=8)
    .reply("consult", tool_call("look", at="x"))
    .then("found")
    .reply("endless", "word", finish="length")
    .reply("title", "A title.")
    .reply("", "yes")
)


def reward(trajectory: Trajectory) -> float:
    if "fails" in trajectory.uid and trajectory.member == 0:
        raise ValueError("no reward today")
    return float(trajectory.member)


async def generate(*uids: str, agent: str = "tool_agent", samples: int = 3) -> rollout.RolloutBatch:
    """Prompts that say what happens to them."""
    config = SCENARIO.config(
        engine=SimulatedEngine(routed_experts=True),
        lengths=LENGTHS,
        agent=AgentConfig(name=agent),
        scheduling=SchedulingConfig(samples_per_prompt=samples),
    )
    prompts = [
        Prompt(uid=uid, messages=[{"role": "user", "content": uid * (400 if uid == "long" else 1)}])
        for uid in uids
    ]
    async with rollout.open_rollout(config, [look], reward=reward) as runtime:
        return await runtime.generate(prompts, step=1)


def rows_of(source: Any, **options: Any) -> TrainerRows:
    policy = RowPolicy(**{k: options.pop(k) for k in list(options) if k in POLICIES})
    return trainer_rows(source, policy, eos_token_id=EOS, **options)


POLICIES = ("empty", "unrewarded", "over_long", "untrainable", "segments")


def check(row: TrainerRow) -> None:
    """What holds of every row, whatever the policy."""
    length = len(row.response_ids)
    assert len(row.prompt_ids) >= 1
    assert length >= 1
    for name, dtype in {
        "response_ids": np.int32,
        "sampled": np.bool_,
        "mask": np.bool_,
        "log_probs": np.float32,
        "weight_versions": np.int32,
    }.items():
        assert getattr(row, name).dtype == dtype
        assert len(getattr(row, name)) == length
    assert row.sampled[-1] or row.response_ids.tolist() == [EOS]
    assert not (row.mask & ~row.sampled).any()
    assert (row.log_probs[~row.sampled] == 0).all()
    assert (row.weight_versions[~row.sampled] == -1).all()
    assert (row.weight_versions[row.sampled] >= 0).all()
    if row.routed_experts is not None:
        assert len(row.routed_experts) == len(row.prompt_ids) + length


@pytest.mark.anyio
async def test_trainer_rows_of_turns_are_what_collate_makes(rollout_clock: object) -> None:
    batch = await generate("consult", "plain")
    made = trainer_rows(batch, eos_token_id=EOS)
    tensors = collate(batch.trajectories, LENGTHS, 0).tensors
    assert len(made.rows) == 6
    for at, row in enumerate(made.rows):
        check(row)
        attention = tensors["attention_mask"][at].bool()
        prompt, response = attention[: LENGTHS.prompt], attention[LENGTHS.prompt :]
        expected = {
            "prompt_ids": tensors["prompts"][at][prompt],
            "response_ids": tensors["responses"][at][response],
            "mask": tensors["response_mask"][at][response].bool(),
            "log_probs": tensors["rollout_log_probs"][at][response],
            "weight_versions": tensors["weight_versions"][at][response],
            "routed_experts": tensors["routed_experts"][at][attention],
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(getattr(row, name), values.numpy(), err_msg=name)
        assert (row.reward, row.is_rewarded, row.is_last) == (float(at % 3), True, True)
        assert row.stop_reason == "stop"
    assert made.rows[0].group == made.rows[2].group != made.rows[3].group
    assert not made.rows[0].sampled.all()  # it has a tool's answer
    assert made.metrics == {
        "rows/total": 6.0,
        **dict.fromkeys(
            (
                "rows/empty",
                "rows/unrewarded",
                "rows/over_long",
                "rows/untrainable",
                "rows/masked",
                "rows/masked_tokens",
                "rows/segments_left_out",
                "rows/tokens_left_out",
            ),
            0.0,
        ),
    }


@pytest.mark.anyio
async def test_trainer_rows_of_failed_reward_take_the_mean_of_their_group_with_mask_0(
    rollout_clock: object,
) -> None:
    batch = await generate("fails", "plain")
    made = rows_of(batch)
    failed = made.rows[0]
    check(failed)
    assert failed.trajectory.outcome is Outcome.FAILED
    assert (failed.reward, failed.is_rewarded, failed.stop_reason) == (1.5, False, "abort")
    assert failed.sampled.any()
    assert not failed.mask.any()
    assert failed.log_probs.any()  # they are facts, and stay
    rewards = [row.reward for row in made.rows]
    assert rewards == [1.5, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert made.metrics["rows/unrewarded"] == made.metrics["rows/masked"] == 1
    assert made.metrics["rows/masked_tokens"] == failed.sampled.sum()
    assert math.isnan(rows_of(batch, unrewarded="nan").rows[0].reward)
    assert not rows_of(batch, unrewarded="nan").rows[0].mask.any()
    zero = rows_of(batch, unrewarded="zero", untrainable="keep").rows[0]
    assert zero.reward == 0.0
    assert zero.mask.any()
    with pytest.raises(RolloutError, match=r"^'fails' member 0 \(failed\) has no reward, and RowP"):
        rows_of(batch, unrewarded="error")


@pytest.mark.anyio
async def test_trainer_rows_of_rejected_prompt_are_one_end_token_with_mask_0(
    rollout_clock: object,
) -> None:
    batch = await generate("long", "plain", samples=1)
    made = rows_of(batch)
    rejected, plain = made.rows
    check(rejected)
    assert rejected.trajectory.outcome is Outcome.REJECTED
    assert rejected.prompt_ids.tolist() == rejected.response_ids.tolist() == [EOS]
    assert not rejected.mask.any()
    assert (rejected.reward, rejected.stop_reason) == (0.0, "abort")  # its group has no reward
    assert made.metrics["rows/empty"] == made.metrics["rows/over_long"] == 1
    assert made.metrics["rows/masked"] == 0  # no sampled token is lost
    assert plain.mask.any()
    with pytest.raises(RolloutError, match=r"was too long to run, and .*\.over_long = 'error"):
        rows_of(batch, over_long="error")
    with pytest.raises(
        RolloutError, match=r"has no response tokens, and RowPolicy\.empty = 'error'"
    ):
        rows_of(batch, empty="error")


@pytest.mark.anyio
async def test_trainer_rows_longer_than_the_trainer_takes_are_cut_and_masked(
    rollout_clock: object,
) -> None:
    batch = await generate("consult", samples=1)
    (whole,) = rows_of(batch).rows
    answer = int(np.flatnonzero(~whole.sampled)[0])  # where the tool's begins
    lengths = LengthsConfig(prompt=len(whole.prompt_ids) - 3, response=answer + 5)
    (row,) = rows_of(batch, lengths=lengths, over_long="cut").rows
    check(row)
    assert row.prompt_ids.tolist() == whole.prompt_ids[3:].tolist()
    assert row.response_ids.tolist() == whole.response_ids[:answer].tolist()  # ends on no answer
    assert row.mask.all()
    assert row.stop_reason == "length"
    assert row.routed_experts is not None
    assert whole.routed_experts is not None
    expected = whole.routed_experts[3 : len(whole.prompt_ids) + answer]
    np.testing.assert_array_equal(row.routed_experts, expected)
    made = rows_of(batch, lengths=lengths)
    assert not made.rows[0].mask.any()
    assert made.rows[0].response_ids.tolist() == row.response_ids.tolist()
    assert made.metrics["rows/over_long"] == made.metrics["rows/masked"] == 1
    with pytest.raises(RolloutError, match=r"'consult' member 0 .* prompt and .*over_long = "):
        rows_of(batch, lengths=lengths, over_long="error")


@pytest.mark.anyio
async def test_trainer_rows_of_side_conversation_are_masked_or_left_out(
    rollout_clock: object,
) -> None:
    batch = await generate("plain", agent="rows_tree", samples=2)
    made = rows_of(batch)
    assert [(row.segment, row.purpose, row.is_last) for row in made.rows] == [
        (1, "side", False),
        (0, "main", True),
        (1, "side", False),
        (0, "main", True),
    ]
    assert [bool(row.mask.any()) for row in made.rows] == [False, True, False, True]
    assert made.metrics["rows/untrainable"] == made.metrics["rows/masked"] == 2
    assert all(row.mask.any() for row in rows_of(batch, untrainable="keep").rows)
    for policy in ("last", "longest"):  # the title is longer, but nothing to learn from
        one = rows_of(batch, segments=policy)
        assert [(row.purpose, row.is_last) for row in one.rows] == [("main", True)] * 2
        assert one.metrics["rows/segments_left_out"] == 2
        lost = sum(each.segments[1].transcript.generated_length for each in batch.trajectories)
        assert one.metrics["rows/tokens_left_out"] == lost
    with pytest.raises(RolloutError, match=r"has 2 segments, and RowPolicy\.segments = 'error'"):
        rows_of(batch, segments="error")


def spoken(*spans: tuple[str, list[int]], finish: str = "stop") -> Transcript:
    transcript = Transcript()
    for kind, ids in spans:
        if kind == "prompt":
            transcript.append_prompt(ids)
        elif kind == "observation":
            transcript.append_observation(ids)
        else:
            versions = [(4, 1), (5, len(ids) - 1)] if ids else []
            transcript.append_generated(
                ids, [-1.0] * len(ids), versions=versions, finish_reason=finish
            )
    return transcript


def test_trainer_rows_keep_weight_versions_and_token_rewards() -> None:
    transcript = spoken(("prompt", [1]), ("generated", [5, 6, 7]), ("observation", [8]))
    segment = Segment(transcript=transcript, token_rewards=[0.5, 0.25, 0.0, 9.0])
    one = Trajectory(uid="a", group=0, member=0, outcome=Outcome.COMPLETED, segments=[segment])
    (row,) = rows_of([one]).rows
    assert row.weight_versions.tolist() == [4, 5, 5]
    assert row.token_rewards is not None
    assert row.token_rewards.tolist() == [0.5, 0.25, 0.0]


def test_trainer_rows_of_compacted_trajectory_last_is_where_its_main_conversation_ends() -> None:
    first = Segment(transcript=spoken(("prompt", [1]), ("generated", [5] * 9), finish="length"))
    second = Segment(
        transcript=spoken(("prompt", [1]), ("generated", [6])),
        parent=Parent(0, 10),
        purpose="compaction",
        reward=0.25,
    )
    aside = Segment(
        transcript=spoken(("prompt", [1]), ("generated", [7, 7])), parent=Parent(1, 1), purpose="x"
    )
    one = Trajectory(
        uid="a",
        group=0,
        member=0,
        outcome=Outcome.DEADLINE,
        reward=1.0,
        segments=[first, second, aside],
    )
    assert [row.stop_reason for row in rows_of([one]).rows] == ["length", "stop", "length"]
    assert [row.reward for row in rows_of([one]).rows] == [1.0, 1.0, 0.25]
    assert rows_of([one], segments="last").rows[0].response_ids.tolist() == [6]
    assert rows_of([one], segments="longest").rows[0].response_ids.tolist() == [5] * 9


def test_trainer_rows_without_tokens_keep_the_shape_of_their_experts() -> None:
    transcript = spoken(("prompt", [1, 2]), ("generated", []))
    transcript.append_routed_experts(np.ones((2, 3, 4), dtype=np.int16))
    one = Trajectory(uid="a", group=0, member=0, outcome=Outcome.CANCELLED, transcript=transcript)
    (row,) = rows_of([one]).rows
    check(row)
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [1, 1, -1]


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    ids = st.lists(st.integers(3, 1000), max_size=4)
    kinds = st.sampled_from(["generated", "observation"])
    made = []
    for at in range(draw(st.integers(0, 6))):
        segments = []
        for _ in range(draw(st.integers(1, 3))):
            turns = draw(st.lists(st.tuples(kinds, ids), max_size=4))
            start = draw(st.booleans())
            prompt = ("prompt", draw(st.lists(st.integers(3, 9), min_size=1, max_size=5)))
            segments.append(
                Segment(
                    transcript=spoken(prompt, *turns) if start else Transcript(),
                    trainable=draw(st.sampled_from([None, False])),
                )
            )
        made.append(
            Trajectory(
                uid=f"u{at // 3}",
                group=at // 3,
                member=at % 3,
                outcome=draw(st.sampled_from(Outcome)),
                trainable=draw(st.booleans()),
                reward=draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
                segments=segments,
            )
        )
    return made


@given(
    trajectories(),
    st.sampled_from(["mask", "cut"]),
    st.sampled_from(["mask", "keep"]),
    st.sampled_from(["group_mean", "zero"]),
    st.none() | st.builds(LengthsConfig, prompt=st.integers(1, 5), response=st.integers(1, 6)),
)
def test_trainer_rows_of_any_trajectories_hold_the_invariants(
    given_trajectories: list[Trajectory],
    over_long: Any,
    untrainable: Any,
    unrewarded: Any,
    lengths: Any,
) -> None:
    made = rows_of(
        given_trajectories,
        over_long=over_long,
        untrainable=untrainable,
        unrewarded=unrewarded,
        lengths=lengths,
    )
    assert len(made.rows) == sum(len(each.segments) for each in given_trajectories)
    for row in made.rows:
        check(row)
        assert math.isfinite(row.reward)
        if lengths is not None:
            assert len(row.prompt_ids) <= lengths.prompt
            assert len(row.response_ids) <= lengths.response
        if untrainable == "mask" and not row.is_trainable:
            assert not row.mask.any()
    for group in {row.group for row in made.rows}:
        rows = [row for row in made.rows if row.group == group and row.is_trainable]
        known = [row.reward for row in rows if row.is_rewarded]
        if known and unrewarded == "group_mean":
            assert math.isclose(np.mean([row.reward for row in rows]), np.mean(known))
    assert sum(row.is_last for row in made.rows) == len(given_trajectories)


def test_trainer_rows_warn_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rollout")
    bad = Trajectory(uid="a", group=0, member=0, outcome=Outcome.REJECTED, reason="bad_message")
    warned: set[str] = set()
    for _ in range(2):
        trainer_rows([bad], eos_token_id=EOS, warned=warned)
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 1 rows have no response tokens: they become one end-of-sequence token with mask 0",
        "1 of 1 rows have no reward: RowPolicy.unrewarded = 'group_mean'",
    ]
    assert warned == {"empty", "unrewarded"}


def test_row_policy_with_unknown_values_names_all_of_them() -> None:
    with pytest.raises(ConfigError) as caught:
        RowPolicy(empty="drop", segment="rows")  # type: ignore[call-arg, arg-type]
    assert len(caught.value.faults) == 2
    assert "empty = 'drop'" in str(caught.value)
    assert "did you mean 'segments'" in str(caught.value)
