"""What official clients make of the gateway's answers."""

from __future__ import annotations

from typing import Any

import pytest

from fake_sessions import KEY, PATH, FakeSession, answer
from fake_sessions import ask_officially as ask
from rollout.gateway.calls import ClientCall, ClientMessage, GatewayError
from rollout.types import InvalidToolCall, ToolCall
from slow_cases import slow_after, slow_but

openai: Any = None
anthropic: Any = None

pytestmark = [pytest.mark.anyio, pytest.mark.process]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
RESPONSES_TOOL = {"type": "function", **TOOL["function"], "strict": False}
MESSAGES_TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": TOOL["function"]["parameters"],
}
ASKED = [{"role": "user", "content": "2 + 2?"}]
CALL = ToolCall(name="add", arguments={"a": 1, "b": "ü"}, id="call-1", raw="")


@pytest.fixture(scope="module", autouse=True)
def _clients() -> None:
    """Both take seconds to import: only where these tests run, not where all are found."""
    for name in ("openai", "anthropic"):
        globals()[name] = pytest.importorskip(name)


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


def session(*script: Any) -> FakeSession:
    made = FakeSession(PATH, KEY)
    made.script.extend(script)
    return made


async def test_chat_create_gives_text_usage_and_finish() -> None:
    got = await ask(
        session(), lambda o, _: o.chat.completions.create(model="rollout", messages=ASKED)
    )
    (choice,) = got.choices
    assert (got.id, got.model, got.object) == ("completion-1", "rollout", "chat.completion")
    assert (choice.message.role, choice.message.content) == ("assistant", "Four.")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (
        4,
        3,
        7,
    )
    assert got.usage.prompt_tokens_details.cached_tokens == 2


async def test_chat_body_becomes_a_call() -> None:
    asked = session()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{ "a" : 1 }'},
                },
                {"id": "call-2", "type": "function", "function": {"name": "ls", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "2"},
    ]
    await ask(
        asked,
        lambda o, _: o.chat.completions.create(
            model="rollout",
            messages=messages,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "add"}},
            parallel_tool_calls=False,
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=7,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            seed=-1,
            stop=["x", "y"],
            extra_body={"top_k": 0, "min_p": 0.1, "unknown": {"a": [1]}, "stop_token_ids": [5]},
            extra_headers={"x-claude-code-agent-id": "agent-7"},
        ),
    )
    (call,) = asked.calls
    assert call.messages == (
        ClientMessage(role="system", text="Be brief."),
        ClientMessage(role="user", text="a\nb"),
        ClientMessage(
            role="assistant",
            reasoning="Hm.",
            calls=(ClientCall("add", {"a": 1}, "call-1"), ClientCall("ls", {}, "call-2")),
        ),
        ClientMessage(role="tool", text="2", call_id="call-1", name="add"),
    )
    assert call.tools == (TOOL,)
    assert (call.forced_by, call.parallel_calls, call.stop) == (("tool_choice",), False, ("x", "y"))
    assert (call.seed, call.n, call.agent_id) == (2**63 - 1, 1, "agent-7")
    assert call.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "max_new_tokens": 7,
        "stop_token_ids": (5,),
    }


async def test_chat_tool_calls_and_reasoning_reach_the_client() -> None:
    said = answer(text="", reasoning="Hm.", calls=(CALL,), finish="calls")
    got = await ask(
        session(said),
        lambda o, _: o.chat.completions.create(model="rollout", messages=ASKED, tools=[TOOL]),
    )
    message = got.choices[0].message
    (call,) = message.tool_calls
    assert (call.id, call.function.name) == ("call-1", "add")
    assert call.function.arguments == '{"a":1,"b":"ü"}'
    assert (message.content, message.reasoning_content) == (None, "Hm.")
    assert got.choices[0].finish_reason == "tool_calls"


async def test_chat_invalid_call_is_told_as_text() -> None:
    said = answer(text="Look:", calls=(InvalidToolCall(raw="<tool_call>{", reason="no JSON"),))
    got = await ask(
        session(said), lambda o, _: o.chat.completions.create(model="rollout", messages=ASKED)
    )
    assert got.choices[0].message.content == "Look:\n<tool_call>{"
    assert got.choices[0].finish_reason == "stop"


