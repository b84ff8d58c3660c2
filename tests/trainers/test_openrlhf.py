"""OpenRLHF itself takes our responses."""

from __future__ import annotations

import asyncio  # noqa: TID251  (OpenRLHF runs on it)
import math
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import every_outcome as given
from rollout.errors import ConfigError
from rollout.testing import encode_text, simulated_tokenizer
from test_openrlhf_response import Params, responses
from trainers.contracts import openrlhf as contract

EOS = simulated_tokenizer().eos_token_id


@pytest.fixture
def openrlhf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenRLHF's own code, where it is installed; it imports vLLM's settings only."""
    if find_spec("openrlhf") is None:
        pytest.skip("openrlhf is not installed; see docs/trainers/openrlhf.md")
    if find_spec("vllm") is None:
        vllm = ModuleType("vllm")
        vllm.SamplingParams = Params  # type: ignore[attr-defined]
        engines = ModuleType("openrlhf.trainer.ray.vllm_engine")
        engines.batch_vllm_engine_call = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setitem(sys.modules, engines.__name__, engines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from openrlhf.trainer.ppo_utils import experience, samples_generator
        from openrlhf.utils import agent
    return SimpleNamespace(agent=agent, samples=samples_generator, experience=experience)


def experiences(openrlhf: Any, made: list[dict[str, Any]], max_len: int) -> list[Any]:
    """What OpenRLHF makes of responses."""
    generator = openrlhf.samples.SamplesGenerator.__new__(openrlhf.samples.SamplesGenerator)
    return [generator._process_response_into_experience(each, max_len=max_len) for each in made]


def test_openrlhf_itself_takes_responses_of_every_outcome(openrlhf: Any) -> None:
    made = responses()
    taken = experiences(openrlhf, made, 64)
    for response, experience in zip(made, taken, strict=True):
        learned = sum(stop - start for start, stop in response["action_ranges"])
        assert int(experience.action_mask.sum()) == learned
        assert experience.rollout_log_probs.shape == experience.action_mask.shape
        assert float(experience.rewards) == response["reward"]
        assert bool(experience.truncated) == response["truncated"]
    whole = openrlhf.experience.Experience.concat_experiences(taken, pad_token_id=0)
    assert whole.sequences.shape[0] == 8


def run_groups(
    executor: Any, prompts: list[tuple[str, Any]], members: int, engine: Any, length: int = 10_240
) -> list[list[dict[str, Any]]]:
    """Calls as `generate_responses` of OpenRLHF's actor begins them: n at once for a prompt."""

    async def of_prompt(prompt: str, params: Any) -> list[dict[str, Any]]:
        tokenizer = SimpleNamespace(name_or_path="simulated")
        calls = [
            executor.execute(
                prompt=prompt,
                label="4",
                sampling_params=params,
                max_length=length,
                hf_tokenizer=tokenizer,
                llm_engine=engine,
                images=None,
            )
            for _ in range(members)
        ]
        return await asyncio.gather(*calls)

    async def all_of() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(of_prompt(*each) for each in prompts))

    try:
        return asyncio.run(all_of())
    finally:
        executor.close()


def prompt_of(columns: Any) -> Any:
    """The ending that a prompt asks for."""
    return given.prompt_for(columns["prompt"])


def test_executor_runs_groups_of_every_ending(openrlhf: Any) -> None:
    from rollout.integrations.openrlhf import agent_executor

    executor = agent_executor(given.settings(prompt_of=prompt_of))()
    assert isinstance(executor, openrlhf.agent.AgentExecutorBase)
    made = run_groups(executor, [(ending, Params()) for ending in given.ENDINGS], 2, None)
    flat = [response for group in made for response in group]
    contract.check(flat)
    for ending, group in zip(given.ENDINGS, made, strict=True):
        assert all(response["prompt"] == ending for response in group)
        assert all(response["extra_logs"][f"is_{ending}"] == 1.0 for response in group)
    assert made[0][0]["extra_logs"]["weight_version_min"] == 7.0
    assert made[0][0]["extra_logs"]["weight_version_max"] == 8.0
    experiences(openrlhf, flat, 10_240)


class Engine:
    """OpenRLHF's actor as far as executors see it: answers, or never does."""

    def __init__(self, text: str | None, log_prob: float = -0.5) -> None:
        self._log_prob = log_prob
        self._ids = None if text is None else [*encode_text(text), EOS]
        self.asked: list[tuple[list[int], Any]] = []
        self.cancelled = 0

    async def generate(self, ids: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        self.asked.append((ids, params))
        if self._ids is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        scored = [{token: SimpleNamespace(logprob=self._log_prob)} for token in self._ids]
        output = SimpleNamespace(token_ids=self._ids, logprobs=scored, finish_reason="stop")
        return SimpleNamespace(outputs=[output])


def test_executor_generates_with_the_engine_of_openrlhf(openrlhf: Any) -> None:
    from rollout.integrations.openrlhf import agent_executor

    engine = Engine("four")
    given_params = Params(temperature=0.5)
    single = given.single_turn(engines="trainer")
    executor = agent_executor(single)()
    [[one, two]] = run_groups(executor, [("What is 2+2?", given_params)], 2, engine)
    contract.check([one, two])
    start, stop = one["action_ranges"][0]
    assert one["observation_tokens"][start:stop] == [*encode_text("four"), EOS]
    assert one["rollout_log_probs"][start:stop] == [-0.5] * 5
    (ids, params), (_, other) = engine.asked
    assert ids == one["observation_tokens"][:start]
    assert (params.temperature, params.top_k, params.logprobs) == (0.5, 0, 1)
    assert params.seed != other.seed
    assert given_params.temperature == 0.5
    assert not hasattr(given_params, "seed")


@pytest.mark.parametrize("log_prob", [math.nan, -math.inf])
def test_executor_fails_where_the_engine_s_log_probs_are_not_finite(
    openrlhf: Any, log_prob: float
) -> None:
    from rollout.integrations.openrlhf import agent_executor

    executor = agent_executor(given.single_turn(engines="trainer"))()
    [[response]] = run_groups(executor, [("hi", Params())], 1, Engine("four", log_prob))
    contract.check([response])
    assert response["extra_logs"]["is_failed"] == 1.0
    assert response["action_ranges"] == []
    assert all(map(math.isfinite, response["rollout_log_probs"]))


def test_executor_at_a_deadline_cancels_the_engine_s_request(openrlhf: Any) -> None:
    from rollout.integrations.openrlhf import agent_executor

    engine = Engine(None)
    single = given.single_turn(engines="trainer", generation_s=0.2)
    [[response]] = run_groups(agent_executor(single)(), [("hi", Params())], 1, engine)
    assert response["extra_logs"]["is_deadline"] == 1.0
    assert response["action_ranges"] == []
    assert engine.cancelled == 1


def test_executor_refuses_what_openrlhf_would_cut(openrlhf: Any) -> None:
    from rollout.integrations.openrlhf import agent_executor

    executor = agent_executor(given.settings())()
    with pytest.raises(ConfigError, match=r"= 10240: expected at most max_length = 100"):
        run_groups(executor, [("hi", Params())], 1, None, length=100)


def test_agent_file_of_one_line_is_what_openrlhf_loads(openrlhf: Any, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "from rollout.integrations.openrlhf import agent_executor\n"
        f"AgentExecutor = agent_executor('{given.__name__}:settings')\n"
    )
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    executor = space["AgentExecutor"]()
    assert issubclass(space["AgentExecutor"], openrlhf.agent.AgentExecutorBase)
    executor.close()
