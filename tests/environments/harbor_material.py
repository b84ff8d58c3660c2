"""Harbor's tasks for tests, and sandboxes that need no containers for them."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollout.sandbox import Sandbox, SandboxProvider, SandboxSpec, open_provider

IMAGED = '[environment]\ndocker_image = "img"\n'
PASSES = "#!/bin/sh\ngrep -q right answer && r=1 || r=0\necho $r >/logs/verifier/reward.txt\n"


def write_task(root: Path, config: str = IMAGED, test: str = PASSES, **files: str) -> Path:
    """A task; `files` by path, with ``__`` for a slash."""
    contents = {"task.toml": config, "instruction.md": "Do it.\n", "tests/test.sh": test}
    contents |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class RootedSandbox:
    """A sandbox of `none`, in whose directory ``/logs`` and ``/tests`` are."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    def place(self, text: str) -> str:
        for name in ("/logs", "/tests"):
            text = text.replace(name, self.workdir + name)
        return text

    async def exec(self, command: Any, **settings: Any) -> Any:
        words = self.place(command) if isinstance(command, str) else list(map(self.place, command))
        return await self._sandbox.exec(words, **settings)

    async def read_file(self, path: str, **settings: Any) -> bytes:
        return await self._sandbox.read_file(self.place(path), **settings)

    async def upload(self, local: Path, path: str) -> None:
        await self._sandbox.upload(local, self.place(path))
        if path == "/tests":
            script = f"{self.place(path)}/test.sh"
            text = (await self._sandbox.read_file(script)).decode()
            await self._sandbox.write_file(script, self.place(text))

    async def download(self, path: str, local: Path, **settings: Any) -> None:
        await self._sandbox.download(self.place(path), local, **settings)


class RootedProvider:
    """Makes them, of any image, and of a directory as its content.

    It is ``sandbox.provider = "harbor_material:RootedProvider"``.
    """

    name, max_open = "rooted", 64

    def __init__(self) -> None:
        self._provider: SandboxProvider | None = None
        self._stack = AsyncExitStack()

    async def check(self) -> None:
        self._provider = await self._stack.enter_async_context(open_provider("none"))

    async def open(self, spec: SandboxSpec) -> Any:
        assert self._provider is not None
        sandbox = RootedSandbox(await self._provider.open(SandboxSpec(env=spec.env)))
        if spec.image is not None and os.path.isabs(spec.image):
            await sandbox.upload(Path(spec.image), ".")
        if spec.setup is not None:
            result = await sandbox.exec(spec.setup, timeout_s=spec.setup_s)
            assert result.exit_code == 0
        return sandbox

    async def sweep(self) -> int:
        return 0

    async def close(self) -> None:
        await self._stack.aclose()
