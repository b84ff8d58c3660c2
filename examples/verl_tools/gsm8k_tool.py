"""A tool class in verl's protocol; it knows nothing of rollout, and needs nothing of verl."""

from __future__ import annotations

import itertools
from typing import Any

_ids = itertools.count()


class Gsm8kTool:
    """Compares a model's answers with the prompt's ground truth."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.penalty = config["retry_penalty"]
        self.name = tool_schema.function.name
        self.instances: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, None]:
        """Begin a trajectory."""
        instance_id = instance_id or str(next(_ids))
        truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self.instances[instance_id] = {"truth": truth, "score": 0.0}
        return instance_id, None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float, dict[str, Any]]:
        """Judge one answer; an attempt that is no better than the one before costs something."""
        instance = self.instances[instance_id]
        score = float(parameters["answer"].strip() == instance["truth"])
        reward = 0.0 if score > instance["score"] else -self.penalty
        instance["score"] = score
        return f"{parameters['answer']} scores {score}", reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last answer."""
        score: float = self.instances[instance_id]["score"]
        return score

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the trajectory."""
        del self.instances[instance_id]
