"""What a training looked like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from pathlib import Path

#: What a step's time is spent on.
PARTS = {"generate_s": "generate", "learn_s": "learn", "weights_s": "give weights"}


def save_curves(path: Path, curves: dict[str, list[float]]) -> None:
    """Reward, importance ratios and the split of the time, by step, as a picture."""
    figure, (rewards, ratios, times) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    steps = range(len(curves["reward"]))
    rewards.plot(steps, curves["reward"])
    rewards.set(title="mean reward", xlabel="step", ylim=(0, 1.02))
    ratios.semilogy(steps, curves["ratio_error"])
    ratios.set(title="largest |importance ratio − 1|", xlabel="step")
    times.stackplot(steps, [curves[name] for name in PARTS], labels=PARTS.values())
    times.set(title="seconds of a step", xlabel="step")
    times.legend(loc="upper right", frameon=False)
    for axes in (rewards, ratios, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
