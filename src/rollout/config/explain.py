"""What a configuration means, in plain lines for people; no file is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rollout.config.group_policy import GroupPolicy
from rollout.config.placements import (
    AnyPlacement,
    LocalProcessPlacement,
    RayPlacement,
    gpus_of,
)
from rollout.config.sampling_section import SamplingConfig
from rollout.config.sections import RolloutConfig
from rollout.plurals import count

if TYPE_CHECKING:
    from rollout.config.engines import AnyEngine
    from rollout.config.journal_section import JournalConfig
    from rollout.config.limits_section import LimitsConfig
    from rollout.config.rewards_section import RewardsConfig
    from rollout.config.scheduling_section import SchedulingConfig
    from rollout.config.sections import LengthsConfig

_LABEL_WIDTH = 12

# Bytes of one position over all tensors of a padded `RolloutBatch`. Ids, masks and positions are
# int64; log-probs float32; weight versions int32.
_BYTES_IN_PROMPT = 8  # prompts
_BYTES_IN_RESPONSE = 8 + 8 + 4 + 4  # responses, response_mask, rollout_log_probs, weight_versions
_BYTES_IN_ROW = 8 + 8 + 8  # input_ids, attention_mask, position_ids
_BYTES_PER_ROW = 1 + 4 + 8  # trainable, rewards, groups


def describe_config(config: RolloutConfig) -> list[str]:
    """What will run where, how wide the tensors are and what ends it: lines ``label  text``."""
    entries = [
        ("model", _model(config)),
        ("generates", config.engine.describe()),
        ("lives in", _placement(config.engine, config.placement)),
        ("replicas", _replicas(config)),
        ("sampling", _sampling(config.sampling)),
        ("validation", _sampling(config.validation_sampling)),
        *_lengths(config.lengths),
        ("limits", _limits(config.limits)),
        ("agent", _agent(config)),
        ("tools", _tools(config)),
        ("rewards", _rewards(config.rewards)),
        *_scheduling(config.scheduling),
        ("journal", _journal(config.journal)),
        ("seed", _seed(config.seed)),
        ("not set", ", ".join(unset_paths(config)) or "nothing"),
    ]
    return [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in entries]


def _journal(journal: JournalConfig) -> str:
    if journal.path is None:
        return "none: a run that dies is not resumed (`rollout run` writes one into --out)"
    return (
        f"{journal.path}, fsync {journal.fsync}; where it cannot be written: {journal.on_failure}"
    )


def row_bytes(lengths: LengthsConfig) -> int:
    """Bytes of one row of the padded tensors, without the optional ones."""
    return (
        _BYTES_IN_PROMPT * lengths.prompt
        + _BYTES_IN_RESPONSE * lengths.response
        + _BYTES_IN_ROW * (lengths.prompt + lengths.response)
        + _BYTES_PER_ROW
    )


def unset_paths(config: RolloutConfig) -> list[str]:
    """The keys that are None: what they would bound or choose is left open."""
    sections = {field.name: getattr(config, field.name) for field in attrs.fields(RolloutConfig)}
    unset = [name for name, value in sections.items() if value is None]
    for name, section in sections.items():
        if attrs.has(type(section)):
            keys = (field.name for field in attrs.fields(type(section)))
            unset += (f"{name}.{key}" for key in keys if getattr(section, key) is None)
    return unset


def _model(config: RolloutConfig) -> str:
    model = config.model
    parts = [model.path]
    if model.revision:
        parts.append(f"revision {model.revision}")
    if model.chat_template:
        parts.append(f"chat template {model.chat_template}")
    parts += (f"{key} = {value!r}" for key, value in model.chat_template_kwargs.items())
    if model.trust_remote_code:
        parts.append("its own code may run")
    return ", ".join(parts)


def _placement(engine: AnyEngine, placement: AnyPlacement) -> str:
    match placement:
        case LocalProcessPlacement():
            return f"local_process, a child process each{_interpreter(placement.python)}"
        case RayPlacement():
            gpus, cpus = gpus_of(engine, placement), placement.cpus_per_replica
            what = f"an actor each with {gpus:g} GPU and {cpus:g} CPU"
            if placement.colocate:
                what = f"an actor each on {'; '.join(placement.colocate)}, shared with a trainer"
            if placement.machines_per_replica > 1:
                what += f", spread over {placement.machines_per_replica} machines"
            cluster = placement.address or "the running cluster, or one started here"
            machines = f" on {', '.join(placement.nodes)}" if placement.nodes else ""
            by = placement.python or "the interpreter of Ray's workers"
            return f"ray, {what}, in {cluster}{machines}, by {by}"
    return "in_process, on the driver's own event loop"


def _interpreter(python: str | None) -> str:
    return f", by {python}" if python else ", by the driver's interpreter"


def _replicas(config: RolloutConfig) -> str:
    router = config.router
    margins = {
        "estimated_seconds": f", move margin {router.move_margin_s:g} s",
        "least_requests": f", move margin {router.move_margin}",
    }
    weights = f", weights {', '.join(f'{w:g}' for w in router.weights)}" if router.weights else ""
    margin = margins.get(router.strategy, "")
    return f"{config.engine.replicas}, by {router.strategy}{margin}{weights}"


def _sampling(sampling: SamplingConfig) -> str:
    parts = ["greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"]
    for field in attrs.fields(SamplingConfig):
        value = getattr(sampling, field.name)
        if field.name not in {"greedy", "temperature"} and value != field.default:
            parts.append(f"{field.name} {value}")
    return ", ".join(parts)


def _lengths(lengths: LengthsConfig) -> list[tuple[str, str]]:
    width = lengths.prompt + lengths.response
    turn = f", a turn {lengths.turn:,}" if lengths.turn else ""
    return [
        ("lengths", f"prompt {lengths.prompt:,}, response {lengths.response:,}{turn} tokens"),
        ("a row", f"{width:,} tokens wide, {row_bytes(lengths):,} bytes of tensors"),
    ]


def _limits(limits: LimitsConfig) -> str:
    """From inner to outer: the first two stand inside a turn."""
    nested = ("generation_s", "tool_s", "turn_s", "trajectory_s", "batch_s")
    own = ("reward_s", "cleanup_s")
    inner, beside = (
        ", ".join(f"{name.removesuffix('_s')} {_seconds(getattr(limits, name))}" for name in names)
        for names in (nested, own)
    )
    return f"{inner}; {beside}"


def _seconds(seconds: float | None) -> str:
    return "without limit" if seconds is None else f"{seconds:.15g} s"


def _agent(config: RolloutConfig) -> str:
    agent = config.agent
    turns = f"{_at_most(agent.max_assistant_turns)} assistant turns"
    user = f"{_at_most(agent.max_user_turns)} user turns"
    spoken_by = f" by {agent.interaction}" if agent.interaction else ""
    return f"{agent.name}, {turns}, {user}{spoken_by}"


def _at_most(count: int | None) -> str:
    return "any number of" if count is None else f"at most {count}"


def _tools(config: RolloutConfig) -> str:
    tools, agent = config.tools, config.agent
    calls = f"{agent.tool_format} calls, {agent.max_parallel_calls} at once in a turn"
    cut = f"answers cut to {tools.max_response_length:,} characters ({tools.truncate_side})"
    shipped = f"{', '.join(tools.builtin)}; " if tools.builtin else ""
    return f"{shipped}{calls}; {cut}; {count(tools.max_threads, 'thread')}"


def _rewards(rewards: RewardsConfig) -> str:
    again = f"; {count(rewards.retries, 'retry')}" if rewards.retries else ""
    if not rewards.processes:
        return f"in threads, async ones on the event loop{again}"
    number = rewards.processes
    return f"in {number:,} child {'process' if number == 1 else 'processes'}{again}"


def _scheduling(scheduling: SchedulingConfig) -> list[tuple[str, str]]:
    samples = scheduling.samples_per_prompt
    validation = scheduling.validation_samples_per_prompt
    return [
        ("samples", f"{samples} for each prompt, {validation} in validation"),
        ("in flight", f"at most {count(scheduling.max_in_flight, 'trajectory')}"),
        *([("groups", _groups(scheduling.groups))] if scheduling.groups != GroupPolicy() else []),
    ]


def _groups(policy: GroupPolicy) -> str:
    """What it says otherwise than usually."""
    usual, names = GroupPolicy(), [field.name for field in attrs.fields(GroupPolicy)]
    given = [(name, getattr(policy, name)) for name in names]
    return ", ".join(f"{n} = {value!r}" for n, value in given if value != getattr(usual, n))


def _seed(seed: int | None) -> str:
    return "none: every run samples afresh" if seed is None else f"{seed}: runs can be repeated"
