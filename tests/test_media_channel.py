"""Images and videos on the way to an engine: each once, in parts, and never before tokens."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from fake_core import CountingCore
from rollout.engine.core import Capabilities, SamplingParams
from rollout.engine.driver.generation import Generation
from rollout.engine.wire.protocol import Abort, MediaPart, Submit
from rollout.medium import Media, PlacedMedia
from wires import TERMS, Asker, Wire, messages_of, packed

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


class Seer(Asker):
    """Asks about media."""

    def about(self, *media: Media, count: int = 4, request_id: str = "") -> Any:
        self._count += 1
        generation = Generation()
        request_id = request_id or f"{self._count:032x}"
        pending = self.channel.submit_nowait(
            Submit(request_id, packed([1, 2, 3]), SamplingParams(max_new_tokens=count), "s"),
            generation,
            lambda gone: self.gone.append(gone.request_id),
            media=placed(*media),
        )
        return generation, pending


async def test_channel_media_are_sent_once_whole_and_in_order() -> None:
    core = SeeingCore()
    wire = Wire(core)
    a, b, big = medium(1), medium(2), medium(3, 3_000_000)
    async with wire.channel() as channel:
        seer = Seer(channel)
        for media in ((a,), (a, b), (b, big, a), (a, a), (big,)):
            _, pending = seer.about(*media)
            await pending.done.wait()
            assert not pending.error
            assert core.seen[pending.request_id] == media
            assert all(each.is_intact for each in core.seen[pending.request_id])
        assert channel.media_bytes == 1000 + 1000 + 3_000_000


async def test_channel_media_of_many_requests_at_once_are_sent_once() -> None:
    core = SeeingCore()
    shared = medium(1, 600_000)
    async with Wire(core).channel() as channel:
        seer = Seer(channel)
        asked = [seer.about(shared, medium(10 + n % 3)) for n in range(16)]
        for _, pending in asked:
            await pending.done.wait()
            assert not pending.error
        assert channel.media_bytes == 600_000 + 3 * 1000
    assert all(len(media) == 2 for media in core.seen.values())


async def test_channel_medium_evicted_or_engine_restarted_is_sent_again() -> None:
    """The store of an engine is bounded; a request's own media are never lost to it."""
    core = SeeingCore()
    wire = Wire(core, media_bytes=2500)
    many = tuple(medium(n) for n in range(5))  # more than fit
    async with wire.channel() as channel:
        seer = Seer(channel)
        for media in (many, many[:2], many):
            _, pending = seer.about(*media)
            await pending.done.wait()
            assert core.seen[pending.request_id] == media
        assert wire.server._media.bytes <= 2500
        assert channel.media_bytes > 5000
    core = wire.core = SeeingCore()
    async with Wire(core).channel() as channel:  # another engine in its place has nothing
        _, pending = Seer(channel).about(many[0])
        await pending.done.wait()
        assert core.seen[pending.request_id] == many[:1]


async def test_channel_second_client_of_an_engine_need_not_send_again() -> None:
    core = SeeingCore()
    wire = Wire(core)
    a = medium(1)
    async with wire.channel() as first, wire.channel_again() as second:
        for channel in (first, second):
            _, pending = Seer(channel).about(a)
            await pending.done.wait()
        assert (first.media_bytes, second.media_bytes) == (1000, 0)


async def test_channel_requests_overtake_a_big_video() -> None:
    """Parts of 256 KiB: a request that comes meanwhile goes before the next one."""
    core = SeeingCore()
    wire = Wire(core)
    async with wire.channel() as channel:
        sent = messages_of(channel, "data")
        seer = Seer(channel)
        _, slow = seer.about(medium(1, 20_000_000))
        while not any(isinstance(message, MediaPart) for message in sent):
            await anyio.lowlevel.checkpoint()
        answered = []
        for _ in range(5):
            _, quick = seer.about()
            await quick.done.wait()
            answered.append(slow.done.is_set())
        assert answered == [False] * 5
        await slow.done.wait()
        kinds = [type(message) for message in sent]
        parts = [n for n, kind in enumerate(kinds) if kind is MediaPart]
        submits = [n for n, kind in enumerate(kinds) if kind is Submit]
        assert len(parts) == 77
        assert all(n < parts[-1] for n in submits)
        assert max(len(m.content) for m in sent if isinstance(m, MediaPart)) == 256 * 1024


