"""What `dump_config` writes, `config_from_dict` reads: for every configuration there is."""

from __future__ import annotations

import copy
import json
from typing import Any

import attrs
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import (
    AgentConfig,
    ChannelConfig,
    CustomEngine,
    GroupPolicy,
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
    SchedulingConfig,
    SGLangEngine,
    SimulatedEngine,
    ToolsConfig,
    TransformersEngine,
    config_from_dict,
    dump_config,
)
from rollout.config.placements import ALLOWED_PLACEMENTS
from rollout.config.section_type import given_fields

counts = st.integers(1, 2**40)
texts = st.text(min_size=1, max_size=8).filter(str.strip)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
dtypes = st.sampled_from(["auto", "bfloat16", "float16", "float32"])
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(max_size=4)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
mappings = st.dictionaries(st.text(max_size=4), plain, max_size=2)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def section(cls: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of `cls` with some of `fields` given and the others at their defaults."""
    required = {f.name for f in attrs.fields(cls) if f.default is attrs.NOTHING}
    assert set(fields) <= {f.name for f in attrs.fields(cls)}
    given_always = {name: fields.pop(name) for name in required}
    return st.fixed_dictionaries(given_always, optional=fields).map(lambda kw: cls(**kw))


common = {"replicas": counts, "start_timeout_s": positive, "stream_interval": counts}
engines = {
    "transformers": section(
        TransformersEngine,
        dtype=dtypes,
        device=texts,
        threads=counts,
        max_running=counts,
        max_queued=counts,
        context_length=optional(counts),
        **common,
    ),
    "simulated": section(SimulatedEngine, scenario=mappings, **common),
    "sglang": section(
        SGLangEngine,
        tensor_parallel=st.just(1),
        memory_fraction=st.floats(0.01, 0.99),
        context_length=optional(counts),
        dtype=dtypes,
        server_args=mappings,
        **common,
    ),
    "http": section(
        HttpEngine,
        urls=st.lists(st.sampled_from(["http://a:1", "https://b/v1"]), min_size=1, max_size=3),
        start_timeout_s=positive,
    ),
    "custom": section(
        CustomEngine, core=st.sampled_from(["a:B", "a.b_c:D9"]), options=mappings, **common
    ),
}
placements = {
    "in_process": section(InProcessPlacement),
    "local_process": section(LocalProcessPlacement, python=optional(texts)),
    "ray": section(
        RayPlacement,
        python=optional(texts),
        address=optional(texts),
        gpus_per_replica=st.floats(0.001, 1) | st.integers(1, 16).map(float),
        cpus_per_replica=st.just(0.0) | st.floats(0.001, 8),
    ),
}


def sampling_of(kind: str) -> st.SearchStrategy[Any]:
    """SGLang takes no repetition penalty."""
    penalties = {} if kind == "sglang" else {"repetition_penalty": positive}
    return section(
        SamplingConfig,
        temperature=st.floats(0, 9),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(1, 2**31 - 1) | st.just(-1),
        min_p=st.floats(0, 1),
        greedy=st.booleans(),
        max_new_tokens=optional(counts),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
        **penalties,
    )


@st.composite
def limits(draw: st.DrawFn) -> LimitsConfig:
    names = ("generation_s", "turn_s", "trajectory_s", "batch_s")
    nested = dict(zip(names, sorted(draw(st.tuples(*[positive] * 4))), strict=True))
    left_open = draw(st.sets(st.sampled_from(names)))
    kept: dict[str, Any] = {n: None if n in left_open else s for n, s in nested.items()}
    return LimitsConfig(tool_s=nested["generation_s"], reward_s=draw(optional(positive)), **kept)


@st.composite
def configs(draw: st.DrawFn) -> RolloutConfig:
    kind = draw(st.sampled_from(sorted(engines)))
    place = draw(st.sampled_from(ALLOWED_PLACEMENTS[kind]))
    response = draw(counts)
    engine = draw(engines[kind])
    sampling = sampling_of(kind)
    return RolloutConfig(
        model=draw(
            section(
                ModelConfig,
                path=st.just("simulated") if kind == "simulated" else texts,
                trust_remote_code=st.booleans(),
                chat_template_kwargs=mappings,
            )
        ),
        engine=engine,
        placement=draw(placements[place]),
        router=draw(
            section(
                RouterConfig,
                strategy=st.sampled_from(["estimated_seconds", "least_requests", "round_robin"]),
                move_margin=st.integers(0, 99),
                move_margin_s=st.floats(0, 9),
            )
        ),
        sampling=draw(sampling),
        validation_sampling=draw(sampling),
        lengths=LengthsConfig(response=response, turn=draw(optional(st.integers(1, response)))),
        limits=draw(limits()),
        channel=draw(
            section(
                ChannelConfig,
                heartbeat_s=st.floats(0.01, 1.0),
                heartbeat_timeout_s=st.floats(2.5, 60.0),
                reconnect_s=st.floats(0.0, 60.0),
                stream_interval_s=st.floats(0.01, 1.0),
                max_frame_bytes=st.integers(4096, 2**32 - 1),
            )
        ),
        agent=draw(section(AgentConfig, name=texts, interaction=optional(texts))),
        tools=draw(
            section(
                ToolsConfig,
                truncate_side=st.sampled_from(["left", "right", "middle"]),
                builtin=st.lists(st.sampled_from(["calculator", "finish", "python"]), unique=True),
            )
        ),
        scheduling=draw(section(SchedulingConfig, max_in_flight=counts)),
        seed=draw(optional(st.integers(0, 2**63 - 1))),
    )


@given(configs())
def test_config_dumped_as_json_and_read_again_is_equal(config: RolloutConfig) -> None:
    dumped = dump_config(config)
    assert config_from_dict(dumped) == config
    text = json.dumps(dumped, allow_nan=False)
    assert json.loads(text) == dumped  # lists, not tuples; string keys
    assert dump_config(config_from_dict(json.loads(text))) == dumped
    copied = copy.deepcopy(config)
    assert copied == config
    assert given_fields(copied.sampling) == given_fields(config.sampling)


def test_copied_policy_leaves_to_the_configuration_what_it_does_not_say() -> None:
    base = GroupPolicy(surplus="carry", oversample=2.0)
    policy = copy.deepcopy(GroupPolicy(refill_failed=True))
    assert policy.over(base) == GroupPolicy(surplus="carry", oversample=2.0, refill_failed=True)


def test_config_dump_holds_plain_data_and_kinds() -> None:
    dumped = dump_config(RolloutConfig(sampling=SamplingConfig(stop_token_ids=(1, 2))))
    assert list(dumped) == [field.name for field in attrs.fields(RolloutConfig)]
    assert dumped["engine"]["kind"] == "transformers"
    assert dumped["placement"] == {"kind": "local_process", "python": None}
    assert dumped["sampling"]["stop_token_ids"] == [1, 2]
    assert type(dumped["sampling"]["stop_token_ids"]) is list
    assert "kind" not in dumped["sampling"]
    assert config_from_dict(yaml.safe_load(yaml.safe_dump(dumped))) == config_from_dict(dumped)


def test_config_dump_shares_nothing_with_the_config() -> None:
    config = RolloutConfig(engine=SimulatedEngine(scenario={"a": {"b": [1]}}))
    dumped = dump_config(config)
    dumped["engine"]["scenario"]["a"]["b"].append(2)
    dumped["sampling"]["stop_token_ids"].append(2)
    assert config == RolloutConfig(engine=SimulatedEngine(scenario={"a": {"b": [1]}}))
