"""Images and videos in a pool of engines: after deaths, with other weights, and refused."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

import faulty_cores
from fake_core import ABLE
from faulty_cores import UpdatableCore
from rollout.engine.core import SamplingParams, pack_ids
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.engine.weights import DiskWeights
from rollout.errors import EngineError
from rollout.medium import Media, PlacedMedia

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.core import Chunk, GenerationRequest

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]


def medium(number: int) -> Media:
    content = sha256(b"%d" % number).digest() * 10_000
    return Media(kind="image", content=content, mime="image/png", width=8, height=8)


def placed(*media: Media) -> tuple[PlacedMedia, ...]:
    """Each with a place of its own."""
    return tuple(PlacedMedia(each, at, 1) for at, each in enumerate(media))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every core that a test starts, in order; each notes the media of its requests."""
    made: list[Any] = []

    class SeeingCore(UpdatableCore):
        def __init__(self, *, modalities: list[str], **options: Any) -> None:
            super().__init__(**options)
            able = msgspec.structs.replace(ABLE, modalities=tuple(modalities))
            self.info = msgspec.structs.replace(self.info, capabilities=able)
            self.seen: list[tuple[Media, ...]] = []
            made.append(self)

        def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            self.seen.append(tuple(each.medium for each in request.media))
            return super().generate(request)

    monkeypatch.setattr(faulty_cores, "SeeingCore", SeeingCore, raising=False)
    return made


def pool_of(*modalities: list[str]) -> EnginePool:
    options = [
        {"token_s": 1.0, "index": index, "modalities": each}
        for index, each in enumerate(modalities)
    ]
    return EnginePool(
        placement=InProcess(),
        specs=[CoreSpec("faulty_cores:SeeingCore", each) for each in options],
        router=Router(),
        start_timeout_s=5,
        backoff_s=0.1,
    )


async def ask(pool: EnginePool, generation: Generation, *media: Media) -> None:
    """Six tokens after a prompt with these media."""
    await pool.generate(
        generation.ask(
            session_id="s",
            prompt_ids=pack_ids([1, 2, 3]),
            sampling=SamplingParams(max_new_tokens=6),
            media=placed(*media),
        )
    )


async def test_pool_replica_dies_request_resumes_elsewhere_with_its_media(
    cores: list[Any],
) -> None:
    a, b = medium(1), medium(2)
    async with pool_of(["image"], ["image"]).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, generation, a, b)
            await anyio.sleep(2.5)
            (core,) = [core for core in cores if core.seen]
            core.on_death()
        sent = sum(replica.media_bytes for replica in pool.statistics())
    assert list(generation.ids) == [4, 5, 6, 7, 8, 9]
    assert generation.resumes == 1
    assert [core.seen for core in cores if core.seen] == [[(a, b)]] * 2
    assert sent == 2 * (len(a.content) + len(b.content))


async def test_pool_weights_change_request_resumes_with_media_that_are_there(
    cores: list[Any],
) -> None:
    a = medium(1)
    async with pool_of(["image"]).serving() as pool, anyio.create_task_group() as tasks:
        generation = Generation()
        tasks.start_soon(ask, pool, generation, a)
        await anyio.sleep(2.5)
        await pool.update_weights(9, DiskWeights("/other"), "abort_and_resume")
        while generation.finish_reason != "length":
            await anyio.sleep(0.5)
        (replica,) = pool.statistics()
    assert len(cores[0].seen) == 2
    assert replica.media_bytes == len(a.content)


async def test_pool_engines_that_take_other_media_are_not_mixed(cores: list[Any]) -> None:
    with pytest.raises(EngineError) as caught:
        async with pool_of(["image"], []).serving():
            pass
    assert "capabilities.modalities = (), the other engines" in str(caught.value)
    assert "expected the same of all" in str(caught.value)
