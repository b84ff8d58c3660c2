"""What a configuration refuses, and in which words, whichever way the value came."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

from rollout.config import (
    AgentConfig,
    ChannelConfig,
    CustomEngine,
    EngineConfig,
    GatewayConfig,
    HttpEngine,
    InProcessPlacement,
    LengthsConfig,
    LimitsConfig,
    LocalProcessPlacement,
    ModelConfig,
    PlacementConfig,
    RayPlacement,
    RolloutConfig,
    RouterConfig,
    SamplingConfig,
    SandboxConfig,
    SchedulingConfig,
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
    from pathlib import Path

SAMPLING_KEYS = (
    "temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, "
    "greedy, max_new_tokens, stop_token_ids, top_log_probs"
)
TRANSFORMERS_KEYS = (
    "kind, replicas, min_replicas, start_timeout_s, stream_interval, sleep_between_batches, dtype, "
    "device, threads, max_running, max_queued, context_length"
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
    "integer_with_fraction": (
        "[engine]\nreplicas = 2.5\n",
        "engine: {replicas: 2.5}",
        "RolloutConfig(engine=TransformersEngine(replicas=2.5))",
        ("engine.replicas=2.5",),
        ("engine.replicas = 2.5: expected an integer ≥ 1",),
    ),
    "boolean_as_string": (
        '[sampling]\ngreedy = "false"\n',
        'sampling: {greedy: "false"}',
        'RolloutConfig(sampling=SamplingConfig(greedy="false"))',
        ('sampling.greedy="false"',),
        ("sampling.greedy = 'false': expected a boolean (true or false), got a string",),
    ),
    "not_a_number": (
        "[sampling]\ntemperature = nan\n",
        "sampling: {temperature: .nan}",
        'RolloutConfig(sampling=SamplingConfig(temperature=float("nan")))',
        ("sampling.temperature=nan",),
        ("sampling.temperature = nan: expected a number ≥ 0, got one that is not finite",),
    ),
    "string_for_list": (
        '[sampling]\nstop_token_ids = "abc"\n',
        "sampling: {stop_token_ids: abc}",
        'RolloutConfig(sampling=SamplingConfig(stop_token_ids="abc"))',
        ("sampling.stop_token_ids=abc",),
        ("sampling.stop_token_ids = 'abc': expected a list of token ids, got a string",),
    ),
    "template_variable_of_ours": (
        "[model.chat_template_kwargs]\ntools = 1\nenable_thinking = false\n",
        "model: {chat_template_kwargs: {tools: 1}}",
        'RolloutConfig(model=ModelConfig(chat_template_kwargs={"tools": 1}))',
        ("model.chat_template_kwargs.tools=1",),
        (
            "model.chat_template_kwargs.tools = 1: expected another name: every rendering has its "
            "own of this one",
        ),
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


@pytest.mark.parametrize("suffix", ["toml", "py"])
def test_config_with_many_faults_reports_all_at_once(suffix: str, tmp_path: Path) -> None:
    texts = {
        "toml": """
            seed = -1
            [sampling]
            tempratur = 0.5
            temperature = "0.7"
            greedy = "false"
            top_p = nan
            stop_token_ids = "abc"
            [validation_sampling]
            temperature = "0.7"
            [engine]
            replicas = 2.5
            [placement]
            kind = "in_process"
            [limits]
            tool_s = 100
            turn_s = 60
            generation_s = "1"
            foo = 1
            [lengths]
            turn = 9999
        """,
        "py": """
