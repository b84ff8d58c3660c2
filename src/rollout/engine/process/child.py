"""The process of one engine, which placements start.

    python -m rollout.engine.process.child [DRIVER]

Reads one line of JSON from standard input (what to run, and the secret), answers one line on
standard output (the port, or why it failed), and lives until it is told to leave: by another line,
by the end of standard input, or by the end of the driver, which its argument names as
`guardian.name_of` does (its parent, where there is none). A driver that dies, however, takes its
engines with it.

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
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.core import CORE_CLOSE_S
from rollout.engine.guardian import (
    GRACE_S,
    LOOK_S,
    guard,
    is_alive,
    name_of,
    release_guardian,
    remove_shared_files_at_end,
)
from rollout.engine.process.core_loading import load_core, start_error_text
from rollout.engine.process.core_watch import watch_core
from rollout.engine.process.listening import BACKLOG, accept_forever
from rollout.engine.process.server import EngineServer
from rollout.engine.wire.tls import TlsFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.engine.core import EngineCore


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


def _take_standard_output() -> int:
    """A private descriptor for the answer; whatever a core prints goes to standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    return answer


class _Leave(threading.Event):
    """Set when it is time to leave.

    Attributes:
        is_serving: There is something to close; before, nothing is worth waiting for.
    """

    is_serving = False


def _end_with_driver(leave: _Leave, driver: str) -> None:
    """Wait until it is time to leave, then leave: politely first, by force soon after."""
    while is_alive(driver) and not _has_input():
        pass
    leave.set()
    if leave.is_serving:
        threading.Event().wait(GRACE_S - LOOK_S)  # before the guardian
    _kill_session()


def _has_input() -> bool:
    """Whether the driver has said something, or has closed; waits for it for a moment."""
    return bool(select.select([0], [], [], LOOK_S)[0])


def _kill_session() -> None:
    """End at once, with whatever the core has started: half-started children know no better."""
    remove_shared_files_at_end()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


async def _serve(spec: ChildSpec, answer: int, leave: _Leave) -> None:
    core = load_core(spec.core)(**spec.options)
    await core.start()
    leave.is_serving = True
    gc.enable()
    gc.collect()
    gc.freeze()  # a full collection would stop the engine for a fifth of a second
    if spec.is_follower:
        _say(answer, ChildReady())
        await _live(core, leave, anyio.sleep_forever)
        return
    server = EngineServer(core, bytes.fromhex(spec.secret), tls=spec.tls)
    listener = await anyio.create_tcp_listener(local_host=spec.host, local_port=0, backlog=BACKLOG)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    _say(answer, ChildReady(port=port))
    await _live(core, leave, partial(accept_forever, listener.listeners, server))


async def _live(
    core: EngineCore, leave: _Leave, work: Callable[[], Coroutine[Any, Any, Any]]
) -> None:
    """Until the driver leaves or the engine is lost."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            tasks.start_soon(watch_core, core, leave.set)
            await anyio.to_thread.run_sync(leave.wait, abandon_on_cancel=True)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(deadline=anyio.current_time() + CORE_CLOSE_S, shield=True):
            await core.aclose()


def _say(answer: int, ready: ChildReady) -> None:
    os.write(answer, msgspec.json.encode(ready) + b"\n")
    os.close(answer)


def _read_line(driver: str) -> bytes:
    """One line of standard input, read byte by byte: nothing of what follows is taken."""
    line = bytearray()
    while not line.endswith(b"\n"):
        while not _has_input():
            if not is_alive(driver):
                raise SystemExit(0)
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)  # the driver is gone already
        line += byte
    return bytes(line)


def main() -> None:
    """Run until it is time to leave."""
    driver = sys.argv[1] if len(sys.argv) > 1 else name_of(os.getppid())
    guard(driver)
    gc.disable()  # until the core is there: what is loaded for it stays
    answer = _take_standard_output()
    spec = msgspec.json.decode(_read_line(driver), type=ChildSpec)
    sys.path[:] = spec.sys_path or sys.path
    logging.basicConfig(level=spec.log_level, format="%(levelname)s %(name)s: %(message)s")
    leave = _Leave()
    threading.Thread(target=_end_with_driver, args=(leave, driver), daemon=True).start()
    try:
        # SGLang brings it; other cores use it where it is installed.
        options = {"use_uvloop": find_spec("uvloop") is not None}
        anyio.run(_serve, spec, answer, leave, backend_options=options)
    except BaseException as error:
        logging.getLogger("rollout.engine").exception("the engine failed")
        with suppress(OSError):  # it had answered before
            _say(answer, ChildReady(error=start_error_text(error)))
        _exit(1, driver)
    _exit(0, driver)  # threads of a core's libraries must not hold the exit


def _exit(code: int, driver: str) -> None:
    """Leave nothing behind that the driver, if it lives, does not see to."""
    if is_alive(driver):
        release_guardian()
    os._exit(code)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # SGLang's processes begin with this module; up to 0.5.20 they import torchvision before they
    # look for plugins.
    from rollout.engine.cores.sglang import plugin

    plugin.platform()
