import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slivertune.core.atomic import atomic_file, atomic_folder, atomic_new_folder, explain_write_errors, write_json
from tests.helpers.faults import names

SIZE = 512 * 1024
LARGE = torch.zeros(SIZE, dtype=torch.int32)
"""2 MiB, on a disk of half a MiB."""


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of half a MiB, where this user may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("this user can't mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


WRITERS: list[Callable[[Path], object]] = [
    lambda path: torch.save({"a": LARGE}, path),
    lambda path: save_file({"a": LARGE}, path),
    lambda path: path.write_bytes(LARGE.numpy().tobytes()),
]


@pytest.mark.parametrize("write", WRITERS, ids=["torch", "safetensors", "python"])
def test_a_disk_that_is_really_full_is_named_with_what_was_needed_and_what_was_free(
    write: Callable[[Path], object], small_disk: Path
) -> None:
    target = small_disk / "state"
    with atomic_file(target) as path:
        path.write_text("old")
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    with (
        pytest.raises(OSError, match="could not be written: No space left on device") as caught,
        atomic_file(target, needs_bytes=LARGE.nbytes) as path,
    ):
        write(path)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value).startswith(f"[Errno 28] {target} could not be written")
    assert f"It needs {LARGE.nbytes:,} bytes, and {small_disk} had {free:,} free. Free space there" in str(caught.value)
    assert target.read_text() == "old"
    assert names(small_disk) == ["state"]
    folder = small_disk / "folder"
    with atomic_folder(folder) as new:
        (new / "a").write_text("old")

    def write_in(new: Path) -> None:
        (new / "sub").mkdir()
        write(new / "sub" / "state")

    for make, place in ((atomic_folder, folder), (atomic_new_folder, small_disk / "other")):
        with (
            pytest.raises(OSError, match=f"{place} could not be written: No space .* needs more than "),
            make(place) as new,
        ):
            write_in(new)
        assert (folder / "a").read_text() == "old"
        assert names(small_disk) == ["folder", "state"]
    (folder / "a").unlink()
    folder.rmdir()


LIMITED = """
import errno, resource, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from slivertune.core.atomic import atomic_file

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
large = torch.zeros(limit)
for number, write in enumerate((
    lambda path: torch.save(large, path),
    lambda path: save_file({"a": large}, path),
    lambda path: path.write_bytes(large.numpy().tobytes()),
)):
    try:
        with atomic_file(Path("state"), needs_bytes=large.nbytes) as path:
            write(path)
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        assert "state could not be written: File too large" in str(error), error
        assert f"It needs {large.nbytes:,} bytes" in str(error), error
    else:
        raise AssertionError("written")
    assert list(Path().iterdir()) == [], list(Path().iterdir())
"""


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(2**18)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    for make, place, kind, text in (
        (atomic_folder, "mine", NotADirectoryError, "Not a directory .*needs a folder"),
        (atomic_folder, "mine/deep/model", OSError, ".*needs a folder .*mine/deep in which"),
        (atomic_file, "mine/facts.json", OSError, ""),
        (atomic_file, "absent/facts.json", FileNotFoundError, "No such file or directory"),
        (atomic_file, "folder", IsADirectoryError, "Is a directory"),
    ):
        with pytest.raises(kind, match=f"{place} could not be written: {text}"):
            make(tmp_path / place).__enter__()
    assert (tmp_path / "mine").read_text() == "mine"
    assert names(tmp_path) == ["folder", "mine"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody can write in, not even root."""
    folder = tmp_path / "read only"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "a").write_text("old")
    mount = f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}'"
    if subprocess.run(mount, shell=True, check=False, capture_output=True).returncode:
        if os.geteuid() == 0:
            pytest.skip("this root can't mount")
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_in_is_named(read_only: Path) -> None:
    for write in (
        lambda: write_json(read_only / "a.json", {}),
        lambda: atomic_folder(read_only / "model").__enter__(),
        lambda: atomic_new_folder(read_only / "new").__enter__(),
    ):
        with pytest.raises(OSError, match=r"read only/.* could not be written: .*\. It needs a folder .*read only in "):
            write()
    assert (read_only / "model" / "a").read_text() == "old"


def test_what_has_another_cause_passes_as_it_is(tmp_path: Path) -> None:
    elsewhere = tmp_path / "sources" / "absent"
    for error in (
        FileNotFoundError(errno.ENOENT, "No such file", str(elsewhere)),
        FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "model.json.old")),
        ConnectionError("lost"),
        BlockingIOError(errno.EAGAIN, "again"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("(os error 28)"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as caught, explain_write_errors(tmp_path / "model.json"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
        "PytorchStreamWriter failed writing central directory: file write failed",
    ],
)
def test_what_torchs_writer_says_without_a_reason_is_explained(message: str, tmp_path: Path) -> None:
    said = pytest.raises(OSError, match=r"model could not be written: .*torch\.save")
    with said as caught, explain_write_errors(tmp_path / "model"):
        raise RuntimeError(message)
    assert caught.value.errno == errno.EIO


def test_an_error_is_explained_once_and_for_what_the_user_asked_for(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_folder(tmp_path / "model") as new:
            write_json(new / "facts.json", {})
            with atomic_file(new / "state"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = rf"^.Errno 28. {tmp_path}/model could not be written: No space left on device\. It needs "
    with pytest.raises(OSError, match=expected):
        write()
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_what_was_explained_passes_through_the_blocks_around_it(number: int, tmp_path: Path) -> None:
    def write() -> None:
        with explain_write_errors(tmp_path / "state"):
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match="state could not be written") as caught, atomic_folder(tmp_path / "model"):
        write()
    assert str(caught.value).count("could not be written") == 1 and caught.value.errno == number
