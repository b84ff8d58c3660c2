"""Engines of ours in verl's training step: ``actor_rollout_ref.rollout.checkpoint_manager_class``.

verl's own manager synchronises and puts to sleep the replicas that verl has started; this one the
engines of the `AgentLoopManager` in the same process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from verl.utils.ray_utils import auto_await

from rollout.engine.weights import DiskWeights
from rollout.errors import ConfigError
from rollout.integrations.verl.manager import AgentLoopManager, manager_with_engines
from rollout.integrations.verl.rollout_section import CUSTOM, ROLLOUT
from rollout.integrations.verl.weights_backend import BACKEND, weights_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MANAGERS = f"{ROLLOUT}.checkpoint_manager_class"


class CheckpointManager:
    """Gives the trainer's weights to our engines, and puts these to sleep between the batches.

    verl's own replicas, which it starts in any case, are put to sleep once and stay so.

    Args:
        config: ``actor_rollout_ref.rollout.checkpoint_engine``, with the backend `rollout_disk`.
        actor_wg: The trainer's workers.
        replicas: verl's own.

    Raises:
        ConfigError: There are no engines of ours in this process, or the backend is another one.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any]) -> None:
        manager = manager_with_engines()
        if manager is None:
            raise ConfigError(
                f"{MANAGERS}: no engines of rollout in this process; expected "
                f"{ROLLOUT}.agent.agent_loop_manager_class = rollout.integrations.verl."
                f"AgentLoopManager, and {CUSTOM}.engine"
            )
        where = f"{ROLLOUT}.checkpoint_engine"
        if config.backend != BACKEND:
            raise ConfigError(f"{where}.backend = {config.backend!r}: expected {BACKEND!r}")
        directory = (config.engine_kwargs.get(BACKEND) or {}).get("directory")
        if not directory:
            raise ConfigError(
                f"{where}.engine_kwargs.{BACKEND}.directory = {directory!r}: expected a directory "
                "that the trainer's workers and the engines see"
            )
        self._manager: AgentLoopManager = manager
        self._directory = str(directory)
        self._actor_wg, self._replicas = actor_wg, list(replicas)
        self._are_replicas_asleep = False
        self._is_asleep = False
        self._step: int | None = None

    def add_replicas(self, replicas: Iterable[Any]) -> None:
        """verl has started more of its own."""
        self._replicas.extend(replicas)
        self._are_replicas_asleep = False

    def remove_replicas(self, replicas: Iterable[Any]) -> None:
        """verl has ended some of its own."""
        gone = set(replicas)
        self._replicas = [each for each in self._replicas if each not in gone]

    @auto_await
    async def sleep_replicas(self) -> None:
        """Our engines have released their memory, where ``free_cache_engine`` says so."""
        if not self._are_replicas_asleep:
            self._are_replicas_asleep = True
            for each in self._replicas:
                await each.sleep()
        if self._manager.frees_memory and not self._is_asleep:
            self._is_asleep = True
            await anyio.to_thread.run_sync(self._manager.rollout.sleep, 2)

    @auto_await
    async def wake_up_replicas(self) -> None:
        """Our engines have their memory back."""
        await self._wake_up(("weights", "kv_cache"))

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """Our engines have released their KV cache."""
        if self._manager.frees_memory and not self._is_asleep:
            self._is_asleep = True
            await anyio.to_thread.run_sync(self._manager.rollout.sleep, 1)

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        """Our engines have their KV cache back."""
        await self._wake_up(("kv_cache",))

    @auto_await
    async def abort_replicas(self, reject_request: bool = False) -> None:
        """Nothing: a sleep or an update cuts requests off, which keep their tokens and resume."""

    @auto_await
    async def resume_generation_replicas(self) -> None:
        """Nothing: see `abort_replicas`."""

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Our engines generate with the trainer's weights; tokens are stamped with the step.

        Raises:
            EngineError: No engine could load them.
        """
        step = (0 if self._step is None else self._step) if global_steps is None else global_steps
        if step != self._step:
            await anyio.to_thread.run_sync(self._update, step)
        await self._wake_up(("weights", "kv_cache"))
        return {}

    def _update(self, step: int) -> None:
        import ray

        ray.get(self._actor_wg.update_weights(global_steps=step, mode=BACKEND))
        target, last = weights_directory(self._directory, step), self._step
        for file in Path(self._manager.model_path).glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, target)
        rollout = self._manager.rollout
        if self._is_asleep:
            rollout.wake_up(("weights",))
        rollout.update_weights(version=step, source=DiskWeights(str(target)))
        self._step = step
        if last is not None:
            shutil.rmtree(weights_directory(self._directory, last), ignore_errors=True)

    async def _wake_up(self, tags: tuple[str, ...]) -> None:
        if self._is_asleep:
            self._is_asleep = False
            await anyio.to_thread.run_sync(self._manager.rollout.wake_up, tags)
