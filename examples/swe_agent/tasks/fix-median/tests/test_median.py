import stats

assert stats.median([5, 1, 3]) == 3
assert stats.median([4, 1, 3, 2]) == 2.5

values = [2, 1]
stats.median(values)
assert values == [2, 1]

try:
    stats.median([])
except ValueError:
    pass
else:
    raise AssertionError("median([]) raises nothing")