from rollout.config import *
sampling = SamplingConfig(
    tempratur=0.5, temperature="0.7", greedy="false", top_p=float("nan"), stop_token_ids="abc"
)
config = RolloutConfig(
    seed=-1,
    sampling=sampling,
    validation_sampling=SamplingConfig(temperature="0.7"),
    engine=TransformersEngine(replicas=2.5),
    placement=InProcessPlacement(),
    limits=LimitsConfig(tool_s=100, turn_s=60, generation_s="1", foo=1),
    lengths=LengthsConfig(turn=9999),
)
""",
    }
    path = tmp_path / f"config.{suffix}"
    path.write_text(texts[suffix])
    error = error_of(lambda: load_config(path))
    starts = [
        "engine.replicas = 2.5: expected an integer ≥ 1",
        "sampling.tempratur = 0.5: unknown key; did you mean 'temperature'?",
        "sampling.temperature = '0.7': expected a number ≥ 0, got a string",
        "sampling.top_p = nan: expected a number > 0 and ≤ 1, got one that is not finite",
        "sampling.greedy = 'false': expected a boolean (true or false), got a string",
        "sampling.stop_token_ids = 'abc': expected a list of token ids, got a string",
        "validation_sampling.temperature = '0.7': expected a number ≥ 0, got a string",
        "lengths.turn = 9999: expected at most lengths.response = 4096",
        "limits.foo = 1: unknown key; did you mean",
        "limits.generation_s = '1': expected a number > 0 or None, got a string",
        "limits.tool_s = 100: expected at most limits.turn_s = 60",
        "seed = -1: expected an integer ≥ 0 or None",
        "placement.kind = 'in_process': expected 'local_process' or 'ray'",
    ]
    assert len(error.faults) == len(starts)
    for line, start in zip(error.faults, starts, strict=True):
        assert line.startswith(start)
    assert str(error) == "\n  ".join((f"13 faults in the configuration {path}:", *error.faults))


def test_config_section_with_many_faults_lists_them_with_its_name() -> None:
    error = error_of(lambda: SamplingConfig(temperature="0.7", top_p=2, min_p=math.inf))  # type: ignore[arg-type]
    assert str(error) == (
        "3 faults in SamplingConfig:\n"
        "  sampling.temperature = '0.7': expected a number ≥ 0, got a string\n"
        "  sampling.top_p = 2: expected a number > 0 and ≤ 1\n"
        "  sampling.min_p = inf: expected a number from 0 to 1, got one that is not finite"
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
            f"kind 'sglang'? (known: {TRANSFORMERS_KEYS})",
        ),
        (
            {"placement": {"address": "auto"}},
            "placement.address = 'auto': unknown key for kind 'local_process'; did you mean "
            "kind 'ray'? (known: kind, python)",
        ),
        ({"sampling": {"temp": 1}}, "sampling.temp = 1: unknown key; did you mean 'temperature'?"),
        ({"sampling": {1: 2}}, "sampling.1 = 2: unknown key; did you mean"),
        (
            {"engine": {"knd": "sglang"}},
            "engine.knd = 'sglang': unknown key for kind 'transformers'; did you mean 'kind'?",
        ),
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
        ({"tools": None}, "tools = None: expected a mapping of keys to values"),
        (
            {"engine": "sglang"},
            "engine = 'sglang': expected a mapping of keys to values, got a string",
        ),
        ([1], "(top level) = [1]: expected a mapping of keys to values, got a list"),
        (
            {"engine": {"kind": "vllm", "replicas": "x"}},
            "engine.kind = 'vllm': expected one of 'transformers', 'simulated', 'sglang', "
            "'http', 'custom'",
        ),
        (
            {"placement": {"kind": ["ray"]}},
            "placement.kind = ['ray']: expected one of 'local_process', 'ray', 'in_process', "
            "got a list",
        ),
    ],
)
def test_config_section_of_wrong_shape_is_refused(values: Any, line: str) -> None:
    assert error_of(lambda: config_from_dict(values)).faults == (line,)


def test_config_placement_without_kind_is_a_local_process() -> None:
    config = config_from_dict({"placement": {"python": "python3"}, "engine": {"replicas": 2}})
    assert config.placement == LocalProcessPlacement(python="python3")
    assert config.engine == TransformersEngine(replicas=2)


class Foreign:
    """Of no type that a configuration knows; named alike in every process that collects tests."""

    def __repr__(self) -> str:
        return "Foreign()"


NUMBERS = (True, "1", b"1", [1], {}, Foreign(), 1 + 0j)
STRINGS = (1, 0.5, True, b"text", ["text"], {}, PurePosixPath("x"), "", "  ")
WRONG: dict[tuple[type, str], tuple[object, ...]] = {
    (ModelConfig, "path"): (None, *STRINGS),
    (ModelConfig, "revision"): STRINGS,
    (ModelConfig, "trust_remote_code"): (None, 0, 1, "true", "", [], 1.0),
    (ModelConfig, "chat_template"): STRINGS,
    (ModelConfig, "chat_template_kwargs"): (None, "x", [("a", 1)], {"a": math.nan}, {1: 2}),
    (TransformersEngine, "replicas"): (None, 0, -1, 1.0, 2.5, math.nan, *NUMBERS),
    (TransformersEngine, "start_timeout_s"): (None, 0, -1.0, math.nan, math.inf, *NUMBERS),
    (TransformersEngine, "stream_interval"): (None, 0, 1.0, *NUMBERS),
    (TransformersEngine, "dtype"): (None, "int8", "BFLOAT16", 16, True, ["auto"], ""),
    (TransformersEngine, "device"): (None, *STRINGS),
    (TransformersEngine, "context_length"): (0, 1.0, "8192", True),
    (SimulatedEngine, "scenario"): (None, "x", [("a", 1)], 3, {"a": Foreign()}, {1: 2}, {"a": {1}}),
    (SGLangEngine, "tensor_parallel"): (None, 0, 1.0, *NUMBERS),
    (SGLangEngine, "memory_fraction"): (None, 0, 1, 1.0, 1.5, -0.1, math.nan, *NUMBERS),
    (SGLangEngine, "server_args"): (None, "x", {"a": math.nan}, {"a": [1, {"b": b""}]}),
    (HttpEngine, "urls"): (
        None,
        "http://a",
        [],
        {"http://a"},
        ["a"],
        ["ftp://a"],
        ["http://"],
        ["http://a b"],
        ["http://a:99999"],
        ["http://a:x"],
        ["http://[::1"],
        [1],
    ),
    (CustomEngine, "core"): (
        None,
        1,
        "",
        "module",
        "module:",
        ":Class",
        "a.:B",
        "a b:C",
        "a:b:C",
        "1a:B",
    ),
    (RayPlacement, "gpus_per_replica"): (-1, math.inf, *NUMBERS),
    (LocalProcessPlacement, "python"): STRINGS,
    (RouterConfig, "strategy"): (
        None,
        "random",
        1,
        "",
        "consistent_hash",
        "a.b:C",
        ["round_robin"],
    ),
    (RouterConfig, "move_margin_s"): (None, -0.1, math.nan, math.inf, *NUMBERS),
    (RouterConfig, "weights"): (None, 1, "1", [0], [-1.0], [True], ["1"], [1.0, math.inf], {1: 2}),
    (RouterConfig, "move_margin"): (None, -1, 0.0, *NUMBERS),
    (SamplingConfig, "temperature"): (None, -0.1, math.nan, -math.inf, 10**400, *NUMBERS),
    (SamplingConfig, "top_p"): (None, 0, 1.1, math.nan, *NUMBERS),
    (SamplingConfig, "top_k"): (None, 0, -2, 1.0, *NUMBERS),
    (SamplingConfig, "min_p"): (None, -0.1, 1.1, *NUMBERS),
    (SamplingConfig, "repetition_penalty"): (None, 0, -1, *NUMBERS),
    (SamplingConfig, "greedy"): (None, 0, 1, "false", "", 0.0),
    (SamplingConfig, "max_new_tokens"): (0, -1, 1.0, *NUMBERS),
    (SamplingConfig, "stop_token_ids"): (None, "12", 1, {1}, [True], [-1], ["1"], [1.0], {1: 2}),
    (LengthsConfig, "prompt"): (None, 0, 1.0, *NUMBERS),
    (LengthsConfig, "turn"): (0, 1.0, *NUMBERS, 4097),
    (LimitsConfig, "tool_s"): (0, -1, math.nan, math.inf, *NUMBERS),
    (LimitsConfig, "cleanup_s"): (None, 0, math.inf),
    (AgentConfig, "history"): (None, "", "append", 1, True, ["append_only"]),
    (AgentConfig, "tokenization_check"): (None, "", "on", True, 1),
    (AgentConfig, "tokenization_ignore"): (None, "whitespace", ["identical"], [1], {"content"}),
    (AgentConfig, "name"): (None, *STRINGS),
    (AgentConfig, "max_assistant_turns"): (0, 1.0, *NUMBERS),
    (AgentConfig, "max_parallel_calls"): (None, 0, *NUMBERS),
    (ToolsConfig, "builtin"): (None, "python", ["pyton"], [1], {"python"}, ["finish", "finish"]),
    (SandboxConfig, "provider"): (None, "dokcer", 1, True, "inspect:"),
    (ToolsConfig, "search_url"): ("docs", "", 1, ["http://host"]),
    (ToolsConfig, "truncate_side"): (None, "centre", 1, False),
    (ToolsConfig, "max_response_length"): (None, 0, 1.0, *NUMBERS),
    (SchedulingConfig, "samples_per_prompt"): (None, 0, 1.0, *NUMBERS),
    (RolloutConfig, "seed"): (-1, 1.0, 2**63, 10**5000, -(10**5000), *NUMBERS),
    (GatewayConfig, "public_url"): ("http://[", "http://a:99999", "http://a?b", *STRINGS),
    (RolloutConfig, "sampling"): (None, {}, "x", TransformersEngine()),
    (RolloutConfig, "engine"): (None, {}, "sglang", InProcessPlacement(), TransformersEngine),
}


@pytest.mark.parametrize(("cls", "name"), WRONG, ids=lambda each: getattr(each, "__name__", each))
def test_config_value_of_wrong_type_or_range_is_never_coerced(cls: type, name: str) -> None:
    required: dict[type, dict[str, object]] = {
        HttpEngine: {"urls": ["http://a"]},
        CustomEngine: {"core": "a:B"},
    }
    section = getattr(cls, "section", "")
    path = f"{section}.{name}" if section else name
    for value in WRONG[cls, name]:
        values = required.get(cls, {}) | {name: value}
        (fault,) = error_of(lambda values=values: cls(**values)).faults
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
    ("limits", "lines"),
    [
        (
            {"turn_s": 30, "generation_s": 600, "tool_s": 60},
            [("generation_s", 600, "turn_s", 30), ("tool_s", 60, "turn_s", 30)],
        ),
        (
            {"trajectory_s": 899.5, "turn_s": 900},
            [("turn_s", 900, "trajectory_s", 899.5)],
        ),
        (
            {"batch_s": 100, "turn_s": None, "generation_s": 600, "trajectory_s": 3600},
            [
                ("generation_s", 600, "batch_s", 100),
                ("trajectory_s", 3600, "batch_s", 100),
            ],
        ),
        ({"tool_s": 1000}, [("tool_s", 1000, "turn_s", 900)]),
    ],
)
def test_config_limits_name_the_nearest_wider_limit_that_is_too_short(
    limits: dict[str, float | None], lines: list[tuple[str, float, str, float]]
) -> None:
    assert error_of(lambda: LimitsConfig(**limits)).faults == tuple(  # type: ignore[arg-type]
        f"limits.{inner} = {length}: expected at most limits.{outer} = {bound}"
        for inner, length, outer, bound in lines
    )


def test_config_limits_not_given_are_no_longer_than_the_wider_ones_that_are() -> None:
    limits = LimitsConfig(trajectory_s=700, turn_s=45)
    assert (limits.generation_s, limits.tool_s, limits.turn_s) == (45, 45, 45)
    assert (limits.trajectory_s, limits.batch_s) == (700, 7200)
    overridden = load_config(Path("conf/quickstart.py"), ["limits.batch_s=50"]).limits
    assert (overridden.tool_s, overridden.trajectory_s) == (50, 50)


def test_config_limits_of_equal_length_or_none_are_nested() -> None:
    limits = LimitsConfig(generation_s=5, tool_s=5, turn_s=5, trajectory_s=5, batch_s=5)
    assert limits.turn_s == 5.0
    assert LimitsConfig(generation_s=None, turn_s=None).turn_s is None


ENGINES: dict[str, EngineConfig] = {
    "transformers": TransformersEngine(),
    "simulated": SimulatedEngine(),
    "sglang": SGLangEngine(),
    "http": HttpEngine(urls=("http://a",)),
    "custom": CustomEngine(core="a:B"),
}
PLACEMENTS: dict[str, PlacementConfig] = {
    "in_process": InProcessPlacement(),
    "local_process": LocalProcessPlacement(),
    "ray": RayPlacement(),
}
ALLOWED = {
    *(("simulated", place) for place in PLACEMENTS),
    *(("custom", place) for place in PLACEMENTS),
    ("transformers", "local_process"),
    ("transformers", "ray"),
    ("sglang", "local_process"),
    ("sglang", "ray"),
    ("http", "in_process"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_config_engine_lives_only_where_it_is_allowed(engine: str, placement: str) -> None:
    def build() -> RolloutConfig:
        return RolloutConfig(engine=ENGINES[engine], placement=PLACEMENTS[placement])  # type: ignore[arg-type]

    if (engine, placement) in ALLOWED:
        assert build().engine.kind == engine
        return
    (line,) = error_of(build).faults
    assert line.startswith(f"placement.kind = {placement!r}: expected ")
    assert f"for engine.kind = {engine!r} (allowed: transformers with local_process, ray; " in line


def test_config_base_class_of_a_section_is_not_a_section() -> None:
    (line,) = error_of(lambda: RolloutConfig(placement=PlacementConfig())).faults  # type: ignore[arg-type]
    assert line == (
        "placement = PlacementConfig(): expected LocalProcessPlacement(...) or "
        "RayPlacement(...) or InProcessPlacement(...), got a value of type PlacementConfig"
    )


def test_config_long_value_is_cut_in_the_message() -> None:
    (line,) = error_of(lambda: SamplingConfig(temperature="1" * 500)).faults  # type: ignore[arg-type]
    assert line == (f"sampling.temperature = '{'1' * 78}…: expected a number ≥ 0, got a string")


class Unshowable:
    def __repr__(self) -> str:
        raise LookupError


def test_config_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value, shown in ((Unshowable(), "<Unshowable>"), (deep, "<list>"), (10**5000, "<int>")):
        (line,) = error_of(lambda value=value: LengthsConfig(prompt=value)).faults
        assert line.startswith(f"lengths.prompt = {shown}: expected an integer ≥ 1")


def test_config_array_is_a_fault_where_relations_look_at_it() -> None:
    array = np.array([1, 2])
    for name in ("transformers", "sglang"):
        engine = {"kind": name, "device": array}
        values = {"engine": engine, "agent": {"name": array}, "sandbox": {"network": array}}
        faults = error_of(lambda values=values: config_from_dict(values)).faults
        assert [line.partition(" = ")[0] for line in faults] == [
            "engine.device",
            "agent.name",
            "sandbox.network",
        ]


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


def test_config_defaults_pass_their_own_checks() -> None:
    for cls in (*(type(e) for e in ENGINES.values()), RayPlacement, *SECTIONS):
        fields = [f for f in attrs.fields(cls) if f.default is not attrs.NOTHING]
        fixed = {f.name: f.default for f in fields if not isinstance(f.default, attrs.Factory)}
        required = {HttpEngine: {"urls": ("http://a",)}, CustomEngine: {"core": "a:B"}}
        cls(**fixed | required.get(cls, {}))


SECTIONS = [type(getattr(RolloutConfig(), f.name)) for f in attrs.fields(RolloutConfig)][:-1]


def test_channel_engine_has_no_time_to_answer_a_heartbeat_is_a_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        ChannelConfig(heartbeat_s=2, heartbeat_timeout_s=2)
    assert "channel.heartbeat_timeout_s = 2.0: expected more than channel.heartbeat_s = 2" in str(
        caught.value
    )


def test_limit_too_long_for_a_given_one_names_that_and_not_those_derived_from_it() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"limits": {"tool_s": 100.0, "batch_s": 5.0}})
    assert "limits.tool_s = 100: expected at most limits.batch_s = 5" in str(caught.value)
