"""Where traces go: one adapter each; see `rollout.observe.traces.TraceBackend`."""
