"""Records that are larger than a frame of a journal may be."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import rollout
from journal_material import CALLED, add, config_of, cut_before_last_answers, prompts, run
from rollout import Group, Outcome, Prompt, PromptError, Reward, Trajectory, function_tool
from rollout.journal import log_file
from rollout.journal.records import EndRecord
from rollout.testing import run_virtual
from rollout.tools import ToolResult

MOST = 200_000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousands of bytes stand for a GiB."""
    monkeypatch.setattr(log_file, "MAX_RECORD", MOST)


def test_prompt_that_no_frame_can_hold_is_refused_by_its_field(tmp_path: Path) -> None:
    given = [Prompt(messages=[{"role": "user", "content": "quick"}], extra={"b": b"x" * MOST})]
    with pytest.raises(PromptError) as refused:
        run(config_of(tmp_path / "j"), given)
    assert re.fullmatch(
        r"prompts\[0\] is of 200,1\d\d bytes; expected at most 134,464 \(journal.path is set\)",
        str(refused.value),
    )


def test_trajectory_that_no_frame_can_hold_fails_by_its_field_alone(tmp_path: Path) -> None:
    def attaching(trajectory: Trajectory) -> Reward:
        large = {"large": b"x" * MOST} if trajectory.uid == "quick" else {}
        return Reward(value=1.0, extra={"small": 1, **large})

    path = tmp_path / "j"
    quick, whole = run(config_of(path), prompts("quick", "sum"), reward=attaching).trajectories
    assert (whole.outcome, whole.extra) == (Outcome.COMPLETED, {"small": 1})
    assert (quick.outcome, quick.reason, quick.extra) == (Outcome.FAILED, "journal", {})
    assert quick.cause is not None
    assert quick.cause.message.startswith("the trajectory is packed in 20")
    again = run(config_of(path), prompts("quick", "sum"), resume=True)
    assert again.statistics.returned == 2


def test_answer_that_no_frame_can_hold_is_left_out_and_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @function_tool("add")
    async def adding(a: int, b: int) -> ToolResult:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        CALLED.append((a, b))
        return ToolResult(str(a + b), data=b"x" * (MOST if a == 1 else 10))

    path = tmp_path / "j"
    with caplog.at_level(logging.WARNING, "rollout.journal"):
        whole = run(config_of(path), prompts("sum"), tools=[adding])
    assert "expected at most 200,000: it is not in the journal" in caplog.text
    half = cut_before_last_answers(path, EndRecord)
    resumed = run(config_of(half), prompts("sum"), tools=[adding], resume=True)
    assert CALLED == [(1, 1)]
    ids = [each.trajectories[0].transcript.ids().tolist() for each in (whole, resumed)]
    assert ids[0] == ids[1]


def test_group_that_is_written_as_a_whole_and_too_large_is_divided(tmp_path: Path) -> None:
    async def rewarded(group: Group) -> list[Reward]:
        return [Reward(value=1.0, extra={"large": b"x" * (MOST // 2)}) for _ in group.trajectories]

    def returned(*, resume: bool) -> tuple[set[Outcome], int]:
        async def act() -> tuple[set[Outcome], int]:
            config = config_of(tmp_path / "j")
            async with rollout.open_rollout(
                config, [add], group_reward=rewarded, resume=resume
            ) as runtime:
                batch = await runtime.generate(prompts("quick"), samples=3, step=0)
                statistics = runtime.statistics().journal
                assert statistics is not None
                return {each.outcome for each in batch.trajectories}, statistics.returned

        return run_virtual(act)

    assert returned(resume=False) == ({Outcome.COMPLETED}, 0)
    assert returned(resume=True) == ({Outcome.COMPLETED}, 3)
