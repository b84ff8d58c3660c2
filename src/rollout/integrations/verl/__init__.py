"""verl: its rollout on this library, and its formats: tools, interactions, YAML files.

`AgentLoopManager` and `CheckpointManager` import verl when they are asked for; the readers of its
files do not.
"""

from rollout.lazy import export_stub

export_stub(globals())
