"""System calls that the standard library of Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
#: The bits of clone's first argument that make a namespace.
CLONE_NAMESPACES = 0x7E020000

MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

#: Numbers on x86_64 and aarch64; None where the architecture has no such call. Calls since
#: Linux 5.1 (424 and up) have one number everywhere. Source: the kernel's syscall tables.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "capset": (126, 91),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "seccomp": (317, 277),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
}
_COLUMNS = {"x86_64": 0, "aarch64": 1}

libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """The architecture's name, such as "x86_64"."""
    return os.uname().machine


def call_number(name: str) -> int | None:
    """The number of a system call here; None where this architecture has none.

    Raises:
        OSError: The numbers of this architecture are not known.
    """
    column = _COLUMNS.get(machine())
    if column is None:
        raise OSError(f"the system calls of {machine()} are not known; expected x86_64 or aarch64")
    return _NUMBERS[name][column]


def call(name: str, *arguments: object) -> int:
    """The result of a raw system call; integers are passed as longs.

    Raises:
        OSError: It failed; the text names the call.
    """
    number = call_number(name)
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(libc.syscall(ctypes.c_long(number or -1), *longs), name)


def checked(result: int, name: str) -> int:
    """`result`, or the error that -1 stands for."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Move this process (with NEWPID: its children) into new namespaces."""
    checked(libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    raw = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    name = f"mount of {source or kind or target}"
    checked(libc.mount(*raw, ctypes.c_ulong(flags), data.encode() or None), name)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "ns")]


def restrict_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Add attributes such as MOUNT_ATTR_RDONLY to a mount and, if asked, to all beneath it."""
    wanted = _MountAttributes(attributes, 0, 0, 0)
    size = ctypes.sizeof(wanted)
    flags = _AT_RECURSIVE if recursive else 0
    call("mount_setattr", _AT_FDCWD, os.fsencode(target), flags, ctypes.byref(wanted), size)


def pivot_root_here() -> None:
    """Make the current directory the root and release the old one."""
    call("pivot_root", b".", b".")
    checked(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _prctl(name: str, *arguments: int) -> None:
    longs = [ctypes.c_ulong(argument) for argument in arguments]
    longs += [ctypes.c_ulong(0)] * (5 - len(longs))
    checked(libc.prctl(*longs), name)


def die_with_parent(signal_number: int) -> None:
    """Have this process sent a signal when its parent ends; forgotten at a change of user."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal_number)


def set_dumpable(is_dumpable: bool) -> None:
    """Let processes of the same user look into this one, or not."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, int(is_dumpable))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def give_up_privileges() -> None:
    """Drop every capability for good; no program that is started can gain any."""
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)  # fails where there are none
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
