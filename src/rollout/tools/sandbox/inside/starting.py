"""How each method of isolation brings its first process into being."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from .door import listen_inside, raise_loopback
from .landlock import SIGNALS_ABI, landlock_abi, restrict_files
from .namespaces import (
    USER,
    build_root,
    can_leave_root,
    enter_user_namespace,
    leave_root,
    spare_user,
    unshare_namespaces,
)
from .program_host import limit_resources, start_host
from .seccomp import filter_system_calls
from .settings import (
    DEVICES,
    WORK_DIRECTORY,
    Settings,
    describe_error,
    encode,
    environment,
    private_path,
    read_frame,
    readable_paths,
)
from .system import adopt_orphans, die_with_parent, give_up_privileges, set_dumpable

if TYPE_CHECKING:
    from collections.abc import Callable

#: Methods whose files lie in a real directory, which have to be removed.
REAL_DIRECTORY = ("landlock", "none")
_BOOTSTRAP = (
    "import sys, types; p = types.ModuleType('rollout_sandbox'); p.__path__ = [sys.argv[1]]; "
    "sys.modules[p.__name__] = p; from rollout_sandbox.starting import serve_in_bubblewrap; "
    "serve_in_bubblewrap()"
)


_BUBBLEWRAP_OPTIONS = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--as-pid-1"),
)
_HERE = os.path.dirname(os.path.abspath(__file__))


class Sandbox(NamedTuple):
    """A started sandbox.

    Attributes:
        pid: Its first process; all others end with it, or are found below the supervisor.
        channel: The way to its host.
        directory: Its files, where they lie in a directory of this machine.
        errors: What the program that starts the host has to say.
    """

    pid: int
    channel: socket.socket
    directory: str | None
    errors: int | None = None

    def last_output(self) -> str:
        """The end of `errors`; empty where there is nothing."""
        if self.errors is None:
            return ""
        return os.read(self.errors, 65536).decode(errors="replace").strip()


def start(settings: Settings, directory: str | None) -> Sandbox:
    """Start the host; its first frame says whether all bounds are in force."""
    ours, theirs = socket.socketpair()
    with theirs:
        if settings.method == "namespaces":
            return Sandbox(_start_in_namespaces(settings, theirs, ours), ours, None)
        if settings.method == "bubblewrap":
            return _start_in_bubblewrap(settings, theirs, ours)
        assert directory is not None
        begin = _start_under_landlock if settings.method == "landlock" else _start_unprotected
        return Sandbox(begin(settings, theirs, ours, directory), ours, directory)


def _begin_host(channel: socket.socket, work: Callable[[], None]) -> None:
    """The life of a forked host; what keeps it from starting is its first and only frame."""
    try:
        _prefer_as_victim()
        work()
    except BaseException as error:
        channel.send(encode({"status": "stopped", "reason": describe_error(error)}))
    finally:
        os._exit(1)


def _prefer_as_victim() -> None:
    """Where memory runs out, the kernel takes what models have started before anything else."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _close_streams() -> None:
    """Let go of the driver's pipes: their other ends must close when the supervisor ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _start_in_namespaces(settings: Settings, channel: socket.socket, other: socket.socket) -> int:
    """Two forks: a process stays in its process namespace, only its children enter the new one.

    The process between them ends, and the supervisor inherits the host.
    """
    is_root = can_leave_root()
    user = spare_user(os.getpid())
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.close(told)
            other.close()
            unshare_namespaces(is_root)
            pid = os.fork()
            if pid == 0:
                os.close(tell)
                _begin_host(channel, lambda: _serve_in_namespaces(settings, channel, is_root, user))
            os.write(tell, str(pid).encode())
        except BaseException as error:
            channel.send(encode({"status": "stopped", "reason": describe_error(error)}))
        finally:
            os._exit(0)
    os.close(tell)
    with open(told) as answer:
        pid = int(answer.read() or 0)
    os.waitpid(between, 0)
    if pid == 0:
        raise OSError(json.loads(read_frame(other.fileno()) or b"{}").get("reason", "unshare"))
    return pid


def _serve_in_namespaces(
    settings: Settings, channel: socket.socket, is_root: bool, user: int
) -> None:
    _close_streams()
    build_root(settings, user if is_root else USER)
    door = None
    if settings.door:  # the network is root's, if this is root
        raise_loopback()
        door = listen_inside(settings.door[1])
    if is_root:
        enter_user_namespace(user)
    _serve_confined(settings, channel, door)


def _serve_confined(settings: Settings, channel: socket.socket, door: socket.socket | None) -> None:
    """For a host in its namespaces: give up what is left of its powers, and serve."""
    limit_resources(settings, counts_processes=True)
    give_up_privileges()
    filter_system_calls(is_neighbour=False)
    set_dumpable(False)
    _say_ready(channel, None if door is None else door.detach())
    start_host(settings, channel.fileno(), WORK_DIRECTORY)


def _say_ready(channel: socket.socket, descriptor: int | None = None) -> None:
    """The first frame; the supervisor gets the descriptor, and this process lets go of it."""
    frame = encode({"status": "ready"})
    if descriptor is None:
        channel.send(frame)
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    channel.sendmsg([frame], rights)
    os.close(descriptor)


def _start_in_bubblewrap(
    settings: Settings, channel: socket.socket, other: socket.socket
) -> Sandbox:
    user = spare_user(os.getpid()) if can_leave_root() else None
    errors, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        other.close()
        _begin_host(channel, lambda: _exec_bubblewrap(settings, channel, report, user))
    os.close(report)
    return Sandbox(pid, other, None, errors)


def _exec_bubblewrap(
    settings: Settings, channel: socket.socket, report: int, user: int | None
) -> None:
    _close_streams()
    os.dup2(report, 2)
    command = bubblewrap_command(settings, is_root=user is not None)
    os.dup2(channel.fileno(), 0)  # bubblewrap hands both on to the host
    readable, writable = os.pipe()
    os.write(writable, encode({**settings._asdict(), "user": user}))
    os.close(writable)
    os.dup2(readable, 1)
    program = [sys.executable, "-I", "-c", _BOOTSTRAP, _HERE]
    os.execve(settings.bubblewrap, [*command, "--", *program], environment(WORK_DIRECTORY))


def bubblewrap_command(settings: Settings, *, is_root: bool) -> list[str]:
    """The program and its options, up to the command that it runs.

    Root keeps what the host needs to become another user: bubblewrap itself can only rename it.
    """
    command = [settings.bubblewrap, *_BUBBLEWRAP_OPTIONS]
    if is_root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--cap-drop", "ALL"]
        command += ["--uid", str(USER), "--gid", str(USER)]
    paths = sorted({*readable_paths(settings), _HERE})
    for parent in sorted({parent for path in paths for parent in _parents(path)}):
        # Those that bubblewrap makes by itself are closed to others than root.
        command += ["--perms", "0755", "--dir", parent]
    for path in paths:
        if os.path.islink(path) and path.count("/") == 1:
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--perms", "0777", "--size", str(settings.disk), "--tmpfs", WORK_DIRECTORY]
    if not any(path.startswith("/tmp/") for path in paths):
        command += ["--symlink", WORK_DIRECTORY, "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", WORK_DIRECTORY]


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]


def serve_in_bubblewrap() -> None:
    """The program that bubblewrap runs: the channel is descriptor 0, the settings come from 1."""
    channel = socket.socket(fileno=os.dup(0))
    frame = read_frame(1)
    _close_streams()

    def work() -> None:
        assert frame is not None
        message = json.loads(frame)
        user = message.pop("user")
        if user is not None:
            enter_user_namespace(user)
        settings = Settings(**message)
        door = listen_inside(settings.door[1]) if settings.door else None
        _serve_confined(settings, channel, door)

    _begin_host(channel, work)


def _start_under_landlock(
    settings: Settings, channel: socket.socket, other: socket.socket, directory: str
) -> int:
    paths = readable_paths(settings)
    user = _landlock_user(paths)
    if user is not None:
        os.chown(directory, user, user)
    pid = os.fork()
    if pid == 0:
        other.close()
        _begin_host(
            channel, lambda: _serve_under_landlock(settings, channel, directory, paths, user)
        )
    return pid


def _landlock_user(paths: list[str]) -> int | None:
    """The user that programs run as; None for the user that this is.

    Root becomes another user where another user can reach the interpreter.

    Raises:
        OSError: Programs would share their user with the driver, and could send it signals.
    """
    is_root = can_leave_root()
    private = private_path(paths)
    if is_root and private is None:
        return spare_user(os.getpid())
    abi = landlock_abi()
    if abi >= SIGNALS_ABI:
        return None
    wanted = f"Landlock ABI {SIGNALS_ABI} (Linux 6.12; this kernel has {abi})"
    if is_root:
        raise OSError(f"{wanted}, or an interpreter that any user can reach, not {private}")
    raise OSError(f"{wanted}: programs could send signals to others of this user")


def _serve_under_landlock(
    settings: Settings,
    channel: socket.socket,
    directory: str,
    paths: list[str],
    user: int | None,
) -> None:
    _close_streams()
    if user is not None:
        leave_root(user)
    die_with_parent(signal.SIGKILL)
    adopt_orphans()
    os.chdir(directory)
    give_up_privileges()
    restrict_files(paths, list(DEVICES), [directory])
    # The limit on processes counts all of a user, here maybe the driver's: forks are asked for.
    limit_resources(settings, counts_processes=False)
    listener = filter_system_calls(is_neighbour=True)
    set_dumpable(False)
    _say_ready(channel, listener)
    start_host(settings, channel.fileno(), directory)


def _start_unprotected(
    settings: Settings, channel: socket.socket, other: socket.socket, directory: str
) -> int:
    pid = os.fork()
    if pid == 0:
        other.close()
        _begin_host(channel, lambda: _serve_unprotected(settings, channel, directory))
    return pid


def _serve_unprotected(settings: Settings, channel: socket.socket, directory: str) -> None:
    _close_streams()
    die_with_parent(signal.SIGKILL)
    adopt_orphans()
    os.chdir(directory)
    limit_resources(settings, counts_processes=False)
    _say_ready(channel)
    start_host(settings, channel.fileno(), directory)
