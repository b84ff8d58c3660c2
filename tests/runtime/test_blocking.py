"""The runtime for callers without a loop of trio's or anyio's own making."""

from __future__ import annotations

import asyncio  # noqa: TID251  (the callers of these tests run it)
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from forked import python_program
from rollout import BlockingRollout, Outcome, Prompt, Trajectory, open_rollout_blocking
from rollout.testing import Scenario

pytestmark = pytest.mark.process
SCENARIO = (
    Scenario(seed=1)
    .reply("quick", "ok")
    .reply("slow", filler=2000, finish="length")
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


BOTH = pytest.mark.parametrize("runtime", ["trio", "asyncio"], indirect=True)


@pytest.fixture
def runtime(request: pytest.FixtureRequest) -> Iterator[BlockingRollout]:
    """On trio; of tests that say so on both backends."""
    backend = getattr(request, "param", "trio")
    with open_rollout_blocking(SCENARIO.config(), backend=backend) as runtime:
        yield runtime


@BOTH
def test_generate_without_a_loop_returns_the_batch(runtime: BlockingRollout) -> None:
    batch = runtime.generate([user("quick")], step=3)
    assert [t.answer for t in batch.trajectories] == ["ok"]
    assert runtime.statistics().finished == 1


def test_generate_lays_tensors_out_as_the_call_says(runtime: BlockingRollout) -> None:
    batch = runtime.generate([user("quick")], trim=8)
    assert batch.tensors["responses"].shape == (1, 8)
    assert runtime.generate([user("quick")], layout="packed").tensors["responses"].is_nested

    async def ask() -> rollout.RolloutBatch:
        return await runtime.agenerate([user("quick")], layout="packed", trim=True)

    assert anyio.run(ask).tensors["responses"].is_nested


@BOTH
def test_generate_from_many_threads_at_once(runtime: BlockingRollout) -> None:
    batches: list[rollout.RolloutBatch] = []

    def call() -> None:
        batches.append(runtime.generate([user("quick")]))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches) == 8


def test_bad_arguments_raise_in_the_callers_thread(runtime: BlockingRollout) -> None:
    with pytest.raises(rollout.PromptError, match="step = 'x': expected an integer from 0 to"):
        runtime.generate([user("quick")], step="x")  # type: ignore[arg-type]
    with pytest.raises(rollout.PromptError, match="member = 'a': expected an integer ≥ 0"):
        runtime.cancel(member="a")  # type: ignore[arg-type]
    assert runtime.statistics().admitted == 0


@BOTH
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_agenerate_cancelled_ends_its_trajectories_and_leaves_the_runtime_usable(
    runtime: BlockingRollout, backend: str
) -> None:
    async def main() -> bool:
        with anyio.move_on_after(0.2) as scope:
            await runtime.agenerate([user("slow")])
        return scope.cancelled_caught

    assert anyio.run(main, backend=backend)
    assert runtime.statistics().running == 0
    assert runtime.generate([user("quick")]).trajectories[0].answer == "ok"


def test_stream_gives_trajectories_as_they_end(runtime: BlockingRollout) -> None:
    with runtime.stream([user("slow", uid="slow"), user("quick", uid="quick")], step=3) as rows:
        first = next(rows)
        assert first.uid == "quick"
        assert runtime.cancel("slow", reason="enough") == 1
        assert [(row.uid, row.outcome) for row in rows] == [("slow", Outcome.CANCELLED)]
    assert runtime.statistics().finished == 2


@BOTH
def test_stream_left_early_cancels_the_rest(runtime: BlockingRollout) -> None:
    with runtime.stream([user("quick"), user("slow")]) as rows:
        next(rows)
    assert runtime.statistics().running == 0
    with pytest.raises(rollout.RolloutError, match="the stream has been left"):
        next(rows)
    assert runtime.generate([user("quick")]).trajectories[0].answer == "ok"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_stream_error_of_the_body_leaves_as_itself_and_cancels_the_rest(
    runtime: BlockingRollout, error: type[BaseException]
) -> None:
    with pytest.raises(error, match="mine"), runtime.stream([user("slow")]):
        raise error("mine")
    assert runtime.statistics().running == 0


def test_stream_over_its_failure_budget_says_so_at_the_end() -> None:
    async def broken(trajectory: Trajectory) -> float:
        raise OSError("no judge")

    scheduling = rollout.SchedulingConfig(max_failures=0, max_failure_share=0.0)
    with open_rollout_blocking(SCENARIO.config(scheduling=scheduling), reward=broken) as runtime:
        rows = []
        with pytest.raises(rollout.LimitExceeded, match="OSError: no judge"):
            with runtime.stream([user("quick")]) as stream:
                rows += stream
    assert [row.outcome for row in rows] == [Outcome.FAILED]


