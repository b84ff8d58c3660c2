"""What a driver takes for granted of its engines, and what becomes of those that know better."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

import rollout
from rollout import Prompt
from rollout.config import (
    CustomEngine,
    InProcessPlacement,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    SimulatedEngine,
)
from rollout.engine.core import EngineInfo
from rollout.engine.cores.simulated import simulated_core as simulated
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.engine.model_files import end_ids, model_fingerprint
from rollout.errors import EngineError
from rollout.testing import Scenario, simulated_tokenizer

pytestmark = pytest.mark.anyio

PROMPT = Prompt(messages=[{"role": "user", "content": "hi"}])


class ClaimingCore(SimulatedCore):
    """A core of somebody's own that says of itself what it is told to."""

    def __init__(self, claims: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._claims = claims

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, **self._claims)


def claiming(**claims: Any) -> RolloutConfig:
    engine = CustomEngine(core=f"{__name__}:ClaimingCore", options={"claims": claims})
    return Scenario().config(engine=engine, lengths=LengthsConfig(prompt=256, response=64))


async def refusal(config: RolloutConfig) -> str:
    with pytest.raises(EngineError) as caught:
        async with rollout.open_rollout(config):
            pytest.fail("opened")
    return str(caught.value)


REFUSED = "engine-0: no channel to the engine: the engine refused the connection: "
REMEDY = (
    "is another model than the engine's; expected the directory or hub name of that one "
    "('simulated' for engine.kind = 'simulated'), and the same files on the driver's machine and "
    "on the engine's"
)


async def test_simulated_engine_with_another_tokenizer_says_which_model_it_takes(
    tmp_path: Path,
) -> None:
    tokenizer = simulated_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path)
    config = RolloutConfig(
        engine=SimulatedEngine(),
        model=ModelConfig(path=str(tmp_path)),
        placement=InProcessPlacement(),
    )
    assert await refusal(config) == (
        f"{REFUSED}the driver's tokenizer knows 260 ids, the engine's model 259; "
        f"model.path = {str(tmp_path)!r} {REMEDY}"
    )


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("EOS_ID", 7, "the driver's end tokens are [258], the engine's [7]"),
        ("FINGERPRINT", "other", "the driver expects model simulated, the engine serves other"),
    ],
)
async def test_engine_of_another_model_is_refused_at_the_handshake(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, name, value)
    assert await refusal(Scenario().config()) == (
        f"{REFUSED}{reason}; model.path = 'simulated' {REMEDY}"
    )


@pytest.mark.parametrize(
    "claims",
    [
        {"fingerprint": "anything"},
        {"vocab_size": 0, "eos_ids": (), "fingerprint": ""},
    ],
    ids=str,
)
async def test_custom_engine_that_claims_nothing_wrong_serves(claims: dict[str, Any]) -> None:
    async with rollout.open_rollout(claiming(**claims)) as runtime:
        batch = await runtime.generate([PROMPT])
    assert [row.reason for row in batch.samples] == ["response"]


@pytest.mark.parametrize(
    "engine", [SimulatedEngine(), CustomEngine(core=f"{__name__}:ClaimingCore")], ids=["own", "any"]
)
async def test_tokenizer_alone_is_enough_for_an_engine_with_a_model_of_its_own(
    engine: Any, tmp_path: Path
) -> None:
    simulated_tokenizer().save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    if isinstance(engine, CustomEngine):
        engine = attrs.evolve(engine, options={"claims": {"fingerprint": "its own"}})
    lengths = LengthsConfig(prompt=256, response=64)
    model = ModelConfig(path=str(tmp_path))
    config = Scenario().config(engine=engine, model=model, lengths=lengths)
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate([PROMPT])
    assert [row.reason for row in batch.samples] == ["response"]


async def test_engine_that_ends_turns_otherwise_too_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "rollout")
    async with rollout.open_rollout(claiming(eos_ids=(7,))):
        pass
    assert "the tokenizer's end token 258 is not among the engine's (7,)" in caplog.text


def save(directory: Path, **files: Any) -> str:
    directory.mkdir()
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return str(directory)


def test_fingerprint_differs_with_the_model_and_not_with_its_copies(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "vocab_size": 50, "dtype": "float32"}
    one = save(tmp_path / "a", config=config)
    copy = save(tmp_path / "b", config={**config, "dtype": "bfloat16", "_name_or_path": "x"})
    other = save(tmp_path / "c", config={**config, "hidden_size": 16})
    assert model_fingerprint(one) == model_fingerprint(copy) != model_fingerprint(other)
    assert model_fingerprint(save(tmp_path / "d")) == ""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [9, 3]}}, (3, 9)),
        ({"config": {"text_config": {"eos_token_id": 4}}, "generation_config": {}}, (4,)),
        ({"config": {}}, ()),
    ],
)
def test_end_ids_are_those_of_the_generation_configuration_first(
    files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert end_ids(save(tmp_path / "m", **files)) == expected
