"""Runs the tests of sandboxes on the docker or podman that is here.

    python tests/sandbox/make_engine.py [--ordinary] [PYTEST ARGUMENT …]

Where there is neither, root on Debian installs podman, and says so first; anybody else is told the
line to run. The image is made here, of busybox and a Python: no registry is asked. Root runs
everything, then an ordinary user runs what needs no engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
OF_TASKS = HERE.parent / "environments" / "test_harbor_runs.py"
PACKAGES = "podman runc crun uidmap netavark iptables catatonit busybox-static"
INSTALL = f"apt-get install --yes --no-install-recommends {PACKAGES}"
IMAGE = "localhost/rollout-test:1"
#: Root without CAP_SYS_RESOURCE cannot raise limits, and crun knows no mixed control groups.
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
events_logger = "none"
"""
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def works(command: list[str]) -> bool:
    """Whether it ends well."""
    try:
        return (
            subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_engine() -> str | None:
    """The first engine that lists its containers."""
    return next((each for each in ("docker", "podman") if works([each, "ps"])), None)


def install() -> None:
    """Install podman, or say how."""
    is_debian = Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None
    if os.geteuid() != 0 or not is_debian:
        print(f"no docker or podman that works, or no busybox; run: sudo {INSTALL}")
        raise SystemExit(1)
    print(f"installing podman: {INSTALL}", flush=True)
    subprocess.run(["apt-get", "update", "-qq"], check=False)
    subprocess.run(INSTALL.split(), check=True)


def libraries_of(program: Path) -> set[str]:
    """Shared libraries that a program or library loads."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", said))


def make_image(engine: str) -> None:
    """Import a tar of busybox and a Python's own files."""
    busybox, python = shutil.which("busybox"), Path(os.path.realpath(sys.executable))
    assert busybox is not None
    library = Path(sysconfig.get_path("stdlib"))
    modules = [*(library / "lib-dynload").glob("*.so")]
    libraries = set().union(*(libraries_of(each) for each in (Path(busybox), python, *modules)))
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(file.name, "w") as archive:
            for name in ("tmp", "root", "proc", "work", "usr/bin", "etc"):
                _add(archive, name, tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755)
            _add(archive, "bin", tarfile.SYMTYPE, 0o777, "usr/bin")
            archive.add(busybox, "usr/bin/busybox")
            for name in {*listed.stdout.split(), "python3"} - {"busybox"}:
                target = str(python) if name == "python3" else "busybox"
                _add(archive, f"usr/bin/{name}", tarfile.SYMTYPE, 0o777, target)
            archive.add(python, str(python))
            for each in sorted(libraries):
                archive.add(os.path.realpath(each), each)
            archive.add(library, str(library), filter=_without_tests)
        command = [engine, "import", "--change", "ENV PATH=/usr/bin", file.name, IMAGE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _add(archive: tarfile.TarFile, name: str, kind: bytes, mode: int, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname = kind, mode, link
    archive.addfile(member)


def _without_tests(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    left_out = "test tests idlelib ensurepip site-packages __pycache__ config- tkinter lib2to3"
    name = Path(member.name).name
    return None if any(name.startswith(each) for each in left_out.split()) else member


def main() -> int:
    """Run the tests; the exit code."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
        conf.write(CONTAINERS_CONF)
        conf.flush()
        if os.geteuid() == 0:
            os.environ.setdefault("CONTAINERS_CONF", conf.name)
        engine = find_engine()
        if engine is None or shutil.which("busybox") is None:
            install()
            engine = find_engine()
        if engine is None:
            print("podman is installed and does not run: podman ps")
            return 1
        make_image(engine)
        print(f"containers of {engine}", flush=True)
        environment = {**os.environ, "ROLLOUT_TEST_ENGINE": engine, "ROLLOUT_TEST_IMAGE": IMAGE}
        tests = [sys.executable, "-m", "pytest", str(HERE), str(OF_TASKS), *sys.argv[1:]]
        code = subprocess.run(tests, env=environment, check=False).returncode
    if code == 0 and os.geteuid() == 0:
        code = run_as_nobody()
    return code


def run_as_nobody() -> int:
    """What needs no engine once more, as a user that has nothing to give up."""
    python = find_python_of_nobody()
    if python is None:
        print("left out as an ordinary user: this Python is not for others (as below /root)")
        return 0
    print(f"as an ordinary user, on {python}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nobody-") as home:
        os.chown(home, 65534, 65534)
        packages = [place for place in sys.path if "-packages" in place or place.endswith("src")]
        environment = {
            **os.environ,
            "HOME": home,
            "PATH": os.pathsep.join((str(Path(python).parent), "/usr/bin:/bin")),  # not root's
            "TMPDIR": home,
            "PYTHONPATH": os.pathsep.join(packages),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        tests = [*NOBODY, python, "-m", "pytest", str(HERE), "-p", "no:cacheprovider"]
        return subprocess.run([*tests, *sys.argv[1:]], env=environment, check=False).returncode


def find_python_of_nobody() -> str | None:
    """An interpreter of this version that nobody can start from a process of nobody's."""
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        if works([*NOBODY, python, "-c", again]):
            return python
    return None


if __name__ == "__main__":
    sys.exit(main())
