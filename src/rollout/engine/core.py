"""What an engine must be: the contract between `EngineServer` and whatever generates tokens.

This module is loaded in engine processes, whose environment may hold little else: it imports
msgspec only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from rollout.medium import PlacedMedia

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

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
#: The error of an answer that was cut off for an operation and cannot be resumed as it is.
INTERRUPTED = "interrupted"
#: How the error of a "rejected" answer begins whose connection broke: one that was lost.
BROKEN = "the connection broke: "
#: What the levels of sleep release.
TAGS_OF_LEVEL = {1: ("kv_cache",), 2: ("kv_cache", "weights")}
ALL_TAGS = TAGS_OF_LEVEL[2]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """How one request is sampled.

    A message with a value that is not of its type ends the connection that it came over, for all
    who use it; `cores.checks.check_sampling` looks before one leaves.

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

    def find_stateful_field(self) -> str:
        """The first penalty whose state is not in the tokens; "" for none.

        A request that has one, resumed from its tokens, would be sampled by other rules.
        """
        if self.presence_penalty:
            return "presence_penalty"
        return "frequency_penalty" if self.frequency_penalty else ""


class GenerationRequest(msgspec.Struct, kw_only=True, eq=False):
    """Token ids in, sampled token ids out.

    Attributes:
        request_id: Fixed width, never used twice, so that no id is a prefix of another.
        prompt_ids: int32 little-endian, packed.
        sampling: How the tokens are drawn.
        session_id: The trajectory; a core may keep its prefix warm.
        priority: Larger runs first where the core supports it.
        routed_experts: Whether the experts that each token was routed to are wanted; only engines
            with a `Capabilities.expert_shape` are asked.
        routed_experts_start: Position in the prompt from which they are wanted.
        media: The images and videos in the prompt, in their order, each with its place there: the
            prompt has as many placeholder ids of it as the model's processor makes of it. The same
            ids elsewhere stand for nothing: the model sampled them.
    """

    request_id: str
    prompt_ids: bytes
    sampling: SamplingParams
    session_id: str = ""
    priority: int = 0
    routed_experts: bool = False
    routed_experts_start: int = 0
    media: tuple[PlacedMedia, ...] = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=11, gc=False):
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


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a core can do beside generating; what it does not declare is not asked of it.

    Attributes:
        weights: Where it takes other weights from while it serves: "disk", "tensors", "groups".
        in_place: Whether weights may change under running requests.
        sleep_levels: How deep it can sleep; see `BaseCore.sleep`.
        sleep_tags: What it can take back by itself when it wakes up.
        no_sleep: Why its memory cannot be released; empty where it can, or where that is not known.
        modalities: Kinds of media that prompts may hold: "image", "video".
        no_media: Why a kind is missing there, for people; empty where there is nothing to say.
        expert_shape: (layers, top_k) where each answer says which experts its tokens were routed
            to; None where none does.
        max_top_log_probs: The most ``sampling.top_log_probs`` of a request; 0 where the core cannot
            tell any. None: not known, and a request whose answer lacks them fails.
        scoring: Whether it gives the log-probs of ids that it did not sample.
        lora: Whether it serves adapters beside the model.
    """

    weights: tuple[str, ...] = ()
    in_place: bool = False
    sleep_levels: tuple[int, ...] = ()
    sleep_tags: tuple[str, ...] = ()
    no_sleep: str = ""
    modalities: tuple[str, ...] = ()
    no_media: str = ""
    expert_shape: tuple[Natural, Natural] | None = None
    max_top_log_probs: Natural | None = None
    scoring: bool = False
    lora: bool = False


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
        gpu: Which GPU of its machine that is; see `cores.base.name_gpu`.
        capabilities: What it can do beside generating.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int
    fingerprint: str
    max_requests: AtLeastOne
    max_running: Natural = 0
    weight_version: int = 0
    core: str = ""
    device: str = ""
    gpu: str = ""
    capabilities: Capabilities = Capabilities()

    @property
    def most_at_once(self) -> int:
        """`max_running` if it is known, otherwise `max_requests`."""
        return self.max_running or self.max_requests

    def find_ending(
        self, sampling: SamplingParams, prompt_tokens: int, tokens: int, last_id: int
    ) -> FinishReason | None:
        """How an answer of `tokens` ids ended that was cut off; None where it can continue."""
        ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_ids)
        if tokens and last_id in ends:
            return "stop"
        is_full = prompt_tokens + tokens >= self.context_length
        return "length" if is_full or tokens >= sampling.max_new_tokens else None

    def describe_modalities(self) -> str:
        """What prompts may hold, and why a kind is missing, for people."""
        able = self.capabilities
        kinds = " and ".join(f"{kind}s" for kind in sorted(able.modalities)) or "text only"
        return f"{kinds}: {able.no_media}" if able.no_media else kinds

    def sleep_fault(self, level: int) -> str:
        """Why the engine cannot sleep so deep; empty where it can."""
        able = self.capabilities
        if level in able.sleep_levels:
            return ""
        levels = ", ".join(map(str, able.sleep_levels)) or "none"
        return able.no_sleep or f"level = {level}: {self.core or 'the engine'} has {levels}"

    def wake_fault(self, tags: Collection[str]) -> str:
        """Why the engine cannot take back these alone of what it released; empty where it can."""
        able = self.capabilities.sleep_tags
        if all(tag in able for tag in tags):
            return ""
        alone = ", ".join(able) or "nothing"
        return f"tags = {sorted(tags)}: {self.core or 'the engine'} takes back {alone} by itself"

    def weights_fault(self, kind: str, mode: str) -> str:
        """Why the engine cannot be given weights of this kind, in this way; empty where it can."""
        able, core = self.capabilities, self.core or "the engine"
        if kind not in able.weights:
            kinds = ", ".join(able.weights) or "none"
            return f"{core} takes no weights of the kind {kind!r}; it takes {kinds}"
        if mode == "in_place" and not able.in_place:
            return f"mode = 'in_place': {core} cannot; expected 'wait' or 'abort_and_resume'"
        return ""

    def media_fault(self, kinds: Iterable[str]) -> str:
        """Why the engine cannot be asked about these kinds of media; empty where it can."""
        for kind in kinds:
            if kind not in self.capabilities.modalities:
                core = self.core or "the engine"
                return f"{core} takes no {kind}s; it takes {self.describe_modalities()}"
        return ""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
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
    requests at once from one event loop, and awaits `aclose` at the end. What else it can do it
    declares in `EngineInfo.capabilities`, and has the methods for: see `cores.base.BaseCore`, which
    has them all, and what else cores share.

    Chunks leave a core as their tokens are sampled; the server gathers them. A core that gathers by
    itself says so with ``is_gathering = True``: its chunks are sent as they are.
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
        chunk, or by raising `EngineBroken`. Where the iterator has ``aclose``, calling it early
        aborts the request.
        """

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with ``"abort"``.

        Unknown and finished ids are ignored.
        """

    def load(self) -> EngineLoad:
        """What the engine is doing now."""

    async def aclose(self) -> None:
        """End every request and free the model; bounded by `CORE_CLOSE_S`."""


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as packed int32; for small lists, ids stay packed on hot paths."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """Packed int32 ids as an array, without a Python object per token."""
    ids = array("i")
    ids.frombytes(data)
    return ids
