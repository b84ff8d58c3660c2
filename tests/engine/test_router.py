"""Placement decisions: what a request costs where, who may get it, and what is counted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools import generate, make_pool
from rollout.config.checks import STRATEGIES as CONFIG_STRATEGIES
from rollout.engine import EngineLoad, Router
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import STRATEGIES, Dispatch
from rollout.engine.routing import router as routing
from rollout.engine.routing.router import PREFILL_WEIGHT
from rollout.errors import ConfigError
from rollout.testing import run_virtual

#: Seconds for a token in a large batch, before any replica has reported.
TOKEN_S = 1e-4
#: What a request of 256 expected tokens adds to a load.
REQUEST_S = 256 * TOKEN_S


def router_of(*names: str, capacity: int = 1000, **options: Any) -> Router:
    router = Router(**options)
    for name in names:
        router.add(name, capacity)
    return router


def send(router: Router, session: str, **options: Any) -> Dispatch:
    dispatch = router.assign(session, **options)
    assert dispatch is not None
    return dispatch


def place(router: Router, session: str, **options: Any) -> str:
    return send(router, session, **options).replica.name


def in_flight(router: Router) -> dict[str, int]:
    return {r.name: r.in_flight for r in router.statistics().replicas}


def crowd(router: Router, name: str, count: int) -> None:
    """Put requests on one replica only."""
    others = [r.name for r in router.replicas if r.name != name]
    for other in others:
        router.drain(other)
    for number in range(count):
        send(router, f"crowd {name} {number}")
    for other in others:
        router.resume(other)


# Trajectories stay, and move past a margin.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_assign_later_turns_stay_with_every_strategy(strategy: str) -> None:
    router = router_of("a", "b", "c", strategy=strategy)
    for number in range(30):
        first = send(router, f"s{number}", prompt_tokens=100)
        router.release(first, generated=50)
        later = send(router, f"s{number}", prompt_tokens=180)
        assert later.replica is first.replica
    assert router.statistics().moves == 0


@pytest.mark.parametrize(("busier", "moves"), [(25, False), (26, True)])
def test_assign_pinned_moves_past_the_margin_and_what_its_prefix_costs(
    busier: int, moves: bool
) -> None:
    router = router_of("home", "other", move_margin_s=0.5)
    router.drain("other")
    router.release(send(router, "s", prompt_tokens=744), generated=256)
    router.resume("other")
    crowd(router, "home", busier)
    # A thousand tokens of prefix would have to be computed again.
    threshold_s = 0.5 + PREFILL_WEIGHT * 1000 * TOKEN_S
    assert (busier * REQUEST_S > threshold_s) is moves
    dispatch = send(router, "s", prompt_tokens=1100)
    assert dispatch.replica.name == ("other" if moves else "home")
    assert dispatch.fresh_tokens == (1100 if moves else 100)
    assert router.statistics().moves == moves


@pytest.mark.parametrize(("busier", "moves"), [(3, False), (4, True)])
def test_least_requests_pinned_moves_past_its_margin(busier: int, moves: bool) -> None:
    router = router_of("home", "other", strategy="least_requests", move_margin=3)
    router.drain("other")
    router.release(send(router, "s"))
    router.resume("other")
    crowd(router, "home", busier)
    assert place(router, "s") == ("other" if moves else "home")


def test_assign_its_replica_refused_or_is_full_the_trajectory_is_placed_anew() -> None:
    for strategy in STRATEGIES:
        router = router_of("a", "b", capacity=1, strategy=strategy)
        first = send(router, "s")
        assert place(router, "s") != first.replica.name
        router = router_of("a", "b", strategy=strategy)
        home = place(router, "s")
        assert place(router, "s", avoid=home) != home
        router.drain("a" if home == "b" else "b")
        assert router.assign("s", avoid=home) is None


def test_forget_a_trajectory_it_is_new_again() -> None:
    router = router_of("a", "b")
    router.release(send(router, "s", prompt_tokens=100), generated=10)
    router.forget("s")
    router.forget("never seen")
    assert send(router, "s", prompt_tokens=100).fresh_tokens == 100
    assert router.statistics().sessions == 1


def test_assign_the_oldest_trajectories_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SESSIONS", 3)
    router = router_of("a")
    for number in range(10):
        send(router, f"s{number}", group_id="g", prompt_tokens=5)
    assert (router.statistics().sessions, router.statistics().groups) == (3, 1)


# Load in expected tokens.


def test_assign_new_ones_go_where_the_tokens_in_flight_take_least_time() -> None:
    router = router_of("a", "b")
    send(router, "long", max_new_tokens=200)
    send(router, "short", max_new_tokens=20)
    # b has 20 expected tokens, then 20 more each: nine short ones until it has 200 as well.
    names = [place(router, f"s{n}", max_new_tokens=20) for n in range(10)]
    assert names == ["b"] * 9 + ["a"]


def test_expected_tokens_are_the_mean_of_those_generated_and_bounded_by_the_request() -> None:
    router = router_of("a")
    for number in range(2000):
        router.release(send(router, f"s{number}"), generated=40)
    assert router.statistics().mean_new_tokens == pytest.approx(40, abs=1)
    assert send(router, "s").new_tokens == 40
    assert send(router, "s", max_new_tokens=7).new_tokens == 7
    router.release(send(router, "s"), generated=None)  # cut short: nothing is learned
    assert send(router, "s").new_tokens == 40


def test_report_between_two_of_them_own_dispatches_spread_over_the_least_loaded() -> None:
    router = router_of("a", "b", "c")
    crowd(router, "c", 40)
    for name, running in (("a", 0), ("b", 0), ("c", 40)):
        router.report(name, EngineLoad(running=running), now=1.0)
    for number in range(60):  # all before the next report: no herd on the one that looked idle
        send(router, f"s{number}")
    assert in_flight(router) == {"a": 30, "b": 30, "c": 40}


def feed_reports(router: Router, rates: dict[str, float], seconds: int, batch: int = 50) -> None:
    """Let replicas report that they generate at these rates, in tokens a second."""
    for now in range(1, seconds + 1):
        for name, rate in rates.items():
            load = EngineLoad(running=batch, generated_tokens=round(rate * now))
            router.report(name, load, now=float(now))


def test_report_measures_who_is_slow_and_new_ones_go_elsewhere() -> None:
    router = router_of("slow", "fast", "usual")
    for number in range(3):  # nobody is idle
        send(router, f"busy {number}")
    feed_reports(router, {"slow": 1500, "fast": 3000, "usual": 3000}, seconds=60)
    slow, fast, usual = router.statistics().replicas
    assert usual.speed / slow.speed == pytest.approx(2, rel=0.1)
    assert (slow.tokens_per_s, fast.tokens_per_s) == (1500, 3000)
    for number in range(300):
        send(router, f"s{number}")
    counts = in_flight(router)
    assert abs(counts["fast"] - counts["usual"]) <= 1
    assert counts["slow"] < 0.55 * counts["fast"]


def speed_after(reports: list[tuple[float, EngineLoad]]) -> float:
    """Of the first of three replicas, of which the others make 3000 tokens a second."""
    router = router_of("a", "b", "c")
    for number in range(3):
        send(router, f"busy {number}")
    feed_reports(router, {"b": 3000, "c": 3000}, seconds=10)
    for now, load in reports:
        router.report("a", load, now=now)
    router.report("b", EngineLoad(running=50, generated_tokens=39_000), now=13.0)
    return router.statistics().replicas[0].speed


def test_report_that_waited_to_be_read_says_nothing_of_the_engine() -> None:
    # Our loop stood still for a while; the engine took the second a second after the first.
    first = EngineLoad(running=50, generated_tokens=1000, measured_at_s=100.0)
    second = EngineLoad(running=50, generated_tokens=4000, measured_at_s=101.0)
    assert speed_after([(11.0, first), (12.9, second)]) == 1.0


@pytest.mark.parametrize(("tokens", "now"), [(100, 11.5), (900, 10.6), (1000, 12.5)])
def test_report_of_an_idle_or_restarted_replica_is_no_measurement(tokens: int, now: float) -> None:
    running = 0 if tokens == 1000 else 50
    first = EngineLoad(running=50, generated_tokens=1000 if tokens != 900 else 800)
    second = EngineLoad(running=running, generated_tokens=tokens)
    assert speed_after([(10.5, first), (now, second)]) == 1.0


# The prompt of a group.


def test_assign_a_group_gathers_where_its_prompt_is_until_that_is_too_busy() -> None:
    router = router_of("a", "b")
    first = send(router, "m0", group_id="g", prompt_tokens=4000)
    home = first.replica.name
    router.release(first, generated=256)
    saved_s = PREFILL_WEIGHT * 4000 * TOKEN_S
    stay = 1 + int(saved_s / REQUEST_S)
    group: dict[str, Any] = {"group_id": "g", "prompt_tokens": 4000}
    members = [send(router, f"m{n}", **group) for n in range(1, stay + 2)]
    assert [m.replica.name == home for m in members] == [True] * stay + [False]
    assert [m.fresh_tokens for m in members] == [0] * stay + [4000]
    # Now both hold it.
    assert send(router, "last", group_id="g", prompt_tokens=4000).fresh_tokens == 0


def test_assign_other_groups_are_not_drawn_there() -> None:
    router = router_of("a", "b")
    home = place(router, "m0", group_id="g", prompt_tokens=4000)
    assert place(router, "other", group_id="h", prompt_tokens=4000) != home
    assert router.statistics().groups == 2
    router.forget("m0")
    assert router.statistics().groups == 1
    assert send(router, "m1", group_id="g", prompt_tokens=4000).fresh_tokens == 4000


def test_assign_branch_of_a_trajectory_in_no_group_goes_where_its_trunk_is() -> None:
    router = router_of("a", "b")
    trunk = send(router, "m0", prompt_tokens=4000)
    home = trunk.replica.name
    router.release(trunk, generated=256)
    branches: dict[str, Any] = {"group_id": "m0", "prompt_tokens": 4100}
    sent = [send(router, f"m0#{number}", **branches) for number in range(2)]
    assert [(each.replica.name, each.fresh_tokens) for each in sent] == [(home, 0)] * 2
    router.drain(home)
    assert send(router, "m0#2", **branches).fresh_tokens == 4100
    router.remove(home)
    assert send(router, "x#0", group_id="x", prompt_tokens=10).fresh_tokens == 10  # no such trunk


# Ties and weights.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ties_are_fair_on_a_busy_set(strategy: str) -> None:
    router = router_of(*"abcd", strategy=strategy)
    for round_number in range(1, 6):
        for number in range(4):
            send(router, f"s{round_number}.{number}")
        assert set(in_flight(router).values()) == {round_number}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("weights", "off_by"), [((1, 1, 1, 1), 0), ((1, 3, 2), 1)])
def test_ties_are_shared_by_weight_on_an_idle_set(
    weights: tuple[int, ...], off_by: int, strategy: str
) -> None:
    router = Router(strategy=strategy)
    for number, weight in enumerate(weights):
        router.add(f"r{number}", 100, weight=weight)
    for number in range(100 * sum(weights)):
        router.release(send(router, f"s{number}", prompt_tokens=10), generated=5)
    served = [r.served for r in router.statistics().replicas]
    assert served == pytest.approx([100 * weight for weight in weights], abs=off_by)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ties_a_new_replica_is_not_flooded_by_those_before_it(strategy: str) -> None:
    router = router_of("a", "b", strategy=strategy)
    for number in range(1000):
        router.release(send(router, f"s{number}"), generated=100)
    router.add("new", 1000)
    for number in range(30):
        router.release(send(router, f"t{number}"), generated=100)
    assert router.statistics().replicas[2].served == 10


# Who may get something.


def test_assign_nobody_has_room_returns_none_until_one_is_released() -> None:
    router = router_of("a", capacity=2)
    held = [send(router, "s"), send(router, "t")]
    assert not router.has_room
    assert router.assign("u") is None
    assert router.statistics().refusals == 1
    router.release(held[0])
    assert router.has_room
    assert place(router, "u") == "a"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drain_gives_nothing_new_and_keeps_what_is_in_flight(strategy: str) -> None:
    router = router_of("a", "b", strategy=strategy)
    held = [send(router, f"s{n}") for n in range(20)]
    on_a = in_flight(router)["a"]
    assert 0 < on_a < 20
    router.drain("a")
    assert {place(router, f"s{n}") for n in range(20)} == {"b"}
    assert in_flight(router) == {"a": on_a, "b": 40 - on_a}
    assert router.statistics().replicas[0].state == "draining"
    for dispatch in held:
        router.release(dispatch)
    assert in_flight(router) == {"a": 0, "b": 20}
    router.resume("a")
    assert "a" in {place(router, f"new{n}") for n in range(20)}


def test_remove_and_add_again_keeps_the_counts_and_forgets_the_cache() -> None:
    router = router_of("a", "b")
    held = [send(router, f"s{n}", group_id="g", prompt_tokens=500) for n in range(40)]
    before = in_flight(router)
    router.remove("a")
    assert [r.name for r in router.replicas] == ["b"]
    assert in_flight(router) == before
    assert router.statistics().replicas[0].state == "gone"
    router.release(next(d for d in held if d.replica.name == "a"))
    router.add("a", 1000)
    assert in_flight(router) == {**before, "a": before["a"] - 1}
    assert router.statistics().replicas[0].served == before["a"]
    back = next(d.session_id for d in held if d.replica.name == "a")
    again = send(router, back, group_id="g", prompt_tokens=500, avoid="b")
    assert (again.replica.name, again.fresh_tokens) == ("a", 500)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stale_weights_get_nothing(strategy: str) -> None:
    router = Router(strategy=strategy)
    router.add("old", 100, weight_version=7)
    router.add("new", 100, weight_version=8)
    assert {place(router, f"s{n}") for n in range(20)} == {"old", "new"}
    router.require_weights(8)
    assert {place(router, f"s{n}") for n in range(20)} == {"new"}
    assert router.statistics().replicas[0].state == "stale"
    router.require_weights(9)
    assert router.assign("s") is None
    assert not router.has_room
    router.set_weights("old", 9)
    assert {place(router, f"s{n}") for n in range(20)} == {"old"}
    router.require_weights(None)
    assert {place(router, f"t{n}") for n in range(20)} == {"old", "new"}


def test_set_weights_the_cache_of_the_old_ones_counts_no_more() -> None:
    router = router_of("a")
    router.release(send(router, "s", group_id="g", prompt_tokens=100), generated=10)
    router.set_weights("a", 0)  # what it has already
    assert send(router, "s", group_id="g", prompt_tokens=120).fresh_tokens == 10
    router.set_weights("a", 1)
    assert send(router, "s", group_id="g", prompt_tokens=130).fresh_tokens == 130
    assert send(router, "t", group_id="g", prompt_tokens=100).fresh_tokens == 0


def test_strategies_of_the_configuration_are_those_of_the_router() -> None:
    assert CONFIG_STRATEGIES == STRATEGIES
    for name in STRATEGIES:
        Router(strategy=name)
    with pytest.raises(
        ConfigError, match=r"^router\.strategy = 'consistent_hash': expected one of"
    ):
        Router(strategy="consistent_hash")


# What it says of itself.


NAMES = "abcd"
actions = st.one_of(
    st.tuples(st.just("assign"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 99)),
    st.tuples(st.just("forget"), st.integers(0, 9)),
    st.tuples(st.just("weights"), st.integers(0, 2)),
    st.tuples(
        st.sampled_from(["add", "remove", "drain", "resume", "report", "set"]),
        st.sampled_from(NAMES),
    ),
)


@given(strategy=st.sampled_from(STRATEGIES), steps=st.lists(actions, min_size=1, max_size=80))
def test_counts_equal_assigns_less_releases_whatever_happens(
    strategy: str, steps: list[tuple[str, Any]]
) -> None:
    router = router_of(*NAMES, capacity=3, strategy=strategy)
    held: list[Dispatch] = []
    offered, required = set(NAMES), None
    for clock, (action, value) in enumerate(steps):
        now = 0.3 * clock
        match action:
            case "assign":
                group = f"g{value % 3}"
                dispatch = router.assign(f"s{value}", group_id=group, prompt_tokens=50)
                usable = [r for r in router.replicas if r.state in ("serving", "full")]
                if dispatch is None:
                    assert not any(r.state == "serving" for r in usable)
                else:
                    held.append(dispatch)
                    assert dispatch.replica.name in {r.name for r in usable}
                    assert dispatch.replica.name in offered
                    assert required in (None, dispatch.replica.weight_version)
            case "release" if held:
                router.release(held.pop(value % len(held)), generated=value)
            case "forget":
                router.forget(f"s{value}")
            case "weights":
                required = value or None
                router.require_weights(required)
            case "add" if value not in offered:
                router.add(value, 3, weight_version=1)
                offered.add(value)
            case "remove" if value in offered:
                router.remove(value)
                offered.discard(value)
            case "drain" if value in offered:
                router.drain(value)
            case "resume" if value in offered:
                router.resume(value)
            case "report":
                load = EngineLoad(running=2, queued=clock % 2, kv_used=0.5, generated_tokens=clock)
                router.report(value, load, now=now)
            case "set" if value in offered:
                router.set_weights(value, clock % 3)
        expected = Counter(dispatch.replica.name for dispatch in held)
        counted = {name: count for name, count in in_flight(router).items() if count}
        assert counted == dict(expected)
        assert router.statistics().in_flight == len(held)
        assert all(0 <= replica.load_s < math.inf for replica in router.statistics().replicas)
        for replica in router.replicas:
            mine = [dispatch.load for dispatch in held if dispatch.replica is replica]
            assert replica.tokens == pytest.approx(sum(mine))
        assert router.has_room is any(r.state == "serving" for r in router.replicas)
    for dispatch in held:
        router.release(dispatch)
    for name in NAMES:
        router.report(name, EngineLoad(), now=2e6)
    assert {(r.in_flight, r.load_s) for r in router.statistics().replicas} <= {(0, 0.0)}


# In the pool.


def simulated_pool(slownesses: tuple[float, ...], **options: Any) -> EnginePool:
    timings = [{"base_s": 0.01 * s, "slope_s": 1e-4 * s} for s in slownesses]
    cores = [{"timing": each} for each in timings]
    return make_pool("rollout.testing:SimulatedCore", *cores, **options)


async def ask(pool: EnginePool, session: str, prompt: list[int], count: int) -> Generation:
    return await generate(pool, prompt, count, session=session, group_id="g", ignore_eos=True)


def test_pool_tells_the_router_what_engines_report_and_requests_need() -> None:
    async def main() -> tuple[Any, Any, set[str]]:
        async with simulated_pool((2.0, 1.0, 1.0)).serving() as pool:
            prompt = [97] * 400

            async def converse(number: int) -> None:
                for _ in range(2):
                    await ask(pool, f"s{number}", prompt, 800)

            async with anyio.create_task_group() as tasks:
                for number in range(30):
                    tasks.start_soon(converse, number)
                await anyio.sleep(9)
                busy = pool.router.statistics()
            pool.drain("engine-1")
            late = {(await ask(pool, f"t{n}", prompt, 5)).replica for n in range(5)}
            pool.resume("engine-1")
            return busy, pool.router.statistics(), late

    busy, idle, late = run_virtual(main)
    assert busy.in_flight == 30
    assert (busy.sessions, busy.groups) == (30, 1)
    slow, *usual = sorted(busy.replicas, key=lambda replica: replica.name)
    assert slow.speed < 0.77 * min(replica.speed for replica in usual)
    assert slow.tokens_per_s < min(replica.tokens_per_s for replica in usual)
    assert (idle.in_flight, idle.decisions) == (0, 65)
    assert idle.mean_new_tokens > 600
    assert idle.moves > 0  # away from the slow one
    assert "engine-1" not in late


def test_pool_gives_each_replica_its_weight() -> None:
    async def main() -> dict[str, float]:
        async with simulated_pool((1.0, 1.0), load_shares=(1.0, 2.5)).serving() as pool:
            return {replica.name: replica.weight for replica in pool.router.replicas}

    assert run_virtual(main) == {"engine-0": 1.0, "engine-1": 2.5}
