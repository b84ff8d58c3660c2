"""Trajectories to tensors, and a batch to disk and back. Importing this imports torch."""

from rollout.batch.collate import collate
from rollout.batch.multi_modal import MultiModalInputs
from rollout.batch.rollout_batch import RolloutBatch
from rollout.batch.sample import Sample

__all__ = ["MultiModalInputs", "RolloutBatch", "Sample", "collate"]
