"""Runs anywhere: the embedded 135M model on one CPU thread, with the tool-calling agent.

The model needs no download and answers in seconds, so lengths are short and groups small. A child
process holds it, as a GPU engine would be held; `sglang_one_gpu.py` is the next step up.
"""

from rollout.config import (
    EMBEDDED_MODEL,
    AgentConfig,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    TransformersEngine,
)

config = RolloutConfig(
    model=ModelConfig(path=EMBEDDED_MODEL),
    # As many requests decode together as trajectories are in flight: none waits in a queue.
    engine=TransformersEngine(max_running=16),
    placement=LocalProcessPlacement(),
    # Calls tools reliably from a few examples at this temperature, and still varies in a group.
    sampling=SamplingConfig(temperature=0.7),
    lengths=LengthsConfig(prompt=1024, response=512, turn=128),
    agent=AgentConfig(name="tool_agent", max_assistant_turns=4, max_user_turns=4),
    scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=16),
    seed=0,
)
