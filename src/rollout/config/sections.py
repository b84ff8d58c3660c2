"""The configuration of a rollout: frozen attrs classes, one for each section.

Durations are in seconds, lengths in tokens unless a field says otherwise. Every default is
finite; None must be written out and means "no limit". Building any of these raises `ConfigError`
with all faults of the values given; nothing is converted silently and no file is looked at.
"""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal

import attrs

from rollout.config.channel_section import ChannelConfig
from rollout.config.checks import (
    BuiltinTools,
    Count,
    DriftKinds,
    Flag,
    Natural,
    NonNegative,
    PlainMapping,
    StrategyName,
    Text,
    Url,
    Weights,
)
from rollout.config.config_faults import Fault
from rollout.config.engines import (
    EMBEDDED_MODEL,
    SIMULATED_MODEL,
    AnyEngine,
    EngineConfig,
    TransformersEngine,
)
from rollout.config.gateway_section import GatewayConfig
from rollout.config.journal_section import JournalConfig
from rollout.config.limits_section import LimitsConfig
from rollout.config.media_section import MediaConfig
from rollout.config.observe_section import ObserveConfig
from rollout.config.placements import (
    ALLOWED_PLACEMENTS,
    PLACEMENT_KINDS,
    AnyPlacement,
    LocalProcessPlacement,
)
from rollout.config.recovery_section import RecoveryConfig
from rollout.config.rewards_section import RewardsConfig
from rollout.config.sampling_section import SamplingConfig
from rollout.config.sandbox_section import SandboxConfig
from rollout.config.scheduling_section import SchedulingConfig
from rollout.config.section_type import Section, annotations_of, faults_of, given_fields

#: What `ChatTemplate` gives a template itself.
_RENDERED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")
)
#: How a path begins that can be no name of a model.
_DIRECTORY = ("/", "./", "../", "~")


@attrs.frozen(kw_only=True)
class ModelConfig(Section):
    """Which model the engines serve and whose tokenizer and chat template the driver uses."""

    section: ClassVar[str] = "model"
    #: A local directory, a hub name, or ``embedded:smollm2-135m-instruct``. Where the engine has a
    #: model of its own (``http``, ``custom``), a directory with a tokenizer's files is enough. The
    #: simulated engine's is ``simulated``, which it takes where this is left out.
    path: Text = EMBEDDED_MODEL
    #: Hub revision; None takes the default branch.
    revision: Text | None = None
    #: Lets code from the model's repository run on this machine.
    trust_remote_code: Flag = False
    #: A Jinja file that replaces the tokenizer's own chat template.
    chat_template: Text | None = None
    #: What the template can read beside messages and tools, e.g. ``enable_thinking = false``.
    chat_template_kwargs: PlainMapping = attrs.field(factory=dict)

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """`chat_template_kwargs` leaves alone what every rendering is given."""
        yield from super().relation_faults(sound)
        given = self.chat_template_kwargs if "chat_template_kwargs" in sound else {}
        for name in sorted(_RENDERED.intersection(given)):
            expected = "expected another name: every rendering has its own of this one"
            yield Fault(f"chat_template_kwargs.{name}", expected, given[name])

    def for_engine(self, engine: object) -> "ModelConfig":
        """These settings, with the engine's own default where no path was given."""
        path = getattr(engine, "default_model", EMBEDDED_MODEL)
        given = given_fields(self)
        if "path" in given or path == self.path:
            return self
        settled = attrs.evolve(self, path=path)
        object.__setattr__(settled, "_given", given)
        return settled


@attrs.frozen(kw_only=True)
class RouterConfig(Section):
    """How requests are spread over replicas; ``docs/routing.md`` says how that is decided."""

    section: ClassVar[str] = "router"
    #: ``estimated_seconds``: the least tokens in flight, by each replica's measured speed;
    #: ``least_requests``; ``round_robin``. A trajectory stays where it is; the first two
    #: move it past a margin.
    strategy: StrategyName = "estimated_seconds"
    #: With ``estimated_seconds``: a trajectory moves when another replica should answer more than
    #: this much sooner, even though it has to compute the prefix again.
    move_margin_s: NonNegative = 0.5
    #: With ``least_requests``: a trajectory moves when its replica holds more than this many
    #: requests beyond the least loaded one.
    move_margin: Natural = 16
    #: Shares of the load, one for each of `engine.replicas`; empty makes all equal.
    weights: Weights = ()


