"""What a trainer's adapter runs: one object, which a trainer's own settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rollout.config import RolloutConfig
from rollout.engine.pool.opening import open_engines
from rollout.errors import ConfigError
from rollout.integrations.row_policy import RowPolicy
from rollout.runtime.blocking import BlockingRollout
from rollout.runtime.opening import open_rollout_on
from rollout.scheduling.rewards.functions import GivenRewards
from rollout.types import Prompt
from rollout.user_code import named_object

if TYPE_CHECKING:
    from rollout.runtime.opening import EngineOpener

#: What a reference to settings looks like.
_EXPECTED = "expected file.py:name or package.module:name of a TrainerSettings"


@attrs.frozen(kw_only=True)
class TrainerSettings:
    """What runs inside a trainer, and on which engines.

    Raises:
        ConfigError: A field is none of what it may be.
    """

    #: Lengths, limits, the agent, tools by name and all else.
    config: RolloutConfig = attrs.field(validator=attrs.validators.instance_of(RolloutConfig))
    #: As for `open_rollout`.
    reward: Callable[..., Any] | str | None = None
    group_reward: Callable[..., Any] | str | None = None
    tools: Sequence[Any] = ()
    interactions: Sequence[Any] = ()
    #: What becomes of what the trainer cannot represent.
    policy: RowPolicy = attrs.field(factory=RowPolicy)
    #: "trainer": those that the trainer starts and gives its weights to; `config.engine`,
    #: `config.placement` and `config.model.path` then follow from it. "config": those of `config`;
    #: the trainer's weights do not reach them by themselves.
    engines: Literal["trainer", "config"] = attrs.field(default="trainer")
    #: One row of the trainer's data, by columns, as a prompt; None reads the columns of a prompts
    #: file: ``prompt`` or ``messages``, ``ground_truth``, ``data_source``, ``agent_name`` …
    prompt_of: Callable[[Mapping[str, Any]], Prompt] | None = None

    @engines.validator
    def _check_engines(self, _: object, value: object) -> None:
        if value not in ("trainer", "config"):
            raise ConfigError(f"engines = {value!r}: expected 'trainer' or 'config'")

    def open(self, engines: EngineOpener | None = None) -> BlockingRollout:
        """A runtime on a thread of its own, for `close` to end.

        Args:
            engines: Opens them; None: as `config` says.

        Raises:
            As `open_rollout`.
        """
        rewards = GivenRewards(self.reward, self.group_reward)
        return BlockingRollout(
            lambda: open_rollout_on(
                engines or open_engines, self.config, self.tools, rewards, self.interactions
            ),
            "trio",
        )


def settings_of(given: Any, where: str) -> TrainerSettings:
    """The settings that a trainer's option names or holds.

    Args:
        given: Settings, a function that returns them, or where to find either:
            ``package.module:name`` or ``file.py:name``.
        where: The option, for messages.

    Raises:
        ConfigError: There are none.
    """
    found = named_object(given, where, _EXPECTED) if isinstance(given, str) else given
    made = found() if callable(found) else found
    if not isinstance(made, TrainerSettings):
        raise ConfigError(f"{where} = {given!r:.200}: {_EXPECTED}, got {type(made).__name__}")
    return made


def refuse_nan(settings: TrainerSettings, trainer: str) -> None:
    """Refuse a policy whose NaN a trainer would learn from.

    Raises:
        ConfigError: Rows without reward were to have NaN, which `trainer` does not leave out.
    """
    unrewarded = settings.policy.unrewarded
    if unrewarded in ("nan", "trainer"):
        raise ConfigError(
            f"policy.unrewarded = {unrewarded!r}: {trainer} does not leave out such rows; expected "
            "'group_mean', 'zero' or 'error'"
        )
