"""The checker, checked: bugs planted in the library are found, each within 1000 trajectories."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from rollout import Outcome
from rollout.agents.ending import Ending
from rollout.chat.transcript import Transcript
from rollout.engine.channel import server_session as host_module
from rollout.engine.channel.server_session import ServerSession
from rollout.engine.cores.simulated.simulated_model import SimulatedModel
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.limits import NEVER, Limit
from rollout.scheduling import trajectory as trajectory_module
from rollout.scheduling.list_calls import ListCall
from rollout.scheduling.rewards import score as rewarding_module
from rollout.scheduling.scheduler import Scheduler
from rollout.scheduling.trajectory import TrajectoryRun
from rollout.seeds import Identity, derive_seed
from rollout.tools import Tool, ToolContext
from rollout.tools.executor import TrajectoryTools
from slow_cases import slow_but
from trials import findings

MOST_TRAJECTORIES = 1000
Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[Plant, str]] = {}
#: In `make test`: one for each seam that the checker watches, and the seed to begin with, whose
#: trial finds it.
IN_CI = {
    "doubled chunk": 0,
    "mask shifted by one": 0,
    "swallowed cancellation of an agent": 0,
    "outcome never delivered": 2,
    "place not given back": 1,
    "members with one seed": 0,
    "stop ids lost": 3,
}


def bug(name: str, found_as: str) -> Callable[[Plant], Plant]:
    """Register what plants a bug, and a pattern of the words in which it is found."""

    def register(plant: Plant) -> Plant:
        BUGS[name] = (plant, found_as)
        return plant

    return register


@bug("lost abort", r"in flight, \d+ zombies")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerSession, "_abort", lambda self, request: None)


@bug("doubled chunk", "the engine gave it|are not those")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Generation.append

    def append(self: Generation, chunk: Any) -> int:
        count = real(self, chunk)
        if count and chunk.finish_reason is not None:
            self.ids.frombytes(chunk.ids)
            self.log_probs.frombytes(chunk.log_probs)
            self.versions[-1][1] += count
        return count

    patch.setattr(Generation, "append", append)


@bug("unreleased load", r"\d+ in flight, 0 zombies")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Generation.end

    def end(self: Generation, lost_reason: str) -> None:
        if self.finish_reason == "length":
            self.on_end = lambda _: None
        real(self, lost_reason)

    patch.setattr(Generation, "end", end)


@bug("late reply taken", "ids that are not the")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Generation.take

    def take(self: Generation, chunk: Any) -> bool:
        if self.is_abandoned:
            self.append(chunk)
        return real(self, chunk)

    patch.setattr(Generation, "take", take)


@bug("mask shifted by one", "mask at .* expected")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Transcript.mask
    patch.setattr(Transcript, "mask", lambda self: np.roll(real(self), 1))


@bug("log-probs shifted by one", r"rollout_log_probs\[")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Transcript.log_probs
    patch.setattr(Transcript, "log_probs", lambda self: np.roll(real(self), 1))


@bug("most likely ids shifted by one", "its top_ids are not those of its engine")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Transcript.top_ids
    patch.setattr(Transcript, "top_ids", lambda self: np.roll(real(self), 1, axis=0))


@bug("most likely ids not asked for", "was given top_log_probs = 0; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    _change_submits(patch, top_log_probs=0)


@bug("routed experts of the tokens before", "the routed experts at")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Transcript.append_routed_experts

    def append_routed_experts(self: Transcript, experts: Any) -> None:
        real(self, np.roll(experts, 1, axis=0))

    patch.setattr(Transcript, "append_routed_experts", append_routed_experts)


@bug("routed experts asked for from the start alone", "the routed experts of|routed experts at")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Transcript.append_routed_experts

    def append_routed_experts(self: Transcript, experts: Any) -> None:
        if not self.routed_length:
            real(self, experts)

    patch.setattr(Transcript, "append_routed_experts", append_routed_experts)


@bug("swallowed cancellation of a request", "returned before its engine had finished")
def _(patch: pytest.MonkeyPatch) -> None:
    real = EnginePool.generate

    async def generate(self: EnginePool, generation: Any, **options: Any) -> None:
        try:
            await real(self, generation, **options)
        except anyio.get_cancelled_exc_class():
            pass

    patch.setattr(EnginePool, "generate", generate)


@bug("swallowed cancellation of an agent", "though its last generation was cancelled")
def _(patch: pytest.MonkeyPatch) -> None:
    completed = Ending(outcome=Outcome.COMPLETED, reason="")
    patch.setattr(trajectory_module, "_decide_cancelled", lambda run: completed)


@bug("retry of a finished member", "answers of engines are not in its transcript")
def _(patch: pytest.MonkeyPatch) -> None:
    real = trajectory_module._runs_again
    retried: set[int] = set()

    def runs_again(run: TrajectoryRun, ending: Any) -> bool:
        if real(run, ending) or id(run.member) not in retried:
            retried.add(id(run.member))
            return True
        return False

    patch.setattr(trajectory_module, "_runs_again", runs_again)
    patch.setattr(TrajectoryRun, "begin_again", lambda run: None)


@bug("deadline that never comes", r"limits\.\w+ = ")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limit, "_find_end", lambda self: (NEVER.at, NEVER))


@bug("leaked tool", "was closed 0 times")
def _(patch: pytest.MonkeyPatch) -> None:
    async def open_session(
        self: TrajectoryTools, tool: Tool, context: ToolContext, *_: object
    ) -> None:
        self._opened[tool.name] = await tool.open(context)

    patch.setattr(TrajectoryTools, "_open_session", open_session)


@bug("tool closed twice", "was closed 2 times")
def _(patch: pytest.MonkeyPatch) -> None:
    real = TrajectoryTools.close

    async def close(self: TrajectoryTools) -> None:
        for session in self._opened.values():
            await session.close()
        await real(self)

    patch.setattr(TrajectoryTools, "close", close)


@bug("outcome counted twice", "statistics: finished = ")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.count_end

    def count_end(self: Scheduler, member: Any, trajectory: Any) -> None:
        self.tally.outcomes[trajectory.outcome] += trajectory.member
        real(self, member, trajectory)

    patch.setattr(Scheduler, "count_end", count_end)


@bug("outcome delivered twice", "too often")
def _(patch: pytest.MonkeyPatch) -> None:
    real = ListCall._deliver

    async def deliver(self: ListCall, ended: Any) -> None:
        await real(self, ended)
        await real(self, ended)

    patch.setattr(ListCall, "_deliver", deliver)


@bug("outcome never delivered", "was not delivered")
def _(patch: pytest.MonkeyPatch) -> None:
    real = ListCall._deliver

    async def deliver(self: ListCall, ended: Any) -> None:
        await real(self, {key: each for key, each in ended.items() if each.outcome != "deadline"})

    patch.setattr(ListCall, "_deliver", deliver)


@bug("failure with a reward", "with the reward 0.0; expected None")
def _(patch: pytest.MonkeyPatch) -> None:
    real = rewarding_module.end_without_reward

    def end(trajectory: Any, *reason: Any) -> None:
        real(trajectory, *reason)
        trajectory.reward = 0.0

    patch.setattr(rewarding_module, "end_without_reward", end)


@bug("row that ends on an observation", "response_mask|attention_mask|input_ids|responses")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transcript, "trailing_observation_length", property(lambda self: 0))


@bug("place not given back", r"[1-9]\d* places are held|hangs")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.release_slot

    def release_slot(self: Scheduler, member: Any) -> None:
        limiter = self._limiter
        if member.identity.member == 2:
            self._limiter = SimpleNamespace(release_on_behalf_of=lambda _: None)  # type: ignore[assignment]
        real(self, member)
        self._limiter = limiter

    patch.setattr(Scheduler, "release_slot", release_slot)


@bug("prompt that lacks its last token", "other prompt ids than the agent sent")
def _(patch: pytest.MonkeyPatch) -> None:
    real = EnginePool.generate

    async def generate(self: EnginePool, generation: Any) -> None:
        generation.prompt = generation.prompt.packed()[:-4]
        await real(self, generation)

    patch.setattr(EnginePool, "generate", generate)


def _resample(patch: pytest.MonkeyPatch, owner: Any, name: str, **changes: Any) -> None:
    """Let a function sample otherwise than its argument `sampling`, the third, says."""
    real = getattr(owner, name)

    def resampled(self: Any, prompt: Any, sampling: Any, *rest: Any) -> Any:
        return real(self, prompt, msgspec.structs.replace(sampling, **changes), *rest)

    patch.setattr(owner, name, resampled)


@bug("engine with one seed for all requests", "is not what the simulated model says")
def _(patch: pytest.MonkeyPatch) -> None:
    _resample(patch, SimulatedModel, "plan", seed=7)


@bug("engine with a temperature of its own", "is not what the simulated model says")
def _(patch: pytest.MonkeyPatch) -> None:
    _resample(patch, SimulatedModel, "plan", temperature=0.6)


@bug("engine host with one seed for all requests", "was given seed = 7; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    _change_submits(patch, seed=7)


@bug("engine host with a temperature of its own", "was given temperature = 0.6; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    _change_submits(patch, temperature=0.6)


def _change_submits(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let engines read other sampling parameters from the wire than were sent."""
    real = host_module.GenerationRequest

    def request(*, sampling: Any, **fields: Any) -> Any:
        return real(sampling=msgspec.structs.replace(sampling, **changes), **fields)

    patch.setattr(host_module, "GenerationRequest", request)


