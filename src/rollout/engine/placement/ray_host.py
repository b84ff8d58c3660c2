"""What runs on a machine of the cluster: one engine process and its host.

The host is the body of a Ray actor, and plain Python: it starts the engine's process with the
interpreter that the configuration names, so that the engine's environment needs no Ray, and tells
when the process has ended. No token passes through it. The process ends when the host does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec

from rollout.engine.channel.child import ChildReady
from rollout.engine.placement.local_process import READ_S, LastOutput, child_command

#: From telling the engine to leave to killing it.
STOP_S = 1.0


class EngineHost:
    """Keeps one engine process; its methods are called from threads of their own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._last_output = LastOutput()

    def start(self, spec: bytes, python: str | None, environment: dict[str, str]) -> bytes:
        """Start the engine of a `ChildSpec`, as JSON; returns its `ChildReady`, as JSON."""
        command = child_command(python)
        try:
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            return msgspec.json.encode(ChildReady(error=f"cannot run {command[0]!r}: {error}"))
        assert process.stdin is not None
        assert process.stdout is not None
        reader = threading.Thread(target=self._keep_last_output, args=(process,), daemon=True)
        reader.start()
        with suppress(BrokenPipeError):
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
        return msgspec.json.encode(ready)

    def free_port(self) -> int:
        """One of this machine's, for the engine to listen on."""
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
            return port

    def _keep_last_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            text = line.decode(errors="replace").rstrip("\n")
            self._last_output.add(text)
            print(text, file=sys.stderr, flush=True)  # into Ray's log of this actor

    def pid(self) -> int:
        """The engine's process."""
        assert self._process is not None
        return self._process.pid

    def wait(self) -> int:
        """The exit code of the engine's process, once it has ended."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """End the engine: politely, and by force after `STOP_S`; returns when it is gone."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with suppress(OSError):
            process.stdin.write(b"\n")  # a fork of ours may hold the pipe open
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):  # also what the engine started and left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
