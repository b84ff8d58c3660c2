"""Trajectories to tensors, and a batch to disk and back. Importing this imports torch."""

from rollout.batch.collate import collate
from rollout.batch.records import Sample
from rollout.batch.rollout_batch import RolloutBatch
from rollout.media.tensors import MultiModalInputs

__all__ = ["MultiModalInputs", "RolloutBatch", "Sample", "collate"]
