"""The simulated engine alone: exact times, exact tokens, every fault."""

from __future__ import annotations

import itertools
import json
from array import array
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.core import (
    Chunk,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from rollout.engine.cores.simulated.options import Lognormal
from rollout.errors import ConfigError
from rollout.testing import (
    Scenario,
    SimulatedCore,
    SimulatedDeath,
    decode_ids,
    encode_text,
    expected_log_prob,
    run_virtual,
    simulated_tokenizer,
    tool_call,
)

pytestmark = [pytest.mark.anyio, pytest.mark.process]


# All times below are binary fractions, so that sums are exact: prefill 1/8 s a token, a step
# (1/2 + batch/4) s.
TIMING = {"base_s": 0.5, "slope_s": 0.25, "prefill_tokens_per_s": 8.0}


def scenario(**options: Any) -> Scenario:
    return Scenario(**{"stream_interval": 4, "timing": TIMING, **options})


async def started(build: Scenario, **options: Any) -> SimulatedCore:
    core = SimulatedCore(**build.to_dict(), **options)
    await core.start()
    return core


def ask(
    prompt: str | bytes, request_id: str = "r", *, priority: int = 0, **sampling: Any
) -> GenerationRequest:
    """A request for at most 10 tokens, unless told otherwise."""
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=prompt if isinstance(prompt, bytes) else encode_text(prompt).tobytes(),
        sampling=SamplingParams(**{"max_new_tokens": 10, **sampling}),
        priority=priority,
    )


def chat(user: str, said: str = "") -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{said}"