async def test_channel_small_image_does_not_wait_for_a_big_video() -> None:
    core = SeeingCore()
    async with Wire(core).channel() as channel:
        seer = Seer(channel)
        _, slow = seer.about(medium(1, 20_000_000))
        _, quick = seer.about(medium(2))
        await quick.done.wait()
        assert not slow.done.is_set()
        await slow.done.wait()


async def test_channel_broken_under_a_medium_continues_it() -> None:
    core = SeeingCore()
    wire = Wire(core)
    big = medium(1, 5_000_000)
    async with wire.channel() as channel:
        sent = messages_of(channel, "data")
        _, pending = Seer(channel).about(big)
        while sum(isinstance(message, MediaPart) for message in sent) < 3:
            await anyio.lowlevel.checkpoint()
        wire.cut(after=lambda unread: unread // 2)
        await pending.done.wait()
        assert not pending.error
        assert core.seen[pending.request_id] == (big,)
        assert core.seen[pending.request_id][0].is_intact


async def test_channel_request_aborted_while_its_media_come_ends() -> None:
    core = SeeingCore()
    big = medium(1, 5_000_000)
    async with Wire(core).channel() as channel:
        sent = messages_of(channel, "data")
        seer = Seer(channel)
        _, first = seer.about(big)
        _, second = seer.about(big)
        while not any(isinstance(message, MediaPart) for message in sent):
            await anyio.lowlevel.checkpoint()
        channel.abandon_nowait(first)
        await first.done.wait()
        assert first.request_id not in core.seen
        await second.done.wait()
        assert core.seen[second.request_id] == (big,)
        assert channel.media_bytes == 5_000_000


async def test_channel_deadline_passes_while_media_come_ends_the_request() -> None:
    core = SeeingCore()
    async with Wire(core).channel() as channel:
        channel._media.answer = lambda media, digests: None  # they never come
        seer = Seer(channel)
        seer._count += 1
        pending = channel.submit_nowait(
            Submit("f" * 32, packed([1]), SamplingParams(max_new_tokens=2), "s"),
            Generation(),
            lambda gone: None,
            media=placed(medium(1)),
            deadline=anyio.current_time() + 0.2,
        )
        await pending.done.wait()
        assert pending.finish_reason == "abort"
        assert core.seen == {}


async def test_channel_part_that_nobody_asked_for_ends_the_session() -> None:
    wire = Wire(SeeingCore())
    async with wire.channel() as channel:
        channel._data.send_nowait(
            MediaPart(digest="d" * 64, content=b"x", medium=medium(1), is_last=True)
        )
        await channel.lost.wait()


async def test_channel_small_frames_are_kept_to() -> None:
    core = SeeingCore()
    terms = msgspec.structs.replace(TERMS, max_frame_bytes=4096)
    async with Wire(core).channel(terms) as channel:
        _, pending = Seer(channel).about(medium(1, 100_000))
        await pending.done.wait()
        assert not pending.error
        assert core.seen[pending.request_id][0].is_intact


async def test_channel_aborts_do_not_wait_for_media() -> None:
    core = SeeingCore(token_s=1000.0)
    async with Wire(core).channel() as channel:
        control = messages_of(channel, "control")
        seer = Seer(channel)
        _, running = seer.about()
        _, slow = seer.about(medium(1, 30_000_000))
        while not channel.media_bytes:
            await anyio.lowlevel.checkpoint()
        channel.abandon_nowait(running)
        await running.done.wait()
        assert Abort(running.request_id) in control
        channel.abandon_nowait(slow)
        await slow.done.wait()
