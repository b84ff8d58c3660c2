"""A filter of system calls: what no sandboxed program needs and much mischief does."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct

from .system import CLONE_NAMESPACES, call, call_number, machine

#: Calls that fail with EPERM. Each would lift a bound (memory that no limit counts), look into
#: another process, or open a large part of the kernel.
DENIED = (
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "open_by_handle_at"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    *("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf"),
    *("perf_event_open", "fanotify_init", "keyctl", "add_key", "request_key", "seccomp"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    *("reboot", "swapon", "swapoff", "acct", "quotactl", "iopl", "ioperm"),
)

#: Denied too where programs share user and name spaces with the driver: Landlock lets the owner
#: of a file change its mode and times, and of a process its limits and its place in the queue.
DENIED_TO_NEIGHBOURS = (
    *("socket", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown"),
    *("fchownat", "utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr"),
    *("fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
    *("file_setattr", "setpriority", "ioprio_set", "sched_setparam", "sched_setscheduler"),
    *("sched_setaffinity", "sched_setattr", "migrate_pages", "process_mrelease"),
    *("shmat", "shmctl", "semop", "semtimedop", "semctl", "msgsnd", "msgrcv", "msgctl"),
    "mq_unlink",
)

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: Calls of the x32 ABI have this bit: the same calls under other numbers.
_X32_BIT = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
#: Offsets in struct seccomp_data.
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16

_SET_MODE_FILTER = 1
_NEW_LISTENER = 8
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(*, is_neighbour: bool) -> int:
    """Install the filter for this process and all that it starts.

    Args:
        is_neighbour: The process has no name spaces of its own. More is denied then, and every
            new process and thread waits until a supervisor agrees.

    Returns:
        For a neighbour, the descriptor that `answer_fork` serves; else 0.

    Raises:
        OSError: The kernel has no such filters, or this architecture is not known.
    """
    program = _program(is_neighbour=is_neighbour)
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    flags = _NEW_LISTENER if is_neighbour else 0
    pointer = ctypes.byref(_Program(len(program), raw))
    return call("seccomp", _SET_MODE_FILTER, flags, pointer)


def answer_fork(listener: int, *, is_allowed: bool) -> None:
    """Let one process that waits to make another continue, or have its call fail with EAGAIN."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
        identity = _NOTIFICATION.unpack(buffer)[0]
        verdict = (0, _CONTINUE) if is_allowed else (-errno.EAGAIN, 0)
        fcntl.ioctl(listener, _SEND, bytearray(_ANSWER.pack(identity, 0, *verdict)))
    except FileNotFoundError:  # the process that asked has been killed meanwhile
        return


def _program(*, is_neighbour: bool) -> list[tuple[int, int, int, int]]:
    denied = (*DENIED, *DENIED_TO_NEIGHBOURS) if is_neighbour else DENIED
    refused = [(call_number(name), errno.EPERM) for name in denied]
    refused.append((call_number("clone3"), errno.ENOSYS))  # C libraries then use clone
    fork = _NOTIFY if is_neighbour else _ALLOW
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine()]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine() == "x86_64":
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number, code in refused:
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code)]
    for name in ("fork", "vfork"):
        number = call_number(name)
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, fork)]
    clone, limits = call_number("clone"), call_number("prlimit64")
    assert clone is not None
    assert limits is not None
    return [
        *program,
        (_JUMP_EQUAL, 0, 4, limits),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, 0),  # one's own limits, not those of another process
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_SET, 0, 1, CLONE_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, fork),
        (_RETURN, 0, 0, _ALLOW),
    ]
