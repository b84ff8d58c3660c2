"""Runs every benchmark of this directory, one after the other.

    python benchmarks/run_all.py [--quick] [NAME …]

What each prints is passed on. One that fails stops none of the others; then the exit code is 1. The
one on top of SGLang needs the environment of `make sglang-cpu` and is left out where that does not
exist, as is what `driver` compares with verl where there is none of `make bench-verl`. The last
line is JSON: the last line of each by its name, `{"failed": …}` or `{"skipped": …}` where there is
none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time  # noqa: TID251  (people want to know how long it took)
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Modules of the others, which measure nothing by themselves.
PARTS = ("intervals", "observe_report", "run_all", "straight_sglang")
SCRIPTS = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem not in PARTS))
#: Makes an environment of gigabytes where none is and it is not told otherwise.
DRIVER, AS_IT_IS = "driver", "--no-setup"
SGLANG, SGLANG_PYTHON = "sglang_overhead", HERE.parent / ".venv-sglang" / "bin" / "python"


def run(name: str, options: list[str]) -> dict[str, Any]:
    """What one benchmark says in its last line."""
    if name == SGLANG and not SGLANG_PYTHON.exists():
        return {"skipped": f"no {SGLANG_PYTHON}: make sglang-cpu"}
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    if name == DRIVER:
        command.append(AS_IT_IS)
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        return {"failed": f"exit code {process.returncode}"}
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        return {"failed": f"its last line is no JSON: {last[:80]}"}
    return result if isinstance(result, dict) else {"failed": f"no object in its last line: {last}"}


def main() -> int:
    """Run them; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(SCRIPTS)}")
    parser.add_argument("--quick", action="store_true", help="each with fewer runs")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(SCRIPTS))
    if unknown:
        parser.error(f"{unknown[0]}: expected some of {', '.join(SCRIPTS)}")
    results = {}
    for name in options.names or SCRIPTS:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        results[name] = run(name, ["--quick"] if options.quick else [])
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(results))
    return 1 if any("failed" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
