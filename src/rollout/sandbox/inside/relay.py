"""Carries connections between a Unix socket and a TCP port, so that no network is needed.

    python3 -I -S -c RELAY PATH HOST:PORT       # outside: listens on the socket
    python3 -I -S -c RELAY 127.0.0.1:0 PATH     # inside: listens on a port

Listens at the first address, and connects to the second for each connection. Prints the port, or an
empty line, once it listens. Outside it ends with its standard input; inside it goes on in the
background.
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


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        if is_outside:
            host, _, port = target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        else:
            far_reader, far_writer = await asyncio.open_unix_connection(target)
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        far_writer.close()
    except OSError:
        pass
    writer.close()


async def serve() -> None:
    server = await asyncio.start_server(handle, sock=listener)
    if is_outside:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        os._exit(0)
    await server.serve_forever()


address, target = sys.argv[1:]
is_outside = address.startswith("/")
if is_outside:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o666)  # programs inside have another user id
    listener.listen(1024)
    print(flush=True)
else:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
asyncio.run(serve())
