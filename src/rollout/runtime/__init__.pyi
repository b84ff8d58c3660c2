# ruff: isort: skip_file
from rollout.runtime.blocking import (
    BlockingRollout as BlockingRollout,
    open_rollout_blocking as open_rollout_blocking,
)
from rollout.runtime.measuring import RuntimeStatistics as RuntimeStatistics
from rollout.runtime.opening import open_rollout as open_rollout
from rollout.runtime.runtime import RolloutRuntime as RolloutRuntime
