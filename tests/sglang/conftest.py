"""Tests on the real SGLang; `make test-sglang` runs this directory in two environments.

``test_driver_*`` run in the driver's and start engines in SGLang's, as users do. ``test_engine_*``
run in SGLang's own, beside its code. To start SGLang takes many seconds of computing: one engine
serves all of the driver's tests that need no other.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from rollout.engine.cores.sglang import plugin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.pool.pool import EnginePool

#: This directory looks like a package `sglang` too, but one without a file.
IS_DRIVER = getattr(importlib.util.find_spec("sglang"), "origin", None) is None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Real time; SGLang itself knows asyncio only."""
    return "trio" if IS_DRIVER else "asyncio"


if IS_DRIVER:
    collect_ignore_glob = ["test_engine_*.py", "test_function_call_*.py"]

    @pytest.fixture(scope="session")
    def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        """Two sets of weights of one model."""
        from driver import save_speaking_model

        return [save_speaking_model(tmp_path_factory.mktemp(f"seed-{n}"), n) for n in (0, 1)]

    @pytest.fixture(scope="session")
    async def runtime(models: list[str]) -> AsyncIterator[Any]:
        """One engine; a test that changes its weights leaves them changed."""
        from driver import clock, is_alive, processes, sglang

        from rollout import open_rollout

        async with open_rollout(sglang(models[0]), [clock]) as runtime:
            yield runtime
        assert [process for process in processes() if is_alive(process)] == []

    @pytest.fixture
    async def pool(runtime: Any, models: list[str]) -> EnginePool:
        """It has the first weights."""
        from rollout.engine import DiskWeights

        pool: EnginePool = runtime.engines
        while not pool.router.replicas:  # the last test ended it
            await anyio.sleep(0.05)
        version = pool.router.replicas[0].weight_version
        if version:
            await pool.update_weights(version + 1, DiskWeights(models[0]))
        return pool

else:
    collect_ignore_glob = ["test_driver_*.py", "driver.py"]
    os.environ[plugin.CPU_VARIABLE] = "1"
    plugin.platform()  # without it nothing that imports torchvision can be imported here

    import zmq

    # Found as garbage, a context waits for sockets of the same garbage to close, for ever if it is
    # found first. Engines of users are processes, which end with it.
    zmq.Context.__del__ = lambda _: None

    def pytest_configure(config: pytest.Config) -> None:
        """SGLang and what it imports warn of much that is not ours to mend."""
        config.addinivalue_line("filterwarnings", "default")
        warnings.simplefilter("default")  # for what is collected after the last test
