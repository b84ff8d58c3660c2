"""Process 1 of a local sandbox: starts commands, collects what they print, reads and writes files.

The driver sends this program through standard input, with `settings` beside it. Frames follow: u32
length of the header and u32 length of the body, little-endian, the header, the body. Headers are
dicts, of requests as `marshal` writes them, of answers as JSON. Requests and their answers carry an
"id":

    exec   argv, cwd, env, cap, keep; body: standard input
           -> exit, out (bytes of stdout), truncated; body: stdout, then stderr
    kill   target: the id of an exec, which then answers
    read   path, offset, size -> body
    write  path, append, mode; body -> nothing more

A failed request is answered with "error", an exception's name, and "errno"; body: its text. The
driver's death is the end of standard input, and ends everything here: so nothing in this process
may block, neither on the pipes of commands nor on the driver's.

Written for Python 3.8 and for what is built into it: json, selectors, signal, struct and ctypes
would double the time to start.
"""

from __future__ import annotations

import _ctypes
import marshal
import os
import resource
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn
else:
    import _signal as signal

CHUNK = 65536
#: By this process; commands have the defaults.
IGNORED = signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
#: "env": `PATH`, `HOME` and the like, for this process's environment is not handed on; "limits":
#: resource limits of commands; "remove": a directory that goes with a host that is not process 1.
SETTINGS: dict[str, Any] = globals()["settings"]

poll = select.epoll()
callbacks: dict[int, Callable[[int], object]] = {}
commands: dict[int, Command] = {}  # by id
by_pid: dict[int, Command] = {}
outgoing = bytearray()
incoming = bytearray()


