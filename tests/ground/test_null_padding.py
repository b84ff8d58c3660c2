"""Keys that Arrow adds to mappings, with None: prompts are as they were without them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rollout
from rollout import Message, Outcome, Prompt, ToolCall, function_tool
from rollout.integrations.openrlhf.response import prompt_of_arguments
from rollout.integrations.repeated_prompts import prompt_of_columns
from rollout.integrations.skyrl.output import prompts_of as skyrl_prompts
from rollout.integrations.slime.samples import prompts_of as slime_prompts
from rollout.integrations.trl.prompt_groups import prompt_of
from rollout.integrations.verl.rows import VerlRow, call_of
from rollout.interactions import Interaction, InteractionContext, InteractionTurn
from rollout.scheduling.prompt_files import read_prompts
from rollout.testing import Scenario, tool_call

CALL = {
    "id": "c1",
    "type": "function",
    "function": {
        "name": "lookup",
        "arguments": {"city": "Paris", "opts": {"a": [{"b": 1}, None]}},
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "tool_call_id": "c1"},
    {"role": "user", "content": "And now?"},
]
PADDED_CALL = {
    **CALL,
    "function": {
        "name": "lookup",
        "arguments": {
            "city": "Paris",
            "expr": None,
            "opts": {"a": [{"b": 1, "c": None}, None], "d": None},
        },
    },
}
PADDED: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Look.", "image_url": None, "video": None}],
        "tool_calls": None,
        "tool_call_id": None,
        "name": None,
    },
    {"role": "assistant", "content": None, "tool_calls": [PADDED_CALL], "tool_call_id": None},
    {"role": "tool", "content": "found", "tool_calls": None, "tool_call_id": "c1"},
    {"role": "user", "content": "And now?", "tool_calls": None, "tool_call_id": None},
]
TRAINER_SAMPLING = {"top_p": 1.0, "temperature": 0.7}
SAMPLING, PADDED_SAMPLING = {"top_p": 0.5}, {"temperature": None, "top_p": 0.5}
KWARGS = {"lookup": {"db": "x", "create_kwargs": {"a": [None]}}}
PADDED_KWARGS = {
    "lookup": {"db": "x", "key": None, "create_kwargs": {"a": [None], "b": None}},
    "add": None,
}
TRUTH = {"answer": 4, "unit": None}
ROW = {
    "prompt": PADDED,
    "sampling": PADDED_SAMPLING,
    "tools_kwargs": PADDED_KWARGS,
    "ground_truth": TRUTH,
    "extra_info": {"about": {"note": None}},
}


def check(prompt: Prompt, *, messages: list[dict[str, Any]] = MESSAGES) -> None:
    assert list(prompt.messages) == messages
    assert prompt.sampling == SAMPLING
    assert prompt.tools_kwargs == KWARGS
    assert prompt.ground_truth == TRUTH
    assert prompt.extra["about"] == {"note": None}


def test_prompt_from_memory_is_as_without_padding() -> None:
    prompt = Prompt(
        messages=PADDED,
        sampling=PADDED_SAMPLING,
        tools_kwargs=PADDED_KWARGS,  # type: ignore[arg-type]
        ground_truth=TRUTH,
        extra={"about": {"note": None}, "none": None},
    )
    check(prompt)
    assert prompt.extra["none"] is None
    assert PADDED[1]["tool_calls"][0] is PADDED_CALL  # the caller's own are not changed
    assert "expr" in PADDED_CALL["function"]["arguments"]


def test_prompt_of_mappings_and_arrays_is_as_without_padding() -> None:
    calls = np.array([MappingProxyType(PADDED_CALL), None], dtype=object)[:1]
    messages = (MappingProxyType({"role": "assistant", "tool_calls": calls, "content": None}),)
    prompt = Prompt(messages=messages)
    assert prompt.messages == ({"role": "assistant", "tool_calls": [CALL]},)


def test_prompt_of_records_loses_padding_and_keeps_what_the_model_sampled() -> None:
    arguments = {"city": "Paris", "expr": None}
    written = ToolCall(name="lookup", arguments=arguments, id="a")
    sampled = ToolCall(name="lookup", arguments=arguments, id="b", raw="lookup(…)")
    message = Message(
        role="assistant",
        tool_calls=(written, sampled),
        fields={"reasoning_content": None, "look": {"a": None}},
        extra={"mine": None},
    )
    (made,) = Prompt(messages=[message]).messages
    assert isinstance(made, Message)
    assert [call.arguments for call in made.tool_calls] == [{"city": "Paris"}, arguments]
    assert (made.fields, made.extra) == ({"look": {}}, {"mine": None})


def test_prompt_with_arguments_as_json_text_keeps_what_was_written() -> None:
    call = {"function": {"name": "lookup", "arguments": '{"expr": null}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert Prompt(messages=messages).messages == messages


def test_prompt_message_extra_is_left_alone() -> None:
    (message,) = Prompt(
        messages=[{"role": "user", "content": "a", "name": None, "extra": {"b": None}}]
    ).messages
    assert message == {"role": "user", "content": "a", "extra": {"b": None}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompts_file_is_as_without_padding(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(ROW))
    else:
        # A list of structs or strings is no column: the content of all messages is a list here.
        messages = [
            {**m, "content": [{"type": "text", "text": m["content"]}]}
            if isinstance(m.get("content"), str)
            else m
            for m in MESSAGES
        ]
        other = {
            "messages": [{"role": "user", "content": None, "name": "x"}],
            "sampling": {"temperature": 0.1},
            "tools_kwargs": {"lookup": {"key": 1}, "add": {"x": 1}},
            "ground_truth": TRUTH,
            "extra_info": {"about": {"note": "a"}},
        }
        row = {**ROW, "messages": messages}
        del row["prompt"]
        pq.write_table(pa.Table.from_pylist([row, other]), file)
        prompt, second = read_prompts(file)
        check(prompt, messages=messages)
        assert second.tools_kwargs == other["tools_kwargs"]
        assert second.messages == [{"role": "user", "name": "x"}]
        return
    (prompt,) = read_prompts(file)
    check(prompt)


def test_trl_row_is_as_without_padding() -> None:
    columns = {name: value for name, value in ROW.items() if name != "prompt"}
    prompt = prompt_of(PADDED, columns, "u", TRAINER_SAMPLING)
    assert prompt.sampling == {**TRAINER_SAMPLING, **SAMPLING}
    check(msgspec.structs.replace(prompt, sampling=SAMPLING))


def columns_prompt() -> Prompt:
    return prompt_of_columns(ROW, None, TRAINER_SAMPLING)


def skyrl_prompt() -> Prompt:
    extras = {name: value for name, value in ROW.items() if name != "prompt"}
    given = {"prompts": [PADDED], "env_extras": [extras], "sampling_params": TRAINER_SAMPLING}
    return skyrl_prompts(given).prompts[0]


def slime_prompt() -> Prompt:
    metadata = {name: value for name, value in ROW.items() if name != "prompt"}
    sample = Namespace(metadata=metadata, prompt=PADDED, label=None, group_index=0)
    return slime_prompts([sample], TRAINER_SAMPLING).prompts[0]


@pytest.mark.parametrize("convert", [columns_prompt, skyrl_prompt, slime_prompt])
def test_row_of_a_trainer_is_as_without_padding(convert: Callable[[], Prompt]) -> None:
    prompt = convert()
    assert prompt.sampling == {**TRAINER_SAMPLING, **SAMPLING}  # None says nothing
    check(msgspec.structs.replace(prompt, sampling=SAMPLING))


def test_openrlhf_messages_as_text_are_as_without_padding() -> None:
    settings = Namespace(temperature=0.7, top_p=None)
    prompt = prompt_of_arguments(json.dumps(PADDED), "4", settings, None)
    assert (list(prompt.messages), prompt.sampling) == (MESSAGES, {"temperature": 0.7})


def test_verl_row_is_as_without_padding() -> None:
    kwargs = {
        "raw_prompt": np.array(PADDED, dtype=object),
        "extra_info": {"about": {"note": None}, "tools_kwargs": PADDED_KWARGS},
        "reward_model": {"ground_truth": TRUTH},
    }
    row = VerlRow(kwargs=kwargs, info={"validate": False}, sampling_params={"temperature": 1.0})
    (prompt,) = call_of([row], lambda _: "tool_agent", Namespace(tool_names=())).prompts
    assert prompt.tools_kwargs == KWARGS
    check(msgspec.structs.replace(prompt, sampling=SAMPLING))


class Heard(Interaction):
    """A user who ends at once."""

    name = "heard"
    told: InteractionContext

    async def start(self, context: InteractionContext) -> None:
        Heard.told = context

    async def respond(self, messages: Any) -> InteractionTurn:
        return InteractionTurn("", is_done=True)


@function_tool
async def lookup(city: str, expr: str | None = "none", key: str = "no key") -> str:
    """Look a city up.

    Args:
        city: Where.
        expr: What of it.
        key: Of the database.
    """
    return f"{city} {expr} {key}"


@pytest.mark.anyio
async def test_runtime_batch_with_padding_is_the_batch_without() -> None:
    said = tool_call("lookup", city="Rome", expr=None)
    scenario = Scenario(seed=1).reply("now", said).then("Fine.")
    batches = []
    async with rollout.open_rollout(scenario.config(), [lookup]) as runtime:
        for messages, sampling, kwargs in (
            (PADDED[1:], PADDED_SAMPLING, {"lookup": {"key": None}, "add": None}),
            (MESSAGES[1:], SAMPLING, {}),
        ):
            prompt = Prompt(messages=messages, sampling=sampling, tools_kwargs=kwargs)  # type: ignore[arg-type]
            batches.append(await runtime.generate([prompt], samples=1, step=1))
    padded, plain = (batch.trajectories[0] for batch in batches)
    assert padded.outcome is plain.outcome is Outcome.COMPLETED
    assert list(padded.transcript.ids()) == list(plain.transcript.ids())
    sampled, result = padded.messages[-3:-1]
    assert sampled.tool_calls[0].arguments == {"city": "Rome", "expr": None}  # as the model said
    assert result.content == "Rome None no key"


@pytest.mark.anyio
async def test_runtime_user_gets_its_kwargs_without_padding() -> None:
    kwargs = {"name": "heard", "level": 3, "other": None}
    scenario = Scenario(seed=1).reply("now", "Fine.")
    config = scenario.config()
    prompt = Prompt(messages=MESSAGES[3:], extra={"interaction_kwargs": kwargs})
    async with rollout.open_rollout(config, interactions=[Heard]) as runtime:
        batch = await runtime.generate([prompt], samples=1)
    assert batch.trajectories[0].outcome is Outcome.COMPLETED
    assert Heard.told.kwargs == {"name": "heard", "level": 3}
    assert prompt.extra == {"interaction_kwargs": kwargs}
