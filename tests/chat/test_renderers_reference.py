"""What new messages add after a turn, against Prime Intellect's `renderers`, where it is installed.

Its renderers are written by hand, one for each family: another way to the same tokens.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from chat_material import chat, source, tokenizer, variables
from rollout.chat import ChatTemplate
from rollout.chat.tokenizer_backend import copy_tokenizer
from rollout.types import Message

pytest.importorskip("renderers")

#: By family of ours: their module and class, what a turn says, and its end where the next opens it.
RENDERERS = {
    "qwen3": ("qwen3", "Qwen3", "Bern"),
    "glm4": ("glm45", "GLM45", "\n<think></think>\nBern"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2", "Let me see.\n</think>\n\nBern"),
    "kimi_k2": ("kimi_k2", "KimiK2", "Bern"),
    "gemma4": ("gemma4", "Gemma4", "Bern"),
    "gpt_oss": ("gpt_oss", "GptOss", "<|channel|>final<|message|>Bern"),
}
#: Tokens that theirs look up and our templates do not write.
MORE = (
    "<eos> <pad> <|think|> <|tool> <tool|> <|image> <image|> <|image|> <|video> <video|> <|video|>"
)
#: Ends of a turn where ours has none: the opening of what follows.
OPENINGS = {"user": "<|user|>", "tool": "<|observation|>"}


@pytest.fixture(scope="module", autouse=True)
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The vocabulary of gpt-oss from another package: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("vocabulary")
    packed = distribution("bpe-openai").locate_file("bpe_openai/data/o200k_base.tiktoken.gz")
    (folder / "o200k_base.tiktoken").write_bytes(gzip.decompress(Path(str(packed)).read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield


def make_template(family: str) -> ChatTemplate:
    if family != "gemma4":
        return chat("smollm2", family)
    backend = copy_tokenizer(tokenizer("smollm2").backend_tokenizer)
    backend.add_special_tokens(MORE.split())
    own = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    own.chat_template = source(family)  # theirs looks into it
    return ChatTemplate(own, chat_template_kwargs=variables(family))


class HarmonyTokens:
    """The ids of gpt-oss's special tokens, of which theirs asks a tokenizer."""

    unk_token_id = None

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(self._encoding.encode(text, allowed_special="all"))

    def decode(self, ids: Any, **_: Any) -> str:
        return str(self._encoding.decode(list(ids)))

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.encode(token)[0]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", RENDERERS)
def test_observation_after_a_turn_is_what_a_renderer_of_its_family_adds(
    family: str, role: str
) -> None:
    module, name, said = RENDERERS[family]
    theirs = importlib.import_module(f"renderers.{module}")
    configs = importlib.import_module("renderers.configs")
    template = make_template(family)
    config = getattr(configs, f"{name}RendererConfig")(thinking_retention="all")
    own: Any = template.tokenizer
    if family == "gpt_oss":
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        own = HarmonyTokens(encoding)
    renderer = getattr(theirs, f"{name}Renderer")(own, config)
    fields = {"role": role, "content": "It is 7 °C, 漢字."}
    if role == "tool":
        fields |= {"name": "weather", "tool_call_id": "functions.weather:0"}
    prompt = renderer.render_ids(
        [{"role": "user", "content": "What now?"}], add_generation_prompt=True
    )
    end = template.end_ids(is_call=role == "tool") or template.token_ids([OPENINGS[role]])
    turn = [*template.text_ids(said), *end]
    if family == "gpt_oss":  # whose ids are those of its own vocabulary
        turn = encoding.encode(template.decode(turn), allowed_special="all")
    bridged = renderer.bridge_to_next_turn(prompt, turn, [fields])
    if bridged is None:  # theirs renders anew: the template writes the end of the turn otherwise
        assert (family, role) == ("gpt_oss", "user")
        return
    added = list(bridged.token_ids[len(prompt) + len(turn) :])
    last = template.text_ids(said) + list(end)
    ours = template.observation_ids([Message(**fields)], after=last).tolist()
    if family == "gpt_oss":
        # The model's own template quotes results, and leaves it to the model to open a channel.
        theirs_as_text = encoding.decode(added).removesuffix("<|channel|>analysis<|message|>")
        if role == "tool":
            quoted = json.dumps(fields["content"], ensure_ascii=False)
            theirs_as_text = theirs_as_text.replace(fields["content"], quoted)
        assert template.decode(ours) == theirs_as_text
    else:
        assert template.decode(ours) == template.decode(added)
        assert ours == added
