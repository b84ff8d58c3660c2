"""Takes the connections that come to an engine's port, whatever comes.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import Listener, SocketStream

    from rollout.engine.process.server import EngineServer

logger = logging.getLogger("rollout.engine")

#: Connections that the system keeps until they are accepted.
BACKLOG = 128
#: Before the next attempt where a connection could not be accepted.
PAUSE_S = 0.1
#: Between two lines that say so.
SAY_AGAIN_S = 60.0
#: The listener itself is of no use any more.
FATAL = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
#: The process, or the machine, has no room for one more.
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_forever(listeners: Sequence[Listener[SocketStream]], server: EngineServer) -> None:
    """Have `server` serve every connection.

    One that cannot be accepted, for want of descriptors for example, is tried again; it ends
    nothing that is served already.
    """
    async with anyio.create_task_group() as tasks:
        for listener in listeners:
            tasks.start_soon(_accept, listener, server, tasks)


async def _accept(
    listener: Listener[SocketStream], server: EngineServer, tasks: anyio.abc.TaskGroup
) -> None:
    say_at = 0.0
    while True:
        await server.unauthenticated.make_room()
        try:
            stream = await listener.accept()  # type: ignore[attr-defined]  # sockets' have it
        except OSError as error:
            if error.errno in FATAL:
                raise
            if error.errno in FULL:
                server.unauthenticated.close_oldest()
            if anyio.current_time() >= say_at:
                say_at = anyio.current_time() + SAY_AGAIN_S
                logger.warning("a connection cannot be accepted now: %s", error)
            await anyio.sleep(PAUSE_S)
        else:
            tasks.start_soon(server.serve_connection, stream)
