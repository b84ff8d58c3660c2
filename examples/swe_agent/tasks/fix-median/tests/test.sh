#!/bin/sh
# The agent sees this directory only once it has ended.
PYTHONPATH=. python3 /tests/test_median.py && reward=1 || reward=0
echo $reward >/logs/verifier/reward.txt
