"""What an engine must be: the contract between `EngineServer` and whatever generates tokens.

This module is loaded in engine processes, whose environment may hold little else: it imports
msgspec only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from rollout.engine.weights import DiskWeights
    from rollout.medium import PlacedMedia

FinishReason = Literal["stop", "length", "abort", "error", "rejected"]
#: Of answers that were not cut short, whose counts are those of the whole request.
WHOLE_ANSWERS: tuple[FinishReason, ...] = ("stop", "length")
#: Checked when a message is decoded: what a peer sends must not break what counts with it.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Version = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
#: Engines keep these in arrays of 32 and 64 bits; NaN is none of them.
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]

#: Seconds a core may take to end its requests when it closes.
CORE_CLOSE_S = 5.0


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """How one request is sampled.

    A message with a value that is not of its type ends the connection that it came over, for all
    who use it; `sampling_faults.check_sampling` looks before one leaves.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Keeps the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: Keeps the k most likely tokens; -1 keeps all.
        min_p: Drops tokens below this share of the most likely one's probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in the
            prompt or the output (Keskar et al. 2019, as in transformers); 1 changes nothing.
        max_new_tokens: Upper bound on generated tokens, at least 1.
        stop_token_ids: Ids that end the generation beside the model's own end tokens; the id
            that ended it is part of the answer.
        ignore_eos: Lets the model's own end tokens pass without ending the generation.
        seed: With a seed, the token at absolute position p is drawn from noise keyed by
            (seed, p): alone, in a full batch or resumed, the same tokens. None draws afresh.
        presence_penalty: Taken off the logits of tokens seen in the output.
        frequency_penalty: Taken off the logits of tokens seen in the output, for each time. What
            is output and what prompt is not in the tokens: a request with either penalty restarts
            where its replica is lost.
        top_log_probs: How many of the most likely ids come with each token, and their log-probs.
    """

    max_new_tokens: AtLeastOne
    temperature: NonNegative = 1.0
    top_p: Share = 1.0
    top_k: TopK = -1
    min_p: Share = 0.0
    repetition_penalty: NonNegative = 1.0
    stop_token_ids: tuple[Id, ...] = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    top_log_probs: Natural = 0


class GenerationRequest:
    """Token ids in, sampled token ids out.

    Attributes:
        request_id: Fixed width, never used twice, so that no id is a prefix of another.
        sampling: How the tokens are drawn.
        session_id: The trajectory; a core may keep its prefix warm.
        priority: Larger runs first where the core supports it.
        routed_experts: Whether the experts that each token was routed to are wanted; only engines
            with an `EngineInfo.expert_shape` are asked.
        routed_experts_start: Position in the prompt from which they are wanted.
        media: The images and videos in the prompt, in their order, each with its place there: the
            prompt has as many placeholder ids of it as the model's processor makes of it. The same
            ids elsewhere stand for nothing: the model sampled them.
    """

    __slots__ = (
        "_prompt",
        "media",
        "priority",
        "request_id",
        "routed_experts",
        "routed_experts_start",
        "sampling",
        "session_id",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: bytes | Callable[[], bytes],
        sampling: SamplingParams,
        session_id: str = "",
        priority: int = 0,
        routed_experts: bool = False,
        routed_experts_start: int = 0,
        media: tuple[PlacedMedia, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.session_id = session_id
        self.priority = priority
        self.routed_experts = routed_experts
        self.routed_experts_start = routed_experts_start
        self.media = media
        self._prompt = prompt_ids

    @property
    def top_log_probs(self) -> int:
        """How many of the most likely tokens are wanted at each position; see `Chunk.top_ids`."""
        return self.sampling.top_log_probs

    @property
    def prompt_ids(self) -> bytes:
        """int32 little-endian, packed; put together when it is first looked at."""
        if not isinstance(self._prompt, bytes):
            self._prompt = self._prompt()
        return self._prompt


class Chunk(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=11):
    """Some newly sampled tokens of one request; the last chunk has a finish reason.

    Attributes:
        offset: Index of the first id within this generation, so that a repeated or a lost chunk
            shows.
        ids: int32 little-endian, packed; may be empty.
        log_probs: float32 little-endian, one for each id: log-softmax(logits / temperature) at
            the sampled id over the whole vocabulary, before penalties and truncation (greedy: at
            temperature 1).
        weight_version: Version of the weights that sampled these ids.
        finish_reason: None while more may come. "stop": an end token was sampled (and is the
            last id); "length": max_new_tokens or the context is used up; "abort": ended by
            `abort_nowait`; "rejected": refused before any work, to be retried elsewhere or
            later; "error": failed, `error` says why.
        cached_tokens: On the last chunk, how many prompt tokens needed no prefill.
        is_fatal: With "error": the engine itself is broken, out of memory for example. It is
            ended and restarted, and all of its requests resume elsewhere.
        top_ids: int32 little-endian: for each of `ids`, the ``sampling.top_log_probs`` most likely
            ids, likeliest first, whether or not the sampled one is among them.
        top_log_probs: float32 little-endian, one for each of `top_ids`, as in `log_probs`.
        routed_experts: int16 little-endian, (positions, layers, top_k): of the tokens, prompt
            included, from `GenerationRequest.routed_experts_start` on, as far as they have been
            computed; the last one sampled has not been. Joined in the order of the chunks.
    """

    request_id: str
    offset: Natural = 0
    ids: bytes = b""
    log_probs: bytes = b""
    weight_version: Version = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: Natural = 0
    is_fatal: bool = False
    top_ids: bytes = b""
    top_log_probs: bytes = b""
    routed_experts: bytes = b""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an engine that its clients must agree with.

    Attributes:
        vocab_size: Ids of requests must lie in [0, vocab_size), which the driver's tokenizer must
            fit into. 0: nobody knows.
        eos_ids: Ids that end a generation unless `ignore_eos`. Empty: nobody knows.
        context_length: Prompt plus generated tokens fit in it.
        fingerprint: Names the model; replicas of one pool must agree. Empty: nobody knows.
        max_requests: How many requests the engine holds at once, running and queued.
        max_running: How many of them it computes at once; 0: not known.
        weight_version: Version of the weights loaded.
        core: Name of the core, for people.
        device: Where its weights are, or the first part of them, as torch names it in its process
            ("cuda:1"); weights over NCCL are received there. Empty where that is not known.
        gpu: Which GPU of its machine that is; see `devices.gpu_of`.
        no_sleep: Why its memory cannot be released; empty where it can, or where that is not known.
        max_top_log_probs: The most ``sampling.top_log_probs`` of a request; 0 where the core cannot
            tell any. None: not known, and a request whose answer lacks them fails.
        expert_shape: (layers, top_k) where each answer says which experts its tokens were routed
            to; None where none does.
        modalities: Kinds of media that prompts may hold: "image", "video".
        no_media: Why a kind is missing there, for people; empty where there is nothing to say.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int
    fingerprint: str
    max_requests: int
    weight_version: int = 0
    core: str = ""
    device: str = ""
    gpu: str = ""
    no_sleep: str = ""
    max_top_log_probs: Natural | None = None
    expert_shape: tuple[Natural, Natural] | None = None
    modalities: tuple[str, ...] = ()
    no_media: str = ""
    max_running: Natural = 0

    @property
    def most_at_once(self) -> int:
        """Requests that it computes at once; that it holds, where it does not say so."""
        return self.max_running or self.max_requests

    def media_fault(self, kinds: Iterable[str]) -> str:
        """Why the engine cannot be asked about these kinds of media; empty where it can."""
        for kind in kinds:
            if kind not in self.modalities:
                able = " and ".join(f"{kind}s" for kind in self.modalities) or "text only"
                why = f": {self.no_media}" if self.no_media else ""
                core = self.core or "the engine"
                return f"{core} takes no {kind}s; it takes {able}{why}"
        return ""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A snapshot of what an engine is doing.

    Attributes:
        running: Requests being decoded or prefilled.
        queued: Requests waiting for a place.
        kv_used: Share of the KV cache in use, 0 … 1.
        generated_tokens: Tokens sampled since the start.
        preemptions: Requests put back into the queue for want of KV space, since the start.
        measured_at_s: When this was so, on the engine's own clock; 0 where that is not said.
    """

    running: Natural = 0
    queued: Natural = 0
    kv_used: float = 0.0
    generated_tokens: Natural = 0
    preemptions: Natural = 0
    measured_at_s: float = 0.0


