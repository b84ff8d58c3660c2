"""Small vision-language models for tests: real processors, random weights, no download."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from rollout.chat import load_chat_template
from rollout.config import (
    AgentConfig,
    CustomEngine,
    InProcessPlacement,
    LengthsConfig,
    MediaConfig,
    ModelConfig,
    RolloutConfig,
)
from rollout.media.processor import load_media_processor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat import ChatTemplate

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_onevision")
#: What the templates of all families write around messages.
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TOKENS = {
    "qwen2_5_vl": _QWEN_TOKENS,
    "qwen3_vl": _QWEN_TOKENS,
    "llava_onevision": ("<image>", "<video>"),
}
_PLACEHOLDERS = {
    "qwen2_5_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "llava_onevision": ("<image>\n", "<video>\n"),
}
_PLACEHOLDERS["qwen3_vl"] = _PLACEHOLDERS["qwen2_5_vl"]
_TEXT = """The quick brown fox jumps over the lazy dog. What is in this picture? It shows a red
square, a blue circle and some text. <tool_call> {"name": "crop", "arguments": {}} zoom in seconds
system user assistant tool 0 1 2 3 4 5 6 7 8 9 10 11 12 the image the video frames"""


def chat_template(family: str) -> str:
    """ChatML with media where they stand in a content; tools' answers as a role of their own."""
    image, video = _PLACEHOLDERS[family]
    return (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n"
        "{% endfor %}<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}"
        f"{{% if part.type == 'image' %}}{image}"
        f"{{% elif part.type == 'video' %}}{video}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer_of(family: str) -> Any:
    """A byte-level BPE with some merges, so that it matters where a text is cut."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([_TEXT] * 4, trainer)
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *_TOKENS[family]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=specials,
    )
    tokenizer.chat_template = chat_template(family)
    return tokenizer


def processor_of(family: str) -> Any:
    """The family's own processor, for small pictures."""
    import transformers

    tokenizer = tokenizer_of(family)
    template = chat_template(family)
    if family == "llava_onevision":
        size = {"height": 28, "width": 28}
        pinpoints = [[28, 28], [28, 56], [56, 28], [56, 56]]
        return transformers.LlavaOnevisionProcessor(
            image_processor=transformers.LlavaOnevisionImageProcessor(
                size=size, image_grid_pinpoints=pinpoints
            ),
            video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
            tokenizer=tokenizer,
            num_image_tokens=4,
            vision_feature_select_strategy="full",
            chat_template=template,
        )
    patch = 16 if family == "qwen3_vl" else 14
    factor = (2 * patch) ** 2
    size = {"shortest_edge": factor, "longest_edge": 16 * factor}
    own = "Qwen3VL" if family == "qwen3_vl" else "Qwen2VL"
    options = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    videos = getattr(transformers, f"{own}VideoProcessor")
    if family == "qwen3_vl":
        options_of_videos = options | {
            "size": {"shortest_edge": factor, "longest_edge": 64 * factor}
        }
    else:
        options_of_videos = options
    kind = "Qwen3VLProcessor" if family == "qwen3_vl" else "Qwen2_5_VLProcessor"
    return getattr(transformers, kind)(
        image_processor=transformers.Qwen2VLImageProcessor(**options),
        video_processor=videos(**options_of_videos),
        tokenizer=tokenizer,
        chat_template=template,
    )


def model_config(family: str, tokenizer: Any) -> Any:
    """A model of two layers."""
    import transformers

    ids = tokenizer.get_vocab()
    size = 16 * ((len(tokenizer) + 15) // 16)
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
    }
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    text |= ends
    if family == "llava_onevision":
        vision = transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=28,
            patch_size=14,
        )
        return transformers.LlavaOnevisionConfig(
            vision_config=vision,
            text_config=transformers.Qwen2Config(**text),
            image_token_id=ids["<image>"],
            video_token_id=ids["<video>"],
            image_grid_pinpoints=[[28, 28], [28, 56], [56, 28], [56, 56]],
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
            **ends,
        )
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    if family == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(
            text_config=text
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 4,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "window_size": 56,
                "tokens_per_second": 2,
            },
            **tokens,
            **ends,
        )
    return transformers.Qwen3VLConfig(
        text_config=text
        | {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **tokens,
        **ends,
    )


def write_model(family: str, folder: Path, *, with_weights: bool = False) -> Path:
    """A directory as they are published: tokenizer, processor, configuration, random weights."""
    processor = processor_of(family)
    processor.save_pretrained(folder)
    config = model_config(family, processor.tokenizer)
    if not with_weights:
        config.save_pretrained(folder)
        return folder
    import torch
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    return folder


@cache
def picture(width: int = 60, height: int = 44, seed: int = 0) -> Image.Image:
    """Some pixels."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def frames(count: int = 4, width: int = 56, height: int = 56, seed: int = 0) -> Any:
    """(T, H, W, 3) some frames."""
    shape = (count, height, width, 3)
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def encoded(image: Image.Image, form: str = "png") -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def video_file(count: int = 12, fps: int = 6, form: str = "mp4") -> bytes:
    """A small file of a video."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream("mpeg4" if form == "mp4" else "libvpx", rate=fps)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for pixels in frames(count, 64, 64):
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


CALL = '<tool_call>\n{"name": "show", "arguments": {}}\n</tool_call>'


@cache
def template_of(folder: Path) -> ChatTemplate:
    """The template of a model's directory, with its processor."""
    return load_chat_template(str(folder), processor=load_media_processor(str(folder)))


def config_of(folder: Path, replies: Sequence[str] = ("ok",), **media: Any) -> RolloutConfig:
    template = template_of(folder)
    ids = [template.text_ids(said + "<|im_end|>") for said in replies]
    return RolloutConfig(
        model=ModelConfig(path=str(folder)),
        engine=CustomEngine(
            core="media_core:ScriptedCore",
            options={"replies": ids, "vocab_size": template.vocab_size},
        ),
        placement=InProcessPlacement(),
        lengths=LengthsConfig(prompt=512, response=512),
        agent=AgentConfig(tool_format="hermes"),
        media=MediaConfig(**media),
    )


def image(value: Any, **more: Any) -> list[Any]:
    return [{"type": "text", "text": "Look:"}, {"type": "image", "image": value, **more}]
