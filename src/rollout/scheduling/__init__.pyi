# ruff: isort: skip_file
from rollout.config import GroupPolicy as GroupPolicy
from rollout.scheduling.selection import has_signal as has_signal
