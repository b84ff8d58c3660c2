"""verl as tests need it: its configuration, a model's files, scripted servers, its batches."""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl runs on it)
import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.testing import encode_text, simulated_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("verl", reason="verl is in an environment of its own")
    import hydra
    import torch
    import verl
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopManager,
        AgentLoopOutput,
        AgentLoopWorker,
    )
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as agent_loop_registry
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
    from verl.protocol import DataProto
    from verl.workers.rollout.replica import TokenOutput

    from rollout.integrations.verl import AgentLoopManager as Adapter

__all__ = [
    "END",
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AgentState",
    "DataProto",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "ToolAgentLoop",
    "agent_loop_registry",
    "torch",
]

P, R = 1500, 260
END = 258
CUSTOM = "+actor_rollout_ref.rollout.custom.rollout"
CONFIG = Path(verl.__file__).parent / "trainer" / "config"


def save_model(directory: Path) -> Path:
    """A tiny Qwen2's configuration with a byte-level tokenizer; no weights."""
    simulated_tokenizer().save_pretrained(directory)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 264,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "eos_token_id": END,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_config(model: Path, *overrides: str, prompt: int = P, response: int = R) -> Any:
    """verl's own defaults for its trainer, but for the model, the widths and `overrides`."""
    rollout = "actor_rollout_ref.rollout"
    with hydra.initialize_config_dir(config_dir=str(CONFIG), version_base=None):
        return hydra.compose(
            config_name="ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                f"{rollout}.name=vllm",
                f"{rollout}.prompt_length={prompt}",
                f"{rollout}.response_length={response}",
                f"{rollout}.multi_turn.enable=true",
                f"{rollout}.multi_turn.max_parallel_calls=2",
                f"{rollout}.agent.num_workers=1",
                "trainer.use_v1=false",
                *overrides,
            ],
        )


class ScriptedServers:
    """Stands where verl has the client of its servers: answers by question and turn.

    Args:
        answers: By a word of the question, what is said in each turn; an exception is raised.
        log_probs: Whether answers have them.
    """

    def __init__(
        self, answers: Mapping[str, Sequence[Any]], *, log_probs: bool = True, step: int = 7
    ) -> None:
        self.answers, self.calls = answers, [{}][:0]
        self.step = step
        self._log_probs = log_probs

    async def generate(self, request_id: str, **options: Any) -> TokenOutput:
        """The answer of this turn; longer than wanted where the script says so."""
        text = simulated_tokenizer().decode(options["prompt_ids"])
        self.calls.append({"request_id": request_id, "text": text, **options})
        await asyncio.sleep(0)
        turn = text.count("<|im_start|>assistant") - 1
        asked = text.partition("<|im_start|>user\n")[2] or text  # of a cut prompt, what is left
        question = next(key for key in self.answers if key in asked)
        said = self.answers[question][turn]
        if isinstance(said, Exception):
            raise said
        ids = said if isinstance(said, list) else [*encode_text(said), END]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.01 * (at + 1) for at in range(len(ids))] if self._log_probs else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={
                "global_steps": self.step,
                "min_global_steps": self.step,
                "max_global_steps": self.step,
            },
        )


def call(name: str, **arguments: Any) -> str:
    """A turn that calls a tool, in the Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def batch_of(
    questions: Sequence[str], *, n: int = 1, agent: str | None = None, **meta: Any
) -> DataProto:
    """What verl's trainer hands to its manager: each question `n` times, adjacent."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    columns = {
        "raw_prompt": messages,
        "index": list(range(len(questions))),
        "uid": [f"uid-{number}" for number in range(len(questions))],
        "data_source": ["a data set"] * len(questions),
        "reward_model": [{"style": "rule", "ground_truth": "3"}] * len(questions),
        "extra_info": [{"split": "train", "index": at} for at in range(len(questions))],
        "tools_kwargs": [{}] * len(questions),
    }
    if agent is not None:
        columns["agent_name"] = [agent] * len(questions)
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(questions), dtype=object)
        arrays[name][:] = values
    batch = DataProto(
        non_tensor_batch=arrays, meta_info={"global_steps": 3, "validate": False, **meta}
    )
    return batch.repeat(n, interleave=True)


