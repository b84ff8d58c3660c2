"""Where new weights come from, and what becomes of the requests that run meanwhile.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

UpdateMode = Literal["wait", "abort_and_resume", "in_place"]
UPDATE_MODES: tuple[str, ...] = get_args(UpdateMode)


class DiskWeights(msgspec.Struct, frozen=True, array_like=True, tag="disk"):
    """A directory that every engine can read, with the model's safetensors and its configuration.

    It must stay there as long as these weights are the current ones: a replica that is started
    again reads them from it.
    """

    path: str


#: What `update_weights` takes.
WeightSource = DiskWeights
