"""The race harness: runtimes watched from outside, and checks of what they report.

`Recorder` opens a runtime whose engines, tools, users and callers are recorded, and compares the
records with what the library says. `explore` runs a situation again and again, with something that
happens at each of its checkpoints. README.md says what is checked.
"""

from harness.races import RacesFoundError, explore, replay
from harness.recorder import Recorder
from harness.token_accounting import Balance, balance_of

__all__ = ["Balance", "RacesFoundError", "Recorder", "balance_of", "explore", "replay"]
