"""Images and videos on the way to an engine: each once, in parts, and never before tokens."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from fake_core import CountingCore
from rollout.engine.channel.messages import MediaPart, Submit
from rollout.engine.core import Capabilities
from rollout.medium import Media, PlacedMedia
from wires import Request, Requester, Wire, record_messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.core import Chunk, GenerationRequest

pytestmark = pytest.mark.anyio


def medium(number: int, size: int = 1000) -> Media:
    block = sha256(b"%d" % number).digest()
    content = (block * (size // len(block) + 1))[:size]
    return Media(kind="image", content=content, mime="image/png", width=8, height=8)


def placed(*media: Media) -> tuple[PlacedMedia, ...]:
    """Each with a place of its own."""
    return tuple(PlacedMedia(each, at, 1) for at, each in enumerate(media))


class SeeingCore(CountingCore):
    """Takes images and videos, and notes what it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        able = Capabilities(modalities=("image", "video"))
        self.info = msgspec.structs.replace(self.info, capabilities=able)
        self.seen: dict[str, tuple[Media, ...]] = {}

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Note the media, then count."""
        assert [each.start for each in request.media] == list(range(len(request.media)))
        self.seen[request.request_id] = tuple(each.medium for each in request.media)
        return super().generate(request)


class Seer(Requester):
    """Asks about media."""

    def about(self, *media: Media, **options: Any) -> Request:
        return self.submit([1, 2, 3], media=placed(*media), **options)

    async def answer(self, *media: Media, **options: Any) -> None:
        await self.generate([1, 2, 3], media=placed(*media), **options)


async def test_channel_media_are_sent_once_intact_and_in_order() -> None:
    core = SeeingCore()
    a, b, big = medium(1), medium(2), medium(3, 3_000_000)
    async with Wire(core).channel() as channel:
        seer = Seer(channel)
        for number, media in enumerate([(a,), (a, b), (b, big, a), (a, a), (big,)]):
            await seer.answer(*media, request_id=f"{number:032x}")
            assert core.seen[f"{number:032x}"] == media
            assert all(each.is_intact for each in core.seen[f"{number:032x}"])
        assert channel.media_bytes == 1000 + 1000 + 3_000_000


async def test_channel_media_of_many_requests_at_once_are_sent_once() -> None:
    core = SeeingCore()
    shared = medium(1, 600_000)
    async with Wire(core).channel() as channel:
        seer = Seer(channel)
        requests = [seer.about(shared, medium(10 + n % 3)) for n in range(16)]
        for request in requests:
            await request.done.wait()
            assert not request.error
        assert channel.media_bytes == 600_000 + 3 * 1000
    assert all(len(media) == 2 for media in core.seen.values())


async def test_channel_medium_evicted_or_of_an_earlier_session_is_sent_again() -> None:
    """The engine's cache is bounded; a request's own media are never lost to it."""
    core = SeeingCore()
    wire = Wire(core, media_cache_bytes=2500)
    many = tuple(medium(n) for n in range(5))  # more than fit
    async with wire.channel() as channel:
        seer = Seer(channel)
        for number, media in enumerate([many, many[:2], many]):
            await seer.answer(*media, request_id=f"{number:032x}")
            assert core.seen[f"{number:032x}"] == media
        assert channel.media_bytes > 5000
        async with wire.channel_again() as again:
            await Seer(again).answer(many[0])
            assert again.media_bytes == 1000


async def test_channel_requests_overtake_a_big_video() -> None:
    """Parts of 256 KiB: a request that comes meanwhile goes before the next one."""
    async with Wire(SeeingCore()).channel() as channel:
        sent = record_messages(channel)
        seer = Seer(channel)
        slow = seer.about(medium(1, 20_000_000))
        while not any(isinstance(message, MediaPart) for message in sent):
            await anyio.lowlevel.checkpoint()
        answered = []
        for small in ((), (), (medium(2),)):
            await seer.answer(*small)
            answered.append(slow.done.is_set())
        assert answered == [False] * 3
        await slow.done.wait()
        parts = [n for n, message in enumerate(sent) if isinstance(message, MediaPart)]
        submits = [n for n, message in enumerate(sent) if isinstance(message, Submit)]
        assert len(parts) == 77 + 1
        assert all(n < parts[-1] for n in submits)
        assert max(len(m.content) for m in sent if isinstance(m, MediaPart)) == 256 * 1024


async def test_channel_request_aborted_while_its_media_come_ends_and_others_get_them() -> None:
    core = SeeingCore()
    big = medium(1, 5_000_000)
    async with Wire(core).channel() as channel:
        seer = Seer(channel)
        first = seer.about(big, request_id="a" * 32)
        second = seer.about(big, request_id="b" * 32)
        while not channel.media_bytes:
            await anyio.lowlevel.checkpoint()
        channel.abort_nowait("a" * 32)
        await first.done.wait()
        assert not second.done.is_set()
        assert first.finish_reason == "abort"
        await second.done.wait()
        assert list(core.seen) == ["b" * 32]
        assert core.seen["b" * 32] == (big,)
        assert channel.media_bytes == 5_000_000
