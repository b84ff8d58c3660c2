"""`rollout serve-gateway`: until a signal ends it."""

from __future__ import annotations

import os
import secrets
import signal
from typing import TYPE_CHECKING

import anyio

from rollout.cli.explain_signal import explaining_at_signal
from rollout.cli.wrapping import print_line
from rollout.gateway.serving import open_trajectory_server
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from rich.console import Console

    from rollout.config import RolloutConfig

#: Environment variable that holds the token of trainers.
TOKEN = "ROLLOUT_GATEWAY_TOKEN"


async def serve_gateway(config: RolloutConfig, output: Console, resume: bool) -> None:
    """Serve until SIGINT or SIGTERM; says on standard output where, and with which token.

    Raises:
        RolloutError: As `open_rollout` and `open_gateway`.
    """
    given = os.environ.get(TOKEN, "")
    token = given or secrets.token_urlsafe(32)
    serving = anyio.CancelScope()

    async def watch_signals() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                serving.cancel()

    async with open_task_group() as tasks:
        tasks.start_soon(watch_signals)
        with serving:
            async with open_trajectory_server(config, token, resume=resume) as (runtime, gateway):
                with explaining_at_signal(runtime.explain):
                    print_line(output, f"{'url':<8}{gateway.url}")
                    said = f"that of {TOKEN}" if given else token
                    print_line(output, f"{'token':<8}{said}")
                    await anyio.sleep_forever()
