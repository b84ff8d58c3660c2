"""The process of one engine, which placements start.

    python -m rollout.engine.channel.child PID_OF_THE_DRIVER

It reads one line of JSON from standard input (what to run, and the secret), answers one line on
standard output (the port, or why it failed), and serves until it is told to end: by another line,
by the end of standard input, or by the end of the process that started it. Then it takes what its
core has started with it.

Loaded in engine processes: imports msgspec, anyio and its core only.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.channel.core_hosting import describe_error, load_core, watch_core
from rollout.engine.channel.server import BACKLOG, EngineServer
from rollout.engine.channel.sockets import TlsFiles, make_context
from rollout.engine.core import CORE_CLOSE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

#: Between two looks at the parent process.
POLL_S = 0.25
#: From the end of the driver to the end by force of an engine that serves. The promise is 5 s,
#: also on a machine that is busy.
GRACE_S = 1.75


class ChildSpec(msgspec.Struct, kw_only=True):
    """What the driver writes to the child's standard input.

    Attributes:
        is_follower: It computes a part of what another machine's child serves, and serves nothing.
    """

    core: str
    options: dict[str, Any]
    secret: str
    sys_path: list[str] = []
    host: str = "127.0.0.1"
    tls: TlsFiles | None = None
    is_follower: bool = False
    log_level: int = logging.WARNING


class ChildReady(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the child answers: a port, or an error."""

    port: int = 0
    error: str = ""


class _Ending(threading.Event):
    """Set when the process is to end; there is something to close once it `is_serving`."""

    is_serving = False


def _end_with_driver(ending: _Ending, parent: int) -> None:
    """Wait until it is time to end; then end politely, and by force soon after.

    A fork of the driver may hold the pipe open: so the parent's end is looked for too. Its pid
    changes when it has ended.
    """
    while os.getppid() == parent and not _has_input():
        pass
    ending.set()
    if ending.is_serving:
        threading.Event().wait(GRACE_S)
    _kill_group()


def _has_input() -> bool:
    """Whether the driver has written something, or has closed; waits for it for `POLL_S`."""
    return bool(select.select([0], [], [], POLL_S)[0])


def _kill_group() -> None:
    """End at once, with whatever the core has started: half-started children know no better."""
    for pid in _find_descendants():  # what has a session of its own is in another group
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _find_descendants() -> list[int]:
    """The children of this process, and theirs; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = [*children.get(os.getpid(), ())]
    for pid in found:
        found += children.get(pid, ())
    return found


async def _serve(spec: ChildSpec, answer: int, ending: _Ending) -> None:
    """Serve until the driver ends or the engine is lost; of a follower, there is nothing to ask."""
    core = load_core(spec.core)(**spec.options)
    await core.start()
    ending.is_serving = True
    gc.freeze()  # a full collection would stop the engine for a fifth of a second
    work: Callable[[], Coroutine[Any, Any, Any]] = anyio.sleep_forever
    port = 0
    if not spec.is_follower:
        tls = make_context(spec.tls, is_server=True)
        server = EngineServer(core, bytes.fromhex(spec.secret), tls=tls)
        listener = await anyio.create_tcp_listener(local_host=spec.host, backlog=BACKLOG)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        work = partial(server.serve, listener.listeners)
    _answer(answer, ChildReady(port=port))
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            tasks.start_soon(watch_core, core, ending.set)
            await anyio.to_thread.run_sync(ending.wait, abandon_on_cancel=True)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(deadline=anyio.current_time() + CORE_CLOSE_S, shield=True):
            await core.aclose()


def _answer(descriptor: int, ready: ChildReady) -> None:
    os.write(descriptor, msgspec.json.encode(ready) + b"\n")
    os.close(descriptor)


def _find_parent(driver: int) -> int:
    """Return the pid of our parent; end where the driver has ended while we were starting.

    Another process may be between them: a script around the interpreter, or one of another pid
    namespace, whose number is 0 here.
    """
    parent = os.getppid()
    if parent not in (driver, 0):
        try:
            os.kill(driver, 0)
        except ProcessLookupError:
            raise SystemExit(0) from None
        except PermissionError:
            pass  # it lives, and is somebody else's
    return parent


def _read_line(parent: int) -> bytes:
    """Read one line of standard input, byte by byte: nothing of what follows is taken."""
    line = bytearray()
    while not line.endswith(b"\n"):
        while not _has_input():
            if os.getppid() != parent:
                raise SystemExit(0)
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)  # the driver has ended already
        line += byte
    return bytes(line)


def main() -> None:
    """Run until it is time to end."""
    parent = _find_parent(int(sys.argv[1]))
    answer = os.dup(1)
    os.dup2(2, 1)  # what a core prints goes to standard error
    spec = msgspec.json.decode(_read_line(parent), type=ChildSpec)
    sys.path[:] = spec.sys_path or sys.path
    logging.basicConfig(level=spec.log_level, format="%(levelname)s %(name)s: %(message)s")
    ending = _Ending()
    threading.Thread(target=_end_with_driver, args=(ending, parent), daemon=True).start()
    try:
        # SGLang brings it; other cores use it where it is installed.
        options = {"use_uvloop": find_spec("uvloop") is not None}
        anyio.run(_serve, spec, answer, ending, backend_options=options)
    except BaseException as error:
        logging.getLogger("rollout.engine").exception("the engine failed")
        with suppress(OSError):  # it had answered before
            _answer(answer, ChildReady(error=describe_error(error)))
        os._exit(1)  # threads of a core's libraries must not hold the exit
    _kill_group()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # SGLang's processes begin with this module; up to 0.5.20 they import torchvision before they
    # look for plugins.
    from rollout.engine.cores.sglang import plugin

    plugin.platform()