async def test_chat_log_probs_and_ids_come_where_asked_for() -> None:
    said = answer(
        top_ids=((7, 1), (8, 1), (9, 1)),
        top_log_probs=((-0.5, -2.0), (-0.25, -3.0), (-1.0, float("-inf"))),
    )
    asked = session(said)
    got = await ask(
        asked,
        lambda o, _: o.chat.completions.create(
            model="rollout",
            messages=ASKED,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        ),
    )
    content = got.choices[0].logprobs.content
    assert [(each.token, each.logprob) for each in content] == [
        ("<7>", -0.5),
        ("<8>", -0.25),
        ("<9>", -1.0),
    ]
    assert [top.logprob for top in content[2].top_logprobs] == [-1.0, -9999.0]
    assert (got.prompt_token_ids, got.choices[0].token_ids) == ([1, 2, 3, 4], [7, 8, 9])
    assert asked.calls[0].sampling["top_log_probs"] == 2


async def test_chat_stream_of_two_samples_gives_both() -> None:
    def stream(o: Any, _: Any) -> Any:
        texts = {0: "", 1: ""}
        for chunk in o.chat.completions.create(model="rollout", messages=ASKED, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    got = await ask(session(answer(1, "a"), answer(2, "b")), stream)
    assert got == {0: "a", 1: "b"}


async def test_responses_create_gives_items_that_can_be_given_back() -> None:
    said = answer(text="Well.", reasoning="Hm.", calls=(CALL,), finish="calls")
    asked = session(said)

    def twice(o: Any, _: Any) -> Any:
        first = o.responses.create(
            model="rollout",
            instructions="Be brief.",
            input="2 + 2?",
            tools=[RESPONSES_TOOL],
            include=["reasoning.encrypted_content"],
        )
        result = {"type": "function_call_output", "call_id": "call-1", "output": "4"}
        given = [{"role": "user", "content": "2 + 2?"}, *first.output, result]
        sealed = [
            {"type": "reasoning", "summary": [], "encrypted_content": item.encrypted_content}
            if item.type == "reasoning"
            else item.model_dump(exclude_none=True)
            for item in first.output
        ]
        o.responses.create(model="rollout", input=given)
        o.responses.create(model="rollout", input=[*sealed, result])
        o.responses.create(model="rollout", input=[result], previous_response_id=first.id)
        return first

    got = await ask(asked, twice)
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call"]
    assert (got.status, got.output_text) == ("completed", "Well.")
    assert (got.usage.input_tokens, got.usage.output_tokens) == (4, 3)
    first, echoed, sealed, following = asked.calls
    assert first.messages[0] == ClientMessage(role="system", text="Be brief.", is_instructions=True)
    turn = ClientMessage(
        role="assistant",
        text="Well.",
        reasoning="Hm.",
        calls=(ClientCall("add", {"a": 1, "b": "ü"}, "call-1"),),
        ids=("answer-0",),
    )
    result = ClientMessage(role="tool", text="4", call_id="call-1", name="add")
    assert echoed.messages == (ClientMessage(role="user", text="2 + 2?"), turn, result)
    assert sealed.messages == (turn, result)
    assert following.previous_id == got.id
    assert following.messages == (ClientMessage(role="tool", text="4", call_id="call-1"),)


async def test_responses_cut_turn_is_incomplete() -> None:
    def stream(o: Any, _: Any) -> Any:
        events = list(o.responses.create(model="rollout", input="2 + 2?", stream=True))
        return events[-1]

    got = await ask(session(answer(finish="length")), stream)
    assert got.type == "response.incomplete"
    assert got.response.incomplete_details.reason == "max_output_tokens"


async def test_responses_tools_of_codex_go_and_come_back_in_their_form() -> None:
    patch = ToolCall(name="apply_patch", arguments={"input": "*** Begin"}, id="call-1", raw="")
    remote = ToolCall(name="mcp__files__read", arguments={}, id="call-2", raw="")
    asked = session(answer(text="", calls=(patch, remote), finish="calls"))
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {}},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files.",
            "tools": [{"type": "function", "name": "read", "parameters": None}],
        },
        {"type": "web_search"},
        {"type": "local_shell"},
    ]

    def twice(o: Any, _: Any) -> Any:
        first = o.responses.create(model="rollout", input="Go.", tools=tools)
        outputs = [
            {"type": "custom_tool_call_output", "call_id": "call-1", "output": "Done."},
            {"type": "function_call_output", "call_id": "call-2", "output": "Text."},
        ]
        o.responses.create(model="rollout", input=[*first.output, *outputs], tools=tools)
        return first.output

    custom, function = await ask(asked, twice)
    assert (custom.type, custom.name, custom.input) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin",
    )
    assert (function.name, function.namespace) == ("read", "mcp__files")
    first, second = asked.calls
    names = [tool["function"]["name"] for tool in first.tools]
    assert names == ["apply_patch", "mcp__files__read"]
    assert second.messages[0].calls == (
        ClientCall("apply_patch", {"input": "*** Begin"}, "call-1"),
        ClientCall("mcp__files__read", {}, "call-2"),
    )
    assert [each.name for each in second.messages[1:]] == names


