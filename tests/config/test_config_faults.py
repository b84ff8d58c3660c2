"""What a configuration refuses, and in which words, whichever way the value came."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from rollout.config import (
    AgentConfig,
    ChannelConfig,
    CustomEngine,
    GatewayConfig,
    HttpEngine,
    InProcessPlacement,
    LengthsConfig,
    LimitsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RayPlacement,
    RolloutConfig,
    RouterConfig,
    SamplingConfig,
    SandboxConfig,
    SGLangEngine,
    SimulatedEngine,
    ToolsConfig,
    TransformersEngine,
    config_from_dict,
    load_config,
)
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLING_KEYS = (
    "temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, "
    "greedy, max_new_tokens, stop_token_ids, top_log_probs"
)
#: name: (TOML, YAML, Python, overrides, lines). Every route gives the same lines.
NAMED_FAULTS: dict[str, tuple[str, str, str, tuple[str, ...], tuple[str, ...]]] = {
    "unknown_key": (
        "[sampling]\ntempratur = 0.5\n",
        "sampling: {tempratur: 0.5}",
        "RolloutConfig(sampling=SamplingConfig(tempratur=0.5))",
        ("sampling.tempratur=0.5",),
        (
            "sampling.tempratur = 0.5: unknown key; did you mean 'temperature'? "
            f"(known: {SAMPLING_KEYS})",
        ),
    ),
    "number_as_string": (
        '[sampling]\ntemperature = "0.7"\n',
        'sampling: {temperature: "0.7"}',
        'RolloutConfig(sampling=SamplingConfig(temperature="0.7"))',
        ('sampling.temperature="0.7"',),
        ("sampling.temperature = '0.7': expected a number ≥ 0, got a string",),
    ),
    "limits_wrong_way_round": (
        "[limits]\ngeneration_s = 60\ntool_s = 100\nturn_s = 60\n",
        "limits: {generation_s: 60, tool_s: 100, turn_s: 60}",
        "RolloutConfig(limits=LimitsConfig(generation_s=60, tool_s=100, turn_s=60))",
        ("limits.generation_s=60", "limits.tool_s=100", "limits.turn_s=60"),
        ("limits.tool_s = 100: expected at most limits.turn_s = 60",),
    ),
    "pair_not_allowed": (
        '[placement]\nkind = "in_process"\n',
        "placement: {kind: in_process}",
        "RolloutConfig(placement=InProcessPlacement())",
        ("placement.kind=in_process",),
        (
            "placement.kind = 'in_process': expected 'local_process' or 'ray' for engine.kind = "
            "'transformers' (allowed: transformers with local_process, ray; simulated with "
            "in_process, local_process, ray; sglang with local_process, ray; http with "
            "in_process; custom with in_process, local_process, ray)",
        ),
    ),
}


def error_of(build: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build()
    return caught.value


@pytest.mark.parametrize("case", NAMED_FAULTS.values(), ids=NAMED_FAULTS.keys())
def test_config_named_fault_reads_alike_on_every_route(
    case: tuple[str, str, str, tuple[str, ...], tuple[str, ...]], tmp_path: Path
) -> None:
    toml, yaml, python, overrides, lines = case
    files = {
        "config.toml": toml,
        "config.yaml": yaml,
        "config.py": f"from rollout.config import *\nconfig = {python}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text)
        error = error_of(lambda path=path: load_config(path))
        assert error.faults == lines
        assert str(error) == f"1 fault in the configuration {path}:\n  {lines[0]}"
    empty = tmp_path / "empty.toml"
    empty.touch()
    error = error_of(lambda: load_config(empty, overrides))
    assert error.faults == lines
    assert str(error) == f"1 fault in the configuration {empty} with overrides:\n  {lines[0]}"
    assert error_of(lambda: eval(python)).faults == lines


def test_config_with_many_faults_reports_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        """
from rollout.config import *
config = RolloutConfig(
    seed=-1,
    model=ModelConfig(path=3),
    sampling=SamplingConfig(tempratur=0.5, greedy="false", stop_token_ids="abc"),
    engine=TransformersEngine(replicas=2.5),
    placement=InProcessPlacement(),
    limits=LimitsConfig(tool_s=100, turn_s=60, generation_s="1"),
    lengths=LengthsConfig(turn=9999),
)
"""
    )
    error = error_of(lambda: load_config(path))
    starts = [
        "model.path = 3: expected a non-empty string",
        "engine.replicas = 2.5: expected an integer ≥ 1",
        "sampling.tempratur = 0.5: unknown key; did you mean 'temperature'?",
        "sampling.greedy = 'false': expected a boolean (true or false), got a string",
        "sampling.stop_token_ids = 'abc': expected a list of token ids, got a string",
        "lengths.turn = 9999: expected at most lengths.response = 4096",
        "limits.generation_s = '1': expected a number > 0 or None, got a string",
        "limits.tool_s = 100: expected at most limits.turn_s = 60",
        "seed = -1: expected an integer ≥ 0 or None",
        "placement.kind = 'in_process': expected 'local_process' or 'ray'",
    ]
    assert len(error.faults) == len(starts)
    for line, start in zip(error.faults, starts, strict=True):
        assert line.startswith(start)
    assert str(error) == "\n  ".join((f"10 faults in the configuration {path}:", *error.faults))


def test_config_section_with_many_faults_lists_them_with_its_name() -> None:
    error = error_of(lambda: SamplingConfig(temperature="0.7", top_p=2))  # type: ignore[arg-type]
    assert str(error) == (
        "2 faults in SamplingConfig:\n"
        "  sampling.temperature = '0.7': expected a number ≥ 0, got a string\n"
        "  sampling.top_p = 2: expected a number > 0 and ≤ 1"
    )


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (
            {"temperature": 0.3},
            "temperature = 0.3: unknown key; did you mean 'sampling.temperature' or "
            "'validation_sampling.temperature'?",
        ),
        ({"smpling": {}}, "smpling = {}: unknown key; did you mean 'sampling'?"),
        (
            {"engine": {"memory_fraction": 0.5}},
            "engine.memory_fraction = 0.5: unknown key for kind 'transformers'; did you mean "
            "kind 'sglang'? (known: kind, ",
        ),
        (
            {"placement": {"address": "auto"}},
            "placement.address = 'auto': unknown key for kind 'local_process'; did you mean "
            "kind 'ray'? (known: kind, python)",
        ),
        ({"sampling": {1: 2}}, "sampling.1 = 2: unknown key; did you mean"),
    ],
)
def test_config_unknown_key_names_the_nearest(key: dict[str, Any], line: str) -> None:
    faults = error_of(lambda: config_from_dict(key)).faults
    assert len(faults) == 1
    assert faults[0].startswith(line)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sampling": 3}, "sampling = 3: expected a mapping of keys to values, got a number"),
        ([1], "(top level) = [1]: expected a mapping of keys to values, got a list"),
        (
            {"engine": {"kind": "vllm", "replicas": "x"}},
            "engine.kind = 'vllm': expected one of 'transformers', 'simulated', 'sglang', "
            "'http', 'custom'",
        ),
    ],
)
def test_config_section_of_wrong_shape_is_refused(values: Any, line: str) -> None:
    assert error_of(lambda: config_from_dict(values)).faults == (line,)


def test_config_placement_without_kind_is_a_local_process() -> None:
    config = config_from_dict({"placement": {"python": "python3"}, "engine": {"replicas": 2}})
    assert config.placement == LocalProcessPlacement(python="python3")
    assert config.engine == TransformersEngine(replicas=2)


NUMBERS = (True, "1", [1], {})
STRINGS = (1, True, b"text", ["text"], "", "  ")
#: One field for each kind of values; `tests/golden/public_surface.txt` has those of every field.
WRONG: dict[tuple[type, str], tuple[object, ...]] = {
    (ModelConfig, "path"): (None, *STRINGS),
    (ModelConfig, "chat_template"): STRINGS,
    (ModelConfig, "chat_template_kwargs"): (None, "x", {"a": math.nan}, {1: 2}, {"tools": 1}),
    (TransformersEngine, "replicas"): (None, 0, 2.5, math.nan, *NUMBERS),
    (TransformersEngine, "dtype"): (None, "int8", 16, ["auto"]),
    (TransformersEngine, "context_length"): (0, 1.0, "8192", True),
    (SimulatedEngine, "scenario"): (None, "x", {"a": object()}, {1: 2}, {"a": {1}}),
    (SGLangEngine, "memory_fraction"): (None, 0, 1, -0.1, math.nan, *NUMBERS),
    (HttpEngine, "urls"): (None, "http://a", [], ["ftp://a"], ["http://a:99999"], [1]),
    (CustomEngine, "core"): (None, 1, "module", "module:", "a b:C", "a:b:C"),
    (RayPlacement, "gpus_per_replica"): (-1, math.inf, *NUMBERS),
    (RouterConfig, "strategy"): (None, "random", "a.b:C", ["round_robin"]),
    (RouterConfig, "weights"): (None, 1, [0], [-1.0], ["1"], [1.0, math.inf]),
    (SamplingConfig, "temperature"): (None, -0.1, math.nan, -math.inf, *NUMBERS),
    (SamplingConfig, "top_p"): (None, 0, 1.1, *NUMBERS),
    (SamplingConfig, "top_k"): (None, 0, -2, 1.0, *NUMBERS),
    (SamplingConfig, "greedy"): (None, 1, "false", 0.0),
    (SamplingConfig, "stop_token_ids"): (None, "12", {1}, [True], [-1], ["1"]),
    (LengthsConfig, "turn"): (0, 1.0, *NUMBERS, 4097),
    (LimitsConfig, "cleanup_s"): (None, 0, math.inf),
    (AgentConfig, "history"): (None, "append", ["append_only"]),
    (AgentConfig, "tokenization_ignore"): (None, "whitespace", ["identical"], [1]),
    (ToolsConfig, "builtin"): (None, "python", ["pyton"], [1], ["finish", "finish"]),
    (ToolsConfig, "search_url"): ("docs", "", 1, ["http://host"]),
    (SandboxConfig, "provider"): (None, "dokcer", 1, "inspect:"),
    (GatewayConfig, "public_url"): ("http://[", "http://a:99999", "http://a?b", *STRINGS),
    (RolloutConfig, "seed"): (-1, 1.0, 2**63, *NUMBERS),
    (RolloutConfig, "sampling"): (None, {}, "x", TransformersEngine()),
    (RolloutConfig, "engine"): (None, "sglang", InProcessPlacement(), TransformersEngine),
}


@pytest.mark.parametrize(("cls", "name"), WRONG, ids=lambda each: getattr(each, "__name__", each))
def test_config_value_of_wrong_type_or_range_is_never_coerced(cls: type, name: str) -> None:
    section = getattr(cls, "section", "")
    path = f"{section}.{name}" if section else name
    for value in WRONG[cls, name]:
        (fault,) = error_of(lambda value=value: cls(**{name: value})).faults
        assert fault.startswith((f"{path} = ", f"{path}[", f"{path}.")), value
        assert ": expected " in fault, value


def test_config_faulty_item_is_named_by_its_index() -> None:
    assert error_of(lambda: SamplingConfig(stop_token_ids=[1, "2", -3])).faults == (  # type: ignore[arg-type,list-item]
        "sampling.stop_token_ids[1] = '2': expected an integer from 0 to 2147483647, got a string",
        "sampling.stop_token_ids[2] = -3: expected an integer from 0 to 2147483647",
    )
    assert error_of(lambda: CustomEngine(core="a:B", options={"x": [{"y": b""}]})).faults == (
        "engine.options.x[0].y = b'': expected plain data (None, booleans, finite numbers, "
        "strings, lists and mappings with string keys)",
    )


def test_config_missing_required_key_is_reported_beside_other_faults() -> None:
    assert error_of(lambda: config_from_dict({"engine": {"kind": "http", "foo": 1}})).faults[1] == (
        "engine.urls: missing; expected a list of one http or https URL or more"
    )
    assert error_of(CustomEngine).faults == (
        "engine.core: missing; expected a string like 'package.module:Class'",
    )


def test_config_number_of_http_replicas_follows_from_the_urls() -> None:
    assert HttpEngine(urls=["http://a", "https://b:1/v1"]).replicas == 2  # type: ignore[arg-type]
    assert HttpEngine(urls=("http://a",), replicas=1).replicas == 1
    assert error_of(lambda: HttpEngine(urls=("http://a",), replicas=3)).faults == (
        "engine.replicas = 3: expected 1, one for each of engine.urls (or leave it out)",
    )


@pytest.mark.parametrize(
    ("limits", "faults"),
    [
        (
            {"turn_s": 30, "generation_s": 600, "tool_s": 60},
            (
                "limits.generation_s = 600: expected at most limits.turn_s = 30",
                "limits.tool_s = 60: expected at most limits.turn_s = 30",
            ),
        ),
        (
            {"batch_s": 100, "turn_s": None, "generation_s": 600},
            ("limits.generation_s = 600: expected at most limits.batch_s = 100",),
        ),
        # Those that follow from the one that is given are no faults.
        (
            {"tool_s": 100.0, "batch_s": 5.0},
            ("limits.tool_s = 100: expected at most limits.batch_s = 5",),
        ),
    ],
)
def test_config_limits_name_the_nearest_wider_limit_that_is_too_short(
    limits: dict[str, Any], faults: tuple[str, ...]
) -> None:
    assert error_of(lambda: LimitsConfig(**limits)).faults == faults


def test_config_limits_not_given_are_no_longer_than_the_wider_ones_that_are() -> None:
    limits = LimitsConfig(trajectory_s=700, turn_s=45)
    assert (limits.generation_s, limits.tool_s, limits.turn_s) == (45, 45, 45)
    assert (limits.trajectory_s, limits.batch_s) == (700, 7200)
    overridden = load_config(Path("conf/quickstart.py"), ["limits.batch_s=50"]).limits
    assert (overridden.tool_s, overridden.trajectory_s) == (50, 50)


def test_config_heartbeat_longer_than_its_timeout_is_a_fault() -> None:
    assert (
        error_of(lambda: ChannelConfig(heartbeat_s=2, heartbeat_timeout_s=2))
        .faults[0]
        .startswith("channel.heartbeat_timeout_s = 2.0: expected more than channel.heartbeat_s = 2")
    )


def test_config_long_value_is_cut_in_the_message() -> None:
    (line,) = error_of(lambda: SamplingConfig(temperature="1" * 500)).faults  # type: ignore[arg-type]
    assert line == (f"sampling.temperature = '{'1' * 78}…: expected a number ≥ 0, got a string")


def test_config_values_are_kept_in_one_form() -> None:
    sampling = SamplingConfig(temperature=1, stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert type(sampling.temperature) is float
    assert sampling.stop_token_ids == (1, 2)
    options = {"a": (1, {"b": [2]})}
    engine = CustomEngine(core="a.b:C", options=options)
    options["a"][1]["b"].append(3)  # type: ignore[index]
    assert engine.options == {"a": [1, {"b": [2]}]}


def test_config_evolved_section_is_checked_again() -> None:
    with pytest.raises(
        ConfigError, match=r"sampling.top_k = 0: expected an integer from 1 to 2147483647, or -1"
    ):
        attrs.evolve(SamplingConfig(), top_k=0)