@bug("members with one seed", "was given seed = .*; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    def seed_of_turn(self: Identity, turn: int) -> int:
        return derive_seed(self.run_seed, self.step, self.uid, 0, turn)

    patch.setattr(Identity, "seed_of_turn", seed_of_turn)


@bug("turns with one seed", "generation [1-9].* was given seed = .*; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Identity.seed_of_turn
    patch.setattr(Identity, "seed_of_turn", lambda self, turn: real(self, 0))


@bug("branches with the seeds of their parent", "#.* was given seed = .*; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Identity, "opened", _with_its_sessions_alone)


def _with_its_sessions_alone(self: Identity, number: int) -> Any:
    class Opened(Identity):
        def seed_of_turn(_, turn: int) -> int:  # noqa: N805
            return self.seed_of_turn(turn)

    path = f"{self.path}.{number}" if self.path else str(number)
    return Opened(**(msgspec.structs.asdict(self) | {"path": path}))


@bug("branch that trains its parent's tokens", "it trains on tokens of its parent, before")
def _(patch: pytest.MonkeyPatch) -> None:
    def fork(self: Transcript, position: int) -> Transcript:
        forked = Transcript()
        forked.append_prompt(self.ids()[: self.prompt_length])
        rest = self.ids()[self.prompt_length : position]
        forked.append_generated(
            rest, [-1.0] * len(rest), versions=[(0, len(rest))], finish_reason="stop"
        )
        return forked

    patch.setattr(Transcript, "fork", fork)


@bug("segment that says another parent", "its parent is None")
def _(patch: pytest.MonkeyPatch) -> None:
    real = trajectory_module.list_segments

    def list_segments(conversations: Any) -> Any:
        return [msgspec.structs.replace(segment, parent=None) for segment in real(conversations)]

    patch.setattr(trajectory_module, "list_segments", list_segments)


@bug("another seed where a request resumes elsewhere", "was given seed = .*; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Generation.build_submit

    def build_submit(self: Generation, *arguments: Any) -> Any:
        submit = real(self, *arguments)
        seed = submit.sampling.seed + self.resumes
        sampling = msgspec.structs.replace(submit.sampling, seed=seed)
        return msgspec.structs.replace(submit, sampling=sampling)

    patch.setattr(Generation, "build_submit", build_submit)


@bug("whole budget where a request resumes elsewhere", "was given max_new_tokens = .*; expected")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generation, "tokens_left", property(lambda self: self.sampling.max_new_tokens))


@bug("prompt's own sampling ignored", "was given top_p = 1.0; expected 0.9")
def _(patch: pytest.MonkeyPatch) -> None:
    real = trajectory_module.make_sampling

    def make_sampling(config: Any, *overrides: Any, validate: bool) -> Any:
        real(config, *overrides, validate=validate)
        return real(config, validate=validate)

    patch.setattr(trajectory_module, "make_sampling", make_sampling)


@bug("validation sampled as training", "was given temperature = 1.0; expected 0")
def _(patch: pytest.MonkeyPatch) -> None:
    real = trajectory_module.make_sampling

    def make_sampling(config: Any, *overrides: Any, validate: bool) -> Any:
        return real(config, *overrides, validate=False)

    patch.setattr(trajectory_module, "make_sampling", make_sampling)


@bug("stop ids lost", "was not given the stop_token_ids")
def _(patch: pytest.MonkeyPatch) -> None:
    _change_submits(patch, stop_token_ids=())


@pytest.fixture(autouse=True)
def silent_library() -> Iterator[None]:
    """Planted bugs are loud."""
    logger = logging.getLogger("rollout")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.rollout(allow_leaks=("threads",))
@pytest.mark.parametrize("name", slow_but(BUGS, *IN_CI))
def test_checker_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_as = BUGS[name]
    plant(monkeypatch)
    trajectories = 0
    found: list[str] = []
    first = IN_CI.get(name, 0)
    # A plant may keep trials from admitting anybody.
    for seed in range(first, first + MOST_TRAJECTORIES):
        texts, recorder = findings(seed)
        trajectories += sum(call.members for each in recorder.runtimes for call in each.calls)
        found += texts
        if any(re.search(found_as, text) for text in texts):
            return
        if trajectories >= MOST_TRAJECTORIES:
            break
    pytest.fail(f"not found as {found_as!r} in {trajectories} trajectories; found {found[:5]}")