async def test_messages_create_gives_blocks_that_can_be_given_back() -> None:
    said = answer(text="Well.", reasoning="Hm.", calls=(CALL,), finish="calls")
    asked = session(said)

    def twice(_: Any, a: Any) -> Any:
        first = a.messages.create(
            model="rollout",
            max_tokens=64,
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            messages=ASKED,
            tools=[MESSAGES_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            stop_sequences=["x"],
            extra_body={"top_k": 5, "stop_token_ids": []},
        )
        result = {
            "type": "tool_result",
            "tool_use_id": "call-1",
            "content": [{"type": "text", "text": "4"}],
            "is_error": True,
        }
        given = [
            *ASKED,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
            {"role": "system", "content": "Hurry."},
        ]
        a.messages.create(model="rollout", max_tokens=64, messages=given)
        return first

    got = await ask(asked, twice)
    thinking, text, use = got.content
    assert (thinking.thinking, text.text) == ("Hm.", "Well.")
    assert (use.id, use.name, use.input) == ("call-1", "add", {"a": 1, "b": "ü"})
    assert got.stop_reason == "tool_use"
    assert (got.usage.input_tokens, got.usage.cache_read_input_tokens) == (2, 2)
    first, second = asked.calls
    assert first.messages[0] == ClientMessage(role="system", text="Be brief.")
    assert first.tools == (TOOL,)
    assert (first.forced_by, first.parallel_calls, first.stop) == (("tool_choice",), False, ("x",))
    assert first.sampling == {"max_new_tokens": 64, "top_k": 5}
    assert second.messages[1:] == (
        ClientMessage(
            role="assistant",
            text="Well.",
            reasoning="Hm.",
            calls=(ClientCall("add", {"a": 1, "b": "ü"}, "call-1"),),
            ids=("answer-0",),
        ),
        ClientMessage(role="tool", text="4", call_id="call-1", name="add"),
        ClientMessage(role="user", text="So?"),
        ClientMessage(role="system", text="Hurry."),
    )


async def test_messages_stop_string_is_named() -> None:
    got = await ask(
        session(answer(finish="stop_string", stop_string="x")),
        lambda _, a: a.messages.create(model="rollout", max_tokens=64, messages=ASKED),
    )
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", "x")


async def test_messages_title_call_of_claude_code_is_a_side_call() -> None:
    asked = session()
    billing = [{"type": "text", "text": "x-anthropic-billing-header: a"}]
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}

    def calls(_: Any, a: Any) -> None:
        for system, tools in ((billing, []), ([], []), (billing, [MESSAGES_TOOL])):
            a.messages.create(
                model="rollout",
                max_tokens=64,
                messages=ASKED,
                system=system,
                tools=tools,
                extra_body={"output_config": form},
            )

    await ask(asked, calls)
    assert [call.is_side for call in asked.calls] == [True, False, False]


async def test_models_are_listed_for_both_clients() -> None:
    def names(o: Any, a: Any) -> Any:
        return (
            [each.id for each in o.models.list()],
            [each.id for each in a.models.list()],
            o.models.retrieve("rollout").id,
            a.models.retrieve("org/small").id,
        )

    got = await ask(session(), names, model_aliases=("org/small",))
    assert got == (["rollout", "org/small"], ["rollout", "org/small"], "rollout", "org/small")


