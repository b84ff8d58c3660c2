"""Peers of `benchmarks/channel.py`: the same work over our channel, Ray and HTTP."""
