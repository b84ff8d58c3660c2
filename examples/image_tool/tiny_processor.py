"""A vision-language model's processor and configuration, for the simulated engine: no download."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout.testing import simulated_tokenizer

#: They take the ids of bytes that no text has.
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_MARK = 0xF8
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


def write_processor(folder: Path) -> Path:
    """A directory that runtimes open like any other model's; it has no weights."""
    import transformers

    simulated = simulated_tokenizer()
    vocabulary = {text: at for text, at in simulated.get_vocab().items() if at < FIRST_MARK}
    vocabulary |= {mark: FIRST_MARK + at for at, mark in enumerate(MARKS)}
    vocabulary |= {text: at for text, at in simulated.get_vocab().items() if at >= FIRST_MARK + 4}
    special = [text for text in vocabulary if text.startswith("<|")]
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    size = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=size),
        video_processor=transformers.Qwen2VLVideoProcessor(size=size),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    start, _, image, video = (vocabulary[mark] for mark in MARKS)
    transformers.Qwen2_5_VLConfig(
        image_token_id=image, video_token_id=video, vision_start_token_id=start
    ).save_pretrained(folder)
    return folder
