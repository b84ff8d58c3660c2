"""The runtime for callers without a loop of trio's or anyio's own making."""

from __future__ import annotations

import asyncio  # noqa: TID251  (the callers of these tests run it)
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import rollout
from rollout import BlockingRollout, Outcome, Prompt, Trajectory, open_rollout_blocking
from rollout.config import SamplingConfig
from rollout.testing import Scenario

SCENARIO = (
    Scenario(seed=1)
    .reply("quick", "ok")
    .reply("slow", filler=2000, finish="length")
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


@pytest.fixture(params=["trio", "asyncio"])
def runtime(request: pytest.FixtureRequest) -> Iterator[BlockingRollout]:
    with open_rollout_blocking(SCENARIO.config(), backend=request.param) as runtime:
        yield runtime


def test_generate_without_a_loop_returns_the_batch(runtime: BlockingRollout) -> None:
    batch = runtime.generate([user("quick")], step=3)
    assert [t.answer for t in batch.trajectories] == ["ok"]
    assert runtime.statistics().finished == 1


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


def test_generate_bad_prompts_raises_in_the_callers_thread(runtime: BlockingRollout) -> None:
    with pytest.raises(rollout.PromptError, match="expected a sequence"):
        runtime.generate("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_agenerate_from_another_loop(runtime: BlockingRollout, backend: str) -> None:
    async def main() -> rollout.RolloutBatch:
        return await runtime.agenerate([user("quick")])

    assert anyio.run(main, backend=backend).trajectories[0].answer == "ok"


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


def test_close_while_another_thread_generates_that_call_learns_it() -> None:
    runtime = open_rollout_blocking(SCENARIO.config())
    errors: list[BaseException] = []

    def call() -> None:
        try:
            runtime.generate([user("slow"), user("quick")])
        except rollout.RolloutError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not runtime.statistics().finished:
        pass
    runtime.close()
    thread.join()
    assert str(errors[0]) == "the runtime was closed while this call was running"
    assert errors[0].partial is not None  # type: ignore[attr-defined]


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
    assert errors == ["close: called on the runtime's own thread"]


SCRIPT = """
import sys
from test_blocking import SCENARIO, user
from rollout import open_rollout_blocking
runtime = open_rollout_blocking(SCENARIO.config())
try:
    print("ready", flush=True)
    runtime.generate([user("slow")])
except KeyboardInterrupt:
    print(runtime.generate([user("quick")]).trajectories[0].answer, flush=True)
print(runtime.statistics().running, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["runtime.close()", "pass"])
def test_ctrl_c_in_a_blocking_call_passes_and_the_runtime_stays_usable(end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        stdout=subprocess.PIPE,
        cwd="tests",
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    threading.Event().wait(0.3)  # let it get into the call; any moment would do
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out == "ok\n0\n"
    assert process.returncode == 0


def test_asyncio_timeout_passes_through_and_the_runtime_stays_usable() -> None:
    async def main() -> str:
        async with rollout.open_rollout(SCENARIO.config()) as runtime:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await runtime.generate([user("slow")])
            await asyncio.sleep(0.05)
            assert all(r.in_flight == r.zombies == 0 for r in runtime.statistics().replicas)
            return (await runtime.generate([user("quick")])).trajectories[0].answer

    assert asyncio.run(main()) == "ok"


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


def test_sampling_config_reaches_the_engine() -> None:
    config = Scenario(seed=1).config(sampling=SamplingConfig(max_new_tokens=4))
    with open_rollout_blocking(config) as runtime:
        batch = runtime.generate([user("anything")])
    assert batch.trajectories[0].transcript.generated_length == 4