class Answer:
    """What came back for one request, and when."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.times: list[float] = []

    @property
    def text(self) -> str:
        return decode_ids(b"".join(chunk.ids for chunk in self.chunks))

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def log_probs(self) -> list[float]:
        values = array("f")
        for chunk in self.chunks:
            values.frombytes(chunk.log_probs)
        return values.tolist()


async def collect(
    core: SimulatedCore, request: GenerationRequest, answer: Answer | None = None
) -> Answer:
    answer = answer or Answer()
    async with aclosing(core.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            answer.chunks.append(chunk)
            answer.times.append(anyio.current_time())
    return answer


async def collect_all(
    core: SimulatedCore, *requests: GenerationRequest, gap_s: float = 0.0
) -> list[Answer]:
    """The answers to requests that arrive `gap_s` apart."""
    answers = [Answer() for _ in requests]
    async with anyio.create_task_group() as tasks:
        for request, answer in zip(requests, answers, strict=True):
            tasks.start_soon(collect, core, request, answer)
            await anyio.sleep(gap_s)
    return answers


# --- time ---------------------------------------------------------------------------------------


async def test_single_request_takes_prefill_and_one_step_a_token() -> None:
    core = await started(scenario().reply("hi", "hello there"))
    answer = await collect(core, ask(chat("hi"), max_new_tokens=64))
    prefill_s = len(encode_text(chat("hi"))) / 8
    assert answer.text == "hello there<|im_end|>"
    assert answer.times == [prefill_s + steps * 0.75 for steps in (4, 8, 12)]
    assert [chunk.offset for chunk in answer.chunks] == [0, 4, 8]
    assert [chunk.finish_reason for chunk in answer.chunks] == [None, None, "stop"]


async def test_arrival_joins_at_the_end_of_the_step_and_its_prefill_stalls_the_batch() -> None:
    core = await started(scenario())
    first, second = await collect_all(
        core, ask("a" * 8, "r1"), ask("b" * 16, "r2", max_new_tokens=4), gap_s=2.0
    )
    # First: prefill to 1.0, steps of 0.75 s end at 1.75 and, with the second waiting since 2.0,
    # at 2.5. The second's prefill of 2 s stalls both; then steps of 1 s for two.
    assert first.times == [6.5, 2 + 6.5 + 0.75 * 2, 2 + 6.5 + 0.75 * 4]
    assert second.times == [8.5]


# --- queue, memory, prefix cache ----------------------------------------------------------------


async def test_queue_serves_in_order_and_larger_priorities_first() -> None:
    core = await started(scenario(capacity={"max_running": 1}, kv={"prefix_cache": False}))
    requests = [ask("a" * 8, "r0"), ask("a" * 8, "r1"), ask("a" * 8, "r2", priority=1)]
    answers = await collect_all(core, *requests, gap_s=0.125)
    assert [answer.times[-1] for answer in answers] == [8.5, 25.5, 17.0]


async def test_full_queue_rejects_and_takes_again_when_there_is_room() -> None:
    core = await started(scenario(capacity={"max_running": 1, "max_queued": 1}))
    answers = await collect_all(core, *(ask("a", f"r{i}") for i in range(3)), gap_s=0.125)
    assert [answer.last.finish_reason for answer in answers] == ["length", "length", "rejected"]
    assert answers[2].times == [0.25]
    assert answers[2].last.error == "the simulated engine takes no more requests"
    assert (await collect(core, ask("a", "r9"))).last.finish_reason == "length"
    assert core.info.max_requests == 2


async def test_kv_exhaustion_preempts_the_youngest_and_recomputes_it() -> None:
    quiet = {"timing": TIMING, "kv": {"tokens": 30, "prefix_cache": False}}
    core = await started(scenario(**quiet))
    first, second = await collect_all(
        core, ask("a" * 8, "r1", max_new_tokens=12), ask("b" * 8, "r2", max_new_tokens=12)
    )
    # Both prefill until 2.0 and take seven steps of 1 s, when 30 tokens are used up. The second
    # goes back; the first needs five steps of 0.75 s alone. Then 15 tokens are prefilled again.
    assert first.times == [6.0, 9.0 + 0.75, 9.0 + 5 * 0.75]
    again = 9.0 + 5 * 0.75 + 15 / 8
    assert second.times == [6.0, again + 0.75, again + 5 * 0.75]
    assert core.load() == EngineLoad(generated_tokens=24, preemptions=1)
    alone = await collect(await started(scenario()), ask("b" * 8, max_new_tokens=12))
    assert second.text == alone.text
    assert second.log_probs == alone.log_probs


async def test_prefix_cache_saves_the_prefill_of_whole_blocks() -> None:
    core = await started(scenario(kv={"block_tokens": 4}))
    first = await collect(core, ask("a" * 10, "r1"))
    start = anyio.current_time()
    longer = "a" * 10 + first.text + "and more"
    second = await collect(core, ask(longer, "r2", max_new_tokens=1))
    assert first.last.cached_tokens == 0
    assert second.last.cached_tokens == 20  # five blocks: prompt and answer of the first
    assert second.times == [start + 8 / 8 + 0.75]


# --- aborts -------------------------------------------------------------------------------------


async def test_abort_in_the_batch_gives_what_the_step_under_way_completes() -> None:
    core = await started(scenario())
    whole = await collect(core, ask("a" * 8, "r0"))
    core = await started(scenario())
    answer, start = Answer(), anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, core, ask("a" * 8, "r1"), answer)
        await anyio.sleep(1 + 5 * 0.75 + 0.25)  # within the sixth step
        core.abort_nowait("r1")
        core.abort_nowait("r1")
        assert core.load().running == 1
    assert [time - start for time in answer.times] == [4.0, 1 + 6 * 0.75]
    assert answer.last.finish_reason == "abort"
    assert (answer.last.offset, answer.text) == (4, whole.text[:6])
    assert core.load() == EngineLoad(generated_tokens=6)


async def test_closing_the_iterator_frees_the_place() -> None:
    core = await started(scenario(capacity={"max_running": 1}))
    async with aclosing(core.generate(ask("a" * 8, "r1"))) as chunks:  # type: ignore[type-var]
        await anext(chunks)
        await anyio.sleep(0.25)
    assert core.load().running == 1  # until the step under way ends
    after = await collect(core, ask("b" * 8, "r2", max_new_tokens=1))
    assert after.times == [4.0 + 0.75 + 1.0 + 0.75]
    assert core.load() == EngineLoad(generated_tokens=6)


async def test_aclose_ends_every_request_with_what_it_was_sent() -> None:
    core = await started(scenario(capacity={"max_running": 1}))
    answers = [Answer(), Answer()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, core, ask("a" * 8, "r0"), answers[0])
        await anyio.sleep(0.5)
        tasks.start_soon(collect, core, ask("a" * 8, "r1"), answers[1])
        await anyio.sleep(4.0)
        await core.aclose()
    assert [answer.last.finish_reason for answer in answers] == ["abort", "abort"]
    assert [len(answer.text) for answer in answers] == [4, 0]
    assert anyio.current_time() == 4.5
    late = await collect(core, ask("a", "r2"))
    assert late.last.error == "the engine is closed"


# --- requests that cannot be served -------------------------------------------------------------


async def test_bad_request_ends_with_an_error() -> None:
    core = await started(scenario(capacity={"context_length": 64}))
    answer = await collect(core, ask("a" * 64))
    error = (
        "the prompt has 64 tokens; expected at most 63, since it and a new token must fit into "
        "a context of 64"
    )
    assert answer.chunks == [Chunk(request_id="r", finish_reason="error", error=error)]
    assert core.load() == EngineLoad()


async def test_context_that_is_used_up_ends_with_length() -> None:
    core = await started(scenario(capacity={"context_length": 64}, kv={"tokens": 20}))
    assert core.info.context_length == 20  # memory for more there is not
    answer = await collect(core, ask("a" * 8, max_new_tokens=100, ignore_eos=True))
    assert (len(answer.text), answer.last.finish_reason) == (12, "length")


# --- what it says -------------------------------------------------------------------------------


def say(build: Scenario, prompt: str, **sampling: Any) -> str:
    async def main() -> str:
        core = await started(build)
        return (await collect(core, ask(prompt, **{"max_new_tokens": 500, **sampling}))).text

    return run_virtual(main)


def test_rule_follows_the_turns_since_its_text_appeared() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
    build = Scenario().reply("2+2?", tool_call("add", a="é")).then("4").then("Bye.")
    build = build.reply("", "What?")
    few_shot = "<|im_start|>assistant\nAn example.<|im_end|>\n"
    first = few_shot + chat("2+2?")
    assert say(build, first) == call + "<|im_end|>"
    second = first + call + "<|im_end|>\n" + chat("4")
    assert say(build, second) == "4<|im_end|>"
    third = second + "4<|im_end|>\n" + chat("Thanks")
    assert say(build, third) == "Bye.<|im_end|>"
    assert say(build, third + "Bye.<|im_end|>\n" + chat("?")) == "Bye.<|im_end|>"
    assert say(build, chat("Hello")) == "What?<|im_end|>"


def test_rule_with_a_turn_answers_that_turn_only() -> None:
    build = Scenario().reply("", "second", turn=2).reply("", "other")
    assert say(build, chat("x")) == "other<|im_end|>"
    assert say(build, chat("x", "other<|im_end|>\n") + chat("y")) == "second<|im_end|>"


def test_alternatives_are_chosen_by_the_seed_of_the_request() -> None:
    build = Scenario().reply("", "yes", "no", "maybe")
    by_seed = [say(build, chat("x"), seed=seed) for seed in range(20)]
    assert {text.removesuffix("<|im_end|>") for text in by_seed} == {"yes", "no", "maybe"}
    assert by_seed == [say(build, chat("x"), seed=seed) for seed in range(20)]
    without_seed = {say(build, chat(f"x{i}")) for i in range(20)}
    assert len(without_seed) == 3  # the prompt decides


def test_ignore_eos_passes_the_end_token_and_goes_on() -> None:
    text = say(Scenario().reply("", "ok"), chat("x"), max_new_tokens=40, ignore_eos=True)
    assert text.startswith("ok<|im_end|>")
    assert len(encode_text(text)) == 40


def test_stop_token_ends_the_answer_and_is_its_last_id() -> None:
    assert say(Scenario().reply("", "one. two."), chat("x"), stop_token_ids=(ord("."),)) == "one."


def test_lengths_of_filler_follow_the_lognormal() -> None:
    build = Scenario().reply("", filler=Lognormal(median=100, sigma=0.5, max=250))
    lengths = [
        len(encode_text(say(build, chat("x"), seed=seed))) - 1  # without the end token
        for seed in range(200)
    ]
    assert 85 < sorted(lengths)[100] < 115
    assert max(lengths) <= 250
    inner = sum(100 * 0.607 < length < 100 * 1.649 for length in lengths)  # one sigma
    assert 0.58 < inner / 200 < 0.78


@pytest.mark.parametrize(
    ("build", "seed"),
    [
        (Scenario(), None),
        (Scenario().reply("x", "A scripted reply, é.", filler={"median": 30, "sigma": 1.0}), 7),
        (Scenario().reply("x", "No end in sight.", finish="length"), None),
    ],
    ids=["made up", "scripted", "length"],
)
def test_resumed_answer_continues_exactly(build: Scenario, seed: int | None) -> None:
    async def main() -> None:
        core = await started(build)
        whole = await collect(core, ask(chat("x"), "whole", max_new_tokens=120, seed=seed))
        prompt = encode_text(chat("x"))
        ids = encode_text(whole.text)
        for cut in range(1, len(ids)):
            said = (prompt + ids[:cut]).tobytes()
            rest = await collect(core, ask(said, f"cut{cut}", max_new_tokens=120 - cut, seed=seed))
            assert b"".join(c.ids for c in rest.chunks) == ids[cut:].tobytes()
            assert rest.log_probs == whole.log_probs[cut:]
            assert rest.last.finish_reason == whole.last.finish_reason

    run_virtual(main, ceiling_s=10_000)


async def test_log_probs_are_those_that_a_test_can_compute() -> None:
    core = await started(scenario(weight_version=5).reply("hi", "hello"))
    answer = await collect(core, ask(chat("hi")))
    ids, start = encode_text("hello<|im_end|>"), len(encode_text(chat("hi")))
    assert answer.log_probs == [
        expected_log_prob(token, position) for position, token in enumerate(ids, start)
    ]
    assert {chunk.weight_version for chunk in answer.chunks} == {5}
    values = {expected_log_prob(token, position) for token in range(259) for position in range(99)}
    assert -5 < min(values) < max(values) < 0
    assert array("f", values).tolist() == list(values)


# --- faults -------------------------------------------------------------------------------------


async def test_slow_start_takes_its_time() -> None:
    await started(scenario().fault(start_delay_s=30))
    assert anyio.current_time() == 30.0


async def test_freeze_stops_everything_and_then_goes_on() -> None:
    # Two seconds after the start; the request has had its prefill of 1 s and one step of 0.75 s.
    core = await started(scenario().fault(freeze_at_s=2, freeze_s=100))
    answers = [Answer(), Answer()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, core, ask("a" * 8, "r0"), answers[0])
        await anyio.sleep(10)
        tasks.start_soon(collect, core, ask(b"", "r1"), answers[1])
        assert core.load().generated_tokens == 1
    assert answers[0].times == [100 + 1 + steps * 0.75 for steps in (4, 8, 10)]
    assert answers[1].times == [102.0]  # even a refusal waits


async def test_death_reaches_the_hook_once_and_everyone_who_waits() -> None:
    core = await started(scenario(stream_interval=2).fault(die_after_tokens=9))
    deaths: list[float] = []
    core.on_death = lambda: deaths.append(anyio.current_time())
    answers = [Answer(), Answer()]
    failed: list[float] = []

    async def wait(index: int) -> None:
        with pytest.raises(SimulatedDeath, match="the scenario let the engine die"):
            await collect(core, ask("a" * 8, f"r{index}", seed=index), answers[index])
        failed.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, 0)
        tasks.start_soon(wait, 1)
    # Two samples a step of 1 s: the fifth step reaches nine.
    assert deaths == [7.0]
    assert failed == [7.0, 7.0]
    assert [len(answer.text) for answer in answers] == [4, 4]
    with pytest.raises(SimulatedDeath):
        await collect(core, ask("a", "r9"))
    core.abort_nowait("r0")
    await core.aclose()


async def test_lost_aborts_are_the_first_ones() -> None:
    core = await started(scenario().fault(lost_aborts=2))
    answer = Answer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, core, ask("a" * 8), answer)
        for _ in range(3):
            await anyio.sleep(1.5)
            core.abort_nowait("r")
    assert (answer.times[-1], answer.last.finish_reason) == (4.75, "abort")


async def test_rejected_share_is_the_same_each_time_and_drawn_again_each_time() -> None:
    async def outcomes(build: Scenario) -> list[FinishReason | None]:
        core = await started(build)
        return [
            (await collect(core, ask("same", "same", max_new_tokens=1))).last.finish_reason
            for _ in range(200)
        ]

    first = await outcomes(scenario().fault(reject_share=0.25))
    assert 30 < first.count("rejected") < 70
    assert await outcomes(scenario().fault(reject_share=0.25)) == first
    assert await outcomes(scenario(seed=1).fault(reject_share=0.25)) != first


async def test_duplicate_answer_sends_the_last_chunk_twice() -> None:
    answer = await collect(await started(scenario().fault(duplicate_answers=1)), ask("a"))
    assert [chunk.offset for chunk in answer.chunks] == [0, 4, 8, 8]
    assert answer.chunks[-1] == answer.chunks[-2]


async def test_reordered_answer_has_its_last_two_chunks_swapped() -> None:
    core = await started(scenario().fault(reordered_answers=1))
    answer = await collect(core, ask("a"))
    assert [chunk.offset for chunk in answer.chunks] == [0, 8, 4]
    assert [chunk.finish_reason for chunk in answer.chunks] == [None, "length", None]
    short = await collect(core, ask("a", max_new_tokens=2))
    assert [chunk.finish_reason for chunk in short.chunks] == ["length"]


async def test_wrong_length_lacks_one_log_prob() -> None:
    answer = await collect(await started(scenario().fault(wrong_length=1)), ask("a"))
    assert [len(c.ids) - len(c.log_probs) for c in answer.chunks] == [4, 0, 0]


# --- determinism --------------------------------------------------------------------------------


JOBS = st.lists(
    st.tuples(
        st.integers(0, 24),  # arrives, in quarters of a second
        st.integers(1, 20),  # prompt
        st.integers(1, 20),  # answer
        st.one_of(st.none(), st.integers(0, 80)),  # aborted, quarters after its arrival
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda job: job[0],
)


async def _serve(
    jobs: list[tuple[int, int, int, int | None, int]], kv: dict[str, Any], is_watched: bool
) -> tuple[list[tuple[list[float], list[Chunk]]], EngineLoad]:
    """When what came for each job; somebody may ask for the load each quarter of a second."""
    core = await started(scenario(stream_interval=3, kv=kv, capacity={"max_running": 4}))
    answers = [Answer() for _ in jobs]

    async def watch() -> None:
        while True:
            assert 0 <= core.load().kv_used <= 1
            await anyio.sleep(0.25)

    async def serve(index: int) -> None:
        arrival, prompt, count, abort, priority = jobs[index]
        await anyio.sleep(arrival / 4)
        text, rid = chr(97 + index % 3) * prompt, f"r{index}"
        request = ask(text, rid, priority=priority, max_new_tokens=count, ignore_eos=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, core, request, answers[index])
            if abort is not None:
                await anyio.sleep(abort / 4 + 1 / 8)
                core.abort_nowait(rid)

    async with anyio.create_task_group() as watching:
        if is_watched:
            watching.start_soon(watch)
        async with anyio.create_task_group() as tasks:
            for index in range(len(jobs)):
                tasks.start_soon(serve, index)
        watching.cancel_scope.cancel()
    return [(answer.times, answer.chunks) for answer in answers], core.load()


@given(jobs=JOBS, prefix_cache=st.booleans())
def test_batching_ends_every_job_once_whoever_looks(
    jobs: list[tuple[int, int, int, int | None, int]], prefix_cache: bool
) -> None:
    kv = {"tokens": 41, "block_tokens": 4, "prefix_cache": prefix_cache}
    answers, load = run_virtual(_serve, jobs, kv, False, ceiling_s=1000)
    assert run_virtual(_serve, jobs, kv, True, ceiling_s=1000) == (answers, load)
    for (_, chunks), (_, _, length, _, _) in zip(answers, jobs, strict=True):
        counts = [len(chunk.ids) // 4 for chunk in chunks]
        assert [chunk.offset for chunk in chunks] == [0, *itertools.accumulate(counts)][:-1]
        *before, last = (chunk.finish_reason for chunk in chunks)
        assert set(before) <= {None}
        assert last == "abort" or (last, sum(counts)) == ("length", length)
    assert (load.running, load.queued, load.kv_used) == (0, 0, 0.0)


# --- where it runs ------------------------------------------------------------------------------


# --- scenarios as data --------------------------------------------------------------------------


def test_scenario_is_plain_data_and_back() -> None:
    build = (
        Scenario(seed=1)
        .reply("What is 2+2?", "<tool_call>…</tool_call>", filler=Lognormal(median=20))
        .then("4", "four")
        .timing(base_s=0.25, slope_s=0.001, prefill_tokens_per_s=1000)
        .capacity(max_running=8)
        .kv(tokens=10_000)
        .fault(die_after_tokens=500)
        .fault(lost_aborts=2)
    )
    data = build.to_dict()
    assert data == {
        "seed": 1,
        "rules": [
            {
                "when": "What is 2+2?",
                "replies": [["<tool_call>…</tool_call>"], ["4", "four"]],
                "filler": {"median": 20.0},
            }
        ],
        "timing": {"base_s": 0.25, "slope_s": 0.001, "prefill_tokens_per_s": 1000.0},
        "capacity": {"max_running": 8},
        "kv": {"tokens": 10_000},
        "faults": {"die_after_tokens": 500, "lost_aborts": 2},
    }
    assert Scenario(**json.loads(json.dumps(data))) == build
    assert hash(Scenario(**data)) == hash(build)


def test_scenario_builder_leaves_the_one_before_alone() -> None:
    first = Scenario().reply("a", "x")
    second = first.then("y")
    assert first.to_dict()["rules"][0]["replies"] == [["x"]]
    assert first != second


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: Scenario().timing(basee_s=1),
            "Scenario.timing.basee_s: unknown key; did you mean 'base_s'?",
        ),
        (
            lambda: SimulatedCore(rules=[{"when": "a"}, {"repleis": [["x"]]}]),
            "engine.scenario.rules[1].repleis: unknown key; did you mean 'replies'?",
        ),
        (
            lambda: Scenario().timing(base_s="fast"),
            "Scenario.timing.base_s: expected float, got str",
        ),
        (lambda: Scenario().timing(base_s=-1), "Scenario.timing.base_s: expected float >= 0.0"),
        (
            lambda: Scenario().reply("", "x", finish="done"),
            "Scenario.rules[0].finish: invalid enum value 'done'",
        ),
    ],
)
def test_scenario_fault_names_the_place_and_the_nearest_key(build: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value) == text
    assert caught.value.faults == (text,)


def test_scenario_then_without_a_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="then: there is no reply with a text before it"):
        Scenario().reply("", filler=3).then("x")


def test_scenario_config_is_whole_and_takes_sections() -> None:
    from rollout.config import LengthsConfig, SimulatedEngine

    build = Scenario(seed=4).reply("", "x")
    config = build.config(engine=SimulatedEngine(replicas=2), lengths=LengthsConfig(prompt=9))
    assert config.engine == SimulatedEngine(replicas=2, scenario=build.to_dict())
    assert (config.model.path, config.placement.kind, config.seed) == ("simulated", "in_process", 4)
    assert config.lengths.prompt == 9
    assert build.config().lengths.response > build.config().tools.max_response_length


# --- the vocabulary -----------------------------------------------------------------------------

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "\0"])
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return simulated_tokenizer()


@given(text=TEXTS)
def test_tokenizer_and_core_share_their_ids(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(encode_text(text))
    assert decode_ids(encode_text(text)) == text
    assert tokenizer.decode(ids) == text


def test_tokenizer_renders_tools_and_calls(tokenizer: Any) -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=[schema],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert '"name": "add"' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (259, 258, 256)


def test_bytes_that_are_no_text_decode_to_a_mark() -> None:
    assert decode_ids(array("i", [97, 0xC3, 258])) == "a\ufffd<|im_end|>"
