"""Positions of M-RoPE families, by the code of the model itself."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]


class RopePositions(Protocol):
    """(3, T) positions of a row: temporal, height, width."""

    def __call__(self, ids: Ids, kinds: Ids, features: Mapping[str, Any]) -> Ids:
        """`kinds` (T,): 1 at the placeholders of images, 2 at those of videos, else 0."""


def rope_positions_of(config: Any) -> RopePositions | None:
    """What `get_rope_index` of a model gives; None where the model has no such positions."""
    from transformers import AutoModel

    try:
        kind = AutoModel._model_mapping[type(config)]
    except KeyError:
        return None
    if not hasattr(kind, "get_rope_index"):
        return None
    return partial(_positions, _bare(kind, config))


def has_rope_positions(processor: str) -> bool:
    """Whether some model that has a processor of this class has such positions."""
    from transformers import AutoModel
    from transformers.models.auto import processing_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names: Mapping[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    models = [name for name, own in names.items() if own == processor]
    configs = [CONFIG_MAPPING[name] for name in models if name in CONFIG_MAPPING]
    known = AutoModel._model_mapping
    return any(hasattr(known[each], "get_rope_index") for each in configs if each in known)


def _bare(kind: Any, config: Any) -> Any:
    """A model without weights or layers: `get_rope_index` reads its configuration only."""
    import torch

    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


def _positions(model: Any, ids: Ids, kinds: Ids, features: Mapping[str, Any]) -> Ids:
    import torch

    known: dict[str, Any] = {
        **features,
        "input_ids": torch.from_numpy(ids)[None],
        "mm_token_type_ids": torch.from_numpy(kinds)[None],
        "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64),
    }
    taken = inspect.signature(model.get_rope_index).parameters
    positions, _ = model.get_rope_index(**{n: v for n, v in known.items() if n in taken})
    given: Ids = positions[:, 0].numpy().astype(np.int64)
    return given
