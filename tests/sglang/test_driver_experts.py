"""Routed experts of SGLang, from its host buffers to the trainer's tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from driver import LATER_TOKENS, clock, questions, save_speaking_model, sglang, shares_an_engine
from models import EXPERTS

import rollout

pytestmark = [pytest.mark.anyio, pytest.mark.slow, shares_an_engine]


async def test_experts_of_three_turns_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_speaking_model(tmp_path, 3, transformers.Qwen3MoeConfig, **EXPERTS)
    async with rollout.open_rollout(sglang(model, routed_experts=True), [clock]) as runtime:
        batch = await runtime.generate(questions(2), step=1)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    told = batch.tensors["routed_experts"].numpy()
    attended = batch.tensors["attention_mask"].numpy().astype(bool)
    for at, row in enumerate(batch.trajectories):
        assert row.transcript.generated_length > 2 * LATER_TOKENS
        ids = row.transcript.ids()
        with torch.inference_mode():
            whole = torch.tensor(ids[None].astype(np.int64))
            logits = network(whole, output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2).indices for layer in logits], 1).numpy()
        known = told[at][attended[at]]
        assert (known[-1] == -1).all()
        same = (np.sort(known[:-1]) == np.sort(expected[:-1])).all((1, 2))
        assert same.mean() > 0.99  # two experts may be as good as equal
        assert (told[at][~attended[at]] == -1).all()
