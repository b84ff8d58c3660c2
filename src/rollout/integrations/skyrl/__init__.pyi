# ruff: isort: skip_file
from rollout.integrations.skyrl.entrypoint import RolloutExp as RolloutExp, main as main
from rollout.integrations.skyrl.generator import RolloutGenerator as RolloutGenerator