def test_stream_of_a_runtime_that_is_closed_meanwhile_ends_and_says_so() -> None:
    runtime = open_rollout_blocking(SCENARIO.config())
    closing = threading.Thread(target=runtime.close)
    with pytest.raises(rollout.RolloutError, match="the runtime was closed while this call was"):
        with runtime.stream([user("quick"), user("slow")]) as rows:
            next(rows)
            closing.start()
            for _ in rows:
                pass
    closing.join()
    with pytest.raises(rollout.RolloutError, match="the runtime is closed"):
        with runtime.stream([user("quick")]):
            pytest.fail("it was entered")


@BOTH
def test_close_while_another_thread_stays_in_a_stream_waits_for_nobody(
    runtime: BlockingRollout,
) -> None:
    entered, leaves, errors = threading.Event(), threading.Event(), list[BaseException]()

    def stay() -> None:
        try:
            with runtime.stream([user("slow")]):
                entered.set()
                leaves.wait()
        except rollout.RolloutError as error:
            errors.append(error)

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    runtime.close()
    leaves.set()
    thread.join()
    assert "closed" in str(errors[0])


def test_blocking_calls_in_a_task_of_trio_are_refused(runtime: BlockingRollout) -> None:
    async def main() -> None:
        with pytest.raises(rollout.RolloutError, match="called in a task of trio's"):
            runtime.generate([user("quick")])
        assert len(await runtime.agenerate([user("quick")])) == 1

    anyio.run(main, backend="trio")


def test_template_and_engines_serve_callers_of_any_thread(runtime: BlockingRollout) -> None:
    ids = runtime.template.prompt_ids([{"role": "user", "content": "hi"}], None)
    assert "hi" in runtime.template.decode(ids)
    engines = runtime.engines
    assert engines.add_replica() == "engine-1"
    engines.drain("engine-0")
    assert runtime.generate([user("quick")]).trajectories[0].answer == "ok"
    engines.resume("engine-0")
    assert set(engines.loads()) == {"engine-0", "engine-1"}
    engines.remove_replica("engine-1", drain_s=1)
    assert engines.statistics()[0].name == "engine-0"
    assert engines.info.vocab_size >= runtime.template.vocab_size
    assert engines.router.statistics()
    with pytest.raises(rollout.EngineError, match="engine-9"):
        engines.drain("engine-9")


def test_blocking_runtime_has_every_public_method_of_the_runtime() -> None:
    left_out = {"serving"}  # its own work
    public = {name for name in vars(rollout.RolloutRuntime) if not name.startswith("_")}
    assert public - left_out - set(dir(BlockingRollout)) == set()


@BOTH
def test_cancel_from_another_thread_keeps_the_tokens(runtime: BlockingRollout) -> None:
    def cancel_when_running() -> None:
        while not runtime.cancel("p", reason="enough"):
            pass

    thread = threading.Thread(target=cancel_when_running)
    thread.start()
    batch = runtime.generate([user("slow", uid="p")])
    thread.join()
    assert batch.trajectories[0].outcome is Outcome.CANCELLED
    assert batch.trajectories[0].reason == "enough"


def test_close_is_idempotent_and_later_calls_say_so() -> None:
    runtime = open_rollout_blocking(SCENARIO.config())
    runtime.close()
    runtime.close()
    with pytest.raises(rollout.RolloutError, match="the runtime is closed"):
        runtime.generate([user("quick")])


@asynccontextmanager
async def open_and_fail_to_close() -> AsyncIterator[rollout.RolloutRuntime]:
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        yield runtime
    raise OSError("the disk is full")


def test_close_that_fails_raises_unless_the_block_has_its_own_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(OSError, match="the disk is full"):
        with BlockingRollout(open_and_fail_to_close, "trio") as runtime:
            runtime.generate([user("quick")])
    with pytest.raises(KeyError, match="mine"):
        with BlockingRollout(open_and_fail_to_close, "trio"):
            raise KeyError("mine")
    assert "the disk is full" in caplog.text
    assert not [t for t in threading.enumerate() if t.name == "rollout"]


def test_open_fails_error_reaches_the_caller_and_no_thread_is_left() -> None:
    config = Scenario(seed=1).config(agent=rollout.AgentConfig(name="nobody"))
    with pytest.raises(rollout.ConfigError, match="nobody"):
        open_rollout_blocking(config)
    assert not [t for t in threading.enumerate() if t.name == "rollout"]


