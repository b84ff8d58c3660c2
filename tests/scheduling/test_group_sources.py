"""Sources of groups: where they were left, when they begin again, what they leave and raise."""

from __future__ import annotations

import asyncio  # noqa: TID251  (its own cancellation)
import gc
import time  # noqa: TID251  (a data set that blocks)
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest

import rollout
from rollout import Group, GroupPolicy, Outcome, Prompt
from rollout.agents import AgentContext, AgentLoop
from rollout.config import AgentConfig, SchedulingConfig
from rollout.errors import PromptError, SourceEnded
from rollout.scheduling.scheduler import MAX_SOURCES
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio
SCENARIO = (
    Scenario(seed=1)
    .reply("slow", filler=4000)
    .reply("", filler=20)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


class Panic(BaseException):
    """As a loader in another language raises it."""


def user(uid: str, text: str = "go") -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], uid=uid)


def prompts(count: int, name: str = "p") -> list[Prompt]:
    return [user(f"{name}{at}") for at in range(count)]


def config(agent: str = "single_turn", **scheduling: Any) -> Any:
    return SCENARIO.config(
        agent=AgentConfig(name=agent),
        scheduling=SchedulingConfig(**{"samples_per_prompt": 1, **scheduling}),
    )


def uids(batch: Any) -> list[str]:
    return [t.uid for t in batch.trajectories]


class Numbered:
    """Has its prompts by number, as map-style datasets do, and is no `Sequence`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, at: int) -> Prompt:
        if at >= self._count:
            raise IndexError(at)
        return user(f"n{at}")


class Dataset(Numbered):
    """Only its length says where it ends."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> Prompt:
        return user(f"n{at}")


def listed(count: int) -> list[Prompt]:
    return prompts(count, "n")


@pytest.mark.parametrize("kind", [listed, Numbered, Dataset])
async def test_stream_groups_of_what_has_items_by_number_gives_all_of_it_in_every_epoch(
    kind: Callable[[int], Any],
) -> None:
    data = kind(3)
    async with rollout.open_rollout(config()) as runtime:
        for _ in range(2):
            async with runtime.stream_groups(data) as groups:
                assert sorted([group.uid async for group in groups]) == ["n0", "n1", "n2"]


@pytest.mark.parametrize("kind", [listed, Dataset])
async def test_collect_of_what_has_items_by_number_goes_on_and_begins_again(
    kind: Callable[[int], Any],
) -> None:
    data, policy = kind(3), GroupPolicy(oversample=1.0)
    async with rollout.open_rollout(config()) as runtime:
        assert uids(await runtime.collect(data, 2, policy=policy)) == ["n0", "n1"]
        assert uids(await runtime.collect(prompts(1), 1, policy=policy)) == ["p0"]
        with pytest.raises(SourceEnded) as caught:
            await runtime.collect(data, 2, policy=policy)
        assert uids(caught.value.partial) == ["n2"]
        assert uids(await runtime.collect(data, 2, policy=policy)) == ["n0", "n1"]


@pytest.mark.parametrize("source", [Numbered, {"a": 1}, "ab"])
async def test_source_that_nothing_can_iterate_over_is_refused(source: Any) -> None:
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(PromptError, match="expected an iterable or async iterable of Prompt"):
            await runtime.collect(source, 1)


class Rows:
    """A loader that iterates over a list of its own."""

    def __init__(self, rows: list[Prompt]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.rows)


async def test_loader_over_a_list_of_its_own_stays_where_it_was_left() -> None:
    train, evals = Rows(prompts(100, "t")), Rows(prompts(100, "e"))
    found: dict[str, list[str]] = {"t": [], "e": []}
    async with rollout.open_rollout(config()) as runtime:
        for _ in range(3):
            for source, policy in ((train, GroupPolicy()), (evals, GroupPolicy(oversample=1.0))):
                for uid in uids(await runtime.collect(source, 2, policy=policy)):
                    found[uid[0]].append(uid)
    assert found == {name: [f"{name}{at}" for at in range(6)] for name in "te"}


