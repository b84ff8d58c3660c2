"""Our options as arguments of `sglang.Engine`. No SGLang here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Collection

#: Tokens of the KV cache on a CPU, where SGLang would take its share of the whole machine.
CPU_KV_TOKENS = 65536
#: What SGLang on a CPU runs on without a kernel package.
CPU_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": CPU_KV_TOKENS,
    # A step of 4096 tokens would take half a minute, and no message is read meanwhile.
    "chunked_prefill_size": 512,
    "disable_cuda_graph": True,
    # An idle scheduler would keep a whole core busy.
    "sleep_on_idle": True,
}
NO_MEMORY_SAVER = (
    "SGLang was started without its memory saver, and would release nothing; expected "
    "engine.server_args.enable_memory_saver = true (engine.sleep_between_batches and "
    "placement.colocate set it)"
)


class SGLangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `SGLangCore` was asked for: most are fields of `rollout.config.SGLangEngine`.

    Attributes:
        model: A local directory, a hub name or ``embedded:smollm2-135m-instruct``.
        weight_version: Of the weights that are loaded at the start.
        nodes: Machines that the weights are spread over.
        node_rank: Which of them this is. Only the first one serves; another one's core is
            started, watched and closed, and nothing else.
        rendezvous: ``host:port`` on the first machine, where they meet.
        server_args: Further arguments of `sglang.Engine`, by its own names.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "cuda"
    threads: int = 1
    tensor_parallel: int = 1
    memory_fraction: float = 0.85
    max_running: int = 256
    max_queued: int = 1024
    context_length: int | None = None
    stream_interval: int = 16
    deterministic: bool = False
    routed_experts: bool = False
    weight_version: int = 0
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    server_args: dict[str, Any] = {}

    @property
    def is_cpu(self) -> bool:
        """Whether SGLang runs on the CPU, through our platform plugin."""
        return self.device == "cpu"

    @property
    def torch_device(self) -> str:
        """Where its first GPU is, as torch names it."""
        return "cpu" if self.is_cpu else f"cuda:{self.server_args.get('base_gpu_id', 0)}"

    @property
    def has_memory_saver(self) -> bool:
        """Whether SGLang can release memory of the GPU."""
        return bool(self.server_args.get("enable_memory_saver"))

    @property
    def no_sleep(self) -> str:
        """Why it cannot sleep; empty where it can. A CPU has nothing to release."""
        return "" if self.is_cpu or self.has_memory_saver else NO_MEMORY_SAVER

    @property
    def is_follower(self) -> bool:
        """Whether it holds a part of the weights only, and another machine's engine the tokens."""
        return self.node_rank > 0


def engine_arguments(
    options: SGLangOptions, model_path: str, known: Collection[str]
) -> dict[str, Any]:
    """The keyword arguments of `sglang.Engine`, which are `known` to the installed version."""
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "trust_remote_code": options.trust_remote_code,
        "dtype": options.dtype,
        "device": options.device,
        "tp_size": options.tensor_parallel,
        "mem_fraction_static": options.memory_fraction,
        "max_running_requests": options.max_running,
        "max_queued_requests": options.max_queued,
        "stream_interval": options.stream_interval,
        "weight_version": str(options.weight_version),
        "skip_tokenizer_init": True,
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "enable_precise_embedding_interpolation": True,  # of Qwen3-VL's images, as transformers
    }
    chosen = {
        "revision": options.revision,
        "context_length": options.context_length,
        "enable_deterministic_inference": options.deterministic or None,
        "enable_return_routed_experts": options.routed_experts or None,
    }
    arguments.update({name: value for name, value in chosen.items() if value is not None})
    if options.nodes > 1:
        arguments.update(
            nnodes=options.nodes, node_rank=options.node_rank, dist_init_addr=options.rendezvous
        )
    if options.is_cpu:
        arguments.update(CPU_ARGUMENTS)
    elif options.has_memory_saver:
        # Those that it captures of prefills, as it does unless told otherwise, cannot be released:
        # it does not start. Those of decoding can.
        arguments["disable_prefill_cuda_graph"] = True
    arguments.update(options.server_args)
    for name in arguments:
        if name in known:
            continue
        if name in options.server_args:
            raise EngineError(
                f"engine.server_args.{name}: the installed SGLang has no such argument"
            )
        raise EngineError(
            f"the installed SGLang has no argument {name}; expected a version from 0.5.17 on"
        )
    return arguments
