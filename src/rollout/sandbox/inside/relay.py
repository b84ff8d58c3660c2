"""Carries connections between Unix sockets and TCP ports, so that no network is needed.

    python3 -I -S -c RELAY outside DIRECTORY    # of this machine
    python3 -I -S -c RELAY inside SOCKET        # of a sandbox

Outside, it reads lines ``NAME HOST PORT``, and for each listens on the socket NAME in the directory
and connects to that server; an empty line answers. It ends with its standard input, and removes the
directory. Inside, it listens on a port, which it prints, and connects to the socket; it goes on in
the background. Runs on Python 3.8.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def connect(address: Any) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def serve(listener: socket.socket, address: Any) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:  # too many files are open
            threading.Event().wait(0.1)
            continue
        try:
            far = connect(address)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=carry, args=pair, daemon=True).start()
        except (OSError, RuntimeError):  # no server, or no room for threads
            near.close()


def carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve_outside(directory: str) -> None:
    for line in sys.stdin:
        name, host, port = line.split()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{directory}/{name}")
        os.chmod(f"{directory}/{name}", 0o666)  # programs inside have another user id
        listener.listen(1024)
        arguments = listener, (host, int(port))
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        print(flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def serve_inside(path: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    serve(listener, path)


threading.stack_size(1 << 18)  # counted where memory is limited
{"outside": serve_outside, "inside": serve_inside}[sys.argv[1]](sys.argv[2])
