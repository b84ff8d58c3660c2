"""A rollout on `EchoCore`, in a process of its own.

PYTHONPATH=examples/custom_core python examples/custom_core/run.py
"""

import anyio

import rollout
from rollout.config import CustomEngine, LengthsConfig, RolloutConfig

config = RolloutConfig(
    engine=CustomEngine(core="echo:EchoCore", options={"vocab_size": 49152, "eos_id": 2}),
    lengths=LengthsConfig(prompt=64, response=8),
)


async def main() -> None:
    message = rollout.Message(role="user", content="Say it again.")
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate([rollout.Prompt(messages=[message], uid="echo")])
        ids = batch.tensors["responses"][0][batch.tensors["response_mask"][0].bool()]
        print(repr(runtime.template.decode(ids.tolist())))


if __name__ == "__main__":
    anyio.run(main)