@attrs.frozen(kw_only=True)
class LengthsConfig(Section):
    """Widths of the tensors and bounds on a trajectory, in tokens."""

    section: ClassVar[str] = "lengths"
    #: Tokens of the longest prompt; P of the tensors.
    prompt: Count = 1024
    #: What becomes of longer prompts: "reject" ends their trajectories as `rejected`, "cut" drops
    #: their first tokens, without regard to what these are.
    overlong_prompts: Literal["reject", "cut"] = "reject"
    #: Generated and observed tokens together; R of the tensors.
    response: Count = 4096
    #: Tokens of one generation; None leaves it to `response`.
    turn: Count | None = None

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """A turn fits into a response."""
        if self.turn is None or not {"turn", "response"} <= set(sound):
            return
        if self.turn > self.response:
            expected = f"expected at most lengths.response = {self.response}"
            yield Fault("turn", expected, self.turn)


@attrs.frozen(kw_only=True)
class AgentConfig(Section):
    """Which agent loop runs and when it stops."""

    section: ClassVar[str] = "agent"
    #: Registered agent loop of prompts that name none.
    name: Text = "tool_agent"
    #: Generations of a trajectory, over all its conversations and whatever its agent's loop.
    max_assistant_turns: Count | None = 32
    #: Answers of tools or users in a trajectory, those to one turn counting as one.
    max_user_turns: Count | None = 32
    #: Calls of a whole trajectory, errors included.
    max_tool_calls: Count | None = 256
    #: Calls in a row that ended in an error observation.
    max_consecutive_errors: Count | None = 16
    #: Calls in a row that could not be run as asked: not parsed, of an unknown tool, or with
    #: arguments that do not fit its schema.
    max_consecutive_invalid_calls: Count | None = 8
    #: Calls of one turn that run; the others are answered with an observation that says so.
    max_parallel_calls: Count = 8
    #: Format of the model's tool calls.
    tool_format: Text = "hermes"
    #: What the model sees of its earlier turns: "append_only" is what it sampled, token by token;
    #: "inference_template" renders the conversation again, as a serving stack does, and splits the
    #: trajectory into rows where that changes what stood before.
    history: Literal["append_only", "inference_template"] = "append_only"
    #: Whether a finished trajectory's text is compared with a full rendering of its conversation:
    #: "warn" counts what differs and logs each kind once, "sample" does so with the first 8 that
    #: end of one turn and of several, with calls of tools and without, and one in 512 of the
    #: others, "strict" compares all and fails what differs.
    tokenization_check: Literal["off", "sample", "warn", "strict"] = "sample"
    #: Kinds of difference that do not count: whitespace, special_tokens, reasoning_stripped,
    #: content.
    tokenization_ignore: DriftKinds = ()
    #: Tokens of a row that "compacting_agent" keeps free for a summary of it, the request for that
    #: included.
    compaction_room: Count = 1024
    #: What asks the model for that summary.
    compaction_prompt: Text = (
        "There is little room left. Write notes for yourself from which the work can be continued "
        "without this conversation: the task, what was found and done, and what is left to do. "
        "Call no tools."
    )
    #: Summaries of a trajectory; after the last one a length ends it.
    max_compactions: Count = 8
    #: Registered interaction (simulated user) of prompts that name none in
    #: ``extra["interaction_kwargs"]["name"]``.
    interaction: Text | None = None


