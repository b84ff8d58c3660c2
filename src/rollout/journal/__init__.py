"""The journal of a run: an append-only file of what was sampled, answered and finished."""
