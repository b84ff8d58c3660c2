"""A gateway's sessions without HTTP: which rows come of which calls, and what is in them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from gateway_clients import (
    ADD,
    LOOK,
    ask,
    asked,
    echo,
    result,
    system,
    tried,
    user,
)
from rollout import Outcome
from rollout.bridge import wait_future
from rollout.config import GatewayConfig, LimitsConfig, ModelConfig, RecoveryConfig, SimulatedEngine
from rollout.gateway.calls import ClientCall, ClientMessage, GatewayError
from rollout.gateway.gateway import Gateway
from rollout.gateway.http import ClientLeftError
from rollout.scopes import open_task_group
from rollout.testing import Scenario, run_virtual, tool_call

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from rollout import AgentContext
    from rollout.gateway.calls import Completion
    from rollout.gateway.session import GatewaySession

pytestmark = pytest.mark.anyio

CALLS = (
    Scenario(seed=1)
    .reply("Add 2 and 3", "I add. " + tool_call("add", a=2, b=3))
    .then("It is 5.")
    .then("You are welcome.")
)


async def test_session_linear_conversation_is_one_row() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        messages = [system("Be brief."), user("Add 2 and 3")]
        (first,) = (await ask(session, *messages, tools=(ADD,))).answers
        assert (first.text, first.finish) == ("I add.", "calls")
        (call,) = first.calls
        assert (call.name, call.arguments) == ("add", {"a": 2, "b": 3})
        messages += [echo(first), result("5", call.id)]
        second = await ask(session, *messages, tools=(ADD,))
        assert second.answers[0].text == "It is 5."
        messages += [echo(second.answers[0]), user("Thanks")]
        third = await ask(session, *messages, tools=(ADD,))
        assert (third.answers[0].text, third.answers[0].finish) == ("You are welcome.", "stop")
        transcript = context.transcript
        assert third.prompt_ids == transcript.prefix.slice(0, len(third.prompt_ids))
        assert third.answers[0].ids == transcript.prefix.slice(len(third.prompt_ids))

    found = await tried(trial, CALLS)
    trajectory = found.trajectory
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert found.purposes == ["main"]
    kinds = [span.kind for span in trajectory.transcript.spans]
    assert kinds == ["prompt", "generated", "observation", "generated", "observation", "generated"]
    roles = [message.role for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert '"name": "add"' in found.text(0).partition("<|im_end|>")[0]


HELLO = Scenario(seed=1).reply("question", filler=40)
TURNS = Scenario(seed=1).reply("question", "One.", filler=20).then("Two.").then("Three.")


async def test_session_identical_answers_are_told_apart_by_their_ids() -> None:
    scenario = Scenario(seed=1).reply("question", tool_call("add", a=1, b=1)).then("Done.")

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        completion = await ask(session, user("question"), tools=(ADD,), n=3)
        for answer in (completion.answers[at] for at in (2, 0, 1)):
            bare = msgspec.structs.replace(echo(answer), ids=())
            (call,) = answer.calls
            told = [user("question"), bare, result(f"of {answer.id}", call.id)]
            await ask(session, *told, tools=(ADD,))
        assert len({answer.ids.tobytes() for answer in completion.answers}) == 1

    found = await tried(trial, scenario)
    assert found.purposes == ["main", "branch", "branch"]
    assert [found.text(at).count("<|im_start|>tool\nof ") for at in range(3)] == [1, 1, 1]


async def test_session_answer_that_comes_as_its_client_leaves_is_replayed() -> None:
    async def leave(future: Future[Completion]) -> Completion:
        await wait_future(future)
        raise ClientLeftError

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        call = asked(user("question"))
        with pytest.raises(ClientLeftError):
            await session.complete(call, leave)
        await session.complete(call)

    assert (await tried(trial, HELLO)).purposes == ["main"]


@pytest.mark.parametrize("after_s", [0.0, 0.25])
async def test_session_cut_generation_is_sampled_again(after_s: float) -> None:
    answers = []

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = (await ask(session, user("question"))).answers[0]
        call = asked(user("question"), echo(first), user("more"))
        with anyio.move_on_after(after_s):
            await session.complete(call)
        again = (await session.complete(call)).answers[0]
        last = await ask(session, *call.messages, echo(again), user("most"))
        answers.extend([first, again, *last.answers])

    found = await tried(trial, HELLO)
    # Without a token the next try is generated in the same row.
    assert found.purposes == ["main", *(["branch"] if after_s else [])]
    answered = sum(len(each.ids) for each in answers)
    cut = found.trained() - answered
    assert (cut > 0) is bool(after_s)
    assert found.trajectory.generated_length == found.trained()


async def test_session_cut_generation_that_nobody_asks_for_again_is_not_trained_alone() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        await ask(session, user("question"))
        with anyio.move_on_after(0.1):
            await session.complete(asked(user("question")))
        await ask(session, user("question"), stop=("no retry",))

    found = await tried(trial, HELLO)
    assert found.purposes == ["main", "branch", "branch"]
    assert found.batch.tensors["trainable"].tolist() == [True, False, True]


async def test_session_samples_have_places_and_seeds_in_the_order_of_their_numbers() -> None:
    answers = []

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        answers.append([each.ids for each in (await ask(session, user("question"), n=4)).answers])

    for _ in range(2):
        rows = [each.transcript for each in (await tried(trial, HELLO)).trajectory.segments]
        assert [row.prefix.slice(row.spans[-1].start) for row in rows] == answers[-1]
    assert answers[0] == answers[1]


THINKS = Scenario(seed=1).reply("question", "<think>Hm, so.</think>\n\nYes.").then("No.")


@pytest.mark.parametrize(
    ("reasoning", "dropped_reasoning", "rows"),
    [(None, "accept", 1), ("Hm, so.", "fork", 1), (None, "fork", 2)],
)
async def test_session_reasoning_that_comes_back(
    reasoning: str | None, dropped_reasoning: Any, rows: int
) -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = (await ask(session, user("question"))).answers[0]
        assert (first.text, first.reasoning) == ("Yes.", "Hm, so.")
        again = msgspec.structs.replace(echo(first), reasoning=reasoning)
        await ask(session, user("question"), again, user("more"))

    settings = GatewayConfig(dropped_reasoning=dropped_reasoning)
    found = await tried(trial, THINKS, settings=settings)
    assert found.purposes == ["main", "branch"][:rows]


async def test_session_foreign_turn_and_other_tools_begin_rows() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = (await ask(session, user("question"), tools=(ADD,))).answers[0]
        edited = msgspec.structs.replace(echo(first), text="I never said that.")
        told = [user("question"), edited, user("more")]
        second = (await ask(session, *told, tools=(ADD,))).answers[0]
        await ask(session, *told, echo(second), user("most"), tools=(ADD,))
        await ask(session, user("question"), echo(first), user("more"), tools=(ADD, LOOK))

    found = await tried(trial, TURNS)
    assert found.purposes == ["main", "branch", "branch"]
    assert found.parents == [None, 0, 0]
    spans = [len(each.transcript.spans) for each in found.trajectory.segments]
    assert spans == [2, 4, 2]
    assert "I never said that." in found.text(1)
    assert "look" in found.text(2)


async def test_session_agents_of_an_agent_have_rows_of_their_own() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        async def work(name: str) -> None:
            told = [system("Work"), user("question")]
            for _ in range(2):
                completion = await ask(session, *told, tools=(ADD,), agent_id=name)
                told += [echo(completion.answers[0]), user("more")]

        await ask(session, system("Lead"), user("question"), tools=(ADD, LOOK))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, "a")
            tasks.start_soon(work, "b")
        await ask(session, system("Judge"), user("question"), tools=(ADD, LOOK))

    found = await tried(trial, TURNS)
    assert sorted(found.purposes) == ["branch", "main", "subagent", "subagent"]
    spans = sorted(len(each.transcript.spans) for each in found.trajectory.segments)
    assert spans == [2, 2, 4, 4]


async def test_session_conversation_that_begins_again_is_a_row() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        told = [system("Work"), user("question")]
        first = (await ask(session, *told, tools=(ADD,))).answers[0]
        told += [echo(first), user("more")]
        await ask(session, *told, tools=(ADD,))
        told[-1:] = [user("Sum up.")]
        summary = (await ask(session, *told, tools=(ADD,))).answers[0]
        told = [system("Work"), user(f"question; so far: {summary.text}")]
        again = (await ask(session, *told, tools=(ADD,))).answers[0]
        await ask(session, *told, echo(again), user("more"), tools=(ADD,))

    found = await tried(trial, TURNS)
    assert found.purposes == ["main", "branch", "branch"]


async def test_session_too_long_a_conversation_is_told_and_ends_nothing() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        for text in ("x" * 2000, "x" * 40_000):
            with pytest.raises(GatewayError, match=r"lengths\.prompt = 1500") as caught:
                await ask(session, user(text))
            assert (caught.value.status, caught.value.code) == (400, "context_length")
        first = (await ask(session, user("question"))).answers[0]
        for text in ("x" * 4000, "x" * 40_000):
            with pytest.raises(GatewayError, match=r"lengths\.response") as caught:
                await ask(session, user("question"), echo(first), user(text))
            assert (caught.value.status, caught.value.code) == (400, "context_length")
        await ask(session, user("question"), echo(first), user("short"))
        with pytest.raises(GatewayError) as caught:
            await ask(session, user("question"), echo(first), user("x" * 4000))
        assert caught.value.code == "context_length"
        await ask(session, user("question, compacted"))

    found = await tried(trial, TURNS)
    assert found.trajectory.outcome is Outcome.COMPLETED
    assert found.purposes == ["main", "branch"]


async def test_session_calls_at_once_are_as_many_as_may_generate() -> None:
    told: list[str] = []

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        async def one(text: str) -> None:
            try:
                await ask(session, user(text), n=2)
                told.append("answered")
            except GatewayError as error:
                told.append(error.code)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, "x" * 5000 if number < 4 else f"question {number}")

    found = (await tried(trial, HELLO, settings=GatewayConfig(max_calls=3))).trajectory
    assert told.count("answered") == 3
    assert set(told) <= {"answered", "context_length", "limit", "trajectory_ended"}
    assert (found.outcome, found.limit_source) == (Outcome.LIMIT, "gateway.max_calls")
    assert [len(list(each.transcript.generated_spans())) for each in found.segments] == [1] * 6


@pytest.mark.parametrize("interval", [1, 16])
async def test_session_stop_string_ends_the_turn_with_its_token(interval: int) -> None:
    scenario = Scenario(seed=1, stream_interval=interval).reply(
        "question", "One two. Observation: three four five six seven eight nine ten", filler=30
    )
    answers = []

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        completion = await ask(session, user("question"), stop=("ten", "Observation:", "x" * 90))
        (answer,) = completion.answers
        answers.append(answer)
        told = [user("question"), echo(answer), user("more")]
        await ask(session, *told, stop=("never",))

    found = await tried(trial, scenario)
    (answer,) = answers
    assert (answer.finish, answer.stop_string) == ("stop_string", "Observation:")
    assert answer.text.endswith("One two.")
    assert found.purposes == ["main"]
    transcript = found.trajectory.transcript
    first = transcript.spans[1]
    assert transcript.span_ids(first) == answer.ids
    said = found.text(0).partition("<|im_start|>assistant\n")[2]
    assert said.partition("Observation:")[2].startswith("<|im_end|>\n<|im_start|>user\nmore")
    assert first.finish_reason == "stop"
    assert found.trajectory.outcome is Outcome.COMPLETED
    dropped = found.trajectory.metrics["discarded_tokens"]
    assert dropped == found.balance.discarded > 0 or interval == 1


async def test_session_seeds_come_from_what_was_said() -> None:
    asks = [("question a", 0.0), ("question b", 0.05), ("question", 0.1), ("question", 0.15)]

    async def run(delays: dict[str, float]) -> set[tuple[bytes, tuple[int, ...]]]:
        async def trial(session: GatewaySession, context: AgentContext) -> None:
            first = (await ask(session, user("question"))).answers[0]

            async def one(text: str, delay_s: float) -> None:
                await anyio.sleep(delay_s)
                await ask(session, user("question"), echo(first), user(text))

            async with anyio.create_task_group() as tasks:
                for text, delay_s in asks:
                    tasks.start_soon(one, text, delays.get(text, 0.0) or delay_s)

        found = await tried(trial, HELLO)
        return {
            (each.transcript.ids_bytes(), tuple(each.seeds[-1:]))
            for each in found.trajectory.segments
        }

    assert await run({}) == await run({"question a": 1.0})


async def test_session_responses_continue_a_named_answer() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        rest: dict[str, Any] = {"api": "responses"}
        told = [
            ClientMessage(role="system", text=t, is_instructions=True) for t in ("Work", "Play")
        ]
        one = await ask(session, told[0], user("question"), **rest)
        two = await ask(session, user("more"), previous_id=one.id, **rest)
        await ask(session, told[0], user("most"), previous_id=two.id, **rest)
        await ask(session, told[1], user("most"), previous_id=two.id, **rest)
        with pytest.raises(GatewayError) as caught:
            await ask(session, user("more"), previous_id="resp", **rest)
        assert (caught.value.status, caught.value.field) == (404, "previous_response_id")

    found = await tried(trial, TURNS)
    assert found.purposes == ["main", "branch"]
    assert len(list(found.trajectory.transcript.generated_spans())) == 3
    assert found.text(1).startswith("<|im_start|>system\nPlay<|im_end|>")
    assert "Two." in found.text(1)


async def test_session_counts_the_tokens_that_it_would_read() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        calls = [asked(system("Work"), user("question"), tools=(ADD,))]
        counts = [await session.count_tokens(calls[0])]
        completions = [await session.complete(calls[0])]
        told = [*calls[0].messages, echo(completions[0].answers[0]), user("more")]
        for each in (told, [user("other"), *told[1:]]):
            calls.append(asked(*each, tools=(ADD,)))
            counts.append(await session.count_tokens(calls[-1]))
            completions.append(await session.complete(calls[-1]))
        assert counts == [len(each.prompt_ids) for each in completions]

    await tried(trial, TURNS)


async def test_session_calls_are_told_as_the_client_wishes() -> None:
    both = tool_call("add", a=1, b=1) + "\n" + tool_call("add", a=2, b=2)
    scenario = Scenario(seed=1).reply("question", "So. " + both).then("Done.")
    broken = Scenario(seed=1).reply("question", "So. <tool_call>\n{no}\n</tool_call>").then("Done.")

    async def none(session: GatewaySession, context: AgentContext) -> None:
        told = [user("question")]
        (answer,) = (await ask(session, *told, tools=(ADD,), allows_calls=False)).answers
        assert (answer.text, answer.calls, answer.finish) == ("So.\n" + both, (), "stop")
        await ask(session, *told, echo(answer), user("more"), tools=(ADD,))

    async def single(session: GatewaySession, context: AgentContext) -> None:
        told = [user("question")]
        (answer,) = (await ask(session, *told, tools=(ADD,), parallel_calls=False)).answers
        assert [call.arguments for call in answer.calls] == [{"a": 1, "b": 1}]  # type: ignore[union-attr]
        told += [echo(answer), result("2", answer.calls[0].id)]  # type: ignore[union-attr]
        await ask(session, *told, tools=(ADD,))

    async def invalid(session: GatewaySession, context: AgentContext) -> None:
        told = [user("question")]
        (answer,) = (await ask(session, *told, tools=(ADD,))).answers
        assert (answer.text, answer.finish) == ("So.", "stop")
        assert "{no}" in answer.client_text
        await ask(session, *told, echo(answer), user("more"), tools=(ADD,))

    assert (await tried(none, scenario)).purposes == ["main"]
    assert (await tried(invalid, broken)).purposes == ["main"]
    found = await tried(single, scenario)
    assert found.purposes == ["main"]
    assert found.text(0).count("<|im_start|>tool\n") == 2
    assert "not executed: one call per turn" in found.text(0)


async def test_session_engine_failure_fails_the_trajectory() -> None:
    scenario = HELLO.fault(die_after_tokens=60)

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        errors = []
        for _ in range(3):
            try:
                await ask(session, user("question"))
            except GatewayError as error:
                errors.append((error.status, error.code))
        assert errors == [(400, "engine"), (403, "trajectory_ended")]
        raise RuntimeError("the agent's own words")

    found = await tried(
        trial,
        scenario,
        engine=SimulatedEngine(replicas=1),
        recovery=RecoveryConfig(policy="fail"),
    )
    trajectory = found.trajectory
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "engine")
    assert trajectory.cause is not None
    assert trajectory.cause.type == "EngineError"


async def test_session_deadline_ends_open_calls_for_good() -> None:
    errors, sessions = [], []

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        sessions.append(session)
        async with open_task_group() as outside:  # as a server's task: not the trajectory's
            outside.start_soon(client, session)
            await anyio.sleep(100)

    async def client(session: GatewaySession) -> None:
        with anyio.CancelScope(shield=True):
            for _ in range(2):
                try:
                    await session.complete(asked(user("question")))
                except GatewayError as error:
                    errors.append((error.status, error.code))

    scenario = HELLO.timing(base_s=0.1)
    limits = LimitsConfig(trajectory_s=2.0, turn_s=2.0, generation_s=2.0, tool_s=1.0)
    found = (await tried(trial, scenario, limits=limits)).trajectory
    assert errors == [(403, "trajectory_ended")] * 2
    assert found.outcome is Outcome.DEADLINE
    assert found.generated_length > 0
    with pytest.raises(GatewayError, match="the trajectory has ended"):
        await sessions[0].complete(asked(user("question")))


async def test_session_generation_deadline_is_final() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        for _ in range(2):
            with pytest.raises(GatewayError) as caught:
                await ask(session, user("question"))
            assert (caught.value.status, caught.value.code) == (403, "trajectory_ended")

    scenario = HELLO.timing(base_s=0.1)
    limits = LimitsConfig(generation_s=1.0, turn_s=10.0, tool_s=1.0)
    found = (await tried(trial, scenario, limits=limits)).trajectory
    assert (found.outcome, found.limit_source) == (Outcome.DEADLINE, "limits.generation_s")


async def test_sessions_keys_open_their_own_trajectory_only() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        gateway = Gateway(GatewayConfig())
        async with gateway.open(context) as one:
            path, key = one.root_url.rpartition("/")[2], one.api_key
            assert gateway.authenticate(path, key).path == path
            async with gateway.open(context) as two:
                other = two.root_url.rpartition("/")[2]
                assert two.api_key != key
                assert refused(gateway, other, key) == (403, "permission")
            assert refused(gateway, path, "sk-é\udc80") == (401, "authentication")
            assert refused(gateway, path, "") == (401, "authentication")
            assert refused(gateway, "nowhere", key) == (404, "not_found")
            assert refused(gateway, other, two.api_key) == (403, "trajectory_ended")
        await ask(session, user("question"))

    assert (await tried(trial, HELLO)).trajectory.outcome is Outcome.COMPLETED


def refused(gateway: Gateway, path: str, key: str) -> tuple[int, str]:
    with pytest.raises(GatewayError) as caught:
        gateway.authenticate(path, key)
    return caught.value.status, caught.value.code


SYSTEM_FIRST = """{%- for m in messages -%}
{%- if m.role in ('system', 'developer') and not loop.first -%}
{{ raise_exception('system messages come first') }}
{%- endif -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
#: It leaves later system messages out in place of refusing them.
SILENT = SYSTEM_FIRST.replace("{{ raise_exception('system messages come first') }}", "").replace(
    "~ m.content ~", "~ (m.content if m.role not in ('system', 'developer') or loop.first) ~"
)


@pytest.mark.parametrize("template", [SYSTEM_FIRST, SILENT], ids=["refuses", "is silent"])
async def test_session_system_message_in_between_goes_by_the_template(
    tmp_path: Path, template: str
) -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        told = [system("Work"), user("question")]
        for role in ("system", "developer"):
            answer = (await ask(session, *told)).answers[0]
            told += [echo(answer), ClientMessage(role=role, text="Hurry."), user("more")]
        await ask(session, *told)

    found = await tried(trial, TURNS)
    assert found.purposes == ["main"]
    assert "<|im_start|>system\nHurry.<|im_end|>" in found.text(0)
    (tmp_path / "strict.jinja").write_text(template)
    strict = ModelConfig(path="simulated", chat_template=str(tmp_path / "strict.jinja"))
    found = await tried(trial, TURNS, model=strict)
    assert found.purposes == ["main", "branch", "branch"]
    assert "<|im_start|>user\nHurry.<|im_end|>" in found.text(2)


async def test_session_message_that_cannot_be_rendered_is_the_clients_fault() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        for call in (
            asked(ClientMessage(role="nobody", text="x")),
            asked(user("question"), ClientMessage(role="nobody", text="x")),
        ):
            with pytest.raises(GatewayError, match="unknown role 'nobody'") as caught:
                await session.complete(call)
            error = caught.value
            assert (error.status, error.code, error.field) == (400, "invalid_request", "messages")
        first = (await ask(session, user("question"))).answers[0]
        with pytest.raises(GatewayError, match="unknown role 'nobody'"):
            await ask(
                session, user("question"), echo(first), ClientMessage(role="nobody", text="x")
            )
        await ask(session, user("question"), echo(first), user("more"))

    found = await tried(trial, TURNS)
    assert (found.trajectory.outcome, found.purposes) == (Outcome.COMPLETED, ["main"])


async def test_session_call_whose_arguments_are_no_object_is_read_as_text() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        calls = (ClientCall("add", "no JSON", "c"),)
        foreign = ClientMessage(role="assistant", text="I add.", calls=calls)
        await ask(session, user("question"), foreign, result("5", "c"), tools=(ADD,))

    found = await tried(trial, HELLO)
    assert found.trajectory.outcome is Outcome.COMPLETED
    assert "I add.\nadd(no JSON)" in found.text(0)


async def test_session_conversation_that_ends_with_the_assistant_is_told_again() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = (await ask(session, user("question"))).answers[0]
        await ask(session, user("question"), echo(first))

    found = await tried(trial, TURNS)
    assert found.purposes == ["main", "branch"]


@pytest.mark.parametrize("schedule", range(2))
def test_session_tokens_do_not_depend_on_the_schedule(schedule: int) -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        async def one(text: str) -> None:
            answer = (await ask(session, user("question"))).answers[0]
            await ask(session, user("question"), echo(answer), user(text))

        async with anyio.create_task_group() as tasks:
            for text in ("more", "more", "most"):
                tasks.start_soon(one, text)

    found = [run_virtual(partial(tried, trial, HELLO), seed=seed) for seed in (7, schedule)]
    firsts = [
        sorted(s.transcript.ids_bytes()[:200] for s in each.trajectory.segments) for each in found
    ]
    assert firsts[0] == firsts[1]
