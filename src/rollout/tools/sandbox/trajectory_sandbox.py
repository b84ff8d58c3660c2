"""The sandbox of one trajectory: started at the first call, shared by its tools, closed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.tools.results import NO_OUTPUT, ToolResult, error_result
from rollout.tools.sandbox.process import SandboxProcess
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from rollout.tools.sandbox.process import Language, SandboxAnswer, SandboxSpec

#: Where a trajectory's sandboxes are in `ToolContext.state`.
STATE_KEY = "rollout.sandboxes"


#: Names of files that are pictures.
PICTURES = ("*.png", "*.jpg", "*.jpeg", "*.webp")


class TrajectorySandbox:
    """A sandbox that starts when it is needed and again after a call that it did not survive.

    Its users call `release` once each; the last one's closes it.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._process: SandboxProcess | None = None
        self._lock = anyio.Lock()
        self._users = 0

    def acquire(self) -> TrajectorySandbox:
        """Count another user."""
        self._users += 1
        return self

    async def release(self) -> None:
        """Let go of it; when the last user does, its processes end and its files are removed."""
        self._users -= 1
        if self._users == 0:
            await self._discard()

    async def run(
        self, language: Language, code: str, *, is_fresh: bool, max_pictures: int = 0
    ) -> ToolResult:
        """What the model reads of one call; calls wait for one another.

        Of the pictures that the call has written the model is shown the first `max_pictures`.

        A call that is cancelled, or that passes a bound, takes the sandbox with it, and all that
        earlier calls had left in it.

        Raises:
            ToolError: The sandbox cannot be started.
        """
        async with self._lock:
            if self._process is None:
                self._process = await SandboxProcess.start(self._spec)
            answer: SandboxAnswer | None = None
            try:
                answer = await self._process.call(
                    language,
                    encodable(code),
                    is_fresh=is_fresh,
                    collect=PICTURES if max_pictures else (),
                )
            finally:
                if answer is None or answer.status == "stopped":
                    await self._discard()
        result = self._result(answer, is_fresh=is_fresh)
        pictures = list(answer.files.values())[:max_pictures]
        if not pictures or result.is_error:
            return result
        text = "" if result.text == NO_OUTPUT else result.text
        return msgspec.structs.replace(result, text=text, images=pictures)

    def _result(self, answer: SandboxAnswer, *, is_fresh: bool) -> ToolResult:
        if answer.status == "ok":
            return ToolResult(answer.output or NO_OUTPUT)
        reason = answer.reason
        if answer.status == "stopped":
            reason = self._spec.limits.describe(reason)
            if not is_fresh:
                reason += "; what earlier calls had left is gone"
        parts = [answer.output.rstrip("\n"), f"[{reason}]" if reason else ""]
        return error_result("\n".join(part for part in parts if part) or NO_OUTPUT)

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()


def sandbox_of(state: dict[str, Any], spec: SandboxSpec, purpose: str) -> TrajectorySandbox:
    """The trajectory's sandbox of this kind for one more user, which calls `release`.

    Args:
        state: `ToolContext.state`.
        spec: How it is made.
        purpose: Tools share a sandbox where they have this in common, and the `spec`.
    """
    sandboxes: dict[Any, TrajectorySandbox] = state.setdefault(STATE_KEY, {})
    key = (spec, purpose)
    if key not in sandboxes:
        sandboxes[key] = TrajectorySandbox(spec)
    return sandboxes[key].acquire()
