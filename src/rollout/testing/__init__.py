"""An engine without a model, and tests in virtual time: for your agents, tools and rewards.

Names are imported on first use: an engine process that simulates needs neither pytest nor
transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.config import SimulatedEngine
    from rollout.engine.cores.simulated.simulated_core import SimulatedCore, SimulatedDeath
    from rollout.engine.cores.simulated.vocabulary import (
        decode_ids,
        encode_text,
        expected_log_prob,
        simulated_tokenizer,
    )
    from rollout.testing.clock import hold_clock
    from rollout.testing.scenario import Scenario, tool_call
    from rollout.testing.schedule import run_virtual, schedule_seed

_HOMES = {
    "rollout.config": ("SimulatedEngine",),
    "rollout.testing.clock": ("hold_clock",),
    "rollout.testing.scenario": ("Scenario", "tool_call"),
    "rollout.testing.schedule": ("run_virtual", "schedule_seed"),
    "rollout.engine.cores.simulated.simulated_core": ("SimulatedCore", "SimulatedDeath"),
    "rollout.engine.cores.simulated.vocabulary": (
        "decode_ids",
        "encode_text",
        "expected_log_prob",
        "simulated_tokenizer",
    ),
}
__all__ = [
    "Scenario",
    "SimulatedCore",
    "SimulatedDeath",
    "SimulatedEngine",
    "decode_ids",
    "encode_text",
    "expected_log_prob",
    "hold_clock",
    "run_virtual",
    "schedule_seed",
    "simulated_tokenizer",
    "tool_call",
]
__getattr__ = lazy_exports(globals(), _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
