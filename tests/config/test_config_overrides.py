"""Overrides on top of a configuration, whichever way it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rollout.config import (
    HttpEngine,
    InProcessPlacement,
    RayPlacement,
    SGLangEngine,
    SimulatedEngine,
    TransformersEngine,
    load_config,
)
from rollout.config.overrides import override_value
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

BASES = {
    "base.toml": '[engine]\nkind = "transformers"\nreplicas = 3\n[sampling]\ntemperature = 0.5\n',
    "base.yaml": "engine: {replicas: 3}\nsampling: {temperature: 0.5}\n",
    "base.py": (
        "from rollout.config import *\n"
        "config = RolloutConfig(\n"
        "    engine=TransformersEngine(replicas=3), sampling=SamplingConfig(temperature=0.5)\n"
        ")\n"
    ),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.py"
    path.write_text(BASES["base.py"])
    return path


def faults_of(base: Path, *overrides: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides)
    return caught.value.faults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7),
        ("true", True),
        ("True", "True"),
        ('"0.7"', "0.7"),
        ("'None'", "None"),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ('{a = 1, b = "x"}', {"a": 1, "b": "x"}),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("a=b", "a=b"),
        ("1\nseed = 2", "1\nseed = 2"),
    ],
)
def test_config_override_value_is_toml_or_a_bare_string(text: str, value: object) -> None:
    assert override_value(text) == value
    assert type(override_value(text)) is type(value)


@pytest.mark.parametrize("name", BASES)
def test_config_overrides_change_only_what_they_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(BASES[name])
    config = load_config(
        path, ("sampling.top_k=5", " sampling.top_p = 0.9 ", "seed=1", "model.path=my/model")
    )
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 5, 0.9)
    assert (config.seed, config.model.path, config.engine.replicas) == (1, "my/model", 3)


def test_config_override_of_kind_resets_its_section(base: Path) -> None:
    config = load_config(base, ("engine.threads=2", "engine.kind=simulated"))
    assert config.engine == SimulatedEngine()
    later = load_config(
        base, ("engine.kind=sglang", "engine.tensor_parallel=2", "placement.kind=ray")
    )
    assert later.engine == SGLangEngine(tensor_parallel=2)
    assert later.placement == RayPlacement()


def test_config_override_with_the_same_kind_resets_nothing(base: Path) -> None:
    config = load_config(base, ("engine.kind=transformers", "engine.threads=2"))
    assert config.engine == TransformersEngine(replicas=3, threads=2)


def test_config_override_of_a_section_replaces_it(base: Path) -> None:
    config = load_config(
        base,
        ('engine={kind = "http", urls = ["http://a", "http://b"]}', "placement.kind=in_process"),
    )
    assert config.engine == HttpEngine(urls=("http://a", "http://b"))
    assert config.placement == InProcessPlacement()
    assert load_config(base, ("sampling={top_k = 2}",)).sampling.temperature == 1.0


def test_config_override_of_urls_moves_the_replicas(tmp_path: Path) -> None:
    path = tmp_path / "c.py"
    path.write_text(
        "from rollout.config import *\n"
        "config = RolloutConfig(\n"
        "    engine=HttpEngine(urls=['http://a', 'http://b']), placement=InProcessPlacement()\n"
        ")\n"
    )
    assert load_config(path).engine.replicas == 2
    assert load_config(path, ['engine.urls=["http://c"]']).engine.replicas == 1


def test_config_overrides_reach_into_mappings(base: Path) -> None:
    config = load_config(
        base,
        (
            "engine.kind=simulated",
            "engine.scenario.turns=3",
            "engine.scenario.delay.mean=0.5",
            "engine.scenario.text=a b",
            "engine.scenario.none=None",
        ),
    )
    assert config.engine == SimulatedEngine(
        scenario={"turns": 3, "delay": {"mean": 0.5}, "text": "a b", "none": None}
    )
    sglang = load_config(base, ("engine.kind=sglang", "engine.server_args.log_level=info"))
    assert sglang.engine == SGLangEngine(server_args={"log_level": "info"})


def test_config_overrides_report_all_faults_with_those_of_the_file(base: Path) -> None:
    faults = faults_of(
        base,
        "sampling.temperatur=0.1",
        'sampling.top_p="0.7"',
        "sampling.greedy=True",
        "engin.replicas=2",
        "seed",
        "=1",
        "a..b=1",
        3,
        "sampling.temperature.x=1",
    )
    expected = "expected path=value, such as sampling.temperature=0.7"
    starts = [
        "engin = {'replicas': 2}: unknown key; did you mean 'engine'?",
        "sampling.temperatur = 0.1: unknown key; did you mean 'temperature'?",
        "sampling.top_p = '0.7': expected a number > 0 and ≤ 1, got a string",
        "sampling.greedy = 'True': expected a boolean (true or false), got a string",
        f"override = 'seed': {expected}",
        f"override = '=1': {expected}",
        f"override = 'a..b=1': {expected}",
        f"override = 3: {expected}, got a number",
        "sampling.temperature.x = 1: no key can stand below sampling.temperature = 0.5",
    ]
    assert len(faults) == len(starts)
    assert all(line.startswith(start) for line, start in zip(faults, starts, strict=True))


def test_config_overrides_given_as_one_string_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, "seed=1")
    assert caught.value.faults == (
        "overrides = 'seed=1': expected a list of path=value, got a string",
    )


def test_config_override_can_mend_a_fault_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("seed = 'x'\n")
    assert load_config(path, ("seed=3",)).seed == 3
