# ruff: isort: skip_file
from rollout.integrations.verifiers.client import (
    RolloutClient as RolloutClient,
    RolloutClientConfig as RolloutClientConfig,
    install as install,
)
from rollout.integrations.verifiers.door import Door as Door, open_door as open_door
from rollout.integrations.verifiers.samples import training_samples as training_samples
