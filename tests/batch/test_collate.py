"""Trajectories become tensors token for token, in both layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch import RolloutBatch, collate
from rollout.chat import Transcript
from rollout.chat.trajectory import Trajectory
from rollout.types import Outcome

PAD = 99
RESPONSE_KEYS = ("responses", "response_mask", "rollout_log_probs", "weight_versions")
WHOLE_KEYS = ("input_ids", "attention_mask", "position_ids")


@dataclass
class Widths:
    prompt: int = 4
    response: int = 6


def spoken(*spans: tuple[str, list[int]]) -> Transcript:
    """A transcript whose generated ids t have log-prob -t and weight version t % 3."""
    transcript = Transcript()
    for kind, ids in spans:
        if kind == "prompt":
            transcript.append_prompt(ids)
        elif kind == "observation":
            transcript.append_observation(ids)
        else:
            transcript.append_generated(
                ids,
                [-float(t) for t in ids],
                versions=[(t % 3, 1) for t in ids],
                finish_reason="stop",
            )
    return transcript


def trajectory(transcript: Transcript, member: int = 0, **fields: Any) -> Trajectory:
    defaults: dict[str, Any] = {"uid": "p", "group": 0, "outcome": Outcome.COMPLETED}
    return Trajectory(transcript=transcript, member=member, **{**defaults, **fields})


TURNS = spoken(
    ("prompt", [1, 2, 3]), ("generated", [4, 5]), ("observation", [6]), ("generated", [7])
)
CUT = spoken(("prompt", [1]), ("generated", [8]), ("observation", [9, 9]), ("generated", []))
UNANSWERED = spoken(("prompt", [1, 2]), ("observation", [3, 3]))
EMPTY = Transcript()

layouts = st.sampled_from(["padded", "packed"])


@st.composite
def transcripts(draw: st.DrawFn) -> Transcript:
    if draw(st.integers(0, 4)) == 0:
        return Transcript()
    ids = st.integers(0, 1000)
    prompt = draw(st.lists(ids, min_size=1, max_size=6))
    kinds = st.sampled_from(["generated", "observation"])
    turns = draw(st.lists(st.tuples(kinds, st.lists(ids, max_size=4)), max_size=4))
    return spoken(("prompt", prompt), *turns)


def collated(transcripts: list[Transcript], layout: Any = "padded", **widths: int) -> RolloutBatch:
    rows = [trajectory(transcript, at) for at, transcript in enumerate(transcripts)]
    return collate(rows, Widths(**widths), PAD, layout)


def test_collate_turns_with_observation_fill_the_tensors_of_the_contract() -> None:
    tensors = collate([trajectory(TURNS, reward=0.5, group=2)], Widths(), PAD).tensors
    assert tensors.batch_size == torch.Size([1])
    assert {key: value[0].tolist() for key, value in tensors.items()} == {
        "prompts": [PAD, 1, 2, 3],
        "responses": [4, 5, 6, 7, PAD, PAD],
        "response_mask": [1, 1, 0, 1, 0, 0],
        "input_ids": [PAD, 1, 2, 3, 4, 5, 6, 7, PAD, PAD],
        "attention_mask": [0, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        "position_ids": [0, 0, 1, 2, 3, 4, 5, 6, 0, 0],
        "rollout_log_probs": [-4.0, -5.0, 0.0, -7.0, 0.0, 0.0],
        "weight_versions": [1, 2, -1, 1, -1, -1],
        "trainable": True,
        "rewards": 0.5,
        "groups": 2,
    }
    assert {key: value.dtype for key, value in tensors.items()} == {
        **dict.fromkeys(("prompts", "responses", "response_mask", *WHOLE_KEYS), torch.int64),
        "rollout_log_probs": torch.float32,
        "weight_versions": torch.int32,
        "trainable": torch.bool,
        "rewards": torch.float32,
        "groups": torch.int64,
    }


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_collate_trailing_observation_is_left_out_and_counted(layout: str) -> None:
    batch = collated([CUT, UNANSWERED, TURNS], layout)
    masks = [row[row != 0].tolist() for row in batch.tensors["response_mask"].unbind()]
    assert masks == [[1], [], [1, 1, 1]]
    lengths = batch.tensors["attention_mask"].unbind()
    assert [int(row.sum()) for row in lengths] == [2, 2, 7]
    assert batch.metrics["tokens/trailing_observation"] == 4
    assert batch.metrics["tokens/observation"] == 5
    assert len(batch.trajectories[0].transcript) == 4


@given(st.lists(transcripts(), max_size=5))
def test_collate_padded_tensors_keep_every_token_that_can_be_learned_from(
    given_transcripts: list[Transcript],
) -> None:
    width, response = 6, 16
    tensors = collated(given_transcripts, prompt=width, response=response).tensors
    size = len(given_transcripts)
    assert tensors.batch_size == torch.Size([size])
    attention = tensors["attention_mask"]
    assert tensors["input_ids"].shape == attention.shape == (size, width + response)
    assert torch.equal(tensors["input_ids"][:, :width], tensors["prompts"])
    assert torch.equal(tensors["input_ids"][:, width:], tensors["responses"])
    assert (tensors["input_ids"][attention == 0] == PAD).all()
    positions = (attention.cumsum(-1) - 1).clamp(min=0) * attention
    assert torch.equal(tensors["position_ids"], positions)
    off = tensors["response_mask"] == 0
    assert (tensors["rollout_log_probs"][off] == 0).all()
    assert (tensors["weight_versions"][off] == -1).all()
    for row, transcript in enumerate(given_transcripts):
        mask = transcript.mask()
        stop = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else transcript.prompt_length
        start = transcript.prompt_length
        kept = tensors["input_ids"][row][attention[row] == 1]
        assert kept.tolist() == transcript.ids()[:stop].tolist()
        expected = {
            "response_mask": mask.astype(np.int64),
            "rollout_log_probs": transcript.log_probs(),
            "weight_versions": transcript.weight_versions(),
        }
        for key, values in expected.items():
            assert tensors[key][row, : stop - start].tolist() == values[start:stop].tolist()


@given(st.lists(transcripts(), max_size=5), st.sampled_from([True, 1, 2, 5, 64, np.int64(3)]))
def test_collate_trimmed_tensors_are_the_usual_ones_without_what_is_padding_in_all_rows(
    given_transcripts: list[Transcript], trim: Any
) -> None:
    rows = [trajectory(each, at) for at, each in enumerate(given_transcripts)]
    wide = collate(rows, Widths(prompt=128, response=128), PAD).tensors
    narrow = collate(rows, Widths(prompt=6, response=16), PAD, trim=trim).tensors
    attention = wide["attention_mask"]
    longest = [int(part.sum(1).max()) if rows else 0 for part in attention.split(128, 1)]
    prompt, response = (-(-length // int(trim)) * int(trim) for length in longest)
    assert set(narrow.keys()) == set(wide.keys())
    for key, value in wide.items():
        cut = value
        if key == "prompts":
            cut = value[:, 128 - prompt :]
        elif key in RESPONSE_KEYS:
            cut = value[:, :response]
        elif key in WHOLE_KEYS:
            cut = value[:, 128 - prompt : 128 + response]
        assert torch.equal(narrow[key].nan_to_num(), cut.nan_to_num())


def test_collate_trim_or_layout_that_is_none_is_refused() -> None:
    for trim in (0, "8"):
        with pytest.raises(ValueError, match=r"^trim = .*: expected True, False or an integer"):
            collate([], Widths(), PAD, trim=trim)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^layout = 'ragged': expected 'padded' or 'packed'$"):
        collate([], Widths(), PAD, "ragged")  # type: ignore[arg-type]


@given(st.lists(transcripts(), max_size=5))
def test_collate_packed_rows_are_the_padded_ones_without_padding(
    given_transcripts: list[Transcript],
) -> None:
    padded = collated(given_transcripts, prompt=6, response=16).tensors
    packed = collated(given_transcripts, "packed", prompt=6, response=16).tensors
    assert packed.batch_size == padded.batch_size
    assert set(packed.keys()) == set(padded.keys())
    attention = padded["attention_mask"] == 1
    kept = {"prompts": attention[:, :6], **dict.fromkeys(RESPONSE_KEYS, attention[:, 6:])}
    kept |= dict.fromkeys(WHOLE_KEYS, attention)
    for key, places in kept.items():
        assert packed[key].layout is torch.jagged
        assert packed[key].dtype == padded[key].dtype
        rows = [row.tolist() for row in packed[key].unbind()] if len(packed) else []
        assert rows == [padded[key][at][places[at]].tolist() for at in range(len(padded))]
    assert torch.equal(packed["trainable"], padded["trainable"])


def test_collate_rows_keep_the_order_given_and_describe_themselves() -> None:
    rows = [
        trajectory(TURNS, 1, uid="b", group=3, reward=0.5, num_turns=4, extra={"k": [1]}),
        trajectory(
            EMPTY,
            0,
            uid="a",
            group=7,
            outcome=Outcome.REJECTED,
            reason="bad_message",
            trainable=False,
            turn_scores=[0.25],
            tool_rewards=[1.0],
            limit_source="lengths.prompt",
            metrics={"total_s": 2.0},
        ),
    ]
    batch = collate(rows, Widths(), PAD)
    first, second = batch.samples
    assert (first.uid, first.group, first.member, first.row) == ("b", 3, 1, 0)
    assert (first.reward, first.num_turns, first.extra) == (0.5, 4, {"k": [1]})
    assert (second.uid, second.row, second.outcome) == ("a", 1, Outcome.REJECTED)
    assert (second.reason, second.limit_source) == ("bad_message", "lengths.prompt")
    assert (second.reward, second.turn_scores, second.tool_rewards) == (None, [0.25], [1.0])
    assert second.metrics == {"total_s": 2.0}
    assert batch.tensors["trainable"].tolist() == [True, False]
    assert batch.tensors["groups"].tolist() == [3, 7]
    assert batch.tensors["rewards"][0] == 0.5
    assert batch.tensors["rewards"][1].isnan()  # unknown, and not 0
    assert batch.trajectories == rows
    assert repr(batch) == (
        "<RolloutBatch of 2 rows (completed: 1, rejected: 1); prompts (2, 4), responses (2, 6), …>"
    )


def test_collate_nothing_gives_a_batch_without_rows() -> None:
    batch = collate([], Widths(), PAD)
    assert len(batch) == 0
    assert batch.tensors["rewards"].dtype == torch.float32
    assert batch.tensors["input_ids"].shape == (0, 10)
    assert batch.metrics["tokens/generated"] == 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_collate_row_that_does_not_fit_is_named(layout: Any) -> None:
    rows = [trajectory(CUT), trajectory(TURNS, 1)]
    with pytest.raises(ValueError, match=r"'p' member 1: its prompt has 3 .*lengths\.prompt = 2"):
        collate(rows, Widths(prompt=2), PAD, layout)
    with pytest.raises(ValueError, match=r"its response has 4 tokens, lengths\.response = 3"):
        collate(rows, Widths(response=3), PAD, layout)


def test_collate_metrics_count_and_leave_out_what_is_unknown() -> None:
    rows = [
        trajectory(TURNS, metrics={"generation_s": 1.0, "tool_s": 0.5, "total_s": 4.0}, reward=1.0),
        trajectory(CUT, 1, metrics={"generation_s": 3.0, "total_s": math.nan}, num_turns=4),
        trajectory(EMPTY, 2, outcome=Outcome.FAILED, reason="engine", reward=math.nan),
        trajectory(EMPTY, 3, outcome=Outcome.FAILED, reason="tool", reward=-2.0, num_turns=2),
    ]
    extra = {"loop_lag_s/max": 0.25, "engine_load": math.nan}
    assert collate(rows, Widths(), PAD, extra_metrics=extra).metrics == {
        "generation_s/min": 1.0,
        "generation_s/mean": 2.0,
        "generation_s/max": 3.0,
        "tool_s/min": 0.5,
        "tool_s/mean": 0.5,
        "tool_s/max": 0.5,
        "trajectory_s/max": 4.0,
        "reward/min": -2.0,
        "reward/mean": -0.5,
        "reward/max": 1.0,
        "tokens/prompt": 4.0,
        "tokens/generated": 4.0,
        "tokens/observation": 3.0,
        "tokens/trailing_observation": 2.0,
        "outcomes/completed": 2.0,
        "outcomes/failed": 2.0,
        "outcomes/failed/engine": 1.0,
        "outcomes/failed/tool": 1.0,
        "turns/mean": 2.0,
        "loop_lag_s/max": 0.25,
    }
