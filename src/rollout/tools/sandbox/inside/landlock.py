"""Landlock: a process takes the file system away from itself and all that it starts."""

from __future__ import annotations

import ctypes
import os

from .system import call

#: Since Linux 6.12: programs inside cannot send signals to processes outside.
SIGNALS_ABI = 6

_CREATE_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
#: What a rule on a file, not a directory, may speak of.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_ALL_TCP = 3
_ALL_SCOPES = 3


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scopes")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_abi() -> int:
    """The version that the kernel offers.

    Raises:
        OSError: It offers none, or Landlock is not switched on.
    """
    return call("landlock_create_ruleset", None, 0, _CREATE_VERSION)


def restrict_files(readable: list[str], devices: list[str], writable: list[str]) -> None:
    """Leave this process these paths only, and no TCP, where the kernel can.

    Raises:
        OSError: The kernel refuses.
    """
    abi = landlock_abi()
    files = _file_rights(abi)
    wanted = _Ruleset(files, _ALL_TCP if abi >= 4 else 0, _ALL_SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = call("landlock_create_ruleset", ctypes.byref(wanted), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in devices:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        for path in writable:
            _allow(ruleset, path, files & ~_IOCTL_DEVICE)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _file_rights(abi: int) -> int:
    """Every right that this version can take away: 13 at first, then REFER, TRUNCATE, IOCTL."""
    return (1 << 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)) - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = _PathRule(rights, parent)
        call("landlock_add_rule", ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)