class _Actor:
    """A worker as its manager sees it, without Ray."""

    def __init__(self, worker: AgentLoopWorker) -> None:
        self.generate_sequences = self
        self.remote = worker.generate_sequences


async def verls_own(worker: AgentLoopWorker, batch: DataProto) -> DataProto:
    """What verl's own manager makes of a batch that one worker answers."""
    manager = object.__new__(AgentLoopManager)
    manager.agent_loop_workers = [_Actor(worker)]
    return await manager.generate_sequences(batch)


#: verl's registry takes each name from one file only.
FUNCTIONS = Path(__file__).with_name("verl_functions.py")
TOOLS = """
tools:
  - class_name: verl_note.Note
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: note
        description: Keeps a note.
        parameters:
          type: object
          properties:
            text: {type: string, description: What to keep.}
          required: [text]
"""
#: Of `meta_info["timing"]`: what the adapter says beside verl's own figures.
ROW_FIGURES = {
    f"agent_loop/rows/{name}"
    for name in (
        "cut_prompts",
        "total",
        "empty",
        "unrewarded",
        "over_long",
        "untrainable",
        "masked",
        "masked_tokens",
        "segments_left_out",
        "tokens_left_out",
    )
}


def save_files(directory: Path) -> Path:
    """A model's directory, with files of tools in it."""
    save_model(directory)
    (directory / "tools.yaml").write_text(TOOLS)
    return directory


def config_of(files: Path, *overrides: str, **widths: int) -> Any:
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    return make_config(
        files,
        f"{multi_turn}.function_tool_path={FUNCTIONS}",
        f"{multi_turn}.tool_config_path={files / 'tools.yaml'}",
        *overrides,
        **widths,
    )


@contextmanager
def opened(config: Any, servers: Any, **options: Any) -> Iterator[Adapter]:
    """The adapter on these servers."""
    manager = Adapter.create(config, servers, **options)
    try:
        yield manager
    finally:
        manager.close()


def both(
    config: Any,
    answers: Any,
    batch: DataProto,
    *,
    log_probs: bool = True,
    **options: Any,
) -> tuple[DataProto, DataProto]:
    """verl's own batch, and the adapter's, made with the same options of `create`."""
    worker = AgentLoopWorker(config, ScriptedServers(answers, log_probs=log_probs), **options)
    theirs = asyncio.run(verls_own(worker, copy.deepcopy(batch)))
    with opened(config, ScriptedServers(answers, log_probs=log_probs), **options) as manager:
        return theirs, manager.generate_sequences(copy.deepcopy(batch))


def differences(theirs: DataProto, ours: DataProto) -> list[str]:
    """Every key, dtype, shape and value that is not the same."""
    found = [
        f"batch {sorted(theirs.batch.keys())} / {sorted(ours.batch.keys())}"
        for _ in [0]
        if theirs.batch.keys() != ours.batch.keys()
    ]
    for name in theirs.batch.keys() & ours.batch.keys():
        one, other = theirs.batch[name], ours.batch[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(one, other):
            rows = [at for at in range(len(one)) if not torch.equal(one[at], other[at])]
            found.append(f"batch.{name}: {one.dtype} {other.dtype}, rows {rows}")
    keys = theirs.non_tensor_batch.keys() ^ ours.non_tensor_batch.keys()
    found += [f"non_tensor_batch keys {sorted(keys)}"] if keys else []
    for name in theirs.non_tensor_batch.keys() & ours.non_tensor_batch.keys():
        one, other = theirs.non_tensor_batch[name], ours.non_tensor_batch[name]
        same = [
            type(x) is type(y) and x == y for x, y in zip(one.tolist(), other.tolist(), strict=True)
        ]
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not all(same):
            found.append(f"non_tensor_batch.{name}: {one.tolist()} / {other.tolist()}")
    timing, own = dict(theirs.meta_info), dict(ours.meta_info)
    figures, own_figures = timing.pop("timing"), own.pop("timing")
    assert own_figures.keys() - figures.keys() == ROW_FIGURES
    assert figures.keys() - own_figures.keys() == set()
    assert all(type(own_figures[name]) is type(figures[name]) for name in figures)
    if timing != own:
        found.append(f"meta_info {timing} / {own}")
    return found
