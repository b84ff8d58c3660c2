"""``python -m rollout``: the command line, such as under a debugger or a profiler."""

import sys

from rollout.cli import main

if __name__ == "__main__":
    sys.exit(main())
