"""verl's agent loops and batches in the runtime: groups, failures, limits, and who may call."""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl runs on it)
import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BatchFeature
from verl_side import (
    CUSTOM,
    Adapter,
    AgentLoopBase,
    AgentLoopOutput,
    DataProto,
    ScriptedServers,
    TokenOutput,
    batch_of,
    both,
    call,
    config_of,
    differences,
    make_config,
    opened,
    save_files,
    torch,
)

from rollout import AgentContext, AgentLoop, register_agent
from rollout.testing import encode_text, simulated_tokenizer

BACKENDS = ["asyncio", "trio"]
ANSWERS: dict[str, list[Any]] = {
    "sum": [call("add", a=1, b=2), "The sum is 3."],
    "hi": ["Hello."],
    "again": ["One.", "Two."],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_files(tmp_path_factory.mktemp("model"))
    loops = ("Rewriting", "Raising", "TooLong", "Patient", "Stubborn", "Seeing")
    (directory / "loops.yaml").write_text(
        "".join(f"- {{name: {each}, _target_: {__name__}.{each}}}\n" for each in loops)
    )
    return directory


def loops_config(files: Path, *overrides: str) -> Any:
    path = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={files / 'loops.yaml'}"
    return config_of(files, path, *overrides)


def text_of(answered: DataProto, row: int) -> str:
    ids = answered.batch["input_ids"][row][answered.batch["attention_mask"][row].bool()]
    return str(simulated_tokenizer().decode(ids))


# --- callers --------------------------------------------------------------------------------------


def test_manager_is_awaited_in_a_loop(files: Path) -> None:
    async def main() -> DataProto:
        manager = await Adapter.create(make_config(files), ScriptedServers(ANSWERS))
        try:
            one, other = await asyncio.gather(
                manager.generate_sequences(batch_of(["hi there"], n=2)),
                manager.generate_sequences(batch_of(["hi there"], n=3)),
            )
            assert len(other) == 3
            return one
        finally:
            manager.close()

    assert len(asyncio.run(main())) == 2


def test_manager_is_called_within_a_loop_without_awaiting(files: Path) -> None:
    async def main() -> int:
        answered = plainly(make_config(files))
        return len(answered)

    assert asyncio.run(main()) == 2


def plainly(config: Any) -> DataProto:
    manager = Adapter.create(config, ScriptedServers(ANSWERS))
    try:
        return manager.generate_sequences(batch_of(["hi there"], n=2))
    finally:
        manager.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_call_leaves_the_manager_usable(files: Path, backend: str) -> None:
    async def main() -> None:
        config = make_config(files, f"{CUSTOM}.backend={backend}")
        manager = await Adapter.create(config, Hanging(ANSWERS))
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(manager.generate_sequences(batch_of(["wait"], n=2)), 0.3)
            assert manager.rollout.statistics().running == 0
            assert len(await manager.generate_sequences(batch_of(["hi there"]))) == 1
        finally:
            manager.close()

    asyncio.run(main())


# --- groups ---------------------------------------------------------------------------------------


def test_repeated_rows_become_the_members_of_one_prompt(files: Path) -> None:
    servers = ScriptedServers(ANSWERS)
    with opened(make_config(files), servers) as manager:
        manager.generate_sequences(batch_of(["hi there", "again"], n=2))
    asked = sorted(each["request_id"] for each in servers.calls)
    assert asked == ["3/uid-0@0/0", "3/uid-0@0/1", "3/uid-1@2/0", "3/uid-1@2/1"]


def test_scattered_rows_of_a_group_keep_their_places(files: Path) -> None:
    batch = batch_of(["hi there", "again"], n=2).select_idxs([0, 2, 1, 3])
    with opened(make_config(files), ScriptedServers(ANSWERS)) as manager:
        answered = manager.generate_sequences(batch)
    said = [text_of(answered, row).split("assistant\n")[1][:3] for row in range(4)]
    assert said == ["Hel", "One", "Hel", "One"]


def test_requests_are_named_as_verl_names_them_where_all_is_determined(files: Path) -> None:
    servers = ScriptedServers(ANSWERS)
    config = make_config(files, "actor_rollout_ref.rollout.full_determinism=true")
    with opened(config, servers) as manager:
        manager.generate_sequences(batch_of(["hi there"], n=2))
    assert sorted(each["request_id"] for each in servers.calls) == ["det-0", "det-1"]
    assert sorted(each["priority"] for each in servers.calls) == [0, 1]


# --- prompts --------------------------------------------------------------------------------------


def test_tools_are_selected_by_the_row(files: Path) -> None:
    batch = batch_of(["hi there"], n=2, agent="tool_agent")
    for info in batch.non_tensor_batch["extra_info"]:
        info["tool_selection"] = ["look", "no such tool"]
    theirs, ours = both(config_of(files), ANSWERS, batch)
    assert differences(theirs, ours) == []
    assert '"name": "look"' in text_of(ours, 0)
    assert '"name": "add"' not in text_of(ours, 0)


def test_content_in_parts_is_run_by_verls_own_loop(files: Path) -> None:
    batch = batch_of(["hi there"], n=2, agent="tool_agent")
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi there"}]}]
    batch.non_tensor_batch["raw_prompt"][:] = [parts, parts]
    theirs, ours = both(config_of(files), ANSWERS, batch)
    assert differences(theirs, ours) == []


def test_calls_beyond_the_bound_are_answered(files: Path) -> None:
    one = "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=1"
    answers = {"sum": [call("add", a=1, b=2) + "\n" + call("add", a=3, b=4), "Three."]}
    config = config_of(files, one, response=600)
    theirs, ours = both(config, answers, batch_of(["the sum"], agent="tool_agent"))
    assert "not executed: at most 1 calls per turn" in text_of(ours, 0)
    assert "not executed" not in text_of(theirs, 0)
    assert ours.non_tensor_batch["tool_rewards"].tolist() == [[0.0]]


def test_custom_chat_template_holds_here_too(files: Path) -> None:
    opening = "{% if add_generation_prompt %}>{% endif %}"
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}" + opening
    config = make_config(files)
    config.actor_rollout_ref.model.custom_chat_template = template
    theirs, ours = both(config, ANSWERS | {"[hi]": ["Hello."]}, batch_of(["hi"]))
    assert differences(theirs, ours) == []
    assert text_of(ours, 0).startswith("[hi]>")


