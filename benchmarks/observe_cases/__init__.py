"""Parts of `benchmarks/observe.py`."""
