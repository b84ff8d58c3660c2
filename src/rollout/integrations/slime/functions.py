"""The functions that slime's options name."""

from __future__ import annotations

import copy
import math
import os
import threading
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import attrs
import httpx
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import generate_rollout as slime_generate_rollout
from slime.utils.async_utils import run
from slime.utils.misc import load_function

from rollout.errors import ConfigError, RolloutError
from rollout.integrations.adapter import Adapter
from rollout.integrations.served_engines import engines_at
from rollout.integrations.slime.samples import groups_of, prompts_of, samples_of
from rollout.integrations.trainer_settings import refuse_nan, settings_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from rollout.integrations.row_policy import RowPolicy
    from rollout.integrations.trainer_settings import TrainerSettings

#: slime's argument that names the settings, set through ``--custom-config-path``.
ARGUMENT = "rollout_settings"
#: The environment variable that does so where the argument is not set.
VARIABLE = "ROLLOUT_SETTINGS"
GENERATE = "rollout.integrations.slime.generate"

#: slime names functions, which have to find the runtime again; by where its settings are.
_adapters: dict[Any, Adapter] = {}
_opening = threading.Lock()


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """For ``--rollout-function-path``: `args.rollout_batch_size` groups of finished trajectories.

    A group that the dynamic filter drops is replaced by another one. Evaluation is slime's own,
    with each sample run by `generate`.

    Raises:
        ConfigError: Settings or arguments are none of what they may be; nothing has run.
        RolloutError: The data source has no more groups.
    """
    if evaluation:
        changed = copy.copy(args)
        changed.custom_generate_function_path = GENERATE
        return slime_generate_rollout(changed, rollout_id, data_source, evaluation=True)
    return run(_train(args, rollout_id, data_source))


