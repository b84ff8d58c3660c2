"""System calls that programs in a sandbox have no use for, as a BPF program for ``bwrap``.

A second wall behind the namespaces: it takes away what kernels have most often been attacked by.
"""

from __future__ import annotations

import os
import struct

#: Refused with EPERM: name, number on x86_64, number on aarch64.
_CALLS = """
acct 163 89; add_key 248 217; bpf 321 280; chroot 161 51; delete_module 176 106;
finit_module 313 273; fsconfig 431 431; fsmount 432 432; fsopen 430 430; fspick 433 433;
init_module 175 105; io_uring_enter 426 426; io_uring_register 427 427;
io_uring_setup 425 425; kexec_file_load 320 294; kexec_load 246 104; keyctl 250 219;
mount 165 40; mount_setattr 442 442; move_mount 429 429; name_to_handle_at 303 264;
open_by_handle_at 304 265; open_tree 428 428; perf_event_open 298 241; pidfd_getfd 438 438;
pivot_root 155 41; process_vm_readv 310 270; process_vm_writev 311 271; ptrace 101 117;
quotactl 179 60; reboot 169 142; request_key 249 218; setns 308 268; swapoff 168 225;
swapon 167 224; syslog 103 116; umount2 166 39; unshare 272 97; userfaultfd 323 282
"""
DENIED = [tuple(call.split()) for call in _CALLS.split(";")]
_ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_CLONE3, _X32 = 435, 0x40000000


def write_filter(machine: str | None = None) -> bytes:
    """The filter as ``bwrap --seccomp`` reads it; empty for machines that it is not written for."""
    machine = machine or os.uname().machine
    if machine not in _ARCHITECTURES:
        return b""
    architecture, column = _ARCHITECTURES[machine]
    lines = [
        (_LOAD, 0, 0, 4),  # the architecture: another one's numbers mean other calls
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    # Its flags lie in memory, where a filter cannot look; the C library falls back to clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for call in DENIED:
        lines += [(_EQUAL, 0, 1, int(call[column])), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
