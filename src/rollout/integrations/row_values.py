"""What adapters read off a row alike."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from rollout.integrations.trainer_row import TrainerRow


def known_experts(row: TrainerRow) -> npt.NDArray[np.int16] | None:
    """(T, layers, top_k) int16 ≥ 0: 0 in the place of what nobody knows; None where nothing is."""
    experts = row.routed_experts
    return None if experts is None else np.maximum(experts, np.int16(0))


def versions_of(row: TrainerRow) -> list[int]:
    """The weight versions that sampled it, in order, each once where it changes."""
    return [version for version, _ in groupby(row.weight_versions[row.sampled].tolist())]


def runs_of(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Runs ``(start, stop, flag)`` that tile `flags`."""
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    bounds = [0, *edges.tolist(), len(flags)]
    for start, stop in pairwise(bounds):
        if start < stop:
            yield start, stop, bool(flags[start])


def facts_of(row: TrainerRow) -> dict[str, float]:
    """Numbers of a row for a trainer's logs; those that are not known are absent."""
    trajectory = row.trajectory
    versions = versions_of(row)
    facts = {
        "num_turns": float(trajectory.num_turns),
        "segment": float(row.segment),
        "is_rewarded": float(row.is_rewarded),
        "is_trainable": float(row.is_trainable),
        **trajectory.metrics,
    }
    if versions:
        facts |= {"weight_version_min": float(min(versions))}
        facts |= {"weight_version_max": float(max(versions))}
    return facts
