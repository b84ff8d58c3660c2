"""The journal of a run: what was sampled, answered and finished, so that it can be resumed."""
