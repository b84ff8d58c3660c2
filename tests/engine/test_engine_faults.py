"""Engines of others that contradict themselves, or raise where nobody expects it."""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest

from fake_core import CountingCore
from faulty_cores import UpdatableCore
from pools import generate, make_pool
from rollout.engine.channel.messages import ChannelSettings
from rollout.engine.core import Chunk, EngineLoad, GenerationRequest, unpack_ids
from rollout.engine.pool.pool import EnginePool
from rollout.engine.weights import DiskWeights
from rollout.errors import EngineError
from rollout.limits import Clock, Deadline

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]


def pool_of(core: str, *replicas: dict[str, Any], **options: Any) -> EnginePool:
    return make_pool(f"test_engine_faults:{core}", *replicas or ({},), **options)


class RepeatingCore(CountingCore):
    """Says its last tokens but one again, in the chunk of the last one or in one of their own."""

    def __init__(self, *, overlaps: bool = False, surplus: int = 0) -> None:
        super().__init__()
        self._overlaps, self._surplus = overlaps, surplus

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        first = unpack_ids(request.prompt_ids)[-1] + 1
        stop = request.sampling.max_new_tokens + self._surplus

        def say(start: int, stop: int, reason: Any = None) -> Chunk:
            ids = range(first + start, first + stop)
            return Chunk(
                request_id=request.request_id,
                offset=start,
                ids=array("i", ids).tobytes(),
                log_probs=array("f", [-1.0] * len(ids)).tobytes(),
                finish_reason=reason,
            )

        for at in range(stop - 1):
            yield say(at, at + 1)
        await anyio.sleep(1)  # what has gathered is sent
        again = max(stop - 3, 0)
        if self._overlaps:
            yield say(again, stop, "length")
        else:
            yield say(again, stop - 1)
            yield say(stop - 1, stop, "length")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("interval", [1, 4])
async def test_engine_says_tokens_again_beside_new_ones_none_is_lost(
    overlaps: bool, interval: int
) -> None:
    settings = ChannelSettings(stream_interval=interval)
    pool = pool_of("RepeatingCore", {"overlaps": overlaps}, settings=settings)
    async with pool.serving():
        answer = await generate(pool, [5, 100], 6)
        assert list(answer.ids) == list(range(101, 107))
        assert answer.finish_reason == "length"


async def test_engine_answers_more_than_was_wanted_the_generation_fails_by_name() -> None:
    settings = ChannelSettings(stream_interval=16)
    async with pool_of("RepeatingCore", {"surplus": 3}, settings=settings).serving() as pool:
        with pytest.raises(EngineError, match="at most 5 were wanted"):
            await generate(pool, [5, 100], 5)


class UnlikeCore(UpdatableCore):
    """Raises at its end, in its watch or while an answer is closed, or is not as it was before.

    Attributes:
        starts: Of all.
    """

    starts = 0

    def __init__(self, *, fault: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._fault = fault
        UnlikeCore.starts += 1
        if UnlikeCore.starts > 1 and fault == "room":
            self.info = msgspec.structs.replace(self.info, max_requests=0)
        if UnlikeCore.starts > 1 and fault == "model":
            facts = {"fingerprint": "other", "context_length": 16}
            self.info = msgspec.structs.replace(self.info, **facts)
        if UnlikeCore.starts > 1 and fault == "skills":
            able = msgspec.structs.replace(self.info.capabilities, expert_shape=(1, 1))
            self.info = msgspec.structs.replace(self.info, capabilities=able)

    async def aclose(self) -> None:
        if self._fault == "close":
            raise RuntimeError("it does not close")

    async def watch(self) -> str:
        await anyio.sleep(30 if self._fault == "watch" else math.inf)
        raise RuntimeError("nobody watches")

    def load(self) -> EngineLoad:
        return EngineLoad(kv_used=math.nan) if self._fault == "load" else super().load()

    async def sleep(self, level: int) -> None:
        """Nothing to release."""

    wake_up = sleep  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def no_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnlikeCore, "starts", 0)


