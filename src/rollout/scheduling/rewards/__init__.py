"""Reward functions: found, checked, called within their limits, in processes where asked for."""
