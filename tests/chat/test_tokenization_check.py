"""A finished transcript is compared with its conversation rendered again, in the model's words."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from test_chat_formats import STOPS

import observed
import rollout
from chat_material import chat, tokenizer
from rollout import AgentLoop, Outcome, Prompt
from rollout.agents import register_agent
from rollout.chat import ChatTemplate, Transcript
from rollout.chat.drift import compare
from rollout.config import AgentConfig
from rollout.scheduling import tokenization
from rollout.testing import Scenario, run_virtual, tool_call
from rollout.types import Message

if TYPE_CHECKING:
    from rollout.agents import AgentContext
    from rollout.chat.drift import Drift

SPECIALS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>")
FOLLOWING = (
    [Message(role="tool", content="7", name="weather", tool_call_id="call_0")],
    [Message(role="user", content=" e\u0301 next ")],
    [],
)


@pytest.mark.parametrize(
    ("transcript", "rendering", "kind"),
    [
        ("a b", "a b", "identical"),
        ("a  b\n", "a b", "whitespace"),
        ("a<|im_end|>b", "a b", "special_tokens"),
        ("a<|im_end|>b", "a<|im_start|> b", "special_tokens"),
        ("<think>x</think>a", "a", "content"),
        ("a b", "a c", "content"),
        ("", "a", "content"),
    ],
)
def test_drift_is_the_least_kind_that_explains_every_difference(
    transcript: str, rendering: str, kind: str
) -> None:
    assert compare(transcript, rendering, SPECIALS).kind == kind
    assert compare(rendering, transcript, SPECIALS).kind == kind


def test_drift_of_reasoning_is_named_where_the_rendering_leaves_it_out() -> None:
    texts = ("q<think>\nx\n</think>\n\na<|im_end|>", "q a<|im_end|>")
    assert compare(*texts, SPECIALS, is_reasoning_stripped=True).kind == "reasoning_stripped"
    assert compare(*texts, SPECIALS).kind == "content"
    other = compare(texts[0], "q b<|im_end|>", SPECIALS, is_reasoning_stripped=True)
    assert other.kind == "content"


def test_drift_shows_the_first_difference_with_what_stands_around_it() -> None:
    head, tail = "h" * 60, "t" * 60
    drift = compare(f"{head}one two{tail}", f"{head}one  two{tail}!", SPECIALS)
    assert str(drift) == (
        "the transcript differs from its full rendering (content) at character 64: "
        f"{'h' * 36 + 'one []two' + 't' * 37!r} in the transcript, "
        f"{'h' * 36 + 'one [ ]two' + 't' * 37!r} in the rendering"
    )


def spoken(family: str, turns: tuple[str, str, str]) -> Drift:
    """The drift of a call with its result, an answer with a question after it, and an answer."""
    template, transcript = chat("qwen", family), Transcript()
    messages, said = [Message(role="user", content="q <|im_end|>")], {}
    transcript.append_prompt(template.prompt_ids(messages))
    for text, following in zip(turns, FOLLOWING, strict=True):
        ids = tokenizer("qwen").encode(text, add_special_tokens=False)
        transcript.append_generated(
            ids, [0.0] * len(ids), versions=[(0, len(ids))], finish_reason="stop"
        )
        said[len(messages)] = text
        messages.append(Message(role="assistant", content="as it was parsed"))
        if following:
            transcript.append_observation(template.observation_ids(following, after=ids))
            messages += following
    return template.drift(transcript, messages, said)


APPENDING = ("chatml", "qwen2_5", "qwen3", "qwen3_coder", "llama3", "mistral", "deepseek_v3",
             "glm4", "kimi_k2", "gemma")  # fmt: skip


@pytest.mark.parametrize("family", APPENDING)
def test_drift_of_formats_that_keep_their_history_is_none_whatever_the_spacing(
    family: str,
) -> None:
    end = STOPS[family][0]
    called = STOPS[family][-1]
    whole = (f"  call {{}}\n{called}", f"\n\n an  answer {end}", f" over \n{end}")
    cut = ("call", f"answer{end}", "over")
    assert spoken(family, whole).kind == "identical"
    assert spoken(family, cut).kind == "identical"


@pytest.mark.parametrize("family", ["qwen3", "glm4", "minimax_m2", "deepseek_r1", "deepseek_v3"])
def test_drift_of_formats_that_leave_out_reasoning_says_so(family: str) -> None:
    end, called = STOPS[family][0], STOPS[family][-1]
    turns = [f"<think>\nhm {at}\n</think>\n\nwords" for at in range(3)]
    drift = spoken(family, (turns[0] + called, turns[1] + end, turns[2] + end))
    assert drift.kind == "reasoning_stripped"
    assert "hm 0" in drift.transcript
    assert "hm 0" not in drift.rendering


@pytest.mark.parametrize("family", ["deepseek_r1", "minimax_m2"])
def test_drift_of_reasoning_that_the_prompt_opened_is_named_too(family: str) -> None:
    end = STOPS[family][0]
    opened = "" if chat("qwen", family).observe(FOLLOWING[0], after=None)[1] else "<think>"
    turns = (f"hm\n</think>\n\na{end}", f"{opened}hm</think>b{end}", f"hm</think>c{end}")
    drift = spoken(family, turns)
    assert drift.kind == "reasoning_stripped"


#: Opens its turns inside ``<think>``, and writes the history without what was thought (GLM-4.7).
OPENS_THINKING = """{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.role == 'assistant' %}{{ '</think>' ~ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"""


def test_drift_of_a_history_that_shares_half_a_tag_with_the_prompt_shows_whole_tags() -> None:
    template = ChatTemplate(tokenizer("qwen"), chat_template=OPENS_THINKING)
    transcript = Transcript()
    question = Message(role="user", content="q")
    transcript.append_prompt(template.prompt_ids([question]))
    text = "hm</think>a<|im_end|>"
    ids = template.text_ids(text)
    transcript.append_generated(
        ids, [0.0] * len(ids), versions=[(0, len(ids))], finish_reason="stop"
    )
    messages = [question, Message(role="assistant", content="a")]
    drift = template.drift(transcript, messages, {1: text})
    assert drift.kind == "reasoning_stripped"
    assert drift.transcript.endswith("assistant\n[<think>hm</think>]a<|im_end|>")
    assert drift.rendering.endswith("assistant\n[]a<|im_end|>")


def test_drift_of_results_written_behind_calls_only_is_judged_with_the_calls() -> None:
    drift = spoken("gemma4", ("call<|tool_response>", "answer<turn|>", "over<turn|>"))
    assert drift.kind == "reasoning_stripped"  # the empty thought that the prompt had opened
    assert "model\n[<|channel>thought\n<channel|>]call<|tool_response>" in drift.transcript
    assert "model\n[]call<|tool_response>" in drift.rendering


def test_drift_of_an_end_token_that_the_template_replaces_is_one_of_special_tokens() -> None:
    drift = spoken("gpt_oss", ("call<|call|>", "<|channel|>final<|message|>x<|return|>", "y"))
    assert drift.kind == "special_tokens"
    assert "[<|return|>]" in drift.transcript
    assert "[<|end|>]" in drift.rendering


# In a runtime


@register_agent("writes_behind_the_template")
class WritesBehindTheTemplate(AgentLoop):
    """Appends tokens that no message stands for: white space, or letters."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        text = context.prompt.extra["text"]
        context.observe([{"role": "user", "content": "go on"}])
        context.transcript.append_observation(list(text.encode()))
        await context.generate()


ANSWERS = Scenario(seed=1).reply("hello", "I see.").reply("go on", "Done.")


async def run(texts: list[str], **agent: Any) -> rollout.RolloutBatch:
    prompts = [
        Prompt(
            messages=[{"role": "user", "content": "hello"}],
            agent_name="writes_behind_the_template",
            extra={"text": text},
        )
        for text in texts
    ]
    config = ANSWERS.config(agent=AgentConfig(**agent))
    async with rollout.open_rollout(config) as runtime:
        return await runtime.generate(prompts)


@pytest.mark.anyio
async def test_tokenization_check_of_a_sample_compares_the_first_and_some_of_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "THEN_ONE_IN", 10)
    with caplog.at_level(logging.WARNING, logger="rollout"):
        batch = await run(["x"] * 32)
    assert {row.outcome for row in batch.trajectories} == {Outcome.COMPLETED}
    assert batch.metrics["tokenization/content"] == 8 + 3
    (logged,) = [each for each in caplog.messages if "differs" in each]
    assert "further ones of this kind are counted" in logged


#: Writes what tools answer otherwise once the conversation goes on.
CHECKS = """{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}
{%- if m.role == 'tool' and messages | length > 3 %}{{ ' (checked)' }}{% endif %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_tokenization_check_of_a_sample_finds_what_drifts_after_calls_only(tmp_path: Path) -> None:
    file = tmp_path / "checks.jinja"
    file.write_text(CHECKS)
    scenario = Scenario(seed=1).reply("add", tool_call("add", a=1, b=2)).then("It is 3.")
    scenario = scenario.reply("hello", "I see.")
    config = scenario.config()
    config = attrs.evolve(config, model=attrs.evolve(config.model, chat_template=str(file)))
    prompts = [Prompt(messages=[{"role": "user", "content": "hello"}]) for _ in range(20)]
    prompts += [Prompt(messages=[{"role": "user", "content": "add"}]) for _ in range(20)]

    async def act() -> rollout.RolloutBatch:
        async with rollout.open_rollout(config, [observed.add]) as runtime:
            return await runtime.generate(prompts)

    batch = run_virtual(act)
    assert batch.metrics["tokenization/identical"] == 8
    assert batch.metrics["tokenization/content"] == 8


@pytest.mark.anyio
async def test_tokenization_check_that_fails_by_itself_harms_no_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drift(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(ChatTemplate, "drift", drift)
    batch = await run(["x"])
    assert batch.trajectories[0].outcome is Outcome.COMPLETED
    assert batch.metrics["tokenization/refused"] == 1


@pytest.mark.anyio
async def test_tokenization_check_warns_once_for_each_kind_and_counts_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="rollout"):
        batch = await run(["", " ", "\n", "x", "yz"], tokenization_check="warn")
    assert {row.outcome for row in batch.trajectories} == {Outcome.COMPLETED}
    counted = {name: n for name, n in batch.metrics.items() if name.startswith("tokenization")}
    assert counted == {
        "tokenization/identical": 1,
        "tokenization/whitespace": 2,
        "tokenization/content": 2,
    }
    logged = [record.getMessage() for record in caplog.records if "differs" in record.getMessage()]
    assert len(logged) == 2  # the first of each kind to end


@pytest.mark.anyio
async def test_tokenization_check_strict_fails_the_trajectory_and_shows_where() -> None:
    batch = await run(["", "xyz", " "], tokenization_check="strict")
    fine, content, whitespace = batch.trajectories
    assert (fine.outcome, fine.trainable) == (Outcome.COMPLETED, True)
    for row, kind in ((content, "content"), (whitespace, "whitespace")):
        assert (row.outcome, row.reason) == (Outcome.FAILED, "tokenization")
        assert not row.trainable
        assert row.cause is not None
        assert f"full rendering ({kind}) at character " in row.cause.message
    assert content.cause is not None
    assert "assistant\\n[xyzI] see.<|im_end|>' in the transcript, " in content.cause.message
    assert "assistant\\n[I] see.<|im_end|>' in the rendering" in content.cause.message


@pytest.mark.anyio
async def test_tokenization_check_ignored_kinds_count_as_identical() -> None:
    batch = await run([" ", "x"], tokenization_check="strict", tokenization_ignore=("whitespace",))
    assert [row.outcome for row in batch.trajectories] == [Outcome.COMPLETED, Outcome.FAILED]
    assert batch.metrics["tokenization/identical"] == 1
    assert batch.metrics["tokenization/content"] == 1
