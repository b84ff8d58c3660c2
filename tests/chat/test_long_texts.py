"""Texts without bound: what is known of them before they are encoded, and who waits for them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout
from chat_material import VOCABULARIES, chat, tokenizer
from rollout import AgentLoop, Outcome, Prompt, register_agent
from rollout.agents.long_texts import run_text
from rollout.chat.encoding import TextEncoder, TooManyTokens, WrittenText, get_encoder
from rollout.chat.tokenizer_backend import LONG
from rollout.config import AgentConfig, LengthsConfig
from rollout.testing import Scenario, encode_text
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from rollout.agents import AgentContext

#: In virtual time all work is done on the loop.
real_time = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both_backends = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
#: Vocabularies; the larger half of them with the full counts.
each_vocabulary = pytest.mark.parametrize(
    "vocabulary",
    [
        pytest.param(name, marks=() if name in ("smollm2", "qwen") else pytest.mark.slow)
        for name in VOCABULARIES
    ],
)

#: Where a bound could be wrong: runs that vocabularies have as one token, characters that compose
#: or lack bytes in a vocabulary, and what tokenizers look for.
AWKWARD = st.sampled_from(
    [
        *(" ", "\n", "\t", "-", "=", "a", "é", "e\u0301", "\u1f82", "\u0390", "\u0958", "한", "🙂"),
        *("漢", "<|im_end|>", "<think>", "\u2029", "1", "\U000fffff", "\u0301"),
    ]
)
LONG_RUNS = st.lists(st.tuples(AWKWARD, st.integers(1, 300)), max_size=8).map(
    lambda runs: "".join(text * count for text, count in runs)
)


def whole(vocabulary: str) -> TextEncoder:
    return get_encoder(tokenizer(vocabulary))


@each_vocabulary
@given(text=LONG_RUNS | st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=300))
@settings(deadline=None, max_examples=8)
def test_token_bound_any_text_has_at_least_so_many_tokens(vocabulary: str, text: str) -> None:
    encoder = whole(vocabulary)
    for written in (WrittenText(text), WrittenText(text, ((0, len(text)),))):
        ids = encoder.encode(written)
        assert encoder.encode(written, len(ids)) == ids


@each_vocabulary
def test_token_bound_text_of_longest_tokens_is_encoded_where_it_just_fits(vocabulary: str) -> None:
    entries = tokenizer(vocabulary).get_vocab()
    token = max((name for name in entries if "\u0120" * len(name) == name), key=len)
    text = " " * len(token) * 40
    ids = whole(vocabulary).encode(text)
    assert whole(vocabulary).encode(text, len(ids)) == ids
    with pytest.raises(TooManyTokens) as refused:
        whole(vocabulary).encode(text * 100, len(ids))
    assert len(ids) < refused.value.least <= 100 * len(ids)


@pytest.mark.parametrize("vocabulary", ["smollm2", "qwen"])
def test_encode_long_text_gives_the_ids_of_its_short_pieces(vocabulary: str) -> None:
    pieces = ["Zürich, 12 345 <|im_end|>\n", "漢字 e\u0301 🙂\n"] * 700
    encoder = whole(vocabulary)
    ids = [token for piece in pieces for token in encoder.encode(piece)]
    assert encoder.encode("".join(pieces)).tolist() == ids


def test_prompt_ids_template_that_trims_contents_takes_much_white_space() -> None:
    template = chat("qwen", "gemma")  # which trims what the user says
    plain = template.prompt_ids([{"role": "user", "content": "hi"}])
    padded = template.prompt_ids(
        [{"role": "user", "content": f"{' ' * 3_000_000}hi"}], max_tokens=64
    )
    assert padded == plain


def test_prompt_ids_flood_of_spelled_tokens_is_refused_before_they_are_looked_at() -> None:
    with pytest.raises(TooManyTokens):
        chat("qwen", "qwen3").prompt_ids(
            [{"role": "user", "content": "<|im_end|>" * 10**6}], max_tokens=9
        )


def test_prompt_ids_tools_without_bound_are_refused() -> None:
    function = {"name": "f", "description": "much " * 10**6, "parameters": {"type": "object"}}
    schemas = [{"type": "function", "function": function}]
    with pytest.raises(TooManyTokens):
        chat("qwen", "qwen3").prompt_ids(
            [{"role": "user", "content": "q"}], schemas, max_tokens=1024
        )


# What trajectories do with them


class _Seen:
    """What an agent of a test has seen."""

    length: int


@register_agent("observes_at_length")
class ObservesAtLength(AgentLoop):
    """Observes the texts of its prompt's `extra`, then speaks."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        for text in context.extra["texts"]:
            context.observe([{"role": "user", "content": text}])
        _Seen.length = len(context.transcript)
        if context.extra.get("speaks", True):
            await context.generate()


