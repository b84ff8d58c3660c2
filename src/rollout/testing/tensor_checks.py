"""Whether the tensors of a batch say what the engines said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.batch import RolloutBatch, Sample
from rollout.chat.transcript import NO_VERSION
from rollout.testing.transcript_checks import Row, split_answers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from rollout.config import LengthsConfig
    from rollout.testing.call_records import CallRecord

_SHARED_FIELDS = tuple(name for name in Sample.__struct_fields__ if name != "row")


def batch_anomalies(
    batch: RolloutBatch, call: CallRecord, lengths: LengthsConfig, pad_id: int
) -> Iterator[str]:
    """What is wrong with a batch in the padded layout.

    Shapes: B rows, P prompt length, R response length.

    Args:
        pad_id: What stands where no token is.
    """
    yield from _sample_anomalies(batch)
    expected = _expected(batch, call, lengths, pad_id)
    missing = sorted(expected.keys() - set(batch.tensors.keys()))
    if missing:
        yield f"the tensors have no {', '.join(missing)}"
    for name in expected.keys() - set(missing):
        found: npt.NDArray[Any] = batch.tensors[name].numpy()
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
    size, width = len(batch.trajectories), lengths.prompt
    whole, response = (size, width + lengths.response), (size, lengths.response)
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full(whole, pad_id, dtype=np.int64),
        "attention_mask": np.zeros(whole, dtype=np.int64),
        "response_mask": np.zeros(response, dtype=np.int64),
        "rollout_log_probs": np.zeros(response, dtype=np.float32),
        "weight_versions": np.full(response, NO_VERSION, dtype=np.int32),
        "trainable": np.array([t.trainable for t in batch.trajectories], dtype=np.bool_),
        # NumPy makes None NaN.
        "rewards": np.array([sample.reward for sample in batch.samples], dtype=np.float32),
        "groups": np.array([t.group for t in batch.trajectories], dtype=np.int64),
    }
    for at, trajectory in enumerate(batch.trajectories):
        records = call.generations.get(call.session_of(trajectory), [])
        answers = split_answers(trajectory, records)[1]
        if len(answers) == sum(1 for _ in trajectory.transcript.generated_spans()):
            _fill(arrays, at, Row(trajectory, answers), width)
    attention = arrays["attention_mask"]
    arrays["position_ids"] = (attention.cumsum(axis=1) - 1) * attention
    arrays["prompts"] = arrays["input_ids"][:, :width]
    arrays["responses"] = arrays["input_ids"][:, width:]
    return arrays


def _fill(arrays: dict[str, npt.NDArray[Any]], at: int, row: Row, width: int) -> None:
    start, stop = row.prompt_length, row.stop
    place, count = slice(width - start, width - start + stop), stop - start
    arrays["input_ids"][at, place] = row.ids[:stop]
    arrays["attention_mask"][at, place] = 1
    arrays["response_mask"][at, :count] = row.mask[start:stop]
    arrays["rollout_log_probs"][at, :count] = row.log_probs[start:stop]
    arrays["weight_versions"][at, :count] = row.weight_versions[start:stop]


def _sample_anomalies(batch: RolloutBatch) -> Iterator[str]:
    if len(batch.samples) != len(batch.trajectories):
        yield f"{len(batch.samples)} samples for {len(batch.trajectories)} trajectories"
        return
    for at, (sample, trajectory) in enumerate(zip(batch.samples, batch.trajectories, strict=True)):
        if sample.row != at:
            yield f"sample {at} says that it is row {sample.row}"
        for name in _SHARED_FIELDS:
            if getattr(sample, name) != getattr(trajectory, name):
                yield f"sample {at}: {name} is not that of its trajectory"


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}{array.shape}"