async def test_sources_of_many_calls_do_not_stay_with_the_runtime() -> None:
    class Watched(Prompt, weakref=True):
        """What is left in a source is seen by its prompts."""

    left = []
    async with rollout.open_rollout(config()) as runtime:
        for step in range(MAX_SOURCES + 5):
            data = [Watched(messages=p.messages, uid=p.uid) for p in prompts(5, f"{step}.")]
            left.append(weakref.ref(data[4]))
            await runtime.collect(iter(data), 2, step=step)
            del data
        gc.collect()
        assert [ref() is not None for ref in left[:5]] == [False] * 5


class Slowly(Sequence[Prompt]):
    """A data set whose length and items take long, as those of a remote one do."""

    def __len__(self) -> int:
        time.sleep(0.1)
        return 3

    def __getitem__(self, at: Any) -> Any:
        time.sleep(0.1)
        return user(f"p{at}")


def test_data_set_that_blocks_does_not_block_the_loop() -> None:
    async def act() -> None:
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while True:
                before = anyio.current_time()
                await anyio.sleep(0.001)
                longest = max(longest, anyio.current_time() - before)

        fast = Scenario(seed=1).reply("", filler=5).timing(base_s=0.001, slope_s=0.0)
        opened = fast.config(agent=AgentConfig(name="single_turn"))
        async with rollout.open_rollout(opened) as runtime, anyio.create_task_group() as tasks:
            await runtime.collect(prompts(1), 1)  # what the first call imports
            tasks.start_soon(tick)
            found = uids(await runtime.collect(Slowly(), 3, policy=GroupPolicy(oversample=1.0)))
            tasks.cancel_scope.cancel()
        assert sorted({*found}) == ["p0", "p1", "p2"]
        assert longest < 0.09

    anyio.run(act, backend="asyncio")


