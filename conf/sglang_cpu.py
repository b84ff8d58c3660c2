"""SGLang on this machine's CPU: the production engine with the embedded model, no GPU.

``make sglang-cpu`` makes its environment. For tests of a deployment, not for speed.
"""

from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LocalProcessPlacement,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    SGLangEngine,
)

config = RolloutConfig(
    engine=SGLangEngine(device="cpu", dtype="bfloat16", max_running=16),
    placement=LocalProcessPlacement(python=".venv-sglang/bin/python"),
    sampling=SamplingConfig(temperature=0.7),
    lengths=LengthsConfig(prompt=1024, response=512, turn=128),
    agent=AgentConfig(name="tool_agent", max_assistant_turns=4),
    scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=16),
    seed=0,
)
