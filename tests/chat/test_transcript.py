"""The token ledger keeps its invariants whatever is appended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat import Transcript
from rollout.chat.transcript import NO_VERSION

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
FLOATS = st.floats(width=32, allow_nan=False)


@dataclass
class Spoken:
    """One append and what it should leave behind, token by token."""

    kind: str
    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)


@st.composite
def generations(draw: st.DrawFn) -> Spoken:
    runs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=3))
    size = sum(count for _, count in runs)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))
    log_probs = draw(st.lists(FLOATS, min_size=size, max_size=size))
    return Spoken("generated", ids, log_probs, runs)


OBSERVATIONS = st.builds(Spoken, st.just("observation"), IDS)
TURNS = st.lists(st.one_of(generations(), OBSERVATIONS), max_size=6)
PROMPTS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


def filled(prompt: list[int], turns: list[Spoken]) -> Transcript:
    transcript = Transcript()
    transcript.append_prompt(prompt)
    for turn in turns:
        if turn.kind == "generated":
            transcript.append_generated(
                turn.ids, turn.log_probs, versions=turn.versions, finish_reason="stop"
            )
        else:
            transcript.append_observation(turn.ids)
    return transcript


@given(PROMPTS, TURNS)
def test_transcript_appends_keep_every_token_with_its_author(
    prompt: list[int], turns: list[Spoken]
) -> None:
    transcript = filled(prompt, turns)
    ids, mask = list(prompt), [False] * len(prompt)
    log_probs, versions = [0.0] * len(prompt), [NO_VERSION] * len(prompt)
    for turn in turns:
        is_generated = turn.kind == "generated"
        ids += turn.ids
        mask += [is_generated] * len(turn.ids)
        log_probs += turn.log_probs if is_generated else [0.0] * len(turn.ids)
        versions += [version for version, count in turn.versions for _ in range(count)]
        versions += [] if is_generated else [NO_VERSION] * len(turn.ids)
    assert transcript.ids().tolist() == ids
    assert transcript.ids_bytes() == array("i", ids).tobytes()
    assert transcript.mask().tolist() == mask
    assert transcript.log_probs().tolist() == log_probs
    assert transcript.weight_versions().tolist() == versions


@given(PROMPTS, TURNS)
def test_transcript_spans_tile_the_ids_with_the_prompt_first_and_once(
    prompt: list[int], turns: list[Spoken]
) -> None:
    transcript = filled(prompt, turns)
    spans = transcript.spans
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(transcript)
    assert [span.kind for span in spans].count("prompt") == 1
    assert spans[0].kind == "prompt"
    joined = [token for span in spans for token in transcript.span_ids(span)]
    assert joined == transcript.ids().tolist()
    for span in transcript.generated_spans():
        assert sum(count for _, count in span.versions) == len(span)


@given(PROMPTS, TURNS)
def test_transcript_lengths_agree_with_its_mask(prompt: list[int], turns: list[Spoken]) -> None:
    transcript = filled(prompt, turns)
    mask = transcript.mask()
    answered = np.flatnonzero(mask)[-1] + 1 if mask.any() else len(prompt)
    assert transcript.prompt_length == len(prompt)
    assert transcript.response_length == len(transcript) - len(prompt)
    assert transcript.generated_length == mask.sum()
    assert transcript.trailing_observation_length == len(transcript) - answered


@given(PROMPTS, TURNS, TURNS)
def test_transcript_earlier_tokens_never_change(
    prompt: list[int], turns: list[Spoken], more: list[Spoken]
) -> None:
    early, late = filled(prompt, turns), filled(prompt, turns + more)
    size = len(early)
    assert late.ids()[:size].tobytes() == early.ids().tobytes()
    assert late.mask()[:size].tobytes() == early.mask().tobytes()
    assert late.log_probs()[:size].tobytes() == early.log_probs().tobytes()
    assert late.weight_versions()[:size].tobytes() == early.weight_versions().tobytes()
    assert late.spans[: len(early.spans)] == early.spans


@given(PROMPTS, st.lists(FLOATS, min_size=1, max_size=6))
def test_transcript_packed_and_listed_input_give_the_same_tokens(
    prompt: list[int], log_probs: list[float]
) -> None:
    size = len(log_probs)
    ids = list(range(size))
    listed, packed, wide = Transcript(), Transcript(), Transcript()
    listed.append_prompt(prompt)
    packed.append_prompt(array("i", prompt))
    wide.append_prompt(np.array(prompt, dtype=np.int64))
    floats = np.array(log_probs, dtype=np.float32)
    listed.append_generated(ids, log_probs, versions=[(3, size)], finish_reason="stop")
    packed.append_generated(
        np.array(ids, dtype=np.int32), floats, versions=[(3, size)], finish_reason="stop"
    )
    wide.append_generated(
        np.array(ids), array("f", log_probs), versions=[(3, size)], finish_reason="stop"
    )
    for other in (packed, wide):
        assert other.ids_bytes() == listed.ids_bytes()
        assert other.log_probs().tobytes() == listed.log_probs().tobytes()
        assert other.spans == listed.spans


@pytest.mark.parametrize(
    ("ids", "log_probs", "versions", "error"),
    [
        ([1, 2], [0.0], [(0, 2)], "2 ids, 1 log-probs and versions of 2 ids"),
        ([1, 2], [0.0, 0.0], [(0, 1)], "2 ids, 2 log-probs and versions of 1 ids"),
        ([1], [0.0], [(0, 3), (1, -2)], "a run of versions is negative"),
        ([1], [None], [(0, 1)], "must be real number"),
        ([2**31], [0.0], [(0, 1)], "too large|greater than"),
    ],
)
def test_transcript_generation_that_is_none_is_refused_and_changes_nothing(
    ids: list[int], log_probs: list[Any], versions: list[tuple[int, int]], error: str
) -> None:
    transcript = filled([7], [Spoken("generated", [8], [-1.0], [(0, 1)])])
    with pytest.raises((ValueError, TypeError, OverflowError), match=error):
        transcript.append_generated(ids, log_probs, versions=versions, finish_reason="stop")
    assert transcript.ids().tolist() == [7, 8]
    assert transcript.log_probs().tolist() == [0.0, -1.0]


def test_transcript_prompt_out_of_order_is_refused() -> None:
    transcript = Transcript()
    with pytest.raises(ValueError, match="append the prompt first"):
        transcript.append_observation([1])
    with pytest.raises(ValueError, match="append the prompt first"):
        transcript.append_generated([1], [0.0], versions=[(0, 1)], finish_reason="stop")
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        transcript.append_prompt([])
    transcript.append_prompt([1])
    with pytest.raises(ValueError, match="has a prompt already"):
        transcript.append_prompt([2])
    assert transcript.ids().tolist() == [1]
