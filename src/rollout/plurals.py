"""Numbers with their nouns."""


def count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``, ``2 trajectories``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
