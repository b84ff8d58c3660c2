"""Agents are cancelled as if all of their code stood in one scope, whatever they are within."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout
from rollout import AgentLoop, Outcome, Prompt, RolloutBatch
from rollout.agents import AgentContext, register_agent
from rollout.config import LimitsConfig
from rollout.expiries import Expiries, Expiring
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

BACKENDS = pytest.mark.parametrize("anyio_backend", ["asyncio"])
LIMITS = LimitsConfig(generation_s=5, tool_s=5, turn_s=5, trajectory_s=20, batch_s=50, cleanup_s=4)
OK = Scenario(seed=1).reply("", "ok")
#: What happened to each agent, and when since its start.
told: dict[str, list[tuple[str, float]]] = {}
waiting: set[str] = set()
Wait = Callable[[Callable[[str], None]], Awaitable[None]]


async def plainly(tell: Callable[[str], None]) -> None:
    await anyio.sleep(100)


async def in_scopes(tell: Callable[[str], None]) -> None:
    with anyio.move_on_after(90) as outer, anyio.move_on_after(80):
        await anyio.sleep(100)
    tell(f"left {outer.cancelled_caught}")


async def in_group(tell: Callable[[str], None]) -> None:
    async def child() -> None:
        try:
            await anyio.sleep(100)
        finally:
            tell("child")

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope():
            tasks.start_soon(child)
            await anyio.sleep(100)


async def past_its_own_time(tell: Callable[[str], None]) -> None:
    with anyio.move_on_after(1):
        await anyio.sleep(100)
    tell("own")
    with anyio.move_on_after(90):
        await anyio.sleep(100)


async def in_shield(tell: Callable[[str], None]) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(12)
        tell("shielded")
    await anyio.sleep(100)


async def cleaning_up(tell: Callable[[str], None]) -> None:
    try:
        await anyio.sleep(100)
    finally:
        tell("cancelled")
        with anyio.move_on_after(1, shield=True):
            await anyio.sleep(100)
        tell("clean")
        await anyio.sleep(100)  # is cancelled too


async def refused_once(tell: Callable[[str], None]) -> None:
    for _ in range(2):
        try:
            await anyio.sleep(100)
        except anyio.get_cancelled_exc_class():
            tell("again")
    await anyio.sleep(100)


WAITS: dict[str, Wait] = {each.__name__: each for each in (
    plainly, in_scopes, in_group, past_its_own_time, in_shield, cleaning_up, refused_once,
)}  # fmt: skip


@register_agent("late_scopes_waiting")
class Waiting(AgentLoop):
    """Speaks, and waits as its prompt says."""

    async def run(self, context: AgentContext) -> None:
        start, name = anyio.current_time(), str(context.prompt.uid)
        told[name] = []

        def tell(what: str) -> None:
            told[name].append((what, round(anyio.current_time() - start, 1)))

        await context.generate()
        waiting.add(name)
        await WAITS[name](tell)


#: What each has told when it is cancelled after 10 s, and that its code had ended then.
EXPECTED: dict[str, list[tuple[str, float]]] = {
    "plainly": [],
    "in_scopes": [],
    "in_group": [("child", 10.0)],
    "past_its_own_time": [("own", 1.0)],
    "in_shield": [("shielded", 12.0)],
    "cleaning_up": [("cancelled", 10.0), ("clean", 11.0)],
    "refused_once": [("again", 10.0), ("again", 10.0)],
}


async def cancelled_after(seconds: float, names: list[str], limits: LimitsConfig) -> RolloutBatch:
    config = OK.timing(base_s=0.001).config(limits=limits)
    prompts = [
        Prompt(
            messages=[{"role": "user", "content": "x"}], uid=name, agent_name="late_scopes_waiting"
        )
        for name in names
    ]
    waiting.clear()
    async with rollout.open_rollout(config) as runtime, anyio.create_task_group() as tasks:

        async def cancel() -> None:
            await anyio.sleep(seconds)
            while not waiting.issuperset(names):  # in real time
                await anyio.sleep(0.01)
            runtime.cancel(reason="enough")

        tasks.start_soon(cancel)
        batch = await runtime.generate(prompts)
        tasks.cancel_scope.cancel()
    return batch


@pytest.fixture(name="early", params=[False, True])
def _early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scopes from the start too, as with a trio whose inside is not known."""
    if request.param:
        monkeypatch.setattr("rollout.supervision.can_enclose", lambda: False)


