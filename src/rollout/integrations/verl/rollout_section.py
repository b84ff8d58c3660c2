"""The rollout section of a trainer's configuration of verl, in our words."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import attrs

from rollout.config import RolloutConfig, config_from_dict
from rollout.config.checks import Text
from rollout.config.limits_section import WIDER_LIMITS
from rollout.config.section_type import Section, annotations_of
from rollout.errors import ConfigError
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.verl.multi_turn import load_verl_multi_turn

ROLLOUT = "actor_rollout_ref.rollout"
#: Where verl leaves room for what it has no key for.
CUSTOM = f"{ROLLOUT}.custom.rollout"
CORE = "rollout.integrations.verl.client_core:ClientCore"
#: verl has no limits of time: these are wide enough for long answers, and end what hangs.
LIMITS = {
    "generation_s": 3600.0,
    "tool_s": 600.0,
    "turn_s": 4500.0,
    "trajectory_s": 14400.0,
    "batch_s": 14400.0,
    "reward_s": 600.0,
}
#: Limits on agents that verl has none of.
NO_LIMITS = {
    "max_tool_calls": None,
    "max_consecutive_errors": None,
    "max_consecutive_invalid_calls": None,
}
#: Rows of a batch that run at once; verl runs all of them.
MAX_IN_FLIGHT = 8192


@attrs.frozen(kw_only=True)
class AdapterOptions(Section):
    """What verl has no key for: ``actor_rollout_ref.rollout.custom.rollout``."""

    section = CUSTOM
    #: The event loop of agents, tools and rewards. On "trio", code for asyncio runs on an asyncio
    #: thread.
    backend: Literal["asyncio", "trio"] = "asyncio"
    #: What runs rows of ``tool_agent`` and ``single_turn_agent``: this library's agents, or verl's
    #: own classes.
    agent_loops: Literal["rollout", "verl"] = "rollout"
    #: A YAML file of simulated users.
    interaction_config_path: Text | None = None
    #: What becomes of rows that verl cannot represent.
    rows: RowPolicy = attrs.field(factory=lambda: RowPolicy(segments="last"))


class Model(NamedTuple):
    """What the driver needs to know of the model.

    Attributes:
        path: Its directory.
        tokenizer_path: That of its tokenizer.
        chat_template_path: A file with the template; None: the tokenizer's own.
    """

    path: str
    tokenizer_path: str
    trust_remote_code: bool
    chat_template_path: str | None
    chat_template_kwargs: Mapping[str, Any]
    vocab_size: int
    eos_ids: tuple[int, ...]


class Settings(NamedTuple):
    """A configuration of verl, in our words.

    Attributes:
        has_own_engines: Whether engines of ours generate, and not verl's servers.
    """

    options: AdapterOptions
    config: RolloutConfig
    has_own_engines: bool


def settings_of(config: Mapping[str, Any], model: Model) -> Settings:
    """What verl's configuration says about a rollout; see ``docs/trainers/verl.md``.

    Args:
        config: The whole, as plain containers, resolved.

    Raises:
        ConfigError: A key says what cannot be done here; it is named.
    """
    section = config["actor_rollout_ref"]["rollout"]
    custom = _custom(section)
    options = _options(custom)
    _refuse(config, section, options)
    given = {name: custom[name] for name in custom if name not in annotations_of(AdapterOptions)}
    translated = _translated(section, model)
    if "engine" in given:
        translated["model"]["path"] = model.path
        del translated["engine"], translated["placement"]
        for name in ("max_in_flight", "adaptive_admission"):
            del translated["scheduling"][name]
    translated["limits"] = _limits(given.get("limits"))
    for name, values in given.items():
        own = translated.get(name)
        translated[name] = {**own, **values} if own and isinstance(values, Mapping) else values
    try:
        return Settings(options, config_from_dict(translated), "engine" in given)
    except ConfigError as error:
        raise ConfigError(f"{ROLLOUT}: {error}") from None


def _custom(section: Mapping[str, Any]) -> Mapping[str, Any]:
    custom = (section.get("custom") or {}).get("rollout") or {}
    if not isinstance(custom, Mapping):
        raise ConfigError(f"{CUSTOM} = {custom!r:.80}: expected a mapping")
    known = (*annotations_of(AdapterOptions), *annotations_of(RolloutConfig))
    unknown = [name for name in custom if name not in known]
    if unknown:
        raise ConfigError(f"{CUSTOM}.{unknown[0]}: unknown key; known: {', '.join(known)}")
    return custom


def _options(custom: Mapping[str, Any]) -> AdapterOptions:
    values = {name: custom[name] for name in annotations_of(AdapterOptions) if name in custom}
    rows = values.pop("rows", {})
    if not isinstance(rows, Mapping):
        raise ConfigError(f"{CUSTOM}.rows = {rows!r:.80}: expected a mapping")
    try:
        policy = RowPolicy(**{"segments": "last", **rows})
    except ConfigError as error:
        raise ConfigError(f"{CUSTOM}.rows: {error}") from None
    if policy.segments == "rows":
        raise ConfigError(
            f"{CUSTOM}.rows.segments = 'rows': expected 'last', 'longest' or 'error': verl's batch "
            "has one row for each of a prompt's"
        )
    return AdapterOptions(**values, rows=policy)


def _refuse(config: Mapping[str, Any], section: Mapping[str, Any], options: AdapterOptions) -> None:
    """Let pass what has an effect here, or is the affair of verl's servers or its trainer."""
    multi_turn = section.get("multi_turn") or {}
    trace = section.get("trace") or {}
    queue = config.get("transfer_queue") or {}
    faults = [
        (
            queue.get("enable", False),
            "transfer_queue.enable",
            "expected false: batches go to the trainer that asks for them (trainer.use_v1=false)",
        ),
        (
            section.get("over_sample_rate") or 0,
            f"{ROLLOUT}.over_sample_rate",
            "expected 0: every row of a batch is run to its end",
        ),
        (
            multi_turn.get("num_repeat_rollouts"),
            f"{ROLLOUT}.multi_turn.num_repeat_rollouts",
            f"expected null; {ROLLOUT}.n says how many rollouts a prompt has",
        ),
        (
            multi_turn.get("use_inference_chat_template") or False,
            f"{ROLLOUT}.multi_turn.use_inference_chat_template",
            "expected false: it splits a trajectory into several rows, and verl's batch has one",
        ),
        (
            trace.get("backend") if options.agent_loops == "rollout" else None,
            f"{ROLLOUT}.trace.backend",
            f"expected null, or {CUSTOM}.agent_loops = 'verl': only verl's own loops are traced",
        ),
    ]
    for value, path, expected in faults:
        if value:
            raise ConfigError(f"{path} = {value!r}: {expected}")


