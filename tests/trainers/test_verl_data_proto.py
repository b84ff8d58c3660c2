"""The adapter's batches against those of verl's own worker and manager, for the same answers."""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl runs on it)
import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl_side import (
    CUSTOM,
    END,
    AgentLoopWorker,
    AgentState,
    DataProto,
    ScriptedServers,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    agent_loop_registry,
    batch_of,
    both,
    call,
    config_of,
    differences,
    opened,
    save_files,
    torch,
    verls_own,
)

from rollout.testing import simulated_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

ANSWERS: dict[str, list[Any]] = {
    "sum": [call("add", a=1, b=2), "The sum is 3."],
    "twice": [
        call("add", a=1, b=2) + "\n" + call("look", what="that"),
        call("note", text="3"),
        "Done.",
    ],
    "hi": ["Hello."],
    "long": ["Read."],
}


LOOPS = ["rollout", "verl"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_files(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_batch_with_tools_and_a_long_prompt_is_the_one_that_verl_makes(
    files: Path, backend: str, loops: str
) -> None:
    custom = f"{CUSTOM}={{backend: {backend}, agent_loops: {loops}}}"
    config = config_of(files, custom)
    questions = ["the sum", "do it twice", "hi there", "long " * 400]
    batch = batch_of(questions, n=4, agent="tool_agent")
    theirs, ours = both(config, ANSWERS, batch)
    assert differences(theirs, ours) == []
    assert len(ours) == 16
    assert ours.batch["response_mask"].sum() > 0
    cut = ours.meta_info["timing"]["agent_loop/rows/cut_prompts"]
    assert cut == (4 if loops == "rollout" else 0)  # verl's own loops cut by themselves


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_single_turn_batch_is_the_one_that_verl_makes(
    files: Path, backend: str, loops: str
) -> None:
    config = config_of(files, f"{CUSTOM}={{backend: {backend}, agent_loops: {loops}}}")
    batch = batch_of(["hi there", "the sum"], n=4)
    theirs, ours = both(config, ANSWERS, batch)
    assert differences(theirs, ours) == []
    assert list(ours.non_tensor_batch["agent_name"]) == ["single_turn_agent"] * 8


@pytest.mark.parametrize("loops", LOOPS)
def test_answers_that_fill_the_response_are_cut_as_verl_cuts_them(files: Path, loops: str) -> None:
    answers = {
        "flood": [[97] * 200],
        "second": [call("add", a=1, b=2), [98] * 200],
        "tool": [call("look", what="that"), "Never said."],
    }
    config = config_of(files, f"{CUSTOM}.agent_loops={loops}", prompt=1500, response=100)
    batch = batch_of(["a flood", "a second", "a tool"], n=2, agent="tool_agent")
    theirs, ours = both(config, answers, batch)
    assert differences(theirs, ours) == []
    assert ours.batch["attention_mask"][0, 1500:].all()


@pytest.mark.parametrize("loops", LOOPS)
def test_validation_is_sampled_as_verl_samples_it(files: Path, loops: str) -> None:
    overrides = (
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.25",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.5",
        "actor_rollout_ref.rollout.val_kwargs.top_k=3",
        f"{CUSTOM}.agent_loops={loops}",
    )
    config = config_of(files, *overrides)
    batch = batch_of(["hi there"], agent="tool_agent", validate=True)
    servers, own = ScriptedServers(ANSWERS), ScriptedServers(ANSWERS)
    asyncio.run(verls_own(AgentLoopWorker(config, servers), copy.deepcopy(batch)))
    with opened(config, own) as manager:
        manager.generate_sequences(batch)
    wanted, asked = servers.calls[0]["sampling_params"], own.calls[0]["sampling_params"]
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["max_tokens"] == 260


def test_rows_without_sampling_are_greedy_among_others(files: Path) -> None:
    batch = batch_of(["hi there"], n=2, agent="tool_agent")
    batch.non_tensor_batch["__do_sample__"] = np.array([True, False])
    servers = ScriptedServers(ANSWERS)
    with opened(config_of(files), servers) as manager:
        answered = manager.generate_sequences(batch)
    temperatures = sorted(each["sampling_params"]["temperature"] for each in servers.calls)
    assert temperatures == [0.0, 1.0]
    assert "__do_sample__" in answered.non_tensor_batch


def test_batches_without_log_probs_have_no_column_of_them(files: Path) -> None:
    config = config_of(files, "actor_rollout_ref.rollout.calculate_log_probs=false")
    batch = batch_of(["the sum"], n=2, agent="tool_agent")
    theirs, ours = both(config, ANSWERS, batch, log_probs=False)
    assert differences(theirs, ours) == []
    assert "rollout_log_probs" not in ours.batch


def test_answered_batches_are_united_put_together_and_split(files: Path) -> None:
    config = config_of(files)
    batch = batch_of(["the sum", "hi there"], n=2, agent="tool_agent")
    with opened(config, ScriptedServers(ANSWERS)) as manager:
        first = manager.generate_sequences(copy.deepcopy(batch))
        second = manager.generate_sequences(copy.deepcopy(batch))
    for each in (first, second):
        each.meta_info.pop("timing")
    trainers = DataProto.from_single_dict(
        {"dummy_tensor": torch.zeros(4, 1), **copy.deepcopy(batch.non_tensor_batch)}
    )
    united = trainers.union(copy.deepcopy(first))
    assert len(united) == 4
    assert {"dummy_tensor", "responses"} <= set(united.batch.keys())
    both_of_them = DataProto.concat([first, second])
    assert len(both_of_them) == 8
    halves = both_of_them.chunk(2)
    assert [len(each) for each in halves] == [4, 4]
    assert torch.equal(halves[1].batch["responses"], second.batch["responses"])


# --- failures ------------------------------------------------------------------------------------


def test_failed_generation_costs_its_row_and_no_other(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {**ANSWERS, "bad": [RuntimeError("the server is gone")]}
    config = config_of(files, f"{CUSTOM}.scheduling.max_retries=0")
    questions = ["the sum", "a bad one", "hi there"]
    worker = AgentLoopWorker(config, ScriptedServers(answers))
    with pytest.raises(RuntimeError, match="the server is gone"):
        asyncio.run(verls_own(worker, batch_of(questions, agent="tool_agent")))
    whole = [questions[0], questions[2]]
    theirs = asyncio.run(verls_own(worker, batch_of(whole, agent="tool_agent")))
    with (
        caplog.at_level(logging.WARNING, "rollout.integrations"),
        opened(config, ScriptedServers(answers)) as manager,
    ):
        ours = manager.generate_sequences(batch_of(questions, agent="tool_agent"))
        again = manager.generate_sequences(batch_of(questions, agent="tool_agent"))
    for name in theirs.batch.keys():  # noqa: SIM118
        assert torch.equal(ours.batch[name][[0, 2]], theirs.batch[name])
    # A row of one end-of-sequence token that nobody sampled.
    assert ours.batch["responses"][1, 0] == END
    assert ours.batch["response_mask"][1].sum() == 0
    assert ours.batch["attention_mask"][1, 1500:].sum() == 1
    timing = ours.meta_info["timing"]
    assert (timing["agent_loop/rows/empty"], timing["agent_loop/rows/untrainable"]) == (1, 1)
    assert len(again) == 3
    said = [record.getMessage() for record in caplog.records if "no response" in record.message]
    assert len(said) == 1


def test_failed_tool_is_an_answer_in_our_words(files: Path) -> None:
    answers = {"odd": [call("look", what="nothing"), call("nobody"), "Well."]}
    batch = batch_of(["an odd one"], agent="tool_agent")
    theirs, ours = both(config_of(files, response=600), answers, batch)
    decode = simulated_tokenizer().decode
    texts = [
        decode(each.batch["input_ids"][0][each.batch["attention_mask"][0].bool()])
        for each in (theirs, ours)
    ]
    assert "Error executing tool 'look': there is nothing" in texts[0]
    assert "ValueError: there is nothing" in texts[1]
    assert "unknown tool 'nobody'; known tools: " in texts[1]
    assert ours.non_tensor_batch["__num_turns__"][0] == theirs.non_tensor_batch["__num_turns__"][0]
    assert ours.non_tensor_batch["tool_rewards"][0] == theirs.non_tensor_batch["tool_rewards"][0]
    trained = [each.batch["response_mask"][0].sum() for each in (theirs, ours)]
    assert trained[0] == trained[1]


def test_empty_answer_trains_nothing(files: Path) -> None:
    """verl's tool agent makes a response of the prompt then, and trains on padding."""
    with opened(config_of(files), ScriptedServers({"hi": [[]]})) as manager:
        ours = manager.generate_sequences(batch_of(["hi there"], n=2, agent="tool_agent"))
    assert ours.batch["response_mask"].sum() == 0
    assert ours.batch["responses"][0, 0] == END


# --- interactions ---------------------------------------------------------------------------------


class UserLoop(ToolAgentLoop):
    """verl's tool agent with a simulated user, as its versions before 0.8 had one."""

    async def _handle_generating_state(
        self, agent_data: Any, sampling_params: Any, **_: Any
    ) -> Any:
        state = await super()._handle_generating_state(agent_data, sampling_params)
        if len(agent_data.response_mask) >= self.response_length or state != AgentState.TERMINATED:
            return state
        done, said, score, _more = await USER.generate_response("id", agent_data.messages)
        agent_data.turn_scores.append(score)
        if done:
            return AgentState.TERMINATED
        before = list(agent_data.messages)
        agent_data.messages.append({"role": "user", "content": said})
        merged, mask, log_probs = await self.ct_merge_context_msg(
            before,
            agent_data.messages,
            agent_data.prompt_ids,
            agent_data.response_mask,
            agent_data.response_logprobs,
            tools=self.tool_schemas,
        )
        agent_data.prompt_ids, agent_data.response_mask = merged.token_ids, mask
        agent_data.response_logprobs = log_probs
        agent_data.user_turns += 1
        return AgentState.GENERATING


class Persistent:
    """Asks again once."""

    name = "persistent"

    def __init__(self, config: Any = None) -> None:
        pass

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> Any:
        answers = sum(message["role"] == "assistant" for message in messages)
        return answers > 1, "Are you sure?", 0.5 * answers, {}


USER = Persistent()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_batch_with_an_interaction_is_the_one_that_verl_makes(files: Path, backend: str) -> None:
    (files / "users.yaml").write_text(
        f"interaction:\n  - {{name: persistent, class_name: {__name__}.Persistent, config: {{}}}}\n"
    )
    custom = f"{{backend: {backend}, interaction_config_path: {files / 'users.yaml'}}}"
    config = config_of(files, f"{CUSTOM}={custom}")
    batch = batch_of(["tell me"], n=4, agent="tool_agent")
    for info in batch.non_tensor_batch["extra_info"]:
        info["interaction_kwargs"] = {"name": "persistent"}
    answers = {"tell": ["It is 3.", "Yes."]}
    entry = dict(agent_loop_registry["tool_agent"])
    worker = AgentLoopWorker(config, ScriptedServers(answers))
    agent_loop_registry["tool_agent"] = {"_target_": f"{__name__}.UserLoop"}
    try:
        theirs = asyncio.run(verls_own(worker, copy.deepcopy(batch)))
    finally:
        agent_loop_registry["tool_agent"] = entry
    with opened(config, ScriptedServers(answers)) as manager:
        ours = manager.generate_sequences(copy.deepcopy(batch))
    assert differences(theirs, ours) == []
    assert ours.non_tensor_batch["turn_scores"].tolist() == [[0.5, 1.0]] * 4


# --- agent loops ----------------------------------------------------------------------------------


class Restless(SingleTurnAgentLoop):
    """Asks twice from its prompt at once, and keeps the second answer; scores itself."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        first, second = await asyncio.gather(
            super().run(dict(sampling_params), **kwargs),
            super().run(dict(sampling_params), **kwargs),
        )
        assert first.response_ids == second.response_ids
        second.reward_score = 0.75
        second.extra_fields["asked"] = 2
        return second


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_loops_that_ask_twice_at_once_are_run_as_they_are(files: Path, backend: str) -> None:
    (files / "loops.yaml").write_text(f"- name: restless\n  _target_: {__name__}.Restless\n")
    config = config_of(
        files,
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={files / 'loops.yaml'}",
        f"{CUSTOM}.backend={backend}",
    )
    batch = batch_of(["hi there", "the sum"], n=4, agent="restless")
    theirs, ours = both(config, ANSWERS, batch)
    assert differences(theirs, ours) == []
    assert ours.batch["rm_scores"].sum() == 8 * 0.75
