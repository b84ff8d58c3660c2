# ruff: isort: skip_file
from rollout.integrations.slime.functions import (
    close as close,
    generate as generate,
    generate_rollout as generate_rollout,
)
