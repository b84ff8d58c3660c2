"""A user played by a model, against a real server on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from http_endpoint import Endpoint
from rollout.errors import ConfigError, MediaError, RolloutError
from rollout.interactions import Interaction, InteractionContext, InteractionTurn, ModelUser
from rollout.interactions.model_user import DONE

pytestmark = [pytest.mark.anyio, pytest.mark.process]

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "What would you like?"},
]


@pytest.fixture
def anyio_backend() -> str:
    """Real time, for a real server."""
    return "asyncio"


def says(content: object) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": content}}]}


@asynccontextmanager
async def speaking(url: str, **options: Any) -> AsyncIterator[Interaction]:
    options = {"persona": "You want {thing}.", "api_key_variable": None, **options}
    speaker = ModelUser(url, "m", **options)()
    context = InteractionContext(uid="p", member=0, kwargs={"thing": "tea", "name": "model_user"})
    await speaker.start(context)
    yield speaker
    await speaker.finish()


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_model_sees_the_conversation_from_the_users_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "secret")
    options = {"api_key_variable": "KEY", "sampling": {"temperature": 0.5, "top_k": 40}}
    with Endpoint(says("Tea, please.")) as endpoint:
        async with speaking(endpoint.url, **options) as speaker:
            assert await speaker.respond(TALK) == InteractionTurn("Tea, please.")
    (asked,) = endpoint.asked
    instructions, *seen = asked.pop("messages")
    assert asked == {"model": "m", "temperature": 0.5, "top_k": 40}
    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.keys == ["Bearer secret"]
    assert instructions["role"] == "system"
    assert "You want tea." in instructions["content"]
    assert seen == [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "What would you like?"},
    ]


async def test_user_is_done_when_its_model_says_so_and_after_its_last_turn() -> None:
    with Endpoint(says("And?"), says(f"Thanks. {DONE}"), says("more?")) as endpoint:
        for options in ({}, {"max_turns": 1}):
            async with speaking(endpoint.url, **options) as speaker:
                assert not (await speaker.respond(TALK)).is_done
                assert await speaker.respond(TALK) == InteractionTurn("", is_done=True)
    assert len(endpoint.asked) == 3


async def test_busy_server_is_asked_again_and_parts_of_text_are_what_the_user_says() -> None:
    parts = says([{"type": "text", "text": "Tea, "}, {"type": "text", "text": "please."}])
    with Endpoint((503, "busy"), (429, "slow down"), parts) as endpoint:
        async with speaking(endpoint.url) as speaker:
            assert await speaker.respond(TALK) == InteractionTurn("Tea, please.")
    assert len(endpoint.asked) == 3


IMAGE = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}


@pytest.mark.parametrize(
    ("answer", "kind", "error"),
    [
        ((401, "bad key"), RolloutError, r"HTTP 401: bad key$"),
        ((200, "[]"), RolloutError, r"not a chat completion: \[\]$"),
        ((200, "<html>"), RolloutError, r"no answer \(JSONDecodeError: "),
        (says([IMAGE]), MediaError, r"content\[0\]: only parts"),
        (None, RolloutError, r"no answer \(ConnectError"),
    ],
)
async def test_server_that_gives_no_answer_is_quoted(
    answer: tuple[int, Any] | None, kind: type[Exception], error: str
) -> None:
    with Endpoint(*[answer] if answer else []) as endpoint:
        url = endpoint.url if answer else "http://127.0.0.1:9/v1"
        async with speaking(url, max_tries=1) as speaker:
            with pytest.raises(kind, match=f"^interaction 'model_user': {error}"):
                await speaker.respond(TALK)


async def test_persona_with_a_field_that_the_prompt_lacks_is_named() -> None:
    with pytest.raises(RolloutError) as failure:
        async with speaking("http://127.0.0.1:9/v1", persona="You want {dish}."):
            pytest.fail("it started")
    assert str(failure.value) == (
        "interaction 'model_user': persona cannot be filled from the prompt's interaction_kwargs "
        "(KeyError: 'dish'); they have name, thing"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"max_turns": 0},
            "max_turns = 0, max_tries = 3, timeout_s = 60.0: expected at least 1, 1 and > 0",
        ),
        (
            {"base_url": "localhost:8000"},
            "base_url = 'localhost:8000': expected an http or https URL",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: Any, error: str) -> None:
    given = {"base_url": "http://x/v1", "model": "m", "persona": "", "name": "u", **arguments}
    with pytest.raises(ConfigError) as failure:
        ModelUser(**given)
    assert str(failure.value) == f"interaction 'u': {error}"
