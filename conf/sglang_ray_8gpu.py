"""Eight GPUs through Ray: eight SGLang replicas of a 7B instruct model, one GPU each.

A model that fits one GPU serves more tokens as eight replicas than split over eight GPUs; the
router keeps each trajectory on the replica that holds its prefix. Ray may spread the replicas over
several machines; ``placement.python`` then names an interpreter that exists on all of them.
"""

from rollout.config import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RayPlacement,
    RolloutConfig,
    RouterConfig,
    SchedulingConfig,
    SGLangEngine,
)

config = RolloutConfig(
    model=ModelConfig(path="Qwen/Qwen2.5-7B-Instruct"),
    engine=SGLangEngine(replicas=8, dtype="bfloat16", memory_fraction=0.85, max_running=256),
    placement=RayPlacement(gpus_per_replica=1.0, cpus_per_replica=2.0),
    router=RouterConfig(strategy="estimated_seconds", move_margin_s=0.5),
    lengths=LengthsConfig(prompt=4096, response=12288, turn=4096),
    agent=AgentConfig(name="tool_agent", max_assistant_turns=32),
    # Twice what decodes at once: while one half waits for tools, the other keeps the GPUs busy.
    scheduling=SchedulingConfig(samples_per_prompt=16, max_in_flight=4096),
    seed=0,
)
