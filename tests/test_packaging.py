"""What users are told to install is this project, and not another one of the same name."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: ``pip install "name[extra,extra]"``, whatever the quotes.
WITH_EXTRAS = re.compile(r"pip install [^\n]*?['\"]?([\w./-]+)\[([\w,]+)\]")


def texts() -> list[Path]:
    folders = ("src", "docs", "benchmarks", "examples", "conf", "changelog.d")
    found = [path for name in folders for path in (ROOT / name).rglob("*")]
    return [ROOT / "README.md", *(path for path in found if path.suffix in (".py", ".md"))]


def test_distribution_has_a_name_of_its_own_and_the_import_stays() -> None:
    assert PROJECT["name"] == "rollout-rl"  # `rollout` on the public index is another package
    assert PROJECT["scripts"] == {"rollout": "rollout.cli:main"}
    assert (ROOT / "src" / "rollout" / "__init__.py").is_file()


def test_every_text_that_says_pip_install_names_this_distribution_and_an_extra_of_it() -> None:
    said = {
        (path.relative_to(ROOT).as_posix(), name, extra)
        for path in texts()
        for name, extras in WITH_EXTRAS.findall(path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert len(said) > 8
    own = {name for _, name, _ in said}
    known = set(PROJECT["optional-dependencies"])
    assert own <= {"rollout-rl", ".", "/path/to/checkout", "dist/rollout_rl-0.1.0-py3-none-any.whl"}
    assert [entry for entry in said if entry[2] not in known] == []


def test_no_text_tells_to_install_the_other_package() -> None:
    wrong = re.compile(r"pip install [^\n]*?(?<![\w/-])rollout(?![\w/-])")
    assert [path for path in texts() if wrong.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
@pytest.mark.xdist_group("seen")
def test_groups_of_tests_are_seen_by_what_spreads_them(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@seen")
