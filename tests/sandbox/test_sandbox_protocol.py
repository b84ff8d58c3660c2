"""The protocol of sandboxes, the same on every provider."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time  # noqa: TID251  (real processes take real time)
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from sandbox_material import (
    ENGINE,
    PROVIDERS,
    containers,
    directories,
    image_for,
    opened,
    processes_with,
    provided,
    skip_where_missing,
    spec_for,
)

from rollout.errors import (
    ConfigError,
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox import SandboxSpec, open_provider
from slow_cases import slow_but

pytestmark = [pytest.mark.anyio, pytest.mark.process]
PNG = bytes(range(256)) * 4


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


@pytest.fixture(params=slow_but(PROVIDERS, "bubblewrap"))
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert psutil.Process().children(recursive=True) == []
    assert directories() == set()
    assert containers() == ""


def new_token() -> str:
    """A number of seconds that nobody else sleeps."""
    return str(uuid.uuid4().int % 10**9 + 10**9)  # noqa: TID251


async def wait_for_processes(token: str, count: int) -> None:
    with anyio.fail_after(30):
        while len(processes_with(token)) != count:
            await anyio.sleep(0.02)


async def test_exec_hands_on_words_and_gives_exit_code_and_both_streams(provider: str) -> None:
    words = ["", " ", "a b", "'", '"', "$HOME", "*", "\\", "\n", "--", "-n", "né\u4f60\U0001f600"]
    async with opened(provider) as sandbox:
        of_list = await sandbox.exec(["sh", "-c", "printf 'a\\377'; printf b >&2; exit 3"])
        of_text = await sandbox.exec('echo $((6 * 7)) | cat; true && echo "two  words"')
        strange = await sandbox.exec(["printf", "%s|", *words])
        missing = await sandbox.exec(["no-such-program", "x"])
        await sandbox.write_file("plain", "no program", mode=0o644)
        plain = await sandbox.exec(["./plain"])
    assert (of_list.exit_code, of_list.stdout, of_list.stderr) == (3, b"a\xff", b"b")
    assert not of_list.truncated
    assert 0 < of_list.seconds < 60
    assert of_text.stdout == b"42\ntwo  words\n"
    assert strange.stdout.decode() == "".join(f"{word}|" for word in words)
    assert (missing.exit_code, plain.exit_code) == (127, 126)
    assert b"no-such-program" in missing.stderr


async def test_exec_gets_its_input_to_the_end(provider: str) -> None:
    async with opened(provider) as sandbox:
        assert (await sandbox.exec(["cat"], input=PNG)).stdout == PNG
        assert (await sandbox.exec(["cat"], input="né")).stdout.decode() == "né"
        assert (await sandbox.exec(["cat"])).stdout == b""
        large = bytes(3 * 2**20)
        counted = await sandbox.exec(["wc", "-c"], input=large)
        unread = await sandbox.exec(["true"], input=large)
    assert counted.stdout.split() == [b"%d" % len(large)]
    assert unread.exit_code == 0


async def test_exec_starts_in_the_working_directory_or_where_it_is_told(provider: str) -> None:
    async with opened(provider) as sandbox:
        here = await sandbox.exec(["pwd"])
        await sandbox.write_file("in n\u00e9/x", "1")
        below = await sandbox.exec(["pwd"], cwd="in n\u00e9")
        above = await sandbox.exec(["pwd"], cwd="/")
        with pytest.raises(FileNotFoundError):
            await sandbox.exec(["pwd"], cwd="nowhere")
        with pytest.raises(NotADirectoryError):
            await sandbox.exec(["pwd"], cwd="in n\u00e9/x")
    assert here.stdout.decode().strip() == sandbox.workdir
    assert below.stdout.decode().endswith("/in n\u00e9\n")
    assert above.stdout == b"/\n"


async def test_exec_sees_variables_of_the_spec_and_its_own_and_nothing_of_the_driver(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    async with opened(provider, env={"A": "1", "B": "b b"}) as sandbox:
        result = await sandbox.exec('echo "$A|$B|$C|$API_KEY"', env={"B": "2\nn\u00e9", "C": "$x"})
        again = await sandbox.exec('echo "$A|$B|$C|$HOME"')
    assert result.stdout.decode() == "1|2\nn\u00e9|$x|\n"
    assert again.stdout.startswith(b"1|b b||/")


async def test_output_beyond_the_cap_is_cut_at_one_end_and_said(provider: str) -> None:
    program = "i=0; while [ $i -lt 5000 ]; do echo line$i; i=$((i+1)); done; echo e1 e2 e3 >&2"
    async with opened(provider) as sandbox:
        head = await sandbox.exec(program, max_output_bytes=16, keep="head")
        tail = await sandbox.exec(program, max_output_bytes=16, keep="tail")
        whole = await sandbox.exec(program)
        fits = await sandbox.exec("printf 0123456789abcdef", max_output_bytes=16)
        none = await sandbox.exec("echo x", max_output_bytes=0)
    lines = "".join(f"line{n}\n" for n in range(5000)).encode()
    assert (head.stdout, tail.stdout) == (lines[:16], lines[-16:])
    assert head.stderr == tail.stderr == b"e1 e2 e3\n"
    assert head.truncated
    assert tail.truncated
    assert (whole.stdout, whole.truncated) == (lines, False)
    assert (fits.stdout, fits.truncated) == (b"0123456789abcdef", False)
    assert (none.stdout, none.truncated) == (b"", True)


async def test_flood_of_output_ends_with_the_command(provider: str) -> None:
    async with opened(provider) as sandbox:
        with pytest.raises(SandboxTimeout) as error:
            await sandbox.exec(
                "while :; do echo 0123456789012345678901234567890; done | cat",
                timeout_s=0.5,
                max_output_bytes=1000,
            )
        assert len(error.value.stdout) == 1000
        assert (await sandbox.exec(["true"])).exit_code == 0


async def test_timeout_kills_the_tree_and_tells_the_output_so_far(provider: str) -> None:
    token = new_token()
    program = (
        f"echo so far; echo oh >&2; sleep {token} & setsid sleep {token} & "
        f"(sh -c 'trap \"\" TERM INT HUP; sleep {token}') ; sleep {token}"
    )
    async with opened(provider) as sandbox:
        began = time.monotonic()
        with pytest.raises(SandboxTimeout) as error:
            await sandbox.exec(program, timeout_s=1)
        assert time.monotonic() - began < 20
        assert (error.value.stdout, error.value.stderr) == (b"so far\n", b"oh\n")
        assert isinstance(error.value, TimeoutError)
        assert isinstance(error.value, SandboxError)
        assert "timed out after 1 s" in str(error.value)
        await wait_for_processes(token, 0)
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


async def test_cancellation_kills_the_tree_and_leaves_the_sandbox_usable(provider: str) -> None:
    token = new_token()
    async with opened(provider) as sandbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.exec, f"setsid sleep {token} & sleep {token}")
            await wait_for_processes(token, 2)
            tasks.cancel_scope.cancel()
        await wait_for_processes(token, 0)
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


async def test_background_process_lives_on_until_the_sandbox_is_closed(provider: str) -> None:
    token = new_token()
    async with opened(provider) as sandbox:
        with anyio.fail_after(30):
            result = await sandbox.exec(
                f"setsid sleep {token} >/dev/null 2>&1 & sleep {token} >/dev/null 2>&1 & echo on"
            )
        assert result.stdout == b"on\n"
        await wait_for_processes(token, 2)
        await sandbox.exec(["true"])
        assert len(processes_with(token)) == 2
    await wait_for_processes(token, 0)


async def test_commands_at_once_are_answered_each_with_its_own(provider: str) -> None:
    results = {}

    async with opened(provider) as sandbox:

        async def run(number: int) -> None:
            pause = (number * 7 % 5) / 20
            program = f"cat; sleep {pause}; printf ' err{number}' >&2; exit {number}"
            results[number] = await sandbox.exec(program, input=f"in{number}" * 1000)

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(run, number)
    for number, result in results.items():
        assert result.stdout.decode() == f"in{number}" * 1000
        assert (result.stderr.decode(), result.exit_code) == (f" err{number}", number)


async def test_written_file_reads_the_same_replaces_another_and_has_its_mode(provider: str) -> None:
    path = "deep/er/né \u4f60'\"$x"
    async with opened(provider) as sandbox:
        for data in (b"", PNG, os.urandom(5 * 2**20 + 3)):
            await sandbox.write_file(path, data)
            assert await sandbox.read_file(path) == data
            counted = await sandbox.exec(["wc", "-c", path])
            assert int(counted.stdout.split()[0]) == len(data)
        await sandbox.write_file("f", "long content")
        await sandbox.write_file("f", "new", mode=0o640)
        await sandbox.write_file("run", "#!/bin/sh\necho ran $1", mode=0o755)
        assert await sandbox.read_file("f") == b"new"
        assert (await sandbox.exec(["stat", "-c", "%a", "f"])).stdout == b"640\n"
        assert (await sandbox.exec(["./run", "x"])).stdout == b"ran x\n"
        absolute = f"{sandbox.workdir}/run"
        assert (await sandbox.read_file(absolute)).startswith(b"#!")


async def test_missing_file_and_directory_are_the_usual_errors_and_large_ones_refused_whole(
    provider: str,
) -> None:
    async with opened(provider) as sandbox:
        await sandbox.write_file("f", bytes(3000))
        with pytest.raises(SandboxLimit, match="2999"):
            await sandbox.read_file("f", max_bytes=2999)
        assert len(await sandbox.read_file("f", max_bytes=3000)) == 3000
        await sandbox.write_file("d/f", "x")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("nothing")
        with pytest.raises(IsADirectoryError):
            await sandbox.read_file("d")
        with pytest.raises(IsADirectoryError):
            await sandbox.write_file("d", "x")
        with pytest.raises((NotADirectoryError, PermissionError)):
            await sandbox.write_file("d/f/below", "x")
        with pytest.raises(ValueError, match="NUL"):
            await sandbox.read_file("a\0b")


async def test_file_that_may_not_be_read_or_written_is_refused(provider: str) -> None:
    if provider != "bubblewrap" and os.geteuid() == 0:
        pytest.skip("root may")
    async with opened(provider) as sandbox:
        await sandbox.write_file("secret", "x", mode=0o000)
        with pytest.raises(PermissionError):
            await sandbox.read_file("secret")
        with pytest.raises(PermissionError):
            await sandbox.write_file("secret", "y")


async def test_pipe_or_device_is_no_file_and_stops_nothing(provider: str) -> None:
    async with opened(provider) as sandbox:
        await sandbox.exec(["mkfifo", "pipe"])
        with anyio.fail_after(30):
            for path in ("pipe", "/dev/zero"):
                with pytest.raises(PermissionError):
                    await sandbox.read_file(path)
            with pytest.raises(PermissionError):
                await sandbox.write_file("pipe", "x")
            assert (await sandbox.exec(["true"])).exit_code == 0


async def test_upload_copies_files_and_directories_and_no_link(
    provider: str, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "sub" / "né").write_bytes(PNG)
    (tree / "run").write_text("#!/bin/sh\necho ran")
    (tree / "run").chmod(0o755)
    (tree / "large").write_bytes(bytes(17 * 2**20))
    links = tmp_path / "links"
    links.mkdir()
    (links / "link").symlink_to("/etc/shadow")
    async with opened(provider) as sandbox:
        await sandbox.upload(tree, "into/there")
        await sandbox.upload(tree / "run", "single")
        listed = await sandbox.exec("cd into/there && find . | sort && ./run && ../../single")
        assert await sandbox.read_file("into/there/sub/né") == PNG
        size = await sandbox.exec(["wc", "-c", "into/there/large"])
        with pytest.raises(SandboxError, match="link"):
            await sandbox.upload(links, "t")
        with pytest.raises(FileNotFoundError):
            await sandbox.upload(tmp_path / "nothing", "t")
    assert listed.stdout.decode().splitlines() == [
        ".", "./large", "./run", "./sub", "./sub/empty", "./sub/né", "ran", "ran",
    ]  # fmt: skip
    assert int(size.stdout.split()[0]) == 17 * 2**20


async def test_download_copies_files_and_directories(provider: str, tmp_path: Path) -> None:
    async with opened(provider) as sandbox:
        await sandbox.write_file("out/a/né", PNG)
        await sandbox.write_file("out/run", "x", mode=0o755)
        await sandbox.exec(["mkdir", "out/empty"])
        await sandbox.download("out", tmp_path / "got")
        await sandbox.download("out/a/né", tmp_path / "single")
        with pytest.raises(FileExistsError):
            await sandbox.download("out", tmp_path / "got")
        with pytest.raises(FileNotFoundError):
            await sandbox.download("nothing", tmp_path / "never")
    assert (tmp_path / "got" / "a" / "né").read_bytes() == PNG
    assert (tmp_path / "got" / "empty").is_dir()
    assert os.access(tmp_path / "got" / "run", os.X_OK)
    assert (tmp_path / "single").read_bytes() == PNG
    assert not (tmp_path / "never").exists()


async def test_download_of_links_devices_and_too_much_is_refused(
    provider: str, tmp_path: Path
) -> None:
    async with opened(provider) as sandbox:
        for name, command in {
            "link": "ln -s /etc/passwd bad/x",
            "hard": "echo > bad/x; ln bad/x bad/y",
            "pipe": "mkfifo bad/x",
        }.items():
            await sandbox.exec(f"rm -rf bad; mkdir bad; {command}")
            with pytest.raises(SandboxError, match="no regular file"):
                await sandbox.download("bad", tmp_path / name)
            assert not (tmp_path / name).exists()
        await sandbox.exec("rm -rf bad; mkdir bad; head -c 3000000 /dev/zero > bad/f")
        with pytest.raises(SandboxLimit):
            await sandbox.download("bad", tmp_path / "much", max_bytes=10**6)
        if provider == "container":
            return  # the tar of busybox is part of its shell
        # What makes the archive is the sandbox's own.
        await sandbox.write_file("bin/tar", TAR, mode=0o755)
        path = f"{sandbox.workdir}/bin:/usr/bin:/bin:/usr/local/bin"
        await sandbox.exec("ln -s /etc/passwd link; ln -s bad linked")
        for link in ("link", "linked", "linked/"):
            with pytest.raises(SandboxError, match="no regular file"):
                await sandbox.download(link, tmp_path / "followed")
        for name in ("../up", "a/../../up", "/abs"):
            sandbox.env = {"PATH": path, "NAME": name}
            with pytest.raises(SandboxError, match="no regular file"):
                await sandbox.download("bad", tmp_path / "made" / "in")
        assert [*tmp_path.iterdir()] == []


#: Answers whoever asks with an archive that has one member of the name in $NAME.
TAR = """#!/usr/bin/env python3
import io, os, sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
    archive.addfile(tarfile.TarInfo(os.environ["NAME"]), io.BytesIO())
