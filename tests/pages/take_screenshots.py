"""Pictures of a report in both themes, for docs/images:

    python tests/pages/take_screenshots.py PAGE.html docs/images/report [UID/MEMBER [COLOURING]]

takes the first screen of the overview, or that of one trajectory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from browser import Browser

WIDTH, HEIGHT = 1280, 1040


def main(page: str, prefix: str, trajectory: str = "", colouring: str = "mask") -> None:
    """Write ``PREFIX-light.png`` and ``PREFIX-dark.png``."""
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), WIDTH, HEIGHT) as browser:
        for theme in ("light", "dark"):
            browser.prefer(theme)
            browser.open(Path(page))
            if trajectory:
                browser.run(f"location.hash = '#{quote(trajectory, safe='')}'")
                browser.wait_for("!document.getElementById('trajectory').hidden")
                browser.run(f"document.querySelector('[data-colouring={colouring}]').click()")
            browser.screenshot(Path(f"{prefix}-{theme}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
