"""Figures of public models, written down for arithmetic where their files are not at hand.

As their ``config.json`` has them; parameters are counted over all tensors, tied ones once.
"""

from __future__ import annotations

import attrs

from rollout.config import EMBEDDED_MODEL


@attrs.frozen
class PublishedFacts:
    """What a model's files say of its size.

    Attributes:
        parameters: Of all tensors; None where they cannot be counted.
        layers: That keep keys and values.
        kv_heads: Of each layer.
        head_width: Of a key or a value.
        context: Prompt plus response in tokens; None where no length is named.
        dtype: What the weights are stored in, by torch's name.
    """

    parameters: int | None
    layers: int
    kv_heads: int
    head_width: int
    context: int | None
    dtype: str = "bfloat16"


_QWEN_2_5 = {
    "0.5B": (494_032_768, 24, 2, 64),
    "1.5B": (1_543_714_304, 28, 2, 128),
    "3B": (3_085_938_688, 36, 2, 128),
    "7B": (7_615_616_512, 28, 4, 128),
    "14B": (14_770_033_664, 48, 8, 128),
    "32B": (32_763_876_352, 64, 8, 128),
    "72B": (72_706_203_648, 80, 8, 128),
}
_QWEN_3 = {
    "0.6B": (596_049_920, 28, 8, 128),
    "1.7B": (1_720_574_976, 28, 8, 128),
    "4B": (4_022_468_096, 36, 8, 128),
    "8B": (8_190_735_360, 36, 8, 128),
    "14B": (14_768_307_200, 40, 8, 128),
    "32B": (32_762_123_264, 64, 8, 128),
}
_LLAMA_3 = {
    "3.1-8B": (8_030_261_248, 32, 8, 128),
    "3.1-70B": (70_553_706_496, 80, 8, 128),
    "3.2-1B": (1_235_814_400, 16, 8, 64),
    "3.2-3B": (3_212_749_824, 28, 8, 128),
    "3.3-70B": (70_553_706_496, 80, 8, 128),
}
_MODELS = {
    EMBEDDED_MODEL: PublishedFacts(134_515_008, 30, 3, 64, 8192),
    **{
        f"Qwen/Qwen2.5-{size}-Instruct": PublishedFacts(*f, 32_768) for size, f in _QWEN_2_5.items()
    },
    **{f"Qwen/Qwen3-{size}": PublishedFacts(*f, 40_960) for size, f in _QWEN_3.items()},
    **{f"meta-llama/Llama-{n}-Instruct": PublishedFacts(*f, 131_072) for n, f in _LLAMA_3.items()},
}
_BY_NAME = {name.lower(): facts for name, facts in _MODELS.items()}


def published_facts(name: str) -> PublishedFacts | None:
    """The figures of the model with this name on the hub, in any case; None of another one."""
    return _BY_NAME.get(name.lower())
