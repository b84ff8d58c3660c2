"""The function that `GRPOTrainer` calls for completions, backed by a runtime."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

from rollout.config import RolloutConfig
from rollout.config.config_faults import Fault, config_error
from rollout.config.section_type import given_fields
from rollout.engine.weights import TensorWeights
from rollout.errors import ConfigError
from rollout.integrations.trainer_rows import RowPolicy, TrainerRow, trainer_rows
from rollout.integrations.trl.prompt_groups import (
    PromptGroup,
    dataset_rows,
    groups_of,
    prompt_of,
    refuse_columns,
)
from rollout.integrations.trl.prompt_images import refuse_other_media
from rollout.integrations.trl.trainer_rewards import IS_TRAINED, REWARD, TRAJECTORY
from rollout.integrations.trl.trainer_setup import (
    check,
    is_adapted,
    named_weights,
    sampling_of,
    take_over,
    take_tools,
)
from rollout.runtime.blocking import BlockingRollout, open_rollout_blocking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.rewards.functions import RewardFunction
    from rollout.types import Prompt

logger = logging.getLogger("rollout.integrations")

#: What a policy says that does not say otherwise: TRL's reward functions score, and a trajectory is
#: one row.
_POLICY = {"unrewarded": "trainer", "segments": "last"}
#: Names that reward functions get from TRL itself.
_TAKEN = (
    "prompt", "prompts", "completion", "completions", "completion_ids", "prompt_ids", "logprobs",
    "logprob_token_ids", "env_mask", "trainer_state", "log_extra", "log_metric", "environments",
    "image", "images", TRAJECTORY, REWARD, IS_TRAINED,
)  # fmt: skip


def rollout_func(
    source: RolloutConfig | BlockingRollout,
    tools: Sequence[Any] = (),
    reward: RewardFunction | None = None,
    interactions: Sequence[Any] = (),
    *,
    policy: RowPolicy | None = None,
    backend: Literal["trio", "asyncio"] = "trio",
) -> TrlRollout:
    """For ``GRPOTrainer(rollout_func=rollout_func(config))``.

    Args:
        source: A configuration, of which a runtime is opened when the trainer first asks; or a
            runtime that is open, and stays so.
        tools, reward, interactions: As for `open_rollout`; the trainer's own tools come to these.
        policy: What becomes of rows that TRL cannot represent. Where it does not say otherwise,
            ``unrewarded`` is "trainer" and ``segments`` "last": TRL scores, and takes one row of a
            trajectory.
        backend: The loop on which async tools, rewards and agents run.

    Raises:
        ConfigError: `source` is neither; tools and the like are given for an open runtime; or
            the policy makes several rows of a trajectory.
    """
    faults = []
    if not isinstance(source, RolloutConfig | BlockingRollout):
        text = "expected a RolloutConfig, or a runtime of open_rollout_blocking"
        faults.append(Fault("source", text, source))
    given = {"tools": tools, "reward": reward, "interactions": interactions}
    if isinstance(source, BlockingRollout):
        text = "expected none with a runtime that is open: give it to open_rollout_blocking"
        faults += [Fault(name, text) for name, value in given.items() if value]
    whole = _whole(policy or RowPolicy())
    if whole.segments == "rows":
        text = "expected 'last', 'longest' or 'error': TRL takes one row a completion"
        faults.append(Fault("policy.segments", text, whole.segments))
    if faults:
        raise config_error("rollout_func", faults)
    return TrlRollout(source, tools, reward, interactions, whole, backend)


class TrlRollout:
    """What `rollout_func` returns: TRL calls it with prompts and the trainer.

    Use it as a context manager, or call `close` at the end; a process that exits closes it too.
    """

    def __init__(
        self,
        source: RolloutConfig | BlockingRollout,
        tools: Sequence[Any],
        reward: RewardFunction | None,
        interactions: Sequence[Any],
        policy: RowPolicy,
        backend: Literal["trio", "asyncio"],
    ) -> None:
        self._source = source
        self._tools, self._reward, self._interactions = tools, reward, interactions
        self._policy, self._backend = policy, backend
        self._runtime = source if isinstance(source, BlockingRollout) else None
        self._trainer: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._warned: set[str] = set()
        self._calls = (-1, 0)  # a step, and how many calls it had

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def runtime(self) -> BlockingRollout | None:
        """The runtime, once the trainer has asked for something."""
        return self._runtime

    def close(self) -> None:
        """Close the runtime, where it was opened here. Idempotent."""
        if self._runtime is not None and not isinstance(self._source, BlockingRollout):
            self._runtime.close()
            self._runtime = None
        self._trainer = lambda: None  # type: ignore[assignment]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """A completion for each prompt, in their order.

        Args:
            prompts: As TRL repeats them: equal ones adjacent, one for each generation.
            trainer: The `GRPOTrainer`; what it needs for weights and log-probs it is told once.

        Raises:
            ConfigError: The trainer's options and the configuration contradict each other.
            RolloutError: As `generate`, and as the policy says.
        """
        runtime = self._opened(trainer)
        trajectories, metrics = self._rollout(runtime, prompts, trainer)
        eos = runtime.template.eos_token_id
        made = trainer_rows(
            trajectories, self._policy, eos_token_id=0 if eos is None else eos, warned=self._warned
        )
        mode = "train" if trainer.model.training else "eval"
        for name, value in {**metrics, **made.metrics}.items():
            trainer._metrics[mode][f"rollout/{name}"].append(value)
        for row, prompt in zip(made.rows, prompts, strict=True):
            refuse_other_media(row, prompt)
        return _output(made.rows)

    def _opened(self, trainer: Any) -> BlockingRollout:
        """The runtime, with weights as the trainer has them."""
        if self._runtime is not None and self._trainer() is trainer:
            return self._runtime
        check(trainer, self._config)
        tools = take_tools(trainer)
        if tools and self._runtime is not None:
            names = ", ".join(getattr(each, "__name__", repr(each)) for each in tools)
            raise ConfigError(
                f"GRPOTrainer(tools=…) has {names}, and the runtime is open already: give them to "
                "open_rollout_blocking, or a configuration to rollout_func"
            )
        if self._runtime is None:
            self._runtime = open_rollout_blocking(
                self._config,
                [*self._tools, *tools],
                self._reward,
                self._interactions,
                backend=self._backend,
            )
        self._trainer = weakref.ref(trainer)
        take_over(trainer, self._give_weights)
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
        return self._runtime

    @property
    def _config(self) -> RolloutConfig:
        return self._source.config if isinstance(self._source, BlockingRollout) else self._source

    def _give_weights(self) -> None:
        trainer, runtime = self._trainer(), self._runtime
        if trainer is None or runtime is None:
            raise ConfigError("the trainer asks for weights of a rollout_func that is closed")
        model = trainer.accelerator.unwrap_model(trainer.model)
        adapted = is_adapted(model)
        if adapted:
            model.merge_adapter()
        try:
            weights = TensorWeights(named_weights(model))
            runtime.update_weights(version=trainer.state.global_step, source=weights)
        finally:
            if adapted:
                model.unmerge_adapter()

    def _rollout(
        self, runtime: BlockingRollout, prompts: Sequence[Any], trainer: Any
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """A trajectory for each prompt, and the metrics of them all."""
        is_training, step = trainer.model.training, int(trainer.state.global_step)
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        groups = groups_of(prompts, size, trainer.accelerator.process_index)
        made = self._prompts(prompts, groups, trainer)
        found: dict[int, Trajectory] = {}
        metrics: dict[str, float] = {}
        # A group that is spread over processes has fewer members here; usually none is.
        for count in sorted({group.count for group in groups}):
            which = [group for group in groups if group.count == count]
            batch = runtime.generate(
                [made[group.first] for group in which],
                samples=count,
                step=step,
                validate=not is_training,
                layout="packed",
            )
            metrics |= batch.metrics
            places = [group.first + member for group in which for member in range(count)]
            found |= zip(places, batch.trajectories, strict=True)
        return [found[row] for row in range(len(prompts))], metrics

    def _prompts(
        self, prompts: Sequence[Any], groups: Sequence[PromptGroup], trainer: Any
    ) -> dict[int, Prompt]:
        """What the groups start from, by their first rows."""
        rows = self._dataset_rows(prompts)
        call = self._call_name(trainer)
        # In an evaluation, `validation_sampling` says all.
        sampling = sampling_of(trainer) if trainer.model.training else {}
        made = {}
        for group in groups:
            at = group.first
            made[at] = prompt_of(prompts[at], rows[at], f"{call}-{group.name}", sampling)
        return made

    def _dataset_rows(self, prompts: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
        """The rows that the prompts are of; empty ones where TRL does not show them."""
        rows = dataset_rows(prompts)
        if rows is not None:
            refuse_columns(rows, (TRAJECTORY, REWARD, IS_TRAINED))
            return rows
        if "columns" not in self._warned:
            self._warned.add("columns")
            logger.warning(
                "this version of TRL does not show the rows of its dataset: their columns reach "
                "its reward functions, and no tool, agent or reward of the runtime"
            )
        return [{}] * len(prompts)

    def _call_name(self, trainer: Any) -> str:
        """Tells this call from every other one of the training: seeds derive from it."""
        step, before = int(trainer.state.global_step), self._calls
        self._calls = (step, before[1] + 1 if before[0] == step else 0)
        return f"{'train' if trainer.model.training else 'eval'}-{step}.{self._calls[1]}"


def _whole(policy: RowPolicy) -> RowPolicy:
    """A policy, in which TRL's defaults stand for what it does not say."""
    given = given_fields(policy)
    return RowPolicy(**{**_POLICY, **{name: getattr(policy, name) for name in given}})


def _output(rows: Sequence[TrainerRow]) -> dict[str, list[Any]]:
    """What TRL wants, and what its reward functions get beside the dataset's columns."""
    output: dict[str, list[Any]] = {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.response_ids.tolist() for row in rows],
        "logprobs": [row.log_probs.tolist() for row in rows],
        "env_mask": [row.mask.astype(int).tolist() for row in rows],
        TRAJECTORY: [row.trajectory for row in rows],
        REWARD: [row.reward if row.is_rewarded else None for row in rows],
        IS_TRAINED: [bool(row.mask.any()) for row in rows],
    }
    extras = [_own_extra(row.trajectory) for row in rows]
    for name in dict.fromkeys(name for extra in extras for name in extra):
        output[name] = [extra.get(name) for extra in extras]
    return output


def _own_extra(trajectory: Trajectory) -> dict[str, Any]:
    """What agents and rewards have attached; the dataset's columns are TRL's own."""
    told = {} if trajectory.prompt is None else trajectory.prompt.extra
    return {
        name: value
        for name, value in trajectory.extra.items()
        if name not in _TAKEN and not (name in told and told[name] is value)
    }
