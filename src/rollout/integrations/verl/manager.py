"""verl's rollout through this library.

``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` names its class:
``rollout.integrations.verl.AgentLoopManager``.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import attrs
import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, get_trajectory_info
from verl.utils.ray_utils import auto_await
from verl.utils.rollout_trace import RolloutTraceConfig
from verl.utils.skip import SkipManager

from rollout.engine.placement.in_process import InProcess
from rollout.engine.pool.opening import open_engines
from rollout.errors import ConfigError
from rollout.integrations.trainer_rows import trainer_rows
from rollout.integrations.verl import agents
from rollout.integrations.verl.adapter import Adapter, row_of_trajectory
from rollout.integrations.verl.client_core import ClientCore
from rollout.integrations.verl.data_proto import data_proto
from rollout.integrations.verl.interactions_config import load_verl_interactions
from rollout.integrations.verl.rollout_section import Model, Settings, settings_of
from rollout.integrations.verl.rows import INTERNAL, VerlRow, call_of
from rollout.integrations.verl.servers import watched
from rollout.integrations.verl.sessions import Sessions
from rollout.integrations.verl.worker_tools import tools_of
from rollout.runtime.blocking import BlockingRollout
from rollout.runtime.opening import open_rollout_on
from rollout.scheduling.rewards.functions import GivenRewards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.engine.core import EngineCore

logger = logging.getLogger("rollout.integrations")
_AGENTS = agents  # registered by its import
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}


class AgentLoopManager:
    """Answers verl's batches; made by `create`.

    Its runtime lives on a thread of its own until `close`, or until the process ends.

    Attributes:
        settings: verl's configuration in our words.
        rollout: The runtime; several calls may use it at once.
        metrics: Of the last batch: those of `RolloutBatch.metrics`, and ``rows/…``.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        self._worker = AgentLoopWorker(
            config, llm_client, teacher_client, reward_loop_worker_handles
        )
        self._warned: set[str] = set()
        self.metrics: dict[str, float] = {}
        with ExitStack() as opened:
            self.settings = _settings(config, self._worker, opened)
            sessions = None if self.settings.has_own_engines else Sessions()
            self._adapter = Adapter(self._worker, self.settings, sessions)
            opened.callback(self._adapter.close)
            self.rollout = self._open(llm_client, sessions)
            opened.callback(self.rollout.close)
            self._opened = opened.pop_all()
        _open.add(self)

    @classmethod
    @auto_await
    async def create(
        cls,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> AgentLoopManager:
        """The manager, ready; awaited, or called without a loop.

        Args:
            config: The trainer's whole configuration.
            llm_client: verl's client of its servers.
            teacher_client: Those of teachers, by their names.
            reward_loop_worker_handles: Ray actors that score trajectories as they end.

        Raises:
            ConfigError: The configuration says what cannot be done here; it names the key.
            ToolError: A tool or a file of tools cannot be used.
        """
        make = functools.partial(
            cls, config, llm_client, teacher_client, reward_loop_worker_handles
        )
        return await anyio.to_thread.run_sync(make)

    @auto_await
    @SkipManager.annotate(role="rollout")
    async def generate_sequences(self, prompts: Any) -> Any:
        """A ``DataProto`` of prompts, answered; awaited, or called without a loop.

        Rows come in the order of the prompts, with the fields that verl's own manager gives them:
        see ``docs/trainers/verl.md`` for each.

        Raises:
            PromptError: A row has no messages, or names an agent that nobody has registered.
            LimitExceeded: More rows failed than ``scheduling.max_failures`` allows.
        """
        if not len(prompts):
            raise ConfigError("generate_sequences: a batch without rows; expected at least one")
        rows = await self._rows(prompts)
        step, validate = prompts.meta_info.get("global_steps", -1), rows[0].info["validate"]
        call = call_of(rows, self._adapter.agent_of, self._adapter)
        batch = await self.rollout.agenerate(
            call.prompts,
            samples=call.samples,
            step=int(step) if step is not None and step >= 0 else None,
            validate=validate,
            trim=True,
        )
        of_row: list[Trajectory | None] = [None] * len(rows)
        for at, trajectory in zip(call.order, batch.trajectories, strict=True):
            of_row[at] = trajectory
        trajectories = [each for each in of_row if each is not None]
        try:
            return await anyio.to_thread.run_sync(
                self._answered, prompts, trajectories, dict(batch.metrics)
            )
        finally:
            for each in trajectories:
                self._adapter.end(each)

    @property
    def model_path(self) -> str:
        """The directory of the model that training began with."""
        return str(self._worker.model_config.local_path)

    @property
    def frees_memory(self) -> bool:
        """Whether engines are to sleep while verl trains."""
        return bool(self._worker.rollout_config.free_cache_engine)

    def close(self) -> None:
        """End the runtime, and engines of ours; verl's servers stay. Idempotent."""
        _open.discard(self)
        self._opened.close()

    async def _rows(self, prompts: Any) -> list[VerlRow]:
        """The rows of a batch, with the columns and sampling that verl's worker gives its loops."""
        columns, config = prompts.non_tensor_batch, self._worker.rollout_config
        count, validate = len(prompts), bool(prompts.meta_info.get("validate", False))
        columns.setdefault("priority", np.arange(count, dtype=np.int64))
        if "agent_name" not in columns:
            columns["agent_name"] = np.array(
                [config.agent.default_agent_loop] * count, dtype=object
            )
        index = columns.get("index", np.arange(count))
        step = prompts.meta_info.get("global_steps", -1)
        infos = await get_trajectory_info(step, index.tolist(), validate)
        traced = _traced(index)
        sampled = columns.get(INTERNAL)
        params = self._sampling_params(validate=validate)
        return [
            VerlRow(
                kwargs={name: each[at] for name, each in columns.items() if name != INTERNAL},
                info={**infos[at], "trace": at in traced},
                sampling_params={**params, **GREEDY}
                if not validate and sampled is not None and not bool(sampled[at])
                else dict(params),
            )
            for at in range(count)
        ]

    def _sampling_params(self, *, validate: bool) -> dict[str, Any]:
        config = self._worker.rollout_config
        source = config.val_kwargs if validate else config
        return {
            "temperature": source.temperature,
            "top_p": source.top_p,
            "top_k": source.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }

    def _answered(
        self, prompts: Any, trajectories: Sequence[Trajectory], metrics: Mapping[str, float]
    ) -> Any:
        """The batch of verl's that the trajectories are."""
        adapter = self._adapter
        outputs = [adapter.output_of(each) for each in trajectories]
        for trajectory, output in zip(trajectories, outputs, strict=True):
            if adapter.scores and output.reward_score is None:
                trajectory.reward = None  # only teachers were asked
        known = any(each.reward is not None for each in trajectories)
        has_scores = known or self._worker.reward_loop_worker_handles is not None
        policy = self.settings.options.rows
        validates = bool(prompts.meta_info.get("validate", False))
        if not has_scores:
            policy = attrs.evolve(policy, unrewarded="trainer")
        elif validates and policy.unrewarded == "group_mean":
            policy = attrs.evolve(policy, unrewarded="zero")  # its mean is of all rows
        made = trainer_rows(
            trajectories,
            policy,
            eos_token_id=self._eos,
            lengths=self.settings.config.lengths,
            warned=self._warned,
        )
        rows = [_as_returned(row, row_of_trajectory(row.trajectory).output) for row in made.rows]
        cut = sum("cut_prompt_tokens" in each.metrics for each in trajectories)
        decided = {**made.metrics, "rows/cut_prompts": float(cut)}
        self.metrics = {**metrics, **decided}
        return data_proto(
            self._worker,
            prompts,
            rows,
            outputs,
            lengths=self.settings.config.lengths,
            has_scores=has_scores,
            metrics={f"agent_loop/{name}": value for name, value in decided.items()},
        )

    @property
    def _eos(self) -> int:
        tokenizer = self._worker.tokenizer
        return int(tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0)

    def _open(self, llm_client: Any, sessions: Sessions | None) -> BlockingRollout:
        options, config = self.settings.options, self.settings.config
        placement = None
        if sessions is not None:
            client, known = watched(llm_client), sessions

            def wrap(_: str, core: EngineCore) -> EngineCore:
                assert isinstance(core, ClientCore)
                return core.over(client, known)

            placement = InProcess(wrap=wrap)
        users = options.interaction_config_path
        make = functools.partial(
            open_rollout_on,
            functools.partial(open_engines, placement=placement),
            config,
            tools_of(self._worker),
            GivenRewards(self._adapter.score if self._adapter.scores else None),
            load_verl_interactions(users) if users else (),
        )
        return BlockingRollout(make, options.backend)


#: Those of this process: verl makes its checkpoint manager without telling it of any.
_open: weakref.WeakSet[AgentLoopManager] = weakref.WeakSet()


def manager_with_engines() -> AgentLoopManager | None:
    """A manager of this process whose engines are ours; None where there is none."""
    return next((each for each in _open if each.settings.has_own_engines), None)


def _as_returned(row: Any, output: Any) -> Any:
    """A row with the tokens that its loop of verl's returned, where one did."""
    if output is None:
        return row
    mask = np.array(output.response_mask, dtype=np.bool_)
    # A loop may return tokens that no engine has sampled: its row is not learned from then.
    is_masked = not row.mask.any() and (bool(row.sampled.any()) or not row.is_trainable)
    log_probs = output.response_logprobs
    return attrs.evolve(
        row,
        prompt_ids=np.array(output.prompt_ids, dtype=np.int32),
        response_ids=np.array(output.response_ids, dtype=np.int32),
        sampled=mask,
        mask=np.zeros_like(mask) if is_masked else mask,
        log_probs=np.array([0.0] * len(mask) if log_probs is None else log_probs, np.float32),
    )


def _traced(index: Any) -> set[int]:
    """Rows that are traced: those of a few samples, where the configuration says so."""
    most = RolloutTraceConfig.get_instance().max_samples_per_step_per_worker
    if most is None:
        return set(range(len(index)))
    chosen = set(np.unique(index)[:most].tolist())
    return {at for at, sample in enumerate(index.tolist()) if sample in chosen}


def _settings(config: Any, worker: Any, opened: ExitStack) -> Settings:
    """The configuration in our words; files that it needs are there until `opened` is closed."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    model, tokenizer = worker.model_config, worker.tokenizer
    template = None
    if model.get("custom_chat_template", None) is not None:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="rollout-verl-"))
        template = Path(directory, "chat_template.jinja")
        template.write_text(model.custom_chat_template, encoding="utf-8")
    ends = getattr(model.generation_config, "eos_token_id", None)
    given = [ends] if isinstance(ends, int) else list(ends or ())
    eos = {*given, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    text = getattr(model.hf_config, "text_config", model.hf_config)
    return settings_of(
        plain,
        Model(
            path=model.local_path,
            tokenizer_path=model.local_tokenizer_path,
            trust_remote_code=bool(model.trust_remote_code),
            chat_template_path=None if template is None else str(template),
            chat_template_kwargs=plain["data"].get("apply_chat_template_kwargs") or {},
            vocab_size=max(len(tokenizer), getattr(text, "vocab_size", 0) or 0),
            eos_ids=tuple(sorted(eos)),
        ),
    )
