"""Tests on the real SGLang; `make test-sglang` runs this directory in two environments.

``test_driver_*`` run in the driver's and start engines in SGLang's, as users do. ``test_engine_*``
run in SGLang's own, beside its code.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from rollout.engine.cores.sglang import plugin

if TYPE_CHECKING:
    import pytest

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_engine_*.py", "test_function_call_*.py"]
else:
    collect_ignore_glob = ["test_driver_*.py"]
    os.environ[plugin.CPU_VARIABLE] = "1"
    plugin.platform()  # without it nothing that imports torchvision can be imported here

    def pytest_configure(config: pytest.Config) -> None:
        """SGLang and what it imports warn of much that is not ours to mend."""
        config.addinivalue_line("filterwarnings", "default")
