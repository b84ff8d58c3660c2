"""The messages of a trajectory have the text of calls that could not be parsed."""

from __future__ import annotations

import pickle  # noqa: TID251  (as user code may)
from pathlib import Path
from typing import Any

import pytest

import rollout
from race_situations import add, user
from rollout import RolloutBatch, Trajectory
from rollout.config import AgentConfig, JournalConfig
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2,}}\n</tool_call>'
TEXTS = {
    "alone": BROKEN,
    "between words": f"First.\n{BROKEN}\nThen.",
    "beside a call": f"Both.\n{tool_call('add', a=1, b=2)}\n{BROKEN}",
    "twice": f"{BROKEN}\n{BROKEN}",
}


async def generated(text: str, **options: Any) -> tuple[RolloutBatch, list[list[Any]]]:
    """A batch whose first turn is this text, and the messages that its reward saw."""
    seen: list[list[Any]] = []

    def score(trajectory: Trajectory) -> float:
        seen.append(list(trajectory.messages))
        return 1.0

    scenario = Scenario(seed=1).reply("question", text).then("Done.")
    async with rollout.open_rollout(scenario.config(**options), [add], reward=score) as runtime:
        batch: RolloutBatch = await runtime.generate([user("question")], step=1)
    return batch, seen


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
async def test_message_of_an_invalid_call_keeps_its_text_wherever_it_is_read(
    text: str, tmp_path: Path
) -> None:
    journal = JournalConfig(path=str(tmp_path / "run.journal"))
    batch, (seen,) = await generated(text, journal=journal)
    (trajectory,) = batch.trajectories
    assert trajectory.cause is None
    calls = seen[1].tool_calls
    assert [call.name for call in calls] == ["add"] * text.count('"b"')
    shown = text if not calls else text.replace(tool_call("add", a=1, b=2), "")
    assert "".join((seen[1].content or "").split()) == "".join(shown.split())
    batch.save(tmp_path / "saved")
    (saved,) = RolloutBatch.load(tmp_path / "saved").trajectories
    (recorded,) = rollout.load_trajectories(tmp_path / "run.journal")
    for other in (trajectory, saved, recorded, pickle.loads(pickle.dumps(trajectory))):
        assert [m.content for m in other.messages] == [m.content for m in seen]


async def test_answer_of_a_last_turn_with_an_invalid_call_is_its_text() -> None:
    broken = '<tool_call>\n{"name": "add"'
    batch, _ = await generated(broken, agent=AgentConfig(max_assistant_turns=1))
    assert batch.trajectories[0].answer == broken


async def test_prompt_after_an_invalid_call_is_what_it_was() -> None:
    rows = {}
    for history in ("append_only", "inference_template"):
        agent = AgentConfig(history=history)  # type: ignore[arg-type]
        batch, _ = await generated(TEXTS["between words"], agent=agent)
        (trajectory,) = batch.trajectories
        assert batch.decode is not None
        text = batch.decode(trajectory.transcript.ids().tolist())
        assert text.count(BROKEN) == 1
        rows[history] = text
    assert rows["append_only"] == rows["inference_template"]