@pytest.mark.parametrize("fault", ["close", "watch", "room"])
async def test_engine_that_is_restarted_and_raises_harms_no_other(fault: str) -> None:
    async with pool_of("UnlikeCore", {"token_s": 1.0, "fault": fault}, {}).serving() as pool:
        broken = pool._replicas["engine-0"]
        broken.restart(broken.channel, "the test wants it")
        answer = await generate(pool, [5, 100], 40)
        assert list(answer.ids) == list(range(101, 141))
        await pool.remove_replica("engine-0")
        assert [each.state for each in pool.statistics()] == ["removed", "serving"]


async def test_engine_whose_first_frame_breaks_each_session_is_asked_now_and_then() -> None:
    async with pool_of("UnlikeCore", {"fault": "load"}).serving() as pool:
        await anyio.sleep(20)
        assert 1 < pool.statistics()[0].starts <= 100


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("model", "engine-1 serves model other"),
        ("skills", r"capabilities.expert_shape = \(1, 1\), the other engines None"),
    ],
)
async def test_replica_unlike_the_others_is_refused_and_changes_nothing(
    fault: str, said: str
) -> None:
    async with pool_of("UnlikeCore", {"fault": fault}).serving() as pool:
        with pytest.raises(EngineError, match=said):
            await pool.add_replica()
        assert pool.info.context_length == 4096


@pytest.mark.parametrize("load_share", [0, -1.0, math.nan, True, "1"])
async def test_replica_of_no_share_is_refused_by_name(load_share: Any) -> None:
    async with pool_of("UnlikeCore").serving() as pool:
        with pytest.raises(EngineError, match=f"load_share = {load_share!r}: expected a number"):
            await pool.add_replica(load_share=load_share)
        assert list((await generate(pool, [5, 100], 2)).ids) == [101, 102]


async def test_add_replica_cancelled_at_any_moment_leaves_none_or_is_done() -> None:
    async with pool_of("UnlikeCore").serving() as pool:
        added: list[str] = []

        async def add() -> None:
            added.append(await pool.add_replica())

        for steps in range(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(add)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            names = [each.name for each in pool.statistics() if each.state == "serving"]
            assert names == ["engine-0", *added], steps
            if added:
                return
        raise AssertionError("it was never done")


async def test_update_while_asleep_leaves_the_clocks_of_requests_stopped() -> None:
    async with pool_of("UnlikeCore", {"token_s": 1.0}).serving() as pool:

        async def sleep_and_update() -> None:
            await anyio.sleep(3)
            await pool.sleep(1)
            await pool.update_weights(version=1, source=DiskWeights("any"))
            await anyio.sleep(60)
            await pool.wake_up()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep_and_update)
            with Clock(Deadline.after(20, "limits.trajectory_s")) as clock:
                answer = await generate(pool, [5, 100], 10, limit=clock)
        assert list(answer.ids) == list(range(101, 111))


async def test_weights_that_fit_no_frame_are_refused_and_the_old_ones_serve_on() -> None:
    settings = ChannelSettings(max_frame_bytes=4096)
    async with pool_of("UnlikeCore", settings=settings).serving() as pool:
        with pytest.raises(EngineError, match=r"the operation does not fit: .* 4096 are allowed"):
            await pool.update_weights(version=1, source=DiskWeights("/x" * 4000))
        assert list((await generate(pool, [5, 100], 3)).ids) == [101, 102, 103]


class OneAnswer:
    """An answer that raises while it is closed, and never gives a token."""

    def __aiter__(self) -> OneAnswer:
        return self

    async def __anext__(self) -> Chunk:
        await anyio.sleep(5)
        raise RuntimeError("no answer")

    async def aclose(self) -> None:
        raise RuntimeError("it does not close")


class UnclosedCore(UpdatableCore):
    """Gives such answers."""

    def generate(self, request: GenerationRequest) -> Any:
        return OneAnswer()


async def test_answer_that_raises_while_it_is_closed_holds_up_no_update() -> None:
    async with pool_of("UnclosedCore").serving() as pool, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(EngineError, match="it does not close"):
                await generate(pool, [5, 100], 2)

        tasks.start_soon(ask)
        await anyio.sleep(1)
        with anyio.fail_after(10):
            await pool.update_weights(version=1, source=DiskWeights("any"))
