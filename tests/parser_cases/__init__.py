"""Hand-written texts of every tool-call format, with what they mean."""

from parser_cases import (
    deepseek_v3,
    function_tags,
    gemma,
    glm4,
    gpt_oss,
    hermes,
    kimi_k2,
    llama3,
    minimax_m2,
    mistral,
    pythonic,
)
from parser_cases.case import TOOLS, Bad, Case, Good, seen

CASES = {
    "deepseek_v3": deepseek_v3.CASES,
    "gemma": gemma.CASES,
    "glm4": glm4.CASES,
    "gpt_oss": gpt_oss.CASES,
    "hermes": hermes.CASES,
    "kimi_k2": kimi_k2.CASES,
    "llama3": llama3.CASES,
    "minimax_m2": minimax_m2.CASES,
    "mistral": mistral.CASES,
    "pythonic": pythonic.CASES,
    "qwen3_coder": function_tags.QWEN3_CODER,
    "seed_oss": function_tags.SEED_OSS,
}

__all__ = ["CASES", "TOOLS", "Bad", "Case", "Good", "seen"]
