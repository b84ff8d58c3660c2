"""On the GPUs of a trainer: two replicas that share the memory of its workers' GPUs.

Ray is asked for no GPU. The trainer, which has joined the cluster, says where its workers sit:

    gpu_slots = rollout.engine.gpu_slots_of(workers)               # ("<node>:0", "<node>:1")
    config = load_config("conf/sglang_colocated.py", [f"placement.colocate={list(gpu_slots)}"])

``node:0`` below stands for such a place. The engines take what `memory_fraction` leaves to the
trainer's weights, gradients and optimizer.
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
    model=ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct"),
    engine=SGLangEngine(replicas=2, dtype="bfloat16", memory_fraction=0.4, max_running=128),
    placement=RayPlacement(address="auto", colocate=("node:0", "node:1")),
    lengths=LengthsConfig(prompt=2048, response=6144, turn=2048),
    agent=AgentConfig(name="tool_agent", max_assistant_turns=16),
    scheduling=SchedulingConfig(samples_per_prompt=8, max_in_flight=512),
    seed=0,
)
