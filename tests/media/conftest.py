"""The small vision-language model of most tests here, written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from media_material import write_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-VL without weights."""
    return write_model("qwen2_5_vl", tmp_path_factory.mktemp("vl"))
