"""Reward functions that run in processes of their own; `test_reward_processes` is about them."""

from __future__ import annotations

import asyncio  # noqa: TID251  (what such rewards run on)
import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout import Reward

if TYPE_CHECKING:
    from rollout import Group, Trajectory


def score(trajectory: Trajectory) -> float | Reward:
    """1, with what was given, but for prompts that say what to do in place of that."""
    match trajectory.extra.get("does"):
        case "exit":
            os._exit(7)
        case "abort":
            os.kill(os.getpid(), 11)
        case "real-time":
            os.kill(os.getpid(), 40)  # a signal without a name
        case "hang":  # without ever letting another thread run
            ctypes.PyDLL(None).sleep(600)
        case "raise":
            raise OSError("no judge")
        case "leave":
            sys.exit(3)
        case "hold":  # what only this process can
            return Reward(value=1.0, extra={"lock": object()})
    if "given" in trajectory.extra:
        return Reward(value=1.0, extra={"echo": trajectory.extra["given"]})
    return 1.0


def tell(trajectory: Trajectory) -> Reward:
    """What arrived here."""
    print("this must not disturb the pipe")
    (message,) = trajectory.prompt.messages if trajectory.prompt else ()
    segment = trajectory.segments[0]
    generated = [span for span in segment.transcript.spans if span.kind == "generated"]
    return Reward(
        value=np.float32(0.5),  # type: ignore[arg-type]
        extra={
            "pid": os.getpid(),
            "type": type(trajectory).__name__,
            "uid": trajectory.uid,
            "member": trajectory.member,
            "outcome": trajectory.outcome,
            "answer": trajectory.answer,
            "roles": [each.role for each in trajectory.messages],
            "prompt": [type(message).__name__, dict(message)],
            "ground_truth": trajectory.prompt.ground_truth if trajectory.prompt else None,
            "ids": segment.transcript.ids(),
            "log_probs": segment.transcript.log_probs().tolist(),
            "versions": segment.transcript.weight_versions().tolist(),
            "mask": segment.transcript.mask().tolist(),
            "top_ids": segment.transcript.top_ids().tolist(),
            "top_log_probs": segment.transcript.top_log_probs().tolist(),
            "experts": segment.transcript.routed_experts(),
            "finish_reasons": [span.finish_reason for span in generated],
            "session_id": segment.session_id,
            "seeds": segment.seeds,
            "num_turns": trajectory.num_turns,
            "array": trajectory.extra["array"],
            "path": sys.path,
            "python_path": os.environ["PYTHONPATH"],  # what programs would see that it starts
        },
        turn_values=[float(at + 1) for at in range(len(generated))],
    )


LOOPS: list[Any] = []


async def on_one_loop(trajectory: Trajectory) -> float:
    """1 where the loop is that of all calls before."""
    if trajectory.extra.get("does") == "leave":
        sys.exit(3)
    LOOPS.append(asyncio.get_running_loop())
    return float(LOOPS[-1] is LOOPS[0])


async def compute_score(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Written for verl, on a loop."""
    assert extra_info["num_turns"]
    return {"score": float(ground_truth in solution_str), "pid": os.getpid()}


def rank(group: Group) -> list[float | None]:
    """By length; the process ends where a prompt says so."""
    if group.prompt.extra.get("does") == "exit":
        os._exit(7)
    lengths = [len(each.answer) for each in group.trajectories]
    assert (group.min_version, group.max_version) == (0, 0)
    return [float(sorted(lengths).index(length)) for length in lengths]


def slow_then_right(trajectory: Trajectory) -> float:
    """Right from the second call on: the first leaves a file, and ends its process."""
    path = trajectory.extra["path"]
    if not os.path.exists(path):
        with open(path, "w", encoding="utf-8"):
            os._exit(1)
    return 1.0


def pixels_seen(trajectory: Trajectory) -> float:
    """Pixels of all images that the transcript has, and of those that the prompt shows."""
    from rollout.media import Media, decode

    assert trajectory.prompt is not None
    shown: list[Any] = [part for each in trajectory.prompt.messages for part in each.parts]  # type: ignore[union-attr]
    media = [each.medium for each in trajectory.transcript.media]
    media += [part for part in shown if isinstance(part, Media)]
    return float(sum(decode(medium).size // 3 for medium in media))


def tenfold(function: Any) -> Any:
    """A decorator that keeps the name."""
    return functools.wraps(function)(lambda trajectory: 10 * function(trajectory))


score_tenfold = tenfold(score)
