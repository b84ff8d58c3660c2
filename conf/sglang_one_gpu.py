"""One GPU on this machine: SGLang in a child process, a 1.5B instruct model from the hub.

SGLang often lives in an environment of its own: name its interpreter with
``placement.python=/path/to/python``. Where a trainer shares the GPU, lower
``engine.memory_fraction``.
"""

from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
    SGLangEngine,
)

config = RolloutConfig(
    model=ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct"),
    engine=SGLangEngine(dtype="bfloat16", memory_fraction=0.85, max_running=256),
    placement=LocalProcessPlacement(),
    lengths=LengthsConfig(prompt=2048, response=6144, turn=2048),
    agent=AgentConfig(name="tool_agent", max_assistant_turns=16),
    # Twice what decodes at once: while one half waits for tools, the other keeps the GPU busy.
    scheduling=SchedulingConfig(samples_per_prompt=8, max_in_flight=512),
    seed=0,
)
