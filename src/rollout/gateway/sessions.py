"""The trajectories that a gateway serves: their paths, their keys, and who may use them."""

from __future__ import annotations

import hmac
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollout.gateway.calls import GatewayError, refuse_ended
from rollout.gateway.session import GatewaySession
from rollout.scopes import find_propagating, open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.agents import AgentContext
    from rollout.config import GatewayConfig

#: Begins a key; hexadecimal digits and the path that it opens follow.
_SK, _DIGITS = "sk-", 64


class Sessions:
    """All trajectories of a gateway. `authenticate` may be called from any thread.

    A key is a signature of its path, so that nothing of an ended trajectory is kept to know it.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._running: dict[str, GatewaySession] = {}

    @property
    def running(self) -> int:
        """Trajectories that are served at the moment."""
        return len(self._running)

    @asynccontextmanager
    async def open(
        self, context: AgentContext, config: GatewayConfig | None = None
    ) -> AsyncIterator[GatewaySession]:
        """Serve a trajectory while the block runs, in the task that enters it.

        Calls run in a task group of the block's. At its end they are cancelled, and later ones get
        a final error.

        Args:
            config: In place of that of all.

        Raises:
            Exception: An engine failed, or something in here: in place of what the block makes of
                that.
            LimitExceeded: The block raised what a refusal for a length made of its client.
        """
        path = secrets.token_urlsafe(12)
        try:
            async with open_task_group() as tasks:
                session = GatewaySession(
                    path, self._sign(path), config or self._config, context, tasks
                )
                self._running[path] = session
                yield session
        except BaseException as error:
            if find_propagating(error) is not None:
                raise
            if session.failure is None:
                session.lengths.raise_refusal(error)
                raise
        finally:
            session.exclude_unread_rows()
            del self._running[path]
        if session.failure is not None:
            raise session.failure

    def authenticate(self, path: str, key: str) -> GatewaySession:
        """The session at a path, for who has its key.

        Raises:
            GatewayError: There is none (404), it has ended (403), the key is wrong (401) or that of
                another one (403).
        """
        session = self._running.get(path)
        own = key[len(_SK) + _DIGITS :]
        is_ours = hmac.compare_digest(_encode(key), _encode(self._sign(own)))
        if session is None and not (is_ours and own == path):
            raise GatewayError(404, "not_found", "there is no such trajectory")
        if not is_ours:
            raise GatewayError(401, "authentication", "the key is wrong")
        if own != path:
            raise GatewayError(403, "permission", "the key is that of another trajectory")
        if session is None:
            raise refuse_ended()
        return session

    def _sign(self, path: str) -> str:
        return f"{_SK}{hmac.digest(self._secret, _encode(path), 'sha256').hex()}{path}"


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
