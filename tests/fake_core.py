"""A core of twenty lines: answers each prompt with the ids that follow its last one."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import AsyncIterator

import anyio
import msgspec

from rollout.engine.core import (
    ALL_TAGS,
    Capabilities,
    Chunk,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    unpack_ids,
)

#: What the cores of tests say that they can do, and those that cannot are told to.
ABLE = Capabilities(
    weights=("disk", "tensors", "groups"), in_place=True, sleep_levels=(1, 2), sleep_tags=ALL_TAGS
)


class CountingCore:
    """After a prompt that ends in n it says n+1, n+2, …, a token every `token_s` seconds."""

    def __init__(
        self, *, token_s: float = 0.0, max_requests: int = 64, vocab_size: int = 1000
    ) -> None:
        self.token_s = token_s
        self.info = EngineInfo(
            vocab_size=vocab_size,
            eos_ids=(0,),
            context_length=4096,
            fingerprint="counting",
            max_requests=max_requests,
            core="counting",
            capabilities=ABLE,
        )
        self._aborted: dict[str, anyio.Event] = {}

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """One token a chunk."""
        rid, last = request.request_id, unpack_ids(request.prompt_ids)[-1]
        if len(self._aborted) >= self.info.max_requests:
            yield Chunk(request_id=rid, finish_reason="rejected", error="engine queue is full")
            return
        aborted = self._aborted[rid] = anyio.Event()
        try:
            for offset in range(request.sampling.max_new_tokens):
                with anyio.move_on_after(self.token_s):
                    await aborted.wait()
                if aborted.is_set():
                    yield Chunk(request_id=rid, offset=offset, finish_reason="abort")
                    return
                token = (last + 1 + offset) % self.info.vocab_size
                yield Chunk(
                    request_id=rid,
                    offset=offset,
                    ids=array("i", [token]).tobytes(),
                    log_probs=array("f", [-token / 8]).tobytes(),
                    weight_version=3,
                )
            yield Chunk(request_id=rid, offset=offset + 1, finish_reason="length")
        finally:
            del self._aborted[rid]

    def abort_nowait(self, request_id: str) -> None:
        """Known requests end at once."""
        if request_id in self._aborted:
            self._aborted[request_id].set()

    def load(self) -> EngineLoad:
        """Running requests only."""
        return EngineLoad(running=len(self._aborted))

    async def aclose(self) -> None:
        """Nothing to free."""


class BrokenCore(CountingCore):
    """Does not start."""

    async def start(self) -> None:
        """Fail as a missing model would."""
        raise FileNotFoundError("no weights here")


class FlaggedCore(CountingCore):
    """Does not start while there is a file."""

    def __init__(self, *, flag: str) -> None:
        super().__init__()
        self._flag = flag

    async def start(self) -> None:
        """Look for it."""
        if await anyio.Path(self._flag).exists():
            raise RuntimeError("no card")


class BrokenWorkerCore(CountingCore):
    """Does not start, and only a process of its own knows why."""

    async def start(self) -> None:
        """Fail as an engine whose scheduler has ended."""
        code = "raise ValueError('no kernel for this GPU')"
        await anyio.run_process([sys.executable, "-c", code], stderr=None, check=False)
        raise RuntimeError("the worker died")


class EndlessStartCore(CountingCore):
    """Never finishes loading."""

    async def start(self) -> None:
        """Load for ever."""
        await anyio.sleep_forever()


class CrewCore(CountingCore):
    """Spread over machines: starts when all its parts have met, and says which ones came."""

    def __init__(self, *, nodes: int, node_rank: int, rendezvous: str) -> None:
        super().__init__()
        self._nodes, self._rank = nodes, node_rank
        self._host, _, port = rendezvous.rpartition(":")
        self._port = int(port)
        self._met: list[bytes] = []

    async def start(self) -> None:
        """The first one listens, and the others come when it does."""
        if self._rank:
            async with await self._connected() as stream:
                await stream.send(f"{self._rank}:{os.getpid()}".encode())
            return
        listener = await anyio.create_tcp_listener(local_host=self._host, local_port=self._port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._meet)
            while len(self._met) < self._nodes - 1:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        said = " ".join(sorted(map(bytes.decode, self._met)))
        self.info = msgspec.structs.replace(self.info, core=said)

    async def _meet(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            self._met.append(await stream.receive())

    async def _connected(self) -> anyio.abc.SocketStream:
        while True:
            try:
                return await anyio.connect_tcp(self._host, self._port)
            except OSError:  # it does not listen yet
                await anyio.sleep(0.02)


class DeviceCore(CountingCore):
    """Says which GPUs it may use."""

    async def start(self) -> None:
        """Put them where a client sees them."""
        devices = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
        self.info = msgspec.structs.replace(self.info, core=devices)
