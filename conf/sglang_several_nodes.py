"""Four machines of eight GPUs: eight replicas of a 72B model, each over four GPUs of one machine.

Tensor parallelism wants the fast links within a machine, so a replica takes half of one. Ray
packs the replicas; ``placement.nodes`` pins them where that matters. The engines listen on their
machines' addresses and accept only peers that prove to hold a secret that Ray carried to them. A
model that one machine cannot hold spreads over several: ``engine.tensor_parallel=16`` with
``placement.machines_per_replica=2``.
"""

from rollout.config import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RayPlacement,
    RolloutConfig,
    SchedulingConfig,
    SGLangEngine,
)

config = RolloutConfig(
    model=ModelConfig(path="Qwen/Qwen2.5-72B-Instruct"),
    engine=SGLangEngine(
        replicas=8, tensor_parallel=4, dtype="bfloat16", memory_fraction=0.88, max_running=128
    ),
    placement=RayPlacement(address="auto", gpus_per_replica=4.0, cpus_per_replica=8.0),
    lengths=LengthsConfig(prompt=8192, response=24576, turn=8192),
    agent=AgentConfig(name="tool_agent", max_assistant_turns=64),
    scheduling=SchedulingConfig(samples_per_prompt=16, max_in_flight=2048),
    seed=0,
)