# --- agents ---------------------------------------------------------------------------------------


@register_agent("asks_twice")
class AsksTwice(AgentLoop):
    """An agent of this library, with a word of its own for the batch."""

    async def run(self, context: AgentContext) -> None:
        """Ask, and ask again."""
        await context.generate()
        context.observe([{"role": "user", "content": "again"}])
        context.extra["asked"] = 2
        await context.generate()


def test_agents_of_this_library_run_under_their_names(files: Path) -> None:
    with opened(make_config(files), ScriptedServers(ANSWERS)) as manager:
        answered = manager.generate_sequences(batch_of(["again"], n=2, agent="asks_twice"))
    assert text_of(answered, 0).count("<|im_start|>assistant") == 2
    assert answered.non_tensor_batch["asked"].tolist() == [2, 2]
    assert answered.non_tensor_batch["max_global_steps"].tolist() == [7, 7]


class Loop(AgentLoopBase):
    """What the loops below share."""

    async def ask(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        return await self.server_manager.generate(
            request_id="one", prompt_ids=prompt_ids, sampling_params=sampling_params
        )

    def output(self, prompt_ids: list[int], response_ids: list[int]) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            num_turns=2,
            metrics={},
        )


class Rewriting(Loop):
    """Writes its history anew before its second question, and returns that."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        first = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        answer = await self.ask(first, sampling_params)
        said = simulated_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
        told = [*kwargs["raw_prompt"], {"role": "assistant", "content": said.upper()}]
        second = await self.ct_build_initial_tokens([*told, {"role": "user", "content": "again"}])
        return self.output(second, (await self.ask(second, sampling_params)).token_ids)


class Raising(Loop):
    """Fails where its prompt says so."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        answer = await self.ask(prompt, sampling_params)
        if "sum" in kwargs["raw_prompt"][0]["content"]:
            raise ValueError("no idea")
        return self.output(prompt, answer.token_ids)


class TooLong(Loop):
    """Returns more than there is room for."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return self.output([1], [2] * 1000)


class Patient(Loop):
    """Gives up on an answer by itself."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        try:
            await asyncio.wait_for(self.ask(prompt, sampling_params), 0.2)
        except TimeoutError:
            return self.output(prompt, encode_text("gave up"))
        raise AssertionError


