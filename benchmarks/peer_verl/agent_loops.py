"""verl's ToolAgentLoop and AgentLoopWorker as they are, without Ray and without a GPU.

Both are plain classes that Ray wraps elsewhere. What they get in place of a client of servers is an
object that answers as `InstantCore` does, in the same process: on this side nothing is sent, copied
or received for a request.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl runs on it)
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import verl
from driver_cases.workload import SCHEMAS, Answers, question_of, tool_text
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopOutput,
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
)
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.protocol import DataProto
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

#: Of the model's configuration: it decides how verl tells what a turn adds.
MODEL_TYPE = "qwen2"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": True}


def make_config(prompt: int, response: int) -> Any:
    """verl's own defaults, but for the widths, the agent and its format."""
    overrides = {
        "name": "sglang",
        "mode": "async",
        "prompt_length": prompt,
        "response_length": response,
        "multi_turn.enable": "true",
        "multi_turn.format": "hermes",
        "multi_turn.max_tool_response_length": 4096,
        "agent.default_agent_loop": "tool_agent",
    }
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(config_dir=str(folder), version_base=None):
        return hydra.compose(
            config_name="ppo_trainer",
            overrides=[f"actor_rollout_ref.rollout.{key}={v}" for key, v in overrides.items()],
        )


def make_tools() -> list[FunctionTool]:
    """The two tools of the workload."""
    text = tool_text()

    async def search(query: str, top_k: int = 5) -> str:
        return text

    async def calculator(expression: str) -> str:
        return text

    return [
        FunctionTool(
            name=function.__name__,
            fn=function,
            tool_schema=OpenAIFunctionToolSchema.model_validate(schema),
            is_async=True,
        )
        for function, schema in zip((search, calculator), SCHEMAS, strict=True)
    ]


class HeldAnswers:
    """Stands where verl has the client of its servers; see `InstantCore` for the barrier."""

    def __init__(self, answers: Answers, in_flight: int, barrier: str) -> None:
        self._answers, self._in_flight, self._barrier = answers, in_flight, barrier
        self._sessions: dict[str, tuple[int, int]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._log_probs = {len(ids): [-0.5] * len(ids) for ids in (*answers.calls, *answers.finals)}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], **_rest: Any
    ) -> TokenOutput:
        """The answer of this turn, as an object that may be kept and changed."""
        found = self._sessions.pop(request_id, None)
        question, turn = (question_of(prompt_ids), 0) if found is None else found
        is_last, index = self._answers.index(question, turn)
        if not is_last:
            self._sessions[request_id] = question, turn + 1
        if self._barrier != "none" and (turn == 0 or self._barrier == "rounds"):
            await self._wait()
        ids = (self._answers.finals if is_last else self._answers.calls)[index]
        return TokenOutput.model_construct(
            token_ids=list(ids),
            log_probs=list(self._log_probs[len(ids)]),
            stop_reason="stop",
            extra_fields={"global_steps": 1},
        )

    async def _wait(self) -> None:
        released = asyncio.get_running_loop().create_future()
        self._waiting.append(released)
        if len(self._waiting) == self._in_flight:
            for each in self._waiting:
                each.set_result(None)
            self._waiting.clear()
        await released


def make_worker(config: Any, tokenizer: Any, client: Any, tools: list[FunctionTool]) -> Any:
    """A worker with what its `__init__` would set, but for a model's directory."""
    worker = object.__new__(AgentLoopWorker)
    worker.config, worker.llm_client, worker.tokenizer = config, client, tokenizer
    worker.rollout_config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    worker.teacher_client = worker.reward_loop_worker_handles = None
    worker.model_config = worker.processor = None
    worker.dataset_cls, worker.hf_model_type = RLHFDataset, MODEL_TYPE
    worker.mm_processor_kwargs, worker.distillation_enabled, worker.tools = {}, False, tools
    return worker


async def run_loops(
    config: Any, tokenizer: Any, client: Any, tools: list[FunctionTool], questions: list[str]
) -> list[AgentLoopOutput]:
    """Its agent loops alone."""

    async def run(question: str) -> AgentLoopOutput:
        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=client,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type=MODEL_TYPE,
            tools=ToolListWrap(tools),
        )
        return await loop.run(dict(SAMPLING), raw_prompt=[{"role": "user", "content": question}])

    tasks = [asyncio.create_task(run(question)) for question in questions]
    return await asyncio.gather(*tasks)


def batch_of(questions: list[str]) -> DataProto:
    """What its trainer hands to a worker."""
    count = len(questions)
    prompts = np.empty(count, dtype=object)
    prompts[:] = [[{"role": "user", "content": question}] for question in questions]
    columns = {
        "raw_prompt": prompts,
        "agent_name": np.array(["tool_agent"] * count, dtype=object),
        "index": np.arange(count),
        "uid": np.array([f"prompt-{number}" for number in range(count)], dtype=object),
    }
    return DataProto(non_tensor_batch=columns, meta_info={"global_steps": 1, "validate": False})