@attrs.frozen(kw_only=True)
class ToolsConfig(Section):
    """How tools are run and what of their answers the model sees."""

    section: ClassVar[str] = "tools"
    #: Shipped tools that models are offered, beside those given to `open_rollout`: calculator,
    #: edit, finish, python, search, shell, submit.
    builtin: BuiltinTools = ()
    #: Pictures that a call of the built-in python or shell writes to the sandbox's directory, such
    #: as plots, of which the model is shown so many; more than 0 needs a model that reads images.
    max_pictures: Natural = 0
    #: URL of the retriever that the built-in search asks.
    search_url: Url | None = None
    #: Longest answer of a tool, in characters; longer ones are truncated.
    max_response_length: Count = 4096
    #: "left" keeps the tail, "right" keeps the head, "middle" keeps both ends.
    truncate_side: Literal["left", "right", "middle"] = "middle"
    #: Worker threads of sync tools and sync reward functions.
    max_threads: Count = 32
    #: Threads of one tool that may be left behind at a deadline before it fails fast.
    max_abandoned_threads: Count = 16
    #: Child processes of tools with ``isolation="process"``, each running one call at a time.
    max_processes: Count = 8

    @classmethod
    def instead_of(cls, key: str) -> str:
        """Who makes sandboxes, for all that act in them, and what a search looks in."""
        if key == "search_corpus":
            return (
                "unknown key; search_url names a retriever, such as the one of "
                "examples/local_search"
            )
        return "unknown key; sandbox.provider says who isolates" if key == "isolation" else ""

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """A retriever where there is a search, and no setting of a tool that is not there."""
        if not {"builtin", "search_url"} <= set(sound):
            return
        if "search" in self.builtin and not self.search_url:
            yield Fault("search_url", "expected a URL, for 'search' in tools.builtin", None)
        if self.search_url and "search" not in self.builtin:
            problem = "expected none without 'search' in tools.builtin"
            yield Fault("search_url", problem, self.search_url)
        if (
            "max_pictures" in sound
            and self.max_pictures
            and not {"python", "shell"} & set(self.builtin)
        ):
            problem = "expected 0 without 'python' or 'shell' in tools.builtin"
            yield Fault("max_pictures", problem, self.max_pictures)