@pytest.mark.usefixtures("early")
async def test_cancelled_agent_ends_as_in_one_scope_whatever_it_is_within() -> None:
    batch = await cancelled_after(10, list(WAITS), LIMITS)
    outcomes = {(each.outcome, each.reason) for each in batch.trajectories}
    assert outcomes == {(Outcome.CANCELLED, "enough")}
    assert all(len(each.transcript) > 5 for each in batch.trajectories)
    assert told == EXPECTED


@pytest.mark.usefixtures("early")
async def test_agent_past_its_deadline_ends_as_in_one_scope_whatever_it_is_within() -> None:
    limits = LimitsConfig(
        generation_s=5, tool_s=5, turn_s=5, trajectory_s=10, batch_s=50, cleanup_s=4
    )
    batch = await cancelled_after(40, list(WAITS), limits)
    ends = {(each.outcome, each.limit_source) for each in batch.trajectories}
    assert ends == {(Outcome.DEADLINE, "limits.trajectory_s")}
    assert told == EXPECTED


@BACKENDS
async def test_cancelled_agent_on_asyncio_ends_the_same(anyio_backend: str) -> None:
    names = ["plainly", "in_scopes", "in_group"]
    batch = await cancelled_after(0.3, names, LIMITS)
    assert {each.outcome for each in batch.trajectories} == {Outcome.CANCELLED}
    assert [what for what, _ in told["in_group"]] == ["child"]


@register_agent("late_scopes_suicide")
class CancelsItself(AgentLoop):
    """Has the runtime cancel it, in a scope of its own."""

    runtime: rollout.RolloutRuntime

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        with anyio.move_on_after(5):
            self.runtime.cancel(context.identity.uid, reason="itself")
            told["itself"] = [("after", 0.0)]
            await anyio.lowlevel.checkpoint()
            told["itself"] += [("past", 0.0)]


async def test_agent_that_has_itself_cancelled_ends_at_its_next_wait() -> None:
    async with rollout.open_rollout(OK.config()) as runtime:
        CancelsItself.runtime = runtime
        prompt = Prompt(
            messages=[{"role": "user", "content": "x"}], agent_name="late_scopes_suicide"
        )
        batch = await runtime.generate([prompt])
    assert [(each.outcome, each.reason) for each in batch.trajectories] == [
        (Outcome.CANCELLED, "itself")
    ]
    assert told["itself"] == [("after", 0.0)]


class Piece(Expiring):
    """Notes when it is looked at."""

    def __init__(self, seen: list[tuple[float, int]], number: int, again: float = math.inf) -> None:
        super().__init__()
        self.seen, self.number, self.again = seen, number, again
        self.has_ended = False
        self.expiries: Expiries

    @property
    def is_over(self) -> bool:
        return self.has_ended

    def expire(self, now: float) -> None:
        self.seen.append((now, self.number))
        if self.again < math.inf:
            at, self.again = self.again, math.inf
            self.expiries.expect(self, at)


async def test_expiries_look_at_each_piece_at_its_time_also_one_that_was_put_earlier() -> None:
    seen: list[tuple[float, int]] = []
    start = anyio.current_time()
    expiries = Expiries(anyio.current_time)
    pieces = [Piece(seen, number) for number in range(5)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expiries.run)
        await anyio.lowlevel.checkpoint()

        def expect(number: int, at: float) -> None:
            pieces[number].expiries = expiries
            expiries.expect(pieces[number], start + at)

        for number, at in enumerate((9.0, 3.0, 6.0, 7.0, math.inf)):
            expect(number, at)
        pieces[1].again = start + 8.0  # its deadline was put off
        await anyio.sleep(4)
        expect(0, 5.0)  # earlier than it was
        expect(2, 20.0)  # later: it is looked at as before, and says when to look again
        pieces[3].has_ended = True
        expiries.note_end()
        await anyio.sleep(20)
        tasks.cancel_scope.cancel()
    assert [(at - start, number) for at, number in seen] == [(3, 1), (5, 0), (6, 2), (8, 1)]


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=300))
def test_expiries_hold_no_more_ended_pieces_than_running_ones(
    pieces: list[tuple[int, bool]],
) -> None:
    expiries, running = Expiries(lambda: 0.0), 0
    for at, ends in pieces * 2:
        piece = Piece([], at)
        expiries.expect(piece, float(at))
        piece.has_ended = ends
        running += not ends
        if ends:
            expiries.note_end()
        assert len(expiries._heap) <= 2 * (running + 65) + 2
    first = min((each.expires_at for each in expiries._heap), default=math.inf)
    assert expiries._first() == first
