"""verl's reward workers and teachers, asked as verl's own worker asks them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from verl_side import (
    CUSTOM,
    ScriptedServers,
    TokenOutput,
    batch_of,
    both,
    call,
    config_of,
    differences,
    opened,
    save_files,
    torch,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

ANSWERS: dict[str, list[Any]] = {"sum": [call("add", a=1, b=2), "The sum is 3."], "hi": ["Hello."]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_files(tmp_path_factory.mktemp("model"))


class RewardWorker:
    """An actor's handle: scores by the length of the response, and raises where it is told to."""

    def __init__(self, failing: str = "never") -> None:
        self.compute_score = self
        self.asked: list[Any] = []
        self._failing = failing

    async def remote(self, data: Any) -> dict[str, Any]:
        self.asked.append(data)
        row = data.non_tensor_batch
        if self._failing in row["raw_prompt"][0][0]["content"]:
            raise RuntimeError("no score")
        length = int(row["response_len"][0])
        extra = {"acc": length > 20, "length": float(length), "pred": f"{length} tokens"}
        return {"reward_score": length / 100, "reward_extra_info": extra}


def test_scores_of_reward_workers_are_where_verl_has_them(files: Path) -> None:
    batch = batch_of(["the sum", "hi there"], n=4, agent="tool_agent")
    handles = [RewardWorker()]
    theirs, ours = both(config_of(files), ANSWERS, batch, reward_loop_worker_handles=handles)
    assert differences(theirs, ours) == []
    assert ours.batch["rm_scores"].sum(dim=1)[0] == theirs.batch["rm_scores"].sum(dim=1)[0] > 0
    assert ours.meta_info["reward_extra_keys"] == ["acc", "length", "pred"]
    wanted, asked = handles[0].asked[:8], handles[0].asked[8:]
    one = next(each for each in asked if each.non_tensor_batch["uid"][0] == "uid-1")
    other = next(each for each in wanted if each.non_tensor_batch["uid"][0] == "uid-1")
    assert one.non_tensor_batch.keys() == other.non_tensor_batch.keys()
    for name in other.batch.keys():  # noqa: SIM118
        assert torch.equal(one.batch[name], other.batch[name])


def test_row_without_a_score_keeps_the_scores_of_the_others(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """verl raises there; with a score missing it leaves all of them out."""
    handles = [RewardWorker(failing="hi")]
    batch = batch_of(["the sum", "hi there"], n=2, agent="tool_agent")
    with (
        caplog.at_level(logging.WARNING, "rollout.integrations"),
        opened(
            config_of(files), ScriptedServers(ANSWERS), reward_loop_worker_handles=handles
        ) as manager,
    ):
        ours = manager.generate_sequences(batch)
    scores, mask = ours.batch["rm_scores"].sum(dim=1), ours.batch["response_mask"].sum(dim=1)
    assert (scores[:2] > 0).all()
    assert (scores[2:] == 0).all()
    assert (mask[:2] > 0).all()
    assert (mask[2:] == 0).all()
    assert ours.non_tensor_batch["pred"].tolist()[2:] == ["", ""]
    assert ours.non_tensor_batch["acc"].tolist()[2:] == [False, False]
    assert ours.meta_info["timing"]["agent_loop/rows/unrewarded"] == 2
    said = [record.getMessage() for record in caplog.records if "no reward" in record.getMessage()]
    assert said == ["2 of 4 rows have no reward: RowPolicy.unrewarded = 'group_mean'"]


def test_failed_member_has_the_mean_of_its_group(files: Path) -> None:
    class Once(ScriptedServers):
        async def generate(self, request_id: str, **options: Any) -> TokenOutput:
            if request_id.endswith("/1"):
                raise RuntimeError("lost")
            return await super().generate(request_id, **options)

    config = config_of(files, f"{CUSTOM}.scheduling.max_retries=0")
    handles = [RewardWorker()]
    batch = batch_of(["hi there"], n=3, agent="tool_agent")
    with opened(config, Once(ANSWERS), reward_loop_worker_handles=handles) as manager:
        ours = manager.generate_sequences(batch)
    scores = ours.batch["rm_scores"].sum(dim=1)
    assert scores.tolist() == pytest.approx([0.07, 0.07, 0.07])
    assert ours.batch["response_mask"].sum(dim=1).tolist() == [7, 0, 7]


def test_failed_rows_of_a_validation_count_as_nothing(files: Path) -> None:
    answers = {**ANSWERS, "bad": [RuntimeError("lost")]}
    config = config_of(files, f"{CUSTOM}.scheduling.max_retries=0")
    handles = [RewardWorker()]
    batch = batch_of(["hi there", "a bad one"], agent="tool_agent", validate=True)
    with opened(config, ScriptedServers(answers), reward_loop_worker_handles=handles) as manager:
        ours = manager.generate_sequences(batch)
    assert ours.batch["rm_scores"].sum(dim=1).tolist() == pytest.approx([0.07, 0.0])


class Teacher:
    """A teacher's client: its log-prob of a token is a hundredth of the token."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, **options: Any) -> TokenOutput:
        self.asked.append(options)
        ids = options["prompt_ids"]
        fields = {
            "prompt_ids": [[each] for each in ids],
            "prompt_logprobs": [[-each / 100] for each in ids],
        }
        return TokenOutput(token_ids=[0], extra_fields=fields)


@pytest.mark.parametrize("with_rewards", [True, False])
def test_teachers_are_asked_as_verl_asks_them(files: Path, with_rewards: bool) -> None:
    teacher = Teacher()
    options: dict[str, Any] = {"teacher_client": {"default": teacher}}
    if with_rewards:
        options["reward_loop_worker_handles"] = [RewardWorker()]
    config = config_of(
        files,
        "distillation.enabled=true",
        "distillation.n_gpus_per_node=2",
        "distillation.nnodes=1",
        "distillation.teacher_models.teacher_model.model_path=teacher",
        "distillation.teacher_models.teacher_model.num_replicas=1",
    )
    batch = batch_of(["the sum", "hi there"], n=2, agent="tool_agent")
    theirs, ours = both(config, ANSWERS, batch, **options)
    assert differences(theirs, ours) == []
    assert ours.batch["teacher_logprobs"].shape == (4, 1760, 1)
    assert ("rm_scores" in ours.batch) == with_rewards
    assert len(teacher.asked) == 8


def test_rows_are_left_to_a_trainer_that_scores_them_itself(files: Path) -> None:
    config = config_of(files, f"{CUSTOM}.rows.unrewarded=error")
    with opened(config, ScriptedServers(ANSWERS)) as manager:
        ours = manager.generate_sequences(batch_of(["hi there"], n=2))
    assert "rm_scores" not in ours.batch
    assert ours.batch["response_mask"].sum(dim=1).tolist() == [7, 7]
    assert ours.meta_info["timing"]["agent_loop/rows/unrewarded"] == 0
