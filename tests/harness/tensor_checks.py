"""Whether the tensors of a batch say what the engines said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.transcript_checks import Answers, Row
from rollout.batch import RolloutBatch, Sample
from rollout.chat.transcript import NO_EXPERT, NO_VERSION
from rollout.tensor_layout import trim_width

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from harness.call_records import CallRecord
    from rollout.chat.trajectory import Segment, Trajectory
    from rollout.config import LengthsConfig

#: Fields of a sample that are those of its segment, and those of its trajectory.
_OF_SEGMENT = ("parent", "purpose", "session_id", "seeds")
_OF_TRAJECTORY = tuple(
    name
    for name in Sample.__struct_fields__
    if name not in (*_OF_SEGMENT, "row", "segment", "reward", "trainable")
)

#: Keys that are as long as the whole row.
_WHOLE = ("input_ids", "attention_mask", "position_ids", "routed_experts")


def batch_anomalies(
    batch: RolloutBatch, call: CallRecord, lengths: LengthsConfig, pad_id: int
) -> Iterator[str]:
    """What is wrong with a batch, padded or packed.

    Shapes: B rows, P prompt width, R response width.

    Args:
        pad_id: What stands where no token is.
    """
    yield from _sample_anomalies(batch)
    expected = _expected(batch, call, lengths, pad_id)
    missing = sorted(expected.keys() - set(batch.tensors.keys()))
    if missing:
        yield f"the tensors have no {', '.join(missing)}"
    for name in expected.keys() - set(missing):
        found = _values(batch.tensors[name])
        if found.shape != expected[name].shape or found.dtype != expected[name].dtype:
            yield f"{name} is {found.dtype}{found.shape}; expected {_kind(expected[name])}"
        elif not np.array_equal(found, expected[name], equal_nan=True):
            is_same = (found == expected[name]) | (np.isnan(found) & np.isnan(expected[name]))
            at = tuple(int(index[0]) for index in np.nonzero(~is_same))
            yield f"{name}{list(at)} is {found[at]}; expected {expected[name][at]}"


def _expected(
    batch: RolloutBatch, call: CallRecord, lengths: LengthsConfig, pad_id: int
) -> dict[str, npt.NDArray[Any]]:
    """The tensors, laid out from what the engines said."""
    rows = _rows(batch)
    size, (width, answer) = len(rows), _widths(rows, call, lengths)
    whole, response = (size, width + answer), (size, answer)
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full(whole, pad_id, dtype=np.int64),
        "attention_mask": np.zeros(whole, dtype=np.int64),
        "response_mask": np.zeros(response, dtype=np.int64),
        "rollout_log_probs": np.zeros(response, dtype=np.float32),
        "weight_versions": np.full(response, NO_VERSION, dtype=np.int32),
        "trainable": np.array([t.trainable and s.trainable is not False for t, s in rows], bool),
        # NumPy makes None NaN.
        "rewards": np.array([sample.reward for sample in batch.samples], dtype=np.float32),
        "groups": np.array([t.group for t, _ in rows], dtype=np.int64),
    }
    routed = [segment.transcript.routed_experts() for _, segment in rows]
    if shape := next((each.shape[1:] for each in routed if each is not None), None):
        arrays["routed_experts"] = np.full((*whole, *shape), NO_EXPERT, dtype=np.int16)
    answers = [each for t in batch.trajectories for each in Answers(t, call).by_segment]
    for at, ((_, segment), said) in enumerate(zip(rows, answers, strict=True)):
        if len(said) == sum(1 for _ in segment.transcript.generated_spans()):
            _fill(arrays, at, Row(segment.transcript, said), width)
    if any(segment.token_rewards is not None for _, segment in rows):
        arrays["token_rewards"] = np.zeros(response, dtype=np.float32)
        for at, (_, segment) in enumerate(rows):
            transcript, values = segment.transcript, segment.token_rewards
            count = transcript.response_length - transcript.trailing_observation_length
            arrays["token_rewards"][at, :count] = np.nan if values is None else values[:count]
    attention = arrays["attention_mask"]
    arrays["position_ids"] = (attention.cumsum(axis=1) - 1) * attention
    arrays["prompts"] = arrays["input_ids"][:, :width]
    arrays["responses"] = arrays["input_ids"][:, width:]
    if call.layout == "padded":
        return arrays
    is_token = attention.astype(np.bool_)
    places = {"prompts": is_token[:, :width], **dict.fromkeys(_WHOLE, is_token)}
    return {
        name: array if array.ndim == 1 else array[places.get(name, is_token[:, width:])]
        for name, array in arrays.items()
    }


def _widths(
    rows: list[tuple[Trajectory, Segment]], call: CallRecord, lengths: LengthsConfig
) -> tuple[int, int]:
    """P and R."""
    transcripts = [segment.transcript for _, segment in rows]
    prompt = max((each.prompt_length for each in transcripts), default=0)
    stops = [each.response_length - each.trailing_observation_length for each in transcripts]
    return (
        trim_width(prompt, lengths.prompt, call.trim),
        trim_width(max(stops, default=0), lengths.response, call.trim),
    )


def _values(tensor: Any) -> npt.NDArray[Any]:
    """What it holds; of a jagged one row after row."""
    values: npt.NDArray[Any] = (tensor.values() if tensor.is_nested else tensor).numpy()
    return values


def _rows(batch: RolloutBatch) -> list[tuple[Trajectory, Segment]]:
    return [(each, segment) for each in batch.trajectories for segment in each.segments]


def _fill(arrays: dict[str, npt.NDArray[Any]], at: int, row: Row, width: int) -> None:
    start, stop = row.prompt_length, row.stop
    place, count = slice(width - start, width - start + stop), stop - start
    arrays["input_ids"][at, place] = row.ids[:stop]
    arrays["attention_mask"][at, place] = 1
    arrays["response_mask"][at, :count] = row.mask[start:stop]
    arrays["rollout_log_probs"][at, :count] = row.log_probs[start:stop]
    arrays["weight_versions"][at, :count] = row.weight_versions[start:stop]
    if row.routed_experts is not None:
        arrays["routed_experts"][at, place] = row.routed_experts[:stop]


def _sample_anomalies(batch: RolloutBatch) -> Iterator[str]:
    places = [(t, at) for t in batch.trajectories for at in range(len(t.segments))]
    if len(batch.samples) != len(places):
        yield f"{len(batch.samples)} samples for {len(places)} segments"
        return
    for row, (sample, (trajectory, at)) in enumerate(zip(batch.samples, places, strict=True)):
        if (sample.row, sample.segment) != (row, at):
            yield f"sample {row} says that it is row {sample.row}, segment {sample.segment}"
        segment = trajectory.segments[at]
        owners = dict.fromkeys(_OF_TRAJECTORY, trajectory) | dict.fromkeys(_OF_SEGMENT, segment)
        for name, owner in owners.items():
            if getattr(sample, name) != getattr(owner, name):
                yield f"sample {row}: {name} is not that of its {type(owner).__name__.lower()}"
        reward = trajectory.reward if segment.reward is None else segment.reward
        if sample.reward != reward:
            yield f"sample {row}: reward is not that of its trajectory"
        if sample.trainable != (trajectory.trainable and segment.trainable is not False):
            yield f"sample {row}: trainable is not that of its trajectory"


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}{array.shape}"
