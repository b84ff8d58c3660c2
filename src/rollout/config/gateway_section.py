"""The HTTP door to trajectories."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator
from typing import ClassVar, Literal
from urllib.parse import urlsplit

import attrs

from rollout.config.checks import Count, Flag, Port, Positive, Text, Texts, is_http_url
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section


@attrs.frozen(kw_only=True)
class GatewayConfig(Section):
    """The OpenAI- and Anthropic-compatible server of agents; ``docs/gateway.md`` explains it."""

    section: ClassVar[str] = "gateway"
    #: "when_needed" starts the server once an agent asks for it, with the runtime where
    #: `agent.name` does; "always" starts it with the runtime.
    start: Literal["when_needed", "always"] = "when_needed"
    #: Address to listen on; any but a loopback address lets other machines in, with the keys only.
    host: Text = "127.0.0.1"
    #: 0 takes a free one.
    port: Port = 0
    #: Where agents reach it, if not at `host` and `port`: ``"https://proxy.example/models"`` of a
    #: proxy, or this machine's name where `host` is 0.0.0.0.
    public_url: Text | None = None
    #: What clients call the model.
    model: Text = "rollout"
    #: Other names that clients may ask for, such as that of a program's small model.
    model_aliases: Texts = ()
    #: Longest body of a request; longer ones are refused before they are read.
    max_body_bytes: Count = 32 * 1024 * 1024
    #: Requests of a trajectory that generate; refused ones do not count.
    max_calls: Count | None = 1024
    #: Rows of a trajectory beside its main one: what its client's requests do not continue begins
    #: another.
    max_branches: Count | None = 256
    #: Requests of a trajectory that are answered at once.
    max_concurrent_calls: Count = 64
    #: Memory for trajectories that trainers opened over HTTP and that have ended; past that the
    #: oldest are forgotten.
    max_ended_bytes: Count = 2**30
    #: Connections of all clients; further ones are closed at once.
    max_connections: Count = 8192
    #: Of a turn that a client gives back without its reasoning: "accept" continues the row that
    #: holds it, "fork" begins another one.
    dropped_reasoning: Literal["accept", "fork"] = "accept"
    #: Of a `tool_choice` that forces a call, and of a form or schema of the answer, to which no
    #: engine can hold the model: "accept" lets it speak freely, "refuse" refuses the request.
    unenforced: Literal["accept", "refuse"] = "accept"
    #: Of a client's temperature, top_p, top_k, min_p, penalties and seed: "accept" samples with
    #: them, "pin" with the prompt's and the configuration's, "refuse" refuses a request where one
    #: differs from these. Its `max_tokens` and `stop` always count.
    sampling: Literal["accept", "pin", "refuse"] = "accept"
    #: Whether titles, summaries and the like are trained on.
    train_side_calls: Flag = False
    #: Time for the head of a request, from its first byte or from the connection.
    head_s: Positive = 10.0
    #: Time for the body of a request.
    body_s: Positive = 60.0
    #: Time for a client to take an answer.
    write_s: Positive = 60.0
    #: How long a connection may lie idle between requests.
    idle_s: Positive = 75.0
    #: Between two signs of life of an answer while the model generates.
    keep_alive_s: Positive = 10.0

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """An alias is another name, and a URL one of HTTP."""
        if "public_url" in sound and self.public_url is not None:
            url = urlsplit(self.public_url) if is_http_url(self.public_url) else None
            if url is None or url.query or url.fragment:
                yield Fault("public_url", "expected http://host or https://host", self.public_url)
        if {"model", "model_aliases"} <= set(sound) and self.model in self.model_aliases:
            yield Fault("model_aliases", "expected other names than gateway.model", self.model)
