"""What generates: one class for each kind of engine."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator
from typing import ClassVar, Literal, get_args

import attrs

from rollout.config.base import Section, fields_named
from rollout.config.checks import ClassPath, Count, PlainMapping, Positive, Share, Text, Urls
from rollout.config.faults import Fault


@attrs.frozen(kw_only=True)
class EngineConfig(Section):
    """What every engine has; use one of its subclasses."""

    section: ClassVar[str] = "engine"
    kind: ClassVar[str]
    #: Engines behind the router.
    replicas: Count = 1
    #: From the start of a replica to its answer to the hello.
    start_timeout_s: Positive = 300.0
    #: Tokens gathered before a partial answer is sent.
    stream_interval: Count = 16

    @classmethod
    def homes_of(cls, key: str) -> list[str]:
        """The kinds of engine that have this key."""
        kinds = {f"kind {engine.kind!r}": engine for engine in ENGINES}
        return fields_named(key, kinds)


@attrs.frozen(kw_only=True)
class TransformersEngine(EngineConfig):
    """The embedded engine: in-flight batching over a transformers model, CPU or GPU."""

    kind: ClassVar[str] = "transformers"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    #: As torch names it: ``cpu``, ``cuda``, ``cuda:1``.
    device: Text = "cpu"
    #: Compute threads of a replica. More than one collapses beside other work on a small machine.
    threads: Count = 1
    #: Requests decoded together.
    max_running: Count = 32
    #: Requests waiting for a place; past that the engine answers "rejected".
    max_queued: Count = 1024
    #: Prompt plus response; None takes the model's own.
    context_length: Count | None = None


@attrs.frozen(kw_only=True)
class SimulatedEngine(EngineConfig):
    """An engine without a model, for tests and dry runs; see `rollout.testing`."""

    kind: ClassVar[str] = "simulated"
    #: What it answers and how long that takes, as `rollout.testing.Scenario` writes it.
    scenario: PlainMapping = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SGLangEngine(EngineConfig):
    """SGLang in token-in, token-out mode."""

    kind: ClassVar[str] = "sglang"
    #: GPUs that one replica spreads its weights over.
    tensor_parallel: Count = 1
    #: Share of the GPU's memory for weights and KV cache.
    memory_fraction: Share = 0.85
    #: Requests decoded together.
    max_running: Count = 256
    #: Prompt plus response; None takes the model's own.
    context_length: Count | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    #: Further arguments of `sglang.Engine`, by its own names.
    server_args: PlainMapping = attrs.field(factory=dict)


def _one_for_each_url(engine: "HttpEngine") -> int:
    # `urls` may be anything while faults are deferred; its own fault is reported.
    return len(engine.urls) if isinstance(engine.urls, tuple) else 1


@attrs.frozen(kw_only=True)
class HttpEngine(EngineConfig):
    """Servers that somebody else runs."""

    kind: ClassVar[str] = "http"
    #: One base URL for each replica.
    urls: Urls
    #: Follows from `urls`; may be written, and must then agree with them.
    replicas: Count = attrs.field(default=attrs.Factory(_one_for_each_url, takes_self=True))

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """One replica for each URL."""
        if {"urls", "replicas"} <= set(sound) and self.replicas != len(self.urls):
            yield Fault(
                "replicas",
                f"expected {len(self.urls)}, one for each of engine.urls (or leave it out)",
                self.replicas,
            )


@attrs.frozen(kw_only=True)
class CustomEngine(EngineConfig):
    """An `EngineCore` of yours."""

    kind: ClassVar[str] = "custom"
    #: ``package.module:Class``.
    core: ClassPath
    #: Keyword arguments of the class.
    options: PlainMapping = attrs.field(factory=dict)


#: The first is what data without a `kind` means.
AnyEngine = TransformersEngine | SimulatedEngine | SGLangEngine | HttpEngine | CustomEngine
ENGINES: tuple[type[EngineConfig], ...] = get_args(AnyEngine)