"""


async def test_spec_has_files_and_a_setup_that_must_succeed(provider: str, tmp_path: Path) -> None:
    (tmp_path / "local").write_text("from here")
    files = {"a/text": "né", "bytes": PNG, "path": tmp_path / "local", "dir": tmp_path}
    setup = "cat a/text path > made; test -f dir/local"
    async with opened(provider, files=files, setup=setup) as sandbox:
        assert (await sandbox.read_file("made")).decode() == "néfrom here"
        assert await sandbox.read_file("bytes") == PNG
    async with provided(provider) as made:
        with pytest.raises(SandboxError, match=r"setup.*exit code 3: why"):
            await made.open(spec_for(provider, setup="echo why >&2; exit 3"))
        with pytest.raises(SandboxError, match=r"setup.*timed out"):
            await made.open(spec_for(provider, setup=["sleep", "600"], setup_s=0.5))


async def test_close_ends_what_runs_and_may_be_called_again(provider: str) -> None:
    token = new_token()
    ended = []
    async with opened(provider) as sandbox:

        async def run() -> None:
            with pytest.raises(SandboxLost):
                await sandbox.exec(f"trap '' TERM HUP; sleep {token}; sleep {token}")
            ended.append("exec")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await wait_for_processes(token, 1)
            tasks.start_soon(sandbox.close)
            await sandbox.close()
        await sandbox.close()
        assert ended == ["exec"]
        await wait_for_processes(token, 0)
        for call in (
            sandbox.exec(["true"]),
            sandbox.read_file("f"),
            sandbox.download("f", "g"),
        ):
            with pytest.raises(SandboxLost, match="closed"):
                await call


async def test_opening_that_is_cancelled_leaves_nothing(provider: str) -> None:
    async with provided(provider) as made:
        for delay in (0.0, 0.005, 0.02, 0.05):
            with anyio.move_on_after(delay):
                sandbox = await made.open(spec_for(provider, setup=["sleep", "600"]))
                await sandbox.close()


async def test_directory_of_one_sandbox_is_not_seen_by_the_next(provider: str) -> None:
    async with provided(provider) as made:
        first = await made.open(spec_for(provider))
        second = await made.open(spec_for(provider))
        try:
            await first.write_file("f", "x")
            with pytest.raises(FileNotFoundError):
                await second.read_file("f")
            assert first.id != second.id
        finally:
            await first.close()
            await second.close()


async def test_wrong_arguments_are_refused_before_anything_runs(provider: str) -> None:
    wrong: list[Any] = ["echo", 1]
    async with opened(provider) as sandbox:
        for command in (["a\0b"], [], wrong):
            with pytest.raises(ValueError, match=r"command|NUL"):
                await sandbox.exec(command)
        with pytest.raises(ValueError, match="timeout_s = nan: expected seconds"):
            await sandbox.exec("true", timeout_s=float("nan"))
        with pytest.raises(ValueError, match=r"env\["):
            await sandbox.exec("true", env={"A=B": "x"})


async def test_program_inside_reaches_a_server_here_by_its_host_url(provider: str) -> None:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"hi" * 100_000)

    program = (
        "import sys, urllib.request\n"
        "for _ in range(5): print(len(urllib.request.urlopen(sys.argv[1]).read()))"
    )
    skip_where_missing(provider)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with opened(provider) as sandbox, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        url = await sandbox.host_url(f"http://127.0.0.1:{port}/v1/x?y=1")
        assert url.endswith("/v1/x?y=1")
        assert await sandbox.host_url(f"http://127.0.0.1:{port}/v1/x?y=1") == url
        result = await sandbox.exec(["python3", "-c", program, url], timeout_s=60)
        tasks.cancel_scope.cancel()
    await listener.aclose()
    assert result.stdout == b"200000\n" * 5, result


async def test_ports_and_snapshots_are_there_or_refused(provider: str) -> None:
    settings = (
        {"options": {"ports": [8000]}, "network": "public"} if provider == "container" else {}
    )
    async with opened(provider, **settings) as sandbox:
        if provider == "bubblewrap":
            with pytest.raises(SandboxUnsupported):
                await sandbox.expose_port(8000)
        else:
            assert (await sandbox.expose_port(8000)).startswith("http://")
        if provider != "container":
            with pytest.raises(SandboxUnsupported):
                await sandbox.snapshot()
            return
        await sandbox.write_file("/root/kept", "x")
        image = await sandbox.snapshot()
    try:
        async with opened(provider, image=image) as sandbox:
            assert await sandbox.read_file("/root/kept") == b"x"
    finally:
        subprocess.run([ENGINE, "rmi", image], check=True, capture_output=True)


DRIVER = """
import json, sys, anyio
from rollout.sandbox import SandboxSpec, open_provider
async def main():
    async with open_provider(sys.argv[1]) as provider:
        sandbox = await provider.open(SandboxSpec(**json.loads(sys.argv[2])))
        sleep = f"trap '' TERM HUP; sleep {sys.argv[4][1:]}"
        await sandbox.host_url("http://127.0.0.1:1/")
        await sandbox.exec(f"setsid sh -c \\"{sleep}\\" >/dev/null 2>&1 &")
        await sandbox.exec(f"echo on; {sleep}")