def _translated(section: Mapping[str, Any], model: Model) -> dict[str, Any]:
    prompt, response = section["prompt_length"], section["response_length"]
    context = section.get("max_model_len") or prompt + response
    validation = section.get("val_kwargs") or {}
    multi_turn = load_verl_multi_turn({"multi_turn": section.get("multi_turn") or {}}).settings
    return {
        "model": {
            "path": model.tokenizer_path,
            "trust_remote_code": model.trust_remote_code,
            "chat_template": model.chat_template_path,
            "chat_template_kwargs": dict(model.chat_template_kwargs),
        },
        "engine": {
            "kind": "custom",
            "core": CORE,
            "options": {
                "vocab_size": model.vocab_size,
                "eos_ids": list(model.eos_ids),
                "context_length": context,
                "log_probs": bool(section.get("calculate_log_probs", False)),
            },
        },
        "placement": {"kind": "in_process"},
        "sampling": {
            **_sampling(section),
            "repetition_penalty": float(section.get("repetition_penalty", 1.0)),
        },
        "validation_sampling": _sampling(validation),
        "lengths": {"prompt": prompt, "response": response, "overlong_prompts": "cut"},
        "agent": {**NO_LIMITS, **multi_turn.get("agent", {})},
        "tools": multi_turn.get("tools", {}),
        "scheduling": {"max_in_flight": MAX_IN_FLIGHT, "adaptive_admission": False},
        "seed": section.get("seed"),
    }


def _limits(given: Any) -> dict[str, float]:
    """`LIMITS`, none longer than the wider ones that are given."""
    known = given if isinstance(given, Mapping) else {}
    return {
        name: min(
            [
                length,
                *(w for each in WIDER_LIMITS.get(name, ()) if (w := known.get(each)) is not None),
            ]
        )
        for name, length in LIMITS.items()
    }


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, top_p and top_k; 0 is transformers' word for all of the vocabulary."""
    return {
        "temperature": float(values.get("temperature", 1.0)),
        "top_p": float(values.get("top_p", 1.0)),
        "top_k": values.get("top_k", -1) or -1,
    }
