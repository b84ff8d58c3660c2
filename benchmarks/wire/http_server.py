"""An HTTP server that answers at once, as an inference server would: aiohttp, orjson, uvloop.

python -m wire.http_server
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (aiohttp is made of it)
import logging

import orjson
import uvloop
from aiohttp import web

from wire.payload import ANSWER_IDS, ANSWER_LOG_PROBS, send_port

IDS, LOG_PROBS = ANSWER_IDS.tolist(), ANSWER_LOG_PROBS.tolist()
FACTS = {"model_path": "instant", "served_model_name": "instant", "is_generation": True}


async def generate(request: web.Request) -> web.Response:
    """The same 200 tokens for everybody."""
    body = orjson.loads(await request.read())
    assert body["input_ids"]
    answer = {
        "output_ids": IDS,
        "output_log_probs": LOG_PROBS,
        "meta_info": {"id": body["rid"], "finish_reason": {"type": "length"}},
    }
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def facts(request: web.Request) -> web.Response:
    """What a router asks before it sends anything."""
    return web.Response(body=orjson.dumps(FACTS), content_type="application/json")


async def main() -> None:
    """Serve until killed."""
    logging.disable()  # the router tries HTTP/2 first
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/generate", generate)
    for path in ("health", "health_generate", "get_model_info", "model_info", "server_info"):
        application.router.add_get(f"/{path}", facts)
    application.router.add_get("/get_server_info", facts)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=600)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    send_port(runner.addresses[0][1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
