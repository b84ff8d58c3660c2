"""Carries connections between a Unix socket and a TCP port, so that no network is needed.

    python3 -I -S -c RELAY unix:PATH tcp:HOST:PORT      # outside: listens on the socket
    python3 -I -S -c RELAY tcp:127.0.0.1:0 unix:PATH    # inside: listens on a port

Listens at the first address and connects to the second for each connection. Prints the port, or 0,
once it listens. Outside it ends with its standard input; inside, where the third argument is
"detach", it goes on in the background.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            data = await reader.read(65536)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def connect(kind: str, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if kind == "unix":
        return await asyncio.open_unix_connection(address)
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def serve(listener: socket.socket, target: list[str]) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await connect(target[0], target[1])
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        far_writer.close()
        writer.close()

    if listener.family == socket.AF_UNIX:
        server: asyncio.Server = await asyncio.start_unix_server(handle, sock=listener)
    else:
        server = await asyncio.start_server(handle, sock=listener)
    if "detach" in sys.argv:
        await server.serve_forever()
    else:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        os._exit(0)


def main() -> None:
    (kind, address), target = (each.split(":", 1) for each in sys.argv[1:3])
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        os.chmod(address, 0o666)  # programs inside have another user id
        listener.listen(1024)
        print(0, flush=True)
    else:
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)), backlog=1024)
        print(listener.getsockname()[1], flush=True)
    if "detach" in sys.argv:
        if os.fork():
            os._exit(0)
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
    asyncio.run(serve(listener, target))


main()
