"""What `TransformersCore` was asked for."""

from __future__ import annotations

import msgspec


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is loaded and served; see `TransformersCore`."""

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    gpu: int = 0
    threads: int = 1
    max_running: int = 32
    max_queued: int = 1024
    context_length: int | None = None
