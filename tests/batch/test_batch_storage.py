"""A batch comes back from disk as it was, and a damaged one is refused by name."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.batch import RolloutBatch, collate
from rollout.chat import Transcript
from rollout.chat.trajectory import Trajectory
from rollout.config import LengthsConfig
from rollout.errors import RolloutError
from rollout.types import Cause, Message, Outcome, Prompt, ToolCall

if TYPE_CHECKING:
    from pathlib import Path

FILES = ["meta.json", "metrics.json", "samples.jsonl", "tensors.safetensors", "trajectories.jsonl"]
LENGTHS = LengthsConfig(prompt=8, response=16)
FLOATS = st.floats(width=32)


def spoken(log_probs: list[float] | None = None) -> Transcript:
    transcript = Transcript()
    transcript.append_prompt([0x5A, 0xFC])
    floats = [-0.1, -1e-45, -0.0] if log_probs is None else log_probs
    half = len(floats) // 2
    versions = [(7, half), (8, len(floats) - half)]
    transcript.append_generated(
        list(range(len(floats))), floats, versions=versions, finish_reason="stop"
    )
    transcript.append_observation([0xE9, 1])
    transcript.append_generated([], [], versions=[], finish_reason="abort")
    return transcript


def trajectories(**fields: Any) -> list[Trajectory]:
    full = Trajectory(
        uid="Zürich ✓",
        group=0,
        member=0,
        transcript=spoken(),
        outcome=Outcome.LENGTH,
        reason="response",
        limit_source="lengths.response",
        reward=0.1,
        turn_scores=[0.5],
        tool_rewards=[1.0, -1.0],
        num_turns=3,
        metrics={"generation_s": 0.25},
        prompt=Prompt(
            messages=[Message(role="user", content="日本")], uid="Zürich ✓", ground_truth={"a": 1}
        ),
        messages=[
            Message(role="user", content="日本"),
            Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"x": [1]}),)),
        ],
        extra={"note": "naïve", "nested": {"list": [1, 2.5, None, True]}},
    )
    rejected = Trajectory(
        uid="q",
        group=1,
        member=0,
        transcript=Transcript(),
        outcome=Outcome.REJECTED,
        cause=Cause(type="TemplateError", message="no role", traceback="…"),
        trainable=False,
    )
    return [msgspec.structs.replace(full, **fields), rejected]


def text_of(ids: Any) -> str:
    return "".join(chr(token) for token in ids)


def written(rows: list[Any]) -> list[Any]:
    """Rows as JSON has them, without their transcripts."""
    plain = []
    for row in rows:
        names = [name for name in row.__struct_fields__ if name != "transcript"]
        fields = {name: getattr(row, name) for name in names}
        plain.append(json.loads(msgspec.json.encode(fields, enc_hook=repr)))
    return plain


def assert_equal_transcripts(one: Transcript, other: Transcript) -> None:
    assert one.spans == other.spans
    assert one.ids_bytes() == other.ids_bytes()
    assert one.log_probs().tobytes() == other.log_probs().tobytes()
    assert one.weight_versions().tobytes() == other.weight_versions().tobytes()


def test_batch_tensors_of_a_trainer_come_back_under_any_name(tmp_path: Path) -> None:
    batch = collate(trajectories(), LENGTHS, 0, "packed")
    own = {f"image.{name}": torch.arange(2) for name in ("offsets", "values")}
    own["tile.offsets"] = torch.ones(2, 3)
    batch.tensors.update(own)
    batch.save(tmp_path)
    loaded: Any = RolloutBatch.load(tmp_path).tensors
    assert loaded.keys() == batch.tensors.keys()
    assert all(torch.equal(loaded[name], value) for name, value in own.items())


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_batch_saved_and_loaded_is_the_same(layout: Any, tmp_path: Path) -> None:
    batch = collate(trajectories(), LENGTHS, 0, layout, decode=text_of)
    batch.save(tmp_path / "new" / "batch")
    loaded = RolloutBatch.load(tmp_path / "new" / "batch")
    assert sorted(path.name for path in (tmp_path / "new" / "batch").iterdir()) == FILES
    assert loaded.tensors.batch_size == batch.tensors.batch_size
    assert set(loaded.tensors.keys()) == set(batch.tensors.keys())
    for key, value in batch.tensors.items():
        other = loaded.tensors[key]
        assert (other.dtype, other.layout) == (value.dtype, value.layout)
        for one, two in zip(value.unbind(), other.unbind(), strict=True):
            assert one.numpy().tobytes() == two.numpy().tobytes()
    assert loaded.samples == batch.samples
    assert loaded.metrics == batch.metrics
    assert written(loaded.trajectories) == written(batch.trajectories)
    for one, two in zip(batch.trajectories, loaded.trajectories, strict=True):
        assert_equal_transcripts(one.transcript, two.transcript)
    assert loaded.decode is None
    if layout == "packed":  # keys of equal lengths can be combined
        product = loaded.tensors["rollout_log_probs"] * loaded.tensors["response_mask"]
        floats = [np.float32(-0.1).item(), np.float32(-1e-45).item(), -0.0]
        assert [row.tolist() for row in product.unbind()] == [floats, []]


@given(st.lists(FLOATS, max_size=8), FLOATS, st.dictionaries(st.text(), FLOATS, max_size=3))
def test_batch_any_floats_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    log_probs: list[float],
    score: float,
    metrics: dict[str, float],
) -> None:
    directory = tmp_path_factory.mktemp("floats")
    rows = trajectories(transcript=spoken(log_probs), turn_scores=[score], metrics=metrics)
    collate(rows, LENGTHS, 0).save(directory)
    loaded = RolloutBatch.load(directory)
    one, two = rows[0].transcript.log_probs(), loaded.trajectories[0].transcript.log_probs()
    assert np.array_equal(one, two, equal_nan=True)
    assert np.array_equal(np.signbit(one), np.signbit(two)) or np.isnan(one).any()
    for row in (loaded.samples[0], loaded.trajectories[0]):
        assert repr(row.turn_scores) == repr([score])
        assert repr(row.metrics) == repr(metrics)


def test_batch_trajectory_lines_can_be_read_by_people(tmp_path: Path) -> None:
    collate(trajectories(), LENGTHS, 0, decode=text_of).save(tmp_path)
    line = json.loads((tmp_path / "trajectories.jsonl").read_text().splitlines()[0])
    assert line["uid"] == "Zürich ✓"
    assert line["outcome"] == "length"
    assert line["spans"] == [
        {"kind": "prompt", "ids": [0x5A, 0xFC], "text": "Zü"},
        {
            "kind": "generated",
            "ids": [0, 1, 2],
            "text": "\x00\x01\x02",
            "log_probs": [np.float32(-0.1).item(), np.float32(-1e-45).item(), -0.0],
            "versions": [[7, 1], [8, 2]],
            "finish_reason": "stop",
        },
        {"kind": "observation", "ids": [0xE9, 1], "text": "é\x01"},
        {"kind": "generated", "ids": [], "text": "", "finish_reason": "abort"},
    ]


def test_batch_without_rows_or_texts_comes_back(tmp_path: Path) -> None:
    collate(trajectories(), LENGTHS, 0).save(tmp_path)
    assert '"text"' not in (tmp_path / "trajectories.jsonl").read_text()
    collate([], LENGTHS, 0).save(tmp_path, overwrite=True)
    loaded = RolloutBatch.load(tmp_path)
    assert (len(loaded), loaded.samples, loaded.trajectories) == (0, [], [])
    assert loaded.tensors["input_ids"].shape == (0, 24)


def test_batch_save_where_another_batch_is_is_refused_and_leaves_it(tmp_path: Path) -> None:
    first, second = (collate(rows, LENGTHS, 0) for rows in (trajectories(), trajectories()[1:]))
    first.save(tmp_path)
    with pytest.raises(RolloutError, match=re.escape(f"{tmp_path} holds meta.json, ")):
        second.save(tmp_path)
    assert len(RolloutBatch.load(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    second.save(tmp_path / "1")  # beside it, and below
    assert (len(RolloutBatch.load(tmp_path / "1")), len(RolloutBatch.load(tmp_path))) == (1, 2)


def test_batch_save_over_a_file_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(RolloutError, match=r"holds metrics\.json, of another batch "):
        collate(trajectories(), LENGTHS, 0).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert (tmp_path / "metrics.json").read_text() == "{}"


def test_batch_save_that_may_overwrite_replaces_the_earlier_batch_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    collate(trajectories(), LENGTHS, 0).save(tmp_path)
    collate(trajectories()[1:], LENGTHS, 0, "packed").save(tmp_path, overwrite=True)
    assert [row.uid for row in RolloutBatch.load(tmp_path).samples] == ["q"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "notes.txt"])


def test_batch_save_that_fails_leaves_the_earlier_batch(tmp_path: Path) -> None:
    def broken(ids: Any) -> str:
        raise RuntimeError("no text")

    collate(trajectories(), LENGTHS, 0).save(tmp_path)
    with pytest.raises(RuntimeError, match="no text"):
        collate(trajectories()[:1], LENGTHS, 0, decode=broken).save(tmp_path, overwrite=True)
    assert len(RolloutBatch.load(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


# What JSON cannot hold


def test_batch_odd_extra_values_are_kept_as_text_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Grader:
        def __repr__(self) -> str:
            return "<Grader 7>"

    extra = {
        "grader": Grader(),
        "array": np.array([[1, 2]]),
        "tensor": torch.tensor([1.5]),
        3: (1,),
    }
    prompt = Prompt(messages=[], ground_truth=Grader())
    with caplog.at_level(logging.WARNING, "rollout.batch"):
        collate(trajectories(extra=extra, prompt=prompt), LENGTHS, 0).save(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    expected = {"grader": "<Grader 7>", "array": [[1, 2]], "tensor": [1.5], "3": [1]}
    assert loaded.samples[0].extra == loaded.trajectories[0].extra == expected
    assert loaded.trajectories[0].prompt == Prompt(messages=[], ground_truth="<Grader 7>")
    for name in ("extra['grader']", "prompt['ground_truth']"):
        assert f"'Zürich ✓' member 0: {name} is saved as text" in caplog.text


def test_batch_half_of_a_surrogate_pair_is_escaped(tmp_path: Path) -> None:
    call = ToolCall(name="f", arguments={"x": "\ud83d"})
    message = Message(role="assistant", content="", tool_calls=(call,))
    collate(trajectories(extra={"k": "a\ud800"}, messages=[message]), LENGTHS, 0).save(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert loaded.samples[0].extra == {"k": "a\\ud800"}
    assert loaded.trajectories[0].messages[0].tool_calls[0].arguments == {"x": "\\ud83d"}


def test_batch_metrics_of_any_kind_of_number_come_back_as_numbers(tmp_path: Path) -> None:
    metrics = {"ok": True, "count": 2, "share": np.float32(0.5)}
    collate(trajectories(metrics=metrics), LENGTHS, 0).save(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert loaded.samples[0].metrics == loaded.trajectories[0].metrics == metrics


def test_batch_reward_of_no_number_is_told_apart_from_an_unknown_one(tmp_path: Path) -> None:
    collate(trajectories(reward=math.nan), LENGTHS, 0).save(tmp_path)
    first, second = RolloutBatch.load(tmp_path).samples
    assert first.reward is not None
    assert math.isnan(first.reward)
    assert second.reward is None


# Damage


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    collate(trajectories(), LENGTHS, 0).save(tmp_path)
    return tmp_path


def reason(directory: Path) -> str:
    with pytest.raises(RolloutError) as caught:
        RolloutBatch.load(directory)
    return str(caught.value)


def seal(directory: Path) -> None:
    """Make the files' checksums agree again, as one who edits a batch by hand would."""
    meta = json.loads((directory / "meta.json").read_text())
    for name in meta["files"]:
        meta["files"][name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    (directory / "meta.json").write_text(json.dumps(meta))


def test_batch_missing_directory_is_refused(tmp_path: Path) -> None:
    assert reason(tmp_path / "no").startswith(f"{tmp_path / 'no' / 'meta.json'} does not exist; ")


@pytest.mark.parametrize("name", [name for name in FILES if name != "meta.json"])
def test_batch_missing_or_changed_file_is_named(saved: Path, name: str) -> None:
    path = saved / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert f"{path} is not the file that meta.json lists, by its checksum" in reason(saved)
    path.unlink()
    assert reason(saved) == f"{path} cannot be read: No such file or directory"


def test_batch_damaged_meta_is_refused(saved: Path) -> None:
    path = saved / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "format": 2}))
    assert reason(saved) == f"{path}: format 2; this version reads format 3"
    path.write_text(json.dumps({**meta, "files": {}}))
    assert reason(saved).startswith(f"{path} does not list metrics.json, ")
    path.write_text("{")
    assert reason(saved).startswith(f"{path}: ")


def test_batch_line_that_was_edited_is_named(saved: Path) -> None:
    path = saved / "trajectories.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    del second["trainable"]
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}")
    seal(saved)
    assert reason(saved) == f"{path}, line 2: Object missing required field `trainable`"
    first["spans"][1]["log_probs"].pop()
    path.write_text(json.dumps(first))
    seal(saved)
    assert reason(saved).startswith(f"{path}, line 1: append_generated: 3 ids, 2 log-probs")


def test_batch_tensors_that_are_no_safetensors_are_refused(saved: Path) -> None:
    path = saved / "tensors.safetensors"
    path.write_bytes(b"\x80\x04pickle")
    seal(saved)
    assert reason(saved).startswith(f"{path} cannot be read as tensors: ")


def test_batch_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RolloutError, match=r"file/batch cannot be written: "):
        collate(trajectories(), LENGTHS, 0).save(tmp_path / "file" / "batch")


def test_batch_tensor_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    batch = collate(trajectories(), LENGTHS, 0)
    batch.tensors["inner"] = batch.tensors.clone()
    with pytest.raises(RolloutError, match=r"tensors\['inner'\] cannot be saved"):
        batch.save(tmp_path)
