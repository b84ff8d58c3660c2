"""A vision-language model of two layers and random weights, with a real processor: no download."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout.media.torchvision_operators import declare_missing_operators

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>")
PADS = ("<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tiny_model(folder: Path) -> Path:
    """A directory that engines and runtimes open like any other model's."""
    declare_missing_operators()
    import transformers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*MARKS, *PADS],
    )
    tokenizer.chat_template = TEMPLATE
    size = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=size),
        video_processor=transformers.Qwen2VLVideoProcessor(size=size),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    ids = tokenizer.get_vocab()
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 16 * -(-len(tokenizer) // 16),
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "bos_token_id": None,
            **ends,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        **ends,
    )
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder
