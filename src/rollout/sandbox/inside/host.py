"""Process 1 of a local sandbox: starts commands and collects what they print.

Standard input is one end of a Unix socket (SOCK_SEQPACKET); the driver has the other. It sends this
program, then `SETTINGS`, then a message with three descriptors for each command:

    exchange  a file in memory with a dict, as `marshal` writes it: argv, cwd, env; cap: bytes of
              each output; keep: which end of a longer one. The answer takes its place.
    source    the command's standard input
    done      a socket: a byte from here says that the answer is there; its end, that the command
              and all that it has started are to be killed, and answered for

The answer is a line of four numbers, then stdout, then stderr: an errno where nothing was started,
or else 0; the exit code; the bytes of stdout; whether an output was longer.

The driver's death ends the socket, which ends everything here: so this process never waits for
anything but all of its descriptors at once. Written for Python 3.8 and for modules that are built
into it: json, selectors, signal and ctypes would double the time to start.
"""

from __future__ import annotations

import _ctypes
import _socket
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
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, MSG_CMSG_CLOEXEC = 4, 36, 0x40000000
#: "env": `PATH`, `HOME` and the like, for this process's environment is not handed on; "limits":
#: resource limits of commands; "remove": a directory that ends with a host that is not process 1.
SETTINGS: dict[str, Any] = marshal.loads(os.read(0, CHUNK))

driver = _socket.socket(fileno=0)
poll = select.epoll()
callbacks: dict[int, Callable[[int], object]] = {}
commands: dict[int, Command] = {}  # by process id


