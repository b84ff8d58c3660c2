"""The report of a run as a browser shows it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser import Browser, find_chromium

from report_runs import MadeUpRun
from report_segments import write_segments
from rollout.engine.model_files import load_decoder
from rollout.observe import read_events
from rollout.observe.events import RequestEnded
from rollout.observe.report.report import write_report

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")

#: What a tool answered, for pages that do not escape it.
HOSTILE = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    "</script><!-- <b>bold</b> \u202e \u2028 & 'quoted' </pre></style>"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The process."""
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A new page; at the end nothing was complained of, and nothing asked of anybody else."""
    chromium.renew()
    yield chromium
    assert chromium.complaints == []
    assert {address.partition(":")[0] for address in chromium.requests} <= {"file", "data"}
    assert len({a for a in chromium.requests if a.startswith("file:")}) <= 1


def made_page(
    tmp_path: Path, *, has_texts: bool = True, has_ended: bool = True, **run: object
) -> Path:
    """The page of a made-up run."""
    directory = MadeUpRun(**run).write(tmp_path / "run", has_ended=has_ended)  # type: ignore[arg-type]
    return write_report(directory, decode=load_decoder("simulated") if has_texts else None)


def opened(browser: Browser, name: str) -> None:
    """Open a trajectory by its link."""
    browser.run(f"location.hash = '#{quote(name, safe='')}'")
    browser.wait_for("!document.getElementById('trajectory').hidden")
    browser.wait_for(
        f"document.querySelector('#trajectory h1').textContent.startsWith('{name[:6]}')"
    )


def matched(browser: Browser) -> str:
    return str(browser.run("document.getElementById('matched').textContent"))


def names_shown(browser: Browser) -> list[str]:
    script = (
        "[...document.querySelectorAll('#rows .row > span:first-child')].map(e => e.textContent)"
    )
    return list(browser.run(script))


def test_page_opened_shows_what_the_run_was(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_page(tmp_path))

    text = browser.run("document.getElementById('overview').innerText")
    for part in (
        "40", "of 10 prompts", "mean reward", "simulated", "Findings", "Nothing stands out",
        "Rewards", "Sampled tokens", "Turns", "Outcomes", "Throughput", "In flight", "The tail",
        "search", "replica-0", "replica-1",
    ):  # fmt: skip
        assert part in text
    assert browser.run("document.querySelectorAll('svg.chart').length") >= 7
    assert matched(browser) == "40 trajectories"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("task-3/2", ["task-3/2"]),
        ("uid:task-1 reward>0.5", ["task-1/1", "task-1/3"]),
        ("uid=task-1 -reward:1 seconds<100", ["task-1/0", "task-1/2"]),
        ("tool:search replica:replica-1 uid=task-2", ["task-2/1", "task-2/3"]),
        ("uid:task-1|task-2 member=0|3", ["task-1/0", "task-1/3", "task-2/0", "task-2/3"]),
        ('uid=task-1 task:"harbour 5?"|"nowhere | else"', ["task-1/1"]),
        ("-outcome:completed|none uid:task-0", ["task-0/0", "task-0/1", "task-0/2"]),
    ],
)
def test_table_filtered_shows_what_matches(
    browser: Browser, tmp_path: Path, query: str, expected: list[str]
) -> None:
    browser.open(made_page(tmp_path, cut=3))

    browser.run("document.getElementById('search').focus()")
    browser.type(query)

    assert names_shown(browser) == expected
    assert matched(browser) == f"{len(expected)} of 40 trajectories"


@pytest.mark.parametrize(
    ("query", "shown"), [("reward>0 reward<0.001", "0.000012"), ("reward>1000000", "1,234,568")]
)
def test_rewards_of_any_size_are_shown(
    browser: Browser, tmp_path: Path, query: str, shown: str
) -> None:
    browser.open(made_page(tmp_path, rewards=(0.00001234, 1234567.8)))

    browser.run("document.getElementById('search').focus()")
    browser.type(query)

    assert names_shown(browser)
    assert shown in browser.run("document.querySelector('#rows').textContent")


def test_search_in_all_texts_finds_what_only_a_tool_said(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_page(tmp_path, result="the needle is here"))
    browser.run("document.getElementById('search').focus()")
    browser.type("needle")
    assert matched(browser) == "0 of 40 trajectories"

    browser.run("document.getElementById('deep').click()")

    browser.wait_for("document.getElementById('matched').textContent === '40 trajectories'")


def test_keys_alone_reach_a_trajectory_and_return(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_page(tmp_path))

    browser.press("/")
    browser.type("task-5")
    browser.press("Enter")  # to the table
    browser.press("ArrowDown")
    browser.press("j")
    browser.press("Enter")
    browser.wait_for("location.hash === '#task-5%2F2'")
    browser.wait_for("!document.getElementById('trajectory').hidden")
    browser.press("l")
    assert browser.run("document.getElementById('trajectory').dataset.colouring") == "log_prob"
    browser.press("j")
    browser.wait_for("location.hash === '#task-5%2F3'")
    browser.press("Escape")
    browser.wait_for("!document.getElementById('overview').hidden")
    assert browser.run("document.activeElement.id") == "grid"
    assert browser.run("document.querySelector('.row.at span').textContent") == "task-5/3"

    browser.press("?")
    assert browser.run("document.getElementById('help').open")


def test_trajectory_opened_shows_turns_tokens_calls_and_times(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(made_page(tmp_path))

    opened(browser, "task-3/2")

    text = browser.run("document.getElementById('trajectory').innerText")
    for part in (
        "boats 14",
        "found",
        "turn 1",
        "turn 2",
        "Let me look it up.",
        "There are 98",
        "50 ms",
    ):
        assert part in text
    assert browser.run("document.querySelectorAll('.waterfall rect').length") >= 8
    generated = browser.run("document.querySelectorAll('.generated .k').length")
    assert generated == len("Let me look it up. " * 5) + len("There are 98 of them.")
    step = "document.querySelector('.generated .k:nth-child(11)').dataset"
    assert browser.run(f"{step}.lp") == "-1.000"
    assert browser.run(f"{step}.version") == "3"
    assert (
        browser.run("document.querySelectorAll('.generated .k[data-version=\"4\"]').length") == 21
    )


@pytest.mark.parametrize("key", ["mask", "log_prob", "version"])
def test_tokens_are_coloured_by(browser: Browser, tmp_path: Path, key: str) -> None:
    browser.open(made_page(tmp_path))
    opened(browser, "task-3/2")

    browser.run(f"document.querySelector('button[data-colouring={key}]').click()")

    colours = (
        "new Set([...document.querySelectorAll('.generated .k')]"
        ".map(e => getComputedStyle(e).backgroundColor)).size"
    )
    assert browser.run(colours) == {"mask": 1, "log_prob": 6, "version": 2}[key]
    prompt = "getComputedStyle(document.querySelector('.tokens.prompt .k')).backgroundColor"
    assert browser.run(prompt) == "rgba(0, 0, 0, 0)"


def test_markup_of_a_model_stays_text(browser: Browser, tmp_path: Path) -> None:
    page = made_page(tmp_path, result=HOSTILE)
    browser.open(page)

    opened(browser, "task-3/2")

    results = "[...document.querySelectorAll('.call pre')].map(e => e.textContent)"
    assert HOSTILE.replace("\u202e", "⟨U+202E⟩") in browser.run(results)
    observed = "document.querySelector('.tokens.observation').textContent"
    assert "<script>document.title = 'taken'</script>" in browser.run(observed)
    assert "⟨U+202E⟩" in browser.run(observed) or "202" in browser.run(observed)
    assert browser.run("document.title") == "run"
    assert (
        browser.run("document.querySelectorAll('img, #trajectory script, #trajectory b b').length")
        == 0
    )
    assert HOSTILE[:20] not in page.read_text(encoding="utf-8")


def test_script_that_is_not_the_pages_own_does_not_run(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_page(tmp_path))

    browser.run(
        "(() => { const own = document.createElement('script'); own.textContent = "
        "'document.title = `taken`'; document.body.append(own); })()"
    )

    assert browser.run("document.title") == "run"
    refused = browser.run("fetch('data:,x').then(() => 'let through', () => 'refused')")
    assert refused == "refused"
    assert len(browser.complaints) >= 2
    browser.complaints.clear()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_theme_follows_the_system_and_the_key(browser: Browser, tmp_path: Path, theme: str) -> None:
    browser.prefer(theme)
    browser.open(made_page(tmp_path))
    lightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
        ".reduce((all, each) => all + Number(each), 0)"
    )

    assert (browser.run(lightness) > 380) == (theme == "light")
    browser.press("t")
    assert browser.run(lightness) > 380
    browser.press("t")
    assert browser.run(lightness) < 380


def test_finding_leads_to_the_trajectories_that_it_means(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_page(tmp_path, cut=6))

    assert "60 %" in browser.run("document.querySelector('#findings li h3').textContent")
    browser.run("document.querySelector('#findings li button').click()")

    assert matched(browser) == "24 of 40 trajectories"


def test_page_without_a_tokenizer_shows_texts_of_spans_and_ids(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(made_page(tmp_path, has_texts=False))

    opened(browser, "task-3/2")

    assert "Let me look it up." in browser.run("document.querySelector('.generated').innerText")
    assert browser.run("document.querySelector('.generated .ids code').textContent").startswith(
        "76 "
    )


def test_page_of_a_run_that_grows_can_be_kept_loading(browser: Browser, tmp_path: Path) -> None:
    browser.open(made_page(tmp_path, has_ended=False))

    assert "still running" in browser.run("document.getElementById('top').innerText")
    browser.run("document.getElementById('reload').click()")
    browser.wait_for("performance.getEntriesByType('navigation')[0]?.type === 'reload'")


@pytest.mark.parametrize("width", [360, 1280])
def test_page_is_never_wider_than_its_window(browser: Browser, tmp_path: Path, width: int) -> None:
    page = made_page(tmp_path, result=HOSTILE * 20)
    browser.resize(width, 800)
    browser.open(page)
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

    assert browser.run(too_wide) <= 0
    opened(browser, "task-3/2")
    assert browser.run(too_wide) <= 0


#: Of each segment its title, and headings of its parts with what stands in its calls.
SEGMENTS = """[...document.querySelectorAll('section.segment')].map((segment) => [
    segment.querySelector('h2').firstChild.textContent,
    ...[...segment.querySelectorAll('.generated header, .call')].map((part) => part.innerText),
].join(' | ').replace(/\\s+/g, ' '))"""


def test_turns_of_every_segment_stand_above_their_own_calls(
    browser: Browser, tmp_path: Path
) -> None:
    directory = write_segments(tmp_path / "run")
    browser.open(write_report(directory, decode=load_decoder("simulated")))

    opened(browser, "several/0")

    shown = {text.partition(" |")[0]: text for text in browser.run(SEGMENTS)}
    for title, parts in {
        "Segment 0: main": ["turn 1", "alpha", '"x": 1', "says 1", "turn 2", "alpha", '"x": 2'],
        "Segment 1: compaction": ["turn 3", "alpha", '"x": 3', "alpha says 3", "turn 4"],
        "Segment 2: branch": ["turn 1", "beta", '"x": 20', "beta says 20", '"x": 21', "turn 2"],
        "Segment 3: subagent": ["turn 1", "beta", '"x": 10', "beta says 10", "turn 2"],
    }.items():
        assert re.search(".*".join(map(re.escape, parts)), shown[title], re.S)


def test_times_are_of_the_segment_whose_turn_it_was(browser: Browser, tmp_path: Path) -> None:
    name = "several/0"
    directory = write_segments(tmp_path / "run")
    browser.open(write_report(directory))

    opened(browser, name)

    script = "[...document.querySelectorAll('.waterfall .lane')].map(e => e.textContent)"
    assert browser.run(script) == [
        *("Segment 0: main", "turn 1", "turn 1 alpha", "turn 2", "turn 2 alpha"),
        *("Segment 1: compaction", "turn 3", "turn 3 alpha", "turn 4"),
        *("Segment 2: branch", "turn 1", "turn 1 beta", "turn 2"),
        *("Segment 3: subagent", "turn 1", "turn 1 beta", "turn 2"),
        *("The trajectory", "reward"),
    ]
    shown = browser.run(SEGMENTS)
    assert ["alpha 1,000 ms" in text or "alpha 1 s" in text for text in shown] == [1, 1, 0, 0]
    assert ["beta 2 s" in text for text in shown] == [0, 0, 1, 1]
    turns = [re.findall(r"turn (\d) (\d+) tokens .*? prefill (\d+) ms", text) for text in shown]
    numbers = ["".join(turn for turn, *_ in each) for each in turns]
    assert numbers == ["12", "34", "12", "12"]
    # As events have them, in order, one request for each turn.
    requests = [
        (each.session.partition("/0#")[2], each.prefill_s * 1000)
        for each in read_events(directory)
        if isinstance(each, RequestEnded) and name in each.session
    ]
    main, branch, helper = ([ms for of, ms in requests if of == path] for path in ("", "0", "1"))
    for found, expected in zip(turns, (main[:2], main[2:], branch, helper), strict=True):
        assert [int(ms) for _, _, ms in found] == pytest.approx(expected, abs=1)


def test_failures_lead_to_those_that_failed_or_were_rejected(
    browser: Browser, tmp_path: Path
) -> None:
    directory = MadeUpRun(cut=5).write(tmp_path)
    path = directory / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for at, outcome, reason in (
        (5, "failed", "tool"),
        (6, "rejected", "too_long"),
        (7, "deadline", "tool"),
        (8, "failed", "tokenization"),
        (9, "cancelled", ""),
    ):
        line = lines[at].replace(b'"completed"', f'"{outcome}"'.encode())
        line = line.replace(b'"reason":""', f'"reason":"{reason}"'.encode())
        lines[at] = line.replace(b'"trainable":true', b'"trainable":false')
    path.write_bytes(b"".join(lines))
    browser.open(write_report(directory))

    browser.run("document.querySelector('[data-kind=failures] button').click()")

    assert names_shown(browser) == ["task-1/1", "task-1/2"]


@pytest.mark.parametrize(
    "rewards",
    [
        (0.0, 1.0),
        (0.1, 0.2, 0.3, 0.6, 0.7, 1.1),
        (-1.0, -0.3333, 0.0, 0.0007, 4.9999),
    ],
)
def test_bars_that_are_clicked_show_the_trajectories_that_they_count(
    browser: Browser, tmp_path: Path, rewards: tuple[float, ...]
) -> None:
    browser.open(made_page(tmp_path, rewards=rewards, equal=0))

    bars = "[...document.querySelectorAll('.plots figure:first-child .bar')]"
    found = browser.run(
        f"{bars}.map((bar) => {{ bar.dispatchEvent(new MouseEvent('click', {{bubbles: true}})); "
        "return document.getElementById('matched').textContent; })"
    )

    counted = [int(text.split()[0]) for text in found]
    assert min(counted) > 0
    assert sum(counted) == 40
    ticks = "[...document.querySelectorAll('.plots figure:first-child .tick')]"
    labels = browser.run(
        f"{ticks}.filter(e => e.getAttribute('y') === '162').map(e => e.textContent)"
    )
    assert len(set(labels)) == len(labels) > 1
