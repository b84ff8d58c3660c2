"""The embedded engine: in-flight batching over a transformers model, text only, on a CPU or a GPU.

`transformers_core` faces the event loop and steps the model in a thread. `scheduler` decides,
without torch, what a step computes; `model` computes it with `attention` and its KV cache, and
`sampling` draws.
"""

from rollout.engine.cores.transformers.transformers_core import TransformersCore

__all__ = ["TransformersCore"]
