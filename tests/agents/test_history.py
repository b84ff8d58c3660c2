"""What the model sees of its earlier turns: what it sampled, or what its template makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rollout
from rollout import AgentLoop, Outcome, Prompt, function_tool
from rollout.agents import register_agent
from rollout.batch import RolloutBatch
from rollout.chat import ChatTemplate
from rollout.config import AgentConfig, LengthsConfig, ModelConfig
from rollout.testing import Scenario, simulated_tokenizer

if TYPE_CHECKING:
    from rollout.agents import AgentContext

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
REASONED = f"<think>\nI must look.\n</think>\n\n{CALL}"
ANSWER = "<think>\nSeen.\n</think>\n\nIt is blue."


@function_tool
async def look(at: str) -> str:
    """Look.

    Args:
        at: What.
    """
    return f"{at}: blue"


async def run(first: str, *, history: str = "inference_template", **sections: Any) -> RolloutBatch:
    scenario = Scenario(seed=1).reply("colour", first).then(ANSWER)
    config = scenario.config(agent=AgentConfig(history=history), **sections)
    prompt = Prompt(messages=[{"role": "user", "content": "Which colour has the sky?"}])
    async with rollout.open_rollout(config, [look]) as runtime:
        return await runtime.generate([prompt])


def text(ids: Any) -> str:
    from rollout.testing import simulated_tokenizer

    decoded = simulated_tokenizer().decode(list(ids), clean_up_tokenization_spaces=False)
    assert isinstance(decoded, str)
    return decoded


@register_agent("asks_again")
class AsksAgain(AgentLoop):
    """A tool's turn, an answer, and another question."""

    async def run(self, context: AgentContext) -> None:
        turn = await context.generate()
        await context.call_tools(turn.calls)
        await context.generate()
        context.observe([{"role": "user", "content": "And the sea?"}])
        await context.generate()


QUESTION = {"role": "user", "content": "Which colour has the sky?"}
#: What was said, as a server would send it back.
CONVERSATION: list[dict[str, Any]] = [
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I must look.",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "look", "arguments": {"at": "sky"}},
            }
        ],
    },
    {"role": "tool", "content": "sky: blue", "name": "look", "tool_call_id": "call_0"},
    {"role": "assistant", "content": "It is blue.", "reasoning_content": "Seen."},
    {"role": "user", "content": "And the sea?"},
]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1", "glm4"])
async def test_history_each_generation_stands_behind_what_its_template_renders(
    family: str,
) -> None:
    path = Path(__file__).parent.parent / "chat_formats" / f"{family}.jinja"
    template = ChatTemplate(simulated_tokenizer(), chat_template=path.read_text("utf-8"))
    opening = "" if template.opens_reasoning else "<think>\n"
    # Behind the answers of tools no template opens it.
    behind = "<think>\n"
    said = (
        f"{opening}I must look.\n</think>\n\n{CALL}",
        f"{behind}Seen.\n</think>\n\nIt is blue.",
        f"{opening}Hm.\n</think>\n\nTeal.",
    )
    scenario = Scenario(seed=1).reply("sea?", said[2]).reply("sky: blue", said[1])
    scenario = scenario.reply("colour", said[0])
    config = scenario.config(
        agent=AgentConfig(history="inference_template", name="asks_again"),
        model=ModelConfig(path="simulated", chat_template=str(path)),
    )
    async with rollout.open_rollout(config, [look]) as runtime:
        batch = await runtime.generate([Prompt(messages=[QUESTION])])
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    found = [
        (text(row.ids()[: span.start]), text(row.span_ids(span)))
        for row in trajectory.transcripts
        for span in row.generated_spans()
    ]
    schemas = [look.schema]
    assert found == [
        (text(template.prompt_ids(CONVERSATION[:length], schemas)), f"{sampled}<|im_end|>")
        for length, sampled in zip((1, 3, 5), said, strict=True)
    ]
    for row in trajectory.transcripts:
        generated = sum(len(span) for span in row.generated_spans())
        assert int(row.mask().sum()) == generated


async def test_prompt_that_opens_no_reasoning_has_its_calls_read(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if '/no_think' not in messages[0].content %}<think>\n{% endif %}{% endif %}"
    )
    scenario = Scenario(seed=1).reply("blue", "Blue.").reply("", CALL)
    config = scenario.config(model=ModelConfig(path="simulated", chat_template=str(path)))
    async with rollout.open_rollout(config, [look]) as runtime:
        prompts = [Prompt("Which <think> colour? /no_think"), Prompt("Which colour?")]
        plain, thinking = (await runtime.generate(prompts)).trajectories
    assert [call.name for call in plain.messages[1].tool_calls] == ["look"]
    assert thinking.messages[1].tool_calls == ()


async def test_history_rendered_anew_splits_into_rows_exact_for_their_generations() -> None:
    batch = await run(REASONED)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.history) == (Outcome.COMPLETED, "inference_template")
    assert [segment.purpose for segment in trajectory.segments] == ["main", "compaction"]
    first, second = trajectory.transcripts
    assert [span.kind for span in first.spans] == ["prompt", "generated", "observation"]
    assert [span.kind for span in second.spans] == ["prompt", "observation", "generated"]
    assert text(first.span_ids(first.spans[1])) == f"{REASONED}<|im_end|>"
    assert text(second.span_ids(second.spans[2])) == f"{ANSWER}<|im_end|>"
    assert second.span_ids(second.spans[0]) == first.span_ids(first.spans[0])
    seen = text(second.ids())
    assert "I must look." not in seen
    assert seen.count("sky: blue") == 1
    assert seen.endswith(f"<|im_start|>assistant\n{ANSWER}<|im_end|>")


async def test_history_rows_are_adjacent_share_the_reward_and_count_each_token_once(
    tmp_path: Path,
) -> None:
    batch = await run(REASONED)
    (trajectory,) = batch.trajectories
    assert len(batch) == 2
    assert [(sample.uid, sample.member, sample.row) for sample in batch.samples] == [
        ("prompt-0", 0, 0),
        ("prompt-0", 0, 1),
    ]
    masked = [
        text(row[mask.bool()])
        for row, mask in zip(
            batch.tensors["responses"], batch.tensors["response_mask"], strict=True
        )
    ]
    assert masked == [f"{REASONED}<|im_end|>", f"{ANSWER}<|im_end|>"]
    assert batch.metrics["tokens/generated"] == trajectory.generated_length
    batch.save(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert len(loaded) == 2
    (again,) = loaded.trajectories
    assert again.history == "inference_template"
    assert [own.ids_bytes() for own in again.transcripts] == [
        own.ids_bytes() for own in trajectory.transcripts
    ]


async def test_history_that_renders_to_what_was_sampled_stays_one_row() -> None:
    batch = await run(CALL)
    (trajectory,) = batch.trajectories
    assert len(trajectory.segments) == 1
    assert [span.kind for span in trajectory.transcript.spans] == [
        "prompt", "generated", "observation", "generated",
    ]  # fmt: skip


async def test_history_rendered_anew_past_the_length_ends_the_trajectory() -> None:
    fits = await run(REASONED)
    row = fits.trajectories[0].transcripts[1]
    observed = len(row.spans[1])
    batch = await run(REASONED, lengths=LengthsConfig(prompt=1024, response=observed))
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.LENGTH
    assert trajectory.limit_source == "lengths.response"
    assert len(trajectory.segments) == 1
