"""Servers that a trainer starts, as the engines of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs

from rollout.config import HttpEngine, InProcessPlacement
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.config import RolloutConfig
    from rollout.integrations.trainer_settings import TrainerSettings


def engines_at(
    settings: TrainerSettings,
    urls: Sequence[str],
    *,
    api: Literal["sglang", "vllm"],
    model: str | None,
) -> TrainerSettings:
    """Settings whose engines are these servers; the trainer gives them its weights.

    Args:
        urls: One base URL a server.
        api: What they speak.
        model: What they serve, a path or a hub name; None leaves `config.model` as it is.

    Raises:
        ConfigError: There are no servers.
    """
    if not urls:
        raise ConfigError(
            "engines = 'trainer': the trainer names no servers; expected their URLs, or "
            "engines = 'config'"
        )
    engine = HttpEngine(urls=tuple(urls), api=api)
    return attrs.evolve(
        settings, config=evolved(settings.config, model, engine=engine), engines="config"
    )


def evolved(config: RolloutConfig, model: str | None, **sections: Any) -> RolloutConfig:
    """A configuration with engines of a trainer's on the driver's own loop.

    Args:
        model: Path or hub name in place of its own; None keeps that.
        sections: Which replace its own.
    """
    if model is not None:
        sections["model"] = attrs.evolve(config.model, path=model)
    return attrs.evolve(config, placement=InProcessPlacement(), **sections)