class Fresh:
    """A loader of one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __iter__(self) -> Iterator[Prompt]:
        for at in range(6):
            yield user(f"{self._step}.{at}", "go" if at else "slow")


async def test_what_a_loader_of_one_call_has_left_comes_first_in_the_next() -> None:
    policy, taken = GroupPolicy(surplus="carry", oversample=1.5), []
    async with rollout.open_rollout(config()) as runtime:
        for step in range(3):
            taken.append(uids(await runtime.collect(Fresh(step), 2, policy=policy, step=step)))
            assert runtime.statistics().carried == 1
    assert taken == [["0.1", "0.2"], ["0.0", "1.1"], ["1.0", "2.1"]]


@pytest.fixture
def flaky() -> None:
    tries: dict[str, int] = {}

    @rollout.register_agent("flaky_sources")
    class _Flaky(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            uid = str(context.prompt.uid)
            tries[uid] = tries.get(uid, 0) + 1
            await context.generate()
            if tries[uid] == 1:
                raise RuntimeError("the first time")


@pytest.mark.usefixtures("flaky")
async def test_failed_members_are_restarted_though_the_source_has_ended() -> None:
    policy = GroupPolicy(refill_failed=True)
    async with rollout.open_rollout(config("flaky_sources")) as runtime:
        batch = await runtime.collect(prompts(4), 4, policy=policy)
        async with runtime.stream_groups(prompts(3, "s"), policy=policy) as groups:
            ended = [group.trajectories[0].outcome async for group in groups]
    assert [t.outcome for t in batch.trajectories] == [Outcome.COMPLETED] * 4
    assert batch.metrics["groups/refilled"] == 4
    assert ended == [Outcome.COMPLETED] * 3


def test_collect_cancelled_after_it_has_its_groups_leaves_them_to_the_next_call() -> None:
    """By asyncio itself, as `asyncio.timeout` does it: no shield of a scope keeps that off."""

    async def main() -> None:
        may_end, taken = anyio.Event(), anyio.Event()

        @rollout.register_agent("slow_sources")
        class _Slow(AgentLoop):
            async def run(self, context: AgentContext) -> None:
                try:
                    if context.prompt.uid == "slow" and not may_end.is_set():
                        await anyio.sleep_forever()
                    await context.generate()
                finally:
                    with anyio.CancelScope(shield=True):
                        if context.prompt.uid == "slow":
                            await may_end.wait()

        accepted: list[str] = []

        def accept(group: Group) -> bool:
            accepted.append(group.uid)
            if len(accepted) == 2:
                taken.set()
            return True

        data = iter([user("slow"), *prompts(5)])
        fast = Scenario(seed=1).reply("", filler=5).timing(base_s=0.001, slope_s=0.0)
        own = fast.config(agent=AgentConfig(name="slow_sources"))
        async with rollout.open_rollout(own) as runtime:
            policy = GroupPolicy(oversample=1.5, accept=accept)
            call = asyncio.create_task(runtime.collect(data, 2, policy=policy))
            await taken.wait()
            await anyio.wait_all_tasks_blocked()  # it waits for the clean-up of the third
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            may_end.set()
            await anyio.wait_all_tasks_blocked()
            assert runtime.statistics().running == 0
            assert uids(await runtime.collect(data, 4)) == ["slow", "p0", "p1", "p2"]

    anyio.run(main, backend="asyncio")


@pytest.mark.parametrize(("where", "error"), [("source", SystemExit), ("accept", Panic)])
async def test_what_is_no_exception_ends_the_call_that_met_it_alone(
    where: str, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> bool:
        raise error("broken")

    def broken() -> Iterator[Prompt]:
        yield user("p0")
        fail()

    policy = GroupPolicy(accept=fail) if where == "accept" else GroupPolicy()
    source = broken() if where == "source" else prompts(3)
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(error, match="broken"):
            await runtime.collect(source, 2, policy=policy)
        assert uids(await runtime.generate([user("z")])) == ["z"]


class Faulty(Dataset):
    """Raises once, at the third of six."""

    def __init__(self) -> None:
        super().__init__(6)
        self._has_raised = False

    def __getitem__(self, at: int) -> Prompt:
        if at == 2 and not self._has_raised:
            self._has_raised = True
            raise OSError("not now")
        return super().__getitem__(at)


async def test_source_that_raises_once_goes_on_in_the_next_call() -> None:
    data, policy = Faulty(), GroupPolicy(oversample=1.0)
    async with rollout.open_rollout(config()) as runtime:
        assert uids(await runtime.collect(data, 2, policy=policy)) == ["n0", "n1"]
        with pytest.raises(OSError, match="not now"):
            await runtime.collect(data, 2, policy=policy)
        assert uids(await runtime.collect(data, 4, policy=policy)) == ["n2", "n3", "n4", "n5"]


async def test_dataset_without_items_ends_at_once() -> None:
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(SourceEnded):
            await runtime.collect(Dataset(0), 1)


def of_step(step: int, texts: str) -> list[Prompt]:
    """Prompts of one step; an "s" is a slow one."""
    said = {"s": "slow", "g": "go"}
    return [user(f"{step}.{at}", said[each]) for at, each in enumerate(texts)]


async def test_list_of_each_step_that_was_pulled_to_its_end_carries_into_the_next_call() -> None:
    policy = GroupPolicy(surplus="carry", oversample=1.5)
    # Six in the first step; then as many as a call starts beside the two that were carried.
    given = [of_step(*each) for each in enumerate(["sggsgg", "gggg", "ggss"])]
    taken = []
    async with rollout.open_rollout(config()) as runtime:
        for step, rows in enumerate(given):
            batch = await runtime.collect(rows, 4, policy=policy, step=step)
            taken.append(uids(batch))
            assert runtime.statistics().carried == 2
        rest = await runtime.collect([], 2, step=3)
        statistics = runtime.statistics()
    assert taken == [
        ["0.1", "0.2", "0.4", "0.5"],
        ["1.0", "1.1", "1.2", "1.3"],
        ["0.0", "0.3", "2.0", "2.1"],
    ]
    assert uids(rest) == ["2.2", "2.3"]
    assert statistics.outcomes == {"completed": 14}
    assert statistics.admitted == 14


async def test_prompts_of_a_list_that_has_ended_are_of_the_call_that_has_it() -> None:
    endless = (user(f"q{at}") for at in range(1_000_000))
    async with (
        rollout.open_rollout(config(max_in_flight=2)) as runtime,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(runtime.collect, endless, 6)
        for step in range(4):
            batch = await runtime.collect(of_step(step, "ggg"), 3)
            assert uids(batch) == [f"{step}.{at}" for at in range(3)]
