"""Programs that mean harm: each ends in an error, does none, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import attrs
import psutil
import pytest

from rollout.tools import SandboxLimits, ToolResult
from rollout.tools.sandbox import METHODS, Isolation
from rollout.tools.sandbox.trajectory_sandbox import TrajectorySandbox
from sandboxes import PATIENT, directories, processes_with, spec_of

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nothing_left(own_temporary_directory: None) -> Iterator[None]:
    """No process below this one, and no directory, that was not there before."""
    before = directories()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert directories() <= before


@pytest.fixture
def anyio_backend() -> str:
    """Real time, for real processes."""
    return "trio"


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Isolation:
    return request.param


@asynccontextmanager
async def opened(
    method: Isolation, limits: SandboxLimits = PATIENT
) -> AsyncIterator[TrajectorySandbox]:
    sandbox = TrajectorySandbox(await spec_of(method, limits)).acquire()
    try:
        yield sandbox
    finally:
        await sandbox.release()


async def python(sandbox: TrajectorySandbox, code: str) -> ToolResult:
    return await sandbox.run("python", code, is_fresh=False)


async def shell(sandbox: TrajectorySandbox, command: str) -> ToolResult:
    return await sandbox.run("shell", command, is_fresh=False)


GONE = "; what earlier calls had left is gone]"
LAST_LINES = {
    # One line of code, and the end of what the model reads.
    "allocation": ("x = bytearray(10 * 2**30)", "MemoryError"),
    "network": (
        "import socket; socket.create_connection(('127.0.0.1', PORT), 5)",
        ("Network is unreachable", "Operation not permitted", "Connection refused"),
    ),
    "datagram": (
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))",
        ("Network is unreachable", "Operation not permitted"),
    ),
    "unix socket": (
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0TOKEN')",
        ("Connection refused", "Operation not permitted"),
    ),
    "write to a file outside": ("open('OUTSIDE', 'w')", "'OUTSIDE'"),
    "write beside it": ("open('../TOKEN', 'w')", "'../TOKEN'"),
    "write to the system": ("open('/usr/TOKEN', 'w')", "'/usr/TOKEN'"),
    "write to a shared directory": ("open('/var/tmp/TOKEN', 'w')", "'/var/tmp/TOKEN'"),
    "write through a link": (
        "import os; os.symlink('OUTSIDE', 'link'); open('link', 'w')",
        "'link'",
    ),
    "read a file outside": ("open('OUTSIDE').read()", "'OUTSIDE'"),
    "list a directory outside": ("import os; os.listdir('OUTDIR')", "'OUTDIR'"),
    "change a mode": ("import os; os.chmod('OUTSIDE', 0)", "'OUTSIDE'"),
    "change a time": ("import os; os.utime('OUTSIDE', (0, 0))", ("No such file", "not permitted")),
    "remove a file": ("import os; os.unlink('OUTSIDE')", "'OUTSIDE'"),
    "signal": ("import os; os.kill(VICTIM, 9)", ("No such process", "not permitted")),
    "another's limits": (
        "import resource; resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))",
        ("No such process", "not permitted"),
    ),
    "raise a limit": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "not allowed to raise maximum limit",
    ),
    "a large file": ("open('f', 'wb').write(bytes(33 * 2**20))", "File too large"),
}


async def test_attack_of_one_line_ends_in_an_error_and_harms_nothing(
    method: Isolation, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    before = outside.stat()
    token = f"rollout-{uuid.uuid4().hex}"  # noqa: TID251  (a name that nothing else has)
    victim = start_victim()
    tcp, unix = socket.socket(), socket.socket(socket.AF_UNIX)
    tcp.bind(("127.0.0.1", 0))
    unix.bind(f"\0{token}")
    words = {
        "PORT": str(tcp.getsockname()[1]),
        "OUTSIDE": str(outside),
        "OUTDIR": str(tmp_path),
        "VICTIM": str(victim.pid),
        "TOKEN": token,
    }
    for listener in (tcp, unix):
        listener.listen()
        listener.setblocking(False)
    try:
        async with opened(method) as sandbox:
            for name, (code, endings) in LAST_LINES.items():
                said = await python(sandbox, _filled(code, words))
                wanted = (endings,) if isinstance(endings, str) else endings
                last = said.text.splitlines()[-1]
                assert said.is_error, name
                assert any(_filled(ending, words) in last for ending in wanted), (name, said.text)
            again = await python(sandbox, "6 * 7")
            assert again == ToolResult("42\n")
        for listener in (tcp, unix):
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert victim.poll() is None
        assert psutil.Process(victim.pid).rlimit(psutil.RLIMIT_CPU)[0] != 1
    finally:
        victim.kill()
        victim.wait()
        for listener in (tcp, unix):
            listener.close()
    after = outside.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert outside.read_text() == "secret"
    assert not [place for place in ("/usr", "/var/tmp") if token in os.listdir(place)]


def start_victim() -> subprocess.Popen[bytes]:
    """A process of the driver's user that nobody may harm."""
    return subprocess.Popen(["sleep", "1000"])


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