CHAT: Any = lambda o, _: o.chat.completions.create(model="rollout", messages=ASKED)  # noqa: E731
RESPONSES: Any = lambda o, _: o.responses.create(model="rollout", input="hi")  # noqa: E731
MESSAGES: Any = lambda _, a: a.messages.create(  # noqa: E731
    model="rollout", max_tokens=9, messages=ASKED
)


@pytest.mark.parametrize(
    "ask_for", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"]
)
@pytest.mark.parametrize(
    ("error", "kind"),
    slow_after(
        2,
        [
            (GatewayError(403, "trajectory_ended", "over"), "PermissionDeniedError"),
            (ValueError("a bug"), "InternalServerError"),
            (GatewayError(400, "limit", "enough", None), "BadRequestError"),
        ],
    ),
)
async def test_error_is_the_clients_own_and_asked_once(
    ask_for: Any, error: Exception, kind: str
) -> None:
    asked = session(error)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        await ask(asked, ask_for)
    assert type(raised.value).__name__ == kind
    assert len(asked.calls) == 1


async def test_over_long_prompt_has_each_apis_code() -> None:
    error = GatewayError(400, "context_length", "9000 tokens > 8192 maximum")
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(session(error), CHAT)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(session(error), RESPONSES)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9000 tokens > 8192"):
        await ask(session(error), MESSAGES)


async def test_over_long_prompt_of_codex_is_told_in_events() -> None:
    def stream(o: Any, _: Any) -> Any:
        return list(
            o.responses.create(
                model="rollout", input="hi", stream=True, extra_headers={"originator": "codex_exec"}
            )
        )

    *begun, failed = await ask(session(GatewayError(400, "context_length", "long")), stream)
    assert [each.type for each in begun] == ["response.created", "response.in_progress"]
    assert failed.type == "response.failed"
    assert failed.response.error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"min_tokens": 4}}, "min_tokens"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_impossible_field_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    asked = session()
    with pytest.raises(openai.APIStatusError) as raised:
        await ask(
            asked,
            lambda o, _: o.chat.completions.create(
                **({"model": "rollout", "messages": ASKED} | change)
            ),
        )
    assert raised.value.status_code == (404 if field == "model" else 400)
    assert raised.value.param == field
    if "tool_choice" in change or "role" in field:
        assert "expected one of " in raised.value.message
    assert asked.calls == []


JSON_FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
FORCING = [
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("responses", {"text": {"format": JSON_FORMAT}}, "text.format"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("chat", {"tool_choice": "auto", "response_format": {"type": "text"}}, None),
]


@pytest.mark.parametrize(("api", "change", "field"), FORCING)
async def test_what_would_force_the_model_is_accepted_or_refused_by_name(
    api: str, change: dict[str, Any], field: str | None
) -> None:
    def create(o: Any, a: Any) -> Any:
        if api == "chat":
            body = {"messages": ASKED, "tools": [TOOL]} | change
            return o.chat.completions.create(model="rollout", **body)
        if api == "responses":
            body = {"input": "hi", "tools": [RESPONSES_TOOL]} | change
            return o.responses.create(model="rollout", **body)
        body = {"messages": ASKED, "tools": [MESSAGES_TOOL]}
        return a.messages.create(model="rollout", max_tokens=9, extra_body=change, **body)

    accepting = session()
    await ask(accepting, create)
    assert accepting.calls[0].forced_by == ((field,) if field else ())
    refusing = session()
    if field is None:
        await ask(refusing, create, unenforced="refuse")
    else:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=field):
            await ask(refusing, create, unenforced="refuse")
        assert refusing.calls == []


async def test_error_after_signs_of_life_ends_the_stream() -> None:
    late = session(GatewayError(400, "limit", "enough"))
    late.pause_s = 0.2

    def chat(o: Any, _: Any) -> Any:
        return list(o.chat.completions.create(model="rollout", messages=ASKED, stream=True))

    def messages(_: Any, a: Any) -> Any:
        return list(a.messages.create(model="rollout", max_tokens=9, messages=ASKED, stream=True))

    with pytest.raises(openai.APIError, match="enough"):
        await ask(late, chat, keep_alive_s=0.05)
    late.script.append(GatewayError(400, "limit", "enough"))
    with pytest.raises(anthropic.APIStatusError, match="enough"):
        await ask(late, messages, keep_alive_s=0.05)
