"""The names under which another process finds what the main module has."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TRAIN = """
from rollout.user_code import function_ref
from {helper} import VALUE
def score(trajectory):
    return VALUE
ref = function_ref(score)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    directory = tmp_path / "trained"
    directory.mkdir()
    (directory / "__init__.py").touch()
    (directory / "helper.py").write_text("VALUE = 2.5\n")
    for name in ("train.py", "__main__.py"):
        (directory / name).write_text(TRAIN.format(helper=".helper"))
    return directory


@pytest.mark.parametrize(
    ("ran", "module"), [("trained.train", "trained.train"), ("trained", "trained.__main__")]
)
def test_function_of_a_module_run_by_its_name_is_found_by_it(
    package: Path, ran: str, module: str
) -> None:
    ref = runpy.run_module(ran, run_name="__main__", alter_sys=True)["ref"]
    assert (ref.module, ref.qualname) == (module, "score")


def test_function_of_a_directory_that_is_run_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "helper_of_directory.py").write_text("VALUE = 2.5\n")
    main = tmp_path / "__main__.py"
    main.write_text(TRAIN.format(helper="helper_of_directory"))
    ref = runpy.run_path(str(tmp_path), run_name="__main__")["ref"]
    assert (ref.module, ref.file) == ("", str(main))
