"""Watches a core for the process that hosts it: notices when the engine is lost.

Loaded in engine processes: imports anyio only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import EngineCore

logger = logging.getLogger("rollout.engine")

#: The answers that a lost core has given to its requests get this long to leave.
LAST_ANSWERS_S = 0.2


async def watch_core(core: EngineCore, on_lost: Callable[[], object]) -> None:
    """Wait until `core` says that its engine is lost, then call `on_lost`.

    Returns at once for a core that cannot say so.
    """
    watch = getattr(core, "watch", None)
    if watch is None:
        return
    logger.error("the engine is lost: %s", await watch())
    await anyio.sleep(LAST_ANSWERS_S)
    on_lost()
