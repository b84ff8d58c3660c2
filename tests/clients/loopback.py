"""A network of this process's own, in which there is the loopback device and nothing else.

Programs of vendors call home: here they reach the gateway, and nobody else. To import this module
moves the process there; that must be early, while it has one thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def _enter() -> str:
    """Returns why it cannot be, "" where it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if not hasattr(libc, "unshare"):
        return "there are no network namespaces on this system"
    # Root needs no users of its own, beside which sandboxes in it could not have theirs.
    if libc.unshare(NEW_NETWORK) != 0:
        if libc.unshare(NEW_USER | NEW_NETWORK) != 0:
            return f"a network namespace is refused: {os.strerror(ctypes.get_errno())}"
        _keep_identity(user, group)
    _bring_up("lo")
    return ""


def _keep_identity(user: int, group: int) -> None:
    process = Path("/proc/self")
    (process / "setgroups").write_text("deny")
    (process / "uid_map").write_text(f"{user} {user} 1")
    (process / "gid_map").write_text(f"{group} {group} 1")


def _bring_up(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        asked = struct.pack("16sh14x", device.encode(), 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(control, SIOCGIFFLAGS, asked))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", device.encode(), flags | IFF_UP))


#: Why the process is not there; "" where it is.
REFUSAL = _enter()
