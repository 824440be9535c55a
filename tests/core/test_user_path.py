from pathlib import Path

import pytest

from slivertune.cli import main
from slivertune.core.user_path import user_path


def test_the_home_folder_is_put_in_and_other_paths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/a") == Path("/home/me/a")
    assert user_path("a/~b") == Path("a/~b")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--dataset", "~nobody-here/x.jsonl"],
        ["train", "~nobody-here/run.yaml"],
        ["train", "--output_dir", "~nobody-here/x"],
        ["plan", "--model", "~nobody-here/x"],
        ["compare", "--output_dir", "~nobody-here/x"],
    ],
)
def test_the_home_folder_of_an_unknown_user_is_one_line_and_code_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "~nobody-here" in error and "no user with this home folder" in error and error.count("\n") == 1
