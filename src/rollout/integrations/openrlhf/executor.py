"""OpenRLHF's executor: its prompts run as agents of this library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
from openrlhf.utils.agent import AgentExecutorBase

from rollout.config import CustomEngine
from rollout.engine.placement.in_process import InProcess
from rollout.engine.pool.opening import open_engines
from rollout.errors import ConfigError, RolloutError
from rollout.integrations.adapter import Adapter
from rollout.integrations.openrlhf.llm_core import LlmCore
from rollout.integrations.openrlhf.response import policy_for, prompt_of_arguments, response_of
from rollout.integrations.repeated_prompts import Repeated
from rollout.integrations.served_engines import evolved
from rollout.integrations.trainer_row import TrainerRow
from rollout.integrations.trainer_settings import refuse_nan, settings_of
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rollout.integrations.trainer_settings import TrainerSettings
    from rollout.runtime.opening import EngineOpener
    from rollout.types import Prompt


@attrs.define(eq=False)
class _Group:
    """Calls with the same prompt, begun together: the members of one group."""

    size: int = 1
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    rows: Sequence[TrainerRow] = ()
    error: Exception | None = None


class RolloutExecutor(AgentExecutorBase):
    """An `AgentExecutor` for OpenRLHF; `agent_executor` makes one for an agent's file.

    The calls that OpenRLHF begins at once for one prompt are one group.

    Args:
        settings: `TrainerSettings`, or where to find them: ``package.module:name``.

    Raises:
        ConfigError: Settings are none of what they may be.
    """

    def __init__(self, settings: Any) -> None:
        self._settings: TrainerSettings = settings_of(settings, "agent_executor")
        refuse_nan(self._settings, "OpenRLHF")
        self._groups: dict[Hashable, _Group] = {}
        self._adapter: Adapter | None = None
        self._opening = anyio.Lock()

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """One trajectory, as OpenRLHF reads it; cancelling the first call of a group ends it.

        Raises:
            ConfigError, PromptError: An argument is none of what it may be; nothing has run.
            RolloutError: The group's first call ended before.
        """
        _refuse(self._settings, max_length)
        made = prompt_of_arguments(prompt, label, sampling_params, self._settings.prompt_of, images)
        key = (prompt, repr(label), max_length, id(sampling_params), repr(images))
        group = self._groups.get(key)
        if group is not None:
            member, group.size = group.size, group.size + 1
            await group.ended.wait()
        else:
            member, group = 0, _Group()
            self._groups[key] = group
            opened = partial(self._opened, sampling_params, max_length, hf_tokenizer, llm_engine)
            await self._run(key, group, made, opened)
        if not group.rows:
            said = "cancelled" if group.error is None else str(group.error)
            raise RolloutError(f"the first call of the group ended: {said}") from group.error
        row = group.rows[member]
        has_log_probs = sampling_params.logprobs is not None
        return response_of(
            row,
            prompt=prompt,
            label=label,
            images=images,
            has_log_probs=has_log_probs,
            processor=self._adapter.runtime.template.processor if self._adapter else None,
        )

    def close(self) -> None:
        """End the runtime; the end of the process does so too."""
        if self._adapter is not None:
            self._adapter.close()

    async def _run(self, key: Hashable, group: _Group, prompt: Prompt, opened: Any) -> None:
        """Run a group, once the calls that were begun with the first one have joined it."""
        try:
            try:
                await anyio.lowlevel.checkpoint()
            finally:
                del self._groups[key]
            adapter: Adapter = await opened()
            said = hashlib.blake2b(repr(prompt.messages).encode(), digest_size=8).hexdigest()
            repeated = Repeated(prompts=[prompt], places=[range(group.size)])
            named = repeated.renamed([f"prompt-{said}"])
            group.rows = (await adapter.rows(named, step=None, validate=False)).rows
        except Exception as error:
            group.error = error
            raise
        finally:
            group.ended.set()

    async def _opened(
        self, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> Adapter:
        """The adapter, opened by whichever call is first."""
        async with self._opening:
            if self._adapter is None:
                settings, engines = self._settings, None
                if settings.engines == "trainer":
                    core = LlmCore(
                        llm_engine,
                        sampling_params,
                        WorkerThreads.on_current_loop(cleanup_s=settings.config.limits.cleanup_s),
                        max_length,
                    )
                    settings = _on_trainer(settings, hf_tokenizer.name_or_path)
                    engines = _opener(core)
                make = partial(Adapter, settings, policy_for(settings.policy), engines)
                self._adapter = await anyio.to_thread.run_sync(make)
            return self._adapter


def agent_executor(settings: Any) -> type[RolloutExecutor]:
    """The class that a file named by ``--train.agent_func_path`` calls ``AgentExecutor``.

    Args:
        settings: As for `RolloutExecutor`.
    """

    class AgentExecutor(RolloutExecutor):
        """Made without arguments, as OpenRLHF makes it."""

        def __init__(self) -> None:
            super().__init__(settings)

    return AgentExecutor


def _refuse(settings: TrainerSettings, max_length: int) -> None:
    """Refuse what would be cut or lost.

    Raises:
        ConfigError: It is asked for.
    """
    lengths = settings.config.lengths
    if lengths.prompt + lengths.response > max_length:
        raise ConfigError(
            f"lengths.prompt + lengths.response = {lengths.prompt + lengths.response}: expected at "
            f"most max_length = {max_length}, after which OpenRLHF cuts"
        )


def _on_trainer(settings: TrainerSettings, model: str) -> TrainerSettings:
    engine = CustomEngine(core="builtins:object")  # in whose place `_opener` puts another
    return attrs.evolve(settings, config=evolved(settings.config, model, engine=engine))


def _opener(core: LlmCore) -> EngineOpener:
    """Opens a pool whose one engine is this core."""
    return partial(open_engines, placement=InProcess(wrap=lambda _, __: core))
