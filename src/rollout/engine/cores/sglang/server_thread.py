"""The thread that SGLang is started from.

The kernel kills SGLang's processes when the thread that started them ends, so this one lives as
long as the engine: it starts SGLang, waits for the end, and shuts it down.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rollout.engine.cores.sglang.adapter import SGLang, kill_children

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.bridge import Post
    from rollout.engine.cores.sglang.server_arguments import SGLangOptions


class ServerThread:
    """Starts SGLang in a thread of its own.

    Args:
        on_started: Called on the event loop with what runs, or with why nothing does.
        on_stopped: Called on the event loop when nothing of it runs any more.
        post: Runs a callback on the event loop.
    """

    def __init__(
        self,
        options: SGLangOptions,
        on_started: Callable[[SGLang | Exception], object],
        on_stopped: Callable[[], object],
        post: Post,
    ) -> None:
        self._options = options
        self._on_started = on_started
        self._on_stopped = on_stopped
        self._post = post
        self._is_up = False
        self._leave = threading.Event()
        threading.Thread(target=self._run, name="rollout-sglang", daemon=True).start()

    def stop(self) -> None:
        """Shut SGLang down; one that is still starting is killed as far as it has come."""
        self._leave.set()
        if not self._is_up:
            kill_children()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._post(self._on_stopped)

    def _serve(self) -> None:
        try:
            engine = SGLang(self._options)
        except Exception as error:
            failure = error  # `error` itself is gone after this block
            if self._leave.is_set():
                kill_children()  # it may have begun another before it noticed
            self._post(lambda: self._on_started(failure))
            return
        self._is_up = True
        self._post(lambda: self._on_started(engine))
        self._leave.wait()
        engine.shutdown()