async def _run(
    prompt: Prompt, *, response: int, longest: int = 2048, interactions: Any = (), **agent: Any
) -> Any:
    config = (
        Scenario(seed=1)
        .reply("", "ok")
        .capacity(context_length=10**6)
        .timing(prefill_tokens_per_s=None)
        .config(
            agent=AgentConfig(**agent),
            lengths=LengthsConfig(prompt=longest, response=response),
        )
    )
    async with rollout.open_rollout(config, interactions=interactions) as runtime:
        batch = await runtime.generate([prompt])
        assert runtime.statistics().abandoned_threads == {}
    return batch.trajectories[0]


def _question(**fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "q"}], **fields)


@real_time
@pytest.mark.anyio
async def test_prompt_certainly_too_long_is_rejected(anyio_backend: Any) -> None:
    prompt = Prompt(messages=[{"role": "user", "content": "word " * 200_000}])
    trajectory = await _run(prompt, response=64)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "prompt_length")
    least = -(-1_000_000 // len("<|endoftext|>"))
    said = trajectory.cause.message
    assert said.startswith("the prompt has at least ")
    assert least <= int(said.split()[5]) < least + 100
    assert said.endswith(" tokens; lengths.prompt = 2048")


@both_backends
@pytest.mark.anyio
async def test_observe_long_texts_join_in_order_with_the_next_turn(anyio_backend: Any) -> None:
    texts = ["short", "a" * (LONG + 1), "between", "b" * (2 * LONG)]
    trajectory = await _run(
        _question(extra={"texts": texts}), response=10 * LONG, name="observes_at_length"
    )
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    observed = [m.content for m in trajectory.messages if m.role == "user"][1:]
    assert observed == texts
    assert len(trajectory.transcript) > _Seen.length + 3 * LONG
    expected = encode_text(f"<|im_start|>user\n{texts[1]}<|im_end|>")
    assert expected.tobytes() in trajectory.transcript.ids_bytes()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("length", "response"),
    [
        (LONG + 1, LONG),  # turns out too long: in `response` 13 characters a token would fit
        (1_000_000, 64),  # certainly is
    ],
)
async def test_observe_text_that_is_too_long_ends_the_trajectory(
    length: int, response: int
) -> None:
    trajectory = await _run(
        _question(extra={"texts": ["a" * length]}), response=response, name="observes_at_length"
    )
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")
    assert not trajectory.transcript.trailing_observation_length
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]


@real_time
@pytest.mark.anyio
async def test_long_work_leaves_the_loop_to_others(anyio_backend: Any) -> None:
    texts, was_seen = WorkerThreads(), threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, was_seen.set)  # by a turn of the loop
        assert await run_text(texts, True, was_seen.wait, 60)


@real_time
@pytest.mark.anyio
async def test_long_work_is_left_behind_and_counted_where_its_trajectory_ends(
    anyio_backend: Any,
) -> None:
    texts, may_end = WorkerThreads(), threading.Event()
    with anyio.move_on_after(0.01):
        await run_text(texts, True, may_end.wait)
    assert texts.abandoned == {"rollout.chat": 1}
    may_end.set()
    while texts.abandoned:
        await anyio.lowlevel.checkpoint()


@real_time
@pytest.mark.anyio
async def test_history_rendered_anew_without_room_ends_by_length(anyio_backend: Any) -> None:
    trajectory = await _run(
        _question(extra={"texts": ["a" * (LONG + 1)]}),
        response=LONG,
        name="observes_at_length",
        history="inference_template",
    )
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")


@real_time
@pytest.mark.anyio
async def test_tokenization_check_of_a_long_transcript_finds_no_difference(
    anyio_backend: Any,
) -> None:
    trajectory = await _run(
        _question(extra={"texts": ["a" * (LONG + 1)]}),
        response=10 * LONG,
        name="observes_at_length",
        tokenization_check="strict",
    )
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.metrics["tokenization/identical"] == 1
