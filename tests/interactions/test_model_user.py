"""A user played by a model, against a real server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollout.errors import ConfigError, MediaError, RolloutError
from rollout.interactions import Interaction, InteractionContext, InteractionTurn, ModelUser
from rollout.interactions.model_user import DONE

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


class Endpoint:
    """Gives these answers in order: texts, or a status with a body."""

    def __init__(self, *answers: str | tuple[int, str]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    def answer(self, path: str, body: bytes, key: str | None) -> tuple[int, bytes]:
        self.asked.append({"path": path, **json.loads(body)})
        self.keys.append(key)
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return answer[0], answer[1].encode()
        return 200, json.dumps({"choices": [{"message": {"content": answer}}]}).encode()


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, text = endpoint.answer(self.path, body, self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After-Ms", "1")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


def user_of(endpoint: Endpoint, **options: Any) -> ModelUser:
    options = {"persona": "You want {thing}.", "api_key_variable": None, **options}
    return ModelUser(endpoint.url, "m", **options)


async def started(user: ModelUser) -> Interaction:
    speaker = user()
    context = InteractionContext(uid="p", member=0, kwargs={"thing": "tea", "name": "model_user"})
    await speaker.start(context)
    return speaker


TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "What would you like?"},
]


async def test_model_sees_the_conversation_from_the_users_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "secret")
    with serving(Endpoint("Tea, please.")) as endpoint:
        user = user_of(endpoint, api_key_variable="KEY", sampling={"temperature": 0.5})
        speaker = await started(user)
        assert await speaker.respond(TALK) == InteractionTurn("Tea, please.")
        await speaker.finish()
    (asked,) = endpoint.asked
    instructions, *seen = asked.pop("messages")
    assert asked == {"path": "/v1/chat/completions", "model": "m", "temperature": 0.5}
    assert endpoint.keys == ["Bearer secret"]
    assert instructions["role"] == "system"
    assert "You want tea." in instructions["content"]
    assert seen == [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "What would you like?"},
    ]


async def test_user_is_done_when_its_model_says_so_and_after_its_last_turn() -> None:
    with serving(Endpoint("And?", f"Thanks. {DONE}", "more?")) as endpoint:
        speaker = await started(user_of(endpoint))
        assert not (await speaker.respond(TALK)).is_done
        assert await speaker.respond(TALK) == InteractionTurn("", is_done=True)
        await speaker.finish()
        speaker = await started(user_of(endpoint, max_turns=1))
        assert not (await speaker.respond(TALK)).is_done
        assert await speaker.respond(TALK) == InteractionTurn("", is_done=True)
        await speaker.finish()
    assert len(endpoint.asked) == 3


async def test_busy_server_is_asked_again() -> None:
    with serving(Endpoint((503, "busy"), (429, "slow down"), "Tea.")) as endpoint:
        speaker = await started(user_of(endpoint))
        assert (await speaker.respond(TALK)).text == "Tea."
        await speaker.finish()
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((401, "bad key"), "interaction 'model_user': HTTP 401: bad key"),
        ((200, "[]"), "interaction 'model_user': not a chat completion: []"),
        ((500, "x" * 900), "interaction 'model_user': HTTP 500: " + "x" * 200),
    ],
)
async def test_server_that_refuses_is_quoted(answer: tuple[int, str], error: str) -> None:
    with serving(Endpoint(answer)) as endpoint:
        speaker = await started(user_of(endpoint, max_tries=1))
        with pytest.raises(RolloutError) as failure:
            await speaker.respond(TALK)
        await speaker.finish()
    assert str(failure.value) == error


async def test_server_that_is_not_there_is_named() -> None:
    with serving(Endpoint()) as endpoint:
        user = user_of(endpoint, max_tries=1)
    speaker = await started(user)
    with pytest.raises(RolloutError, match=r"^interaction 'model_user': no answer \(ConnectError"):
        await speaker.respond(TALK)
    await speaker.finish()


async def test_persona_with_a_field_that_the_prompt_lacks_is_named() -> None:
    speaker = ModelUser("http://127.0.0.1:9/v1", "m", persona="You want {dish}.")()
    with pytest.raises(RolloutError) as failure:
        await speaker.start(InteractionContext(uid="p", member=0, kwargs={"thing": "tea"}))
    assert str(failure.value) == (
        "interaction 'model_user': persona cannot be filled from the prompt's interaction_kwargs "
        "(KeyError: 'dish'); they have thing"
    )
    await speaker.finish()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"max_turns": 0},
            "interaction 'u': max_turns = 0, max_tries = 3: expected at least 1 each",
        ),
        (
            {"max_tries": 0},
            "interaction 'u': max_turns = 8, max_tries = 0: expected at least 1 each",
        ),
        (
            {"base_url": "localhost:8000"},
            "interaction 'u': base_url = 'localhost:8000': expected an http or https URL",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: Any, error: str) -> None:
    with pytest.raises(ConfigError) as failure:
        ModelUser(
            **{"base_url": "http://x/v1", "model": "m", "persona": "", "name": "u", **arguments}
        )
    assert str(failure.value) == error


async def test_answer_in_parts_of_text_is_what_the_user_says() -> None:
    parts = [{"type": "text", "text": "Tea, "}, {"type": "text", "text": "please."}]
    body = json.dumps({"choices": [{"message": {"content": parts}}]})
    with serving(Endpoint((200, body))) as endpoint:
        speaker = await started(user_of(endpoint))
        assert await speaker.respond(TALK) == InteractionTurn("Tea, please.")
        await speaker.finish()


async def test_answer_with_an_image_is_refused() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://host/a.png"}}]
    body = json.dumps({"choices": [{"message": {"content": parts}}]})
    with serving(Endpoint((200, body))) as endpoint:
        speaker = await started(user_of(endpoint))
        with pytest.raises(
            MediaError, match=r"^interaction 'model_user': content\[0\]: only parts"
        ):
            await speaker.respond(TALK)
        await speaker.finish()
