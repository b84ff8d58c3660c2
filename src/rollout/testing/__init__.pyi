# ruff: isort: skip_file
from rollout.config import SimulatedEngine as SimulatedEngine
from rollout.engine.cores.simulated.simulated_core import (
    SimulatedCore as SimulatedCore,
    SimulatedDeath as SimulatedDeath,
)
from rollout.engine.cores.simulated.vocabulary import (
    decode_ids as decode_ids,
    encode_text as encode_text,
    expected_log_prob as expected_log_prob,
    simulated_tokenizer as simulated_tokenizer,
)
from rollout.testing.clock import hold_clock as hold_clock
from rollout.testing.scenario import Scenario as Scenario, tool_call as tool_call
from rollout.testing.schedule import run_virtual as run_virtual, schedule_seed as schedule_seed
