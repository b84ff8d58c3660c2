"""Process 1 of a local sandbox: starts commands and collects what they print.

Standard input is one end of a Unix socket (SOCK_SEQPACKET); the driver has the other. It sends this
program, the resource limits of commands with the directory that ends with a host that is not
process 1, then a message with three descriptors for each command:

    exchange  a file in memory with a tuple, as `marshal` writes it: argv, cwd, env, how many bytes
              of each output are kept, whether at its end. The answer takes its place.
    source    the command's standard input
    done      a socket: a byte from here says that the answer is there; its end, that the command
              and all that it has started are to be killed, and answered for

The answer is a line of three numbers, then stdout, then stderr: the exit code, or the negative
errno where nothing was started; the bytes of stdout; whether an output was longer.

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
    from typing import NoReturn
else:
    import _signal as signal

#: What is read at once; no pipe holds more.
CHUNK = 1 << 20
#: By this process; commands have the defaults.
IGNORED = signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, MSG_CMSG_CLOEXEC = 4, 36, 0x40000000

driver = _socket.socket(fileno=0)
LIMITS, DIRECTORY = marshal.loads(driver.recv(CHUNK))
poll = select.epoll()
commands: dict[int, Command] = {}  # by process id
owners: dict[int, Command] = {}  # by descriptor


class Command:
    """A running command and what it has printed."""

    def __init__(
        self, pid: int, exchange: int, done: int, outputs: list[int], cap: int, keeps_tail: bool
    ) -> None:
        self.pid, self.exchange, self.done = pid, exchange, done
        self.cap, self.keeps_tail = cap, keeps_tail
        self.texts = {descriptor: bytearray() for descriptor in outputs}
        self.is_cut = False
        for descriptor in (done, *outputs):
            os.set_blocking(descriptor, False)
            owners[descriptor] = self
            poll.register(descriptor, select.EPOLLIN)

    def handle(self, descriptor: int) -> None:
        """Take what was printed, or kill the command where nobody waits for it any more."""
        if descriptor == self.done:
            self.unwatch(descriptor)
            kill_tree(self.pid)
        elif not self.read(descriptor):
            self.unwatch(descriptor)

    def read(self, descriptor: int) -> bytes:
        data, text = os.read(descriptor, CHUNK), self.texts[descriptor]
        text += data
        if len(text) > self.cap:
            self.is_cut = True
            del text[slice(len(text) - self.cap) if self.keeps_tail else slice(self.cap, None)]
        return data

    def unwatch(self, descriptor: int) -> None:
        if owners.pop(descriptor, None):
            poll.unregister(descriptor)

    def end(self, status: int) -> None:
        """Answer. What is left running may hold the pipes: what is in them now is taken."""
        for descriptor in self.texts:
            try:
                self.read(descriptor)
            except BlockingIOError:
                pass
            self.unwatch(descriptor)
            os.close(descriptor)
        self.unwatch(self.done)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        stdout, stderr = self.texts.values()
        head = b"%d %d %d" % (code, len(stdout), self.is_cut)
        answer(self.exchange, self.done, head, stdout, stderr)


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


def start() -> None:
    """Start a command, or answer why it cannot be."""
    message, ancillary, _, _ = driver.recvmsg(64, 64, MSG_CMSG_CLOEXEC)
    if not message:
        leave()
    exchange, source, done = memoryview(ancillary[0][2]).cast("i")
    data = os.pread(exchange, os.fstat(exchange).st_size, 0)
    argv, cwd, environment, *kept = marshal.loads(data)
    pipes: list[int] = []
    try:
        # Here, where an error has a number: what a child prints is only text.
        os.close(os.open(cwd, os.O_PATH | os.O_DIRECTORY))
        pipes += os.pipe() + os.pipe()
        pid = fork()
    except OSError as error:
        for each in (*pipes, source):
            os.close(each)
        answer(exchange, done, b"%d 0 0" % -(error.errno or 5))
        return
    if not pid:
        run_child(argv, cwd, environment, source, pipes[1], pipes[3])
    for each in (source, pipes[1], pipes[3]):
        os.close(each)
    commands[pid] = Command(pid, exchange, done, pipes[::2], *kept)


def fork() -> int:
    while True:
        try:
            return os.fork()
        except InterruptedError:  # by the end of another command, where sandlock looks at it
            pass


def run_child(argv: list[str], cwd: str, environment: dict[str, str], *streams: int) -> NoReturn:
    """Become the command; never returns."""
    name = argv[0]
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGXFSZ, *IGNORED):  # exec keeps what is ignored
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        os.chdir(cwd)
        for limit, value in LIMITS.items():
            if value is not None:
                resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
        os.execvpe(name, argv, environment)
    except BaseException as error:
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if "/" not in name:  # a directory of PATH that cannot be searched is no reason
            folders = environment.get("PATH", os.defpath).split(":")
            is_missing |= not any(os.path.exists(os.path.join(each, name)) for each in folders)
        reason = os.strerror(2) if is_missing else getattr(error, "strerror", None) or error
        os.write(2, os.fsencode(f"{name}: {reason}\n"))
        os._exit(127 if is_missing else 126)


def kill_tree(root: int) -> None:
    """Kill a process, what it has started, and what is in their sessions.

    All are stopped first: what is stopped starts no more, and its children can be found.
    """
    tree, stopped = {root}, {os.getpid()}
    while True:
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


def reap() -> None:
    """Answer for commands that have ended; the orphans of others end here too."""
    os.read(wakeup, CHUNK)
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in commands:
                commands.pop(pid).end(status)
    except ChildProcessError:
        pass


def leave() -> NoReturn:
    """End, and everything here with it: as process 1 by that alone."""
    if DIRECTORY:
        kill_tree(os.getpid())
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            os.execvpe("rm", ["rm", "-rf", "--", DIRECTORY], {"PATH": os.defpath})
    os._exit(0)


prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
if DIRECTORY:
    _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
else:
    try:  # where memory runs out, the kernel ends these before the driver
        with open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
    except OSError:
        pass
# What runs here has the same user id: it may not trace this process or read its memory. Sandlock
# sees to that itself, and refuses this. It closes files of this process in /proc: so it comes last.
_ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0))
wakeup, wakeup_end = os.pipe()
os.set_blocking(wakeup_end, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
for each in IGNORED:
    signal.signal(each, signal.SIG_IGN)
poll.register(0, select.EPOLLIN)
poll.register(wakeup, select.EPOLLIN)
driver.send(marshal.dumps(globals()["program"]))  # compiled: the next one starts sooner
while True:
    for ready, _ in poll.poll():
        if ready == 0:
            start()
        elif ready == wakeup:
            reap()
        elif ready in owners:
            owners[ready].handle(ready)
