"""What a command's exit code says; a signal adds its number to 128, as shells do."""

from typing import Final

OK: Final = 0
SOME_FAILED: Final = 1
BAD_INPUT: Final = 2
ENGINE_LOST: Final = 3
NOT_SAVED: Final = 4
