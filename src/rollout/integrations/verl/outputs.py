"""Trajectories as what verl's agent loops return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.integrations.row_media import images_of, media_of, videos_of
from rollout.integrations.trainer_row import row_of as trainer_row_of
from rollout.integrations.verl.rows import ROWS

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.integrations.trainer_row import TrainerRow
    from rollout.integrations.verl.rows import VerlRow
    from rollout.integrations.verl.sessions import Told


def output_of(trajectory: Trajectory, row: VerlRow, told: Told, *, log_probs: bool) -> Any:
    """A trajectory's main row as an ``AgentLoopOutput``; that of its loop, where verl's ran it."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    output = row.output
    if output is None:
        found = trainer_row_of(trajectory, trajectory.main_index, is_last=True)
        # Not checked again: that would cost as much as all the rest.
        output = AgentLoopOutput.model_construct(
            prompt_ids=found.prompt_ids.tolist(),
            response_ids=found.response_ids.tolist(),
            response_mask=found.sampled.astype(int).tolist(),
            response_logprobs=found.log_probs.tolist() if log_probs else None,
            routed_experts=_experts(told, found),
            multi_modal_data=_multi_modal_data(found),
            num_turns=trajectory.num_turns,
            metrics=AgentLoopMetrics(**_metrics(trajectory, told)),
            extra_fields=_extra_fields(trajectory, row, told, found),
        )
    output.extra_fields["raw_prompt"] = row.kwargs["raw_prompt"]
    return output


def _multi_modal_data(found: TrainerRow) -> dict[str, Any]:
    """The media of a row as verl's loops give them; its worker makes their inputs of it."""
    media = media_of(found)
    shown = {"images": images_of(media), "videos": videos_of(media)}
    return {name: each for name, each in shown.items() if each}


def _metrics(trajectory: Trajectory, told: Told) -> dict[str, Any]:
    return {
        "generate_sequences": trajectory.metrics.get("generation_s", 0.0),
        "tool_calls": trajectory.metrics.get("tool_s", 0.0),
        "num_preempted": told.num_preempted,
    }


def _experts(told: Told, found: Any) -> Any:
    """(T, layers, top_k) of the row's tokens, as far as they are known; None where none are."""
    if told.routed_experts is not None:
        return told.routed_experts[: len(found.prompt_ids) + len(found.response_ids)]
    if found.routed_experts is None:
        return None
    return found.routed_experts.clip(0)  # verl takes expert 0 for unknown


def _extra_fields(trajectory: Trajectory, row: VerlRow, told: Told, found: Any) -> dict[str, Any]:
    """What the servers said, what agent and tools attached, and what verl's loops always have."""
    given = {} if trajectory.prompt is None else trajectory.prompt.extra
    attached = {
        name: value
        for name, value in trajectory.extra.items()
        if name != ROWS and not (name in given and given[name] is value)
    }
    fields = dict(told.extra_fields)
    versions = found.weight_versions[found.sampled]
    if not told.answers and len(versions):
        fields = {
            "global_steps": int(versions[0]),
            "min_global_steps": int(versions[0]),
            "max_global_steps": int(versions[-1]),
        }
    is_ours = trajectory.prompt is not None and trajectory.prompt.agent_name in _VERL_AGENTS
    rewards = row.tool_rewards if is_ours else trajectory.tool_rewards
    return {
        **fields,
        **attached,
        "turn_scores": list(trajectory.turn_scores),
        "tool_rewards": list(rewards),
    }


_VERL_AGENTS = ("verl_tool_agent", "verl_single_turn")