async def generate(
    args: Namespace, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Any:
    """For ``--custom-generate-function-path``: one sample as one trajectory.

    Returns:
        A sample; in training, where `policy.segments` is "rows", a list with one for each
        segment. slime asks its reward model for what has no reward, unless settings have a reward.
    """
    adapter = await _adapter(args)
    settings = {name: value for name, value in sampling_params.items() if name != "sampling_seed"}
    alone = copy.copy(sample)
    alone.group_index = None  # its seeds follow from its own index
    repeated = prompts_of([alone], settings, adapter.settings.prompt_of)
    repeated = repeated.renamed([f"sample-{sample.index}"])
    placed = await adapter.rows(repeated, step=None, validate=evaluation)
    keeps = _keeps_reward(args, adapter.settings)
    template = adapter.runtime.template
    rows: list[Any] = samples_of(
        [sample], placed, template.decode, keeps_reward=keeps, processor=template.processor
    )[0]
    # slime's model judges what can be learned from; the rest must not be None.
    _fill_rewards(args, [each for each in rows if each.remove_sample])
    if adapter.settings.policy.segments == "rows" and not evaluation:
        return rows
    return rows[0]


def close() -> None:
    """End what was opened; the end of the process does so too."""
    with _opening:
        while _adapters:
            _adapters.popitem()[1].close()


async def _train(args: Namespace, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """As slime's own loop: groups, rewards, the dynamic filter, until there are enough."""
    adapter = await _adapter(args)
    wanted = args.rollout_batch_size
    named = args.dynamic_sampling_filter_path
    dynamic_filter = None if named is None else load_function(named)
    dropped = MetricGatherer()
    metrics: dict[str, float] = {}
    kept: list[tuple[list[Any], list[list[Any]]]] = []
    every: list[tuple[list[Any], list[list[Any]]]] = []
    while len(kept) < wanted:
        fresh = data_source.get_samples(wanted - len(kept))
        if not fresh:
            raise RolloutError(f"slime's data source gave no group; {wanted - len(kept)} lack")
        run_groups, metrics = await _run_groups(args, adapter, rollout_id, fresh)
        every += run_groups
        for at, (group, found) in enumerate(run_groups):
            said = call_dynamic_filter(dynamic_filter, args, [rows[0] for rows in found])
            left = len(kept) + len(run_groups) - at
            if should_drop_dynamic_filter_output(
                said, remaining_batch_size=left, target_data_size=wanted
            ):
                dropped.on_dynamic_filter_drop(reason=said.reason)
            else:
                kept.append((group, found))
    data = _flat_or_nested(kept)
    _process(args, data, _flat_or_nested(every), data_source)
    figures = {f"rollout/{name}": value for name, value in metrics.items()}
    return RolloutFnTrainOutput(samples=data, metrics={**figures, **dropped.collect()})


async def _run_groups(
    args: Namespace, adapter: Adapter, rollout_id: int, groups: Sequence[list[Any]]
) -> tuple[list[tuple[list[Any], list[list[Any]]]], dict[str, float]]:
    """Each group with the rows of its samples, rewarded; and figures of the whole."""
    flat = [sample for group in groups for sample in group]
    settings = adapter.settings
    repeated = prompts_of(flat, _sampling(args), settings.prompt_of)
    placed = await adapter.rows(repeated, step=rollout_id, validate=False)
    keeps = _keeps_reward(args, settings)
    template = adapter.runtime.template
    filled = samples_of(
        flat, placed, template.decode, keeps_reward=keeps, processor=template.processor
    )
    rows = iter(filled)
    made = [(group, [next(rows) for _ in group]) for group in groups]
    for _, found in made:
        await _judge(args, [sample for each in found for sample in each])
    return made, placed.metrics


async def _judge(args: Namespace, samples: Sequence[Any]) -> None:
    """Have slime's reward model judge what has no reward: whole groups where it wants those.

    What nothing is to be learned from is not judged: it gets the mean of its group, which so
    stays where it is.
    """
    unjudged = [each for each in samples if each.reward is None and not each.remove_sample]
    if args.group_rm and unjudged:
        for sample, reward in zip(unjudged, await batched_async_rm(args, unjudged), strict=True):
            sample.reward = reward
    else:
        for sample in unjudged:
            sample.reward = await async_rm(args, sample)
    _fill_rewards(args, samples)


def _fill_rewards(args: Namespace, samples: Sequence[Any]) -> None:
    known = [each.get_reward_value(args) for each in samples if each.reward is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    for sample in samples:
        if sample.reward is None:
            sample.reward = {args.reward_key: mean} if args.reward_key else mean


def _process(args: Namespace, data: list[Any], every: list[Any], data_source: Any) -> None:
    """slime's hooks on the groups that it gets, and on all."""
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, data)
    if args.rollout_all_samples_process_path is not None:
        load_function(args.rollout_all_samples_process_path)(args, every, data_source)


def _flat_or_nested(groups: Sequence[tuple[list[Any], list[list[Any]]]]) -> list[list[Any]]:
    samples = [sample for group, _ in groups for sample in group]
    return groups_of(samples, [rows for _, found in groups for rows in found])


def _sampling(args: Namespace) -> dict[str, Any]:
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
    }


def _keeps_reward(args: Namespace, settings: TrainerSettings) -> bool:
    """Whether slime has no reward model to ask, or need not be asked."""
    has_model = bool(args.rm_type or args.custom_rm_path or args.group_rm)
    return bool(settings.reward or settings.group_reward) or not has_model


def _policy(args: Namespace, settings: TrainerSettings) -> RowPolicy:
    """What slime's reward model is to judge, no policy may mask."""
    if _keeps_reward(args, settings):
        return settings.policy
    return attrs.evolve(settings.policy, unrewarded="trainer")


async def _adapter(args: Namespace) -> Adapter:
    return await anyio.to_thread.run_sync(_opened, args)


def _opened(args: Namespace) -> Adapter:
    """The adapter of these settings, opened by whichever call is first."""
    named = getattr(args, ARGUMENT, None) or os.environ.get(VARIABLE)
    if named is None:
        raise ConfigError(
            f"args.{ARGUMENT}: not set, nor is the environment variable {VARIABLE}; expected "
            "package.module:name of a TrainerSettings"
        )
    _refuse(args)
    with _opening:
        if named not in _adapters:
            settings = settings_of(named, f"args.{ARGUMENT}")
            refuse_nan(settings, "slime")
            if settings.engines == "trainer":
                _refuse_experts(args)
                urls = _worker_urls(args)
                settings = engines_at(settings, urls, api="sglang", model=args.hf_checkpoint)
            _adapters[named] = Adapter(settings, _policy(args, settings))
        return _adapters[named]


def _worker_urls(args: Namespace) -> list[str]:
    """Where slime's SGLang servers listen, as its router knows."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    answer = httpx.get(f"{router}/workers", timeout=30).raise_for_status()
    return [worker["url"] for worker in answer.json()["workers"]]


def _refuse(args: Namespace) -> None:
    """Refuse by name what slime's own loop does and this one does not.

    Raises:
        ConfigError: It is asked for.
    """
    if args.partial_rollout:
        raise ConfigError(
            "args.partial_rollout = True: trajectories end within their rollout; expected False"
        )
    if args.rollout_top_p != 1.0:
        raise ConfigError(
            f"args.rollout_top_p = {args.rollout_top_p}: slime then wants the ids that top-p kept, "
            "which engines here do not tell; expected 1.0"
        )


def _refuse_experts(args: Namespace) -> None:
    """Refuse replay of routed experts where servers are asked over HTTP, which tells none.

    Raises:
        ConfigError: It is asked for.
    """
    if getattr(args, "use_rollout_routing_replay", False):
        raise ConfigError(
            "args.use_rollout_routing_replay = True: slime's servers are asked for no routed "
            "experts; expected False, or engines = 'config' with engines that tell them"
        )
