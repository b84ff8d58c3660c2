#!/bin/sh
cat >>stats/__init__.py <<'EOF'


def median(values):
    """The value in the middle; of an even number the mean of the two."""
    if not values:
        raise ValueError("no values")
    ordered, middle = sorted(values), len(values) // 2
    return mean([ordered[middle], ordered[-middle - 1]])
EOF