@attrs.frozen(kw_only=True)
class RolloutConfig(Section):
    """The whole configuration of a rollout."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    engine: AnyEngine = attrs.field(factory=TransformersEngine)
    placement: AnyPlacement = attrs.field(factory=LocalProcessPlacement)
    router: RouterConfig = attrs.field(factory=RouterConfig)
    channel: ChannelConfig = attrs.field(factory=ChannelConfig)
    recovery: RecoveryConfig = attrs.field(factory=RecoveryConfig)
    sampling: SamplingConfig = attrs.field(factory=SamplingConfig)
    #: Stands over `sampling` when `generate` validates: fields left out take that one's value. By
    #: default it sets `greedy` alone; giving any field takes the place of that.
    validation_sampling: SamplingConfig = attrs.field(factory=lambda: SamplingConfig(greedy=True))
    lengths: LengthsConfig = attrs.field(factory=LengthsConfig)
    limits: LimitsConfig = attrs.field(factory=LimitsConfig)
    agent: AgentConfig = attrs.field(factory=AgentConfig)
    tools: ToolsConfig = attrs.field(factory=ToolsConfig)
    sandbox: SandboxConfig = attrs.field(factory=SandboxConfig)
    media: MediaConfig = attrs.field(factory=MediaConfig)
    rewards: RewardsConfig = attrs.field(factory=RewardsConfig)
    scheduling: SchedulingConfig = attrs.field(factory=SchedulingConfig)
    gateway: GatewayConfig = attrs.field(factory=GatewayConfig)
    journal: JournalConfig = attrs.field(factory=JournalConfig)
    observe: ObserveConfig = attrs.field(factory=ObserveConfig)
    #: Seeds of all sampling derive from it; None samples afresh each run.
    seed: Natural | None = None

    @classmethod
    def settled(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`validation_sampling` as it stands over `sampling`; `model`, `recovery` by `engine`."""
        return {
            **cls._settled_validation(values),
            **cls._settled_recovery(values),
            **cls._settled_model(values),
        }

    @classmethod
    def _settled_model(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        model, engine = values.get("model", ModelConfig()), values.get("engine")
        if not isinstance(model, ModelConfig) or faults_of(model):
            return {}
        return {"model": model.for_engine(engine)}

    @classmethod
    def _settled_recovery(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        recovery = values.get("recovery", RecoveryConfig())
        engine = values.get("engine", TransformersEngine())
        is_sound = isinstance(recovery, RecoveryConfig) and isinstance(engine, EngineConfig)
        if not is_sound or faults_of(recovery) or faults_of(engine):
            return {}
        return {"recovery": recovery.for_engine(engine)}

    @classmethod
    def _settled_validation(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        sampling = values.get("sampling", SamplingConfig())
        validation = values.get("validation_sampling", SamplingConfig(greedy=True))
        sections = (sampling, validation)
        if not all(isinstance(each, SamplingConfig) and not faults_of(each) for each in sections):
            return {}
        return {"validation_sampling": validation.over(sampling)}

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """The engine can live where the placement puts it; a weight for each replica or none."""
        # Their kinds are known even where other fields of theirs have faults.
        kind, place = getattr(self.engine, "kind", None), getattr(self.placement, "kind", None)
        allowed = ALLOWED_PLACEMENTS.get(str(kind))
        if allowed and place in PLACEMENT_KINDS and place not in allowed:
            table = "; ".join(f"{e} with {', '.join(p)}" for e, p in ALLOWED_PLACEMENTS.items())
            places = " or ".join(map(repr, allowed))
            problem = f"expected {places} for engine.kind = {kind!r} (allowed: {table})"
            yield Fault("placement.kind", problem, place)
        yield from self._model_faults(str(kind))
        certificate = getattr(self.channel, "tls_certificate", None)
        if place == "in_process" and certificate is not None:
            problem = "expected None with placement.kind = 'in_process': nothing leaves the process"
            yield Fault("channel.tls_certificate", problem, certificate)
        if kind == "sglang":
            yield from self._penalty_faults()
        room, response = getattr(self.agent, "compaction_room", 0), self._response_length()
        is_compacting = _is(getattr(self.agent, "name", ""), "compacting_agent")
        if is_compacting and isinstance(room, int) and room >= response:
            problem = f"expected less than lengths.response = {response}"
            yield Fault("agent.compaction_room", problem, room)
        weights = getattr(self.router, "weights", ())
        replicas = getattr(self.engine, "replicas", None)
        is_sound = isinstance(weights, tuple) and isinstance(replicas, int)
        if is_sound and weights and len(weights) != replicas:
            problem = f"expected a number for each of engine.replicas = {replicas}"
            yield Fault("router.weights", problem, list(weights))
        yield from self._gpu_faults()
        yield from self._gpu_slot_faults()
        gpu_slots = getattr(self.placement, "colocate", ())
        machines = getattr(self.placement, "machines_per_replica", 1)
        is_sound = isinstance(gpu_slots, tuple) and isinstance(machines, int)
        if (
            is_sound
            and isinstance(replicas, int)
            and gpu_slots
            and len(gpu_slots) != replicas * machines
        ):
            problem = f"expected one for each of engine.replicas = {replicas}"
            if machines > 1:
                problem = f"expected {machines} for each of engine.replicas = {replicas}"
            yield Fault("placement.colocate", problem, list(gpu_slots))
        if isinstance(machines, int) and machines > 1:
            yield from self._spread_faults(machines)

    def _model_faults(self, kind: str) -> Iterator[Fault]:
        """The simulated engine and its model belong together."""
        path = getattr(self.model, "path", None)
        if not isinstance(path, str) or not isinstance(self.engine, EngineConfig):
            return
        is_simulated = path == SIMULATED_MODEL
        if kind == "simulated" and not is_simulated and not path.startswith(_DIRECTORY):
            problem = (
                f"expected {SIMULATED_MODEL!r} for engine.kind = 'simulated', whose ids are bytes "
                "(or leave it out)"
            )
            yield Fault("model.path", problem, path)
        elif is_simulated and getattr(self.engine, "loads_weights", False):
            problem = (
                f"expected a directory, a hub name or {EMBEDDED_MODEL!r} for engine.kind = "
                f"{kind!r}, which needs a model with files"
            )
            yield Fault("model.path", problem, path)

    def _response_length(self) -> float:
        response = getattr(self.lengths, "response", None)
        return response if isinstance(response, int) else math.inf

    def _penalty_faults(self) -> Iterator[Fault]:
        """SGLang gives log-probs after penalties, and its repetition penalty is another one."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        for section in ("sampling", "validation_sampling"):
            for name, expected in neutral.items():
                settings = getattr(self, section)
                value = getattr(settings, name, expected)
                is_given = isinstance(settings, Section) and name in given_fields(settings)
                if value != expected and is_given:
                    problem = (
                        f"expected {expected} for engine.kind = 'sglang', which gives log-probs "
                        "after penalties"
                    )
                    yield Fault(f"{section}.{name}", problem, value)

    def _spread_faults(self, machines: int) -> Iterator[Fault]:
        """Only engines that know of node ranks spread over machines, with equal shares."""
        kind, wanted = getattr(self.engine, "kind", ""), getattr(self.engine, "tensor_parallel", 0)
        problem = ""
        if kind not in ("sglang", "custom"):
            problem = f"expected 1 for engine.kind = {kind!r}"
        elif isinstance(wanted, int) and wanted % machines:
            problem = f"expected a divisor of engine.tensor_parallel = {wanted}"
        if problem:
            yield Fault("placement.machines_per_replica", problem, machines)

    def _gpu_faults(self) -> Iterator[Fault]:
        """An engine that spreads over GPUs is placed on as many."""
        wanted = getattr(self.engine, "tensor_parallel", 1)
        given = getattr(self.placement, "gpus_per_replica", None)
        is_on_cpu = _is(getattr(self.engine, "device", "cpu"), "cpu")
        if is_on_cpu or not isinstance(wanted, int) or not isinstance(given, int | float):
            return
        if given < wanted and wanted > 1:
            problem = f"expected at least engine.tensor_parallel = {wanted}"
            yield Fault("placement.gpus_per_replica", problem, given)

    def _gpu_slot_faults(self) -> Iterator[Fault]:
        """GPU slots of a trainer have a GPU for each shard of the replica that sits there."""
        wanted = getattr(self.engine, "tensor_parallel", 1)
        gpu_slots = getattr(self.placement, "colocate", ())
        machines = getattr(self.placement, "machines_per_replica", 1)
        is_on_cpu = _is(getattr(self.engine, "device", "cpu"), "cpu")
        is_sound = isinstance(gpu_slots, tuple) and isinstance(wanted, int)
        is_even = isinstance(machines, int) and machines > 0 and is_sound and not wanted % machines
        if is_on_cpu or not is_even:
            return
        share = wanted // machines
        for index, gpu_slot in enumerate(gpu_slots):
            gpus = str(gpu_slot).rpartition(":")[2].split(",")
            if len(set(gpus)) < share:
                each = "" if machines == 1 else f" over {machines} machines"
                problem = f"expected {share} GPUs for engine.tensor_parallel = {wanted}{each}"
                yield Fault(f"placement.colocate[{index}]", problem, gpu_slot)

    @classmethod
    def homes_of(cls, key: str) -> list[str]:
        """The sections that have this key."""
        return [repr(f"{name}.{key}") for name, section in _SECTIONS.items() if key in section]


def _is(value: object, text: str) -> bool:
    """Whether a value that may be a fault is this text; some have no truth of their own."""
    return isinstance(value, str) and value == text


#: The keys of each section that has one class; those of engines depend on their kind.
_SECTIONS = {
    name: tuple(annotations_of(cls))
    for name, cls in annotations_of(RolloutConfig).items()
    if isinstance(cls, type) and issubclass(cls, Section)
}
