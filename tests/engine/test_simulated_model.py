"""The model of a simulated engine: taken where none is given, another one refused when built."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  (as Ray may send a configuration)
from typing import TYPE_CHECKING, Any

import attrs
import pytest

import rollout
from rollout import ConfigError, Prompt
from rollout.config import (
    EMBEDDED_MODEL,
    InProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SGLangEngine,
    TransformersEngine,
    config_from_dict,
    dump_config,
)
from rollout.testing import SimulatedEngine, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout import RolloutBatch

PROMPT = Prompt(messages=[{"role": "user", "content": "hi"}])


BUILT: dict[str, Callable[[], RolloutConfig]] = {
    "class": lambda: RolloutConfig(engine=SimulatedEngine(), placement=InProcessPlacement()),
    "evolved": lambda: attrs.evolve(
        RolloutConfig(), engine=SimulatedEngine(), placement=InProcessPlacement()
    ),
}


async def generate(config: RolloutConfig) -> RolloutBatch:
    async with rollout.open_rollout(config) as runtime:
        batch: RolloutBatch = await runtime.generate([PROMPT])
    return batch


@pytest.mark.parametrize("built", BUILT)
def test_simulated_engine_without_a_model_takes_its_own(built: str) -> None:
    config = BUILT[built]()
    assert config.model.path == "simulated"
    for again in (
        config_from_dict(dump_config(config)),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert again == config
    batch = run_virtual(generate, config)
    assert [row.outcome for row in batch.samples] == ["completed"]


def test_other_engine_in_its_place_takes_the_usual_model_again() -> None:
    config = attrs.evolve(RolloutConfig(engine=SimulatedEngine()), engine=TransformersEngine())
    assert config == RolloutConfig()
    assert config.model.path == EMBEDDED_MODEL


def test_simulated_engine_with_another_model_is_refused_when_built() -> None:
    path = EMBEDDED_MODEL
    said = (
        f"model.path = {path!r}: expected 'simulated' for engine.kind = 'simulated', whose ids are "
        "bytes (or leave it out)"
    )
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(engine=SimulatedEngine(), model=ModelConfig(path=path))
    assert caught.value.faults == (said,)
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"engine": {"kind": "simulated"}, "model": {"path": path}})
    assert caught.value.faults == (said,)


@pytest.mark.parametrize("engine", [TransformersEngine(), SGLangEngine()], ids=["ours", "sglang"])
def test_simulated_model_with_an_engine_that_loads_weights_is_refused_when_built(
    engine: Any,
) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(engine=engine, model=ModelConfig(path="simulated"))
    assert caught.value.faults == (
        "model.path = 'simulated': expected a directory, a hub name or "
        f"'{EMBEDDED_MODEL}' for engine.kind = {engine.kind!r}, which needs a model with files",
    )
