"""Programs that mean harm in a sandbox of bubblewrap: nothing escapes, and nothing stays."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest
from sandbox_material import directories, opened, skip_where_missing

from rollout.errors import SandboxTimeout, SandboxUnavailable
from rollout.sandbox import ExecResult, Sandbox, SandboxSpec, bubblewrap
from rollout.sandbox.bubblewrap import BubblewrapProvider, find_bwrap
from rollout.sandbox.inside.seccomp import DENIED
from slow_cases import slow_but

pytestmark = [pytest.mark.anyio, pytest.mark.process]
X86_64 = os.uname().machine == "x86_64"


@pytest.fixture
def anyio_backend() -> str:
    """Real time, for real processes."""
    return "trio"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    skip_where_missing("bubblewrap")
    yield
    assert psutil.Process().children(recursive=True) == []
    assert directories() == set()


@asynccontextmanager
async def sandboxed(**settings: object) -> AsyncIterator[Sandbox]:
    async with opened("bubblewrap", **settings) as sandbox:
        yield sandbox


async def python(sandbox: Sandbox, code: str, timeout_s: float = 60) -> ExecResult:
    return await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout_s=timeout_s)


DENIED_WORDS = (
    "No such file",
    "Permission denied",
    "Read-only file system",
    "not permitted",
    "No such process",
    "unreachable",
    "refused",
    "Function not implemented",
    "Invalid argument",
    "No such device",
)
#: One line each, which must end in an exception; what it says in the end.
PYTHON_ATTACKS = {
    "connect to the driver's host": "s.create_connection(('127.0.0.1', PORT), 5)",
    "connect to another machine": "s.create_connection(('192.0.2.1', 80), 5)",
    "resolve a name": "s.getaddrinfo('example.com', 80)",
    "open a raw socket": "s.socket(s.AF_INET, s.SOCK_RAW, 1)",
    "connect to an abstract socket": "s.socket(s.AF_UNIX).connect('\\0TOKEN')",
    "write to a file of the driver": "open('OUTSIDE', 'w')",
    "read a file of the driver": "open('OUTSIDE').read()",
    "read it through a link": "os.symlink('OUTSIDE', 'l1'); open('l1').read()",
    "link it": "os.link('OUTSIDE', 'l3')",
    "remove it": "os.unlink('OUTSIDE')",
    "read it through process 1": "open('/proc/1/root' + 'OUTSIDE').read()",
    "read the shadow file": "open('/etc/shadow').read()",
    "list the host's devices": "os.listdir('/sys/class')",
    "write beside the directory": "open('../TOKEN', 'w')",
    "write to /": "os.mkdir('/TOKEN')",
    "write to /etc": "open('/etc/TOKEN', 'w')",
    "write to /dev": "open('/dev/TOKEN', 'w')",
    "write to the door": "open('/run/rollout/TOKEN', 'w')",
    "make a device": "os.mknod('dev', 0o660 | 0o060000, os.makedev(8, 0))",
    "open memory": "open('/dev/mem', 'rb')",
    "open fuse": "open('/dev/fuse', 'rb')",
    "core_pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    "sysrq": "open('/proc/sysrq-trigger', 'w').write('b')",
    "control groups": "os.mkdir('/sys/fs/cgroup/TOKEN')",
    "signal a process of the host": "os.kill(VICTIM, 9)",
    "limits of a process of the host": "r.prlimit(VICTIM, r.RLIMIT_CPU, (1, 1))",
    "memory of process 1": "open('/proc/1/mem', 'r+b', buffering=0)",
    "descriptors of process 1": "os.listdir('/proc/1/fd')",
    "environment of process 1": "open('/proc/1/environ').read()",
    "become root": "os.setuid(0)",
    "chroot": "os.chroot('/work')",
    "raise a limit": "r.setrlimit(r.RLIMIT_NPROC, (10**6, 10**6))",
    "set the clock": "__import__('time').clock_settime(0, 0)",
    "set the host's name": "s.sethostname('x')",
    "allocation": "bytearray(10 * 2**30)",
}


#: Makes each attack in a process of its own: how that ended, and its exception.
ATTACK = """
import json, os, resource as r, socket as s
said = {{}}
for name, attack in {attacks}.items():
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            exec(attack)
        except BaseException as error:
            os.write(writing, f"{{type(error).__name__}}: {{error}}".encode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said[name] = code, open(reading, closefd=False).read()
print(json.dumps(said))
"""


async def test_attack_of_one_line_ends_in_an_error_and_harms_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    before = outside.stat()
    token = f"rollout-{uuid.uuid4().hex}"  # noqa: TID251  (a name that nothing else has)
    victim = subprocess.Popen(["sleep", "1000"])
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(f"\0{token}")
    words = {
        "PORT": str(tcp.getsockname()[1]),
        "OUTSIDE": str(outside),
        "OUTDIR": str(tmp_path),
        "VICTIM": str(victim.pid),
        "TOKEN": token,
    }
    unix.listen()
    for listener in (tcp, unix):
        listener.setblocking(False)
    try:
        async with sandboxed(memory_mb=256) as sandbox:
            code = ATTACK.format(attacks=PYTHON_ATTACKS)
            for word, value in words.items():
                code = code.replace(word, value)
            said = json.loads((await python(sandbox, code)).stdout)
            assert said.keys() == PYTHON_ATTACKS.keys()
            for name, (code, last) in said.items():
                is_denied = any(word in last for word in DENIED_WORDS)
                is_denied |= last.startswith(("MemoryError", "gaierror", "ValueError: not al"))
                assert (code, is_denied) == (1, True), (name, code, last)
            assert (await sandbox.exec(["true"])).exit_code == 0
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
    for place in ("/", "/usr", "/etc", "/dev", "/run", "/var/tmp", "/tmp", "/work"):
        if Path(place).is_dir():
            assert token not in os.listdir(place)


SYSTEM_CALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for word in sys.argv[1:]:
    name, number = word.split("=")
    done = libc.syscall(int(number), 0, 0, 0, 0, 0, 0)
    print(name, "done" if done >= 0 else os.strerror(ctypes.get_errno()))
"""


async def test_system_calls_that_nobody_needs_are_refused() -> None:
    column = 1 if X86_64 else 2
    calls = [f"{call[0]}={call[column]}" for call in DENIED]
    async with sandboxed() as sandbox:
        said = await sandbox.exec(["python3", "-I", "-S", "-c", SYSTEM_CALL, *calls, "clone3=435"])
        status = await sandbox.exec(["cat", "/proc/self/status"])
        threads = await python(
            sandbox,
            "import threading, subprocess\ndone = []\n"
            "t = threading.Thread(target=done.append, args=['thread'])\n"
            "t.start(); t.join()\nprint(*done, flush=True)\nsubprocess.run(['echo', 'child'])",
        )
    lines = said.stdout.decode().splitlines()
    assert lines[:-1] == [f"{call[0]} Operation not permitted" for call in DENIED]
    assert lines[-1] == "clone3 Function not implemented"
    assert threads.stdout.decode().split() == ["thread", "child"]
    fields = dict(line.split(":\t", 1) for line in status.stdout.decode().splitlines())
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert {fields[f"Cap{each}"] for each in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}


@pytest.mark.skipif(not X86_64, reason="a machine with a second set of system calls")
async def test_system_calls_of_another_architecture_end_the_program() -> None:
    # int 0x80 with getpid's 32-bit number; and x32's getpid.
    code = (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    async with sandboxed() as sandbox:
        assert (await python(sandbox, code)).exit_code == 128 + 31  # SIGSYS
        said = await sandbox.exec(["python3", "-c", SYSTEM_CALL, f"x32={0x40000000 + 39}"])
    assert said.stdout == b"x32 Function not implemented\n"


async def test_driver_that_is_root_starts_bwrap_as_nobody_without_powers() -> None:
    async with sandboxed() as sandbox:
        await sandbox.exec(["true"])
        (outer,) = [p for p in psutil.Process().children() if "bwrap" in p.name()]
        (inner,) = outer.children()
        wanted = {os.geteuid() or bubblewrap.NOBODY}
        assert {*outer.uids(), *inner.uids()} == wanted
        assert "--die-with-parent" not in outer.cmdline()
        if os.geteuid() == 0:
            status = Path(f"/proc/{outer.pid}/status").read_text()
            assert "Groups:\t \n" in status
        said = await sandbox.exec(["id", "-u"])
        assert said.stdout == f"{bubblewrap.INSIDE_ID}\n".encode()


async def test_root_without_setpriv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    provider = BubblewrapProvider(bwrap="/usr/bin/bwrap")
    with pytest.raises(SandboxUnavailable, match="setpriv"):
        await provider.check()
    monkeypatch.undo()
    await provider.close()


async def test_check_names_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    # A bwrap that makes no walls: it runs the command.
    with tempfile.NamedTemporaryFile("w", prefix="rollout-", dir="/var/tmp", delete=False) as fake:
        fake.write('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    Path(fake.name).chmod(0o755)
    provider = BubblewrapProvider(bwrap=fake.name)
    monkeypatch.setattr(bubblewrap, "WORKDIR", "/tmp")
    try:
        with pytest.raises(SandboxUnavailable, match=r"does not hold: the network"):
            await provider.check()
    finally:
        await provider.close()
        Path(fake.name).unlink()
    for missing in ("/bin/false", "/no/bwrap"):
        provider = BubblewrapProvider(bwrap=missing)
        try:
            with pytest.raises(SandboxUnavailable):
                await provider.check()
        finally:
            await provider.close()


async def test_trace_of_process_1_is_refused_and_it_answers_on() -> None:
    attack = (
        "import ctypes, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print([libc.ptrace(16, 1, 0, 0), libc.ptrace(0x4206, 1, 0, 0)])\n"
        "for number in (9, 19, 15, 2, 1, 11): os.kill(1, number)\n"
        "print(libc.process_vm_readv(1, 0, 0, 0, 0, 0))"
    )
    async with sandboxed() as sandbox:
        assert (await python(sandbox, attack)).stdout == b"[-1, -1]\n-1\n"
        with anyio.fail_after(30):
            assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


COUNT_FORKS = """
import os
children = []
try:
    for _ in range(100):
        child = os.fork()
        if not child:
            os.read(0, 1) or __import__("time").sleep(1000)
        children.append(child)
except OSError as error:
    print(type(error).__name__)
print(len(children))
for child in children:
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


async def test_number_of_processes_is_bounded_for_each_sandbox() -> None:
    async with sandboxed(max_processes=8) as one, sandboxed(max_processes=8) as other:
        for sandbox in (one, other):
            counted = await python(sandbox, COUNT_FORKS)
            # The count has process 1 in it, and the one that forks.
            assert counted.stdout == b"BlockingIOError\n6\n"


async def test_fork_bomb_is_held_at_the_limit_and_ends_with_the_sandbox() -> None:
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n        os.setsid()\n"
        "    except OSError: pass"
    )
    async with sandboxed(max_processes=16) as sandbox:
        with pytest.raises(SandboxTimeout):
            await python(sandbox, bomb, timeout_s=0.3)
        with anyio.fail_after(30):  # until the kernel has ended them
            while len(await list_processes(sandbox)) > 1:
                await anyio.sleep(0.05)
            assert await sandbox.read_file("/proc/1/comm")
        (outer,) = [p for p in psutil.Process().children() if "bwrap" in p.name()]
    assert not outer.is_running()


async def list_processes(sandbox: Sandbox) -> list[str]:
    """Those that live, apart from process 1 and the one that lists them."""
    said = await sandbox.exec(
        "for p in /proc/[0-9]*; do case $(cut -d' ' -f3 $p/stat 2>/dev/null) in "
        "Z|X|'') ;; *) [ $p = /proc/1 ] || [ $p = /proc/$$ ] || echo $p;; esac; done"
    )
    return said.stdout.decode().split()


@pytest.mark.parametrize("place", slow_but(["/work", "/tmp", "/dev/shm"], "/tmp"))
async def test_flood_of_a_file_system_in_memory_ends_at_its_size(place: str) -> None:
    flood = f"n = 0\nwhile True:\n    open('{place}/f%d' % n, 'wb').write(bytes(2**20))\n    n += 1"
    async with sandboxed(disk_mb=4) as sandbox:
        said = await python(sandbox, flood)
        assert b"No space left on device" in said.stderr
        for other in {"/work", "/tmp", "/dev/shm"} - {place}:
            await sandbox.write_file(f"{other}/x", "still room")
        with pytest.raises(OSError, match="No space left"):
            await sandbox.write_file(f"{place}/more", bytes(2**21))
        size = await sandbox.exec(["df", "-k", "--output=size", place])
    assert size.stdout.split()[-1] == b"4096"


async def test_no_other_place_can_be_written_at_all() -> None:
    find = "find / -xdev -writable ! -type l -not -path '/proc/*' 2>/dev/null; ls -la /dev"
    mounts = "grep -v ' ro[, ]' /proc/self/mounts | cut -d' ' -f2"
    async with sandboxed() as sandbox:
        found = await sandbox.exec(find)
        writable = await sandbox.exec(mounts)
        roots = await sandbox.exec(
            "for d in / /dev /run /etc /usr; do touch $d/x 2>/dev/null && echo $d; done"
        )
    assert roots.stdout == b""
    assert b"/dev/sd" not in found.stdout
    places = set(writable.stdout.decode().split())
    assert {"/tmp", "/work", "/dev/shm"} <= places
    rest = places - {"/tmp", "/work", "/dev/shm", "/proc", "/dev/pts"}
    assert all(place.startswith("/dev/") for place in rest), rest  # single devices


async def test_nothing_of_the_driver_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    with socket.socket() as extra:
        extra.set_inheritable(True)
        async with sandboxed() as sandbox:
            environment = await sandbox.exec(["env"])
            descriptors = await sandbox.exec(["ls", "/proc/self/fd"])
            processes = await sandbox.exec("ls -d /proc/[0-9]* | wc -l; cat /proc/*/cmdline")
            accounts = await sandbox.exec(["cat", "/etc/passwd"])
            name = await sandbox.exec(["uname", "-n"])
    names = {line.partition(b"=")[0] for line in environment.stdout.splitlines()}
    assert names == {b"HOME", b"LANG", b"PATH"}
    assert descriptors.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is what ls reads
    assert int(processes.stdout.split()[0]) <= 5
    assert sys.executable.encode() not in processes.stdout
    assert len(accounts.stdout.splitlines()) == 3
    assert name.stdout == b"sandbox\n"


async def test_file_methods_do_not_reach_into_process_1() -> None:
    async with sandboxed() as sandbox:
        for path in ("/proc/1/mem", "/proc/1/fd/1", "/proc/self/fd/1", "/dev/stdout"):
            with pytest.raises(OSError, match=r"denied|No such file"):
                await sandbox.write_file(path, "x")
            with pytest.raises(OSError, match=r"denied|No such file"):
                await sandbox.read_file(path)
        for path in ("/proc/self/mem", "/dev/fd/0"):  # of the command itself
            with suppress(OSError):
                await sandbox.write_file(path, "x")
            with pytest.raises(OSError):  # noqa: PT011
                await sandbox.read_file(path)
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


async def test_kernel_out_of_memory_ends_commands_before_the_driver() -> None:
    async with sandboxed() as sandbox:
        said = await sandbox.exec(["cat", "/proc/self/oom_score_adj"])
    assert said.stdout == b"1000\n"


async def test_memory_bound_holds_for_each_process() -> None:
    fill = "x = []\nwhile True: x.append(bytearray(b'x') * 2**20)"
    async with sandboxed(memory_mb=64) as sandbox:
        said = await python(sandbox, fill)
        assert b"MemoryError" in said.stderr
        reserved = await python(sandbox, "import mmap\nmmap.mmap(-1, 2**33, prot=mmap.PROT_READ)")
    assert reserved.exit_code == 0  # reserving is not using


# Sandboxes have a /tmp of their own.
@pytest.mark.parametrize("place", ["/var/tmp", "/tmp"])
async def test_readable_paths_are_seen_and_stay_as_they_are(place: str) -> None:
    with_shared = Path(place) / f"rollout-{uuid.uuid4().hex}"  # noqa: TID251
    with_shared.mkdir(mode=0o755)
    (with_shared / "data").write_text("ours")
    provider = BubblewrapProvider(readable=[with_shared])
    try:
        sandbox = await provider.open(SandboxSpec())
        try:
            assert await sandbox.read_file(f"{with_shared}/data") == b"ours"
            with pytest.raises(OSError, match=r"Read-only|denied"):
                await sandbox.write_file(f"{with_shared}/data", "theirs")
        finally:
            await sandbox.close()
    finally:
        await provider.close()
        (with_shared / "data").unlink()
        with_shared.rmdir()


async def test_directory_with_a_file_system_is_an_image() -> None:
    said = subprocess.run([str(find_bwrap()), "--help"], capture_output=True, text=True, check=True)
    if "--tmp-overlay" not in said.stdout:
        pytest.skip("this bwrap has no overlays")
    root = Path("/var/tmp") / f"rollout-{uuid.uuid4().hex}"  # noqa: TID251
    (root / "opt").mkdir(parents=True)
    (root / "opt" / "data").write_text("of the image")
    for name in ("bin", "lib", "lib64", "usr"):
        place = Path("/", name)
        if place.is_symlink():
            (root / name).symlink_to(os.readlink(place))
    try:
        # A whole system would be copied; here it is the host's.
        provider = BubblewrapProvider(readable=["/usr"])
        sandbox = await provider.open(SandboxSpec(image=str(root), workdir="/home/agent"))
        try:
            assert await sandbox.read_file("/opt/data") == b"of the image"
            assert (await sandbox.exec(["pwd"])).stdout == b"/home/agent\n"
            with pytest.raises(OSError, match=r"Read-only|denied"):
                await sandbox.write_file("/opt/data", "x")
        finally:
            await sandbox.close()
            await provider.close()
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)
