"""What tests of sandboxes share: providers under test, an image for containers, what is left."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.sandbox import Sandbox, SandboxProvider, SandboxSpec, open_provider
from rollout.sandbox.bubblewrap import find_bwrap

#: `make test-sandboxes` names the engine of containers and the image that it has made.
ENGINE = os.environ.get("ROLLOUT_TEST_ENGINE", "")
IMAGE = os.environ.get("ROLLOUT_TEST_IMAGE", "localhost/rollout-test:1")
PROVIDERS = ("none", "bubblewrap", "container")


def skip_where_missing(provider: str) -> None:
    if provider == "container" and not ENGINE:
        pytest.skip("containers are tested by `make test-sandboxes`")
    if provider == "bubblewrap" and find_bwrap() is None:
        pytest.skip("there is no program bwrap")


@asynccontextmanager
async def provided(provider: str, **options: Any) -> AsyncIterator[SandboxProvider]:
    skip_where_missing(provider)
    name = ENGINE if provider == "container" else provider
    async with open_provider(name, **options) as made:
        yield made


@asynccontextmanager
async def opened(provider: str, **settings: Any) -> AsyncIterator[Sandbox]:
    """A sandbox of this provider."""
    async with provided(provider) as made:
        sandbox = await made.open(spec_for(provider, **settings))
        try:
            yield sandbox
        finally:
            await sandbox.close()


def spec_for(provider: str, **settings: Any) -> SandboxSpec:
    return SandboxSpec(**{**image_for(provider), **settings})


def image_for(provider: str) -> dict[str, Any]:
    return {"image": IMAGE, "workdir": "/work"} if provider == "container" else {}


_numbers = itertools.count()


def unique_seconds() -> str:
    """Long to sleep, and the same for no other test that runs on this machine."""
    return f"9{os.getpid()}{next(_numbers):03}"


def processes_with(token: str) -> list[psutil.Process]:
    """Processes anywhere on this machine with this word in their command line, but zombies."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError, psutil.Error):
            if token.encode() in place.read_bytes().split(b"\0"):
                found.append(psutil.Process(int(place.parent.name)))
    return found


def containers() -> str:
    """Ids of the containers that there are."""
    if not ENGINE:
        return ""
    command = [ENGINE, "ps", "--all", "--quiet", "--filter", "label=rollout.driver"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def directories(pid: int | None = None) -> set[Path]:
    """Directories of the sandboxes and doors of a driver; this process by default."""
    return {
        path
        for place in {Path("/tmp"), Path(tempfile.gettempdir())}
        for pattern in ("rollout-sandbox-*", "rollout-relay-*")
        for path in place.glob(pattern.replace("*", f"{pid or os.getpid()}-*"))
    }
