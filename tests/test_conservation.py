"""Conservation laws and determinism: random batches under random faults, limits, cancellations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from harness.recorder import Recorder
from harness.token_accounting import balance_of
from rollout import Outcome
from rollout.batch.records import trajectory_line
from rollout.chat.transcript import Transcript
from rollout.testing import run_virtual
from trials import CEILING_S, TIMED, GroupTrial, Trial, findings

#: Trials of each kind in `make test`; the schedules that each of its seeds is tried under.
CI_TRIALS = 4
FULL_TRIALS = 2000
GROUP_TRIALS = 800
#: Trials of one test.
SHARE = 20
CI_SCHEDULES, SCHEDULES = 2, 20


@pytest.fixture(autouse=True)
def silent_library() -> Iterator[None]:
    """Failures that are meant to happen are not worth a line each."""
    logger = logging.getLogger("rollout")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


def calm_run(seed: int, *, schedule_seed: int = 0, kind: type[Trial] = Trial) -> Recorder:
    """A trial with nothing that disturbs or cuts it."""
    recorder = Recorder()
    run_virtual(kind(seed).run_calmly, recorder, seed=schedule_seed)
    assert recorder.anomalies() == []
    return recorder


def transcripts(recorder: Recorder) -> dict[str, Transcript]:
    """Every transcript that was delivered and does not depend on time, by session."""
    return {
        segment.session_id or call.session_of(trajectory): segment.transcript
        for each in recorder.runtimes
        for call in each.calls
        for trajectory in call.delivered
        for segment in trajectory.segments
        if trajectory.prompt is not None and trajectory.prompt.agent_name not in TIMED
    }


def differences(seed: int, disturbed: Recorder, kind: type[Trial]) -> list[str]:
    """Trajectories that did not say what they say undisturbed, as far as they came."""
    calm = {name: t.ids_bytes() for name, t in transcripts(calm_run(seed, kind=kind)).items()}
    found = []
    for call in disturbed.runtimes[0].calls:
        for trajectory in call.delivered:
            for segment in trajectory.segments:
                name = segment.session_id or call.session_of(trajectory)
                ends = [span.finish_reason for span in segment.transcript.generated_spans()]
                # A branch that a length cuts ends no trajectory, and a calm trial has more room.
                is_whole = trajectory.outcome is Outcome.COMPLETED and ends[-1:] != ["length"]
                ids = segment.transcript.ids_bytes()
                if name not in calm:
                    continue
                if calm[name] != ids if is_whole else not calm[name].startswith(ids):
                    found.append(f"{name} ({trajectory.outcome}) says something else undisturbed")
    return found


def check_trials(seeds: range, kind: type[Trial] = Trial) -> None:
    for seed in seeds:
        found, recorder = findings(seed, schedule_seed=seed, kind=kind)
        found += differences(seed, recorder, kind)
        for each in recorder.runtimes:
            balance = balance_of(each)
            if each.is_settled and not balance.is_even:
                found.append(f"the books do not balance: {balance}")
        assert found == [], f"trial {seed} ({kind(seed).act}):\n" + "\n".join(found)


def test_random_trial_conservation_laws_hold() -> None:
    check_trials(range(CI_TRIALS))


def test_random_trial_of_groups_conservation_laws_hold() -> None:
    check_trials(range(CI_TRIALS), GroupTrial)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, GROUP_TRIALS, SHARE))
def test_random_trial_of_groups_conservation_laws_hold_in_full(first: int) -> None:
    check_trials(range(first, first + SHARE), GroupTrial)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FULL_TRIALS, SHARE))
def test_random_trial_conservation_laws_hold_in_full(first: int) -> None:
    check_trials(range(first, first + SHARE))


def everything(recorder: Recorder) -> list[bytes]:
    """Tensors and trajectories, with metrics and times, to the byte."""
    found = []
    for each in recorder.runtimes:
        for call in each.calls:
            found += [trajectory_line(trajectory, None) for trajectory in call.delivered]
            if call.batch is not None:
                tensors = sorted(call.batch.tensors.items())
                found += [name.encode() + value.numpy().tobytes() for name, value in tensors]
                found.append(repr(sorted(call.batch.metrics.items())).encode())
    return found


def check_schedules(seed: int, count: int) -> None:
    """One schedule seed gives the same bytes twice; every one the same tokens undisturbed."""
    undisturbed = transcripts(calm_run(seed))
    for schedule in range(count):
        runs = []
        for _ in range(2):
            recorder = Recorder()
            run_virtual(Trial(seed).run, recorder, seed=schedule, ceiling_s=CEILING_S)
            runs.append(everything(recorder))
        assert runs[0] == runs[1], f"trial {seed}, schedule {schedule}: two runs differ"
        calm = transcripts(calm_run(seed, schedule_seed=schedule))
        for name, transcript in undisturbed.items():
            assert calm[name].ids_bytes() == transcript.ids_bytes(), (seed, schedule, name)
            assert (calm[name].log_probs() == transcript.log_probs()).all()


def test_schedule_seed_gives_the_same_bytes_and_any_the_same_tokens() -> None:
    check_schedules(0, CI_SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_schedule_seed_gives_the_same_bytes_and_any_the_same_tokens_in_full(seed: int) -> None:
    check_schedules(seed, SCHEDULES)
