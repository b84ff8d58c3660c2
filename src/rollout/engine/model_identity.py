"""What a model's files say of it, read alike by the driver and by engines.

Both read the files themselves, and not what a library makes of them: the driver's and an engine's
may be of different versions.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rollout.model_repository import model_file

#: Facts of a model's configuration that differ between copies of the same model.
INCIDENTAL = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


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
