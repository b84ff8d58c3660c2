"""SkyRL's entry point with our generator: ``trainer.override_entrypoint`` names this package."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from rollout.errors import ConfigError
from rollout.integrations.skyrl.generator import RolloutGenerator

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The argument that names the settings.
OPTION = "rollout="


class RolloutExp(BasePPOExp):
    """SkyRL's experiment, whose trajectories are agents of this library.

    Args:
        cfg: SkyRL's configuration.
        settings: As for `RolloutGenerator`.
    """

    def __init__(self, cfg: SkyRLTrainConfig, settings: Any) -> None:
        super().__init__(cfg)
        self._rollout_settings = settings

    def get_generator(
        self, cfg: Any, tokenizer: Any, inference_engine_client: Any
    ) -> RolloutGenerator:
        """Ours, on the servers that SkyRL has started."""
        generator = cfg.generator
        return RolloutGenerator(
            self._rollout_settings,
            server_urls=server_urls(inference_engine_client),
            model=cfg.trainer.policy.model.path,
            wants_experts=generator.inference_engine.enable_return_routed_experts,
            step_wise=generator.step_wise_trajectories,
            zero_reward_on_non_stop=generator.zero_reward_on_non_stop,
            apply_overlong_filtering=generator.apply_overlong_filtering,
        )


def server_urls(client: Any) -> Sequence[str]:
    """Where SkyRL's servers listen: each, else what stands before them."""
    return getattr(client, "server_urls", None) or [client.get_endpoint_url()]


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Where the settings are, and the arguments that are SkyRL's.

    Raises:
        ConfigError: None of them, or several, say ``rollout=``.
    """
    named = [each for each in arguments if each.startswith(OPTION)]
    if len(named) != 1:
        raise ConfigError(
            f"arguments: expected rollout=package.module:name once, got it {len(named)} times"
        )
    return named[0].removeprefix(OPTION), [each for each in arguments if each not in named]


@ray.remote(num_cpus=1)
def _train(cfg: SkyRLTrainConfig, settings: str) -> None:
    RolloutExp(cfg, settings).run()


def main() -> None:
    """Train with SkyRL as the command's arguments say.

    Raises:
        ConfigError: ``rollout=`` is not among them.
    """
    settings, arguments = split_arguments(sys.argv[1:])
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(_train.remote(cfg, settings))
