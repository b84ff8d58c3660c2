"""Chromium without a window, driven by its DevTools protocol over two pipes: no further package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rollout.clocks import monotonic

#: Names of the program, the first that there is; ROLLOUT_CHROMIUM names another one.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: Where `make test-pages` unpacks the one of npm, where there is none.
UNPACKED = Path(__file__).parents[2] / ".venv" / "chromium" / "chromium"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    # speedscope draws with WebGL, which needs no GPU so.
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
#: The browser reads commands from number 3, and writes answers to number 4.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
#: A page that has not answered by then never will.
ANSWER_S = 60.0


def find_chromium() -> str | None:
    """The program; None where there is none."""
    named = os.environ.get("ROLLOUT_CHROMIUM")
    if named:
        return named
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (str(UNPACKED) if UNPACKED.exists() else None)


class PageError(Exception):
    """The page raised, or the browser refused."""


class Browser:
    """One page of a browser that belongs to this process; a context manager.

    `renew` gives another page, which knows nothing of the one before.

    Attributes:
        requests: Addresses of all requests that the page made.
        complaints: What the page wrote to its console as a warning or error, or did not catch.
    """

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        program = find_chromium()
        assert program is not None, "there is no Chromium"
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._rest = b""
        to_browser, self._write = _high_pipe()
        self._read, from_browser = _high_pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_with_libraries_of(Path(program)),
        )
        os.close(to_browser)
        os.close(from_browser)
        self._size = width, height
        self._context = ""
        self.renew()

    _session: str | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def renew(self) -> None:
        """Leave the page for an empty one, with nothing stored and nothing noted."""
        self._session = None
        if self._context:
            self._ask("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self._ask("Target.createBrowserContext")["browserContextId"]
        created = {"url": "about:blank", "browserContextId": self._context}
        target = self._ask("Target.createTarget", **created)["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")
        self.resize(*self._size)
        self.requests.clear()
        self.complaints.clear()

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Look at the page in a window of this size."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, theme: str) -> None:
        """The system's theme is "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self._ask("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path) -> float:
        """Load a file and wait until its script has drawn it; seconds that this took."""
        began = monotonic()
        self._ask("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")
        self._await("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
        return monotonic() - began

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        return self._await(script)

    def wait_for(self, condition: str) -> None:
        """Return once the expression is true."""
        deadline = monotonic() + ANSWER_S
        while not self._holds(condition):
            if monotonic() > deadline:
                raise PageError(f"never true: {condition}")
            threading.Event().wait(0.01)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self._await(f"Boolean({condition})"))
        except PageError as error:
            if "navigated" in str(error):  # it was asked of a page that is being left
                return False
            raise

    def press(self, key: str) -> None:
        """Press and release a key; one character, or a name such as "ArrowDown"."""
        codes = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9, "End": 35}
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        self._ask("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self._ask("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, or the page to its end, as PNG."""
        taken = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _await(self, expression: str) -> Any:
        answer = self._ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = monotonic() + ANSWER_S
        while number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, deadline: float) -> None:
        left = deadline - monotonic()
        if not select.select([self._read], [], [], max(0.0, left))[0]:
            raise PageError(f"no answer within {ANSWER_S:g} s")
        data = os.read(self._read, 1 << 20)
        if not data:
            raise PageError("the browser has ended")
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in messages:
            self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        told = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(told["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(told["entry"]["text"])


def _with_libraries_of(program: Path) -> dict[str, str] | None:
    """The one from npm has those beside it that a machine may lack."""
    libraries = program.parent / "lib"
    if program != UNPACKED or not libraries.is_dir():
        return None
    others = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, (str(libraries), others)))}


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the numbers that the browser wants."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
