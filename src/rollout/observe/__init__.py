"""What happened in a run: events, and what is made of them.

`read_events` reads the events of a run from disk; `rollout.observe.events` has their types.
"""

from rollout.observe.event_file import read_events

__all__ = ["read_events"]