class Stubborn(Loop):
    """Does not let itself be cancelled."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        while not STUBBORN_MAY_END.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return self.output([1], [2])


STUBBORN_MAY_END = threading.Event()


@pytest.mark.parametrize("backend", BACKENDS)
def test_loop_that_cannot_be_cancelled_is_given_up(files: Path, backend: str) -> None:
    limits = "{trajectory_s: 0.5, cleanup_s: 0.3}"
    config = loops_config(files, f"{CUSTOM}={{backend: {backend}, limits: {limits}}}")
    STUBBORN_MAY_END.clear()
    with opened(config, ScriptedServers(ANSWERS)) as manager:
        batch = batch_of(["hi there"], agent="Stubborn")
        ours = manager.generate_sequences(batch)
        assert ours.batch["response_mask"].sum() == 0
        assert manager.metrics["outcomes/failed/unresponsive"] == 1
        STUBBORN_MAY_END.set()


def test_loop_that_rewrites_its_history_is_run_as_it_is(files: Path) -> None:
    theirs, ours = both(loops_config(files), ANSWERS, batch_of(["again"], n=2, agent="Rewriting"))
    assert "ONE." in text_of(ours, 0)
    assert differences(theirs, ours) == []


def test_loop_that_raises_fails_its_row_alone(files: Path) -> None:
    with opened(loops_config(files), ScriptedServers(ANSWERS)) as manager:
        batch = batch_of(["the sum", "hi there"], n=2, agent="Raising")
        ours = manager.generate_sequences(batch)
    assert ours.batch["response_mask"].sum(dim=1).tolist() == [0, 0, 7, 7]
    # What it had is there, and not trained on.
    assert '"name": "add"' in text_of(ours, 0)
    assert manager.metrics["outcomes/failed/agent"] == 2
    assert manager.metrics["rows/masked"] == 2


def test_loop_with_an_impossible_output_fails_its_row(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(loops_config(files), ScriptedServers(ANSWERS)) as manager:
        ours = manager.generate_sequences(batch_of(["hi there"], agent="TooLong"))
    assert ours.batch["response_mask"].sum() == 0
    assert "returned 1000 response_ids; expected at most actor_rollout_ref.rollout." in caplog.text


class Hanging(ScriptedServers):
    """Never answers what it is told to wait for."""

    async def generate(self, request_id: str, **options: Any) -> TokenOutput:
        if "wait" in simulated_tokenizer().decode(options["prompt_ids"]):
            await asyncio.Event().wait()
        return await super().generate(request_id, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_loop_may_give_up_on_an_answer(files: Path, backend: str) -> None:
    config = loops_config(files, f"{CUSTOM}.backend={backend}")
    with opened(config, Hanging(ANSWERS)) as manager:
        ours = manager.generate_sequences(batch_of(["wait"], agent="Patient"))
    assert text_of(ours, 0).endswith("gave up")
    # No engine sampled that.
    assert ours.batch["response_mask"].sum() == 0
    assert manager.metrics["outcomes/failed/never_generated"] == 1


@pytest.mark.parametrize("loops", ["rollout", "verl"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_answer_that_never_comes_costs_its_row_at_the_limit(
    files: Path, backend: str, loops: str
) -> None:
    custom = f"{{backend: {backend}, agent_loops: {loops}, limits: {{generation_s: 0.5}}}}"
    with opened(make_config(files, f"{CUSTOM}={custom}"), Hanging(ANSWERS)) as manager:
        ours = manager.generate_sequences(batch_of(["wait", "hi there"], n=2))
    assert ours.batch["response_mask"].sum(dim=1).tolist() == [0, 0, 7, 7]
    assert manager.metrics["outcomes/deadline"] == 2
    assert np.isfinite(ours.batch["rollout_log_probs"]).all()


class Seeing(Loop):
    """Hands over images, as loops for models that see do."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        answer = await self.server_manager.generate(
            request_id="one",
            prompt_ids=prompt,
            sampling_params={**sampling_params, "stop": ["never"]},
            image_data=["an image", "another"],
        )
        output = self.output(prompt, answer.token_ids)
        output.multi_modal_data = {"images": ["an image", "another"]}
        return output


class Processor:
    """What verl asks of a processor: features of images, and positions in three dimensions."""

    chat_template = "a template"
    image_token_id = 7

    def __call__(self, text: list[str], images: Any = None, **_: Any) -> Any:
        count = len(images or ())
        return BatchFeature(
            {
                "input_ids": torch.zeros(1, len(text[0])),
                "attention_mask": torch.ones(1, len(text[0])),
                "pixel_values": torch.full((4 * count, 3), 0.5),
                "image_grid_thw": torch.tensor([[1, 2, 2]] * count),
            }
        )

    def get_rope_index(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        positions = (attention_mask.cumsum(-1) - 1).clip(0)
        return torch.stack([positions, positions + 1, positions + 2]), None


def test_features_of_images_are_in_the_batch_as_verl_has_them(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.workers.config.model.hf_processor", lambda *_, **__: Processor())
    config = loops_config(files)
    servers = ScriptedServers(ANSWERS)
    batch = batch_of(["hi there", "again"], n=2, agent="Seeing")
    theirs, ours = both(config, ANSWERS, batch)
    with opened(config, servers) as manager:
        manager.generate_sequences(batch)
    one, other = (each.non_tensor_batch.pop("multi_modal_inputs") for each in (theirs, ours))
    assert differences(theirs, ours) == []
    assert ours.batch["position_ids"].shape == (4, 4, 1760)
    for mine, wanted in zip(other, one, strict=True):
        assert mine.keys() == wanted.keys() >= {"pixel_values", "images_seqlens"}
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert all(each["image_data"] == ["an image", "another"] for each in servers.calls)
    assert all(each["sampling_params"]["stop"] == ["never"] for each in servers.calls)
