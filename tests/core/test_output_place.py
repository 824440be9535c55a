import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from slivertune.core.output_place import check_file_place, check_place


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    Path("gone").symlink_to("nowhere")


@pytest.mark.parametrize("place", ["new", "new/er/still", "folder", "folder/new", ".", "new/../other", "../beside"])
def test_a_place_where_a_folder_can_be_is_left_as_it_was(place: str) -> None:
    before = sorted(Path("..").rglob("*"))
    check_place(Path(place))
    check_file_place(Path(place) / "x.png", "--plot")
    assert sorted(Path("..").rglob("*")) == before


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file", "--out file is a file. Name a folder"),
        ("file/new/er", "--out file/new/er lies under"),
        ("gone", "--out gone is a link that leads nowhere"),
        ("gone/new", "gone, which is a link that leads nowhere"),
        ("new/" + "x" * 256, "can't be a folder: File name too long. Name another"),
        ("/".join(["y" * 200] * 30), "can't be a folder: File name too long. Name another"),
        ("a\0b", "can't be a folder: embedded null byte"),
    ],
)
def test_a_place_where_none_can_be_is_refused_and_left_as_it_was(place: str, said: str) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises((ValueError, FileExistsError), match=re.escape(said)):
        check_place(Path(place), "--out")
    assert sorted(Path().rglob("*")) == before


def test_a_full_disk_is_said_with_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("tempfile.TemporaryDirectory", Mock(side_effect=full))
    with pytest.raises(
        ValueError, match=r"output_dir new could not be written: No space left on device\. .* or name an"
    ):
        check_place(Path("new"))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("folder", "--plot folder is a folder. Name a file in it"),
        ("file/x.png", "--plot file is a file. Name a folder"),
        ("x" * 256 + ".png", "can't be a file: File name too long. Name another"),
    ],
)
def test_a_file_that_can_not_be_written_is_refused(file: str, said: str) -> None:
    with pytest.raises((ValueError, FileExistsError), match=re.escape(said)):
        check_file_place(Path(file), "--plot")