class EngineBroken(Exception):
    """Raised by a core out of `generate`: the engine itself is broken, not this one request.

    So is one that raises `MemoryError`.
    """


class EngineCore(Protocol):
    """Whatever turns token ids into sampled token ids.

    The server constructs it with keyword options, awaits `start`, iterates `generate` for many
    requests at once from one event loop, and awaits `aclose` at the end.

    A core that can lose what it depends on (processes of its own, a server elsewhere) also has
    ``async def watch(self) -> str``: it returns why the engine is lost, after its requests have
    been told. The process that hosts the core runs it beside the server, through
    `core_watch.watch_core`.

    Chunks leave a core as their tokens are sampled, one by one: the server gathers them, by number
    and by time. A core that gathers by itself, and hands over what it has sampled within
    ``channel.stream_interval_s``, says so with ``is_gathering = True``: its chunks are sent as they
    are.
    """

    @property
    def info(self) -> EngineInfo:
        """The facts about the engine; valid once `start` has returned."""

    async def start(self) -> None:
        """Load the model. On an error nothing is left behind."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request, the last one with a finish reason; exactly one has it.

        Bad requests (ids outside the vocabulary, a prompt beyond the context) end with
        ``finish_reason="error"``, a full queue with ``"rejected"``: never with an exception.
        An engine that cannot serve any request any more says so with ``is_fatal`` on the last
        chunk, or by raising `EngineBroken`. Closing the iterator early aborts the request.
        """

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with ``"abort"``.

        Unknown and finished ids are ignored.
        """

    def load(self) -> EngineLoad:
        """What the engine is doing now."""

    async def aclose(self) -> None:
        """End every request and free the model; bounded by `CORE_CLOSE_S`."""


class UpdatableCore(EngineCore, Protocol):
    """An `EngineCore` whose weights can be changed while it serves."""

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Load other weights of the same model; what is sampled from now on has this version.

        Requests continue meanwhile; no new one comes. Nothing that was computed with the old
        weights serves a later request. On an error the old weights stay.
        """


class SleepingCore(EngineCore, Protocol):
    """An `EngineCore` that can give its memory away for a while; no request runs meanwhile."""

    async def sleep(self, level: int) -> None:
        """Release the KV cache (1), and the weights too (2); what is released already stays so.

        New requests are answered "rejected" until all of it is back.
        """

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """Take back what is named ("kv_cache", "weights") and released.

        Weights are those that it had, loaded again, or those that it was given meanwhile.
        """

    async def flush_cache(self) -> None:
        """Forget what was computed of earlier requests."""


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as packed int32; for small lists, ids stay packed on hot paths."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """Packed int32 ids as an array, without a Python object per token."""
    ids = array("i")
    ids.frombytes(data)
    return ids
