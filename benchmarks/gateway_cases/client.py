"""Agents in a process of their own: a loop around chat completions, on raw connections.

A line on standard input is a trajectory, ``{"base_url": …, "api_key": …, "model": …, "question":
…}``; its number comes back when it has ended. ``{"probe": n}`` first holds the connections of all
trajectories until n are open, and then lets one request at a time pass; the latencies of all come
back at the end of the input.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (nothing of the library runs here)
import json
import sys
import time  # noqa: TID251  (what is measured)
from typing import Any
from urllib.parse import urlsplit

from driver_cases.workload import SCHEMAS, tool_text

#: Requests that are timed; the others do not wait for each other.
PROBES = 500
TOOL_TEXT = tool_text()


class Connection:
    """Keeps one connection to a trajectory."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._url = urlsplit(address["base_url"])
        self._key = address["api_key"]
        self._streams: Any = None

    async def open(self) -> None:
        self._streams = await asyncio.open_connection(self._url.hostname, self._url.port)

    def close(self) -> None:
        self._streams[1].close()

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The message that answers."""
        data = json.dumps(body).encode()
        reader, writer = self._streams
        head = (
            f"POST {self._url.path}/chat/completions HTTP/1.1\r\nhost: {self._url.netloc}\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        answered = await reader.readuntil(b"\r\n\r\n")
        length = int(answered.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        told = json.loads(await reader.readexactly(length))
        if "choices" not in told:
            raise SystemExit(f"refused: {told}")
        message: dict[str, Any] = told["choices"][0]["message"]
        return message


class Trajectories:
    """Runs those of the input."""

    def __init__(self) -> None:
        self._limit: asyncio.Semaphore | None = None
        self._all_open = asyncio.Event()
        self._open, self._awaited = 0, 0
        self.latencies: list[float] = []

    def probe(self, awaited: int) -> None:
        """Hold trajectories until so many are open."""
        self._limit, self._awaited = asyncio.Semaphore(1), awaited

    async def run(self, number: int, address: dict[str, Any]) -> None:
        """An agent: it asks, runs what the model calls, and ends where it calls nothing."""
        connection = Connection(address)
        await connection.open()
        self._open += 1
        if self._open >= self._awaited:
            self._all_open.set()
        await self._all_open.wait()
        messages = [{"role": "user", "content": address["question"]}]
        body = {"model": address["model"], "messages": messages, "tools": SCHEMAS}
        while True:
            message = await self._asked(connection, body)
            calls = message.get("tool_calls") or []
            if not calls:
                break
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": TOOL_TEXT} for call in calls
            ]
        connection.close()
        print(number, flush=True)

    async def _asked(self, connection: Connection, body: dict[str, Any]) -> dict[str, Any]:
        if self._limit is None or len(self.latencies) >= PROBES:
            return await connection.chat(body)
        async with self._limit:
            began = time.perf_counter()
            message = await connection.chat(body)
            self.latencies.append(time.perf_counter() - began)
        return message


async def main() -> None:
    """Until the input ends."""
    trajectories = Trajectories()
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        number = 0
        async for line in lines:
            told = json.loads(line)
            if "probe" in told:
                trajectories.probe(told["probe"])
                continue
            tasks.create_task(trajectories.run(number, told))
            number += 1
    print(json.dumps(trajectories.latencies), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
