"""The process of one engine, as its host sees it: started, watched and ended by calls that block.

The host is the driver, or a Ray actor that is plain Python beside: it starts the process with the
interpreter that the configuration names, so that the engine's environment needs no Ray. No token
passes through it. The process runs in a session of its own (a Ctrl-C in the terminal reaches the
driver only) and ends with its host, also where a fork of that lives on.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from rollout.engine.channel.child import ChildReady, ChildSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.engine.placement.placement import CoreSpec

#: From telling an engine to leave to killing it.
STOP_S = 1.0
#: How long what was written before an answer is waited for.
READ_S = 1.0
#: Lines that are kept; of these as many are shown of a process that said nothing else.
_KEPT, _SHOWN = 200, 20
#: Exceptions that are shown beside an engine's own error, and characters of each.
_CAUSES, _WIDTH = 3, 300
#: The last line of a traceback, perhaps after the time of a log: a type, and mostly a message.
_EXCEPTION = re.compile(
    r"(?:\[[^\]]*\] *)?((?:\w+\.)*(\w*(?:Error|Exception|Exit|Expired|Interrupt)(?:: .*)?))"
)
#: What the engine's side imports whatever its core is.
_LACKING = re.compile(r"No module named '(rollout|anyio|msgspec)'")


def child_command(python: str | None) -> list[str]:
    """What runs an engine for this process; with its own interpreter where none is named."""
    return [python or sys.executable, "-m", "rollout.engine.channel.child", str(os.getpid())]


def encode_spec(
    spec: CoreSpec,
    secret: bytes,
    *,
    with_sys_path: bool,
    host: str = "127.0.0.1",
    is_follower: bool = False,
) -> bytes:
    """What a child reads: a `ChildSpec` as JSON, with our module search path or without."""
    return msgspec.json.encode(
        ChildSpec(
            core=spec.core,
            options=spec.options,
            secret=secret.hex(),
            host=host,
            sys_path=[path or os.getcwd() for path in sys.path] if with_sys_path else [],
            tls=spec.tls,
            is_follower=is_follower,
            log_level=logging.getLogger("rollout.engine").getEffectiveLevel(),
        )
    )


class EngineProcess:
    """Keeps one engine process; its methods are called from threads of their own.

    Args:
        log: Gets each line that the process writes to standard error; None: our own does.
    """

    def __init__(self, log: Callable[[str], object] | None = None) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_serving = self._is_stopped = False
        self._last_output = LastOutput()

    def start(
        self, spec: bytes, python: str | None, environment: Mapping[str, str] | None = None
    ) -> ChildReady:
        """Start the engine of a `ChildSpec`, as JSON; returns its answer."""
        command = child_command(python)
        try:
            with self._lock:
                if self._is_stopped:
                    return ChildReady(error="it was given up")
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
        except OSError as error:
            return ChildReady(error=f"cannot run {command[0]!r}: {error}")
        reader = threading.Thread(target=self._read_errors, args=(process,), daemon=True)
        reader.start()
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout:
            with suppress(OSError):
                process.stdin.write(spec + b"\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        ready = ChildReady()
        if not answer.endswith(b"\n"):
            code = process.wait()
            reader.join(READ_S)
            ready.error = self._last_output.describe_exit(code)
        else:
            ready = msgspec.json.decode(answer, type=ChildReady)
            if ready.error:
                reader.join(READ_S)
                ready.error = self._last_output.describe_error(ready.error)
        self._is_serving = not ready.error
        return ready

    def _read_errors(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what the process writes to standard error, and keep its end for error texts."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                text = line.decode(errors="replace").rstrip("\n")
                self._last_output.add(text)
                if self._log is None:
                    print(text, file=sys.stderr, flush=True)
                else:
                    self._log(text)

    def free_port(self) -> int:
        """One of this machine's, for the engine to listen on."""
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
            return port

    def wait(self) -> int:
        """The exit code of the engine's process, once it has ended."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """End the engine, and what it has started and left behind; returns when it is gone.

        One that serves is told to leave, and killed after `STOP_S`.
        """
        with self._lock:
            self._is_stopped = True
            process = self._process
        if process is None:
            return
        assert process.stdin is not None
        if self._is_serving:
            with suppress(OSError):
                process.stdin.write(b"\n")  # a fork of ours may hold the pipe open
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with suppress(ProcessLookupError):  # its session is a group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with suppress(OSError):
            process.stdin.close()


class LastOutput:
    """The last lines of standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.add = self._lines.append

    def describe_exit(self, code: int) -> str:
        """Why a process ended that was to start an engine."""
        shown = [*self._lines][-_SHOWN:]
        last = f"; it said last:{_list_lines(shown)}" if shown else ""
        lacking = _LACKING.search("\n".join(shown))
        if lacking is not None:
            last += (
                f"\n  placement.python needs the package {lacking[1]} in its environment: "
                "`pip install anyio msgspec`, and this library by `pip install --no-deps`"
            )
        return f"the engine's process ended with exit code {code} while starting{last}"

    def describe_error(self, error: str) -> str:
        """An engine's own error, and exceptions before it: one of its processes may know more."""
        found: dict[str, None] = {}
        known = error.split("\n")[0]
        for line in [*self._lines]:  # another thread may add more meanwhile
            match = _EXCEPTION.fullmatch(line)
            if match is not None and match[2] not in error and not match[1].endswith(known):
                found[match[1][:_WIDTH]] = None
        causes = [*found][-_CAUSES:]
        return f"{error}; before that was said:{_list_lines(causes)}" if causes else error


def _list_lines(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)