anyio.run(main, backend=sys.argv[3])
"""


async def test_driver_that_is_killed_leaves_nothing(provider: str, anyio_backend: str) -> None:
    token = new_token()
    skip_where_missing(provider)
    words = ENGINE if provider == "container" else provider, json.dumps(image_for(provider))
    command = [sys.executable, "-c", DRIVER, *words, anyio_backend, f"-{token}"]
    with subprocess.Popen(command, start_new_session=True) as driver:
        try:
            await wait_for_processes(token, 2)
            below = psutil.Process(driver.pid).children(recursive=True)
        finally:
            os.kill(driver.pid, signal.SIGKILL)
    if provider == "container":  # the next driver removes them
        async with provided(provider):
            pass
    await wait_for_processes(token, 0)
    with anyio.fail_after(30):
        while directories(driver.pid) or any(is_alive(process) for process in below):
            await anyio.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


async def test_what_a_provider_cannot_do_is_refused_by_name(provider: str) -> None:
    wrong = {
        "none": {"image": "debian", "cpus": 1, "options": {"x": 1}},
        "bubblewrap": {
            "image": "debian",
            "network": "public",
            "cpus": 1,
            "user": "root",
            "options": {"x": 1},
        },
        "container": {"network": ["example.com"], "disk_mb": 10, "options": {"x": 1}},
    }
    async with provided(provider) as made:
        for key, value in wrong[provider].items():
            with pytest.raises(SandboxUnsupported, match=key):
                await made.open(spec_for(provider, **{key: value}))


async def test_container_that_is_gone_is_lost_and_a_missing_image_named() -> None:
    async with opened("container") as sandbox:
        subprocess.run([ENGINE, "rm", "-f", sandbox.id], check=True, capture_output=True)
        with pytest.raises(SandboxLost, match="ended"):
            await sandbox.exec(["true"])
    async with provided("container") as made:
        with pytest.raises(SandboxError, match="no-such-image"):
            await made.open(SandboxSpec(image="localhost/no-such-image:1"))


async def test_container_without_an_image_or_user_is_refused_and_has_its_time_to_start() -> None:
    async with provided("container") as made:
        with pytest.raises(SandboxUnsupported, match="expected the name of an image"):
            await made.open(SandboxSpec())
        with pytest.raises(SandboxError, match="unable to find user nobody-here"):
            await made.open(spec_for("container", user="nobody-here"))
    async with opened("container", setup_s=0.01, user="7") as sandbox:
        assert (await sandbox.exec("id -u")).stdout == b"7\n"
        assert (await sandbox.exec("id -u; touch f; chown 9 f", user="0")).stdout == b"0\n"
        with pytest.raises(SandboxUnsupported, match="has no user 'nobody-here'"):
            await sandbox.exec("true", user="nobody-here")
        with pytest.raises(SandboxUnsupported, match=r"name port 8000 in options\['ports'\]"):
            await sandbox.expose_port(8000)


async def test_local_sandbox_whose_first_process_is_killed_is_lost() -> None:
    async with opened("bubblewrap") as sandbox:
        (outer,) = [p for p in psutil.Process().children() if "bwrap" in " ".join(p.cmdline())]
        (inner,) = outer.children()
        inner.kill()
        with pytest.raises(SandboxLost, match="ended"):
            await sandbox.exec(["sleep", "600"])
        with pytest.raises(SandboxLost, match="ended"):
            await sandbox.read_file("f")


class Mine:
    """A provider of somebody else's."""

    name, max_open = "mine", 1
    is_closed = False

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


async def test_provider_is_found_by_its_name_or_a_factory() -> None:
    async with open_provider("test_sandbox_protocol:Mine") as mine:
        assert isinstance(mine, Mine)
    assert mine.is_closed
    for name, text in {
        "dockr": "'dockr': expected one of 'auto', 'none', 'bubblewrap'",
        "no.such:thing": "No module named 'no'",
    }.items():
        with pytest.raises(ConfigError, match=text):
            async with open_provider(name):
                pytest.fail("it opened")
    with pytest.raises(ConfigError, match="colour"):
        async with open_provider("bubblewrap", colour="red"):
            pytest.fail("it opened")


async def test_auto_refuses_with_three_ways_out_where_no_wall_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.sandbox.bubblewrap.find_bwrap", lambda: "/bin/false")
    monkeypatch.setitem(sys.modules, "rollout.sandbox.sandlock", None)
    with pytest.raises(SandboxUnavailable) as error:
        async with open_provider("auto"):
            pytest.fail("it opened")
    text = str(error.value)
    assert text.startswith("no sandbox for what models write (bubblewrap: ")
    for way in ("user namespaces", '"docker"', 'name "none"'):
        assert way in text
