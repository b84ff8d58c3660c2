"""What users write passes `mypy --strict`, and reads as the names of the package: `make lint`.

Nothing runs it.
"""

import rollout


class Own(rollout.ToolAgent):
    async def run(self, context: rollout.AgentContext) -> None:
        context.sampling = {"temperature": 0.5}
        context.sampling = rollout.SamplingParams(max_new_tokens=8)
        cap: int = context.sampling.max_new_tokens
        turn: rollout.AssistantTurn = await context.generate(temperature=0.2)
        await context.call_tools(turn.calls)
        await context.call_tools([{"name": "add", "arguments": {"a": cap}}])
        transcript: rollout.Transcript = context.transcript
        print(len(transcript), context.prompt.ground_truth)
        child = await context.branch()
        child.sampling = {"top_k": 4}
        await child.generate(top_p=0.9)


def score(trajectory: rollout.Trajectory) -> rollout.Reward:
    print(trajectory, trajectory.prompt.ground_truth)
    return rollout.Reward(1.0, extra={"of": trajectory.prompt.uid})


def judge(group: rollout.Group) -> list[float]:
    return [len(each.prompt.messages) + len(group.prompt.messages) for each in group.trajectories]


prompts: list[rollout.Prompt] = [
    rollout.Prompt("text"),
    rollout.Prompt(messages="text"),
    rollout.Prompt([{"role": "user", "content": "x"}], uid="a"),
    rollout.Prompt([rollout.Message(role="user", content="x")], sampling={"top_k": 2}),
    *rollout.read_prompts("prompts.jsonl"),
]
for message in prompts[0].messages:
    print(message)
with rollout.open_rollout_blocking(rollout.Scenario(seed=1).config(), reward=score) as runtime:
    batch = runtime.generate(prompts)
print(rollout.group_relative(batch), [row.prompt.extra for row in batch.trajectories])
policy = rollout.GroupPolicy(accept=rollout.has_signal)
