"""An engine's interpreter that lacks a package says which one, and what to install or set."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import rollout
from rollout.config import (
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SGLangEngine,
    SimulatedEngine,
)
from rollout.errors import EngineError
from rollout.testing import simulated_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def refusal(config: RolloutConfig) -> str:
    with pytest.raises(EngineError) as caught:
        async with rollout.open_rollout(config):
            pytest.fail("opened")
    return str(caught.value)


async def test_interpreter_without_sglang_is_named_with_what_to_set(tmp_path: Path) -> None:
    simulated_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    said = await refusal(
        RolloutConfig(engine=SGLangEngine(device="cpu"), model=ModelConfig(path=str(tmp_path)))
    )
    assert said.startswith(
        f"engine-0: engine.kind = 'sglang': SGLang cannot be imported by {sys.executable}, which "
        "runs the engine (No module named 'sglang"
    )
    assert (
        "; install it there, or set placement.python to the interpreter of the environment that "
        "has it"
    ) in said


async def test_interpreter_without_this_library_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    said = await refusal(
        RolloutConfig(engine=SimulatedEngine(), placement=LocalProcessPlacement(python=str(bare)))
    )
    assert "ended with exit code 1 while starting" in said
    assert said.endswith(
        "placement.python needs the package rollout in its environment: `pip install anyio "
        "msgspec`, and this library by `pip install --no-deps`"
    )
