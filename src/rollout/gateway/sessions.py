"""The trajectories that a gateway serves: their paths, their keys, and who may use them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollout.gateway.calls import GatewayError
from rollout.gateway.session import GatewaySession
from rollout.gateway.settings import GatewaySettings
from rollout.scopes import find_propagating, open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.agents import AgentContext

__all__ = ["GatewaySession", "GatewaySettings", "Sessions"]

#: Finished trajectories that are still told from those that never were.
REMEMBERED = 65_536


class Sessions:
    """All trajectories of a gateway. `authenticate` may be called from any thread."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._running: dict[str, GatewaySession] = {}
        self._ended: OrderedDict[str, GatewaySession] = OrderedDict()
        #: Digests of the keys of both.
        self._keys: dict[bytes, str] = {}

    @property
    def running(self) -> int:
        """Trajectories that are served at the moment."""
        return len(self._running)

    @asynccontextmanager
    async def open(
        self, context: AgentContext, settings: GatewaySettings | None = None
    ) -> AsyncIterator[GatewaySession]:
        """Serve a trajectory while the block runs, in the task that enters it.

        Calls run in a task group of the block's. At its end they are cancelled, and later ones get
        a final error.

        Args:
            settings: In place of those of all.

        Raises:
            Exception: An engine failed, or something in here: in place of what the block makes of
                that.
            LimitExceeded: The block raised what a refusal for a length made of its client.
        """
        path, key = secrets.token_urlsafe(12), f"sk-{secrets.token_urlsafe(32)}"
        session = GatewaySession(path, key, settings or self._settings)
        self._keys[_digest(key)] = path
        self._running[path] = session
        try:
            async with open_task_group() as tasks:
                session.begin(context, tasks)
                try:
                    yield session
                finally:
                    session.close()
        except BaseException as error:
            if find_propagating(error) is not None:
                raise
            if session.failure is None:
                length = session.lengths.behind(error)
                if length is not None and length is not error:
                    raise length from error
                if isinstance(error, BaseExceptionGroup):  # beside refusals its own counts
                    own = error.split(lambda each: session.lengths.behind(each) is not None)[1]
                    raise (own or error) from error.__cause__
                raise
        finally:
            failure = session.end()
            self._end(session)
        if failure is not None:
            raise failure

    def authenticate(self, path: str, key: str) -> GatewaySession:
        """The session at a path, for who has its key.

        That of a finished trajectory refuses every call.

        Raises:
            GatewayError: 404, there is none; 401, the key is wrong; 403, it is another one's.
        """
        session = self._running.get(path) or self._ended.get(path)
        if session is None:
            raise GatewayError(404, "not_found", "there is no such trajectory")
        digest = _digest(key)
        if hmac.compare_digest(digest, _digest(session.key)):
            return session
        if digest in self._keys:
            raise GatewayError(403, "permission", "the key is that of another trajectory")
        raise GatewayError(401, "authentication", "the key is wrong")

    def _end(self, session: GatewaySession) -> None:
        self._ended[session.path] = session
        del self._running[session.path]
        while len(self._ended) > REMEMBERED:
            _, forgotten = self._ended.popitem(last=False)
            del self._keys[_digest(forgotten.key)]


def _digest(key: str) -> bytes:
    """Of fixed length: the time of a look-up tells nothing of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
