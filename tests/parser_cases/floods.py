"""Adversarial texts of any size: fragments of a format, repeated, alternated, left open."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

# fmt: off
FUNCTION_TAGS = (
    "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<function=",
    "<parameter=", "x", "<", "\n",
)
FRAGMENTS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "f\n```json\n", '{"a": ', "{}", "```",
        "<think>", "</think>", "<", '"', " ",
    ),
    "gemma": (
        "<|tool_call>", "<tool_call|>", "call:f{", "x:", '<|"|>', "<escape>", "{", "[", "1,",
        "}", "```tool_code", "f(", "<start_function_call>", "<|channel>thought", "<channel|>",
        "[f(", '"', "print(", "<", " ",
    ),
    "glm4": (
        "<tool_call>", "</tool_call>", "<tool_call>f\n", "<arg_key>k</arg_key>", "<arg_key>",
        "<arg_value>", "</arg_value>", "v", "<think>", "</think>", "<", "\n",
    ),
    "gpt_oss": (
        "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis",
        "commentary to=functions.f ", "{", "{}", "<|", "<", "to=", " ",
    ),
    "hermes": (
        "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}}", '{"a": "', '"',
        "\\", "[", "1,", "<think>", "</think>", "<", " ",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>", "<|tool_call_argument_begin|>", "functions.f:0", '{"a": "', "{}",
        "<think>", "</think>", "<", '"', " ",
    ),
    "llama3": (
        "<|python_tag|>", '{"name": "f", "parameters": {', "}};", '; {"name": ', '"',
        "<function=f>", "</function>", "f.call(", "x=", "(", "{", "[", "<think>", "</think>",
        "\\", "<", " ",
    ),
    "minimax_m2": (
        "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>",
        '<parameter name="x">', "</parameter>", '<invoke name="', "1", "<think>", "</think>",
        "<", "\n",
    ),
    "mistral": (
        "[TOOL_CALLS]", "[", "{", '{"name": "f", "arguments": {}},', "f[ARGS]", "[CALL_ID]",
        "{}", "]", '"', "[THINK]", "[/THINK]", "\\", "a", "<", " ",
    ),
    "pythonic": (
        "[", "f(", "[f(", "[f(x=1)]", "a[f(x=1]", "x=", ")", "]", '"', "'", '"""', "\\", "{",
        "1,", "<|python_start|>", "<think>", "\n", "<",
    ),
    "qwen3_coder": (
        "<tool_call>", "</tool_call>", "<think>", "</think>", *FUNCTION_TAGS,
    ),
    "seed_oss": (
        "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", *FUNCTION_TAGS,
    ),
}
# fmt: on


def floods(name: str, size: int) -> Iterator[tuple[str, str]]:
    """Descriptions and texts of about `size` characters for the format `name`."""

    def repeated(unit: str) -> str:
        return unit * (size // len(unit) + 1)

    fragments = FRAGMENTS[name]
    for one in fragments:
        yield f"{one!r} *", repeated(one)
    for one, other in itertools.permutations(fragments, 2):
        yield f"{one + other!r} *", repeated(one + other)
        yield f"{one!r}, {other!r} *", one + repeated(other)
        yield f"{one!r} *, {other!r}", repeated(one) + other
    for three in itertools.permutations(fragments[:7], 3):
        yield f"{''.join(three)!r} *", repeated("".join(three))
