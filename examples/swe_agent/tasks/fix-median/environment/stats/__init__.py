"""Figures of lists of numbers."""


def mean(values):
    """The sum of the values by their number."""
    return sum(values) / len(values)


def median(values):
    """The value in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
