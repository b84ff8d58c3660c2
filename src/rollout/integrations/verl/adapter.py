"""verl's worker without Ray: its tools, its agent loops, its rewards, on our runtime."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollout.integrations.verl.loop_hosting import HostedClient, run_loop
from rollout.integrations.verl.outputs import output_of
from rollout.integrations.verl.rows import ROWS, VerlRow, agent_for, row_of
from rollout.integrations.verl.sessions import Asked, Told
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.agents import AgentContext
    from rollout.chat.trajectory import Trajectory
    from rollout.integrations.verl.rollout_section import Settings
    from rollout.integrations.verl.sessions import Sessions

#: How long a reward worker's call may take to end once it is cancelled.
CLEANUP_S = 5.0


class Adapter:
    """What the rows of a batch need of verl.

    Args:
        worker: verl's ``AgentLoopWorker``, a plain object here: it has read its part of the
            configuration, loaded the tokenizer, the tools and the registry of loops, and knows the
            reward workers and teachers.
        sessions: None where engines of ours generate.

    Attributes:
        tool_names: Of all tools.
        log_probs: Whether verl wants log-probs.
    """

    def __init__(self, worker: Any, settings: Settings, sessions: Sessions | None) -> None:
        rollout = worker.rollout_config
        self.log_probs = bool(rollout.calculate_log_probs)
        self.tool_names = frozenset(tool.name for tool in worker.tools)
        self._worker = worker
        self._lengths = settings.config.lengths
        self._prefers_verl = settings.options.agent_loops == "verl"
        self._sessions = sessions
        self._full_determinism = bool(rollout.full_determinism)
        self._threads = WorkerThreads(cleanup_s=CLEANUP_S)

    @property
    def scores(self) -> bool:
        """Whether reward workers or teachers look at each trajectory as it ends."""
        worker = self._worker
        return worker.reward_loop_worker_handles is not None or worker.distillation_enabled

    def agent_of(self, row: VerlRow) -> str:
        """The name of the agent that runs a row."""
        from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

        return agent_for(row, _agent_loop_registry, prefers_verl=self._prefers_verl)

    @contextmanager
    def running(self, context: AgentContext) -> Iterator[VerlRow]:
        """A row is run, or run again; what verl's servers said of it is kept with the row."""
        row, session = row_of(context), context.identity.session_id
        row.begin()
        if self._sessions is None:
            yield row
            return
        priority = int(row.kwargs.get("priority", 0))
        request_id = f"det-{priority}" if self._full_determinism else session
        is_single = str(row.kwargs["agent_name"]) == "single_turn_agent"
        options = {"priority": priority} if is_single else {}
        row.told = self._sessions.begin(session, Asked(request_id=request_id, options=options))
        try:
            yield row
        finally:
            self._sessions.end(session)

    async def run_loop(self, context: AgentContext, row: VerlRow) -> None:
        """Run a row's loop of verl's; see `loop_hosting.run_loop`."""
        hosted = HostedClient(
            context, self._worker.llm_client, self._sessions, log_probs=self.log_probs
        )

        async def run(client: HostedClient) -> Any:
            return await self._run(client, row)

        name = str(row.kwargs["agent_name"])
        row.output = await run_loop(context, hosted, run, name=name, lengths=self._lengths)
        context.reward = row.output.reward_score

    async def score(self, trajectory: Trajectory) -> float:
        """What verl's reward workers say of a trajectory, and its teachers beside it.

        0.0 where only teachers were asked; `VerlRow.scored` has no reward then.
        """
        row = row_of_trajectory(trajectory)
        output = self.output_of(trajectory)
        await self._threads.run_asyncio("reward workers", self._score, row, output)
        row.scored = output
        return float(output.reward_score or 0.0)

    def output_of(self, trajectory: Trajectory) -> Any:
        """A trajectory as an ``AgentLoopOutput``, with its scores where it has any."""
        row = row_of_trajectory(trajectory)
        if row.scored is not None:
            return row.scored
        return output_of(trajectory, row, self._told(trajectory, row), log_probs=self.log_probs)

    def end(self, trajectory: Trajectory) -> None:
        """Forget what was asked for it."""
        if self._sessions is not None:
            self._sessions.end(session_of(trajectory))

    def close(self) -> None:
        """End the thread on which reward workers were asked."""
        self._threads.close()

    def _told(self, trajectory: Trajectory, row: VerlRow) -> Told:
        if row.told is not None:
            told: Told = row.told
            return told
        return Told() if self._sessions is None else self._sessions.told(session_of(trajectory))

    async def _score(self, row: VerlRow, output: Any) -> None:
        """As verl's worker does once a loop has returned; on asyncio."""
        worker, kwargs = self._worker, _without_agent(row.kwargs)
        await worker._compute_score([output], kwargs=kwargs)
        await worker._compute_teacher_logprobs(
            output,
            prompt_ids=output.prompt_ids,
            response_ids=output.response_ids,
            validate=row.info["validate"],
            sample_kwargs=kwargs,
        )

    async def _run(self, client: HostedClient, row: VerlRow) -> Any:
        """What a row's loop returns; made and run as verl's worker does it, on asyncio."""
        import hydra
        from verl.experimental.agent_loop.agent_loop import (
            DictConfigWrap,
            ToolListWrap,
            _agent_loop_registry,
        )
        from verl.utils.rollout_trace import rollout_trace_attr

        worker = self._worker
        with rollout_trace_attr(**row.info, name="agent_loop"):
            loop = hydra.utils.instantiate(
                config=_agent_loop_registry[str(row.kwargs["agent_name"])],
                trainer_config=DictConfigWrap(config=worker.config),
                server_manager=client,
                tokenizer=worker.tokenizer,
                processor=worker.processor,
                hf_model_type=worker.hf_model_type,
                dataset_cls=worker.dataset_cls,
                data_config=DictConfigWrap(worker.config.data),
                tools=ToolListWrap(worker.tools),
            )
            kwargs = _without_agent(row.kwargs)
            return await loop.run(dict(row.sampling_params), **kwargs)


def row_of_trajectory(trajectory: Trajectory) -> VerlRow:
    """The row that a trajectory is of."""
    assert trajectory.prompt is not None
    row: VerlRow = trajectory.prompt.extra[ROWS].rows[trajectory.member]
    return row


def session_of(trajectory: Trajectory) -> str:
    """The session of its main conversation; empty where it never began."""
    return trajectory.segments[0].session_id


def _without_agent(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "agent_name"}