def test_close_on_the_runtimes_own_thread_is_refused() -> None:
    runtime: list[BlockingRollout] = []
    errors: list[str] = []

    async def reward(trajectory: Trajectory) -> float:
        try:
            runtime[0].close()
        except rollout.RolloutError as error:
            errors.append(str(error))
        return 0.0

    with open_rollout_blocking(SCENARIO.config(), reward=reward) as opened:
        runtime.append(opened)
        opened.generate([user("quick")])
    assert len(errors) == 1
    assert errors[0].startswith("close: called on the runtime's own thread")


def test_methods_on_the_runtimes_own_thread_are_refused_but_those_that_are_awaited(
    runtime: BlockingRollout,
) -> None:
    errors: list[str] = []

    def accept(_: rollout.Group) -> bool:
        for wait in (runtime.statistics, runtime.sleep, lambda: runtime.generate([user("quick")])):
            with pytest.raises(rollout.RolloutError, match="on which async functions") as caught:
                wait()
            errors.append(str(caught.value))
        with pytest.raises(rollout.RolloutError), runtime.stream([user("quick")]):
            pass
        return True

    async def prompts() -> AsyncIterator[Prompt]:
        batch = await runtime.agenerate([user("quick")])
        yield user(batch.trajectories[0].answer + "quick")

    batch = runtime.collect(prompts(), 1, policy=rollout.GroupPolicy(accept=accept))
    assert [t.answer for t in batch.trajectories] == ["ok"]
    assert len({*errors}) == 1
    assert errors[0].startswith("a blocking method: called on the runtime's own thread")
    assert runtime.statistics().running == 0


@BOTH
def test_keyboard_interrupt_of_an_agent_is_its_calls_and_the_runtime_stays_usable(
    runtime: BlockingRollout, request: pytest.FixtureRequest
) -> None:
    name = f"pressing-{request.node.callspec.id}"

    @rollout.register_agent(name)
    class Pressing(rollout.AgentLoop):
        async def run(self, context: rollout.AgentContext) -> None:
            raise KeyboardInterrupt("the agent's own")

    with pytest.raises(KeyboardInterrupt, match="the agent's own"):
        runtime.generate([user("quick", agent_name=name), user("slow")])
    assert runtime.statistics().running == 0
    assert runtime.generate([user("quick")]).trajectories[0].answer == "ok"


SCRIPT = """
import os, sys
from test_blocking import SCENARIO, user
from rollout import open_rollout_blocking
runtime = open_rollout_blocking(SCENARIO.config())
try:
    print("ready", flush=True)
    runtime.generate([user("slow")])
except KeyboardInterrupt:
    print(runtime.generate([user("quick")]).trajectories[0].answer, flush=True)
print(runtime.statistics().running, flush=True)
child = os.fork()
if child == 0:
    sys.exit(7)  # a fork has neither the runtime's thread nor its engines
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
{end}
"""


def start_python(script: str) -> subprocess.Popen[str]:
    """A process of its own, whose interpreter shuts down as users' do; it imports for seconds."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        text=True,
    )


@pytest.mark.parametrize(
    "end", ["runtime.close()", pytest.param("pass  # its end closes it", marks=pytest.mark.slow)]
)
def test_ctrl_c_in_a_blocking_call_passes_and_the_runtime_stays_usable(end: str) -> None:
    script = SCRIPT.format(end=end)
    if end == "runtime.close()":
        process = python_program(script, stdout=subprocess.PIPE)
    else:
        process = start_python(script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    threading.Event().wait(0.3)  # let it get into the call; any moment would do
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out == "ok\n0\n7\n"
    assert process.returncode == 0


def test_asyncio_task_cancel_passes_through_and_the_runtime_stays_usable() -> None:
    async def main() -> str:
        async with rollout.open_rollout(SCENARIO.config()) as runtime:
            task = asyncio.create_task(runtime.generate([user("slow")]))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            batch = await runtime.generate([user("quick")])
            return batch.trajectories[0].answer

    assert asyncio.run(main()) == "ok"


def test_asyncio_task_that_holds_the_runtime_is_cancelled_nothing_is_left() -> None:
    async def hold() -> None:
        async with rollout.open_rollout(SCENARIO.config()) as runtime:
            await runtime.generate([user("slow")])

    async def main() -> None:
        task = asyncio.create_task(hold())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