STOPPED = {
    # Code that passes a bound, and what the model reads.
    "while True: pass": "[used more than 0.5 s of CPU time",
    "import os\nos.fork()\nos.fork()\nwhile True: pass": "[used more than 0.5 s of CPU time",
    (
        "import os, time\n"
        "for _ in range(7):\n"
        "    if not os.fork(): break\n"
        "x = b'x' * (40 * 2**20)\n"
        "time.sleep(1000)"
    ): "[used more than 256 MiB of memory",
    "for _ in range(1024): print('x' * 2**20)": "xxxxxxxxxx\n[printed more than 10 bytes",
    (
        "import os, threading\n"
        "def flood():\n"
        "    while True: os.write(1, b'y' * 65536)\n"
        "threading.Thread(target=flood, daemon=True).start()\n"
        "threading.Event().wait()"
    ): "yyyyyyyyyy\n[printed more than 10 bytes",
    "import os\nos._exit(3)": "[exit code 3",
    "import os\nos.kill(os.getpid(), 11)": "[killed by SIGSEGV",
}


async def test_python_that_passes_a_bound_is_stopped_and_the_next_call_starts_a_new_one(
    method: Isolation,
) -> None:
    limits = SandboxLimits(
        timeout_s=60, cpu_s=0.5, memory_mb=256, max_processes=12, max_output_bytes=10
    )
    async with opened(method, limits) as sandbox:
        for code, text in STOPPED.items():
            assert await python(sandbox, "'kept' in globals()") == ToolResult("False\n")
            assert await python(sandbox, "kept = 1") == ToolResult("(no output)")
            assert await python(sandbox, code) == ToolResult(text + GONE, is_error=True)


async def test_endless_program_is_stopped_and_shows_what_it_had_printed(method: Isolation) -> None:
    limits = SandboxLimits(timeout_s=0.5, cpu_s=60)
    endless = "import time\nprint('so far')\ntime.sleep(1000)"
    async with opened(method, limits) as sandbox:
        assert (await python(sandbox, "while True: pass")).is_error
        said = await python(sandbox, endless)
    assert said == ToolResult("so far\n[timed out after 0.5 s" + GONE, is_error=True)


#: The gentle version counts how far it comes; the others do not stop by themselves.
COUNT_FORKS = """
import os, signal
children = []
try:
    for _ in range(100):
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
except OSError as error:
    print(type(error).__name__)
print(len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
FORK_BOMBS = {
    "python": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "python that leaves its session": (
        "import os\nwhile True:\n    try:\n        os.fork()\n        os.setsid()\n"
        "    except OSError: pass"
    ),
    "threads": (
        "import _thread, time\nwhile True:\n    try: _thread.start_new_thread(time.sleep, (999,))\n"
        "    except RuntimeError: pass"
    ),
}


async def test_fork_bomb_is_held_at_the_limit_and_killed_whole(method: Isolation) -> None:
    limits = SandboxLimits(timeout_s=0.5, cpu_s=60, max_processes=8)
    gentle = SandboxLimits(timeout_s=60, cpu_s=60, max_processes=8)
    async with opened(method, gentle) as sandbox:
        counted = await python(sandbox, COUNT_FORKS)
    assert counted == ToolResult("BlockingIOError\n7\n"), "no bomb is lit where the limit is loose"
    async with opened(method, limits) as sandbox:
        for name, bomb in FORK_BOMBS.items():
            said = await python(sandbox, bomb)
            assert said == ToolResult("[timed out after 0.5 s" + GONE, is_error=True), name
            assert psutil.Process().children(recursive=True) == [], name
        said = await shell(sandbox, "bomb() { bomb | bomb & }; bomb; while true; do :; done")
        assert said.is_error
        assert "Resource temporarily unavailable" in said.text or "timed out" in said.text


async def test_files_beyond_the_limit_end_in_an_error(method: Isolation) -> None:
    limits = SandboxLimits(timeout_s=60, cpu_s=60, disk_mb=8, file_mb=2)
    many = "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(bytes(2**20))\n    n += 1"
    async with opened(method, limits) as sandbox:
        said = await python(sandbox, many)
    assert said.is_error
    assert "No space left" in said.text or "wrote more than 8 MiB of files" in said.text


async def test_what_a_call_leaves_running_stands_still_until_the_next_and_ends_with_it(
    method: Isolation,
) -> None:
    token = f"{uuid.uuid4().int % 10**9 + 10**9}"  # noqa: TID251
    started = f"import subprocess\nsubprocess.Popen(['sleep', '{token}'], start_new_session=True)"
    async with opened(method) as sandbox:
        await python(sandbox, started + "\nNone")
        with anyio.fail_after(30):
            while not (found := processes_with(token)):  # seen a moment later on a busy machine
                await anyio.sleep(0.01)
            (sleeper,) = found
            while sleeper.status() != psutil.STATUS_STOPPED:
                await anyio.sleep(0.01)
        await shell(sandbox, f"setsid sleep {token} & sleep 0.1")
        assert len(processes_with(token)) == 2
    assert processes_with(token) == []


async def test_program_cannot_reach_the_host_process_of_its_sandbox(method: Isolation) -> None:
    attack = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
tried = [libc.ptrace(16, os.getppid(), 0, 0), libc.mount(b'x', b'.', b'tmpfs', 0, None),
         libc.unshare(0x10000000), libc.memfd_create(b'x', 0), libc.setuid(0)]
print(tried)
os.kill(os.getppid(), signal.SIGKILL)
import time; time.sleep(1000)
"""
    limits = SandboxLimits(timeout_s=1, cpu_s=60)
    async with opened(method, limits) as sandbox:
        said = await python(sandbox, attack)
        assert said.is_error
        # In a process namespace the host is the first process, which its own children cannot kill.
        assert "timed out after 1 s" in said.text or "the sandbox ended" in said.text
        denied = await python(sandbox, attack.partition("os.kill")[0])
        *others, uid = denied.text.strip("[]\n").split(", ")
        assert others == ["-1"] * 4
        assert uid in ("-1", "0")  # a root without powers may call itself root
        assert await python(sandbox, "1") == ToolResult("1\n")


