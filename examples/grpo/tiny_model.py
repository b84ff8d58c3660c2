"""A model of 330,000 parameters that knows the form of the task only, made in seconds."""

from __future__ import annotations

import random  # noqa: TID251  (which keys are shown; no seed of the library's)
from itertools import product
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = (
    "red", "blue", "green", "black", "white", "brown", "pink", "grey",
    "gold", "silver", "orange", "purple",
)  # fmt: skip
SHAPES = ("round", "square", "flat", "long", "bent")
#: A prompt of 32 tokens has room for a question, a response of 48 for two turns.
PROMPT, RESPONSE = 32, 48

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for call in message.tool_calls or [] %}"
    '[unlock(door="{{ call.function.arguments.door }}", '
    'key="{{ call.function.arguments.key }}")]'
    "{% endfor %}{{ message.content or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def question(colour: str) -> str:
    """What the user says."""
    return f"open the {colour} door"


def call(colour: str, shape: str) -> str:
    """What the model says to try a key."""
    return f'[unlock(door="{colour}", key="{shape}")]'


def answer_of(colour: str, *, is_open: bool) -> str:
    """What the tool says."""
    return f"the {colour} door {'is open' if is_open else 'stays shut'}"


def key_of(colour: str, seed: int) -> str:
    """The key that opens this door; none does where there is no such door."""
    if colour not in COLOURS:
        return ""
    shapes = [SHAPES[number % len(SHAPES)] for number in range(len(COLOURS))]
    random.Random(seed).shuffle(shapes)
    return shapes[COLOURS.index(colour)]


def save_tiny_model(directory: Path, seed: int) -> None:
    """A Llama of two layers, its tokenizer and its template, after a supervised start.

    The start shows how a key is tried, with keys drawn at random: which key opens which door is
    left to find out.
    """
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _show_the_form(model, tokenizer, random.Random(seed))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pieces of the words that occur."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [question(colour) for colour in COLOURS] + [
        call(*each) for each in product(COLOURS, SHAPES)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=403,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*texts, "is open", "stays shut", "done"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _show_the_form(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> None:
    """Supervised steps on whole conversations; only what the model is to say counts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(160):
        rows = [_conversation(tokenizer, draw) for _ in range(32)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([each + [0] * (width - len(each)) for each, _ in rows])
        said = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows]).bool()
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[said[:, 1:]], ids[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _conversation(
    tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> tuple[list[int], list[int]]:
    """Ids of one, and a 1 for each that the model said."""
    colour = draw.choice(COLOURS)
    parts = (
        (f"<|user|>{question(colour)}<|end|><|assistant|>", 0),
        (f"{call(colour, draw.choice(SHAPES))}<|end|>", 1),
        (f"<|tool|>{answer_of(colour, is_open=draw.random() < 0.5)}<|end|><|assistant|>", 0),
        ("done<|end|>", 1),
    )
    ids: list[int] = []
    mask: list[int] = []
    for text, is_said in parts:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [is_said] * len(piece)
    return ids, mask
