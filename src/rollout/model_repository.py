"""Single files of a model, in a directory or a repository of the hub."""

from __future__ import annotations

from pathlib import Path


def model_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """Where a file of a model lies; None where the model has none. May download it; blocks.

    Of a hub name it is the file in the hub's cache: offline (``HF_HUB_OFFLINE``), what is not there
    is taken not to exist.

    Args:
        model: A directory or a hub name.
        revision: Of a hub name; None takes the default branch.

    Raises:
        OSError: The repository cannot be looked at.
        ValueError: The name is none of the hub.
    """
    if Path(model).is_dir():
        path = Path(model, name)
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except EntryNotFoundError:
        return None
