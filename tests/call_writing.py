"""How the models of each tool-call format write a call, and the tags that they write it with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Write = Callable[[str, Mapping[str, Any]], str]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("write", filePath={"type": "string"}, content={"type": "string"}),
    tool("exec", command={"type": "string"}),
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
]


def hermes(name: str, arguments: Mapping[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def function(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<function={name}>\n{''.join(lines)}</function>"


def qwen3_coder(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{function(name, arguments)}\n</tool_call>"


def seed_oss(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<seed:tool_call>\n{function(name, arguments)}\n</seed:tool_call>"


def glm4(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def invoke(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()]
    return f'<invoke name="{name}">\n{"".join(lines)}</invoke>'


def minimax_m2(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<minimax:tool_call>\n{invoke(name, arguments)}\n</minimax:tool_call>"


def deepseek_v3(name: str, arguments: Mapping[str, Any]) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def kimi_k2(name: str, arguments: Mapping[str, Any]) -> str:
    call = (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
    )
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def llama3(name: str, arguments: Mapping[str, Any]) -> str:
    return "<|python_tag|>" + json.dumps({"name": name, "parameters": arguments})


def mistral(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def pythonic(name: str, arguments: Mapping[str, Any]) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|python_start|>[{name}({written})]<|python_end|>"


def gpt_oss(name: str, arguments: Mapping[str, Any]) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


def gemma(name: str, arguments: Mapping[str, Any]) -> str:
    written = ",".join(
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}"
        for key, value in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{written}}}<tool_call|>"


WRITE: dict[str, Write] = {
    "deepseek_v3": deepseek_v3,
    "gemma": gemma,
    "glm4": glm4,
    "gpt_oss": gpt_oss,
    "hermes": hermes,
    "kimi_k2": kimi_k2,
    "llama3": llama3,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
    "seed_oss": seed_oss,
}
#: What opens calls, and what closes them, the outermost first.
OPENING = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "gemma": ("<|tool_call>", "<start_function_call>"),
    "glm4": ("<tool_call>", "<arg_key>", "<arg_value>"),
    "gpt_oss": ("<|channel|>", "<|message|>", "<|constrain|>"),
    "hermes": ("<tool_call>",),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    ),
    "llama3": ("<|python_tag|>", "<function=exec>"),
    "minimax_m2": ("<minimax:tool_call>", '<invoke name="exec">', '<parameter name="command">'),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "pythonic": ("<|python_start|>",),
    "qwen3_coder": ("<tool_call>", "<function=exec>", "<parameter=command>", "<function="),
    "seed_oss": ("<seed:tool_call>", "<function=exec>", "<parameter=command>"),
}
CLOSING = {
    "deepseek_v3": ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"),
    "gemma": ("<tool_call|>", "<end_function_call>"),
    "glm4": ("</tool_call>", "</arg_key>", "</arg_value>"),
    "gpt_oss": ("<|call|>", "<|end|>"),
    "hermes": ("</tool_call>",),
    "kimi_k2": ("<|tool_calls_section_end|>", "<|tool_call_end|>"),
    "llama3": ("</function>",),
    "minimax_m2": ("</minimax:tool_call>", "</invoke>", "</parameter>"),
    "mistral": (),
    "pythonic": ("<|python_end|>",),
    "qwen3_coder": ("</tool_call>", "</function>", "</parameter>"),
    "seed_oss": ("</seed:tool_call>", "</function>", "</parameter>"),
}
#: Formats that write values without marks around them.
BARE = ("glm4", "minimax_m2", "qwen3_coder", "seed_oss")