class Command:
    """One running command: its pipes, and the bounded ends or beginnings of its output."""

    def __init__(self, request: dict[str, Any], body: bytes) -> None:
        self.id = request["id"]
        self.cap = request["cap"]
        self.keeps_tail = request["keep"] == "tail"
        self.outputs: dict[int, int] = {}  # descriptor -> 0 for stdout, 1 for stderr
        self.texts = [bytearray(), bytearray()]
        self.truncated = False
        self.input = memoryview(body)
        self.input_fd: int | None = None
        self.start(request)

    def start(self, request: dict[str, Any]) -> None:
        pipes: list[int] = []
        try:
            stdout, stderr = os.pipe(), os.pipe()
            pipes += [*stdout, *stderr]
            if self.input:
                source, self.input_fd = os.pipe()
                pipes += [source, self.input_fd]
            else:
                source = os.open("/dev/null", os.O_RDONLY)
                pipes.append(source)
            # Checked here, where an error has a name: what a child says is only text.
            os.close(os.open(request["cwd"], os.O_PATH | os.O_DIRECTORY))
            self.pid = os.fork()
        except OSError:
            for descriptor in pipes:
                os.close(descriptor)
            raise
        if not self.pid:
            run_child(request, source, stdout[1], stderr[1])
        for descriptor in (source, stdout[1], stderr[1]):
            os.close(descriptor)
        for number, descriptor in enumerate((stdout[0], stderr[0])):
            self.outputs[descriptor] = number
            os.set_blocking(descriptor, False)
            watch(descriptor, select.EPOLLIN, self.read)
        if self.input_fd is not None:
            os.set_blocking(self.input_fd, False)
            watch(self.input_fd, select.EPOLLOUT, self.write)

    def write(self, descriptor: int) -> None:
        try:
            self.input = self.input[os.write(descriptor, self.input[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the command has closed it
            self.input = self.input[:0]
        if not self.input:
            self.close_input()

    def close_input(self) -> None:
        if self.input_fd is not None:
            unwatch(self.input_fd)
            os.close(self.input_fd)
            self.input_fd = None

    def read(self, descriptor: int) -> bool:
        """Take what there is; whether there may be more."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            del self.outputs[descriptor]
            unwatch(descriptor)
            os.close(descriptor)
            return False
        number = self.outputs[descriptor]
        text = self.texts[number]
        if not self.keeps_tail:
            self.truncated |= len(text) + len(data) > self.cap
            text += data[: self.cap - len(text)]
            return True
        text += data
        if len(text) > 2 * self.cap + CHUNK:
            self.truncate(text)
        return True

    def truncate(self, text: bytearray) -> None:
        """Keep the last bytes alone."""
        if len(text) > self.cap:
            self.truncated = True
            del text[: len(text) - self.cap]

    def end(self, status: int) -> None:
        """Answer. What is left running may hold the pipes: what is in them now is taken."""
        for descriptor in list(self.outputs):
            # Not without end: a background process may go on writing.
            for _ in range(64):
                if not self.read(descriptor):
                    break
        for descriptor in self.outputs:
            unwatch(descriptor)
            os.close(descriptor)
        self.close_input()
        for text in self.texts:
            self.truncate(text)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        stdout, stderr = self.texts
        truncated = "true" if self.truncated else "false"
        send(
            f'{{"id":{self.id},"exit":{code},"out":{len(stdout)},"truncated":{truncated}}}',
            bytes(stdout + stderr),
        )


def watch(descriptor: int, events: int, callback: Callable[[int], object]) -> None:
    callbacks[descriptor] = callback
    poll.register(descriptor, events)


def unwatch(descriptor: int) -> None:
    del callbacks[descriptor]
    poll.unregister(descriptor)


def run_child(request: dict[str, Any], *streams: int) -> NoReturn:
    """Become the command; never returns."""
    environment = {**SETTINGS["env"], **request["env"]}
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGXFSZ, *IGNORED):  # exec keeps what is ignored
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        os.chdir(request["cwd"])
        for name, value in SETTINGS["limits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        os.execvpe(request["argv"][0], request["argv"], environment)
    except BaseException as error:
        name = request["argv"][0]
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if "/" not in name:  # a directory of PATH that cannot be searched is no reason
            places = environment.get("PATH", os.defpath).split(":")
            missing |= not any(os.path.exists(os.path.join(place, name)) for place in places)
        reason = getattr(error, "strerror", None) or error
        os.write(2, os.fsencode(f"{name}: {os.strerror(2) if missing else reason}\n"))
        os._exit(127 if missing else 126)


def read_processes() -> dict[int, tuple[int, int, bytes]]:
    """Parent and session of every process that can be seen, by id."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            found[int(name)] = int(fields[1]), int(fields[3]), fields[0]
    return found


def find_tree(root: int) -> set[int]:
    """The process, what it has started, and what is in their sessions."""
    processes = read_processes()
    tree, sessions = {root}, {root}
    while True:
        more = {
            pid
            for pid, (parent, session, _) in processes.items()
            if pid not in tree and (parent in tree or session in sessions)
        }
        if not more:
            return {pid for pid in tree if processes.get(pid, (0, 0, b"Z"))[2] not in b"ZX"}
        tree |= more
        sessions |= {processes[pid][1] for pid in more if processes[pid][1] in tree}


def kill_tree(root: int) -> None:
    """Stop everything first: what is stopped starts no more, and its children can be found."""
    stopped: set[int] = set()
    for _ in range(100):
        new = find_tree(root) - stopped - {os.getpid()}
        if not new:
            break
        for pid in new:
            kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        kill(pid, signal.SIGKILL)


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def reap(_: int) -> None:
    os.read(wakeup, 4096)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        command = by_pid.pop(pid, None)
        if command is not None:
            del commands[command.id]
            command.end(status)


def read_file(request: dict[str, Any]) -> None:
    descriptor = open_regular(request["path"], os.O_RDONLY)
    try:
        send(f'{{"id":{request["id"]}}}', os.pread(descriptor, request["size"], request["offset"]))
    finally:
        os.close(descriptor)


def write_file(request: dict[str, Any], body: bytes) -> None:
    path = request["path"]
    try:
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(20, "Not a directory", path) from None
    append = request["append"]
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0))
    try:
        if not append:
            os.ftruncate(descriptor, 0)
        view = memoryview(body)
        while view:
            view = view[os.write(descriptor, view) :]
        if request["mode"] is not None:
            os.fchmod(descriptor, request["mode"])
    finally:
        os.close(descriptor)
    send(f'{{"id":{request["id"]}}}')


def open_regular(path: str, flags: int) -> int:
    """A pipe or a device would make this process wait."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == 6:  # ENXIO: a pipe that nobody reads, or a socket
            raise PermissionError(13, "Not a regular file", path) from None
        raise
    kind = os.fstat(descriptor).st_mode & 0o170000
    if kind == 0o100000:
        return descriptor
    os.close(descriptor)
    if kind == 0o040000:
        raise IsADirectoryError(21, "Is a directory", path)
    raise PermissionError(13, "Not a regular file", path)


def handle(request: dict[str, Any], body: bytes) -> None:
    do = request["do"]
    try:
        if do == "exec":
            command = Command(request, body)
            commands[command.id] = by_pid[command.pid] = command
        elif do == "kill":
            target = commands.get(request["target"])
            if target is not None:
                kill_tree(target.pid)
        elif do == "read":
            read_file(request)
        elif do == "write":
            write_file(request, body)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None) or 0
        text = os.strerror(number) if number else str(error)
        kind = type(error).__name__
        answer = f'{{"id":{request["id"]},"error":"{kind}","errno":{number}}}'
        send(answer, text.encode(errors="replace"))


def send(header: str, body: bytes = b"") -> None:
    was_empty = not outgoing
    for part in (header.encode(), body):
        outgoing.extend(len(part).to_bytes(4, "little"))
    outgoing.extend(header.encode() + body)
    if was_empty:
        flush(1)
        if outgoing:
            watch(1, select.EPOLLOUT, flush)


def flush(_: int) -> None:
    try:
        while outgoing:
            with memoryview(outgoing) as view:
                count = os.write(1, view[: 16 * CHUNK])
            del outgoing[:count]
    except BlockingIOError:
        return
    except OSError:
        leave()
    if 1 in callbacks:
        unwatch(1)


def receive(_: int) -> None:
    try:
        data = os.read(0, 16 * CHUNK)
    except BlockingIOError:
        return
    if not data:
        leave()
    incoming.extend(data)
    while len(incoming) >= 8:
        head = int.from_bytes(incoming[:4], "little")
        body = int.from_bytes(incoming[4:8], "little")
        end = 8 + head + body
        if len(incoming) < end:
            return
        request, payload = marshal.loads(incoming[8 : 8 + head]), bytes(incoming[8 + head : end])
        del incoming[:end]
        handle(request, payload)


def leave() -> NoReturn:
    """End, and everything here with it: as process 1 by that alone."""
    directory = SETTINGS.get("remove")
    if directory:
        me = os.getpid()
        for _ in range(1000):  # orphans are handed to this process, one generation after another
            children = [pid for pid, entry in read_processes().items() if entry[0] == me]
            if not children:
                break
            for pid in children:
                kill(pid, signal.SIGKILL)
                try:
                    os.waitpid(pid, 0)
                except ChildProcessError:
                    pass
        os.execvpe("rm", ["rm", "-rf", "--", directory], {"PATH": os.defpath})
    os._exit(0)


def prctl(option: int, value: int) -> None:
    function = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    if _ctypes.call_function(function, (option, value, 0, 0, 0)) != 0:
        os.write(2, b"prctl failed")
        os._exit(1)


if SETTINGS.get("remove"):
    prctl(PR_SET_CHILD_SUBREAPER, 1)
else:
    # Where memory runs out, the kernel ends these before the driver.
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
# What runs here has the same user id: it may not trace this process or read its memory. Sandlock
# sees to that itself, and refuses this.
if not SETTINGS.get("is_confined"):
    prctl(PR_SET_DUMPABLE, 0)
wakeup, wakeup_end = os.pipe()
for each in (0, 1, wakeup_end):
    os.set_blocking(each, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
for each in IGNORED:
    signal.signal(each, signal.SIG_IGN)
watch(0, select.EPOLLIN, receive)
watch(wakeup, select.EPOLLIN, reap)
send('{"id":0}')
while True:
    for ready, _ in poll.poll():
        if ready in callbacks:
            callbacks[ready](ready)
