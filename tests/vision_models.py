"""Small vision-language models of random weights, with the real processor classes of transformers.

Everything is made here: tokenizers, preprocessor configurations, templates, weights.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
CONTEXT = 4096
#: Ids 0 … 2 of every tokenizer here.
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
QWEN_TOKENS = (
    *(PAD, START, END, "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
SMOL_TOKENS = (
    *(PAD, START, END, "<fake_token_around_image>", "<image>", "<video>", "<global-img>"),
    *("<end_of_utterance>", "<tool_call>", "</tool_call>"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
)
_PARTS = """
{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type == 'image' -%}IMAGE
{%- elif part.type == 'video' -%}VIDEO
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
_MESSAGES = """
{%- for message in messages -%}
{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
{%- if message.role == 'tool' -%}
{{ '<tool_response>\n' + parts(message.content) + '\n</tool_response>' }}
{%- else -%}
{{ parts(message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\n<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
QWEN_TEMPLATE = (
    (_PARTS + _MESSAGES)
    .replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    .replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>")
)
SMOL_TEMPLATE = (_PARTS + _MESSAGES).replace("IMAGE", "<image>").replace("VIDEO", "<video>")

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokenizer(family: str) -> transformers.PreTrainedTokenizerFast:
    """One id for each byte after the special tokens."""
    specials = SMOL_TOKENS if family == "smolvlm" else QWEN_TOKENS
    words = (*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, model_max_length=CONTEXT
    )


def processor(family: str, *, max_pixels: int = 112 * 112) -> Any:
    """The family's own processor; its images have at most `max_pixels`, where it bounds them."""
    if family == "smolvlm":
        return _smol_processor()
    patch = 14 if family == "qwen2_5_vl" else 16
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": max_pixels}
    shape = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_5_vl":
        kind, video_kind = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor
    else:
        kind, video_kind = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor
    return kind(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **shape),
        tokenizer=tokenizer(family),
        video_processor=video_kind(size={**size, "longest_edge": 8 * max_pixels}, **shape),
        chat_template=QWEN_TEMPLATE,
    )


def _smol_processor() -> Any:
    sizes = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}
    return transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(**sizes),
        tokenizer=tokenizer("smolvlm"),
        video_processor=transformers.SmolVLMVideoProcessor(
            size={"longest_edge": 48}, max_image_size={"longest_edge": 48}, num_frames=4, fps=1
        ),
        image_seq_len=4,
        chat_template=SMOL_TEMPLATE,
    )


def config(family: str) -> Any:
    """Of a model of some thousand parameters."""
    words = tokenizer(family)
    ids = words.convert_tokens_to_ids
    text = {**TEXT, "vocab_size": len(words)}
    if family == "smolvlm":
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        return transformers.SmolVLMConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={
                **vision,
                "num_attention_heads": 2,
                "image_size": 48,
                "patch_size": 12,
                "initializer_range": 0.3,
            },
            scale_factor=2,
            image_token_id=ids("<image>"),
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    tokens = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.3,
    }
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
        return transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={
                **vision,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            **tokens,
        )
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,  # as in the published ones: SGLang asks for it
    }
    return transformers.Qwen3VLConfig(
        text_config={**text, "head_dim": 16, "rope_parameters": rope},
        vision_config={
            **vision,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **tokens,
    )


def save(family: str, directory: Path, *, seed: int = 0, max_pixels: int = 112 * 112) -> str:
    """Model and processor in float32, as any engine finds them; the same weights each time."""
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config(family))
    model.float().save_pretrained(directory)
    processor(family, max_pixels=max_pixels).save_pretrained(directory)
    return str(directory)


def picture(number: int, width: int = 80, height: int = 60) -> Image.Image:
    """A picture of its own for each number: coarse noise, so that it differs at any size."""
    noise = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST)


def png(number: int, width: int = 80, height: int = 60) -> bytes:
    """The file of a `picture`."""
    buffer = io.BytesIO()
    picture(number, width, height).save(buffer, "PNG")
    return buffer.getvalue()
