"""A timeline opened by speedscope, from npm, in Chromium: an importer that is not ours."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import observed
from rollout.config import ObserveConfig

browser = pytest.importorskip("browser")

#: Where `make` installs it.
SPEEDSCOPE = (
    Path(__file__).parents[2] / ".venv/node/node_modules/speedscope/dist/release/index.html"
)

pytestmark = [
    pytest.mark.skipif(browser.find_chromium() is None, reason="there is no Chromium"),
    pytest.mark.skipif(not SPEEDSCOPE.exists(), reason="there is no speedscope"),
]

#: What the page says two frames later: the rows of a lane are drawn after its title.
DRAWN_TEXT = """new Promise(say => requestAnimationFrame(() => requestAnimationFrame(
    () => say(document.body.innerText))))"""


def lanes_in_speedscope(timeline: Path, directory: Path) -> dict[str, dict[str, float]]:
    """Of each lane, by its name, what it shows and for how many milliseconds in all."""
    content = base64.b64encode(timeline.read_bytes()).decode()
    script = directory / "profile.js"
    script.write_text(f'speedscope.loadFileFromBase64("timeline.json", "{content}")')
    found: dict[str, dict[str, float]] = {}
    with browser.Browser(directory / "profile") as page:
        page._ask("Page.navigate", url=f"{SPEEDSCOPE.as_uri()}#localProfilePath={script}")
        page.wait_for("document.body?.innerText.includes('(1/')")
        page.press("3")  # a table of what a lane shows
        while True:
            page.wait_for("document.body.innerText.includes('Symbol Name')")
            text = page.run(DRAWN_TEXT)  # once: it may show another lane after that
            title = re.search(r"\n(.*) \((\d+)/(\d+)\)", text)
            assert title is not None, text
            name, number, count = title.groups()
            found[name] = _totals(text.split("Symbol Name")[1])
            if number == count:
                assert page.complaints == []
                return found
            page.press("n")
            page.wait_for(f"document.body.innerText.includes('({int(number) + 1}/{count})')")


def _totals(rows: str) -> dict[str, float]:
    """Total milliseconds by name, of lines: total, self, name with its arguments."""
    units = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3}
    lines = [line.strip() for line in rows.splitlines() if line.strip()]
    found: dict[str, float] = {}
    for total, _, name in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        amount = total.split(" ")[0]
        unit = next(each for each in units if amount.endswith(each))
        label = name.split(" {")[0]
        found[label] = found.get(label, 0.0) + float(amount.removesuffix(unit)) * units[unit]
    return found


def test_speedscope_opens_the_timeline_with_its_lanes_and_durations(tmp_path: Path) -> None:
    asked = observed.prompts("add please sum")
    batch, _ = observed.run(asked, ObserveConfig(path=str(tmp_path)), samples=2)
    batch.timeline(tmp_path / "timeline.json")
    lanes = lanes_in_speedscope(tmp_path / "timeline.json", tmp_path)
    named = {name.split(" (tid")[0]: shown for name, shown in lanes.items()}
    assert {
        "driver (pid 1), event loop",
        "driver (pid 1), calls",
        "trajectories (pid 2), add/0",
        "trajectories (pid 2), add/1",
        "replica engine-0 (pid 3), engine-0",
    } <= named.keys()
    shown = named["trajectories (pid 2), add/0"]
    assert shown["add"] == pytest.approx(observed.TOOL_S * 1e3, abs=0.01)
    total = batch.trajectories[0].metrics["total_s"]
    assert shown["add/0 completed"] == pytest.approx(total * 1e3, rel=0.01)
    whole = batch.metrics["batch_s"] * 1e3
    assert named["driver (pid 1), calls"]["call 0"] == pytest.approx(whole, rel=0.01)