class Command:
    """A running command and what it has printed."""

    def __init__(
        self, pid: int, request: dict[str, Any], exchange: int, done: int, outputs: list[int]
    ) -> None:
        self.pid, self.exchange, self.done = pid, exchange, done
        self.cap, self.keeps_tail = request["cap"], request["keep"] == "tail"
        self.texts = {descriptor: bytearray() for descriptor in outputs}
        self.is_cut = False
        watch(done, self.kill)
        for descriptor in outputs:
            os.set_blocking(descriptor, False)
            watch(descriptor, self.read)

    def kill(self, descriptor: int) -> None:
        unwatch(descriptor)
        kill_tree(self.pid)

    def read(self, descriptor: int) -> bool:
        """Take what there is; whether there may be more."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        text = self.texts[descriptor]
        text += data
        if not self.keeps_tail or len(text) > 2 * self.cap + CHUNK:
            self.cut(text)
        if not data:
            unwatch(descriptor)
        return bool(data)

    def cut(self, text: bytearray) -> None:
        """Keep one end."""
        if len(text) > self.cap:
            self.is_cut = True
            if self.keeps_tail:
                del text[: len(text) - self.cap]
            else:
                del text[self.cap :]

    def end(self, status: int) -> None:
        """Answer. What is left running may hold the pipes: what is in them now is taken."""
        for descriptor, text in self.texts.items():
            for _ in range(64):  # not without end: a background process may go on writing
                if not self.read(descriptor):
                    break
            unwatch(descriptor)
            os.close(descriptor)
            self.cut(text)
        unwatch(self.done)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        stdout, stderr = self.texts.values()
        head = b"0 %d %d %d" % (code, len(stdout), self.is_cut)
        answer(self.exchange, self.done, head, stdout, stderr)


def watch(descriptor: int, callback: Callable[[int], object]) -> None:
    callbacks[descriptor] = callback
    poll.register(descriptor, select.EPOLLIN)


def unwatch(descriptor: int) -> None:
    if callbacks.pop(descriptor, None):
        poll.unregister(descriptor)


def start(_: int) -> None:
    """Start a command, or answer why it cannot be."""
    message, ancillary, _, _ = driver.recvmsg(64, 64, MSG_CMSG_CLOEXEC)
    if not message:
        leave()
    exchange, source, done = memoryview(ancillary[0][2]).cast("i")
    request = marshal.loads(os.pread(exchange, os.fstat(exchange).st_size, 0))
    pipes: list[int] = []
    try:
        # Here, where an error has a number: what a child prints is only text.
        os.close(os.open(request["cwd"], os.O_PATH | os.O_DIRECTORY))
        for _ in range(2):
            pipes += os.pipe()
        pid = fork()
    except OSError as error:
        for each in (*pipes, source):
            os.close(each)
        answer(exchange, done, b"%d 0 0 0" % (error.errno or 5))
        return
    if not pid:
        run_child(request, source, pipes[1], pipes[3])
    for each in (source, pipes[1], pipes[3]):
        os.close(each)
    commands[pid] = Command(pid, request, exchange, done, pipes[::2])


def fork() -> int:
    while True:
        try:
            return os.fork()
        except InterruptedError:  # by the end of another command, where sandlock looks at it
            pass


def answer(exchange: int, done: int, head: bytes, *texts: bytearray) -> None:
    with open(exchange, "wb") as file:
        file.truncate(0)
        file.write(head + b"\n")
        file.writelines(texts)
    try:
        os.write(done, b"1")
    except OSError:  # nobody waits any more
        pass
    os.close(done)


def run_child(request: dict[str, Any], *streams: int) -> NoReturn:
    """Become the command; never returns."""
    name, environment = request["argv"][0], {**SETTINGS["env"], **request["env"]}
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGXFSZ, *IGNORED):  # exec keeps what is ignored
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        os.chdir(request["cwd"])
        for limit, value in SETTINGS["limits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
        os.execvpe(name, request["argv"], environment)
    except BaseException as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if "/" not in name:  # a directory of PATH that cannot be searched is no reason
            places = environment.get("PATH", os.defpath).split(":")
            missing |= not any(os.path.exists(os.path.join(place, name)) for place in places)
        reason = getattr(error, "strerror", None) or error
        os.write(2, os.fsencode(f"{name}: {os.strerror(2) if missing else reason}\n"))
        os._exit(127 if missing else 126)


def kill_tree(root: int) -> None:
    """Kill a process, what it has started, and what is in their sessions.

    All are stopped first: what is stopped starts no more, and its children can be found.
    """
    tree, stopped = {root}, {os.getpid()}
    for _ in range(100):
        for pid in tree - stopped:
            kill(pid, signal.SIGSTOP)
        stopped |= tree
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    _, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
            except OSError:  # it has ended
                continue
            if int(parent) in tree or int(session) in tree:
                tree.add(int(name))
        if tree <= stopped:
            break
    for pid in tree - {os.getpid()}:
        kill(pid, signal.SIGKILL)


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def reap(_: int) -> None:
    """Answer for commands that have ended; the orphans of others end here too."""
    os.read(wakeup, CHUNK)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in commands:
            commands.pop(pid).end(status)


def leave() -> NoReturn:
    """End, and everything here with it: as process 1 by that alone."""
    directory = SETTINGS.get("remove")
    if directory:
        kill_tree(os.getpid())
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass
        os.execvpe("rm", ["rm", "-rf", "--", directory], {"PATH": os.defpath})
    os._exit(0)


def prctl(option: int, value: int) -> None:
    function = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    if _ctypes.call_function(function, (option, value, 0, 0, 0)) != 0:
        raise OSError("prctl failed")


if SETTINGS.get("remove"):
    prctl(PR_SET_CHILD_SUBREAPER, 1)
else:
    try:  # where memory runs out, the kernel ends these before the driver
        with open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
    except OSError:
        pass
# What runs here has the same user id: it may not trace this process or read its memory. Sandlock
# sees to that itself, and refuses this.
if not SETTINGS.get("is_confined"):
    prctl(PR_SET_DUMPABLE, 0)
wakeup, wakeup_end = os.pipe()
os.set_blocking(wakeup_end, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
for each in IGNORED:
    signal.signal(each, signal.SIG_IGN)
watch(0, start)
watch(wakeup, reap)
driver.send(marshal.dumps(globals()["program"]))  # compiled: the next one starts sooner
while True:
    for ready, _ in poll.poll():
        if ready in callbacks:
            callbacks[ready](ready)
