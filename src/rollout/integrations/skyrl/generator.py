"""SkyRL's generator: its prompts run as agents of this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import get_rollout_metrics

from rollout.errors import ConfigError
from rollout.integrations.adapter import Adapter
from rollout.integrations.served_engines import engines_at
from rollout.integrations.skyrl.output import generator_output, policy_for, prompts_of
from rollout.integrations.trainer_settings import refuse_nan, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.weights import UpdateMode, WeightSource


class RolloutGenerator(GeneratorInterface):
    """A `GeneratorInterface` for SkyRL's trainers; `RolloutExp` makes one.

    Args:
        settings: `TrainerSettings`, or where to find them: ``package.module:name``.
        server_urls: Base URLs of SkyRL's vLLM servers, where `settings.engines` is "trainer".
        model: What they serve: a path or a hub name.
        wants_experts: Whether SkyRL replays routed experts, which its servers tell none of here.
        step_wise: `generator.step_wise_trajectories`: trajectories may then have several rows.
        zero_reward_on_non_stop, apply_overlong_filtering: As `generator` has them.

    Raises:
        ConfigError: Settings are none of what they may be, or there are no servers.
        As `open_rollout`.
    """

    def __init__(
        self,
        settings: Any,
        *,
        server_urls: Sequence[str] = (),
        model: str | None = None,
        wants_experts: bool = False,
        step_wise: bool = False,
        zero_reward_on_non_stop: bool = False,
        apply_overlong_filtering: bool = False,
    ) -> None:
        found = settings_of(settings, "rollout")
        refuse_nan(found, "SkyRL")
        if found.engines == "trainer":
            _refuse_experts(wants_experts)
            found = engines_at(found, server_urls, api="vllm", model=model)
        self._step_wise = step_wise
        self._options: dict[str, Any] = {
            "step_wise": step_wise,
            "zero_reward_on_non_stop": zero_reward_on_non_stop,
            "apply_overlong_filtering": apply_overlong_filtering,
            "unrewarded": found.policy.unrewarded,
        }
        self._prompt_of = found.prompt_of
        self._adapter = Adapter(found, policy_for(found.policy, step_wise=step_wise))

    async def generate(
        self, input_batch: GeneratorInput, disable_tqdm: bool = False
    ) -> GeneratorOutput:
        """Every prompt of the input as a trajectory, in its order; several calls may run at once.

        Cancellation ends the call's trajectories and passes through.

        Raises:
            PromptError, ConfigError: The input is none of what it may be; nothing has run.
        """
        given = cast("dict[str, Any]", input_batch)
        about = given.get("batch_metadata")
        placed = await self._adapter.rows(
            prompts_of(given, self._prompt_of),
            step=None if about is None else about.global_step,
            validate=about is not None and about.training_phase == "eval",
        )
        identities = given.get("trajectory_ids")
        output = generator_output(
            placed.rows,
            identities,
            placed.places,
            placed.metrics,
            processor=self._adapter.runtime.template.processor,
            **self._options,
        )
        output["rollout_metrics"] |= get_rollout_metrics(
            output["response_ids"],
            output["rewards"],
            loss_masks=output["loss_masks"],
            trajectory_completion_times=output["trajectory_generation_times"],
        )
        return cast("GeneratorOutput", output)

    def update_weights(
        self, *, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Have engines of `settings.config` take weights; SkyRL updates its own servers itself."""
        self._adapter.update_weights(version=version, source=source, mode=mode)

    def close(self) -> None:
        """End the runtime; the end of the process does so too."""
        self._adapter.close()


def _refuse_experts(wants_experts: bool) -> None:
    if wants_experts:
        raise ConfigError(
            "generator.inference_engine.enable_return_routed_experts = True: SkyRL's servers are "
            "asked for no routed experts; expected False, or engines = 'config' with engines that "
            "tell them"
        )
