"""Fixtures that most tests share."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from rollout.runtime.collector import collecting_seldom

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from rollout.worker_threads import WorkerThreads

# Engine children import `fake_core` from here, and find nothing to download anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests look for what is left in the directory of temporary files: each process has its own.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="rollout-tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# A busy machine makes no example wrong. `make test` draws the same examples each time, and few;
# `make test-full` asks for the profile "full".
settings.register_profile("rollout", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("full", deadline=None, max_examples=100)
settings.load_profile("rollout")

# Shells start background jobs with Ctrl-C ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Virtual time, repeatable schedules and a check for leaks, as users of the library have them.
pytest_plugins = ["rollout.testing.plugin"]


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    """Where sync tools run."""
    from rollout.worker_threads import WorkerThreads

    pool = WorkerThreads(max_threads=4, max_abandoned=2)
    yield pool
    pool.close()


#: Files whose tests start a Ray cluster, measure time, or load large vocabularies or packages:
#: beside themselves, or each other, they would be slow or wrong.
ALONE = {
    **dict.fromkeys(
        (
            "test_chat_formats.py",
            "test_check_template.py",
            "test_long_texts.py",
            "test_shipped_templates.py",
            "test_template_looks.py",
            "test_template_properties.py",
            "test_text_encoding.py",
            "test_tokenization_check.py",
        ),
        "vocabularies",
    ),
    "test_gateway_clients.py": "clients",
    "test_gateway_streaming.py": "clients",
    "test_sync_clients.py": "clients",
    "test_ray_placement.py": "ray",
    "test_engine_pairs.py": "ray",
    "test_loop_lag.py": "timing",
    "media": "media",  # all files of a directory
}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Tests that share a fixture of their file, or what `ALONE` says, run in one process."""
    is_parallel = config.pluginmanager.hasplugin("xdist")  # the engines' environment has none
    for item in items:
        defs = getattr(item, "_fixtureinfo", None)
        scopes = {each[-1].scope for each in defs.name2fixturedefs.values()} if defs else set()
        group = ALONE.get(item.path.name, ALONE.get(item.path.parent.name))
        if group is None and scopes & {"module", "class"}:
            group = item.path.name
        if group is not None and is_parallel:
            item.add_marker(pytest.mark.xdist_group(name=group))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: garbage is looked for afterwards, and seldom."""
    gc.disable()
    result = yield
    gc.set_threshold(10_000, 10, 100)
    gc.enable()
    _collect_seldom()
    return result


_collector = ExitStack()


def _collect_seldom() -> None:
    """As if a runtime were open from now on: no collection looks at what has been imported.

    A full look is at eight thousand modules, and takes a second.
    """
    freeze = _collector.enter_context(collecting_seldom(is_wanted=True))
    freeze()


@pytest.fixture
def collector_of_users() -> Iterator[None]:
    """Python's collector as it begins, which is an open runtime's to change."""
    before = gc.get_threshold()
    _collector.close()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    _collect_seldom()


@pytest.fixture
def own_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """What others on this machine leave in theirs is not seen."""
    tmp_path_factory.getbasetemp()  # not in there
    with tempfile.TemporaryDirectory(prefix="own-") as place:
        monkeypatch.setenv("TMPDIR", place)
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield


_started: list[str] = []


def _note_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"):
        _started.append(f"{event}{arguments[:1]}")


sys.addaudithook(_note_processes)


@pytest.fixture(autouse=True)
def only_marked_tests_start_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """The marker `process` is complete: a test without it that starts a process fails.

    Directories with environments of their own are run by themselves and need no marker.
    """
    _started.clear()
    yield
    directory = request.path.parent.relative_to(request.config.rootpath).as_posix()
    if directory in request.config.getini("norecursedirs"):
        return
    if request.node.get_closest_marker("process") is None:
        assert not _started, f"{request.path.name} starts processes: mark it `process`"
