"""An engine without a model: it batches, caches prefixes, fails and keeps time as a real one."""