async def test_nothing_of_the_driver_is_handed_on(
    method: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    with socket.socket() as extra:
        extra.set_inheritable(True)
        async with opened(method) as sandbox:
            environment = await python(sandbox, "import os\nos.environ.get('API_KEY')")
            descriptors = await python(
                sandbox,
                "import errno\n"
                "def is_open(n):\n"
                "    try: os.fstat(n); return True\n"
                "    except OSError: return False\n"
                "print([n for n in range(256) if is_open(n)])",
            )
            in_shell = await shell(
                sandbox,
                "echo $API_KEY; for n in 3 4 5 6 7 8 9; do "
                "(: <&$n) 2>/dev/null && echo open $n; done; true",
            )
    assert environment.text == "(no output)"
    assert len(descriptors.text.split(",")) == 5, descriptors.text  # three streams, two pipes
    assert in_shell.text == "\n"


async def test_sandbox_ends_when_its_supervisor_is_killed(method: Isolation) -> None:
    async with opened(method) as sandbox:
        token = f"{uuid.uuid4().int % 10**9 + 10**9}"  # noqa: TID251
        await python(sandbox, f"import subprocess\np = subprocess.Popen(['sleep', '{token}'])")
        (supervisor,) = psutil.Process().children()
        below = supervisor.children(recursive=True)
        os.kill(supervisor.pid, signal.SIGKILL)
        said = await python(sandbox, "1")
        assert said == ToolResult("[the sandbox ended" + GONE, is_error=True)
        # Without a process namespace, what a program has started outlives a killed supervisor.
        left = processes_with(token) if method == "landlock" else []
        _, alive = psutil.wait_procs([p for p in below if p not in left], timeout=30)
        assert alive == []
        for process in left:
            process.kill()
    for directory in directories():
        directory.rmdir()


@pytest.mark.parametrize(
    "code", ["sys.modules.clear()", "del sys.modules['builtins']", "sys.modules['sys'] = 3"]
)
async def test_program_that_takes_pythons_own_modules_away_gets_a_new_interpreter(
    method: Isolation, code: str
) -> None:
    async with opened(method) as sandbox:
        await python(sandbox, "x = 1")
        said = await python(sandbox, f"import sys\nprint('before')\n{code}\ny = 2")
        assert said == ToolResult(
            "before\n[the code took modules from sys.modules that Python itself needs" + GONE,
            is_error=True,
        )
        assert await python(sandbox, "1 + 1") == ToolResult("2\n")
        assert (await python(sandbox, "x")).text.endswith("NameError: name 'x' is not defined")


async def test_program_that_writes_to_what_it_did_not_open_is_stopped(method: Isolation) -> None:
    junk = (
        "import os\nfor descriptor in range(3, 256):\n"
        "    try: os.write(descriptor, b'junk')\n    except OSError: pass"
    )
    async with opened(method) as sandbox:
        said = await python(sandbox, junk)
        assert said == ToolResult(
            f"[the code wrote to a descriptor that it had not opened{GONE}", is_error=True
        )
        assert await python(sandbox, "6 * 7") == ToolResult("42\n")


async def test_one_shot_call_after_a_fork_bomb_has_room(method: Isolation) -> None:
    limits = attrs.evolve(PATIENT, max_processes=8)
    async with opened(method, limits) as sandbox:
        for _ in range(3):
            said = await sandbox.run("python", "import os\nwhile True: os.fork()", is_fresh=True)
            assert said.is_error
            assert await sandbox.run("python", "6 * 7", is_fresh=True) == ToolResult("42\n")
