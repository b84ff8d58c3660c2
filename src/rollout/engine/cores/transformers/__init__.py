"""The embedded engine: in-flight batching over a transformers model, on a CPU or a GPU.

`transformers_core` faces the event loop; `worker` is the thread that steps the model. `scheduler`
and `slots` decide, without torch, what a step computes; `stepping` computes it with `slot_model`,
`kv`, `attention` and `token_sampling`.
"""

from rollout.engine.cores.transformers.transformers_core import TransformersCore

__all__ = ["TransformersCore"]
