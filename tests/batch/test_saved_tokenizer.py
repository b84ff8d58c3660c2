"""A saved batch knows its tokenizer, and can be read without being told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rollout
from race_situations import add, user
from rollout import RolloutBatch, RolloutError
from rollout.cli.report import write_reports
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("question", tool_call("add", a=2, b=3)).then("It is 5.")


async def saved(directory: Path, **options: Any) -> RolloutBatch:
    async with rollout.open_rollout(SCENARIO.config(**options), [add]) as runtime:
        batch: RolloutBatch = await runtime.generate([user("question")])
    batch.save(directory)
    return batch


def rewritten(directory: Path, **changes: Any) -> None:
    """Change what ``meta.json`` says of the tokenizer; no changes take it out, as of old."""
    path = directory / "meta.json"
    meta = json.loads(path.read_text())
    meta["tokenizer"].update(changes)
    if not changes:
        del meta["tokenizer"]
    path.write_text(json.dumps(meta))


async def test_saved_batch_decodes_and_prints_without_being_told(tmp_path: Path) -> None:
    batch = await saved(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert loaded.decode is not None
    assert loaded.tokenizer is not None
    record = json.loads((tmp_path / "meta.json").read_text())["tokenizer"]
    assert record["path"] == "simulated"
    (before,), (after,) = batch.trajectories, loaded.trajectories
    assert loaded.decode(after.transcript.ids().tolist()).endswith("It is 5.<|im_end|>")
    assert str(after) == str(before)
    assert "[trained]" in str(after)
    assert [str(each) for each in rollout.load_trajectories(tmp_path)] == [str(before)]
    loaded.save(tmp_path / "again")
    again = RolloutBatch.load(tmp_path / "again")
    assert again.tokenizer == loaded.tokenizer
    for name in ("trajectories.jsonl", "samples.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


async def test_saved_batch_of_before_it_knew_its_tokenizer_still_loads(tmp_path: Path) -> None:
    await saved(tmp_path)
    rewritten(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert (loaded.decode, loaded.tokenizer) == (None, None)
    assert str(loaded.trajectories[0]).endswith("[assistant]\nIt is 5.")
    told = RolloutBatch.load(tmp_path, tokenizer="simulated")
    assert str(told.trajectories[0]).startswith("[prompt, not trained]")


async def test_saved_batch_whose_tokenizer_is_gone_says_so_when_it_decodes(tmp_path: Path) -> None:
    await saved(tmp_path)
    gone = str(tmp_path / "no" / "model")
    rewritten(tmp_path, path=gone)
    loaded = RolloutBatch.load(tmp_path)
    assert loaded.decode is not None
    with pytest.raises(RolloutError) as caught:
        loaded.decode([1, 2])
    assert str(caught.value).startswith(f"the batch's tokenizer, that of {gone}, cannot be loaded")
    assert "RolloutBatch.load(..., tokenizer=)" in str(caught.value)
    assert str(loaded.trajectories[0]).endswith("[assistant]\nIt is 5.")
    loaded.save(tmp_path / "again")
    assert len(RolloutBatch.load(tmp_path / "again")) == 1
    moved = RolloutBatch.load(tmp_path, tokenizer="simulated")
    assert "[trained]" in str(moved.trajectories[0])


async def test_report_of_a_saved_batch_without_events_shows_its_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await saved(tmp_path)
    console = Console()
    write_reports(str(tmp_path), console)
    told = capsys.readouterr().out
    rewritten(tmp_path, path=str(tmp_path / "gone"))
    write_reports(str(tmp_path), console)
    assert "shown as ids" not in told
    assert "shown as ids" in capsys.readouterr().out
