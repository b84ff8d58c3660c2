"""From messages with images to rows that a trainer can train on, on the embedded engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import media_material
import rollout
import vision_models
from rollout import Prompt, ToolCall, function_tool
from rollout.agents import AgentContext, AgentLoop, register_agent
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TransformersEngine,
)
from rollout.tools import ToolResult
from vision_models import picture

if TYPE_CHECKING:
    from pathlib import Path

    from rollout import RolloutBatch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed"),
    pytest.mark.process,
]
slow = pytest.mark.slow


@pytest.fixture(params=["trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The machine's own clock: the engine is a process."""
    return request.param


@register_agent("looks_again")
class LooksAgain(AgentLoop):
    """Speaks, is shown another image by a tool, and speaks again."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        await context.call_tools([ToolCall(name="look", arguments={})])
        await context.generate()


@function_tool
async def look() -> ToolResult:
    """Look again."""
    return ToolResult("Here:", images=[picture(9, 120, 70)])


def config_of(folder: Path, agent: str) -> RolloutConfig:
    return RolloutConfig(
        model=ModelConfig(path=str(folder)),
        engine=TransformersEngine(dtype="float32", max_running=4),
        placement=LocalProcessPlacement(),
        lengths=LengthsConfig(prompt=512, response=512, turn=12),
        agent=AgentConfig(name=agent, tool_format="hermes"),
        sampling=SamplingConfig(temperature=1.0),
    )


def ratios(folder: Path, batch: RolloutBatch) -> Any:
    """Of sampled tokens' probabilities, the engine's to those of a plain forward pass."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tensors, found = batch.tensors, []
    for row, inputs in enumerate(batch.multi_modal_inputs):
        own = {name: tensors[name][row : row + 1] for name in ("input_ids", "attention_mask")}
        mask = tensors["response_mask"][row].bool()
        ids = tensors["responses"][row]
        positions = tensors["position_ids"][row : row + 1]
        if positions.ndim == 3:
            positions = positions.transpose(0, 1)
        with torch.inference_mode():
            logits = model(**own, position_ids=positions, **inputs).logits[0]
        length = len(mask)
        scores = logits[-length - 1 : -1].log_softmax(-1)
        wanted = scores.gather(-1, ids[:, None])[:, 0]
        found.append((tensors["rollout_log_probs"][row] - wanted)[mask].exp())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "agent"),
    [
        ("qwen2_5_vl", "looks_again"),
        pytest.param("qwen3_vl", "looks_again", marks=slow),
        pytest.param("smolvlm", "looks_again", marks=slow),
        pytest.param("llava_onevision", "single_turn", marks=slow),
    ],
)
async def test_rows_with_images_have_the_probabilities_of_a_plain_forward_pass(
    tmp_path: Path, family: str, agent: str
) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs it")
    if family == "llava_onevision":
        media_material.write_model(family, tmp_path, with_weights=True)
    else:
        vision_models.save(family, tmp_path)
    first, second = picture(1), picture(2, 130, 50)
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image", "image": first},
        {"type": "text", "text": " and "},
        {"type": "image", "image": second},
    ]
    prompts = [
        Prompt(messages=[{"role": "user", "content": parts}], uid="two"),
        Prompt(messages=[{"role": "user", "content": "Only words."}], uid="none"),
        Prompt(messages=[{"role": "user", "content": parts[:2]}], uid="one"),
    ]
    async with rollout.open_rollout(config_of(tmp_path, agent), tools=[look]) as runtime:
        batch = await runtime.generate(prompts, samples=2)
        (replica,) = runtime.engines.statistics()
    assert {t.outcome.value for t in batch.trajectories} <= {"completed", "length"}, [
        (t.outcome, t.cause) for t in batch.trajectories
    ]
    shown = {
        each.medium.digest: len(each.medium.content)
        for trajectory in batch.trajectories
        for each in trajectory.transcript.media
    }
    assert replica.media_bytes == sum(shown.values())
    found = ratios(tmp_path, batch)
    assert len(found) > 20
    assert abs(float(found.mean()) - 1) < 1e-3
    assert float((found - 1).abs().max()) < 1e-3
