"""The rows of verl's batches as prompts of ours, and what each row keeps until it is one again."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from rollout.agents import agent_names
from rollout.errors import PromptError
from rollout.types import Message, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agents import AgentContext

#: Of `Prompt.extra`: the `RowGroup` of a prompt.
ROWS = "_verl_rows"
#: verl's own agent loops, and what stands in for them: the same with this library's guarantees.
OWN_AGENTS = {"tool_agent": "verl_tool_agent", "single_turn_agent": "verl_single_turn"}
#: The agent that runs a loop of verl's in the runtime.
LOOP_AGENT = "verl_agent_loop"
#: What a row of verl's says of how it is run, and no loop is told.
INTERNAL = "__do_sample__"


@attrs.define(eq=False, kw_only=True)
class VerlRow:
    """One row of a batch of verl's.

    Attributes:
        kwargs: Its columns; what verl calls an agent loop with.
        info: Its step, sample, number among its sample's, and whether it validates.
        sampling_params: In verl's words.
        tool_rewards: What verl's tool agent collects: 0.0 for a call without a reward.
        output: What its agent loop of verl's returned; None where it has none, or has not ended.
        scored: Its output with what reward workers and teachers said of it.
        told: What verl's servers said; see `sessions.Told`.
    """

    kwargs: dict[str, Any]
    info: Mapping[str, Any]
    sampling_params: dict[str, Any]
    tool_rewards: list[float] = attrs.field(factory=list)
    output: Any = None
    scored: Any = None
    told: Any = None

    def begin(self) -> None:
        """It is run, or run again."""
        self.tool_rewards, self.output, self.scored, self.told = [], None, None, None


@attrs.frozen(eq=False)
class RowGroup:
    """The rows of a prompt, one for each member."""

    rows: Sequence[VerlRow]
    #: The integration that runs them.
    adapter: Any


def row_of(context: AgentContext) -> VerlRow:
    """The row of a trajectory."""
    group: RowGroup = context.prompt.extra[ROWS]
    return group.rows[context.identity.member]


class Call(NamedTuple):
    """One call of `RolloutRuntime.generate`.

    Attributes:
        samples: Members of each prompt.
        order: For each member of each prompt, in their order, the row that it is.
    """

    prompts: list[Prompt]
    samples: int
    order: list[int]


def call_of(rows: Sequence[VerlRow], agent_of: Callable[[VerlRow], str], adapter: Any) -> Call:
    """Prompts of ours for rows of verl's, which come repeated.

    Rows with one ``uid`` that agree in all else become the members of one prompt, where all prompts
    have equally many; else each row is a prompt of its own.

    Raises:
        PromptError: There are no rows, or a column of one is none of what it may be.
    """
    if not rows:
        raise PromptError("non_tensor_batch: no rows; expected at least one")
    for at, row in enumerate(rows):
        if fault := _find_fault(row.kwargs):
            raise PromptError(f"non_tensor_batch: row {at} has {fault}")
    groups: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.kwargs.get("uid", at), []).append(at)
    sizes = {len(each) for each in groups.values()}
    if len(sizes) > 1 or not all(_are_alike(rows, each) for each in groups.values()):
        groups = {at: [at] for at in range(len(rows))}
    prompts = [_prompt(rows, each, agent_of, adapter) for each in groups.values()]
    order = [at for each in groups.values() for at in each]
    return Call(prompts, len(next(iter(groups.values()))), order)


def _find_fault(columns: Mapping[str, Any]) -> str:
    """What is wrong with a row; empty where nothing is."""
    if "raw_prompt" not in columns:
        return "no 'raw_prompt'; expected the messages (data.return_raw_chat = True)"
    messages, uid = columns["raw_prompt"], columns.get("uid")
    if not _is_list(messages) or not all(isinstance(each, Mapping | Message) for each in messages):
        return f"raw_prompt = {messages!r:.80}; expected a list or array of messages"
    if not isinstance(uid, Hashable):
        return f"uid = {uid!r:.80}; expected a text or a number"
    names = _mapping(columns.get("extra_info")).get("tool_selection")
    if names is not None and not _is_list(names):
        return f"extra_info.tool_selection = {names!r:.80}; expected a list or array of names"
    return ""


def _is_list(value: Any) -> bool:
    is_one = isinstance(value, str | bytes | Mapping) or getattr(value, "ndim", 1) != 1
    return isinstance(value, Collection) and not is_one


def _are_alike(rows: Sequence[VerlRow], group: Sequence[int]) -> bool:
    first = rows[group[0]]
    return all(
        rows[at].sampling_params == first.sampling_params
        and rows[at].kwargs.keys() == first.kwargs.keys()
        and all(
            name == "priority" or _is_same(value, first.kwargs[name])
            for name, value in rows[at].kwargs.items()
        )
        for at in group[1:]
    )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # arrays, or tensors: not to be told apart here
        return False


def _prompt(
    rows: Sequence[VerlRow], group: Sequence[int], agent_of: Callable[[VerlRow], str], adapter: Any
) -> Prompt:
    row = rows[group[0]]
    kwargs, agent = row.kwargs, agent_of(row)
    extra_info = _mapping(kwargs.get("extra_info"))
    own = _mapping(kwargs.get("tools_kwargs")) or _mapping(extra_info.get("tools_kwargs"))
    reward_model = _mapping(kwargs.get("reward_model"))
    source = kwargs.get("data_source")
    return Prompt(
        messages=list(kwargs["raw_prompt"]),
        # The rows' places are part of it: several prompts of a call may have one uid in verl.
        uid=f"{kwargs.get('uid', '')}@{group[0]}",
        agent_name=agent,
        sampling={} if agent == LOOP_AGENT else _overrides(row),
        # verl's single-turn loop shows the model no tools.
        tools=[]
        if agent == OWN_AGENTS["single_turn_agent"]
        else _selected(extra_info.get("tool_selection"), adapter),
        tools_kwargs={str(name): _mapping(each) for name, each in own.items() if each is not None},
        ground_truth=reward_model.get("ground_truth"),
        data_source=None if source is None else str(source),
        priority=-group[0],
        extra={
            **{str(name): value for name, value in extra_info.items() if name != "tools_kwargs"},
            ROWS: RowGroup([rows[at] for at in group], adapter),
        },
    )


def _overrides(row: VerlRow) -> dict[str, Any]:
    """What a row is sampled with where it is to be greedy; else the configuration says it."""
    if row.sampling_params["temperature"] != 0 or row.info["validate"]:
        return {}
    return {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


def _selected(names: Any, adapter: Any) -> list[str] | None:
    """Tools that a row names, as far as there are any of that name; None: all."""
    if names is None or not len(names) or not adapter.tool_names:
        return None
    return [str(name) for name in names if name in adapter.tool_names]


def _mapping(value: Any) -> dict[Any, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def is_text(messages: Any) -> bool:
    """Whether messages are words only, which agents of ours can run."""
    return all(
        isinstance(message, Mapping) and isinstance(message.get("content") or "", str)
        for message in messages
    )


def agent_for(row: VerlRow, registry: Mapping[str, Any], *, prefers_verl: bool) -> str:
    """The agent of ours that runs a row.

    verl's two own loops have one each; every other loop that verl knows is run as it is; and so are
    verl's own ones where `prefers_verl`, where a prompt holds more than words, or where a name of
    theirs was given to another class.

    Raises:
        PromptError: Nobody has registered an agent of this name.
    """
    name = str(row.kwargs["agent_name"])
    entry = registry.get(name)
    target = "" if entry is None else str(entry.get("_target_", ""))
    is_own = name in OWN_AGENTS and target.startswith("verl.experimental.agent_loop.")
    if is_own and not prefers_verl and is_text(row.kwargs["raw_prompt"]):
        return OWN_AGENTS[name]
    if name in registry:
        return LOOP_AGENT
    if name in agent_names():
        return name
    known = ", ".join(sorted({*registry, *agent_names()} - {*OWN_AGENTS.values(), LOOP_AGENT}))
    raise PromptError(
        f"agent_name = {name!r}: neither verl nor rollout has an agent of this name; known: {known}"
    )
