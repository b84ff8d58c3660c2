"""The pytest plugin: ``pytest_plugins = ["rollout.testing.plugin"]`` in the top conftest.py.

Tests marked ``anyio`` run on trio in virtual time, in an order that their schedule seed
determines, below a ceiling, and may leave nothing behind. `docs/testing.md` is the guide.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import trio.lowlevel
import trio.testing

from rollout.engine.cores.simulated.stable import stable_key
from rollout.testing.ceiling import CEILING_S, run_below_ceiling
from rollout.testing.clock import VirtualClock, virtual_threads
from rollout.testing.leaks import KINDS, Belongings, leftovers
from rollout.testing.schedule import reseed, schedule_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping

_MARKER = (
    "rollout(schedule_seed=None, ceiling_s=100000, allow_leaks=(), hold_threads=True): "
    "how rollout.testing runs a test: its schedule seed (None: made from its name); the virtual "
    "seconds after which it is taken for hanging; what it may leave behind ('threads', "
    "'processes', 'files', 'tasks'); whether virtual time stands still while threads work"
)
#: Turns of the loop that tasks which are ending get to do so.
_SETTLE_TURNS = 10


class _Settings:
    """What the marker ``rollout`` and the command line say about one test."""

    def __init__(self, node: pytest.Item) -> None:
        marker = node.get_closest_marker("rollout")
        options: Mapping[str, Any] = {} if marker is None else marker.kwargs
        self._refuse_unknown(node, marker, options)
        seed = options.get("schedule_seed")
        if seed is None:
            seed = node.config.getoption("rollout_schedule_seed", default=None)
        if seed is None:
            seed = int.from_bytes(stable_key(_find_name(node))[:4], "little")
        self.schedule_seed: int = seed
        self.ceiling_s: float = options.get("ceiling_s", CEILING_S)
        self.allow_leaks: Collection[str] = options.get("allow_leaks", ())
        self.hold_threads: bool = options.get("hold_threads", True)

    @staticmethod
    def _refuse_unknown(
        node: pytest.Item, marker: pytest.Mark | None, options: Mapping[str, Any]
    ) -> None:
        known = ("schedule_seed", "ceiling_s", "allow_leaks", "hold_threads")
        unknown = [*(marker.args if marker else ()), *(options.keys() - set(known))]
        if unknown:
            raise pytest.UsageError(
                f"{node.nodeid}: marker rollout: unknown {unknown[0]!r}; known: {', '.join(known)}"
            )
        kinds = [kind for kind in options.get("allow_leaks", ()) if kind not in KINDS]
        if kinds:
            raise pytest.UsageError(
                f"{node.nodeid}: marker rollout: allow_leaks has {kinds[0]!r}; "
                f"known: {', '.join(KINDS)}"
            )


def _find_name(node: pytest.Item) -> str:
    """The test's id, the same whether pytest-xdist has put it into a group or not."""
    group = node.get_closest_marker("xdist_group")
    name = "" if group is None else str(group.kwargs.get("name", "".join(group.args)))
    return node.nodeid.removesuffix(f"@{name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("rollout").addoption(
        "--rollout-schedule-seed",
        type=int,
        default=None,
        help="Run every test under this schedule seed instead of one made from its name.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def rollout_clock() -> VirtualClock:
    """The virtual clock of this test; it starts at 0."""
    return VirtualClock()


@pytest.fixture
def anyio_backend(
    request: pytest.FixtureRequest, rollout_clock: VirtualClock
) -> Iterator[tuple[str, dict[str, Any]]]:
    """trio in virtual time, with a repeatable schedule."""
    settings = _Settings(request.node)
    with ExitStack() as stack:
        stack.enter_context(schedule_seed(settings.schedule_seed))
        stack.enter_context(virtual_threads(holds=settings.hold_threads))
        yield "trio", {"clock": rollout_clock.mock}


@pytest.fixture(autouse=True)
def rollout_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a child process, a socket or an open file behind."""
    settings = _Settings(request.node)
    before = Belongings()
    yield
    found = leftovers(before, settings.allow_leaks)
    if found:
        pytest.fail("left behind: " + ", ".join(found), pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Put the guards around a coroutine test before anyio runs it."""
    test = pyfuncitem.obj
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", None)
    inner = getattr(inner, "_anyio_original_func", inner)  # what an earlier run left there
    guarded = _guarded(inner or test, pyfuncitem)
    if guarded is None:
        return (yield)
    if inner is None:
        pyfuncitem.obj = guarded
    else:
        test.hypothesis.inner_test = guarded
    try:
        return (yield)
    finally:
        if inner is None:
            pyfuncitem.obj = test
        else:
            test.hypothesis.inner_test = inner


def _guarded(test: Callable[..., Any], item: pytest.Function) -> Callable[..., Any] | None:
    """The coroutine function `test` with its guards; None for any other function."""
    if not inspect.iscoroutinefunction(test) or item.get_closest_marker("anyio") is None:
        return None
    settings = _Settings(item)

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        before = {task.id for task in anyio.get_running_tasks()}
        if _is_virtual():
            reseed(settings.schedule_seed)
            await run_below_ceiling(lambda: test(*args, **kwargs), settings.ceiling_s)
        else:
            await test(*args, **kwargs)
        if "tasks" not in settings.allow_leaks:
            await _refuse_tasks_beside(before)

    return run


def _is_virtual() -> bool:
    return trio.lowlevel.in_trio_run() and isinstance(
        trio.lowlevel.current_clock(), trio.testing.MockClock
    )


async def _refuse_tasks_beside(before: Collection[int]) -> None:
    """Fail if tasks run that did not when the test began."""
    __tracebackhide__ = True
    for _ in range(_SETTLE_TURNS):
        left = [task for task in anyio.get_running_tasks() if task.id not in before]
        if not left:
            return
        await anyio.lowlevel.checkpoint()
    names = ", ".join(f"task {task.name}" for task in left)
    pytest.fail(f"left behind: {names}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the schedule seed of a test that failed in virtual time."""
    report = yield
    fixtures = getattr(item, "fixturenames", ())
    if report.when == "call" and report.failed and "anyio_backend" in fixtures:
        seed = _Settings(item).schedule_seed
        report.sections.append(
            ("rollout", f"schedule seed {seed}; again: --rollout-schedule-seed={seed}")
        )
    return report
