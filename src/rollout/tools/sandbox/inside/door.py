"""The one way out of a sandbox without a network: a socket in it that leads to one address outside.

It listens in the sandbox's network namespace; the supervisor, which stands outside, accepts there
and connects to the address.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from contextlib import suppress

_LOOPBACK = "127.0.0.1"
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
#: struct ifreq, with flags as its union.
_INTERFACE = struct.Struct("16sH22x")
#: Connections at once; further ones wait.
_MAX_CONNECTIONS = 64
_PIECE = 65536


def raise_loopback() -> None:
    """Switch on the loopback interface of this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", _IFF_UP))


def listen_inside(port: int) -> socket.socket:
    """A socket that programs in this network namespace find at 127.0.0.1 and `port`.

    Raises:
        OSError: The port is taken, or below 1024 where this process has no powers.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOOPBACK, port))
    except OSError as error:
        raise OSError(error.errno, f"the door at port {port}: {error.strerror}") from error
    listener.listen(_MAX_CONNECTIONS)
    return listener


def open_door(listener: socket.socket, address: tuple[str, int]) -> None:
    """Connect each client of `listener` with `address`, in threads, until this process ends."""
    threading.Thread(target=_serve, args=(listener, address), daemon=True).start()


def _serve(listener: socket.socket, address: tuple[str, int]) -> None:
    places = threading.Semaphore(_MAX_CONNECTIONS)
    while True:
        places.acquire()
        inner, _ = listener.accept()
        threading.Thread(target=_connect, args=(inner, address, places), daemon=True).start()


def _connect(inner: socket.socket, address: tuple[str, int], places: threading.Semaphore) -> None:
    try:
        with inner, socket.create_connection(address) as outer:
            back = threading.Thread(target=_pass_on, args=(outer, inner), daemon=True)
            back.start()
            _pass_on(inner, outer)
            back.join()
    except OSError:  # nobody is there any more: the program sees its connection end
        return
    finally:
        places.release()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Bytes of one direction, and its end; a broken connection ends both directions."""
    try:
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
