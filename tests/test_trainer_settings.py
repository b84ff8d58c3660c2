"""What trainers' adapters share: settings by name, groups, and engines that a trainer serves."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import pytest

import every_outcome as given
import rollout
from recorded_server import RecordedServer, recorded_server
from rollout.config import HttpEngine
from rollout.errors import ConfigError, PromptError
from rollout.integrations.adapter import Adapter
from rollout.integrations.repeated_prompts import (
    Repeated,
    prompt_of_columns,
    sampling_of_trainer,
)
from rollout.integrations.served_engines import engines_at
from rollout.integrations.trainer_settings import TrainerSettings, settings_of
from rollout.integrations.verl.rows import VerlRow, call_of
from rollout.testing import simulated_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: The answer of servers: "yes", in the simulated vocabulary's bytes.
ANSWER = [*b"yes"]


def test_settings_are_found_by_module_or_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from every_outcome import settings\n")
    for named in (f"{given.__name__}:settings", f"{file}:settings"):
        assert settings_of(named, "option").engines == "config"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("settings", "option = 'settings': expected file.py:name or package.module:name"),
        ("nowhere.py:settings", "nowhere.py is no file"),
        ("every_outcome:nothing", "every_outcome has no 'nothing'"),
        ("every_outcome:ENDINGS", "of a TrainerSettings, got tuple"),
        (3, "option = 3: expected file.py:name"),
    ],
)
def test_settings_that_are_none_are_refused_by_the_option(named: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(named, "option")


def test_settings_with_a_wrong_field_are_refused() -> None:
    with pytest.raises(ConfigError, match="engines = 'theirs': expected 'trainer' or 'config'"):
        given.settings(engines="theirs")
    with pytest.raises(TypeError, match="RolloutConfig"):
        TrainerSettings(config="conf.py")  # type: ignore[arg-type]


def test_sampling_of_a_trainer_is_translated_and_what_changes_nothing_is_left_out() -> None:
    assert sampling_of_trainer(
        {"temperature": 0.5, "max_tokens": 9, "top_k": 0, "n": 1, "stop": [], "logprobs": 0}, "x"
    ) == {"temperature": 0.5, "max_new_tokens": 9, "top_k": -1}
    with pytest.raises(ConfigError, match=r"x\.bad_words = \['no'\]: engines here have no such"):
        sampling_of_trainer({"bad_words": ["no"]}, "x")


def test_prompt_of_that_makes_no_prompt_is_named() -> None:
    made: Any = None
    with pytest.raises(PromptError, match="prompt_of returned None; expected a Prompt"):
        prompt_of_columns({"prompt": "q"}, lambda _: made, {})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"raw_prompt": None}, "row 0 has raw_prompt = None; expected a list or array"),
        ({"raw_prompt": [5]}, r"row 0 has raw_prompt = \[5\]"),
        ({"uid": ["a"]}, r"row 0 has uid = \['a'\]; expected a text or a number"),
        ({"extra_info": {"tool_selection": 5}}, r"row 0 has extra_info\.tool_selection = 5"),
        (None, "no rows; expected at least one"),
    ],
)
def test_rows_of_verl_with_odd_columns_are_refused_by_name(columns: Any, said: str) -> None:
    given_columns = {"raw_prompt": [{"role": "user", "content": "x"}], **(columns or {})}
    row = VerlRow(kwargs=given_columns, info={}, sampling_params={})
    with pytest.raises(PromptError, match=said):
        call_of([] if columns is None else [row], lambda _: "tool_agent", None)


async def sglang(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
    """SGLang's answer, of weights 3."""
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, token, None] for token in ANSWER],
        "completion_tokens": len(ANSWER),
    }
    await send(f"data: {json.dumps({'output_ids': ANSWER, 'meta_info': meta})}\n\n")


async def vllm(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
    """vLLM's answer."""
    scored = {"token_logprobs": [-0.5] * len(ANSWER)}
    choice = {"token_ids": ANSWER, "logprobs": scored, "finish_reason": "stop"}
    await send(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")


def save_model(directory: Path) -> None:
    """A tokenizer and a configuration of what the servers serve."""
    simulated_tokenizer().save_pretrained(directory)
    facts = {"model_type": "qwen2", "vocab_size": 600, "max_position_embeddings": 20_000}
    (directory / "config.json").write_text(json.dumps(facts))


def serve_answers(server: RecordedServer) -> None:
    """Answer as SGLang's server and as vLLM's."""
    server.on("GET /server_info", json.dumps({"max_req_input_len": 20_000}))
    server.on("GET /v1/models", json.dumps({"data": [{"id": "theirs", "max_model_len": 20_000}]}))
    server.on("GET /health", "")
    server.on_stream("POST /generate", sglang)
    server.on_stream("POST /v1/completions", vllm)


@pytest.mark.parametrize(("api", "version"), [("sglang", 3), ("vllm", 0)])
def test_adapter_generates_on_servers_that_the_trainer_serves(
    api: Literal["sglang", "vllm"], version: int, tmp_path: Path
) -> None:
    save_model(tmp_path)

    async def run() -> None:
        async with recorded_server() as server:
            serve_answers(server)
            served = engines_at(
                given.single_turn(engines="trainer"), [server.url], api=api, model=str(tmp_path)
            )
            assert isinstance(served.config.engine, HttpEngine)
            adapter = await anyio.to_thread.run_sync(Adapter, served)
            try:
                prompts = Repeated(prompts=[given.prompt_for("completed")], places=[[0, 1]])
                placed = await adapter.rows(prompts, step=1, validate=False)
            finally:
                await anyio.to_thread.run_sync(adapter.close)
        assert [row.response_ids.tolist() for row in placed.rows] == [ANSWER] * 2
        assert placed.places == [0, 1]
        assert {*placed.rows[0].weight_versions.tolist()} == {version}
        asked = [path for path, _ in server.bodies]
        assert asked == ["/generate" if api == "sglang" else "/v1/completions"] * 2

    anyio.run(run)


def test_engines_of_a_trainer_without_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the trainer names no servers"):
        engines_at(given.single_turn(engines="trainer"), [], api="vllm", model=None)


def test_adapter_gives_weights_to_engines_of_its_configuration() -> None:
    adapter = Adapter(given.settings())
    weights = rollout.DiskWeights(str(Path(__file__).parent))
    try:
        adapter.update_weights(version=9, source=weights)
        prompts = Repeated(prompts=[given.prompt_for("limit")], places=[[0]])
        placed = anyio.run(partial(adapter.rows, prompts, step=None, validate=False))
    finally:
        adapter.close()
    assert {*placed.rows[0].weight_versions.tolist()} == {-1, 9}
    assert placed.metrics["outcomes/limit"] == 1
