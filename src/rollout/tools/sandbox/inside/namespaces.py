"""A root, processes, users and a network of one's own, without any help from other programs."""

from __future__ import annotations

import os

from .settings import DEVICES, WORK_DIRECTORY, Settings, readable_paths
from .system import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    mount,
    pivot_root_here,
    restrict_mount,
    set_dumpable,
    unshare,
)

#: The user inside.
USER = 1000
_OTHERS = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
#: Users that no system hands out (systemd's table of ids: 1879048192 to 2147483647 is unused):
#: limits on processes do not bind root, and count all processes of a user together.
_FIRST_UNUSED_USER = 1_900_000_000
#: Hidden under the new root while that is built; Python and its packages never live there.
_MOUNT_POINT = "/sys"
_SMALL_ROOT = "size=1m,mode=755"


def spare_user(number: int) -> int:
    """A user that only the sandbox with this number has."""
    return _FIRST_UNUSED_USER + number


def can_leave_root() -> bool:
    """Whether this is root, and a spare user exists to become.

    In the user namespace of a container without real root it does not; its root is an ordinary
    user to the kernel, which limits bind.
    """
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= _FIRST_UNUSED_USER < first + count for first, _, count in ranges)


def leave_root(user: int) -> None:
    """Become `user`, which owns nothing here."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def unshare_namespaces(is_root: bool) -> None:
    """Have all that this process starts be in namespaces of its own.

    Root keeps its powers until `build_root` is done, so that it can reach an interpreter that
    lies in a private directory, and takes its user namespace at the end.
    """
    if is_root:
        unshare(_OTHERS)
    else:
        user, group = os.geteuid(), os.getegid()
        unshare(_OTHERS | CLONE_NEWUSER)
        _map_user(user, group)


def enter_user_namespace(user: int) -> None:
    """For root, with its work done: be `user`, seen as an ordinary one from inside."""
    processes = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    leave_root(user)
    set_dumpable(True)  # or the files below belong to root
    unshare(CLONE_NEWUSER)
    _map_user(user, user, processes)
    os.close(processes)


def _map_user(user: int, group: int, processes: int | None = None) -> None:
    entries = (
        ("setgroups", "deny"),
        ("uid_map", f"{USER} {user} 1"),
        ("gid_map", f"{USER} {group} 1"),
    )
    directory = os.open("/proc/self", os.O_PATH) if processes is None else processes
    for name, text in entries:
        descriptor = os.open(name, os.O_WRONLY, dir_fd=directory)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    if processes is None:
        os.close(directory)


def build_root(settings: Settings, owner: int) -> None:
    """Exchange the root for one with the readable paths, a few devices and a work directory.

    Runs in the first process of the new process namespace, with the powers to mount.
    """
    paths = readable_paths(settings)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", _MOUNT_POINT, "tmpfs", 0, _SMALL_ROOT)
    os.chdir(_MOUNT_POINT)
    for path in paths:
        _show(path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    for path in DEVICES:
        _show(path, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)
    _make_files()
    _make_work_directory(settings, owner)
    _mount_processes()
    pivot_root_here()
    restrict_mount("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, recursive=False)
    os.chdir(WORK_DIRECTORY)


def _show(path: str, attributes: int) -> None:
    """Bind a path of the old root at the same place of the new one; links stay links."""
    target = path.lstrip("/")
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    if os.path.islink(path) and path.count("/") == 1:
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    mount(path, target, None, MS_BIND | MS_REC)
    restrict_mount(target, attributes)


def _make_files() -> None:
    os.makedirs("etc", exist_ok=True)
    _write("etc/passwd", f"sandbox:x:{USER}:{USER}::{WORK_DIRECTORY}:/bin/sh\n")
    _write("etc/group", f"sandbox:x:{USER}:\n")
    _write("etc/hosts", "127.0.0.1 localhost\n")
    os.symlink(WORK_DIRECTORY, "dev/shm")
    if not os.path.lexists("tmp"):  # the interpreter may live beneath it
        os.symlink(WORK_DIRECTORY, "tmp")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _make_work_directory(settings: Settings, owner: int) -> None:
    target = WORK_DIRECTORY.lstrip("/")
    os.mkdir(target)
    files = max(1024, settings.disk // 4096)  # an empty file takes memory too
    options = f"size={settings.disk},nr_inodes={files},mode=700,uid={owner},gid={owner}"
    mount("tmpfs", target, "tmpfs", 0, options)
    restrict_mount(target, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)


def _mount_processes() -> None:
    os.mkdir("proc")
    try:
        mount("proc", "proc", "proc", 0)
    except OSError:  # refused where parts of /proc are hidden, as in most containers: stays empty
        return
    restrict_mount("proc", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)
