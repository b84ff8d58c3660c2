"""The report of a run: its findings, its page as a file, and the command that writes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import observed
from report_runs import MadeUpRun, data_of, findings, page_of, unpacked
from rollout import RolloutBatch, open_rollout
from rollout.batch.records import trajectory_from_line
from rollout.cli import main
from rollout.config import ObserveConfig, SchedulingConfig, SimulatedEngine
from rollout.engine.model_files import load_decoder
from rollout.errors import RolloutError
from rollout.observe import read_events
from rollout.observe.event_file import EVENTS
from rollout.observe.events import RequestEnded
from rollout.observe.report import RunReport, write_report
from rollout.observe.report.page import embedded
from rollout.observe.report.token_texts import TokenTexts
from rollout.testing import Scenario, run_virtual, tool_call

DECODE = load_decoder("simulated")


@pytest.mark.parametrize(
    ("fault", "kind", "title"),
    [
        ({"tool_s": 6.0}, "slow_tool", "The tool 'search' is slow: it takes 70 % of"),
        ({"shares": (15, 1)}, "starved_replica", "Replica replica-1 is starved"),
        (
            {"replicas": 4, "shares": (37, 1, 1, 1)},
            "starved_replica",
            "3 of 4 replicas are starved: each has 0.3 requests at once, others have 11.7",
        ),
        (
            {"refuses": True},
            "failing_replica",
            "Replica replica-2 gave no token for 80 of 80 requests",
        ),
        ({"blocked_s": 0.4}, "blocked_loop", "The event loop was blocked for 3.2 s"),
        ({"losses": 3}, "flapping_replica", "Replica replica-1 flaps: it was lost 3 times"),
        ({"losses": 1}, "lost_replica", "Replica replica-1 was lost 1 time"),
        ({"cut": 6}, "truncated", "A majority of trajectories (60 %) were cut by length"),
        ({"equal": 9}, "no_signal", "90 % of groups give no signal"),
        ({"unparsed": 9}, "calls_not_parsed", "47 % of calls could not be parsed"),
        ({"drifting": 3}, "drift", "Text and tokens drift apart in 30 % of trajectories"),
        (
            {"drifting": 1, "compared": 4},
            "drift",
            "Text and tokens drift apart in 4 of 16 trajectories that were compared",
        ),
    ],
)
def test_finding_of_a_planted_fault_comes_first(
    tmp_path: Path, fault: dict[str, Any], kind: str, title: str
) -> None:
    first = findings(MadeUpRun(**fault).write(tmp_path))[0]

    assert first[0] == kind
    assert first[1].startswith(title)


@pytest.mark.parametrize(
    "size",
    [{"groups": 2}, {"groups": 4, "equal": 3}, {"groups": 40, "replicas": 4}, {"unparsed": 2}],
)
def test_findings_of_a_healthy_run_are_none(tmp_path: Path, size: dict[str, int]) -> None:
    assert findings(MadeUpRun(**size).write(tmp_path)) == []


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        ({"compared": 2}, "agree in all 20 trajectories that were compared, of 100, and"),
        ({"compared": 0}, "texts and tokens were not compared (agent.tokenization_check), and"),
    ],
)
def test_page_of_a_healthy_run_says_how_many_texts_were_compared(
    tmp_path: Path, compared: dict[str, int], said: str
) -> None:
    directory = MadeUpRun(groups=25, **compared).write(tmp_path)
    assert said in data_of(page_of(directory))["looked_for"]


def test_findings_of_few_trajectories_on_many_replicas_are_none(tmp_path: Path) -> None:
    turns = [tool_call("add", a=turn, b=1) for turn in range(7)]
    scenario = Scenario(seed=1).reply("please", turns[0], filler=150)
    for turn in (*turns[1:], "It is 8."):
        scenario = scenario.then(turn)
    config = scenario.timing(base_s=0.02).config(
        engine=SimulatedEngine(replicas=8),
        scheduling=SchedulingConfig(samples_per_prompt=16),
        observe=ObserveConfig(path=str(tmp_path)),
    )

    async def body() -> RolloutBatch:
        async with open_rollout(config, [observed.add]) as runtime:
            return await runtime.generate(observed.prompts("sum please sum"))

    run_virtual(body).save(tmp_path)

    requests = [each for each in read_events(tmp_path) if isinstance(each, RequestEnded)]
    assert len(requests) == 8 * 16
    assert len({each.replica for each in requests}) < 8
    assert findings(tmp_path) == []


def test_findings_do_not_take_pauses_of_python_for_a_blocked_loop(tmp_path: Path) -> None:
    run = MadeUpRun(blocked_s=0.11, blocked_by="Python collected garbage for 0.11 s")
    assert findings(run.write(tmp_path)) == []


def test_findings_of_several_faults_begin_with_what_causes_others(tmp_path: Path) -> None:
    run = MadeUpRun(blocked_s=0.4, tool_s=6.0, cut=6, equal=9)

    kinds = [kind for kind, _ in findings(run.write(tmp_path))]

    assert kinds == ["blocked_loop", "slow_tool", "truncated", "no_signal"]


def test_findings_without_events_are_of_what_trajectories_say(tmp_path: Path) -> None:
    directory = MadeUpRun(tool_s=6.0, cut=6).write(tmp_path)
    (directory / EVENTS).unlink()

    kinds = [kind for kind, _ in findings(directory)]

    assert kinds == ["slow_tool", "truncated"]


def test_page_packs_every_token_with_its_log_prob(tmp_path: Path) -> None:
    directory = MadeUpRun().write(tmp_path)
    lines = (directory / "trajectories.jsonl").read_bytes().splitlines()
    transcript = trajectory_from_line(lines[14]).transcript

    facts, planes = unpacked(page_of(directory, decode=DECODE), "t14")

    size, sampled = len(transcript), transcript.generated_length
    lanes = np.frombuffer(planes[: 3 * size], np.uint8).reshape(3, size).astype(np.uint32)
    assert (lanes[0] | lanes[1] << 8 | lanes[2] << 16).tolist() == transcript.ids().tolist()
    rest = np.frombuffer(planes[3 * size :], np.uint8).reshape(2, sampled).astype(np.uint32)
    log_probs = transcript.log_probs()[transcript.mask() == 1]
    assert (rest[0] | rest[1] << 8) / -1000 == pytest.approx(log_probs, abs=0.0006)
    kinds = [span["kind"] for span in facts["segments"][0]["spans"]]
    assert kinds == ["prompt", "generated", "observation", "generated"]


def test_page_is_closed_against_everything_but_its_own_script(tmp_path: Path) -> None:
    page = page_of(MadeUpRun(result="</script><script>alert(1)</script>").write(tmp_path))

    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert "alert(1)" not in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


@pytest.mark.parametrize("text", ["</script>", "<!--", "\u2028"])
def test_text_embedded_in_the_page_is_read_back_and_closes_nothing(text: str) -> None:
    told = embedded({"text": text})

    assert json.loads(told) == {"text": text}
    assert not set("<>&\u2028") & set(told)


def test_uid_that_is_markup_stays_data(tmp_path: Path) -> None:
    directory = MadeUpRun(groups=2).write(tmp_path / "<b>run & co")
    path = directory / "trajectories.jsonl"
    path.write_bytes(path.read_bytes().replace(b"task-1", b"<img src=x>"))

    page = page_of(directory)

    assert "<img src=x>" not in page
    assert "<title>&lt;b&gt;run &amp; co</title>" in page
    assert "<img src=x>" in data_of(page)["rows"]["uid"]


def test_report_written_again_takes_in_what_has_come_since(tmp_path: Path) -> None:
    directory = MadeUpRun().write(tmp_path, has_ended=False)
    path = directory / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10]) + lines[10][:50])
    report = RunReport(directory)

    first = data_of(report.write().read_text())
    assert (len(first["rows"]["uid"]), first["is_growing"]) == (10, True)
    with path.open("ab") as file:
        file.write(lines[10][50:] + b"".join(lines[11:20]))
    assert len(data_of(report.write().read_text())["rows"]["uid"]) == 20
    MadeUpRun().write(tmp_path / "saved")
    (tmp_path / "saved" / "trajectories.jsonl").replace(path)
    (directory / "meta.json").write_text("{}")
    last = data_of(report.write().read_text())
    assert len(last["rows"]["uid"]) == 40
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


def test_report_of_a_run_without_events_or_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    directory = MadeUpRun().write(tmp_path)
    (directory / EVENTS).unlink()

    data = data_of(page_of(directory))

    assert data["series"]["step"] == 0
    assert any("tokenizer" in note for note in data["notes"])
    assert any(EVENTS in note for note in data["notes"])
    assert "No events were recorded" in data["looked_for"]


def test_report_of_a_run_that_has_only_begun_is_a_page_too(tmp_path: Path) -> None:
    directory = MadeUpRun(groups=1).write(tmp_path, has_ended=False)
    (directory / "trajectories.jsonl").unlink()
    lines = (directory / EVENTS).read_bytes().splitlines(keepends=True)
    begun = [line for line in lines if b'"trajectory_ended"' not in line]
    (directory / EVENTS).write_bytes(b"".join(begun))

    data = data_of(page_of(directory))

    assert data["rows"]["uid"] == []
    assert data["looked_for"] == "No trajectory has ended so far."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "expected the directory of a run"),
        (lambda path: path.mkdir(), "expected trajectories.jsonl or events.jsonl in it"),
    ],
)
def test_report_of_no_run_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "run")
    with pytest.raises(RolloutError, match=message):
        write_report(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"uid": 3}, ".*`str`"),
        ({"spans": [{"kind": "prompt", "ids": [-1]}]}, ".*-1 out of bounds"),
    ],
)
def test_report_of_a_line_that_is_no_trajectory_names_it(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    path = MadeUpRun(groups=1).write(tmp_path) / "trajectories.jsonl"
    line = json.dumps(json.loads(path.read_text().splitlines()[0]) | changes, ensure_ascii=False)
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(RolloutError, match=rf"trajectories.jsonl, line 5: {fault}"):
        write_report(path.parent)


def test_texts_of_tokens_keep_spaces_and_characters_of_several_tokens() -> None:
    pieces = {1: "a", 2: " b", 3: "\ufffd", 4: "\ufffd"}

    def decode(ids: Any) -> str:
        text = "".join(pieces[each] for each in ids).replace("\ufffd\ufffd", "é")
        return text.removeprefix(" ")  # as sentencepiece's tokenizers do

    texts = TokenTexts(decode)
    texts.see(np.array([1, 2, 3, 4], dtype=np.uint32))

    assert texts.table()["2"] == " b"
    assert texts.runs([1, 3, 4, 2, 3]) == [(1, 2, "é")]


def test_command_writes_the_page_and_says_what_it_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = MadeUpRun(cut=6).write(tmp_path / "run")

    assert main(["report", str(directory), "--out", str(tmp_path / "page.html")]) == 0

    said = capsys.readouterr().out
    assert str(tmp_path / "page.html") in said
    assert "severe    A majority of trajectories (60 %) were cut by length" in said
    assert "Let me" not in said
    assert unpacked((tmp_path / "page.html").read_text(), "texts")[0][str(ord("L"))] == "L"


def test_command_follows_a_run_until_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = MadeUpRun().write(tmp_path / "run", has_ended=False)
    pages = []

    def wait(seconds: float) -> None:
        pages.append(data_of((directory / "report.html").read_text())["is_growing"])
        if len(pages) == 3:
            MadeUpRun().write(directory)

    monkeypatch.setattr("rollout.cli.report.wait", wait)
    assert main(["report", str(directory), "--follow", "--every", "0.5"]) == 0

    assert pages == [True, True, True]
    assert not data_of((directory / "report.html").read_text())["is_growing"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "nowhere: expected the directory of a run"),
        (["{run}", "--tokenizer", "/no/model"], 2, "--tokenizer /no/model: "),
        (["{run}", "--out", "/no/folder/page.html"], 1, "cannot be written"),
    ],
)
def test_command_that_cannot_says_why(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    run = str(MadeUpRun(groups=1).write(tmp_path / "run"))

    assert main(["report", *(each.format(run=run) for each in arguments)]) == code

    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "inf", "soon"])
def test_command_refuses_seconds_that_are_none(
    capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    with pytest.raises(SystemExit):
        main(["report", "x", "--every", seconds])
    assert "expected seconds > 0" in capsys.readouterr().err


def test_report_of_a_run_that_did_not_come_to_save_shows_what_its_journal_has(
    tmp_path: Path,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "uid": "a"}\n{"prompt": "you", "uid": "b"}\n')
    config = tmp_path / "config.py"
    config.write_text(
        "from rollout import JournalConfig\n"
        "from rollout.testing import Scenario\n"
        f"journal = JournalConfig(path={str(tmp_path / 'elsewhere')!r})\n"
        'config = Scenario(seed=1).reply("", "Certainly.").config(journal=journal)\n'
    )
    directory = tmp_path / "out"
    command = ["run", str(config), "--prompts", str(prompts), "--out", str(directory)]
    assert main(command) == 0
    report = RunReport(directory)
    whole = data_of(report.write().read_text())["rows"]
    saved = directory / "trajectories.jsonl"
    aside = saved.rename(tmp_path / "aside.jsonl")
    growing = RunReport(directory)
    assert sorted(data_of(growing.write().read_text())["rows"]["uid"]) == ["a", "b"]
    assert sorted(data_of(growing.write().read_text())["rows"]["uid"]) == ["a", "b"]
    aside.rename(saved)
    assert data_of(growing.write().read_text())["rows"] == whole
