"""Real clients and agents, from the registries, through the gateway; `make test-clients` runs this.

What they do is scripted, by simulated engines; everything else is what users have, HTTP included.
All runs in a network of its own, in which there is nothing but the loopback device.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import loopback  # noqa: F401  (the first of all)
import pytest

pytest.register_assert_rewrite("script", "through_gateway")

# Of libraries, read as they are imported: nothing is looked up anywhere, and nobody's own
# settings are found.
_HOME = tempfile.mkdtemp(prefix="rollout-clients-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ |= {
    "HOME": _HOME,
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": _HOME,
    "MSWEA_SILENT_STARTUP": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
for _name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[_name]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # it is other people's code that warns
    warnings.simplefilter("ignore")  # what is collected after the last test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clients keep connections, and threads of their own, as long as the process lives."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.rollout(allow_leaks=("threads", "files", "tasks")))


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so real time; tests of both loops say so."""
    return "asyncio"
