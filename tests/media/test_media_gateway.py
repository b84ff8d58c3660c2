"""Clients of the gateway that show images."""

from __future__ import annotations

import base64
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

import rollout
from http_agents import Client, prompt_of
from media_material import config_of, encoded, picture
from rollout.config import AgentConfig, GatewayConfig
from rollout.media import decode

pytest.importorskip("h11")

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed"),
]


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so real time."""
    return "trio"


DATA = base64.b64encode(encoded(picture())).decode()
URL = f"data:image/png;base64,{DATA}"
#: An image as each API has it.
CHAT = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
RESPONSES = {"type": "input_image", "image_url": URL, "detail": "auto"}
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}


async def talked(folder: Path, program: Any) -> rollout.Trajectory:
    config = attrs.evolve(
        config_of(folder, ("first", "second")),
        agent=AgentConfig(name="http_agent"),
        gateway=GatewayConfig(start="always"),
    )
    async with rollout.open_rollout(config) as runtime:
        (trajectory,) = (await runtime.generate([prompt_of(program)], samples=1)).trajectories
    return trajectory


def by_chat(client: Client) -> list[int]:
    asked = {"role": "user", "content": [{"type": "text", "text": "see"}, CHAT]}
    said = {"role": "assistant", "content": "first"}
    more = {"role": "user", "content": [CHAT, {"type": "text", "text": "again"}]}
    return [client.chat(asked).status_code, client.chat(asked, said, more).status_code]


def by_messages(client: Client) -> list[int]:
    asked = {"role": "user", "content": [{"type": "text", "text": "see"}, ANTHROPIC]}
    said = {"role": "assistant", "content": "first"}
    more = {"role": "user", "content": [ANTHROPIC, {"type": "text", "text": "again"}]}
    bodies: list[Any] = [[asked], [asked, said, more]]
    counted = client.post("/v1/messages/count_tokens", messages=bodies[0])
    assert counted.json()["input_tokens"] > 10
    return [client.post("/v1/messages", messages=each, max_tokens=9).status_code for each in bodies]


def by_responses(client: Client) -> list[int]:
    text = {"type": "input_text", "text": "see"}
    asked = {"type": "message", "role": "user", "content": [text, RESPONSES]}
    first = client.post("/v1/responses", input=[asked])
    more = {"type": "message", "role": "user", "content": [RESPONSES, text]}
    second = client.post("/v1/responses", input=[more], previous_response_id=first.json().get("id"))
    return [first.status_code, second.status_code]


@pytest.mark.parametrize("program", [by_chat, by_messages, by_responses])
async def test_client_that_shows_images_continues_its_row(folder: Path, program: Any) -> None:
    trajectory = await talked(folder, program)
    assert trajectory.extra["result"] == [200, 200], trajectory.cause
    (segment,) = trajectory.segments
    first, second = segment.transcript.media
    assert first.medium is second.medium
    assert np.array_equal(decode(first.medium), np.asarray(picture()))
    assert len(list(segment.transcript.generated_spans())) == 2


def with_faults(client: Client) -> list[tuple[int, str]]:
    def told(part: Any) -> tuple[int, str]:
        answer = client.chat({"role": "user", "content": [part]})
        return answer.status_code, answer.json()["error"]["message"]

    broken = base64.b64encode(encoded(picture())[:500]).decode()
    return [
        told({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        told({"type": "image_url", "image_url": {"url": "http://host/a.png"}}),
        told({"type": "image_url", "image_url": {"url": "/etc/hostname"}}),
        told({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}}),
    ]


async def test_client_that_shows_what_cannot_be_taken_is_told_why(folder: Path) -> None:
    answers = (await talked(folder, with_faults)).extra["result"]
    for (status, text), said in zip(
        answers,
        (
            "messages[0].content[0].type: 'input_audio': audio is not served",
            "no media_fetcher was given to open_rollout",
            "media.roots names no directory",
            "a picture that cannot be decoded",
        ),
        strict=True,
    ):
        assert status == 400
        assert said in text
