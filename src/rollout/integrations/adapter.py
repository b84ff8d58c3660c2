"""A runtime inside a trainer: what the trainer sends as prompts, and rows in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from rollout.integrations.trainer_row import TrainerRow
from rollout.integrations.trainer_rows import trainer_rows

if TYPE_CHECKING:
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.integrations.repeated_prompts import Repeated
    from rollout.integrations.row_policy import RowPolicy
    from rollout.integrations.trainer_settings import TrainerSettings
    from rollout.runtime.blocking import BlockingRollout
    from rollout.runtime.opening import EngineOpener


@attrs.frozen(kw_only=True, eq=False)
class PlacedRows:
    """Rows in the order of what the trainer sent, those of one trajectory adjacent.

    Attributes:
        rows: One for each segment that the policy keeps.
        places: Of each row, where its trajectory stands in what the trainer sent.
        metrics: Of the batch, and what the policy decided.
    """

    rows: Sequence[TrainerRow]
    places: Sequence[int]
    metrics: dict[str, float]


class Adapter:
    """What runs inside a trainer, until it is closed or its process ends.

    Args:
        settings: What runs.
        policy: In place of the settings' own.
        engines: Opens the engines; None: as the settings' configuration says.

    Attributes:
        runtime: Where agents run: a thread of its own.
        settings: What it was made with.

    Raises:
        As `open_rollout`.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        policy: RowPolicy | None = None,
        engines: EngineOpener | None = None,
    ) -> None:
        self.settings = settings
        self.runtime: BlockingRollout = settings.open(engines)
        self._policy = settings.policy if policy is None else policy
        self._warned: set[str] = set()

    async def rows(self, repeated: Repeated, *, step: int | None, validate: bool) -> PlacedRows:
        """Run every member of every group; cancellation ends them.

        Raises:
            As `RolloutRuntime.generate` and `trainer_rows`.
        """
        trajectories, metrics = await repeated.run(self.runtime, step=step, validate=validate)
        template = self.runtime.template
        end = template.eos_token_id
        made = trainer_rows(
            trajectories,
            self._policy,
            eos_token_id=template.pad_token_id if end is None else end,
            warned=self._warned,
        )
        place = {id(each): at for at, each in enumerate(trajectories)}
        return PlacedRows(
            rows=made.rows,
            places=[place[id(row.trajectory)] for row in made.rows],
            metrics={**metrics, **made.metrics},
        )

    def update_weights(
        self, *, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Have engines of `settings.config` take weights; see `RolloutRuntime.update_weights`."""
        self.runtime.update_weights(version=version, source=source, mode=mode)

    def close(self) -> None:
        """End the runtime; what still runs in it fails. Idempotent."""
        self.runtime.close()
